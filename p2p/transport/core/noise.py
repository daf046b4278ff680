"""Noise XX as libp2p speaks it, without I/O: who is there, and a sealed record layer.

Theory of operation
-------------------
``Noise_XX_25519_ChaChaPoly_SHA256`` (noiseprotocol.org, revision 34; libp2p/specs/noise) in
three messages::

    initiator                                       responder
        e                                    ------->
             <-------       e, ee, s, es, payload
        s, se, payload                       ------->

Each message travels behind two bytes of big-endian length. The payload is a protobuf that binds
the Noise static key to the libp2p identity: the Ed25519 public key, its signature over
``noise-libp2p-static-key:`` and the static key, and, as an extension, the stream muxers on
offer. If both sides name one in common, the muxer needs no negotiation of its own and a round
trip is saved.

After the handshake every record is at most 65,535 bytes with its 16-byte tag. Nonces count from
0 in each direction: 4 zero bytes and 64 bits little endian. At 64 KiB a record they last longer
than the sun.

Noise's symmetric state (revision 34, §5.1 and §5.2) for one XX handshake, without I/O.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import nacl.bindings
import nacl.exceptions

from p2p import protobuf
from p2p.errors import BadMessage, RemoteProtocolError, WrongPeer
from p2p.identity import (
    FOREIGN,
    SIGNATURE_BYTES,
    PeerId,
    ProtocolId,
    Signer,
    decode_peer_id_untrusted,
    verify,
)
from p2p.transport.core.cipher import AEAD, KEY_BYTES, TAG_BYTES, Buffer, SodiumAead

NONCE: Final = struct.Struct("<4xQ")
"""Layout of a nonce: 4 zero bytes and a 64-bit counter."""


class Symmetric:
    """The chaining key, the transcript hash and the current cipher of a handshake."""

    __slots__ = ("_chaining", "_cipher", "_hash", "_nonce")

    def __init__(self) -> None:
        # The protocol's name has exactly 32 bytes, which are used as they are.
        self._chaining = self._hash = b"Noise_XX_25519_ChaChaPoly_SHA256"
        self._cipher: SodiumAead | None = None
        self._nonce = 0
        self.mix_hash(b"")  # the prologue

    def mix_hash(self, data: bytes) -> None:
        """Add ``data`` to the transcript hash."""
        self._hash = hashlib.sha256(self._hash + data).digest()

    def mix_key(self, secret: bytes) -> None:
        """Derive the next key from a shared secret."""
        self._chaining, key = _hkdf(self._chaining, secret)
        self._cipher = AEAD(key)
        self._nonce = 0

    def encrypt(self, plaintext: bytes) -> bytes:
        """Encrypt if there is a key already, and add the ciphertext to the transcript."""
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
        """Decrypt if there is a key already, and add the ciphertext to the transcript. Raise
        `RemoteProtocolError` on a forgery."""
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
        """Return the keys of the two directions, the initiator's first."""
        return _hkdf(self._chaining, b"")


def _hkdf(chaining: bytes, secret: bytes) -> tuple[bytes, bytes]:
    temporary = hmac.digest(chaining, secret, "sha256")
    first = hmac.digest(temporary, b"\x01", "sha256")
    return first, hmac.digest(temporary, first + b"\x02", "sha256")


def exchange(private: bytes, public: bytes) -> bytes:
    """Return the X25519 shared secret. Raise `RemoteProtocolError` on a key of low order."""
    try:
        return nacl.bindings.crypto_scalarmult(private, public)
    except nacl.exceptions.CryptoError:
        raise RemoteProtocolError("the peer's X25519 key is of low order") from None


PROTOCOL_ID: Final = ProtocolId("/noise")
MAX_RECORD: Final = 65_535
"""Most bytes of one Noise message, by its length field of two bytes."""
MAX_PLAINTEXT: Final = MAX_RECORD - TAG_BYTES

