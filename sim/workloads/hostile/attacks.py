"""Three attacks of hostile members on membership and gossip (L1).

`sim.workloads.hostile.workload` describes how every attack runs and what is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import count
from random import Random
from typing import Any, Final, cast

import trio

from p2p.gossip import Gossip, GossipConfig, Validity, open_gossip
from p2p.gossip.messages import PROTOCOL_ID as MESHSUB, Rpc, encode_rpc
from p2p.host import MAX_MESSAGE, Host, MessageHandler
from p2p.identity import PeerId, ProtocolId
from p2p.membership import Membership
from p2p.membership.heartbeat import (
    MAX_INTERVAL,
    MIN_INTERVAL,
    PROTOCOL_ID as HEARTBEAT,
    SignedHeartbeat,
)
from p2p.membership.messages import (
    MAX_HEARTBEATS,
    Beat,
    Join,
    Message,
    Neighbor,
    NeighborReply,
    Suspect,
    decode_message_untrusted,
    encode_message,
)
from sim.node.host import SimHost
from sim.node.swarm import SimNode, Swarm
from sim.workloads.hostile.heartbeats import say_alive
from sim.workloads.hostile.workload import HONEST, HostileWorkload, Metrics

TOPIC: Final = "policies"
EARLIER_TOPIC: Final = "earlier policies"
"""Topic of honest nodes before the attack, so that traffic under attack is compared with a
swarm that gossips."""
PUBLISH_EVERY: Final = 2.0
"""Seconds between two publications, before the attack and under it."""
SUBSCRIBED_AFTER: Final = 4.0
"""Seconds into the attack on gossip at which honest nodes hear the topic: ghosts are connected
by then."""


class Attacker:
    """A hostile member: it has its membership's knowledge, and signs any statement."""

    def __init__(self, node: SimNode, host: SimHost, membership: Membership) -> None:
        self._node = node
        self._host = host
        self._membership = membership
        self._numbers = count(int(node.world.wall() * 1000) + 2**20)

    def alive(self, interval: float = 5.0) -> SignedHeartbeat:
        """Return a new heartbeat of the attacker's own."""
        wall, addrs = self._node.world.wall(), self._host.addrs
        return say_alive(
            self._node.world.signer, next(self._numbers), wall, interval=interval, addrs=addrs
        )

    def silence(self) -> None:
        """End the honest membership of this node without the good-bye that its service would
        say."""
        self._membership._driver._is_running = False

    def words(self) -> list[SignedHeartbeat]:
        """Return the newest statement that it holds of every member."""
        view = self._membership._core._members
        entries = (view.get(member.peer) for member in self._membership.members())
        return [entry.signed for entry in entries if entry is not None]

    def send(self, peer: PeerId, message: Message) -> None:
        """Send a membership message to any peer."""
        self._host.send(peer, HEARTBEAT, encode_message(message))


