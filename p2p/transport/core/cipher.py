"""ChaCha20-Poly1305 into buffers that the caller owns, from whichever library is fastest here.

`cryptography` seals 64 KiB at twice libsodium's rate but is an optional extra; libsodium is
always there, since PyNaCl signs for us. Both write straight into the caller's memory and
release the GIL.
"""

from __future__ import annotations

from typing import Any, Final

import nacl._sodium as _sodium  # type: ignore[import-not-found, unused-ignore]

from p2p.errors import RemoteProtocolError

KEY_BYTES: Final = 32
"""Bytes of a ChaCha20-Poly1305 key (RFC 8439, which also gives the next)."""
TAG_BYTES: Final = 16
"""Bytes of the tag, by which a sealed record is longer than its plaintext."""

Buffer = bytes | bytearray | memoryview


class SodiumAead:
    """A ChaCha20-Poly1305 key (RFC 8439), in the implementation of libsodium, called through
    PyNaCl's own binding. PyNaCl's public functions would copy twice."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        self._key = key

    def seal_into(
        self, nonce: bytes, plaintext: Buffer, associated: bytes, out: memoryview
    ) -> None:
        """Encrypt into ``out``, which is exactly `TAG_BYTES` longer than ``plaintext``."""
        ffi, lib = _sodium.ffi, _sodium.lib
        if len(out) != len(plaintext) + TAG_BYTES:
            raise ValueError(f"the output must have {len(plaintext) + TAG_BYTES} bytes")
        lib.crypto_aead_chacha20poly1305_ietf_encrypt(
            ffi.from_buffer(out),
            ffi.NULL,
            ffi.from_buffer(plaintext),
            len(plaintext),
            associated,
            len(associated),
            ffi.NULL,
            nonce,
            self._key,
        )

    def open_into(
        self, nonce: bytes, sealed: Buffer, associated: bytes, out: bytearray
    ) -> None:
        """Decrypt into ``out``, which is `TAG_BYTES` shorter than ``sealed``. Raise
        `RemoteProtocolError` on a forgery."""
        ffi, lib = _sodium.ffi, _sodium.lib
        if len(out) != len(sealed) - TAG_BYTES:
            raise ValueError(f"the output must have {len(sealed) - TAG_BYTES} bytes")
        failed = lib.crypto_aead_chacha20poly1305_ietf_decrypt(
            ffi.from_buffer(out),
            ffi.NULL,
            ffi.NULL,
            ffi.from_buffer(sealed),
            len(sealed),
            associated,
            len(associated),
            nonce,
            self._key,
        )
        if failed:
            raise RemoteProtocolError("a sealed message does not authenticate")


def _cryptography_aead() -> type[SodiumAead] | None:
    """Return the class for `cryptography`; None unless a version with in-place calls (47 or
    later) is installed."""
    try:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    except ImportError:
        return None
    if not hasattr(ChaCha20Poly1305, "encrypt_into"):
        return None

    class FastAead(SodiumAead):
        """The implementation of the package `cryptography`."""

        __slots__ = ("_cipher", "seal_into")

        def __init__(self, key: bytes) -> None:
            self._cipher: Any = ChaCha20Poly1305(key)
            self.seal_into: Any = self._cipher.encrypt_into

        def open_into(
            self, nonce: bytes, sealed: Buffer, associated: bytes, out: bytearray
        ) -> None:
            try:
                self._cipher.decrypt_into(nonce, sealed, associated, out)
            except InvalidTag:
                raise RemoteProtocolError("a sealed message does not authenticate") from None

    return FastAead


AEAD: Final = _cryptography_aead() or SodiumAead
"""The fastest implementation on this machine."""
