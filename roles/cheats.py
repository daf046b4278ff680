"""Dishonest inference nodes, to show that they are caught: ``--role roles.cheats:Cheat``.

They follow the protocol in everything but the work itself: tasks, seeds, slots and signatures are right,
so only the proofs can tell. Modes: *greedy* answers with the most probable tokens (better paid than honest
sampling); *stale* runs older weights than it claims (saves every download).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar, Self

from p2p.node.node import Node
from p2p.node.tables import read_table
from p2p.shardcast.manifest import PolicyVersion
from roles.engines.base import Engine, Sampling
from roles.inference import Inference, InferenceConfig, run_sampling
from roles.run import Run


class CheatMode(Enum):
    """What is done instead of the work."""

    GREEDY = "greedy"
    STALE = "stale"
    TURNS = "turns"
    """Greedy and stale by turns, one submission each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheatConfig(InferenceConfig):
    """An inference node's configuration, and the way it cheats."""

    mode: CheatMode = CheatMode.TURNS
    """What it does instead of the work."""


class Cheat(Inference):
    """An inference node that does not do the work it claims."""

    name: ClassVar[str] = "cheat"

    def __init__(self, config: CheatConfig) -> None:
        super().__init__(config)
        self._mode = config.mode
        self._stale_turn = False
        self._in_engine = PolicyVersion(-1)

    @classmethod
    def from_config(cls, table: Mapping[str, object]) -> Self:
        """Made from ``[role.cheat]``."""
        return cls(read_table(CheatConfig, table, "[role.cheat]"))

    async def load_newest(self, node: Node, engine: Engine) -> PolicyVersion:
        """Claim the newest version; load it, or, when it is the turn of stale work, keep older weights."""
        newest = await node.shardcast.wait_policy(self.loaded)
        older = next((v for v in node.shardcast.held if v < newest), None)
        wants_stale = self._mode is CheatMode.STALE or (
            self._mode is CheatMode.TURNS and not self._stale_turn
        )
        self._stale_turn = wants_stale and older is not None
        weights = older if self._stale_turn and older is not None else newest
        if weights != self._in_engine:
            with node.shardcast.pin(weights) as path:
                await engine.load(path)
            self._in_engine = weights
        self.note_policy(newest)
        return newest

    def sampling(self, run: Run) -> Sampling:
        """Stale work is drawn as it should be; everything else is greedy."""
        honest = run_sampling(run)
        return honest if self._stale_turn else replace(honest, temperature=0.0)