_SIGNATURE_PREFIX: Final = b"noise-libp2p-static-key:"
_KEY_ED25519: Final = 1
"""libp2p's number of Ed25519, the only kind of key that this node accepts."""
_LENGTH: Final = struct.Struct(">H")


@dataclass(frozen=True, slots=True)
class StaticKey:
    """A host's X25519 key, with the proof that it belongs to the host's identity. It is made
    once per host."""

    private: bytes
    public: bytes
    identity: bytes
    """The protobuf fields that prove the identity."""
    peer_id: PeerId

    @classmethod
    def create(cls, key: Signer, entropy: bytes) -> StaticKey:
        """Make a key from 32 random bytes of ``entropy``, which become the private key."""
        public = nacl.bindings.crypto_scalarmult_base(entropy)
        public_key = protobuf.field(1, _KEY_ED25519) + protobuf.field(2, key.peer_id.public_key)
        identity = protobuf.field(1, public_key) + protobuf.field(
            2, key.sign(FOREIGN, _SIGNATURE_PREFIX + public)
        )
        return cls(entropy, public, identity, key.peer_id)


@dataclass(frozen=True, slots=True)
class Hello:
    """The content of a verified handshake payload."""

    peer: PeerId
    muxers: tuple[ProtocolId, ...]


class NoiseHandshake:
    """One side of the three handshake messages: bytes go in by `receive_data` and out by
    `data_to_send`, and `session` is the result."""

    def __init__(
        self,
        static: StaticKey,
        ephemeral: bytes,
        *,
        initiator: bool,
        muxers: Sequence[ProtocolId] = (),
        expected: PeerId | None = None,
    ) -> None:
        """Start a handshake. ``ephemeral`` is 32 fresh random bytes; ``expected`` is the peer
        that must answer, if known."""
        self._static = static
        self._ephemeral = ephemeral
        self._initiator = initiator
        self._muxers = tuple(muxers)
        self._expected = expected
        self._symmetric = Symmetric()
        self._buffer = bytearray()
        self._out = bytearray()
        self._remote_ephemeral = b""
        self.session: NoiseSession | None = None
        """The record layer; None while the handshake is unfinished."""
        self.muxer: ProtocolId | None = None
        """The agreed muxer, which is the initiator's first choice that both have; None if there
        is none."""
        self._next: Callable[[bytes], None] | None = self._receive_first
        if initiator:
            public = nacl.bindings.crypto_scalarmult_base(self._ephemeral)
            self._symmetric.mix_hash(public)
            self._send(public + self._symmetric.encrypt(b""))
            self._next = self._receive_second

    @property
    def leftover(self) -> bytes:
        """Bytes that came behind the handshake and belong to the session."""
        return bytes(self._buffer)

    def data_to_send(self) -> bytes:
        """Return, and forget, the bytes to send to the peer now."""
        data = bytes(self._out)
        self._out.clear()
        return data

    def receive_data(self, data: Buffer) -> None:
        """Advance by received bytes, whatever they are.

        Raises:
            RemoteProtocolError: The handshake is malformed or forged.
            WrongPeer: Another peer than the expected one answered.
        """
        self._buffer += data
        while self._next is not None and len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            # One with an RSA identity, which we refuse anyway, has about 600 bytes.
            if length > 4096:
                raise BadMessage(f"a handshake message of {length} bytes (at most 4096)")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            message = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            self._next(message)

    def _send(self, message: bytes) -> None:
        self._out += _LENGTH.pack(len(message)) + message

    def _payload(self) -> bytes:
        muxers = b"".join(protobuf.field(2, muxer) for muxer in self._muxers)
        return self._static.identity + (protobuf.field(4, muxers) if muxers else b"")

    def _receive_first(self, message: bytes) -> None:
        if len(message) < KEY_BYTES:
            raise BadMessage("the first handshake message is cut off")
        symmetric = self._symmetric
        self._remote_ephemeral = message[:KEY_BYTES]
        symmetric.mix_hash(self._remote_ephemeral)
        symmetric.decrypt(message[KEY_BYTES:])
        public = nacl.bindings.crypto_scalarmult_base(self._ephemeral)
        symmetric.mix_hash(public)
        symmetric.mix_key(exchange(self._ephemeral, self._remote_ephemeral))
        sealed_static = symmetric.encrypt(self._static.public)
        symmetric.mix_key(exchange(self._static.private, self._remote_ephemeral))
        self._send(public + sealed_static + symmetric.encrypt(self._payload()))
        self._next = self._receive_third

    def _receive_second(self, message: bytes) -> None:
        static_end = KEY_BYTES + KEY_BYTES + TAG_BYTES
        if len(message) < static_end:
            raise BadMessage("the second handshake message is cut off")
        symmetric = self._symmetric
        self._remote_ephemeral = message[:KEY_BYTES]
        symmetric.mix_hash(self._remote_ephemeral)
        symmetric.mix_key(exchange(self._ephemeral, self._remote_ephemeral))
        remote_static = symmetric.decrypt(message[KEY_BYTES:static_end])
        symmetric.mix_key(exchange(self._ephemeral, remote_static))
        hello = self._check(symmetric.decrypt(message[static_end:]), remote_static)
        sealed_static = symmetric.encrypt(self._static.public)
        symmetric.mix_key(exchange(self._static.private, self._remote_ephemeral))
        self._send(sealed_static + symmetric.encrypt(self._payload()))
        self._finish(hello)

    def _receive_third(self, message: bytes) -> None:
        static_end = KEY_BYTES + TAG_BYTES
        if len(message) < static_end:
            raise BadMessage("the third handshake message is cut off")
        symmetric = self._symmetric
        remote_static = symmetric.decrypt(message[:static_end])
        symmetric.mix_key(exchange(self._ephemeral, remote_static))
        self._finish(self._check(symmetric.decrypt(message[static_end:]), remote_static))

    def _check(self, payload: bytes, remote_static: bytes) -> Hello:
        hello = decode_hello_untrusted(payload, remote_static)
        if self._expected is not None and hello.peer != self._expected:
            raise WrongPeer(f"dialled {self._expected}, but {hello.peer} answered")
        if hello.peer == self._static.peer_id:
            raise WrongPeer("we dialled ourselves, or a peer that uses our key")
        return hello

    def _finish(self, hello: Hello) -> None:
        first, second = self._symmetric.split()
        outgoing, incoming = (first, second) if self._initiator else (second, first)
        self.session, self._next = NoiseSession(hello, outgoing, incoming), None
        one, other = (self._muxers, hello.muxers)[:: 1 if self._initiator else -1]
        self.muxer = next((muxer for muxer in one if muxer in other), None)


