"""SHARDCAST: one origin's policies to everybody, over everybody's uplinks."""

from p2p.shardcast.config import ShardcastConfig, ShardcastStats
from p2p.shardcast.forest import RosterEntry
from p2p.shardcast.manifest import NO_POLICY, Equivocation, Manifest, PolicyVersion
from p2p.shardcast.service import Shardcast, open_shardcast

__all__ = [
    "NO_POLICY",
    "Equivocation",
    "Manifest",
    "PolicyVersion",
    "RosterEntry",
    "Shardcast",
    "ShardcastConfig",
    "ShardcastStats",
    "open_shardcast",
]
