"""Participants of a scenario about policies: honest, late, weak, dripping or lying nodes.

Parameters of a scenario, by number of node: the first ``liars`` claim the best uplink and
corrupt ``lie_share`` of the chunks they send; the next ``drippers`` claim the best uplink and
send bulk at ``drip`` Mbit/s, whatever their line carries; the next ``slow_relays`` are honest,
but since their uplink was measured it has fallen to ``slow_up`` Mbit/s; the next ``holes``
claim four times the best uplink, confirm all that they are given and pass nothing on; the next
``boasters`` relay honestly and claim 2^52 bytes per second; the next ``slanderers`` relay
honestly and complain of every root. Of all others a share of ``overclaim`` claims
``overclaim_by`` times what it has. The last ``late_share`` of all join at ``late_at`` seconds.
Lines are the scenario's ``[link]``, or drawn between ``up_low`` and ``up_high`` with downloads
up to ``down_factor`` as wide; ``weak_share`` of the nodes have ``weak_down`` Mbit/s of
download; ``nat_share`` are behind routers that filter by port, or, for ``symmetric_share`` of
them, are symmetric.

All nodes run the service unchanged and speak the real protocol. What lies and drips is the bulk
stream below the service, so no code of the product knows that it may.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from random import Random
from typing import Any, Final, cast

import trio

from p2p.host import Host, Stream
from p2p.identity import PeerId, ProtocolId
from p2p.shardcast.messages import BULK_PROTOCOL_ID
from p2p.world import World
from sim.net.link import MBIT, LinkSpec, behind_nat, drawn_link
from sim.run.scenario import Scenario

ORIGIN: Final = "origin"
CLAIM: Final = 0.9
"""Share of its uplink that a node offers: a line filled to the brim starves its own acks."""
HOLE_CLAIM: Final = 4
"""Times the best uplink that a hole claims: it wants to be a root."""
PARTICIPANT_PARAMETERS: Final = (
    "origin_up",
    "late_share",
    "late_at",
    "liars",
    "lie_share",
    "drippers",
    "drip",
    "slow_relays",
    "slow_up",
    "up_low",
    "up_high",
    "down_factor",
    "weak_share",
    "weak_down",
    "nat_share",
    "symmetric_share",
    "holes",
    "boasters",
    "slanderers",
    "overclaim",
    "overclaim_by",
)
"""The parameters that `draw_participants` reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Participant:
    """One node's part in a scenario."""

    link: LinkSpec

    claim: float
    """Mbit/s of upload that the roster says it has."""

    joins: float = 0.0
    """Virtual second at which the node joins."""

    lies: float = 0.0
    """Share of the chunks it sends that it corrupts."""

    drips: float = math.inf
    """Mbit/s at which it really sends chunks."""

    is_hole: bool = False
    """True if what it sends in bulk is lost."""

    slanders: bool = False
    """True if it tells the origin that every root lies."""

    @property
    def honest(self) -> bool:
        """True if the metrics ask when it has a policy."""
        return not self.lies and self.drips == math.inf and not self.is_hole


