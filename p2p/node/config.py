"""The configuration of a node: one table per component, each a dataclass beside its owner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

from p2p.circuit.core.book import RelayConfig
from p2p.dht import DhtConfig
from p2p.errors import ConfigError
from p2p.gossip import GossipConfig
from p2p.ledger import ExchangeConfig
from p2p.membership import MembershipConfig
from p2p.multiaddr import Multiaddr
from p2p.node.rundoc import RunConfig
from p2p.node.share import ShareConfig
from p2p.node.tables import load_toml, read_table, write_table
from p2p.reach.autonat import AutonatConfig
from p2p.reach.mapping import ReachConfig
from p2p.reach.nat import NatConfig
from p2p.shardcast import ShardcastConfig
from p2p.swarm.swarm import SwarmConfig

ANY_PORT: Final = Multiaddr.tcp("0.0.0.0", 0)
"""Default listening address of a node: all interfaces, at a port that the system chooses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """Configuration of a node. The defaults suit a machine at home."""

    listen: tuple[Multiaddr, ...] = (ANY_PORT,)
    """Addresses to listen at; port 0 means a free port."""

    bootstrap: tuple[Multiaddr, ...] = ()
    """Peers to start from. Each address ends in ``/p2p/`` and an id."""

    host: SwarmConfig = field(default_factory=partial(SwarmConfig, punch=True))
    """Connections to peers."""

    relay: RelayConfig = field(default_factory=RelayConfig)
    """Relaying between members of the run that cannot connect directly."""

    autonat: AutonatConfig = field(default_factory=AutonatConfig)
    """Checks, by and for peers, of which addresses can be dialled."""

    reach: ReachConfig = field(default_factory=ReachConfig)
    """Reachability from outside."""

    run: RunConfig = field(default_factory=RunConfig)
    """Search for the run and its document."""

    membership: MembershipConfig = field(default_factory=MembershipConfig)
    """Membership: heartbeats, neighbours and failure detection."""

    gossip: GossipConfig = field(default_factory=GossipConfig)
    """Gossip: messages by topic."""

    dht: DhtConfig = field(default_factory=DhtConfig)
    """DHT: lookups and records."""

    shardcast: ShardcastConfig = field(default_factory=partial(ShardcastConfig, folder="store"))
    """SHARDCAST: distribution of policies."""

    ledger: ExchangeConfig = field(default_factory=ExchangeConfig)
    """Exchange of trainers' and validators' ledgers."""

    share: ShareConfig = field(default_factory=ShareConfig)
    """Limits on the resources and hours that the owner lends."""

    trust_environments: bool = False
    """True if environments run even where nothing contains their processes."""

    accept_capsules: bool = False
    """True if environments that come with a run's policies may run, in their interpreter."""

    role: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Maps each role to its table, such as ``[role.trainer]``, which the role reads."""

    def __post_init__(self) -> None:
        for addr in self.bootstrap:
            if addr.peer_id is None:
                raise ValueError(
                    f"the bootstrap address {addr} must end in /p2p/ and the peer's id"
                )
        for name, table in self.role.items():
            if not isinstance(table, Mapping):
                raise ValueError(f"role.{name} must be a table")

    @property
    def places(self) -> tuple[Multiaddr, ...]:
        """Addresses to listen at, without those of relays."""
        return tuple(addr for addr in self.listen if addr.relay is None)

    @property
    def relays(self) -> tuple[Multiaddr, ...]:
        """Relays through which this node is always reachable."""
        return tuple(addr.relay for addr in self.listen if addr.relay is not None)

    @property
    def nat(self) -> NatConfig:
        """Configuration of NAT traversal."""
        return NatConfig(reach=self.reach, autonat=self.autonat, relay=self.relay)

    def with_components(self, shared: Mapping[str, Mapping[str, object]]) -> NodeConfig:
        """Return this configuration with the settings on which all nodes of a run must agree.

        Raises:
            ConfigError: A setting is unknown or has a wrong value.
        """
        changed: dict[str, object] = {}
        for name, table in shared.items():
            own = getattr(self, name, None)
            if own is None:
                raise ConfigError(
                    f"the run file sets {name!r}, which this version of Shoal does not know"
                )
            merged = {**write_table(own), **table}
            changed[name] = read_table(type(own), merged, f"the run file: {name}")
        return replace(self, **changed)  # type: ignore[arg-type]  # each is of its own field's type


def load_config(path: Path) -> NodeConfig:
    """Read a configuration from a TOML file.

    Raises:
        ConfigError: The file is not usable. The message names the file, the key and the remedy.
    """
    return read_table(NodeConfig, load_toml(path), str(path))
