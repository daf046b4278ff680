"""Noise's symmetric state (revision 34, §5.1 and §5.2) for one XX handshake, without I/O."""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Final

import nacl.bindings
import nacl.exceptions

from p2p.errors import BadMessage, RemoteProtocolError
from p2p.transport.core.cipher import AEAD, TAG_BYTES, Aead

NONCE: Final = struct.Struct("<4xQ")
"""4 zero bytes and a 64-bit counter."""
_NAME: Final = b"Noise_XX_25519_ChaChaPoly_SHA256"


class Symmetric:
    """Chaining key, transcript hash and the cipher of the moment."""

    __slots__ = ("_chaining", "_cipher", "_hash", "_nonce")

    def __init__(self) -> None:
        self._chaining = self._hash = _NAME  # exactly 32 bytes: used as they are
        self._cipher: Aead | None = None
        self._nonce = 0
        self.mix_hash(b"")  # the prologue

    def mix_hash(self, data: bytes) -> None:
        """Add to the transcript."""
        self._hash = hashlib.sha256(self._hash + data).digest()

    def mix_key(self, secret: bytes) -> None:
        """Derive the next key from a shared secret."""
        self._chaining, key = _hkdf(self._chaining, secret)
        self._cipher = AEAD(key)
        self._nonce = 0

    def encrypt(self, plaintext: bytes) -> bytes:
        """Seal, once there is a key, and add to the transcript."""
        sealed = plaintext
        if self._cipher is not None:
            out = bytearray(len(plaintext) + TAG_BYTES)
            self._cipher.seal_into(
                NONCE.pack(self._nonce), plaintext, self._hash, memoryview(out)
            )
            self._nonce += 1
            sealed = bytes(out)
        self.mix_hash(sealed)
        return sealed

    def decrypt(self, sealed: bytes) -> bytes:
        """Open, once there is a key, and add to the transcript. Raises
        `RemoteProtocolError`.
        """
        plaintext = sealed
        if self._cipher is not None:
            if len(sealed) < TAG_BYTES:
                raise BadMessage("a handshake message is cut off")
            out = bytearray(len(sealed) - TAG_BYTES)
            self._cipher.open_into(NONCE.pack(self._nonce), sealed, self._hash, out)
            self._nonce += 1
            plaintext = bytes(out)
        self.mix_hash(sealed)
        return plaintext

    def split(self) -> tuple[bytes, bytes]:
        """The keys of the two directions, the initiator's first."""
        return _hkdf(self._chaining, b"")


def _hkdf(chaining: bytes, secret: bytes) -> tuple[bytes, bytes]:
    temporary = hmac.digest(chaining, secret, "sha256")
    first = hmac.digest(temporary, b"\x01", "sha256")
    return first, hmac.digest(temporary, first + b"\x02", "sha256")


def exchange(private: bytes, public: bytes) -> bytes:
    """X25519. Raises `RemoteProtocolError` on a key of low order."""
    try:
        return nacl.bindings.crypto_scalarmult(private, public)
    except nacl.exceptions.CryptoError:
        raise RemoteProtocolError("the peer's X25519 key is of low order") from None
