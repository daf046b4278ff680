"""Identities: an Ed25519 key, its libp2p name, and signatures with a domain.

A `PeerId` is libp2p's: the identity multihash of the protobuf-encoded public key
(specs/peer-ids), so the name *is* the key and needs no look-up. Everything signed
is signed with a domain, the protocol id, in front: a heartbeat can never be replayed as a
manifest.
"""

from __future__ import annotations

import functools
from typing import Final, NewType, Protocol, Self

import nacl.exceptions
import nacl.signing

from p2p.door import check
from p2p.errors import BadMessage

ProtocolId = NewType("ProtocolId", str)
"""The wire name of a protocol, such as ``/shoal/heartbeat/1.0.0``."""

SIGNATURE_BYTES: Final = 64
"""Bytes of an Ed25519 signature."""
SEED_BYTES: Final = 32
"""Bytes of an Ed25519 secret key; both keys derive from it."""
# Multihash identity (0x00), 36 bytes; protobuf: field 1 varint 1 (Ed25519), field 2 of 32
# bytes.
_PEER_ID_PREFIX: Final = bytes.fromhex("002408011220")
PEER_ID_BYTES: Final = len(_PEER_ID_PREFIX) + 32
"""Bytes of a PeerId: 38, six of prefix and the key itself."""

_BASE58: Final = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


def base58_encode(data: bytes) -> str:
    """Encode bytes in Bitcoin's base 58."""
    number = int.from_bytes(data, "big")
    digits = []
    while number:
        number, digit = divmod(number, 58)
        digits.append(_BASE58[digit])
    zeros = len(data) - len(data.lstrip(b"\0"))
    return "1" * zeros + "".join(reversed(digits))