class NoiseSession:
    """The record layer of one connection: seals what goes out, opens what comes in."""

    __slots__ = ("_incoming", "_opened", "_outgoing", "_sealed", "hello", "tail")

    def __init__(self, hello: Hello, outgoing: bytes, incoming: bytes) -> None:
        self.hello = hello
        self._outgoing = AEAD(outgoing)
        self._incoming = AEAD(incoming)
        self._sealed = 0
        self._opened = 0
        self.tail = bytearray()
        """The bytes of the unfinished record."""

    def seal_into(self, plaintext: Buffer, out: memoryview) -> int:
        """Write one record of at most `MAX_PLAINTEXT` bytes to the front of ``out``, and return
        its length."""
        length = len(plaintext) + TAG_BYTES
        _LENGTH.pack_into(out, 0, length)
        self._outgoing.seal_into(NONCE.pack(self._sealed), plaintext, b"", out[2 : 2 + length])
        self._sealed += 1
        return 2 + length

    def seal(self, plaintext: Buffer) -> bytes:
        """Return ``plaintext`` of any length as records. It is for the few places where speed
        does not matter."""
        out = bytearray()
        view = memoryview(plaintext)
        for start in range(0, len(view), MAX_PLAINTEXT):
            piece = view[start : start + MAX_PLAINTEXT]
            record = bytearray(2 + len(piece) + TAG_BYTES)
            self.seal_into(piece, memoryview(record))
            out += record
        return bytes(out)

    def receive_data(self, data: Buffer) -> list[bytearray]:
        """Decrypt every record that ``data`` completes, and return the plaintexts. Raise
        `RemoteProtocolError` on a forgery.

        Only an unfinished record is kept; ``data`` may be reused when this returns.
        """
        opened: list[bytearray] = []
        view = memoryview(data)
        if self.tail:
            view = self._complete_tail(view, opened)
        start, size = 0, len(view)
        while size - start >= 2:
            end = start + 2 + (view[start] << 8 | view[start + 1])
            if end > size:
                break
            opened.append(self._open(view[start + 2 : end]))
            start = end
        if start < size:
            self.tail += view[start:]
        return opened

    def _complete_tail(self, view: memoryview, opened: list[bytearray]) -> memoryview:
        """Complete the unfinished record from `view`, and return the rest of `view`."""
        tail = self.tail
        taken = 0
        if len(tail) < 2:
            taken = min(2 - len(tail), len(view))
            tail += view[:taken]
            if len(tail) < 2:
                return view[taken:]
        missing = 2 + (tail[0] << 8 | tail[1]) - len(tail)
        tail += view[taken : taken + missing]
        if len(view) - taken >= missing:
            with memoryview(tail) as whole, whole[2:] as sealed:
                opened.append(self._open(sealed))
            self.tail = bytearray()
        return view[taken + missing :]

    def _open(self, sealed: memoryview) -> bytearray:
        if len(sealed) < TAG_BYTES:
            raise RemoteProtocolError("a record is too short for its tag")
        plaintext = bytearray(len(sealed) - TAG_BYTES)
        self._incoming.open_into(NONCE.pack(self._opened), sealed, b"", plaintext)
        self._opened += 1
        return plaintext