class AccuseFlood(HostileWorkload):
    """Members accuse all others, as fast as their quotas let them, and choose their own
    intervals.

    A third of the hostile only accuse; a third beat with the shortest interval there is, stop,
    and are accused by others; a third beat once with the longest, and stay silent. ``every``
    seconds each accuser sends the newest words of up to 32 members that it has not accused with
    these words yet to ``targets`` honest nodes.
    """

    async def be_hostile(self, node: SimNode, host: SimHost, membership: Membership) -> None:
        """Play one of the three roles. The member's index among the hostile members decides
        which."""
        attacker, rng = Attacker(node, host, membership), node.world.rng("accuse")
        honest = [other.peer_id for other in node.siblings if other.name.startswith(HONEST)]
        role = list(self.hostile).index(node.peer_id) % 3
        if role == 0:
            await self._accuse(node, attacker, honest, rng)
        attacker.silence()
        interval = MIN_INTERVAL if role == 1 else MAX_INTERVAL
        while True:
            for peer in rng.sample(honest, min(8, len(honest))):
                attacker.send(peer, Beat(False, attacker.alive(interval)))
            await node.world.sleep(2.0 if role == 1 else 10**6)

    async def _accuse(
        self, node: SimNode, attacker: Attacker, honest: list[PeerId], rng: Random
    ) -> None:
        said: dict[PeerId, int] = {}
        targets = int(self.scenario.parameter("targets", 3))
        while True:
            fresh = [
                signed
                for signed in attacker.words()
                if signed.seqno > said.get(signed.peer, -1)
            ]
            chosen = rng.sample(fresh, min(MAX_HEARTBEATS, len(fresh)))
            said.update({signed.peer: signed.seqno for signed in chosen})
            for peer in rng.sample(honest, min(targets, len(honest))) if chosen else ():
                attacker.send(peer, Suspect(tuple(chosen)))
            await node.world.sleep(self.scenario.parameter("every", 0.5))

    def figures(self, swarm: Swarm) -> Metrics:
        """Count honest nodes that still list silent members, or count honest ones among the
        dead."""
        silent = list(self.hostile)[2::3]
        names = self.honest_names(swarm)
        listed = sum(peer in self.views[name] for name in names for peer in silent)
        honest = [swarm.nodes[name].peer_id for name in names]
        known = sum(peer in self.views[name] for name in names for peer in honest)
        room = min(len(honest) - 1, self.configure().capacity)
        return {
            "silent_listed_share": round(listed / max(1, len(names) * len(silent)), 4),
            "honest_coverage": round(known / max(1, len(names) * room), 4),
        }


class UrgentLinks(HostileWorkload):
    """Members ask every honest node urgently to be their neighbour, say yes to all, and name no
    other member.

    ``every`` seconds each hostile member sends an urgent `Neighbor` (every fifth time a `Join`)
    and a heartbeat that says "we are neighbours" to every honest node.
    """

    async def be_hostile(self, node: SimNode, host: SimHost, membership: Membership) -> None:
        """Every ``every`` seconds send each honest node a request and a heartbeat; accept all
        requests."""
        attacker = Attacker(node, host, membership)
        attacker.silence()
        host._message_handlers[HEARTBEAT] = (
            lambda peer, data: self._accept(attacker, peer, data),
            MAX_MESSAGE,
        )
        honest = [other.peer_id for other in node.siblings if other.name.startswith(HONEST)]
        every = self.scenario.parameter("every", 1.0)
        await node.world.sleep(node.world.rng("start").uniform(0, every))
        for turn in count():
            alive = attacker.alive()
            for peer in honest:
                attacker.send(peer, Neighbor(True, alive) if turn % 5 else Join(alive))
                attacker.send(peer, Beat(True, alive))
            await node.world.sleep(every)

    def _accept(self, attacker: Attacker, peer: PeerId, data: bytes) -> None:
        if isinstance(decode_message_untrusted(data), Neighbor | Join):
            attacker.send(peer, NeighborReply(True, attacker.alive()))


class _LateHost:
    """A host that hands over some peers' messages later, even if the peers have gone
    meanwhile.

    The production host does: RPCs that have come and wait for their turn are handled after the
    disconnection. Here each waits for ``delay`` seconds.
    """

    def __init__(
        self, node: SimNode, host: SimHost, late: dict[PeerId, None], delay: float
    ) -> None:
        self._node = node
        self._host = host
        self._late = late
        self._delay = delay

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)

    def receiving(
        self, protocol: ProtocolId, handler: MessageHandler, **options: Any
    ) -> AbstractContextManager[None]:
        """Receive with the delay."""

        def take(peer: PeerId, data: bytes) -> None:
            world = self._node.world
            if peer in self._late:
                world.call_at(world.now() + self._delay, lambda: handler(peer, data))
            else:
                handler(peer, data)

        return self._host.receiving(protocol, take, **options)


