"""Time for 62 GB to reach 200 volunteers, by SHARDCAST's real core (L0).

Theory of operation
-------------------
Every site runs the production `ShardcastCore` on the heap: real forest, credits, have-lists,
pulls, digests and signatures. What carries its effects is a reduced driver with the service's
rules: one bulk stream per pair, a chunk is reported as sent when it has left, at most two are
under way, a death is learnt by a reset.

Sizes are by modelling. A chunk's object has a few bytes, which are hashed, and the length of
the 4 MiB that the core expects; on the lines it is charged ``coarse`` times that, and stands
for so many chunks. The core sees uplinks divided, and its patience multiplied, by the same
factor: all that it estimates keeps its proportions. A chunk that is coarse takes longer per
hop, so times come out late rather than early. Control messages travel beside the bulk, with
latency only: behind chunks many times too large they would wait far longer than in a swarm
(their bytes are counted). Announcements reach all nodes after three latencies: gossip is
another scenario's question. Relay servers of the reference take part as ordinary peers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import ClassVar, Final

from p2p.identity import PeerId
from p2p.shardcast import NO_POLICY, PolicyVersion, RosterEntry, ShardcastConfig, ShardcastStats
from p2p.shardcast.codec import DECODE_RATE
from p2p.shardcast.core import events as ev
from p2p.shardcast.core.core import ShardcastCore
from p2p.shardcast.core.statements import Statements
from p2p.shardcast.forest import Roster, build_forest
from p2p.shardcast.index import MAX_SPAN, Index, PolicyFile, Span, digest_of
from p2p.shardcast.manifest import Encoding, Manifest
from p2p.shardcast.messages import ChunkHeader, Message, encode_message
from sim.errors import SimulationError
from sim.kernel.queue import SimTimer, nanoseconds
from sim.kernel.simulation import Simulation
from sim.net.fabric import Direction
from sim.net.link import MBIT
from sim.run.scenario import Scenario
from sim.studies.intellect2.sites import SITE_PARAMETERS, Site, Sites
from sim.workloads.policies import depth_of

RUN: Final = b"simulated run"
WINDOW: Final = 2
"""Chunks under way on one stream, as calibrated for the link model."""
GOSSIP_HOPS: Final = 3
"""Latencies until an announcement is everywhere: a mesh of degree six spans 200 nodes in
that."""
DIAL_LATENCIES: Final = 8
"""Four round trips to open a connection."""
CLAIM: Final = 0.9
"""Share of its uplink that a node offers."""


class Payload(bytes):
    """Stands for a chunk in the simulation: the bytes that identify it, and the chunk's
    length.
    """

    def __len__(self) -> int:
        return MAX_SPAN


class _Stream(Direction):
    """A stream from one site to another."""

    __slots__ = ("items", "taker", "under_way")

    def __init__(self, giver: Peer, taker: Peer, latency: int) -> None:
        super().__init__(giver.site.endpoint, taker.site.endpoint, latency)
        self.taker = taker
        self.items: deque[Message | ChunkHeader] = deque()
        self.under_way = 0


class Peer:
    """A site's core, with its driver."""

    def __init__(self, swarm: CoreSwarm, site: Site) -> None:
        sites = swarm.sites
        self.site = site
        self._swarm = swarm
        self._queue = sites.queue
        statements = Statements(
            RUN, lambda peer: peer == sites.origin.peer, sites.simulation.keys.verify
        )
        config = ShardcastConfig(stall=ShardcastConfig().stall * swarm.coarse)
        self.core = ShardcastCore(
            site.peer, config, statements, sites.simulation.rng(site.name, "shardcast")
        )
        self._streams: dict[PeerId, _Stream] = {}
        self._timer: SimTimer | None = None
        self._timer_at = math.inf

    def handle(self, event: ev.Event) -> None:
        """Let the core handle `event` and carry out its effects."""
        for effect in self.core.handle(event, self._swarm.sites.now):
            self._apply(effect)
        due = self.core.next_deadline
        if due < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = due
            self._timer = self._queue.schedule(
                nanoseconds(due), self.site.owner, "tick", self._tick
            )

    def _tick(self) -> None:
        self._timer, self._timer_at = None, math.inf
        self.handle(ev.Tick())

    def _apply(self, effect: ev.Effect) -> None:
        match effect:
            case ev.Send(peer, message):
                self._say(peer, message)
            case ev.Push(peer, item):
                stream = self._stream(peer)
                if stream is not None:
                    stream.items.append(item)
                    self._pump(stream)
            case ev.Gossip(message):
                self._swarm.gossip(self, message)
            case ev.Finish(policy):
                self._finish(policy)
            case ev.Penalise(peer, _, reason):
                raise SimulationError(
                    f"{self.site.name} convicts {peer!r}, who is honest: {reason}"
                )
            case _:
                pass  # there is no disk, and announcements are passed on by the swarm

    def _finish(self, policy: bytes) -> None:
        sites = self._swarm.sites
        seconds = sites.policy_bytes / DECODE_RATE
        sites.arrived(self.site, seconds)
        due = sites.queue.now + nanoseconds(seconds)
        sites.queue.schedule(due, self.site.owner, "stored", self.handle, ev.Stored(policy))

    # Connections

    def _stream(self, peer: PeerId) -> _Stream | None:
        """Return the stream to ``peer``, made if need be; None if the peer is dead."""
        stream = self._streams.get(peer)
        if stream is None:
            other = self._swarm.peers[peer]
            if not (other.site.alive and self.site.alive):
                return None
            self._connect(other)
            other._connect(self)
            stream = self._streams[peer]
        return stream

    def _connect(self, other: Peer) -> None:
        latency = self._swarm.sites.fabric.latency_of(self.site.endpoint, other.site.endpoint)
        stream = self._streams[other.site.peer] = _Stream(self, other, latency)
        stream.last = self._queue.now + DIAL_LATENCIES * latency
        self._queue.schedule(
            stream.last, self.site.owner, "up", self.handle, ev.PeerUp(other.site.peer)
        )

    def _say(self, peer: PeerId, message: Message) -> None:
        stream = self._stream(peer)
        if stream is not None:
            size = len(encode_message(message))
            self.site.endpoint.sent += size
            self._swarm.control_bytes += size
            stream.last = max(stream.last, self._queue.now + stream.latency)
            event = ev.Heard(self.site.peer, message)
            self._queue.schedule(
                stream.last, stream.taker.site.owner, "message", stream.taker.handle, event
            )

    def _pump(self, stream: _Stream) -> None:
        while stream.items and stream.under_way < WINDOW:
            item = stream.items.popleft()
            if not isinstance(item, ChunkHeader):
                self._say(stream.taker.site.peer, item)
                continue
            stream.under_way += 1
            self._swarm.sites.fabric.transmit(
                stream, MAX_SPAN * self._swarm.coarse, "chunk", self._came, stream, item
            )
            left = self.site.endpoint.up_free
            event = ev.ChunkSent(stream.taker.site.peer, MAX_SPAN)
            self._queue.schedule(left, self.site.owner, "left", self._left, stream, event)

    def _left(self, stream: _Stream, event: ev.ChunkSent) -> None:
        if self._streams.get(event.peer) is stream:
            self.handle(event)

    def _came(self, stream: _Stream, header: ChunkHeader) -> None:
        """Deliver a chunk of ours to its taker. The event belongs to the taker."""
        stream.under_way -= 1
        if self.site.alive:
            self._pump(stream)
        size = len(self._swarm.chunks[header.index])
        stream.taker.handle(ev.ChunkCame(self.site.peer, header, size))

    def die(self) -> None:
        """End the process; connected peers get a reset. Bytes under way still arrive."""
        self.site.owner.alive = False
        for stream in self._streams.values():
            other = stream.taker
            due = self._queue.now + stream.latency
            self._queue.schedule(due, other.site.owner, "reset", other.lose, self.site.peer)

    def lose(self, peer: PeerId) -> None:
        """Drop the connection to ``peer``."""
        self._streams.pop(peer, None)
        self.handle(ev.PeerDown(peer))


