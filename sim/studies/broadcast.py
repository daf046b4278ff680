"""Time for a policy to reach every node, while some die on the way (L0).

The forest is the real one (`p2p.shardcast.forest.build_forest`); what runs around it is a relay
reduced to its flow: a chunk that arrives goes on to the children of its stripe, two under way
to each, and the children of a dead relay are fed by the next living relay above it. Chunks have
sizes and no bytes, so 62 GB fit. Nodes beyond the roster's limit hang on eight random members
of it.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from random import Random
from typing import ClassVar

from p2p.identity import PeerId
from p2p.shardcast.forest import Forest, Roster, RosterEntry, build_forest
from p2p.shardcast.manifest import PolicyVersion
from sim.kernel.queue import SECOND, Owner
from sim.kernel.simulation import Simulation
from sim.net.fabric import Direction, Fabric
from sim.net.link import LinkSpec, drawn_link
from sim.run.scenario import Scenario

NOTICE = 2 * SECOND
"""Seconds until a relay's death is acted upon: a reset is seen at once, a silent death by the
first stall."""


class _Feed(Direction):
    """Chunks of one stripe from one node to another."""

    __slots__ = ("giver", "queue", "taker", "under_way")

    def __init__(self, giver: FlowNode, taker: FlowNode, latency: int) -> None:
        super().__init__(giver.endpoint, taker.endpoint, latency)
        self.giver = giver
        self.taker = taker
        self.queue: deque[int] = deque()
        self.under_way = 0


class FlowNode:
    """A machine: its chunks, and whom it feeds in each stripe."""

    __slots__ = ("done_at", "endpoint", "feeds", "has", "missing", "name", "owner", "peer")

    def __init__(
        self, fabric: Fabric, name: str, peer: PeerId, link: LinkSpec, chunks: int
    ) -> None:
        self.name = name
        self.peer = peer
        self.owner = Owner(name)
        self.endpoint = fabric.add(name, self.owner, link)
        self.has = bytearray(chunks)
        self.missing = chunks
        self.done_at = math.inf
        self.feeds: dict[int, list[_Feed]] = {}


class Broadcast:
    """A policy, handed out once to everybody."""

    levels: ClassVar = (0,)
    parameters: ClassVar[Sequence[str]] = (
        "chunks",
        "chunk_bytes",
        "relays",
        "relay_up",
        "up_low",
        "up_high",
        "down_factor",
        "origin_up",
        "deaths",
        "deaths_until",
    )

    def run_bare(
        self, simulation: Simulation, scenario: Scenario
    ) -> Mapping[str, float | int | str]:
        """Set up, let it flow, and measure."""
        self._simulation = simulation
        self._queue = simulation.queue
        self._fabric = Fabric(simulation, lambda one, other: scenario.latency)
        self._chunks = int(scenario.parameter("chunks", 64))
        self._chunk_bytes = int(scenario.parameter("chunk_bytes", 4 * 1024 * 1024))
        self._rng = simulation.rng("swarm", "broadcast")
        self._duplicates = 0
        self._nodes = [
            self._make_node(f"n{number}", scenario) for number in range(scenario.nodes)
        ]
        self._by_peer = {node.peer: node for node in self._nodes}
        self._origin = self._make_origin(scenario)
        self._forest = self._plant()
        relays = int(scenario.parameter("relays", 0))
        self._stripes = 1 if relays else len(self._forest.stripes)
        if relays:
            self._connect_two_tiers(relays, scenario.parameter("relay_up", 10_000.0))
        else:
            self._connect()
        self._schedule_deaths(scenario)
        for chunk in range(self._chunks):
            self._pass_on(self._origin, chunk)
        self._queue.run(until=scenario.duration)
        return self._measure()

    def _make_node(self, name: str, scenario: Scenario) -> FlowNode:
        uplinks = scenario.parameter("up_low", 20.0), scenario.parameter("up_high", 1000.0)
        link = drawn_link(self._rng, uplinks, scenario.parameter("down_factor", 4.0))
        peer = self._simulation.keys.signer(name).peer_id
        return FlowNode(self._fabric, name, peer, link, self._chunks)

    def _make_origin(self, scenario: Scenario) -> FlowNode:
        up = scenario.parameter("origin_up", 1000.0)
        peer = self._simulation.keys.signer("origin").peer_id
        origin = FlowNode(self._fabric, "origin", peer, LinkSpec(up=up, down=up), self._chunks)
        origin.has = bytearray(b"\1") * self._chunks
        self._by_peer[peer] = origin
        return origin

    def _plant(self) -> Forest:
        entries = [
            RosterEntry(node.peer, 0.9 * node.endpoint.spec.up * 1e6 / 8)
            for node in self._nodes
        ]  # what nodes offer of their uplink
        signer = self._simulation.keys.signer("origin")
        return build_forest(Roster.sign(signer, b"simulated", 1, entries), PolicyVersion(1))

    def _connect(self) -> None:
        peers = self._forest.roster.peers
        for number, stripe in enumerate(self._forest.stripes):
            self._feed(number, self._origin, self._by_peer[peers[stripe.root]])
            for place, children in stripe.children.items():
                for child in children:
                    self._feed(number, self._by_peer[peers[place]], self._by_peer[peers[child]])
        members = dict.fromkeys(peers)
        for node in self._nodes:
            if node.peer not in members:
                for number in range(len(self._forest.stripes)):
                    self._feed(number, self._by_peer[self._rng.choice(peers)], node)

    def _connect_two_tiers(self, relays: int, mbit: float) -> None:
        """Connect the reference's design: an origin, fixed relay servers, and clients spread
        over them.
        """
        for node in self._nodes[:relays]:
            node.endpoint.set_link(LinkSpec(up=mbit, down=mbit))
            self._feed(0, self._origin, node)
        for number, node in enumerate(self._nodes[relays:]):
            self._feed(0, self._nodes[number % relays], node)

    def _feed(self, stripe: int, giver: FlowNode, taker: FlowNode) -> _Feed:
        latency = self._fabric.latency_of(giver.endpoint, taker.endpoint)
        feed = _Feed(giver, taker, latency)
        giver.feeds.setdefault(stripe, []).append(feed)
        return feed

    # The flow

    def _pass_on(self, node: FlowNode, chunk: int) -> None:
        for feed in node.feeds.get(chunk % self._stripes, ()):
            feed.queue.append(chunk)
            self._pump(feed)

    def _pump(self, feed: _Feed) -> None:
        while (
            feed.under_way < 2
            and feed.queue
            and feed.giver.owner.alive
            and feed.taker.owner.alive
        ):
            chunk = feed.queue.popleft()
            if not feed.taker.has[chunk]:
                feed.under_way += 1
                self._fabric.transmit(
                    feed, self._chunk_bytes, "chunk", self._arrived, feed, chunk
                )

    def _arrived(self, feed: _Feed, chunk: int) -> None:
        feed.under_way -= 1
        self._pump(feed)
        node = feed.taker
        if node.has[chunk]:
            self._duplicates += 1
            return
        node.has[chunk] = 1
        node.missing -= 1
        if node.missing == 0:
            node.done_at = self._queue.now / SECOND
        self._pass_on(node, chunk)

    # Deaths

    def _schedule_deaths(self, scenario: Scenario) -> None:
        share = scenario.parameter("deaths", 0.02)
        rng: Random = self._rng
        for node in rng.sample(self._nodes, int(share * len(self._nodes))):
            when = int(rng.uniform(0, scenario.parameter("deaths_until", 30.0)) * SECOND)
            self._queue.schedule(when, self._queue.kernel, "death", self._die, node)

    def _die(self, node: FlowNode) -> None:
        node.owner.alive = False
        self._queue.schedule(
            self._queue.now + NOTICE, self._queue.kernel, "adoption", self._adopt, node
        )

    def _adopt(self, dead: FlowNode) -> None:
        """Let the next living relay above take over the dead node's feeds."""
        peers, positions = self._forest.roster.peers, self._forest.roster.positions
        for stripe, feeds in dead.feeds.items():
            above = self._origin
            if dead.peer in positions and self._stripes > 1:
                for place in self._forest.stripes[stripe].ancestors(positions[dead.peer]):
                    if self._by_peer[peers[place]].owner.alive:
                        above = self._by_peer[peers[place]]
                        break
            for feed in feeds:
                self._resume(stripe, above, feed.taker)
        dead.feeds = {}

    def _resume(self, stripe: int, giver: FlowNode, taker: FlowNode) -> None:
        if taker.owner.alive:
            feed = self._feed(stripe, giver, taker)
            wanted = range(stripe, self._chunks, self._stripes)
            feed.queue.extend(
                chunk for chunk in wanted if giver.has[chunk] and not taker.has[chunk]
            )
            self._pump(feed)
        else:  # two in a row: the taker's own children have no parent until it is adopted too
            for feed in taker.feeds.pop(stripe, []):
                self._resume(stripe, giver, feed.taker)

    def _measure(self) -> Mapping[str, float | int | str]:
        alive = [node for node in self._nodes if node.owner.alive]
        done = sorted(node.done_at for node in alive if node.missing == 0)
        size = self._chunks * self._chunk_bytes
        rate = [node.endpoint.spec.up * 1e6 / 8 for node in alive]
        slowest = min(node.endpoint.spec.down for node in alive) * 1e6 / 8
        origin_up = self._origin.endpoint.spec.up * 1e6 / 8
        bound = max(
            size / origin_up, size / slowest, len(alive) * size / (origin_up + sum(rate))
        )
        last = done[-1] if len(done) == len(alive) else math.inf
        self._simulation.distributions["seconds until the policy was whole"] = done
        self._simulation.distributions["bytes sent, by node"] = [
            float(n.endpoint.sent) for n in self._nodes
        ]
        return {
            "completed": round(len(done) / len(alive), 5),
            "seconds_50": round(statistics.median(done), 3) if done else math.inf,
            "seconds_99": round(done[int(0.99 * (len(done) - 1))], 3) if done else math.inf,
            "seconds_last": round(last, 3),
            "bound_seconds": round(bound, 3),
            "times_bound": round(last / bound, 3),
            "origin_policies_sent": round(self._origin.endpoint.sent / size, 3),
            "duplicate_share": round(self._duplicates / max(1, self._chunks * len(alive)), 5),
            "dead": len(self._nodes) - len(alive),
            "stripes": self._stripes,
        }
