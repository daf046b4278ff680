"""Floods that fill the scheduler's passes, and what applications hold."""

from __future__ import annotations

import contextlib
from collections import Counter

import trio
import trio.testing

import p2p
from p2p.host import Stream
from p2p.identity import KeyPair
from p2p.machine import open_world
from p2p.swarm.core.limits import Budget, ResourceLimits, ServedStream
from p2p.transport.connection import _CROWD, Turns
from p2p.transport.core.yamux import DATA, RST, WINDOW_UPDATE, Event, Mux
from p2p.transport.memory import MemoryNetwork
from p2p.wire import KI
from tests.attacks.hostile_mux import ECHO, Hostile, frame, hello, open_victims


class Passes(trio.abc.Instrument):
    """Counts the scheduler's passes."""

    count = 0

    def before_io_wait(self, timeout: float) -> None:
        self.count += 1


async def test_one_goes_on_in_each_pass_and_all_do() -> None:
    passes, turns, seen = Passes(), Turns(), Counter[int]()
    trio.lowlevel.add_instrument(passes)

    async def work(number: int) -> None:
        for _ in range(3):
            await turns.wait()
            seen[passes.count] += 1
            done[number] += 1

    done: Counter[int] = Counter()
    async with trio.open_nursery() as nursery:
        for number in range(10):
            nursery.start_soon(work, number)
    assert set(seen.values()) == {1}
    assert set(done.values()) == {3}


async def test_one_that_is_cancelled_holds_up_nobody() -> None:
    turns, done = Turns(), []

    async def work(number: int) -> None:
        with scopes[number]:
            await turns.wait()
            done.append(number)

    scopes = [trio.CancelScope() for _ in range(6)]
    async with trio.open_nursery() as nursery:
        for number in range(6):
            nursery.start_soon(work, number)
        await trio.lowlevel.checkpoint()
        for number in (0, 2, 3):
            scopes[number].cancel()
    assert {1, 4, 5} <= set(done)
    with trio.fail_after(60):
        await turns.wait()


def test_a_mux_stops_when_its_allowance_is_used_up_and_goes_on_with_the_rest() -> None:
    wire = b"".join(hello(2 * n + 1) + frame(DATA, 0, 2 * n + 1, b"x" * n) for n in range(100))
    whole = Mux(dialer=False).receive_data(bytearray(wire))
    mux, events, calls = Mux(dialer=False), list[Event](), 0
    rest = bytearray(wire)
    while rest:
        mux.allowance = _CROWD
        events += mux.receive_data(rest)
        rest, calls = mux.rest, calls + 1
    assert events == whole
    assert calls >= 100 * 32 // _CROWD


async def test_floods_of_streams_leave_room_in_each_pass() -> None:
    """Eight peers send 250 openings in one record each."""
    passes, started = Passes(), Counter[int]()

    async def serve(stream: Stream) -> None:
        started[passes.count] += 1
        await stream.receive_some()

    network = MemoryNetwork()
    async with (
        open_world() as world,
        p2p.open_host(network=network, listen=["/memory/0"], strict=True) as host,
        trio.open_nursery() as nursery,
    ):
        host.set_handler(ECHO, serve)
        floods = [
            await Hostile.dial(world, network, host.addrs[0], KeyPair(bytes([n + 1]) * 32))
            for n in range(8)
        ]
        for flood in floods:
            nursery.start_soon(flood.swallow)
        trio.lowlevel.add_instrument(passes)
        for flood in floods:
            await flood.send(b"".join(hello(2 * n + 1) for n in range(250)))
        await trio.testing.wait_all_tasks_blocked()
        assert started.total() == 8 * 250
        assert max(started.values()) <= 2 * _CROWD // 32
        nursery.cancel_scope.cancel()


async def test_a_busy_stream_leaves_turns_to_others() -> None:
    """All that its reader needs is there, so nothing makes it wait."""
    passes = Passes()
    async with open_victims(7) as (victim,):
        await victim.hostile.send(hello(1) + frame(DATA, 0, 1, bytes(200 * KI)))
        await trio.testing.wait_all_tasks_blocked()
        trio.lowlevel.add_instrument(passes)
        received = 0
        while received < 200 * KI:
            received += len(await victim.accepted[0].receive_some())
        assert passes.count


async def test_what_an_application_received_counts_until_it_asks_for_more() -> None:
    """Else an echo whose answers are not taken holds 64 KiB in each of many streams."""
    async with open_victims(7) as (victim,):
        budget = victim.connection.budget
        await victim.hostile.send(
            hello(1) + frame(DATA, 0, 1, bytes(30_000)) + frame(DATA, 0, 1, bytes(20_000))
        )
        await trio.testing.wait_all_tasks_blocked()
        (stream,) = victim.accepted
        assert budget.held == 50_000
        received = await stream.receive_some()
        assert budget.held == 50_000
        while budget.held:
            with trio.move_on_after(0.05):
                received += await stream.receive_some()
        assert len(received) == 50_000
        await victim.hostile.send(frame(DATA, 0, 1, bytes(10_000)))
        await stream.receive_some()
        assert budget.held == 10_000
        stream.reset()
        assert budget.held == 0


async def test_answers_that_are_not_taken_end_their_streams() -> None:
    async def send_much(stream: trio.abc.SendStream) -> None:
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await stream.send_all(bytes(1_000_000))

    async with open_victims(7) as (victim,), trio.open_nursery() as nursery:
        await victim.hostile.send(hello(1) + hello(3))
        nursery.start_soon(victim.hostile.swallow)
        await trio.testing.wait_all_tasks_blocked()
        stuck, slow = victim.accepted
        budget = Budget(ResourceLimits())
        for stream in (stuck, slow):
            budget.serve(ServedStream(stream.peer, stream.reset, stream.has_stalled))
            nursery.start_soon(send_much, stream)
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(6):
            await victim.hostile.send(frame(WINDOW_UPDATE, 0, 3, 1000))  # it takes a little
            await trio.testing.wait_all_tasks_blocked()
            budget.end_stalled()
        assert not stuck.is_open
        assert slow.is_open
        nursery.cancel_scope.cancel()


def test_a_stream_reset_within_a_turn_leaves_nothing() -> None:
    mux = Mux(dialer=False)
    mux.allowance = 1
    data = bytearray(hello(1) + frame(WINDOW_UPDATE, RST, 1, 0))
    while data:
        mux.receive_data(data)
        data, mux.allowance = mux.rest, 1
    assert mux.stream_ids == ()