class CoreSwarm:
    """All sites, each with a core, and the origin's policies."""

    def __init__(self, sites: Sites, coarse: int) -> None:
        self.sites = sites
        self.coarse = coarse
        self.control_bytes = 0
        self.chunks: list[Payload] = []
        self.peers = {site.peer: Peer(self, site) for site in sites.all_sites}

    def roster(self) -> Roster:
        """Return every living site with nine tenths of its uplink."""
        signer = self.sites.simulation.keys.signer("origin")
        entries = [
            RosterEntry(site.peer, CLAIM * site.endpoint.spec.up * MBIT / 8 / self.coarse)
            for site in self.sites.all_sites
            if site.alive and site is not self.sites.origin
        ]
        return Roster.sign(signer, RUN, 1, entries)

    def publish(self) -> None:
        """Let the origin announce and hand out the policy."""
        count = math.ceil(self.sites.policy_bytes / (MAX_SPAN * self.coarse))
        self.chunks = [Payload(b"%d" % place) for place in range(count)]
        spans = [Span(digest_of(data), MAX_SPAN) for data in self.chunks]
        index = Index.of([PolicyFile("", count * MAX_SPAN)], spans)
        encodings = (Encoding.anchor(index, index.size),)
        manifest = Manifest(
            self.sites.simulation.keys.signer("origin").peer_id,
            RUN,
            PolicyVersion(1),
            NO_POLICY,
            b"",
            index.digest,
            index.size,
            encodings,
        ).sign(self.sites.simulation.keys.signer("origin"))
        self.peers[self.sites.origin.peer].handle(ev.Publish(manifest, index, self.roster()))

    def gossip(self, author: Peer, message: Message) -> None:
        """Bring an announcement to all."""
        queue, scenario = self.sites.queue, self.sites.scenario
        due = queue.now + nanoseconds(GOSSIP_HOPS * scenario.latency)
        event = ev.Heard(author.site.peer, message, gossip=True)
        for peer in self.peers.values():
            if peer is not author and peer.site.alive:
                queue.schedule(due, peer.site.owner, "gossip", peer.handle, event)


