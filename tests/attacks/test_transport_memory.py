"""One-byte frames cost 85 bytes a byte, and windows of all peers together had no limit."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import trio
import trio.testing

from p2p.identity import KeyPair, PeerId
from p2p.transport.core.budget import MAX_OUTGOING, HostBudget
from p2p.transport.core.negotiate import line
from p2p.transport.core.yamux import DATA, INITIAL_WINDOW, MAX_STREAMS, RST, SYN, WINDOW_UPDATE
from p2p.wire import KI, MIB, FrameReader, encode_varint
from tests.attacks.hostile_mux import Victim, frame, hello, open_victims


@contextmanager
def grown() -> Iterator[list[int]]:
    """Bytes that the block leaves allocated."""
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    found = [0]
    try:
        yield found
        gc.collect()
        found[0] = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


async def test_a_window_of_one_byte_frames_costs_what_its_bytes_do() -> None:
    async with open_victims(7) as (victim,):
        await victim.hostile.send(hello(1))
        await trio.testing.wait_all_tasks_blocked()  # it has the buffers that connections share
        with grown() as cost:
            for _ in range(16):
                await victim.hostile.send(frame(DATA, 0, 1, b"x") * 1024)
                await trio.testing.wait_all_tasks_blocked()
        assert cost[0] < 64 * KI  # 16 KiB of bytes; 1.4 MiB before they were joined
        received = 0
        while received < 16 * KI:
            received += len(await victim.accepted[0].receive_some())


async def test_records_that_are_cut_in_front_do_not_own_what_was_cut() -> None:
    """31 KB for no stream, then 34 KB that stay: each kept the memory of its whole record."""
    waste, kept = 31_000, 34_000
    async with open_victims(7) as (victim,):
        with grown() as cost:
            for stream_id in range(1, 65, 2):
                await victim.hostile.send(hello(stream_id))
                record = frame(DATA, 0, 9_999, bytes(waste - 24)) + frame(
                    DATA, 0, stream_id, bytes(kept)
                )
                await victim.hostile.send(record)
                await trio.testing.wait_all_tasks_blocked()
        assert cost[0] < 32 * (kept * 5 // 4 + 10 * KI)


def _budget(size: int, protected: PeerId | None = None):
    return lambda world: HostBudget(
        world.now, max_held=size, protected=lambda peer: peer == protected
    )


async def _hoard(victim: Victim, streams: int, size: int) -> None:
    """Fill ``streams`` streams that no application reads."""
    for index in range(streams):
        stream_id = 2 * index + 1
        await victim.hostile.send(hello(stream_id))
        # the negotiation took a little of the window
        for _ in range(0, size - 16 * KI, 16 * KI):
            await victim.hostile.send(frame(DATA, 0, stream_id, bytes(16 * KI)))
        await trio.testing.wait_all_tasks_blocked()


async def test_what_is_over_the_limit_is_taken_from_the_hoard_not_from_the_fast_reader() -> (
    None
):
    limit = 4 * MIB
    async with open_victims(7, 8, 9, budget=_budget(limit)) as (hoarder, other, honest):
        budget = honest.connection.budget
        await honest.hostile.send(hello(1))
        await trio.testing.wait_all_tasks_blocked()
        received = 0

        async def read() -> None:
            nonlocal received
            while True:
                received += len(await honest.accepted[0].receive_some())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            nursery.start_soon(honest.hostile.swallow)
            for victim in (hoarder, other):
                await _hoard(victim, 32, INITIAL_WINDOW)
                assert budget.held <= limit
                for _ in range(32):
                    await honest.hostile.send(frame(DATA, 0, 1, bytes(32 * KI)))
                    await trio.testing.wait_all_tasks_blocked()
            assert received == 2 * MIB
            nursery.cancel_scope.cancel()
        assert budget.evicted > 0
        assert honest.connection.is_open


async def test_an_application_sees_an_evicted_stream_as_broken() -> None:
    async with open_victims(7, budget=_budget(MIB)) as (victim,):
        await _hoard(victim, 5, INITIAL_WINDOW)
        broken = 0
        for stream in victim.accepted:
            try:
                await stream.receive_some()
            except trio.BrokenResourceError:
                broken += 1
        assert 1 <= broken < 5
        assert victim.connection.is_open
        assert victim.connection.failure is None


async def test_the_protected_are_evicted_last(autojump_clock: trio.testing.MockClock) -> None:
    budget = _budget(MIB, protected=KeyPair(b"\7" * 32).peer_id)
    async with open_victims(7, 8, budget=budget) as (member, stranger):
        await _hoard(member, 3, INITIAL_WINDOW)  # more, and older
        await member.world.sleep(100)
        await _hoard(stranger, 3, INITIAL_WINDOW)
        assert len(member.connection.mux.stream_ids) == 3
        assert len(stranger.connection.mux.stream_ids) < 3


async def test_the_old_hoard_of_many_goes_before_the_young_bytes_of_one(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Sybils with a little each for a minute, against one sender whose application is busy."""
    keys = range(20, 40)
    async with open_victims(7, *keys, budget=_budget(MIB)) as (honest, *sybils):
        for sybil in sybils:
            await _hoard(sybil, 1, 48 * KI)
        await honest.world.sleep(60)
        await _hoard(honest, 2, 192 * KI)
        for _ in range(8):
            await honest.hostile.send(frame(DATA, 0, 1, bytes(7 * KI)))
            await trio.testing.wait_all_tasks_blocked()
        assert len(honest.connection.mux.stream_ids) == 2
        assert sum(len(sybil.connection.mux.stream_ids) for sybil in sybils) < 20


