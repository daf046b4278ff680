"""Tasks that serve one stream after another: what becomes of one stream never reaches the
next.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar

import pytest
import trio
import trio.testing

from p2p.host import Stream, request, serve_requests
from p2p.identity import KeyPair, PeerId, ProtocolId
from p2p.swarm.swarm import SwarmConfig, SwarmHost, open_host
from p2p.transport.memory import MemoryNetwork

ECHO = ProtocolId("/test/echo")
OTHER = ProtocolId("/test/other")
QUIET = SwarmConfig(keepalive=float("inf"))
MARK = ContextVar("MARK", default="clean")


@asynccontextmanager
async def pair(
    *, strict: bool = False
) -> AsyncIterator[tuple[SwarmHost, SwarmHost, list[trio.lowlevel.Task]]]:
    """A client, a server, and the tasks that served the server's `ECHO`, in order."""
    network = MemoryNetwork()
    tasks: list[trio.lowlevel.Task] = []

    async def echo(peer: PeerId, data: bytes) -> bytes:
        tasks.append(trio.lowlevel.current_task())
        await trio.lowlevel.checkpoint()  # a scope that was cancelled would end it here
        return MARK.get().encode() + data

    async with (
        open_host(
            network=network, listen=("/memory/0",), config=QUIET, strict=strict
        ) as server,
        open_host(
            network=network, listen=(), config=QUIET, key=KeyPair(b"\x11" * 32)
        ) as client,
    ):
        server.set_handler(ECHO, serve_requests(echo))
        await client.connect_addr(server.addrs[0])
        await trio.testing.wait_all_tasks_blocked()
        yield client, server, tasks


async def ask(client: SwarmHost, server: SwarmHost) -> bytes:
    answer = await request(client, server.peer_id, ECHO, b"!")
    await trio.testing.wait_all_tasks_blocked()
    return answer


@pytest.mark.parametrize("error", [ValueError("our bug"), trio.BrokenResourceError("gone")])
async def test_the_error_of_one_stream_does_not_reach_the_next(error: Exception) -> None:
    async def fail(stream: Stream) -> None:
        await stream.receive_some()
        raise error

    async with pair() as (client, server, tasks):
        server.set_handler(OTHER, fail)
        for _ in range(3):
            assert await ask(client, server) == b"clean!"
            async with await client.open_stream(server.peer_id, OTHER) as stream:
                await stream.send_all(b"x")
                with pytest.raises(trio.BrokenResourceError):
                    await stream.receive_some()
        assert await ask(client, server) == b"clean!"
        assert server.budget.served == 0
        assert len(set(tasks)) == 1


async def abort(server: SwarmHost, client: SwarmHost) -> None:
    for served in server.budget.served_to(client.peer_id):
        served.abort()


async def test_a_task_that_was_cancelled_serves_no_more() -> None:
    """Both where the stream's handler waits, and where it is done before it notices."""
    ends: list[str] = []

    async with pair(strict=True) as (client, server, tasks):

        async def wait(stream: Stream) -> None:
            try:
                await trio.sleep_forever()
            finally:
                ends.append("cancelled")

        async def is_done(stream: Stream) -> None:
            await abort(server, client)
            stream.reset()
            ends.append("done")

        for handler in (wait, is_done):
            assert await ask(client, server) == b"clean!"
            server.set_handler(OTHER, handler, replaces=True)
            async with await client.open_stream(server.peer_id, OTHER):
                await trio.testing.wait_all_tasks_blocked()
                await abort(server, client)
                await trio.testing.wait_all_tasks_blocked()
        assert ends == ["cancelled", "done"]
        assert await ask(client, server) == b"clean!"
        assert len(set(tasks)) == 3
        assert server.budget.served == 0


async def test_who_ends_a_stream_too_late_ends_no_other() -> None:
    late: list[Callable[[], None]] = []
    gate = trio.Event()

    async with pair(strict=True) as (client, server, _):

        async def first(stream: Stream) -> None:
            late.extend(served.abort for served in server.budget.served_to(client.peer_id))

        async def second(stream: Stream) -> None:
            await gate.wait()
            await stream.send_all(b"whole")

        server.set_handler(OTHER, first)
        async with await client.open_stream(server.peer_id, OTHER) as stream:
            assert await stream.receive_some() == b""
        await trio.testing.wait_all_tasks_blocked()
        late[0]()  # while the task waits
        server.set_handler(OTHER, second, replaces=True)
        async with await client.open_stream(server.peer_id, OTHER) as stream:
            await trio.testing.wait_all_tasks_blocked()
            late[0]()  # while it serves another
            gate.set()
            assert await stream.receive_some() == b"whole"
        assert len(late) == 1
        assert await ask(client, server) == b"clean!"


async def test_context_variables_of_one_stream_do_not_reach_the_next() -> None:
    async with pair(strict=True) as (client, server, tasks):

        async def smudge(stream: Stream) -> None:
            MARK.set("dirty")
            tasks.append(trio.lowlevel.current_task())

        server.set_handler(OTHER, smudge)
        for _ in range(2):
            async with await client.open_stream(server.peer_id, OTHER) as stream:
                assert await stream.receive_some() == b""
            assert await ask(client, server) == b"clean!"
        assert len(set(tasks)) == 1