class Intellect2:
    """The real core, striped relay forest and pull repair."""

    levels: ClassVar = (0,)
    parameters: ClassVar[Sequence[str]] = (*SITE_PARAMETERS, "coarse")

    def run_bare(
        self, simulation: Simulation, scenario: Scenario
    ) -> Mapping[str, float | int | str]:
        """Set up, let it flow, and measure."""
        sites = Sites(simulation, scenario)
        swarm = CoreSwarm(sites, int(scenario.parameter("coarse", 16)))
        queue = sites.queue
        queue.schedule(0, sites.origin.owner, "publish", swarm.publish)
        for site in sites.workers:
            if math.isfinite(site.died):
                queue.schedule(
                    nanoseconds(site.died), queue.kernel, "death", swarm.peers[site.peer].die
                )
        queue.run(until=scenario.duration)
        return {
            **sites.distribution(),
            **_counted([peer.core.stats for peer in swarm.peers.values()], sites, swarm),
            "forest_depth": depth_of(build_forest(swarm.roster(), PolicyVersion(1))),
            **sites.generation(),
        }


def _counted(
    stats: list[ShardcastStats], sites: Sites, swarm: CoreSwarm
) -> dict[str, float | int | str]:
    from_peers = sum(one.from_peers for one in stats)
    from_origin = sum(one.from_origin for one in stats)
    came = max(1, from_peers + from_origin)
    total = sum(site.endpoint.sent for site in sites.all_sites)
    return {
        "from_peers_share": round(from_peers / came, 4),
        "duplicate_share": round(sum(one.duplicates for one in stats) / came, 4),
        "repaired_share": round(sum(one.chunks_repaired for one in stats) * MAX_SPAN / came, 4),
        "versions_skipped": sum(one.versions_skipped for one in stats),
        "control_share": round(swarm.control_bytes / max(1, total), 7),
    }
