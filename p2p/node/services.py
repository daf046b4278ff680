"""What one node is made of, as its roles see it: `Node`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final, Protocol

from p2p.dht import Dht
from p2p.gossip import Gossip
from p2p.host import Host
from p2p.identity import PeerId
from p2p.ledger import LedgerExchange, OwnLedger
from p2p.membership import Membership
from p2p.meter import StrangerMeter
from p2p.node.admission import Capability, SignedRun
from p2p.node.border import Border
from p2p.node.clock import PeerClocks
from p2p.node.config import NodeConfig
from p2p.node.rest import Rest
from p2p.node.rundoc import RunBook
from p2p.shardcast import Shardcast
from p2p.world import World

MAX_KNOWN: Final = 32
"""Members that a status names: a demo and its guests; each is 100 bytes of every status."""


class HasHealth(Protocol):
    """A part of a node that says how it is: every `p2p.node.role.Role` is one."""

    @property
    def name(self) -> str:
        """The role's name in heartbeats, tables and logs."""
        ...

    def health(self) -> dict[str, object]:
        """Plain values for people and dashboards."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A running node, as roles see it. Open it with `open_node`."""

    world: World
    """Clock, randomness, disk, workers."""
    host: Host
    """Streams to authenticated peers; register protocol handlers here."""
    config: NodeConfig
    """Local settings, with those of the run laid over them."""
    book: RunBook
    """The run document in its newest edition."""
    rest: Rest
    """Whether the owner lets roles begin work."""
    meter: StrangerMeter
    """What peers that are no members get as answers, all together: every responder asks it."""
    membership: Membership
    """Who is alive, with which roles and policies."""
    gossip: Gossip
    """Topics."""
    dht: Dht
    """Records by key."""
    shardcast: Shardcast
    """Policies."""
    ledger: OwnLedger
    """What this node has done, signed; read from disk by the first role that asks for it."""
    ledgers: LedgerExchange
    """What the run's officers have signed, as far as peers have told; nothing unless the run
    has nodes exchange it."""
    clocks: PeerClocks
    """What is known of this machine's clock."""
    border: Border = field(default_factory=Border)
    """Where mistakes of roles that only show stop."""

    @property
    def peer_id(self) -> PeerId:
        """Our own name."""
        return self.host.peer_id

    @property
    def run(self) -> SignedRun:
        """The newest edition of the run document. Roles that need its terms narrow it to
        `roles.contract.Run`.
        """
        assert self.book.run is not None  # open_node waits for it
        return self.book.run

    def may(self, peer: PeerId, capability: Capability) -> bool:
        """Whether ``peer`` has ``capability`` in this run."""
        return self.book.may(peer, capability)

    def lacks_work(self, peer: PeerId) -> bool:
        """Whether ``peer`` must make a work stamp before it may submit work, and its newest
        heartbeat shows none that will do."""
        return self.book.lacks_work(peer, self.membership.shown_by(peer), at_once=False)

    def role_table(self, name: str) -> Mapping[str, object]:
        """The configuration table ``[role.<name>]``, empty if there is none."""
        return self.config.role.get(name, {})

    async def locate(self, peer: PeerId) -> bool:
        """Whether ``peer`` can be dialled; asks the DHT for its addresses if no heartbeat names
        it.
        """
        if peer in self.host.connected or any(
            member.peer == peer for member in self.membership.members()
        ):
            return True
        return bool(await self.dht.find_peer(peer))

    def _known(self) -> list[dict[str, object]]:
        """Members of this run, the longest known first."""
        members = (one for one in self.membership.members() if one.run == self.run.id)
        return [
            {"peer": str(one.peer), "roles": list(one.roles), "policy": int(one.policy)}
            for one in itertools.islice(members, MAX_KNOWN)
        ]

    def health(self, roles: Sequence[HasHealth] = ()) -> dict[str, object]:
        """The node's state as plain values, for ``--status`` and dashboards."""
        return {
            "peer": str(self.peer_id),
            "run": self.run.id.hex(),
            "epoch": self.run.epoch,
            "in_force": self.book.in_force,
            "two_editions": self.book.rival is not None,
            "members": self.membership.size,
            "known": self._known(),
            "rests": self.rest.why_not,
            "share": {
                name: value for name, value in asdict(self.config.share).items() if value
            },
            "clock": str(self.clocks),
            "connected": len(self.host.connected),
            "shardcast": {"newest": int(self.shardcast.newest), **asdict(self.shardcast.stats)},
            "two_stories": [str(author) for author in self.ledgers.forks],
            "flows": self.shardcast.flows,
            "roles": {role.name: self.border.health(role, role.health) for role in roles},
        }
