"""A ticket: all that a puller needs to know, as one word that is copied from a terminal.

It names the pusher by its key, says where it listens, which content it pushes, and holds the
secret that lets a puller into the swarm. A ticket is not signed: a forged one leads to another
pusher's content, and so does any other word that a stranger sends. What comes by a ticket is
what that pusher signed.

Format: ``shoal1`` and base58 of msgpack [pusher's PeerId, addresses, secret, name, 1 for
a folder, version, manifest's digest] and the first four bytes of BLAKE3 of that, against slips
of copying.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from blake3 import blake3

from p2p.errors import BadMessage
from p2p.identity import PeerId, base58_decode, base58_encode, decode_peer_id_untrusted
from p2p.multiaddr import Multiaddr, decode_multiaddr_untrusted
from p2p.naming import MAX_NAME
from p2p.policy import MAX_POLICY, PolicyVersion
from p2p.shardcast.index import DIGEST_BYTES
from p2p.wire import fields_untrusted, pack, unpack_untrusted

PREFIX: Final = "shoal1"
SECRET_BYTES: Final = 16
"""Bytes of the join secret: 128 bits cannot be guessed."""
MAX_ADDRS: Final = 8
"""Addresses in a ticket: IPv4 and IPv6, of a few interfaces."""
MAX_TICKET: Final = 2048
"""Characters of a ticket; a usual one has 250. A terminal wraps it over four lines."""
_CHECK_BYTES: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """The content, its pusher, where to start, and the secret that admits a puller."""

    pusher: PeerId
    addrs: tuple[Multiaddr, ...]
    """Addresses of the pusher, without its id."""
    secret: bytes = field(repr=False)
    name: str
    """The name of the file or folder, without a path."""
    is_folder: bool
    version: PolicyVersion
    manifest: bytes
    """Digest of the manifest of that version."""

    def __post_init__(self) -> None:
        if len(self.secret) != SECRET_BYTES or len(self.manifest) != DIGEST_BYTES:
            raise ValueError("a ticket's secret or digest has the wrong length")
        if not is_name(self.name):
            raise ValueError(f"{self.name!r} names no file or folder")

    @property
    def run(self) -> bytes:
        """SHARDCAST's name for this push. It depends on the secret, so nobody without the
        ticket can name it."""
        return run_of(self.pusher, self.secret)

    def admission(self, peer: PeerId) -> bytes:
        """Return the proof that admits ``peer`` to the push."""
        return admission_of(self.secret, peer)

    def __str__(self) -> str:
        addrs = [addr.to_bytes() for addr in self.addrs[:MAX_ADDRS]]
        what = (self.name, int(self.is_folder), self.version, self.manifest)
        data = pack([self.pusher.digest, addrs, self.secret, *what])
        return PREFIX + base58_encode(data + blake3(data).digest()[:_CHECK_BYTES])


def is_name(name: str) -> bool:
    """Return True if this machine can create a file or folder of this name."""
    return (
        name.isprintable()  # half a character, which cannot be encoded, is not
        and 0 < len(name.encode()) <= MAX_NAME
        and not name.startswith((".", "-"))
        and not set(name) & set('/\\:*?"<>|')
    )


def run_of(pusher: PeerId, secret: bytes) -> bytes:
    """32 bytes that name a push."""
    return blake3(b"shoal cast run v1" + pusher.digest, key=secret + secret).digest()


def admission_of(secret: bytes, peer: PeerId) -> bytes:
    """The proof by which ``peer`` is let in: a MAC of its name."""
    # A heartbeat has room for eight bytes. They differ for each name, so who overhears them is
    # not admitted by them.
    return blake3(peer.digest, key=secret + secret).digest()[:8]


def decode_ticket_untrusted(text: str) -> Ticket:
    """Decode a ticket from its text. Raise `BadMessage`, and nothing else."""
    text = "".join(text.split())  # a terminal may have wrapped it
    if not text.startswith(PREFIX):
        raise BadMessage(f"a ticket begins with {PREFIX}")
    if len(text) > MAX_TICKET:
        raise BadMessage(f"a ticket has at most {MAX_TICKET} characters")
    try:
        data = base58_decode(text.removeprefix(PREFIX), MAX_TICKET)
    except ValueError as error:
        raise BadMessage(f"the ticket was not copied whole: {error}") from None
    body, check = data[:-_CHECK_BYTES], data[-_CHECK_BYTES:]
    if blake3(body).digest()[:_CHECK_BYTES] != check:
        raise BadMessage("the ticket was not copied whole: its check is wrong")
    pusher, addrs, secret, name, folder, version, manifest = fields_untrusted(
        unpack_untrusted(body), bytes, list, bytes, str, int, int, bytes, what="ticket"
    )
    if not (0 < len(addrs) <= MAX_ADDRS and 0 <= version <= MAX_POLICY):
        raise BadMessage("the ticket's addresses or version are out of bounds")
    try:
        return Ticket(
            pusher=decode_peer_id_untrusted(pusher),
            addrs=tuple(decode_multiaddr_untrusted(addr) for addr in addrs),
            secret=secret,
            name=name,
            is_folder=bool(folder),
            version=PolicyVersion(version),
            manifest=manifest,
        )
    except ValueError as error:
        raise BadMessage(f"the ticket makes no sense: {error}") from None