def decode_hello_untrusted(payload: bytes, remote_static: bytes) -> Hello:
    """Decode a handshake payload, and check it against the Noise static key. Raise
    `BadMessage`, and nothing else."""
    key = signature = extensions = b""
    for number, value in protobuf.fields_untrusted(payload):
        if number == 1:
            key = protobuf.as_bytes_untrusted(value, "an identity key")
        elif number == 2:
            signature = protobuf.as_bytes_untrusted(value, "an identity signature")
        elif number == 4:
            extensions = protobuf.as_bytes_untrusted(value, "the extensions")
    peer = decode_public_key_untrusted(key)
    if len(signature) != SIGNATURE_BYTES or not verify(
        peer, FOREIGN, _SIGNATURE_PREFIX + remote_static, signature
    ):
        raise BadMessage("the identity's signature does not cover the Noise key")
    muxers = [
        ProtocolId(protobuf.as_text_untrusted(value, "a muxer's name"))
        for number, value in protobuf.fields_untrusted(extensions)
        if number == 2
    ]
    # Names of muxers a peer may offer; two exist (yamux, mplex), and each is looked at.
    return Hello(peer, tuple(muxers[:16]))


def decode_public_key_untrusted(data: bytes) -> PeerId:
    """Return the PeerId of a libp2p protobuf public key, Ed25519 only. Raise `BadMessage`, and
    nothing else."""
    kind, key = -1, b""
    for number, value in protobuf.fields_untrusted(data):
        if number == 1:
            kind = protobuf.as_int_untrusted(value, "a key type")
        elif number == 2:
            key = protobuf.as_bytes_untrusted(value, "a public key")
    if kind != _KEY_ED25519 or len(key) != KEY_BYTES:
        raise BadMessage(
            "the peer's identity is not an Ed25519 key, the only kind that Shoal accepts"
        )
    return decode_peer_id_untrusted(PeerId.from_public_key(key).digest)
