"""The simulated `Network` (L2): raw byte streams between machines, below a real `Host`."""

from __future__ import annotations

from collections import deque
from typing import Final

import trio

from p2p.concurrency import Notifier
from p2p.errors import ConfigError, PeerUnreachable
from p2p.multiaddr import Multiaddr
from sim.kernel.queue import SECOND
from sim.net.fabric import DIAL_TIMEOUT, Endpoint, Fabric, Wire
from sim.net.stream import SimStream
from sim.node.world import SimWorld

MAX_BACKLOG: Final = 128
"""Streams that may wait to be accepted, as in Linux's listen backlog of old."""
DYNAMIC: Final = 1 << 32
"""Numbers given out for ``/memory/0`` begin here, beyond every machine's own."""


def memory_number(addr: Multiaddr) -> int | None:
    """The number of a ``/memory/`` address, or None if it is another kind."""
    place = addr.transport.parts
    return int(place[0][1]) if len(place) == 1 and place[0][0] == "memory" else None


class WireStream(SimStream):
    """A stream that has a wire to itself, and takes it down with it."""

    def __init__(self, fabric: Fabric, wire: Wire, side: int) -> None:
        super().__init__(fabric, wire.directions[side])
        self._wire = wire
        self._over = False

    def _ended(self) -> None:
        super()._ended()
        self._over = True
        if isinstance(self._other, WireStream) and self._other._over:
            self._wire.forget()


class SimListener:
    """Accepts streams at one address of one machine."""

    def __init__(self, fabric: Fabric, endpoint: Endpoint, number: int) -> None:
        self._fabric = fabric
        self._endpoint = endpoint
        self._number = number
        self._waiting: deque[SimStream] = deque()
        self._changed = Notifier()
        self._closed = False

    @property
    def addr(self) -> Multiaddr:
        """Address it listens at."""
        return Multiaddr((("memory", str(self._number)),))

    def offer(self, stream: SimStream) -> bool:
        """A stream has come in; False if the backlog is full."""
        if self._closed or len(self._waiting) >= MAX_BACKLOG:
            return False
        self._waiting.append(stream)
        self._fabric.wake(self._endpoint, self._changed.notify_all)
        return True

    async def accept(self) -> SimStream:
        """The next incoming stream."""
        await trio.lowlevel.checkpoint()
        while not self._waiting:
            if self._closed:
                raise trio.ClosedResourceError
            await self._changed.wait()
        if self._closed:
            raise trio.ClosedResourceError
        return self._waiting.popleft()

    async def aclose(self) -> None:
        """Stop listening; streams not yet accepted are reset."""
        self._closed = True
        self._endpoint.listeners.pop(self._number, None)
        for stream in self._waiting:
            stream.reset()
        self._waiting.clear()
        self._changed.notify_all()
        await trio.lowlevel.checkpoint()


class SimNetwork:
    """A machine's access to the simulated network."""

    def __init__(self, world: SimWorld, fabric: Fabric, endpoint: Endpoint) -> None:
        self._world = world
        self._fabric = fabric
        self._endpoint = endpoint

    async def listen(self, addr: Multiaddr) -> SimListener:
        """Listen at ``/memory/<n>``; ``/memory/0`` is this machine's own number, or any free
        one."""
        await trio.lowlevel.checkpoint()
        number = memory_number(addr)
        if number is None:
            raise ConfigError(
                f"{addr} is not a /memory/ address, the only kind a simulation has"
            )
        if number == 0:
            number = self._endpoint.index
            while self._listener_at(number) is not None:
                number = max(number, DYNAMIC) + 1
        if self._listener_at(number) is not None:
            raise ConfigError(f"{addr} is taken")
        listener = SimListener(self._fabric, self._endpoint, number)
        self._endpoint.listeners[number] = listener
        return listener

    def _listener_at(self, number: int) -> tuple[Endpoint, SimListener] | None:
        for endpoint in self._fabric.endpoints:
            listener = endpoint.listeners.get(number)
            if isinstance(listener, SimListener):
                return endpoint, listener
        return None

    async def dial(self, addr: Multiaddr) -> SimStream:
        """Open a stream; a round trip, or `DIAL_TIMEOUT` if nothing answers. Raises
        `PeerUnreachable`."""
        number = memory_number(addr)
        if number is None:
            raise PeerUnreachable(
                f"{addr} is not a /memory/ address, the only kind a simulation has"
            )
        number = self._fabric.detours.get(number, number)
        there = self._machine_of(number)
        if there is None or not self._fabric.reachable(self._endpoint, there):
            await self._world.wait_io(DIAL_TIMEOUT / SECOND)
            raise PeerUnreachable(f"{addr} does not answer")
        await self._world.wait_io(2 * self._fabric.latency_of(self._endpoint, there) / SECOND)
        listener = there.listeners.get(number)
        if not isinstance(listener, SimListener) or not self._fabric.reachable(
            self._endpoint, there
        ):
            raise PeerUnreachable(f"{addr} refuses connections")
        near, far = join_streams(self._fabric, self._endpoint, there)
        if not listener.offer(far):
            raise PeerUnreachable(f"{addr} has too many connections waiting")
        return near

    def _machine_of(self, number: int) -> Endpoint | None:
        found = self._listener_at(number)
        if found is not None:
            return found[0]
        machines = self._fabric.endpoints  # not `Fabric.at`: a detour is taken once
        return machines[number - 1] if 1 <= number <= len(machines) else None


def join_streams(
    fabric: Fabric, dialer: Endpoint, listener: Endpoint
) -> tuple[SimStream, SimStream]:
    """Two ends of a new stream on its own wire."""
    wire = fabric.connect(dialer, listener)
    near, far = WireStream(fabric, wire, 0), WireStream(fabric, wire, 1)
    near.join(far)
    wire.on_broken = [near.break_off, far.break_off]
    return near, far
