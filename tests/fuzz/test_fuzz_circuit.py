"""Whatever the bytes, the parsers of circuits and AutoNAT raise `BadMessage` or nothing."""

from __future__ import annotations

import contextlib

from hypothesis import given

from p2p.circuit.messages import (
    MAX_ADDRS,
    HolePunch,
    HopMessage,
    HopType,
    Limit,
    PunchType,
    Reservation,
    StopMessage,
    StopType,
    check_voucher_untrusted,
    decode_hop_untrusted,
    decode_punch_untrusted,
    decode_stop_untrusted,
    sign_voucher,
)
from p2p.errors import BadMessage
from p2p.identity import KeyPair
from p2p.multiaddr import Multiaddr
from p2p.reach.messages import (
    DialDataRequest,
    DialDataResponse,
    DialRequest,
    DialResponse,
    decode_dial_back_untrusted,
    decode_untrusted,
    encode_dial_back,
)
from tests.fuzz.test_fuzz_transport import ALICE, BOB, mutated

CIRCUIT = Multiaddr.tcp("1.2.3.4", 5).with_peer(ALICE.peer_id).through
VOUCHER = sign_voucher(ALICE, BOB.peer_id, 1_800_000_000)
HOP = HopMessage(
    kind=HopType.STATUS,
    peer=BOB.peer_id,
    reservation=Reservation(1, (CIRCUIT,), VOUCHER),
    limit=Limit(1, 2),
    status=100,
)
MALLORY = KeyPair(b"\x03" * 32)


@given(mutated(HOP.encode()))
def test_hops(data: bytes) -> None:
    with contextlib.suppress(BadMessage):
        hop = decode_hop_untrusted(data)
        assert decode_hop_untrusted(hop.encode()) == hop


@given(mutated(StopMessage(kind=StopType.CONNECT, peer=BOB.peer_id, limit=Limit(1)).encode()))
def test_stops(data: bytes) -> None:
    with contextlib.suppress(BadMessage):
        stop = decode_stop_untrusted(data)
        assert decode_stop_untrusted(stop.encode()) == stop


@given(mutated(HolePunch(PunchType.CONNECT, (CIRCUIT,) * 6).encode()))
def test_punches(data: bytes) -> None:
    with contextlib.suppress(BadMessage):
        assert len(decode_punch_untrusted(data).addrs) <= MAX_ADDRS


@given(mutated(VOUCHER))
def test_vouchers(data: bytes) -> None:
    with contextlib.suppress(BadMessage):
        check_voucher_untrusted(data, ALICE.peer_id, BOB.peer_id)
    try:
        check_voucher_untrusted(data, MALLORY.peer_id, BOB.peer_id)
    except BadMessage:
        return
    raise AssertionError("a voucher of another relay was believed")


@given(
    mutated(DialRequest((CIRCUIT, None), 7).encode())
    | mutated(DialResponse(200, 1, 200).encode())
    | mutated(DialDataRequest(1, 30_000).encode())
    | mutated(DialDataResponse(b"x" * 40).encode())
)
def test_autonat(data: bytes) -> None:
    with contextlib.suppress(BadMessage):
        decode_untrusted(data)


@given(mutated(encode_dial_back(7)))
def test_dial_backs(data: bytes) -> None:
    with contextlib.suppress(BadMessage):
        assert 0 <= decode_dial_back_untrusted(data) < 2**64
