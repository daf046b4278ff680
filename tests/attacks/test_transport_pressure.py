"""What our own stop did is not held against the peer; floods of small frames."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import pytest
import trio
import trio.testing

from p2p.swarm.identify import serve_ping
from p2p.transport.core.negotiate import line
from p2p.transport.core.yamux import (
    ACK,
    DATA,
    GO_AWAY,
    HEADER,
    MAX_CONTROL,
    PING,
    RST,
    SYN,
    WINDOW_UPDATE,
)
from p2p.transport.memory import MemoryStream, _Pipe
from p2p.wire import KI
from tests.attacks.hostile_mux import Hostile, frame, hello, open_victims

PINGS = b"".join(frame(PING, SYN, 0, value) for value in range(5000))


async def _flood(hostile: Hostile, count: int) -> None:
    with contextlib.suppress(trio.BrokenResourceError):
        for _ in range(count):
            await hostile.send(PINGS)


async def test_questions_that_we_could_not_answer_are_not_blamed_on_the_peer() -> None:
    """Pings wait for a node that was stopped, and its answers find a full socket."""
    async with open_victims(7) as (victim,), trio.open_nursery() as nursery:
        nursery.start_soon(_flood, victim.hostile, 20)
        await trio.testing.wait_all_tasks_blocked()
        mux = victim.connection.mux
        assert victim.connection.failure is None
        assert victim.connection.is_open
        assert mux.is_choked  # back-pressure: nothing more is read
        assert len(mux.queue.control) <= MAX_CONTROL + 66 * KI
        answers = 0
        with trio.fail_after(60):
            while answers < 20 * 5000:
                answers += len(await victim.hostile.receive()) // HEADER.size
        assert victim.connection.failure is None
        assert not mux.is_choked


async def test_two_that_choke_each_other_part_without_blame(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Neither reads until the other has: the keep-alive ends it."""
    async with open_victims(7, keepalive=10) as (victim,), trio.open_nursery() as nursery:
        nursery.start_soon(_flood, victim.hostile, 50)
        start = victim.world.now()
        await victim.connection.wait_closed()
        assert 30 <= victim.world.now() - start <= 60
        assert victim.connection.failure is None
        nursery.cancel_scope.cancel()


async def test_a_keep_alive_that_is_late_says_nothing_about_the_peer(
    mock_clock: trio.testing.MockClock,
) -> None:
    """SIGSTOP and SIGCONT, four times: in none of them had the peer a chance to be heard."""
    async with open_victims(7, keepalive=30) as (victim,), trio.open_nursery() as nursery:
        nursery.start_soon(victim.hostile.swallow)
        for _ in range(4):
            await trio.testing.wait_all_tasks_blocked()
            mock_clock.jump(600)
            await trio.testing.wait_all_tasks_blocked()
        assert victim.connection.is_open
        for _ in range(4):  # and silence in our own time still counts
            mock_clock.jump(31)
            await trio.testing.wait_all_tasks_blocked()
        assert not victim.connection.is_open
        assert victim.connection.failure is None
        nursery.cancel_scope.cancel()


async def test_streams_without_a_protocol_outlive_our_own_stop(
    mock_clock: trio.testing.MockClock,
) -> None:
    async with open_victims(7, keepalive=30) as (victim,):
        await victim.hostile.send(frame(WINDOW_UPDATE, SYN, 1, 0))
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(3):
            mock_clock.jump(600)
            await trio.testing.wait_all_tasks_blocked()
        assert victim.connection.mux.stream_ids == (1,)


FLOODS = {
    "pongs": frame(PING, ACK, 0, 0),
    "empty data": frame(DATA, 0, 1, b""),
    "one byte for nobody": frame(DATA, 0, 999, b"x"),
    "window updates": frame(WINDOW_UPDATE, 0, 1, 2**32 - 1),
    "goodbyes": frame(GO_AWAY, 0, 0, 0),
}


async def _slowed_down(records: Iterable[bytes]) -> float:
    """Seconds until a victim has read all of it, and blames nobody."""
    async with open_victims(7) as (victim,), trio.open_nursery() as nursery:
        nursery.start_soon(victim.hostile.swallow)
        start = victim.world.now()
        for record in records:
            await victim.hostile.send(record)
        await trio.testing.wait_all_tasks_blocked()
        assert victim.connection.failure is None
        nursery.cancel_scope.cancel()
        return victim.world.now() - start


@pytest.mark.parametrize("what", FLOODS)
async def test_a_flood_of_small_frames_is_slowed_down(
    what: str, autojump_clock: trio.testing.MockClock
) -> None:
    """150,000 frames at once: two seconds' worth are free, the rest waits."""
    assert 3 <= await _slowed_down([hello(1), *[FLOODS[what] * 1000] * 150]) <= 5


async def test_a_flood_of_tiny_records_is_slowed_down(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """One byte a record, as a dripping peer sends them: each costs a decryption."""
    assert await _slowed_down([b"\0"] * 100_000) >= 1


async def test_bulk_is_never_slowed_down(autojump_clock: trio.testing.MockClock) -> None:
    async with open_victims(7) as (victim,), trio.open_nursery() as nursery:
        nursery.start_soon(victim.hostile.swallow)
        await victim.hostile.send(hello(1))
        await trio.testing.wait_all_tasks_blocked()
        start = victim.world.now()
        for _ in range(1000):
            await victim.hostile.send(frame(DATA, 0, 1, bytes(32 * KI)))
            received = 0
            while received < 32 * KI:
                received += len(await victim.accepted[0].receive_some())
        assert victim.world.now() == start
        nursery.cancel_scope.cancel()


async def test_a_flood_of_proposals_is_slowed_down(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """32 refused proposals in a frame of 116 bytes take as long as 30 frames."""
    proposals = line("/multistream/1.0.0") + line("a") * 32
    streams = [
        frame(DATA, SYN, stream_id, proposals) + frame(WINDOW_UPDATE, RST, stream_id, 0)
        for stream_id in range(1, 16001, 2)
    ]
    records = (b"".join(streams[at : at + 50]) for at in range(0, len(streams), 50))
    assert await _slowed_down(records) >= 2


async def test_pings_are_echoed_in_the_pieces_in_which_they_come() -> None:
    class Counting(MemoryStream):
        sends = 0

        async def send_all(self, data: bytes | bytearray | memoryview) -> None:
            self.sends += 1
            await super().send_all(data)

    one, other = _Pipe(), _Pipe()
    ours, theirs = Counting(one, other), MemoryStream(other, one)
    await theirs.send_all(bytes(32) * 1000)
    await theirs.send_eof()
    await serve_ping(ours)  # type: ignore[arg-type]
    assert ours.sends < 10
    assert len(await theirs.receive_some()) == 32 * 1000
