"""Parts of a node as its roles see them (`Node`), and the interface of a role (`Role`).

`Role.run` is the job, and what it raises ends the node. ``health`` and ``progress`` only show:
a package's mistake in them takes its own panel away, is told once with the package's name, and
the node, its other roles and the run go on (`RoleGuard`).
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

from p2p.dht import Dht
from p2p.gossip import Gossip
from p2p.host import Host
from p2p.identity import PeerId
from p2p.ledger import Ledger, LedgerExchange
from p2p.membership import Membership
from p2p.meter import StrangerMeter
from p2p.node.admission import Capability, SignedRun
from p2p.node.clock import PeerClocks
from p2p.node.config import NodeConfig
from p2p.node.rundoc import RunBook
from p2p.node.share import Rest
from p2p.reach.nat import Nat
from p2p.shardcast import Shardcast
from p2p.world import World

logger = logging.getLogger(__name__)


class RoleGuard:
    """Calls the display methods of roles and survives their errors."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, str], str] = {}
        """Last error logged for each role and method."""

    def health(self, role: Role) -> dict[str, object]:
        """Return the health of ``role``, or ``{"failed": why}``."""
        said, why_not = self.ask(role, "health", role.health, dict)
        return {"failed": why_not} if why_not else said

    def ask(
        self, role: Role, method: str, ask: Callable[[], object], kind: type[Any]
    ) -> tuple[Any, str]:
        """Return the result of ``ask`` and an empty text if the result is a ``kind``; else None
        and the reason."""
        try:
            said = ask()
            why_not = (
                "" if isinstance(said, kind) else f"it returns {said!r:.80}, no {kind.__name__}"
            )
        except Exception as error:  # noqa: BLE001 - foreign code that only shows
            said, why_not = None, f"{type(error).__name__}: {error}"
        if why_not and self._told.get((role.name, method)) != why_not:
            self._told[role.name, method] = why_not
            package = type(role).__module__.partition(".")[0]
            logger.warning(
                "role_cannot_be_shown role=%s method=%s: %s. The node goes on without it; the"
                " mistake is in the package %s",
                role.name, method, why_not, package,
            )  # fmt: skip
        return (None if why_not else said), why_not


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A running node, as roles see it. Open it with `open_node`."""

    world: World
    """Clock, randomness, disk and workers."""
    host: Host
    """Streams to authenticated peers. Roles register protocol handlers here."""
    config: NodeConfig
    """Local settings, overridden by those of the run."""
    book: RunBook
    """Newest run document."""
    rest: Rest
    """Tells whether the owner lets roles begin work."""
    meter: StrangerMeter
    """Budget for answers to strangers, which every responder charges."""
    membership: Membership
    """Members with their roles and policies."""
    gossip: Gossip
    """Gossip topics."""
    dht: Dht
    """DHT records."""
    shardcast: Shardcast
    """Distribution of policies."""
    ledger: Ledger
    """Signed log of this node, which the first role that asks reads from disk."""
    ledgers: LedgerExchange
    """Ledgers of the run's trainers and validators, as peers sent them. Empty unless the run
    exchanges ledgers."""
    clocks: PeerClocks
    """What is known about this machine's clock."""
    nat: Nat | None = None
    """Reachability from outside; None in simulations."""
    guard: RoleGuard = field(default_factory=RoleGuard)
    """Keeps errors in the display methods of roles from ending the node."""

    @property
    def peer_id(self) -> PeerId:
        """Peer id of this node."""
        return self.host.peer_id

    @property
    def run(self) -> SignedRun:
        """Newest run document. Roles that need its terms narrow it to `roles.contract.Run`."""
        assert self.book.run is not None  # open_node waits for it
        return self.book.run

    def may(self, peer: PeerId, capability: Capability) -> bool:
        """Return True if ``peer`` has ``capability`` in this run."""
        return self.book.may(peer, capability)

    def lacks_work(self, peer: PeerId) -> bool:
        """Return True if ``peer`` needs a work stamp to submit work and its newest heartbeat
        shows no sufficient one."""
        return self.book.lacks_work(peer, self.membership.shown_by(peer), at_once=False)

    def role_table(self, name: str) -> Mapping[str, object]:
        """Return the configuration table ``[role.<name>]``, empty if there is none."""
        return self.config.role.get(name, {})

    async def locate(self, peer: PeerId) -> bool:
        """Return True if ``peer`` can be dialled. Ask the DHT for its addresses if it is
        neither connected nor a member."""
        if peer in self.host.connected or any(
            member.peer == peer for member in self.membership.members()
        ):
            return True
        return bool(await self.dht.find_peer(peer))

    def health(self, roles: Sequence[Role] = ()) -> dict[str, object]:
        """Return the node's state as plain values, for ``--status`` and dashboards. Up to 32
        members of this run are named, longest known first."""
        members = (one for one in self.membership.members() if one.run == self.run.id)
        return {
            "peer": str(self.peer_id),
            "run": self.run.id.hex(),
            "epoch": self.run.epoch,
            "in_force": self.book.in_force,
            "two_editions": self.book.rival is not None,
            "members": self.membership.size,
            "known": [
                {"peer": str(one.peer), "roles": list(one.roles), "policy": int(one.policy)}
                for one in itertools.islice(members, 32)
            ],
            "rests": self.rest.why_not,
            "share": {
                name: value for name, value in asdict(self.config.share).items() if value
            },
            "clock": str(self.clocks),
            "connected": len(self.host.connected),
            "reachable": [str(addr) for addr in self.nat.reachable] if self.nat else [],
            "relays": [str(peer) for peer in self.nat.relays] if self.nat else [],
            "shardcast": {"newest": int(self.shardcast.newest), **asdict(self.shardcast.stats)},
            "two_stories": [str(author) for author in self.ledgers.exchange.forks],
            "flows": self.shardcast.flows,
            "roles": {role.name: self.guard.health(role) for role in roles},
        }


class Role(Protocol):
    """Job of a node, found under the entry point group ``shoal.roles`` or as ``module:Class``.

    Several may run in one node; each gets its own table of the configuration,
    ``[role.<name>]``.
    """

    name: ClassVar[str]
    """Name of the role in heartbeats, tables and logs."""

    @classmethod
    def from_config(cls, table: Mapping[str, object]) -> Self:
        """Make the role from its table, for example by `p2p.node.tables.read_table`.

        Raises:
            ConfigError: The table is wrong.
        """

    async def run(self, node: Node) -> None:
        """Do the job until cancelled. Whatever it raises ends the node."""

    def health(self) -> dict[str, object]:
        """Return plain values for people and dashboards: counts, ages, the newest policy."""


@dataclass(frozen=True, slots=True)
class Fact:
    """Line of a node's screen."""

    label: str
    """Word such as ``work``, in a column of eight characters."""
    text: str
    """Text such as ``1,024 rollouts made, 896 accepted``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of a role as text for the screen."""

    facts: tuple[Fact, ...]
    """Facts for the screen, the most important first, since a low terminal cuts the last
    ones."""

    over: bool = False
    """True if the role has nothing left to do in this run."""


@runtime_checkable
class Reporter(Protocol):
    """Role that reports its progress. This is optional; without it the screen shows only the
    node.
    """

    def progress(self) -> Progress:
        """Return the progress. This is called about once a second and must not block."""
