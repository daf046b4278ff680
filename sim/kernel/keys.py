"""Keys of simulated nodes: a function of (seed, name), never of the machine's randomness.

One real Ed25519 verification costs as much as ten simulated events, and gossip verifies one
heartbeat at every node. So verdicts are remembered per simulation; above some hundreds of nodes
even the first verification of each heartbeat is too slow, and a keyed hash takes Ed25519's
place. Its secrets live in the simulation only: node code cannot forge it either.
"""

from __future__ import annotations

import hashlib
from random import Random
from typing import Final

from p2p.identity import (
    SEED_BYTES,
    SIGNATURE_BYTES,
    KeyPair,
    PeerId,
    Signer,
    signed_bytes,
    verify,
)

_MEMO_ENTRIES: Final = 32_768
"""Verdicts per generation; two generations are kept, about 20 MB with 211-byte heartbeats."""


def derive(size: int, *labels: object) -> bytes:
    """Return ``size`` bytes that are a function of the labels."""
    text = "\0".join(str(label) for label in labels).encode()
    return hashlib.blake2b(text, digest_size=size, person=b"shoal-sim").digest()


def derived_rng(*labels: object) -> Random:
    """Return a generator that is a function of the labels (seeded by an integer: strings cost a
    SHA-512).
    """
    return Random(int.from_bytes(derive(16, *labels), "big"))


class HashSigner:
    """A `Signer` whose signatures are keyed hashes: 1 µs instead of 40."""

    __slots__ = ("_peer_id", "_secret")

    def __init__(self, seed: bytes) -> None:
        self._secret = seed
        self._peer_id = PeerId.from_public_key(derive(SEED_BYTES, "public", seed.hex()))

    @property
    def peer_id(self) -> PeerId:
        """Identity that it signs for."""
        return self._peer_id

    def sign(self, domain: str, payload: bytes) -> bytes:
        """Return 64 bytes that only the owner of the secret, or the simulation, can make."""
        data = signed_bytes(domain, payload)
        return hashlib.blake2b(data, key=self._secret, digest_size=SIGNATURE_BYTES).digest()


class KeyRing:
    """All signers of a simulation, and the verifier of their signatures."""

    def __init__(self, seed: int, *, hashed: bool) -> None:
        """Begin without signers; ``hashed`` chooses keyed hashes instead of Ed25519."""
        self._seed = seed
        self._hashed = hashed
        self._signers: dict[PeerId, HashSigner] = {}
        self._young: dict[tuple[PeerId, str, bytes, bytes], bool] = {}
        self._old: dict[tuple[PeerId, str, bytes, bytes], bool] = {}
        self.verified = 0
        """Signatures that were really verified, not remembered."""

    def signer(self, name: str) -> Signer:
        """Return the signer of the node called ``name``."""
        seed = derive(SEED_BYTES, "key", self._seed, name)
        if not self._hashed:
            return KeyPair(seed)
        signer = HashSigner(seed)
        self._signers[signer.peer_id] = signer
        return signer

    def verify(self, peer: PeerId, domain: str, payload: bytes, signature: bytes, /) -> bool:
        """Return True if ``signature`` is ``peer``'s over ``payload`` under ``domain`` (a
        `Verify`)."""
        if self._hashed:
            signer = self._signers.get(peer)
            return signer is not None and signer.sign(domain, payload) == signature
        key = (peer, domain, payload, signature)
        verdict = self._young.get(key)
        if verdict is not None:
            return verdict
        verdict = self._old.get(key)
        if verdict is None:
            self.verified += 1
            verdict = verify(peer, domain, payload, signature)
        if len(self._young) >= _MEMO_ENTRIES:
            self._old, self._young = self._young, {}
        self._young[key] = verdict
        return verdict
