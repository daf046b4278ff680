"""The Noise handshake and its record layer."""

from __future__ import annotations

import hashlib
import struct

import nacl.bindings
import pytest
from hypothesis import given, strategies as st

from p2p.errors import BadMessage, RemoteProtocolError, WrongPeer
from p2p.identity import FOREIGN, KeyPair, ProtocolId
from p2p.protobuf import field
from p2p.transport.core import cipher
from p2p.transport.core.cipher import AEAD, SodiumAead
from p2p.transport.core.noise import (
    MAX_PLAINTEXT,
    NoiseHandshake,
    NoiseSession,
    StaticKey,
    decode_hello_untrusted,
    decode_public_key_untrusted,
)

# The whole handshake between fixed keys; the PyPI package noiseprotocol 0.3.1 makes the same
# bytes.
GOLDEN = "0452cfbe99eb62cf6965c17c3547ca45ad8b9d994a95616b1196fa3602928234"
ALICE, BOB, CAROL = (KeyPair(bytes([seed]) * 32) for seed in (1, 2, 3))
YAMUX, MPLEX = ProtocolId("/yamux/1.0.0"), ProtocolId("/mplex/6.7.0")


def static(key: KeyPair) -> StaticKey:
    return StaticKey.create(key, hashlib.sha256(key.seed).digest())


def pair(**options) -> tuple[NoiseHandshake, NoiseHandshake]:
    """An initiator Alice and a responder Bob."""
    muxers = options.pop("muxers", ((YAMUX,), (YAMUX,)))
    one = NoiseHandshake(
        static(ALICE), b"\x11" * 32, initiator=True, muxers=muxers[0], **options
    )
    other = NoiseHandshake(static(BOB), b"\x22" * 32, initiator=False, muxers=muxers[1])
    return one, other


def shake(one: NoiseHandshake, other: NoiseHandshake, step: int = 4096) -> bytes:
    """Carry bytes both ways until both are done; returns all of them."""
    transcript = b""
    while not (one.session and other.session):
        moved = False
        for source, target in ((one, other), (other, one)):
            data = source.data_to_send()
            transcript += data
            for start in range(0, len(data), step):
                target.receive_data(data[start : start + step])
                moved = True
        assert moved
    return transcript


def sessions() -> tuple[NoiseSession, NoiseSession]:
    one, other = pair()
    shake(one, other)
    return one.session, other.session


@pytest.mark.parametrize("step", [1, 7, 4096])
def test_both_sides_learn_who_the_other_is(step: int) -> None:
    one, other = pair(expected=BOB.peer_id)
    shake(one, other, step)
    assert one.session.hello.peer == BOB.peer_id
    assert other.session.hello.peer == ALICE.peer_id
    assert one.leftover == other.leftover == b""


def test_the_transcript_between_fixed_keys() -> None:
    one, other = pair()
    assert hashlib.sha256(shake(one, other)).hexdigest() == GOLDEN


def test_the_first_choice_of_the_initiator_wins() -> None:
    one, other = pair(muxers=((MPLEX, YAMUX), (YAMUX, MPLEX)))
    shake(one, other)
    assert one.muxer == other.muxer == MPLEX


@pytest.mark.parametrize("muxers", [((), (YAMUX,)), ((YAMUX,), ()), ((YAMUX,), (MPLEX,))])
def test_without_a_common_muxer_there_is_none(muxers) -> None:
    one, other = pair(muxers=muxers)
    shake(one, other)
    assert one.muxer is None
    assert other.muxer is None


def test_a_peer_offers_few_muxers() -> None:
    one, other = pair(muxers=([f"/{number}" for number in range(100)], (YAMUX,)))
    shake(one, other)
    assert len(other.session.hello.muxers) == 16


def test_we_refuse_ourselves() -> None:
    one = NoiseHandshake(static(ALICE), b"\x11" * 32, initiator=True)
    other = NoiseHandshake(static(ALICE), b"\x22" * 32, initiator=False)
    other.receive_data(one.data_to_send())
    with pytest.raises(WrongPeer):
        one.receive_data(other.data_to_send())


def shake_with_a_fault(message: int, position: int) -> None:
    """Flip a bit of one message, or of its last byte if it is shorter."""
    one, other = pair()
    for turn in range(3):
        source, target = (one, other) if turn % 2 == 0 else (other, one)
        data = bytearray(source.data_to_send())
        if turn == message:
            data[min(position, len(data) - 1)] ^= 1
        target.receive_data(bytes(data))


@pytest.mark.parametrize("message", [0, 1, 2])
def test_a_changed_bit_ends_the_handshake(message: int) -> None:
    for position in (3, 40, 60, 130):
        with pytest.raises(RemoteProtocolError):
            shake_with_a_fault(message, position)