def draw_participants(scenario: Scenario, rng: Random) -> dict[str, Participant]:
    """Draw every node's part: the origin first, then ``n1``, ``n2`` and so on."""
    up = scenario.parameter("origin_up", scenario.link.up)
    line = LinkSpec(up=up, down=scenario.link.down)
    participants = {ORIGIN: Participant(link=line, claim=CLAIM * up)}
    late_from = round((1 - scenario.parameter("late_share", 0.0)) * (scenario.nodes - 1))
    for number in range(1, scenario.nodes):
        link = _draw(scenario, rng)
        joins = scenario.parameter("late_at", 60.0) if number > late_from else 0.0
        participants[f"n{number}"] = Participant(link=link, claim=CLAIM * link.up, joins=joins)
    behind = round(scenario.parameter("nat_share", 0.0) * (scenario.nodes - 1))
    symmetric = round(scenario.parameter("symmetric_share", 0.0) * behind)
    for place, name in enumerate(rng.sample(list(participants)[1:], behind)):
        kind = "symmetric" if place < symmetric else "port"
        link = behind_nat(participants[name].link, kind)
        participants[name] = replace(participants[name], link=link)
    best = max(
        participant.claim for name, participant in participants.items() if name != ORIGIN
    )
    names = iter(list(participants)[1:])
    for name in _next(names, scenario.parameter("liars", 0)):
        participants[name] = replace(
            participants[name], claim=best, lies=scenario.parameter("lie_share", 1.0)
        )
    for name in _next(names, scenario.parameter("drippers", 0)):
        participants[name] = replace(
            participants[name], claim=best, drips=scenario.parameter("drip", 0.5)
        )
    for name in _next(names, scenario.parameter("slow_relays", 0)):
        slow = replace(participants[name].link, up=scenario.parameter("slow_up", 0.5))
        participants[name] = replace(participants[name], link=slow)
    for name in _next(names, scenario.parameter("holes", 0)):
        participants[name] = replace(participants[name], claim=HOLE_CLAIM * best, is_hole=True)
    for name in _next(names, scenario.parameter("boasters", 0)):
        participants[name] = replace(participants[name], claim=8 * 2**52 / MBIT)
    for name in _next(names, scenario.parameter("slanderers", 0)):
        participants[name] = replace(participants[name], slanders=True)
    rest = list(names)
    factor = scenario.parameter("overclaim_by", 16)
    for name in _next(iter(rest), scenario.parameter("overclaim", 0.0) * len(rest)):
        claim = factor * participants[name].claim
        participants[name] = replace(participants[name], claim=claim)
    return participants


def _next(names: Iterator[str], count: float) -> list[str]:
    return list(islice(names, int(count)))


def _draw(scenario: Scenario, rng: Random) -> LinkSpec:
    link = scenario.link
    if "up_low" in scenario.parameters:
        uplinks = scenario.parameter("up_low", 10.0), scenario.parameter("up_high", 200.0)
        link = drawn_link(rng, uplinks, scenario.parameter("down_factor", 4.0))
    if rng.random() < scenario.parameter("weak_share", 0.0):
        link = replace(link, down=scenario.parameter("weak_down", 5.0))
    return link


def dishonest_host(
    host: Host, world: World, participant: Participant, chunk_bytes: int
) -> Host:
    """Return ``host`` itself for an honest participant, else a host whose bulk streams lie or
    drip.
    """
    return (
        host
        if participant.honest
        else cast(Host, _DishonestHost(host, world, participant, chunk_bytes))
    )


class _DishonestHost:
    """Wraps a host. Its bulk streams lie or drip; everything else is unchanged."""

    def __init__(
        self, host: Host, world: World, participant: Participant, chunk_bytes: int
    ) -> None:
        self._host = host
        self._world = world
        self._part = participant
        self._chunk_bytes = chunk_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)

    async def open_stream(self, peer: PeerId, protocol: ProtocolId) -> Stream:
        """Open a stream; bulk streams of dishonest nodes drip or lie."""
        stream = await self._host.open_stream(peer, protocol)
        if protocol != BULK_PROTOCOL_ID:
            return stream
        return cast(
            Stream, _DishonestStream(stream, self._world, self._part, self._chunk_bytes)
        )


class _DishonestStream(trio.abc.SendStream):
    """Sends too slowly, or altered bytes."""

    def __init__(
        self, stream: Stream, world: World, participant: Participant, chunk_bytes: int
    ) -> None:
        self._stream = stream
        self._world = world
        self._part = participant
        self._chunk_bytes = chunk_bytes

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Take as long as the dripping line would; then send, perhaps with another last
        byte."""
        if self._part.is_hole:
            await self._world.sleep(0)
            return
        await self._world.sleep(len(data) * 8 / MBIT / self._part.drips)
        await self._stream.send_all(self._corrupted(bytes(data)))

    def _corrupted(self, data: bytes) -> bytes:
        # Chunks of random weights do not compress; news in bulk are two orders of magnitude
        # smaller. The last byte of a frame is the chunk's, so the frame stays well-formed and
        # only the digest is wrong.
        is_chunk = len(data) >= self._chunk_bytes // 2
        if is_chunk and self._world.rng("lies").random() < self._part.lies:
            return data[:-1] + bytes((data[-1] ^ 1,))
        return data

    async def drained(self, at_most: int = 0) -> None:
        await self._stream.drained(at_most)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self._stream.aclose()
