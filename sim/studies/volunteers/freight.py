"""Bulk that stands for more bytes than it has: full-size policies on the lines. (L1)

Theory of operation
-------------------
A policy of 62 GB has no bytes in a simulation. Here it has some hundred chunks of 4 KiB, made,
signed, sent, checked and stored by the production code, and each frame of the chosen protocols
is charged on the lines as what it stands for. Every machine has a second endpoint with the same
line, its *freight line*. What a stream of such a protocol is given goes there first: it queues
behind the sender's other freight, travels, queues at the receiver's line, and only when it
would have arrived do its few bytes follow on the ordinary stream. At most two frames of a
stream are under way, and `send_all` returns when a frame has left its own line, as
`sim.studies.intellect2.shardcast` does it at level 0 (the window was calibrated on shaped
links).

What that distorts: frames are as coarse as the chunks, so each hop of store and forward takes
longer than in a swarm; control messages travel beside the bulk instead of behind up to 256 KiB
of it, and pay the ordinary line; a frame that was under way when its connection broke keeps its
place on the line.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Final, cast

import trio

from p2p.concurrency import Notifier
from p2p.host import Host, PeerEvent, PeerState, Stream
from p2p.identity import PeerId, ProtocolId
from sim.kernel.queue import SECOND
from sim.net.fabric import Direction, Endpoint
from sim.node.swarm import SimNode, Swarm

WINDOW: Final = 2
"""Frames under way on one stream."""
_MARKER: Final = 12
"""Bytes of a header that only ends a stream."""

Weigh = Callable[[bytes], float]
"""The number of bytes that a piece given to a stream stands for."""


class Freight:
    """The freight lines of all machines of a swarm."""

    def __init__(self, swarm: Swarm, scales: Mapping[ProtocolId, Weigh]) -> None:
        """Begin without lines; ``scales`` weighs the streams of some protocols, and all others
        are charged as they are.
        """
        self.scales = dict(scales)
        self._swarm = swarm
        self._lines: dict[PeerId, Endpoint] = {}

    def line(self, node: SimNode) -> Endpoint:
        """Return the freight line of a machine, which is made if there is none yet."""
        line = self._lines.get(node.peer_id)
        if line is None:
            fabric, name = self._swarm.fabric, f"{node.name}/freight"
            line = fabric.add(name, node.world.owner, node.endpoint.spec, node.endpoint.region)
            self._lines[node.peer_id] = line
        return line

    def direction(self, node: SimNode, peer: PeerId) -> Direction | None:
        """Return the line from ``node`` to ``peer``; None if ``peer`` is no machine with
        freight.
        """
        source, target = self.line(node), self._lines.get(peer)
        if target is None:
            return None
        return Direction(source, target, self._swarm.fabric.latency_of(source, target))

    async def send(
        self, direction: Direction, size: int, land: Callable[..., None], *args: Any
    ) -> None:
        """Put ``size`` bytes on the line; return when they have left it. ``land`` is called on
        arrival."""
        self._swarm.fabric.transmit(direction, size, "freight", land, *args)
        await self._swarm.sleep_until(direction.src.up_free / SECOND)

    @asynccontextmanager
    async def open_host(self, node: SimNode) -> AsyncIterator[Host]:
        """The ordinary host of one life of ``node``, whose weighed streams take the freight
        lines."""
        line = self.line(node)
        line.set_link(node.endpoint.spec)
        self._swarm.fabric.revive(line, node.world.owner)
        async with node.open_host() as host, trio.open_nursery() as nursery:
            freight = _FreightHost(self, node, host, nursery)
            with host.watching(freight.note):
                yield cast(Host, freight)
            nursery.cancel_scope.cancel()


class _FreightHost:
    """Wraps a host. Its weighed streams take the freight line; everything else is unchanged."""

    def __init__(
        self, freight: Freight, node: SimNode, host: Host, nursery: trio.Nursery
    ) -> None:
        self._freight = freight
        self._node = node
        self._host = host
        self._nursery = nursery
        self._streams: dict[_FreightStream, None] = {}
        self.send = host.send

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)

    async def open_stream(self, peer: PeerId, protocol: ProtocolId) -> Stream:
        """Open a stream; weighed protocols get a slow one."""
        stream = await self._host.open_stream(peer, protocol)
        weigh = self._freight.scales.get(protocol)
        direction = self._freight.direction(self._node, peer)
        if weigh is None or direction is None:
            return stream
        heavy = _FreightStream(self._freight, stream, direction, weigh)
        self._nursery.start_soon(self._follow, heavy)
        return heavy

    async def _follow(self, heavy: _FreightStream) -> None:
        self._streams[heavy] = None
        await heavy.follow()
        del self._streams[heavy]

    def note(self, event: PeerEvent) -> None:
        """Note that a peer has gone. Freight for it never lands, so the task that waits for it
        is woken."""
        if event.state is PeerState.DISCONNECTED:
            for heavy in [heavy for heavy in self._streams if heavy.peer == event.peer]:
                heavy.break_off()


class _FreightStream(Stream):
    """A stream whose frames pass the freight line before the real stream."""

    def __init__(
        self, freight: Freight, stream: Stream, direction: Direction, weigh: Weigh
    ) -> None:
        self.peer = stream.peer
        self.protocol = stream.protocol
        self._freight = freight
        self._stream = stream
        self._direction = direction
        self._weigh = weigh
        self._under_way = 0
        self._landed: deque[bytes | None] = deque()
        self._over = False
        self._changed = Notifier()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.reset()
        await self.aclose()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Return when the freight has left the line."""
        frame = bytes(data)
        await self._wait_room()
        await self._ship(int(self._weigh(frame)), frame)

    async def drained(self, at_most: int = 0) -> None:
        """Freight has left when `send_all` returns."""
        await trio.lowlevel.checkpoint()
        if self._over:
            raise trio.BrokenResourceError("the other side went away")

    async def wait_send_all_might_not_block(self) -> None:
        """Return when another frame may go."""
        await self._wait_room()

    async def _wait_room(self) -> None:
        await trio.lowlevel.checkpoint()
        while self._under_way >= WINDOW and not self._over:
            await self._changed.wait()
        if self._over:
            raise trio.BrokenResourceError("the other side went away")

    async def _ship(self, size: int, frame: bytes | None) -> None:
        self._under_way += 1
        await self._freight.send(self._direction, size, self._land, frame)

    def _land(self, frame: bytes | None) -> None:
        """Deliver the freight on behalf of the receiver."""
        self._under_way -= 1
        self._landed.append(frame)
        self._changed.notify_all()

    async def send_eof(self) -> None:
        """Send the end of the stream behind all freight."""
        await self._wait_room()
        await self._ship(_MARKER, None)

    async def follow(self) -> None:
        """Forward landed freight, byte for byte, to the real stream until its end. It runs as a
        task."""
        try:
            while not self._over:
                while self._landed:
                    frame = self._landed.popleft()
                    if frame is None:
                        await self._stream.send_eof()
                        return
                    await self._stream.send_all(frame)
                await self._changed.wait()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.break_off()

    def break_off(self) -> None:
        """Drop freight under way, since the other side has gone."""
        self._over = True
        self._changed.notify_all()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await self._stream.receive_some(max_bytes)

    def reset(self) -> None:
        """Reset the stream; bytes under way are lost."""
        self.break_off()
        self._stream.reset()

    async def aclose(self) -> None:
        """Close the stream; bytes under way are lost."""
        self.break_off()
        await self._stream.aclose()
