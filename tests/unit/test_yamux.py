"""The yamux machine: every rule of its theory of operation, and every pitfall we know of."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, strategies as st

from p2p.errors import LimitExceeded, LocalProtocolError
from p2p.transport.core.budget import HostBudget
from p2p.transport.core.yamux import (
    ACK,
    DATA,
    FIN,
    GO_AWAY,
    HEADER,
    INITIAL_WINDOW,
    MAX_CONTROL,
    MAX_QUEUED,
    MAX_SKIPPED,
    MAX_STREAMS,
    PING,
    RST,
    SYN,
    WINDOW_UPDATE,
    DataReceived,
    EndReceived,
    Event,
    Mux,
    ProtocolViolated,
    StreamOpened,
    StreamReset,
)
from p2p.wire import KI, MIB

EXTRA = 4 * MIB - INITIAL_WINDOW


def frame(kind: int, flags: int, stream_id: int, payload: bytes | int = b"") -> bytes:
    if isinstance(payload, int):
        return HEADER.pack(0, kind, flags, stream_id, payload)
    return HEADER.pack(0, kind, flags, stream_id, len(payload)) + payload


def drain(mux: Mux) -> bytes:
    out = b""
    while (piece := mux.data_to_send()) is not None:
        assert 0 < len(piece) <= 65519
        out += piece
    return out


def frames(data: bytes) -> list[tuple[int, int, int, int]]:
    """(type, flags, stream id, length) of every frame."""
    found, start = [], 0
    while start < len(data):
        _, kind, flags, stream_id, length = HEADER.unpack_from(data, start)
        found.append((kind, flags, stream_id, length))
        start += HEADER.size + (length if kind == DATA else 0)
    return found


def feed(mux: Mux, data: bytes) -> list[Event]:
    return mux.receive_data(bytearray(data))


def exchange(one: Mux, other: Mux) -> tuple[list[Event], list[Event]]:
    """Carry everything both ways until silence; returns what each side saw."""
    at_one: list[Event] = []
    at_other: list[Event] = []
    while one.has_data or other.has_data:
        at_other += feed(other, drain(one))
        at_one += feed(one, drain(other))
    return at_one, at_other


def pair() -> tuple[Mux, Mux]:
    return Mux(dialer=True), Mux(dialer=False)


def connected() -> tuple[Mux, Mux, int]:
    """A dialer and a listener with one stream between them."""
    one, other = pair()
    stream_id = one.open_stream()
    exchange(one, other)
    return one, other, stream_id


def send(mux: Mux, stream_id: int, data: bytes) -> int:
    return mux.send(stream_id, memoryview(data))


def violation(events: list[Event]) -> str:
    """Why the last event says that the protocol was broken."""
    assert isinstance(events[-1], ProtocolViolated)
    return events[-1].reason


class Clock:
    """Time for a budget."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def timed_pair() -> tuple[Clock, HostBudget, Mux, Mux, int]:
    """As `connected`, with a clock, and the budget of the listener."""
    clock = Clock()
    budget = HostBudget(clock)
    one, other = Mux(dialer=True), Mux(dialer=False, budget=budget)
    stream_id = one.open_stream()
    exchange(one, other)
    return clock, budget, one, other, stream_id


