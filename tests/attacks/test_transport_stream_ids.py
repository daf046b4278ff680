"""A stream id used twice left a handler that waited for ever."""

from __future__ import annotations

import trio
import trio.testing

from p2p.transport.core.yamux import DATA, RST, SYN, WINDOW_UPDATE
from tests.attacks.hostile_mux import ECHO, frame, hello, open_victims


def reused(stream_id: int) -> bytes:
    """Opened, reset, opened again with its protocol: a ghost in 110 bytes."""
    opened = frame(WINDOW_UPDATE, SYN, stream_id, 0)
    return opened + frame(WINDOW_UPDATE, RST, stream_id, 0) + hello(stream_id)


async def test_a_reused_id_opens_nothing() -> None:
    async with open_victims(7) as (victim,):
        await victim.hostile.send(b"".join(reused(2 * index + 1) for index in range(300)))
        await trio.testing.wait_all_tasks_blocked()
        assert victim.accepted == []
        assert victim.connection.mux.stream_ids == ()
        assert victim.connection.is_open


async def test_every_stream_handed_out_ends_with_the_connection() -> None:
    async with open_victims(7) as (victim,):
        for index in range(20):
            await victim.hostile.send(reused(8 * index + 1) + hello(8 * index + 3))
            # ended by both, reset, left alone
            await victim.hostile.send(
                hello(8 * index + 5) + frame(WINDOW_UPDATE, RST, 8 * index + 5, 0)
            )
        await trio.testing.wait_all_tasks_blocked()
        waiting = 0

        async def read(stream: trio.abc.ReceiveStream) -> None:
            nonlocal waiting
            waiting += 1
            try:
                while await stream.receive_some():
                    pass
            except trio.BrokenResourceError:
                waiting -= 1

        async with trio.open_nursery() as nursery:
            for stream in victim.accepted:
                nursery.start_soon(read, stream)
            await trio.testing.wait_all_tasks_blocked()
            await victim.hostile.raw.aclose()
            await victim.connection.wait_closed()
            await trio.testing.wait_all_tasks_blocked()
            assert waiting == 0
            nursery.cancel_scope.cancel()


async def test_streams_that_the_peer_never_ends_do_not_block_ours() -> None:
    """After 256 such streams the next was `LimitExceeded` for good."""
    async with open_victims(7) as (victim,), trio.open_nursery() as nursery:
        nursery.start_soon(victim.hostile.swallow)
        for _ in range(1000):
            stream = victim.connection.open_stream(ECHO)
            await stream.send_all(b"question")
            await stream.aclose()
            await trio.testing.wait_all_tasks_blocked()
        assert len(victim.connection.mux.stream_ids) <= 256
        nursery.cancel_scope.cancel()


async def test_streams_of_the_peer_that_it_never_ends_are_swept(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_victims(7, keepalive=10) as (victim,), trio.open_nursery() as nursery:
        nursery.start_soon(victim.hostile.swallow)
        await victim.hostile.send(b"".join(hello(2 * index + 1) for index in range(200)))
        await trio.testing.wait_all_tasks_blocked()
        for stream in victim.accepted:
            await stream.aclose()
        assert len(victim.connection.mux.stream_ids) == 200
        for _ in range(5):
            await victim.world.sleep(6)
            await victim.hostile.send(frame(DATA, 0, 99_999, b"alive"))
        assert victim.connection.mux.stream_ids == ()
        assert victim.connection.streams == {}
        assert victim.connection.is_open
        nursery.cancel_scope.cancel()
