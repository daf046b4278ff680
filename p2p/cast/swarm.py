"""The swarm of one push: gossip, membership and SHARDCAST, without a run file or a DHT.

A push is a run of its own, named by the pusher's key and the ticket's secret, and only the
pusher publishes. A puller is let in, listed and given a place in the forest, when its heartbeat
shows the MAC of its name under the secret (`Ticket.admission`), in the field that holds a work
stamp in open runs. The addresses in the ticket are where membership begins.
"""

from __future__ import annotations

import contextlib
import hmac
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import trio

from p2p.bounded import BoundedDict
from p2p.cast.modes import PROTOCOL_ID, Tables
from p2p.cast.ticket import admission_of, run_of
from p2p.concurrency import Notifier
from p2p.gossip import open_gossip
from p2p.host import PEER_TROUBLE, Host, PeerEvent, PeerState
from p2p.identity import PeerId
from p2p.membership import Change, Member, MemberEvent, Membership, open_membership
from p2p.multiaddr import Multiaddr
from p2p.node.policies import judge_announcement, policy_topic, roster
from p2p.policy import PolicyVersion
from p2p.shardcast import Shardcast, ShardcastConfig, open_shardcast
from p2p.shardcast.chunkset import Selection
from p2p.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class CastNode:
    """A node that takes part in a push, as pusher or puller."""

    world: World
    host: Host
    membership: Membership
    shardcast: Shardcast
    tables: Tables
    run: bytes
    left: dict[PeerId, Member]
    """Members that have said good-bye, with what they said last."""

    def announce(self, version: PolicyVersion) -> None:
        """Announce in heartbeats that this node has delivered ``version``. A push with
        ``--expect`` counts these nodes."""
        self.membership.me.update(policy=int(version), load=0.0)

    def others(self) -> list[Member]:
        """Return the other members."""
        return [member for member in self.membership.members() if member.run == self.run]

    def whole(self, version: PolicyVersion) -> set[PeerId]:
        """Return the members that claim to hold ``version`` or a newer one, including those
        that left with it."""
        members = (*self.others(), *self.left.values())
        return {member.peer for member in members if member.policy >= version}


@asynccontextmanager
async def open_cast(
    world: World,
    host: Host,
    config: ShardcastConfig,
    *,
    pusher: PeerId,
    secret: bytes,
    bootstrap: Sequence[Multiaddr] = (),
    selection: Selection | None = None,
) -> AsyncIterator[CastNode]:
    """Take part in a push for the length of the block. A node that fetches only a ``selection``
    does not announce its run, so nobody counts on it as a relay."""
    run = run_of(pusher, secret)
    topic = policy_topic(run)
    async with (
        open_gossip(world, host) as gossip,
        open_membership(
            world,
            host,
            stamp=admission_of(secret, host.peer_id),
            is_stamped=lambda peer, shown: hmac.compare_digest(
                admission_of(secret, peer), shown
            ),
        ) as membership,
        open_shardcast(
            world,
            host,
            config,
            run=run,
            may_publish=pusher.__eq__,
            roster=partial(roster, membership, run),
            announce=partial(gossip.publish, topic),
            selection=selection,
        ) as shardcast,
        trio.open_nursery() as nursery,
    ):
        gossip.subscribe(topic, partial(judge_announcement, shardcast))
        if selection is None:
            membership.me.update(run=run)
        node = CastNode(
            world=world,
            host=host,
            membership=membership,
            shardcast=shardcast,
            tables=Tables(world, host, shardcast.charge_upload),
            run=run,
            left=BoundedDict(4096),
        )
        membership.on_change(partial(_note_left, node))
        if host.peer_id == pusher:
            membership.interest([])  # its pullers send it their heartbeats: it keeps them all
        if bootstrap:
            nursery.start_soon(membership.join, bootstrap)
            nursery.start_soon(_stay_with, node, pusher, bootstrap)
        # the pusher's roster names those to each other that do not know one another yet
        with (
            host.finding(partial(membership.locate, among=(pusher,))),
            host.serving(PROTOCOL_ID, node.tables.serve),
        ):
            yield node
        nursery.cancel_scope.cancel()


def _note_left(node: CastNode, event: MemberEvent) -> None:
    if event.change is Change.LEFT and event.member.run == node.run:
        node.left[event.member.peer] = event.member


async def _stay_with(node: CastNode, pusher: PeerId, addrs: Sequence[Multiaddr]) -> None:
    """Send the pusher our heartbeats, and dial it while there is no connection.

    A pusher that was killed and started again knows no puller. Pullers have one another for
    neighbours: those of its last life did not look for it for 35 s, and if they were whole by
    then, it never learnt that.
    """
    lost = Notifier()

    def send_it_heartbeats() -> None:
        node.membership.interest([pusher], has_audience=False)

    def on_peer(event: PeerEvent) -> None:
        if event.peer != pusher:
            return
        if event.state is PeerState.CONNECTED:
            send_it_heartbeats()  # anew: it was taken for unreachable, and spared for 30 s
        else:
            lost.notify_all()

    send_it_heartbeats()
    wait = 1.0  # twice as long each time, until a connection outlasts the wait before it
    with node.host.watching(on_peer):
        while True:
            await _dial(node, pusher, addrs, wait)
            began = node.world.now()
            while pusher in node.host.connected:
                await lost.wait()
            lasted = node.world.now() - began
            # A thousand pullers dial a missing pusher 60 times a second, and one that returns
            # has them all back within 16 s.
            wait = 1.0 if lasted > wait else min(2 * wait, 16.0)


async def _dial(
    node: CastNode, pusher: PeerId, addrs: Sequence[Multiaddr], wait: float
) -> None:
    """Wait, then connect to ``pusher`` unless either side has connected meanwhile."""
    await node.world.sleep(wait)
    if pusher not in node.host.connected:
        node.host.add_addrs(pusher, addrs)  # forgotten if another node has answered there
        with contextlib.suppress(*PEER_TROUBLE):
            await node.host.connect(pusher)
