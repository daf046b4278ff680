"""Work stamps: proof of work that a place in the DHT costs (S/Kademlia's crypto puzzle).

Keys cost 16 microseconds each to mint, so a DHT id that follows from the key alone is free:
twenty ids nearer to a target than ten thousand honest nodes take three CPU seconds of minting.
Here a node's id is ``sha256(PeerId || nonce)[:20]``, and it counts only if a *second* hash of
the same two begins with ``difficulty`` zero bits. The id is known only once the work is done,
so choosing where to sit costs the work of one stamp for every try. A stamp is no secret and is
bound to nothing but the peer; it is made once and kept beside the key.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from itertools import count
from typing import Final

from p2p.identity import PeerId

ID_BYTES: Final = 20
"""Bytes of a DHT id: Kademlia's 160 bits."""
NONCE_BYTES: Final = 8
"""Bytes of a nonce. 2^64 nonces suffice for any difficulty that a laptop can reach."""
DIFFICULTY: Final = 20
"""Leading zero bits of a stamp: a million hashes, half a second on one 2.5 GHz core."""
MAX_DIFFICULTY: Final = 40
"""Maximum difficulty, which takes six days on one core. A higher one is a mistake in the
configuration, or in a run file."""

# 26 bytes: with a PeerId's 38 they fill one block of SHA-256, which is then hashed once for all
# tries.
_WORK_DOMAIN: Final = b"shoal-kad-stamp:work:1.0.0"


def dht_id(peer: PeerId, nonce: bytes) -> bytes:
    """Return the DHT id of ``peer`` with this stamp, of 20 bytes."""
    return sha256(peer.digest + nonce).digest()[:ID_BYTES]


def stamp_work(peer: PeerId, nonce: bytes) -> int:
    """Return the leading zero bits of the stamp's second hash."""
    return zero_bits(_WORK_DOMAIN + peer.digest, nonce)


def zero_bits(prefix: bytes, nonce: bytes) -> int:
    """Return the number of leading zero bits in the hash of ``prefix`` and ``nonce``."""
    return 256 - int.from_bytes(sha256(prefix + nonce).digest(), "big").bit_length()


def find_nonce(prefix: bytes, bits: int, numbers: Iterable[int]) -> bytes:
    """Return the first nonce among ``numbers`` that is worth ``bits``, or empty bytes."""
    # As bytes compare like big-endian numbers, "enough zero bits" is one comparison.
    limit = ((1 << (256 - bits)) - 1).to_bytes(32, "big")
    copy = sha256(prefix).copy
    for number in numbers:
        nonce = number.to_bytes(NONCE_BYTES, "big")
        attempt = copy()
        attempt.update(nonce)
        if attempt.digest() <= limit:
            return nonce
    return b""


def check_stamp(peer: PeerId, nonce: bytes, difficulty: int) -> bool:
    """Return True if ``nonce`` is worth ``difficulty`` bits of work for ``peer``."""
    return len(nonce) == NONCE_BYTES and stamp_work(peer, nonce) >= difficulty


def make_stamp(peer: PeerId, difficulty: int) -> bytes:
    """Return the first nonce worth ``difficulty`` bits. It is a pure function, for a worker
    thread.

    It takes 2^difficulty hashes on average, and now and then five times as many.

    Raises:
        ValueError: ``difficulty`` is not from 0 to `MAX_DIFFICULTY`.
    """
    if not 0 <= difficulty <= MAX_DIFFICULTY:
        most = MAX_DIFFICULTY
        raise ValueError(f"a stamp's difficulty is 0 to {most} bits, not {difficulty}")
    return find_nonce(_WORK_DOMAIN + peer.digest, difficulty, count())


def stamp_cost(bits: int, tries: int | None = None) -> float:
    """Return the average CPU seconds to find a stamp of ``bits``, or to try ``tries`` nonces if
    that is less: half a microsecond for each, as `World.run_blocking` is told."""
    expected = 1 << bits
    return 0.5e-6 * (expected if tries is None else min(expected, tries))
