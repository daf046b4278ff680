"""Whatever the bytes, the transport's machines raise what they promise, and nothing else."""

from __future__ import annotations

import contextlib
import hashlib

from hypothesis import given, strategies as st

from p2p.errors import BadMessage, ProtocolNotSupported, RemoteProtocolError
from p2p.identity import KeyPair, ProtocolId
from p2p.multiaddr import decode_multiaddr_untrusted
from p2p.transport.core.negotiate import Chooser, Proposer, line
from p2p.transport.core.noise import (
    Hello,
    NoiseHandshake,
    NoiseSession,
    StaticKey,
)
from p2p.transport.core.yamux import HEADER, Mux, ProtocolViolated
from p2p.wire import FrameParser, encode_varint, frame
from tests.fuzz.test_parsers import ALICE, BOB
from tests.support.foreign import damaged


@given(damaged(line("/multistream/1.0.0") + line("/a") + line("na")), st.integers(1, 50))
def test_negotiations(data: bytes, step: int) -> None:
    for machine in (
        Proposer(ProtocolId("/b")),
        Chooser({"/b"}.__contains__),
    ):
        with contextlib.suppress(RemoteProtocolError, ProtocolNotSupported):
            for start in range(0, len(data), step):
                machine.receive_data(data[start : start + step])
                machine.data_to_send()


def _static(key: KeyPair) -> StaticKey:
    return StaticKey.create(key, hashlib.sha256(key.seed).digest())


FIRST = NoiseHandshake(_static(ALICE), b"\x11" * 32, initiator=True).data_to_send()


@given(damaged(FIRST), st.booleans())
def test_handshakes(data: bytes, initiator: bool) -> None:
    machine = NoiseHandshake(_static(BOB), b"\x22" * 32, initiator=initiator)
    with contextlib.suppress(RemoteProtocolError):
        machine.receive_data(data)


@given(st.binary(max_size=200), st.integers(1, 50))
def test_records(data: bytes, step: int) -> None:
    session = NoiseSession(decode_hello(), bytes(32), bytes(32))
    with contextlib.suppress(RemoteProtocolError):
        for start in range(0, len(data), step):
            session.receive_data(data[start : start + step])


def decode_hello() -> Hello:
    one = NoiseHandshake(_static(ALICE), b"\x11" * 32, initiator=True)
    other = NoiseHandshake(_static(BOB), b"\x22" * 32, initiator=False)
    other.receive_data(one.data_to_send())
    one.receive_data(other.data_to_send())
    return one.session.hello


headers = st.builds(
    HEADER.pack,
    st.just(0) | st.integers(0, 255),
    st.integers(0, 4),
    st.integers(0, 15),
    st.integers(0, 6),
    st.integers(0, 40) | st.integers(0, 2**32 - 1),
)


@given(
    st.lists(headers | st.binary(max_size=20), max_size=20), st.integers(1, 100), st.booleans()
)
def test_yamux(pieces: list[bytes], step: int, dialer: bool) -> None:
    mux = Mux(dialer=dialer)
    mux.send(mux.open_stream(), memoryview(b"something"))
    data = b"".join(pieces)
    broken = False
    for start in range(0, len(data), step):
        for event in mux.receive_data(bytearray(data[start : start + step])):
            assert not broken, "an event after the violation"
            broken = isinstance(event, ProtocolViolated)
        for stream_id in mux.stream_ids[::2]:
            mux.send_end(stream_id)
            mux.stop_receiving(stream_id, unread=bool(stream_id % 3))
        mux.sweep()
    while mux.data_to_send():
        pass
    assert mux.data_to_send() is None
    mux.abandon()
    assert mux.stream_ids == ()


parts = st.sampled_from(
    [
        bytes.fromhex("0401020304"),
        b"\x29" + bytes(15) + b"\x01",
        bytes.fromhex("0610e1"),
        b"\x36\x04a.io",
        bytes.fromhex("8906") + bytes(8),
        encode_varint(421) + encode_varint(38) + ALICE.peer_id.digest,
    ]
)


@given(st.lists(parts, max_size=4))
def test_addresses_of_valid_parts_are_places_or_refused(pieces: list[bytes]) -> None:
    try:
        addr = decode_multiaddr_untrusted(b"".join(pieces))
    except BadMessage:
        return
    assert addr.transport.with_peer(BOB.peer_id).peer_id == BOB.peer_id
    assert addr.transport.parts[0][0] == "memory" or addr.host_port[1] == 4321


@given(st.lists(st.binary(max_size=60), max_size=6), st.integers(1, 40))
def test_a_frame_reader_holds_one_unfinished_frame(payloads: list[bytes], step: int) -> None:
    wire = b"".join(frame(payload) for payload in payloads)
    parser = FrameParser(60)
    found = []
    for start in range(0, len(wire), step):
        parser.feed(wire[start : start + step])
        while (payload := parser.next_frame()) is not None:
            found.append(payload)
        assert parser.pending <= 61
    assert found == payloads
