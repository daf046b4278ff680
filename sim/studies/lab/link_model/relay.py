"""A machine of a tree as a process, controlled by lines on standard input.

It is started as ``python -m sim.studies.lab.link_model.relay``.

``listen ADDR``, ``join ADDR|- CHILDREN`` (new streams to the parent and from the children) and
``play CHUNKS CHUNK_BYTES`` are answered by one line each; ``play`` by the seconds on the
machine-wide monotonic clock at which everything was there. The end of the input is the end of
the process, so that nothing outlives the lab.
"""

from __future__ import annotations

import socket
import sys
import time
from contextlib import AsyncExitStack
from typing import Final

import trio

from sim.studies.lab.link_model.broadcast import TreeBroadcast

PORT: Final = 4001
"""The port of every machine: each has an address of its own."""
NOT_SENT_LOW_WATER: Final = 128 * 1024
"""The most unsent bytes that the kernel holds, as in `p2p.transport.tcp`."""


class TreeRelay:
    """A machine: its listening socket, and the streams of the current broadcast."""

    def __init__(self, congestion: bytes) -> None:
        """Begin without streams; ``congestion`` is the kernel's name of a congestion control,
        or empty for its default.
        """
        self._congestion = congestion
        self._listener: trio.SocketListener
        self._up: trio.SocketStream | None = None
        self._down: list[trio.SocketStream] = []
        self._stack = AsyncExitStack()

    async def obey(self, words: list[str]) -> str:
        """Carry out one order and return the answer."""
        match words:
            case ["listen", host]:
                (self._listener,) = await trio.open_tcp_listeners(PORT, host=host)
                return "listening"
            case ["join", parent, children]:
                await self._join(parent, int(children))
                return "joined"
            case ["play", chunks, chunk_bytes]:
                broadcast = TreeBroadcast(int(chunks), int(chunk_bytes), _now)
                await broadcast.run(self._up, self._down)
                return str(broadcast.whole_at)
            case _:
                raise ValueError(f"no such order: {' '.join(words)}")

    async def _join(self, parent: str, children: int) -> None:
        await self._stack.aclose()
        self._up, self._down = None, []
        if parent != "-":
            self._up = await self._adopt(await trio.open_tcp_stream(parent, PORT))
        for _ in range(children):
            self._down.append(await self._adopt(await self._listener.accept()))

    async def _adopt(self, stream: trio.SocketStream) -> trio.SocketStream:
        if self._congestion:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, self._congestion)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, NOT_SENT_LOW_WATER)
        return await self._stack.enter_async_context(stream)


def _now() -> float:
    """Return the time of a clock that all processes of this machine share."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


async def main(congestion: str) -> None:
    """Obey until the orders end."""
    relay = TreeRelay(congestion.encode())
    orders, waiting = trio.open_memory_channel[str](1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_read_orders, orders, nursery.cancel_scope)
        _say("up")
        async for line in waiting:
            _say(await relay.obey(line.split()))


async def _read_orders(orders: trio.MemorySendChannel[str], scope: trio.CancelScope) -> None:
    while line := await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
        await orders.send(line)
    scope.cancel()


def _say(answer: str) -> None:
    sys.stdout.write(answer + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    trio.run(main, sys.argv[1] if len(sys.argv) > 1 else "")
