"""The simulated `Network` (L2): raw byte streams between machines, below a real `Host`.

Machines have ``/memory/`` numbers, and IPv4 addresses where routers matter: a machine behind
one listens at a private address, and dials through the router's.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

import trio

from p2p.concurrency import Notifier
from p2p.errors import ConfigError, PeerUnreachable
from p2p.multiaddr import Multiaddr
from sim.kernel.queue import SECOND
from sim.net.fabric import DIAL_TIMEOUT, HOLE, Endpoint, Fabric, Wire
from sim.net.stream import SimStream
from sim.node.world import SimWorld

MAX_BACKLOG: Final = 128
"""Streams that may wait to be accepted, as in Linux's listen backlog of old."""
PUNCH_AGAIN: Final = (0.0, 1.0, 2.0, 4.0)
"""Seconds until the next packet to a machine that has not answered the last, as TCP does."""
IP: Final = 1 << 48
"""Numbers of IP addresses begin here: machine and port, of 16 bits."""
PRIVATE: Final = "10.0.0.2"
"""The address that a machine behind a router sees as its own."""
EPHEMERAL: Final = 32768
"""Port from which all dials come but those from the port at which a machine listens."""
DYNAMIC: Final = 1 << 32
"""Numbers given out for ``/memory/0`` begin here, beyond every machine's own."""


def memory_number(addr: Multiaddr) -> int | None:
    """Return the number of a ``/memory/`` address, or None if it is of another kind."""
    place = addr.transport.parts
    return int(place[0][1]) if len(place) == 1 and place[0][0] == "memory" else None


def number_of(addr: Multiaddr) -> int | None:
    """Return the machine number of a ``/memory/`` address or of an IPv4 address and TCP port.

    None if the address is of another kind, or no machine's.
    """
    if addr.relay is not None or addr.parts[0][0] != "ip4":
        return memory_number(addr)
    host, port = addr.host_port
    high, low, *rest = map(int, host.split("."))
    machine = (high - 20) * 250 + low
    return IP | machine << 16 | port if machine > 0 and rest == [0, 1] else None


class WireStream(SimStream):
    """A stream on a wire of its own, which closes with it."""

    def __init__(self, fabric: Fabric, wire: Wire, side: int) -> None:
        super().__init__(fabric, wire.directions[side])
        self._wire = wire
        self._over = False

    def _ended(self) -> None:
        super()._ended()
        self._over = True
        if isinstance(self._other, WireStream) and self._other._over:
            self._wire.forget()


class RoutedStream(WireStream):
    """A stream between IP addresses (a `p2p.transport.connection.AddressedStream`)."""

    def __init__(self, fabric: Fabric, wire: Wire, side: int, remote_addr: Multiaddr) -> None:
        super().__init__(fabric, wire, side)
        self.remote_addr = remote_addr

    def has_spoken(self) -> bool:
        """Return True if there is something to read."""
        return bool(self._inbox or self._eof or self._broken)

    def has_gone(self) -> bool:
        """Return True if the other end has closed its direction."""
        return self._eof or self._broken


@dataclass(slots=True, eq=False)
class _Punch:
    """A dial from the port at which a machine listens, which the other side's may meet."""

    met: trio.Event = field(default_factory=trio.Event)
    stream: SimStream | None = None

    def offer(self, stream: SimStream) -> bool:
        is_first = self.stream is None
        self.stream = self.stream or stream
        self.met.set()
        return is_first