async def test_an_unfinished_record_counts_and_may_cost_the_connection() -> None:
    async with open_victims(*range(10, 40), budget=_budget(MIB)) as victims:
        for victim in victims:
            await victim.hostile.raw.send_all(b"\xff\xff" + bytes(60_000))
            await trio.testing.wait_all_tasks_blocked()
        budget = victims[0].connection.budget
        assert budget.held <= MIB
        assert 1 <= sum(not victim.connection.is_open for victim in victims) <= 20
        assert all(victim.connection.failure is None for victim in victims)


async def test_unfinished_frames_count() -> None:
    """A megabyte announced, and all of it but one byte sent, on many streams."""
    async with (
        open_victims(7, budget=_budget(2 * MIB)) as (victim,),
        trio.open_nursery() as nursery,
    ):
        ended = 0

        async def serve(stream: trio.abc.ReceiveStream) -> None:
            nonlocal ended
            reader = FrameReader(stream, MIB)
            with pytest.raises(trio.BrokenResourceError):
                await reader.receive()
            ended += 1

        nursery.start_soon(victim.hostile.swallow)
        for index in range(8):
            await victim.hostile.send(hello(2 * index + 1))
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(serve, victim.accepted[-1])
            await victim.hostile.send(frame(DATA, 0, 2 * index + 1, encode_varint(MIB)))
            for _ in range(15):
                await victim.hostile.send(frame(DATA, 0, 2 * index + 1, bytes(64_000)))
                await trio.testing.wait_all_tasks_blocked()
        assert victim.connection.budget.held <= 2 * MIB
        assert ended >= 6
        nursery.cancel_scope.cancel()


async def test_streams_without_a_protocol_count() -> None:
    async with open_victims(*range(10, 20), budget=_budget(4 * MIB)) as victims:
        budget = victims[0].connection.budget
        opened = [frame(WINDOW_UPDATE, SYN, 2 * index + 1, 0) for index in range(MAX_STREAMS)]
        for victim in victims:
            await victim.hostile.send(b"".join(opened))
            await trio.testing.wait_all_tasks_blocked()
        assert sum(len(victim.connection.mux.stream_ids) for victim in victims) <= MIB // KI
        assert budget.held <= 4 * MIB
        for victim in victims:
            await victim.hostile.raw.aclose()
            await victim.connection.wait_closed()
        assert budget.held == 0
        assert not budget._holders


async def test_what_was_held_is_given_back_however_a_stream_ends() -> None:
    async with open_victims(7) as (victim,):
        budget = victim.connection.budget
        endings = ("close", "reset", "peer", "unnamed", "connection")
        for stream_id, ending in zip(range(1, 10, 2), endings, strict=True):
            if ending == "unnamed":
                await victim.hostile.send(frame(WINDOW_UPDATE, SYN, stream_id, 0))
            else:
                await victim.hostile.send(hello(stream_id))
                await victim.hostile.send(frame(DATA, 0, stream_id, bytes(50_000)))
            await trio.testing.wait_all_tasks_blocked()
            assert budget.held > 0
            match ending:
                case "close":
                    await victim.accepted[-1].aclose()
                case "reset":
                    victim.accepted[-1].reset()
                case "connection":
                    await victim.hostile.raw.aclose()
                    await victim.connection.wait_closed()
                    await victim.accepted[-1].aclose()
                case _:
                    await victim.hostile.send(frame(WINDOW_UPDATE, RST, stream_id, 0))
                    await trio.testing.wait_all_tasks_blocked()
                    if ending == "peer":
                        await victim.accepted[-1].aclose()
            assert budget.held == 0
            assert not budget._holders


async def test_peers_that_read_nothing_cannot_stop_what_we_send_to_others() -> None:
    async with open_victims(*range(10, 14), 50, budget=_budget(32 * MIB)) as (*deaf, honest):
        budget = honest.connection.budget
        for victim in deaf:
            for _ in range(30):
                stream = victim.connection.open_stream("/test/echo")
                await victim.hostile.send(frame(WINDOW_UPDATE, 0, stream._id, 8 * MIB))
                await trio.testing.wait_all_tasks_blocked()
                stream.try_send(bytes(250 * KI))
        assert MAX_OUTGOING - MIB < budget.outgoing <= MAX_OUTGOING + 5 * 16 * KI
        async with trio.open_nursery() as nursery:
            nursery.start_soon(honest.hostile.swallow)
            stream = honest.connection.open_stream("/test/echo")
            with trio.fail_after(60):
                await stream.send_all(bytes(200 * KI))
            nursery.cancel_scope.cancel()
        for victim in (*deaf, honest):
            victim.connection.abort()
            await victim.connection.wait_closed()
        assert budget.outgoing == 0


async def test_data_behind_a_refused_protocol_is_neither_kept_nor_welcome_for_ever() -> None:
    async with open_victims(7) as (victim,), trio.open_nursery() as nursery:
        nursery.start_soon(victim.hostile.swallow)
        await victim.hostile.send(frame(WINDOW_UPDATE, SYN, 1, 0))
        nonsense = line("/multistream/1.0.0") + line("/test/nobody") + b"\x00" * 50_000
        await victim.hostile.send(frame(DATA, 0, 1, nonsense))
        for _ in range(6):
            await victim.hostile.send(frame(DATA, 0, 1, bytes(30_000)))
        await trio.testing.wait_all_tasks_blocked()
        negotiation = victim.connection.streams[1]._negotiation
        assert negotiation is not None
        assert negotiation.leftover == b""
        assert victim.connection.mux._streams[1].consumed < KI  # no window for more of it
        nursery.cancel_scope.cancel()