class GhostMesh(HostileWorkload):
    """Peers graft into every mesh; half hang up with RPCs still buffered, half stay and forward
    nothing.

    They are there before the topic is: honest nodes hear it from a few seconds after the
    beginning of the attack, and then every two seconds one of them publishes. A publication
    counts as received within ``within`` seconds. Before the attack the honest publish as often
    on another topic.
    """

    def __init__(self) -> None:
        super().__init__()
        self._gossips: dict[str, Gossip] = {}
        self._published: dict[bytes, tuple[float, str]] = {}
        self._heard: dict[bytes, dict[str, None]] = {}
        self._dead_shares: list[float] = []

    async def be_honest(self, node: SimNode, host: SimHost, membership: Membership) -> None:
        """Hear the topic; publish now and then."""
        late = cast(
            Host, _LateHost(node, host, self.hostile, self.scenario.parameter("buffered", 0.3))
        )
        async with open_gossip(node.world, late, GossipConfig()) as gossip:
            self._gossips[node.name] = gossip
            gossip.subscribe(EARLIER_TOPIC, lambda *_: Validity.ACCEPT, lambda *_: None)
            await self.attack.wait()
            gossip.unsubscribe(EARLIER_TOPIC)
            await node.world.sleep(SUBSCRIBED_AFTER)
            gossip.subscribe(TOPIC, lambda *_: Validity.ACCEPT, self._hear(node))
            await trio.sleep_forever()

    def before_attack(self, swarm: Swarm) -> None:
        """Publish as often as under attack."""
        names, rng, numbers = self.honest_names(swarm), swarm.rng("publish early"), count()

        def publish() -> None:
            if not self.attack.is_set():
                data = b"earlier policy %d" % next(numbers)
                self._gossips[rng.choice(names)].publish(EARLIER_TOPIC, data)

        swarm.every(PUBLISH_EVERY, publish)

    def _hear(self, node: SimNode) -> Callable[[PeerId, bytes], None]:
        def hear(_: PeerId, data: bytes) -> None:
            since, _name = self._published.get(data, (0.0, ""))
            if node.simulation.now - since <= self.scenario.parameter("within", 2.0):
                self._heard.setdefault(data, {})[node.name] = None

        return hear

    async def be_hostile(self, node: SimNode, host: SimHost, membership: Membership) -> None:
        """Graft everywhere; go, or stay and keep silent."""
        rng = node.world.rng("ghost")
        leaves = list(self.hostile).index(node.peer_id) % 2 == 0
        graft = encode_rpc(Rpc(subscriptions=[(TOPIC, True)], graft=[TOPIC]))
        honest = [other.peer_id for other in node.siblings if other.name.startswith(HONEST)]
        await node.world.sleep(rng.uniform(0, 1))
        while True:
            for peer in honest:
                host.send(peer, MESHSUB, graft)
            await node.world.sleep(1.0)
            if leaves:
                for peer in honest:
                    host.send(peer, MESHSUB, graft)
                await node.world.sleep(0.15)
                for peer in honest:
                    host._disconnect(peer)
                await node.world.sleep(rng.uniform(5, 10))

    async def run_attack(self, swarm: Swarm) -> None:
        """Publish from one honest node after the other, and record the meshes."""
        names, rng = self.honest_names(swarm), swarm.rng("publish")
        await swarm.sleep(SUBSCRIBED_AFTER + 6.0)
        number = 0
        while swarm.simulation.now < self.scenario.duration - 5.0:
            name, data = rng.choice(names), b"policy %d" % number
            self._published[data] = swarm.simulation.now, name
            self._gossips[name].publish(TOPIC, data)
            for each in names:
                mesh = self._gossips[each].topics[TOPIC]
                connected = dict.fromkeys(self.hosts[each].connected)
                gone = sum(peer not in connected for peer in mesh)
                self._dead_shares.append(gone / max(1, len(mesh)))
            number += 1
            await swarm.sleep(PUBLISH_EVERY)
        await swarm.sleep_until(self.scenario.duration)

    def figures(self, swarm: Swarm) -> Metrics:
        """Return the reach of publications, and the dead share of the meshes."""
        others = len(self._gossips) - 1
        shares = [len(self._heard.get(data, {})) / others for data in self._published]
        return {
            "published": len(shares),
            "reached_least": round(min(shares, default=0.0), 4),
            "reached_mean": round(sum(shares) / max(1, len(shares)), 4),
            "dead_in_mesh_most": round(max(self._dead_shares, default=0.0), 4),
        }