class SimListener:
    """Accepts streams at one address of one machine."""

    def __init__(
        self, fabric: Fabric, endpoint: Endpoint, number: int, addr: Multiaddr
    ) -> None:
        self._addr = addr
        self._fabric = fabric
        self._endpoint = endpoint
        self._number = number
        self._waiting: deque[SimStream] = deque()
        self._changed = Notifier()
        self._closed = False

    @property
    def addr(self) -> Multiaddr:
        return self._addr

    def offer(self, stream: SimStream) -> bool:
        """Queue an incoming stream. Return False if the backlog is full."""
        if self._closed or len(self._waiting) >= MAX_BACKLOG:
            return False
        self._waiting.append(stream)
        self._fabric.wake(self._endpoint, self._changed.notify_all)
        return True

    async def accept(self) -> SimStream:
        """Wait for the next incoming stream and return it."""
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
        """Listen at ``/memory/<n>``, where ``/memory/0`` is this machine's own number or any
        free one, or at a TCP port of this machine."""
        await trio.lowlevel.checkpoint()
        here = self._endpoint
        number = memory_number(addr)
        if number is None and addr.relay is None and addr.parts[0][0] == "ip4":
            port = (
                addr.host_port[1] or max(4000, *(one & 0xFFFF for one in here.listeners), 0) + 1
            )
            number = IP | here.index << 16 | port
            place = Multiaddr.tcp(PRIVATE if here.spec.nat else here.ip, port)
        elif number is None:
            raise ConfigError(f"{addr} is neither a /memory/ nor an /ip4/ address")
        if number == 0:
            number = self._endpoint.index
            while self._listener_at(number) is not None:
                number = max(number, DYNAMIC) + 1
        if self._listener_at(number) is not None:
            raise ConfigError(f"{addr} is taken")
        if number < IP:
            place = Multiaddr((("memory", str(number)),))
        listener = SimListener(self._fabric, self._endpoint, number, place)
        self._endpoint.listeners[number] = listener
        return listener

    def _listener_at(self, number: int) -> tuple[Endpoint, SimListener] | None:
        for endpoint in self._fabric.endpoints:
            listener = endpoint.listeners.get(number)
            if isinstance(listener, SimListener):
                return endpoint, listener
        return None

    async def dial(self, addr: Multiaddr) -> SimStream:
        """Open a stream after a round trip.

        Raises:
            PeerUnreachable: Nothing answers; known after `DIAL_TIMEOUT`, if there is no answer
                at all.
        """
        number = number_of(addr)
        if number is not None:
            number = self._fabric.detours.get(number, number)
        there = None if number is None else self._machine_of(number)
        if number is None or there is None or not self._fabric.reachable(self._endpoint, there):
            await self._world.wait_io(DIAL_TIMEOUT / SECOND)
            raise PeerUnreachable(f"{addr} does not answer")
        await self._world.wait_io(2 * self._fabric.latency_of(self._endpoint, there) / SECOND)
        listener = there.listeners.get(number)
        if not isinstance(listener, SimListener) or not self._fabric.reachable(
            self._endpoint, there
        ):
            raise PeerUnreachable(f"{addr} refuses connections")
        near, far = self._join(there, addr, EPHEMERAL)
        if not listener.offer(far):
            raise PeerUnreachable(f"{addr} has too many connections waiting")
        return near

    async def punch(self, addr: Multiaddr) -> SimStream:
        """Dial from this machine's listening port, which opens its router for the answer.

        A dial of the other side that meets this one becomes the same stream.

        Raises:
            PeerUnreachable: Nothing answers.
        """
        here, number = self._endpoint, number_of(addr)
        there = None if number is None else self._machine_of(number)
        port = next((one & 0xFFFF for one in here.listeners if one >= IP), None)
        if number is None or there is None or port is None:
            raise PeerUnreachable(f"there is no way to dial {addr} from our listener's port")
        if here.spec.nat == "symmetric":
            port = EPHEMERAL + there.index
        source = here.index, port
        target = there.index, number & 0xFFFF
        punch = here.punches[target] = _Punch()
        one_way = self._fabric.latency_of(here, there) / SECOND
        try:
            for pause in PUNCH_AGAIN:
                with trio.move_on_after(pause):
                    await punch.met.wait()
                here.holes[target] = self._world.simulation.queue.now + HOLE
                with trio.move_on_after(one_way):
                    await punch.met.wait()
                if punch.stream is not None:
                    stream, punch.stream = punch.stream, None
                    return stream
                now = self._world.simulation.queue.now
                if not there.admits(*source, now) or not self._fabric.has_path(here, there):
                    continue
                taker = there.punches.get(source) or there.listeners.get(number)
                near, far = self._join(there, addr, source[1])
                if isinstance(taker, (_Punch, SimListener)) and taker.offer(far):
                    return near
                raise PeerUnreachable(f"{addr} refuses connections")
            raise PeerUnreachable(f"{addr} does not answer")
        finally:
            here.punches.pop(target, None)
            if punch.stream is not None:
                punch.stream.reset()

    def _join(self, there: Endpoint, addr: Multiaddr, port: int) -> tuple[SimStream, SimStream]:
        if memory_number(addr) is not None:
            return join_streams(self._fabric, self._endpoint, there)
        wire = self._fabric.connect(self._endpoint, there)
        own = Multiaddr.tcp(self._endpoint.ip, port)
        return _paired(
            wire,
            RoutedStream(self._fabric, wire, 0, addr.transport),
            RoutedStream(self._fabric, wire, 1, own),
        )

    def _machine_of(self, number: int) -> Endpoint | None:
        if number >= IP:
            return self._fabric.at(number - IP >> 16)
        found = self._listener_at(number)
        if found is not None:
            return found[0]
        machines = self._fabric.endpoints  # not `Fabric.at`: a detour is taken once
        return machines[number - 1] if 1 <= number <= len(machines) else None


def join_streams(
    fabric: Fabric, dialer: Endpoint, listener: Endpoint
) -> tuple[SimStream, SimStream]:
    """Return the two ends of a new stream on its own wire."""
    wire = fabric.connect(dialer, listener)
    return _paired(wire, WireStream(fabric, wire, 0), WireStream(fabric, wire, 1))


def _paired(wire: Wire, near: WireStream, far: WireStream) -> tuple[SimStream, SimStream]:
    near.join(far)
    wire.on_broken = [near.break_off, far.break_off]
    return near, far