def base58_decode(text: str, most: int = 128) -> bytes:
    """Decode base 58. Raise `ValueError` if ``text`` is not base 58 or longer than ``most``, as
    the decoder is quadratic. A PeerId has 52 characters."""
    if len(text) > most:
        raise ValueError(f"base58 text of {len(text)} characters is too long (at most {most})")
    number = 0
    for character in text:
        digit = _BASE58.find(character)
        if digit < 0:
            raise ValueError(f"{character!r} is not a base58 character")
        number = number * 58 + digit
    zeros = len(text) - len(text.lstrip("1"))
    return b"\0" * zeros + number.to_bytes((number.bit_length() + 7) // 8, "big")


class PeerId(bytes):
    """The identity multihash of a peer's public key: the only name a peer has.

    It *is* its bytes: peers key every table of a node, and a hash that is computed once and
    compared in C makes those several times faster than a class with a field. Raises
    `ValueError` on other bytes.
    """

    __slots__ = ()

    def __new__(cls, digest: bytes) -> Self:
        """Make a PeerId of the bytes of an identity multihash."""
        if not isinstance(digest, bytes):
            check("digest", digest, bytes)
        if len(digest) != PEER_ID_BYTES or not digest.startswith(_PEER_ID_PREFIX):
            raise ValueError(
                "a PeerId is the identity multihash of an Ed25519 public key (38 bytes)"
            )
        return super().__new__(cls, digest)

    @classmethod
    def from_public_key(cls, public_key: bytes) -> PeerId:
        """Return the PeerId of an Ed25519 key, given as its 32 raw bytes."""
        check("public_key", public_key, bytes)
        return cls(_PEER_ID_PREFIX + public_key)

    @classmethod
    def from_base58(cls, text: str) -> PeerId:
        """Decode a base58 Ed25519 PeerId (12D3Koo...). Raise `ValueError` if ``text`` is
        none."""
        check("text", text, str)
        return _from_base58(text)

    @property
    def digest(self) -> bytes:
        """The multihash, as plain bytes."""
        return bytes(self)

    @property
    def public_key(self) -> bytes:
        """The 32 raw bytes of the Ed25519 key."""
        return self[len(_PEER_ID_PREFIX) :]

    @property
    def short(self) -> str:
        """The last six characters, by which people tell peers apart."""
        return str(self)[-6:]

    def __str__(self) -> str:
        return _to_base58(self)

    def __repr__(self) -> str:
        text = str(self)
        return f"PeerId({text[:4]}…{text[-4:]})"


# The same few are converted again and again; 4,096 in both forms take 1 MiB.
@functools.lru_cache(4096)
def _from_base58(text: str) -> PeerId:
    return PeerId(base58_decode(text))


@functools.lru_cache(4096)
def _to_base58(digest: bytes) -> str:
    return base58_encode(digest)


def decode_peer_id_untrusted(data: object) -> PeerId:
    """Decode a PeerId. Raise `BadMessage`, and nothing else, whatever ``data`` is."""
    if not isinstance(data, bytes):
        raise BadMessage("a PeerId must be bytes")
    try:
        return PeerId(data)
    except ValueError as error:
        raise BadMessage(str(error)) from None


class Signer(Protocol):
    """An object that signs for this node: a key in memory, or the simulator."""

    @property
    def peer_id(self) -> PeerId:
        """The peer whose signatures this makes."""

    def sign(self, domain: str, payload: bytes) -> bytes:
        """Return the signature of ``payload``, valid under ``domain`` only."""


class Verify(Protocol):
    """Verifies signatures. Cores get one passed in, so that a simulator can cache verdicts."""

    def __call__(self, peer: PeerId, domain: str, payload: bytes, signature: bytes, /) -> bool:
        """Return True if ``signature`` is ``peer``'s signature of ``payload`` under
        ``domain``."""


FOREIGN: Final = ""
"""The domain of foreign protocols, whose payloads bring a prefix of their own
(``libp2p-pubsub:``).
"""


def signed_bytes(domain: str, payload: bytes) -> bytes:
    """Return the bytes that are actually signed: a fixed prefix, the domain with its length,
    and the payload.

    Under `FOREIGN` they are the payload alone.
    """
    return payload if domain == FOREIGN else _domain_prefix(domain) + payload


# Domains whose prefix is remembered: one for each kind of thing that a node signs.
@functools.lru_cache(64)
def _domain_prefix(domain: str) -> bytes:
    name = domain.encode()
    return b"shoal-signature:" + len(name).to_bytes(2, "big") + name


class KeyPair:
    """An Ed25519 key pair (a `p2p.identity.Signer`)."""

    __slots__ = ("_key", "_peer_id")

    def __init__(self, seed: bytes) -> None:
        check("seed", seed, bytes)
        if len(seed) != SEED_BYTES:
            raise ValueError(f"an Ed25519 seed is {SEED_BYTES} bytes, not {len(seed)}")
        self._key = nacl.signing.SigningKey(seed)
        self._peer_id = PeerId.from_public_key(bytes(self._key.verify_key))

    @property
    def seed(self) -> bytes:
        """The secret seed: 32 bytes from which both keys are derived."""
        return bytes(self._key)

    @property
    def peer_id(self) -> PeerId:
        """The peer id of the public key."""
        return self._peer_id

    def sign(self, domain: str, payload: bytes) -> bytes:
        """Return the 64-byte signature of ``payload``, valid under ``domain`` only."""
        check("domain", domain, str)
        check("payload", payload, bytes)
        return self._key.sign(signed_bytes(domain, payload)).signature

    def __repr__(self) -> str:
        return f"KeyPair({self._peer_id!r})"


def verify(peer: PeerId, domain: str, payload: bytes, signature: bytes) -> bool:
    """Return True if ``signature`` is ``peer``'s signature of ``payload`` under ``domain``.
    This is the real `Verify`."""
    try:
        key = nacl.signing.VerifyKey(peer.public_key)
        key.verify(signed_bytes(domain, payload), signature)
    except (nacl.exceptions.BadSignatureError, ValueError, nacl.exceptions.CryptoError):
        return False
    return True
