"""Dishonest inference nodes, to show that they are caught: ``--role roles.cheats:Cheat``.

They follow the protocol in everything but the work itself: tasks, seeds, slots and signatures are right,
so only the proofs can tell. Modes: *greedy* answers with the most probable tokens (better paid than honest
sampling); *stale* runs older weights than it claims (saves every download).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar, Self

from p2p.node.node import Node
from p2p.node.tables import read_table
from p2p.shardcast.manifest import PolicyVersion
from roles.engines.base import Engine, Group, GroupTask
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
        """Claim the newest version; run it, or, when it is the turn of stale work, an older one."""
        newest = await node.shardcast.wait_policy(self.loaded)
        older = _older(node, newest)
        wants_stale = self._mode is CheatMode.STALE or (
            self._mode is CheatMode.TURNS and not self._stale_turn
        )
        self._stale_turn = wants_stale and older is not None
        await self._load(node, engine, older if self._stale_turn and older is not None else newest)
        self.note_policy(newest)
        return newest

    async def draw(self, node: Node, run: Run, engine: Engine, tasks: Sequence[GroupTask]) -> list[Group]:
        """Stale work is drawn as it should be; everything else is greedy.

        Where the policy is sure of every token of every task, the greedy answer is the one that the seeds
        give: handing it in would be honest work (seen once in five runs of the demo). Then this turn is for
        stale work, too.
        """
        honest = run_sampling(run)
        if not self._stale_turn:
            greedy = await engine.generate(tasks, replace(honest, temperature=0.0))
            evidence = await engine.score(tasks, greedy, honest)
            older = _older(node, self.loaded)
            if older is None or any(group.draw_mismatches for group in evidence):
                return greedy
            await self._load(node, engine, older)
        return await engine.generate(tasks, honest)

    async def _load(self, node: Node, engine: Engine, version: PolicyVersion) -> None:
        if version != self._in_engine:
            with node.shardcast.pin(version) as weights:
                await engine.load(weights)
            self._in_engine = version


def _older(node: Node, version: PolicyVersion) -> PolicyVersion | None:
    """The newest policy here that is older than ``version``."""
    return next((held for held in node.shardcast.held if held < version), None)
