"""A reset and a broken frame in one record left streams that raised LocalProtocolError."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from p2p.errors import RemoteProtocolError
from p2p.transport.core.yamux import ACK, DATA, MAX_QUEUED, RST, WINDOW_UPDATE
from p2p.wire import KI
from tests.attacks.hostile_mux import ECHO, Victim, frame, hello, open_victims

BAD = frame(9, 0, 0, 0)


async def _block_the_writer(victim: Victim, stream_id: int) -> trio.abc.SendStream:
    """A stream of ours whose bytes the peer welcomes and does not read."""
    stream = victim.connection.open_stream(ECHO)
    await victim.hostile.send(frame(WINDOW_UPDATE, ACK, stream_id, 8 << 20))
    await trio.testing.wait_all_tasks_blocked()
    for _ in range(8):
        stream.try_send(bytes(MAX_QUEUED - KI))
        await trio.testing.wait_all_tasks_blocked()
    assert victim.connection.mux.has_data  # the raw stream is full
    return stream


async def test_a_timer_may_send_on_a_stream_that_was_reset_in_a_broken_record() -> None:
    async with open_victims(7) as (victim,):
        stream = await _block_the_writer(victim, 2)
        await victim.hostile.send(frame(WINDOW_UPDATE, RST, 2, 0) + BAD)
        await trio.testing.wait_all_tasks_blocked()
        assert isinstance(victim.connection.failure, RemoteProtocolError)
        assert not stream.try_send(b"from a timer")
        with pytest.raises(trio.BrokenResourceError):
            await stream.send_all(b"from a task")
        with pytest.raises(trio.BrokenResourceError):
            await stream.wait_send_all_might_not_block()
        with pytest.raises(trio.BrokenResourceError):
            await stream.receive_some()


async def test_all_streams_fail_before_the_connection_closes() -> None:
    async with open_victims(7) as (victim,):
        ours = await _block_the_writer(victim, 2)
        await victim.hostile.send(hello(1) + hello(3))
        await trio.testing.wait_all_tasks_blocked()
        broken = []

        async def read(stream: trio.abc.ReceiveStream) -> None:
            try:
                await stream.receive_some()
            except trio.BrokenResourceError:
                broken.append(stream)

        async with trio.open_nursery() as nursery:
            for stream in (ours, *victim.accepted):
                nursery.start_soon(read, stream)
            await trio.testing.wait_all_tasks_blocked()
            await victim.hostile.send(BAD)
            with trio.fail_after(1):  # the goodbye waits for 2 s, behind the blocked writer
                while len(broken) < 3:
                    await trio.lowlevel.checkpoint()
        assert not victim.connection.is_open


async def test_what_came_before_the_violation_is_delivered() -> None:
    async with open_victims(7) as (victim,):
        await victim.hostile.send(hello(1) + frame(DATA, 0, 1, b"last words") + BAD)
        await victim.connection.wait_closed()
        assert await victim.accepted[0].receive_some() == b"last words"


async def test_a_send_that_crosses_a_reset_is_broken_not_a_bug_of_ours() -> None:
    """The machine knows of the reset, the stream does not yet."""
    async with open_victims(7) as (victim,):
        stream = victim.connection.open_stream(ECHO)
        victim.connection.mux.receive_data(bytearray(frame(WINDOW_UPDATE, RST, 2, 0)))
        assert not stream.try_send(b"x")
        with pytest.raises(trio.BrokenResourceError):
            await stream.send_all(b"x")
        with pytest.raises(trio.BrokenResourceError):
            await stream.wait_send_all_might_not_block()


async def test_sending_nothing_is_harmless() -> None:
    async with open_victims(7) as (victim,):
        stream = victim.connection.open_stream(ECHO)
        await trio.testing.wait_all_tasks_blocked()  # nothing of it is queued any more
        assert stream.try_send(b"")
        await stream.send_all(b"")
        await trio.testing.wait_all_tasks_blocked()
        assert victim.connection.is_open
        stream.reset()
        assert not stream.try_send(b"")