def test_a_static_key_signed_by_another_identity_is_refused() -> None:
    stolen = StaticKey(
        static(ALICE).private, static(ALICE).public, static(CAROL).identity, CAROL.peer_id
    )
    one = NoiseHandshake(stolen, b"\x11" * 32, initiator=True)
    other = NoiseHandshake(static(BOB), b"\x22" * 32, initiator=False)
    other.receive_data(one.data_to_send())
    one.receive_data(other.data_to_send())
    with pytest.raises(BadMessage, match="does not cover"):
        other.receive_data(one.data_to_send())


def test_a_key_of_low_order_is_refused() -> None:
    _, other = pair()
    with pytest.raises(RemoteProtocolError, match="low order"):
        other.receive_data(struct.pack(">H", 32) + bytes(32))


def test_a_huge_handshake_message_is_refused_by_its_length() -> None:
    _, other = pair()
    with pytest.raises(BadMessage, match="handshake message"):
        other.receive_data(struct.pack(">H", 4097))


def test_other_kinds_of_identity_are_refused_by_name() -> None:
    rsa = field(1, 0) + field(2, bytes(270))
    with pytest.raises(BadMessage, match="Ed25519"):
        decode_public_key_untrusted(rsa)


def test_the_signature_covers_the_prefixed_static_key() -> None:
    public = nacl.bindings.crypto_scalarmult_base(b"\x05" * 32)
    key = field(1, 1) + field(2, ALICE.peer_id.public_key)
    right = field(1, key) + field(2, ALICE.sign(FOREIGN, b"noise-libp2p-static-key:" + public))
    assert decode_hello_untrusted(right, public).peer == ALICE.peer_id
    wrong = field(1, key) + field(2, ALICE.sign(FOREIGN, public))
    with pytest.raises(BadMessage):
        decode_hello_untrusted(wrong, public)


@given(st.lists(st.integers(0, MAX_PLAINTEXT), max_size=4), st.integers(1, 70_000))
def test_records_survive_any_split(sizes: list[int], step: int) -> None:
    one, other = sessions()
    plain = [bytes([index]) * size for index, size in enumerate(sizes)]
    wire = b""
    for piece in plain:
        record = bytearray(len(piece) + 18)
        assert one.seal_into(piece, memoryview(record)) == len(record)
        wire += record
    opened = []
    for start in range(0, len(wire), step):
        opened += other.receive_data(wire[start : start + step])
    assert opened == plain


def test_a_replayed_or_forged_record_is_refused() -> None:
    one, other = sessions()
    record = one.seal(b"once")
    other.receive_data(record)
    with pytest.raises(RemoteProtocolError):
        other.receive_data(record)
    one, other = sessions()
    forged = bytearray(one.seal(b"once"))
    forged[-1] ^= 1
    with pytest.raises(RemoteProtocolError):
        other.receive_data(bytes(forged))


def test_the_directions_have_keys_of_their_own() -> None:
    one, _ = sessions()
    with pytest.raises(RemoteProtocolError):
        one.receive_data(one.seal(b"mirror"))


@pytest.mark.parametrize("size", [0, 1, 1000, MAX_PLAINTEXT])
def test_both_libraries_make_the_same_bytes(size: int) -> None:
    data, nonce, key = bytes(size), bytes(range(12)), bytes(32)
    outputs = []
    for library in (AEAD, SodiumAead):
        out = bytearray(size + 16)
        library(key).seal_into(nonce, data, b"ad", memoryview(out))
        outputs.append(out)
        back = bytearray(size)
        library(key).open_into(nonce, out, b"ad", back)
        assert back == data
    assert outputs[0] == outputs[1]


def test_libsodium_checks_its_buffers_and_its_tags() -> None:
    aead = SodiumAead(bytes(32))
    with pytest.raises(ValueError, match="output"):
        aead.seal_into(bytes(12), b"abc", b"", memoryview(bytearray(3)))
    with pytest.raises(ValueError, match="output"):
        aead.open_into(bytes(12), bytes(19), b"", bytearray(4))
    with pytest.raises(RemoteProtocolError):
        aead.open_into(bytes(12), bytes(19), b"", bytearray(3))


def test_rfc_8439_vector() -> None:
    key = bytes(range(0x80, 0xA0))
    nonce = bytes.fromhex("070000004041424344454647")
    associated = bytes.fromhex("50515253c0c1c2c3c4c5c6c7")
    text = (
        b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the"
        b" future, sunscreen would be it."
    )
    out = bytearray(len(text) + cipher.TAG_BYTES)
    AEAD(key).seal_into(nonce, text, associated, memoryview(out))
    assert out[-16:].hex() == "1ae10b594f09e26a7e902ecbd0600691"
