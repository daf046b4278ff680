"""Hosts with real handshakes (L2): what arrives was sent, once and in order; in the end all
reach all.

Messages are read as the streams that they are, so that the order of each lane can be judged.
What a host says of its connections, as events and when asked, must be the same story, and what
waits in its outbox must be what it counts. Whoever flipped bits may still be refused by its
peers, and need not be reached.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import trio

from p2p.errors import PeerUnreachable, ProtocolNotSupported, RemoteProtocolError
from p2p.host import PeerEvent, PeerState, Stream, request, serve_requests
from p2p.identity import PeerId, ProtocolId
from p2p.swarm.swarm import SwarmHost, open_host
from p2p.wire import FrameReader, pack, unpack_untrusted
from sim.node.swarm import SimNode, Swarm
from sim.run.scenario import Scenario
from tests.simulation.storms import Broken

NOTE: Final = ProtocolId("/storm/note/1.0.0")
ASK: Final = ProtocolId("/storm/ask/1.0.0")
SIZES: Final = (10, 300, 40_000)
"""Bytes of messages: a few wait for room while smaller ones would find it."""
READ: Final = 40
"""Notes after which a reader has enough of the stream and resets it, as a peer may."""
TROUBLE: Final = (
    PeerUnreachable,
    ProtocolNotSupported,
    RemoteProtocolError,
    trio.BrokenResourceError,
)
LAST: Final = 3  # notes when all is quiet; one may be lost with the stream that its reader ends
PATIENCE: Final = 15.0  # seconds that a request may take


class TransportStorm:
    """A `sim.run.scenario.Workload`."""

    def __init__(self) -> None:
        self._open: dict[str, SwarmHost] = {}
        self._linked: dict[str, dict[PeerId, None]] = {}
        self._names: dict[PeerId, str] = {}
        self._heard: dict[str, dict[tuple[str, int, int], None]] = {}
        self._told: dict[str, int] = {}
        self._liars: dict[str, None] = {}

    async def run(self, swarm: Swarm, scenario: Scenario) -> Mapping[str, float | int | str]:
        self._until = scenario.parameter("talk_until", 75.0)
        swarm.on_death.append(lambda node: self._open.pop(node.name, None) and None)
        for number in range(scenario.nodes):
            node = swarm.add(f"n{number}", self._live, link=scenario.link)
            self._names[node.peer_id] = node.name
        swarm.every(0.5, lambda: self._watch(swarm))
        await swarm.sleep_until(scenario.duration - 2 * PATIENCE)
        return await self._measure(swarm)

    async def _live(self, node: SimNode) -> None:
        heard = self._heard[node.name] = {}
        linked = self._linked[node.name] = {}
        place = node.addr.transport
        async with open_host(
            network=node.network, world=node.world, listen=[place], strict=True
        ) as host:
            with host.watching(lambda event: _keep_book(node.name, host, linked, event)):
                host.set_handler(
                    NOTE, lambda stream: self._read_notes(node.name, heard, stream)
                )
                host.set_handler(ASK, serve_requests(_answer(node.name)))
                for other in node.siblings:
                    host.add_addrs(other.peer_id, [other.addr])
                self._open[node.name] = host
                await self._talk(node)
                await trio.sleep_forever()

    async def _talk(self, node: SimNode) -> None:
        """Notes to a few at a time, and questions to some."""
        dice = node.world.rng("talk")
        others = [other for other in node.siblings if other is not node]
        while node.simulation.now < self._until:
            friend = dice.choice(others)
            for _ in range(dice.randint(1, 4)):
                self._tell(node, friend, dice.choice(SIZES))
            if dice.random() < 0.2:
                await self._asked(node, dice.choice(others))
            await node.world.sleep(dice.uniform(0.0, 1.0))

    def _tell(self, node: SimNode, other: SimNode, size: int) -> tuple[str, int, int]:
        """Send one note; returns its author, his life and its number."""
        number = self._told[node.name] = self._told.get(node.name, 0) + 1
        data = pack([node.name, node.life, number, _text(node.name, number, size)])
        if node.name in self._open:
            # Where somebody else answered is forgotten; the peer's next heartbeat would name it
            # again.
            self._open[node.name].add_addrs(other.peer_id, [other.addr])
            self._open[node.name].send(other.peer_id, NOTE, data)
        return node.name, node.life, number

    async def _asked(self, node: SimNode, other: SimNode) -> bool:
        """Whether ``other`` answers; somebody else must not."""
        host = self._open.get(node.name)
        if host is None:
            return False
        question = f"{node.name} at {node.simulation.now:.6f}".encode()
        with trio.move_on_after(PATIENCE):
            try:
                answer = await request(host, other.peer_id, ASK, question)
            except TROUBLE:
                return False
            if answer != question + b" to " + other.name.encode():
                raise Broken(
                    f"{node.name} asked {other.name} {question!r} and was told {answer!r}"
                )
            return True
        return False

    async def _read_notes(
        self, name: str, heard: dict[tuple[str, int, int], None], stream: Stream
    ) -> None:
        reader = FrameReader(stream, 2 * max(SIZES))
        last = (-1, -1)
        for _ in range(READ):
            data = await reader.receive()
            if data is None:
                return
            author, life, number, text = unpack_untrusted(data)
            if self._names[stream.peer] != author or text != _text(author, number, len(text)):
                raise Broken(
                    f"{name} read what {author} never wrote, from {self._names[stream.peer]}"
                )
            if (author, life, number) in heard:
                raise Broken(f"{name} was told note {number} of {author} twice")
            if (life, number) <= last:
                raise Broken(f"{name} was told note {number} of {author} after {last[1]}")
            last = life, number
            heard[author, life, number] = None
        stream.reset()

    def _watch(self, swarm: Swarm) -> None:
        for node in swarm.nodes.values():
            if node.endpoint.lies:
                self._liars[node.name] = None
        for name, host in self._open.items():
            if list(self._linked[name]) != list(host.connected):
                raise Broken(
                    f"{name} says {host.connected}, and its events {list(self._linked[name])}"
                )
            counted = {peer: size for peer, size in host._outbox._bytes.items() if size}
            waiting: dict[PeerId, int] = {}
            for lane in host._outbox._lanes.values():
                for message in lane.waiting:
                    waiting[lane.peer] = waiting.get(lane.peer, 0) + len(message)
            if counted != waiting:
                raise Broken(f"{name} counts {counted} where {waiting} wait")

    async def _measure(self, swarm: Swarm) -> Mapping[str, float | int | str]:
        honest = [
            node
            for node in swarm.alive
            if node.name in self._open and node.name not in self._liars
        ]
        pairs = [(one, other) for one in honest for other in honest if one is not other]
        answered: list[bool] = []

        async def ask(one: SimNode, other: SimNode) -> None:
            answered.append(await self._asked(one, other))

        last: dict[tuple[str, str], list[tuple[str, int, int]]] = {}
        for _ in range(LAST):
            for one, other in pairs:
                last.setdefault((one.name, other.name), []).append(self._tell(one, other, 100))
            await swarm.sleep(PATIENCE / LAST)
        async with trio.open_nursery() as nursery:
            for one, other in pairs:
                nursery.start_soon(ask, one, other)
        told = sum(
            any(note in self._heard[other] for note in notes)
            for (_, other), notes in last.items()
        )
        return {
            "told": round(told / max(1, len(pairs)), 4),
            "answered": round(sum(answered) / max(1, len(pairs)), 4),
            "notes": sum(map(len, self._heard.values())),
            "honest": len(honest),
        }


def _keep_book(
    name: str, host: SwarmHost, linked: dict[PeerId, None], event: PeerEvent
) -> None:
    if event.state is PeerState.CONNECTED:
        if event.peer in linked:
            raise Broken(f"{name} is connected to {event.peer} twice")
        linked[event.peer] = None
    elif event.state is PeerState.DISCONNECTED:
        if event.peer not in linked or event.peer in host.connected:
            raise Broken(f"{name} lost {event.peer}, which it has not")
        del linked[event.peer]


def _answer(name: str):
    async def answer(_: PeerId, question: bytes) -> bytes:
        return question + b" to " + name.encode()

    return answer


def _text(name: str, number: int, size: int) -> bytes:
    line = f"{name} {number} ".encode()
    return (line * (1 + size // len(line)))[:size]