def test_a_window_grows_to_its_full_size_when_half_of_it_is_read_quickly() -> None:
    clock, _, _, other, stream_id = timed_pair()
    clock.now = 0.25
    other.consumed(stream_id, INITIAL_WINDOW // 2)
    assert frames(drain(other)) == [(WINDOW_UPDATE, 0, stream_id, INITIAL_WINDOW // 2 + EXTRA)]


def test_a_window_that_is_read_slowly_stays_narrow() -> None:
    clock, _, _, other, stream_id = timed_pair()
    for _ in range(10):
        clock.now += 0.26
        other.consumed(stream_id, INITIAL_WINDOW // 2)
        assert frames(drain(other)) == [(WINDOW_UPDATE, 0, stream_id, INITIAL_WINDOW // 2)]


def test_one_connection_takes_a_share_of_the_stock_and_all_together_no_more_than_it() -> None:
    clock = Clock()
    budget = HostBudget(clock)
    total = 0
    for _ in range(6):
        one, other = Mux(dialer=True), Mux(dialer=False, budget=budget)
        ids = [one.open_stream() for _ in range(8)]
        exchange(one, other)
        for stream_id in ids:
            other.consumed(stream_id, INITIAL_WINDOW // 2)
        granted = sum(length - INITIAL_WINDOW // 2 for _, _, _, length in frames(drain(other)))
        assert granted <= 8 * MIB
        total += granted
    assert 9 * MIB < total <= 10 * MIB


def test_the_stock_comes_back_with_the_stream_and_from_one_that_is_idle() -> None:
    clock, budget, one, other, stream_id = timed_pair()
    for ending in ("reset", "idle", "teardown"):
        other.consumed(stream_id, INITIAL_WINDOW // 2)
        assert frames(drain(other))[-1][3] > INITIAL_WINDOW // 2
        assert len(budget._grants) == 1
        match ending:
            case "reset":
                other.reset(stream_id)
            case "idle":
                clock.now += 60
            case _:
                other.abandon()
        assert len(budget._grants) == (ending == "idle")
        if ending != "teardown":
            stream_id = one.open_stream()
            exchange(one, other)


@pytest.mark.parametrize("flags_on", [DATA, WINDOW_UPDATE])
def test_syn_and_fin_may_ride_on_either_type(flags_on: int) -> None:
    other = Mux(dialer=False)
    payload = b"hi" if flags_on == DATA else 1000
    events = feed(other, frame(flags_on, SYN, 1, payload))
    assert events[0] == StreamOpened(1)
    assert (DataReceived(1, bytearray(b"hi")) in events) == (flags_on == DATA)
    events = feed(other, frame(flags_on, FIN, 1, b"bye" if flags_on == DATA else 0))
    assert events[-1] == EndReceived(1)
    assert (DataReceived(1, bytearray(b"bye")) in events) == (flags_on == DATA)


@pytest.mark.parametrize("flags_on", [DATA, WINDOW_UPDATE])
def test_rst_may_ride_on_either_type(flags_on: int) -> None:
    one, _, stream_id = connected()
    assert feed(one, frame(flags_on, RST, stream_id, 0)) == [StreamReset(stream_id)]
    assert one.stream_ids == ()
    assert one.take_closed() == [stream_id]


@given(st.integers(0, 2**32), st.integers(1, 300))
def test_any_split_of_the_bytes_gives_the_same_streams(seed: int, step: int) -> None:
    rng = Random(seed)
    one = Mux(dialer=True)
    sent: dict[int, bytes] = {}
    for _ in range(4):
        stream_id = one.open_stream()
        data = rng.randbytes(rng.randrange(2000))
        sent[stream_id] = data
        send(one, stream_id, data)
        one.send_end(stream_id)
    wire = drain(one)
    other = Mux(dialer=False)
    received: dict[int, bytes] = {}
    ended = []
    for start in range(0, len(wire), step):
        for event in feed(other, wire[start : start + step]):
            match event:
                case DataReceived(stream_id, data):
                    received[stream_id] += data
                case StreamOpened(stream_id):
                    received[stream_id] = b""
                case EndReceived(stream_id):
                    ended.append(stream_id)
    assert received == sent
    assert sorted(ended) == sorted(sent)


def test_an_end_is_a_frame_of_its_own_behind_the_data() -> None:
    # js-libp2p drops the payload of a DATA frame that carries FIN.
    one, _, stream_id = connected()
    send(one, stream_id, b"last words")
    one.send_end(stream_id)
    assert frames(drain(one)) == [(DATA, 0, stream_id, 10), (DATA, FIN, stream_id, 0)]


def test_a_queue_is_bounded_and_says_when_there_is_room() -> None:
    one, _other, stream_id = connected()
    feed(one, frame(WINDOW_UPDATE, 0, stream_id, 4 * MIB))
    assert send(one, stream_id, bytes(MAX_QUEUED + 1)) == MAX_QUEUED
    assert send(one, stream_id, b"x") == 0
    assert one.room(stream_id) == 0
    assert one.take_writable() == []
    one.data_to_send()
    assert one.take_writable() == [stream_id]
    assert one.room(stream_id) > 0


def test_data_of_a_stream_that_we_reset_midway_is_read_over() -> None:
    one, _, stream_id = connected()
    whole = frame(DATA, 0, stream_id, b"x" * 100)
    feed(one, whole[:50])
    one.reset(stream_id)
    assert feed(one, whole[50:] + frame(PING, ACK, 0, 7)) == []


def test_opening_twice_or_with_our_parity_breaks_the_protocol() -> None:
    for stream_id in (1, 2, 0):
        other = Mux(dialer=False)
        feed(other, frame(WINDOW_UPDATE, SYN, 1, 0))
        assert violation(feed(other, frame(WINDOW_UPDATE, SYN, stream_id, 0)))


def test_data_after_the_end_breaks_the_protocol() -> None:
    other = Mux(dialer=False)
    feed(other, frame(DATA, SYN | FIN, 1, b"end"))
    assert "after its end" in violation(feed(other, frame(DATA, 0, 1, b"more")))


@pytest.mark.parametrize("data", [b"\x01" + bytes(11), HEADER.pack(0, 4, 0, 0, 0)])
def test_unknown_versions_and_types_break_the_protocol(data: bytes) -> None:
    assert violation(feed(Mux(dialer=True), data))


def test_ten_thousand_openings_cost_refusals_not_memory() -> None:
    other = Mux(dialer=False)
    events = []
    for index in range(10_000):
        events += feed(other, frame(WINDOW_UPDATE, SYN, 2 * index + 1, 0))
        answers = frames(drain(other))
        assert answers[0][1] == (ACK if index < MAX_STREAMS else RST)
    assert len(events) == len(other.stream_ids) == MAX_STREAMS


def test_what_came_before_a_violation_has_happened_and_nothing_after_it_does() -> None:
    one, _, stream_id = connected()
    events = feed(
        one,
        frame(WINDOW_UPDATE, RST, stream_id, 0) + frame(9, 0, 0, 0) + frame(PING, ACK, 0, 1),
    )
    assert events == [StreamReset(stream_id), ProtocolViolated("yamux frame type 9 is unknown")]
    assert feed(one, frame(PING, ACK, 0, 2)) == []


def test_a_flood_whose_answers_are_not_read_chokes_us_and_is_no_violation() -> None:
    other = Mux(dialer=False)
    flood = b"".join(
        frame(PING, SYN, 0, value) for value in range(MAX_CONTROL // HEADER.size + 2)
    )
    assert feed(other, flood) == []
    assert other.is_choked
    with pytest.raises(LimitExceeded, match="control frames"):
        other.open_stream()
    assert other.data_to_send()
    assert not other.is_choked


def test_ids_may_come_in_any_order_once_as_go_yamux_sends_them() -> None:
    other = Mux(dialer=False)
    order = [9, 1, 5, 3, 7, 11]
    for stream_id in order:
        assert feed(other, frame(WINDOW_UPDATE, SYN, stream_id, 0)) == [StreamOpened(stream_id)]
    for stream_id in order:
        other.reset(stream_id)
        assert feed(other, frame(WINDOW_UPDATE, SYN, stream_id, 0)) == []


def test_skipped_ids_are_remembered_within_a_bound() -> None:
    other = Mux(dialer=False)
    for stream_id in range(1, 2**32, 2**24):
        feed(
            other,
            frame(WINDOW_UPDATE, SYN, stream_id, 0) + frame(WINDOW_UPDATE, RST, stream_id, 0),
        )
        drain(other)
    assert len(other._skipped) == MAX_SKIPPED
    # too late to be told from a second use
    assert feed(other, frame(WINDOW_UPDATE, SYN, 3, 0)) == []


def test_streams_that_an_application_uses_make_no_room() -> None:
    other = Mux(dialer=False)
    for index in range(MAX_STREAMS):
        feed(other, frame(WINDOW_UPDATE, SYN, 2 * index + 1, 0))
        other.send_end(2 * index + 1)  # we have said all, and still read
    drain(other)
    assert feed(other, frame(WINDOW_UPDATE, SYN, 2 * MAX_STREAMS + 1, 0)) == []


def test_after_going_away_no_stream_is_opened_on_either_side() -> None:
    one, other = pair()
    one.go_away(2)
    assert frames(drain(one)) == [(GO_AWAY, 0, 0, 2)]
    assert feed(other, frame(GO_AWAY, 0, 0, 2)) == []
    for mux in (one, other):
        with pytest.raises(LimitExceeded):
            mux.open_stream()
    assert feed(one, frame(WINDOW_UPDATE, SYN, 2, 0)) == []
    assert frames(drain(one)) == [(WINDOW_UPDATE, RST, 2, 0)]


def test_a_reset_throws_the_queue_away() -> None:
    one, _other, stream_id = connected()
    send(one, stream_id, bytes(200_000))
    one.reset(stream_id)
    assert frames(drain(one)) == [(WINDOW_UPDATE, RST, stream_id, 0)]
    with pytest.raises(LocalProtocolError):
        send(one, stream_id, b"x")


def test_a_little_late_data_is_dropped_more_is_answered_with_a_reset() -> None:
    _one, other, stream_id = connected()
    other.send_end(stream_id)
    other.stop_receiving(stream_id, unread=False)
    drain(other)
    assert feed(other, frame(DATA, 0, stream_id, bytes(4 * KI))) == []
    assert not other.has_data
    assert feed(other, frame(DATA, 0, stream_id, b"x")) == []
    assert frames(drain(other)) == [(WINDOW_UPDATE, RST, stream_id, 0)]


def test_small_frames_share_a_record_and_go_ahead_of_bulk() -> None:
    one, _other = pair()
    bulk, *small = (one.open_stream() for _ in range(5))
    drain(one)
    send(one, bulk, bytes(200_000))
    for stream_id in small:
        send(one, stream_id, b"beat")
    first, second = one.data_to_send(), one.data_to_send()
    assert first is not None
    assert second is not None
    assert [stream_id for _, _, stream_id, _ in frames(bytes(first))] == small
    assert frames(bytes(second)) == [(DATA, 0, bulk, 65507)]


def test_a_flood_of_small_frames_does_not_stop_the_bulk() -> None:
    one, _ = pair()
    bulk, small = one.open_stream(), one.open_stream()
    drain(one)
    send(one, bulk, bytes(250_000))
    served = []
    for _ in range(8):
        send(one, small, b"beat")
        piece = one.data_to_send()
        assert piece is not None
        served.append(frames(bytes(piece))[0][2])
    assert served.count(bulk) == 4


def test_bulk_streams_take_turns() -> None:
    one, _ = pair()
    ids = [one.open_stream() for _ in range(3)]
    drain(one)
    for stream_id in ids:
        send(one, stream_id, bytes(200_000))
    order = []
    for _ in range(6):
        piece = one.data_to_send()
        assert piece is not None
        order.append(frames(bytes(piece))[0][2])
    assert order == ids * 2


def test_small_writes_grow_into_large_frames() -> None:
    one, _, stream_id = connected()
    for _ in range(32):
        send(one, stream_id, bytes(4 * KI))
    assert [length for _, _, _, length in frames(drain(one))] == [
        65507,
        65507,
        32 * 4 * KI - 2 * 65507,
    ]


def test_many_control_frames_take_several_records() -> None:
    one = Mux(dialer=True, record=1000)
    for value in range(200):
        one.ping(value)
    pieces = []
    while (piece := one.data_to_send()) is not None:
        assert len(piece) <= 1000
        assert len(piece) % HEADER.size == 0
        pieces.append(piece)
    assert [length for _, _, _, length in frames(b"".join(pieces))] == list(range(200))


def test_a_whole_record_is_handed_on_without_a_copy() -> None:
    _, other, stream_id = connected()
    record = bytearray(frame(DATA, 0, stream_id, bytes(60_000)))
    (event,) = other.receive_data(record)
    assert isinstance(event, DataReceived)
    assert event.data is record
