"""What a node's heartbeats show for it: a place in the DHT, an invite, work for the run.

In an open run everybody may come who pays. The stamp of the DHT (`p2p.dht.stamp`) is what a
member pays, once for all runs. A run may ask those who submit work for another, its *work
stamp*: of as many bits as its owner likes, bound to the run and the identity, so that ten fresh
names cost ten stamps in each run. Whom the run file names, or an invite admits, pays neither.

A heartbeat has one field for all of it, with the stamp of the DHT alone in the form that it
always had.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Final

from p2p.dht.stamp import NONCE_BYTES, SECONDS_PER_TRY
from p2p.errors import BadMessage
from p2p.identity import PeerId
from p2p.node.invite import MAX_PASS
from p2p.wire import fields_untrusted, pack, unpack_untrusted

MAX_SHOWN: Final = MAX_PASS + 2 * NONCE_BYTES + 16
"""Bytes of a credential: a pass, two nonces and framing."""
MAX_STAMP_BITS: Final = 40
"""Beyond six days on one core a work stamp is a mistake in the run file."""
TRIES: Final = 1 << 20
"""Nonces that are tried between two looks at the clock: half a second."""

_WORK_DOMAIN: Final = b"shoal-run-stamp:1.0.0"


@dataclass(frozen=True, slots=True)
class Credential:
    """The parts that there are; each is empty if the node needs none."""

    stamp: bytes = b""
    """The nonce of the DHT's stamp."""
    invite: bytes = b""
    """A `Pass`, encoded."""
    work: bytes = b""
    """The nonce of the run's work stamp."""

    def to_bytes(self) -> bytes:
        """The form in a heartbeat."""
        if not self.invite and not self.work:
            return self.stamp
        return pack([self.stamp, self.invite, self.work])


def decode_credential_untrusted(data: bytes) -> Credential:
    """Raise `BadMessage`, and nothing else, whatever the bytes. What the parts are worth is
    judged by others."""
    if len(data) <= NONCE_BYTES:
        return Credential(stamp=data)
    if len(data) > MAX_SHOWN:
        raise BadMessage(f"a credential has at most {MAX_SHOWN} bytes")
    stamp, invite, work = fields_untrusted(
        unpack_untrusted(data), bytes, bytes, bytes, what="credential"
    )
    if max(len(stamp), len(work)) > NONCE_BYTES or len(invite) > MAX_PASS:
        raise BadMessage("a part of a credential is too long")
    return Credential(stamp, invite, work)


def work_untrusted(data: bytes) -> bytes:
    """The work stamp in what a peer shows; empty if there is none, whatever the bytes."""
    try:
        return decode_credential_untrusted(data).work
    except BadMessage:
        return b""


def work_bits(run: bytes, peer: PeerId, nonce: bytes) -> int:
    """How many zero bits the hash of a work stamp begins with; one hash."""
    if len(nonce) != NONCE_BYTES:
        return 0
    digest = sha256(_WORK_DOMAIN + run + peer.digest + nonce).digest()
    return 256 - int.from_bytes(digest, "big").bit_length()


def work_cost(bits: int, tries: int | None = None) -> float:
    """CPU seconds that a work stamp takes on average, or so many tries of it."""
    expected = 1 << bits
    return SECONDS_PER_TRY * (expected if tries is None else min(expected, tries))


def find_work(run: bytes, peer: PeerId, bits: int, first: int) -> bytes:
    """The first nonce worth ``bits`` of the `TRIES` from ``first`` on, or nothing: a pure
    function, for a worker thread."""
    limit = ((1 << (256 - bits)) - 1).to_bytes(32, "big")
    copy = sha256(_WORK_DOMAIN + run + peer.digest).copy
    for number in range(first, first + TRIES):
        nonce = number.to_bytes(NONCE_BYTES, "big")
        attempt = copy()
        attempt.update(nonce)
        if attempt.digest() <= limit:
            return nonce
    return b""
