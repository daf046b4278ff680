"""Assignment of tasks and random seeds to a node: derived, never chosen.

Task and draws of a group follow from (run, policy digest, node, version, group): a node cannot
pick easy tasks, and a validator, which knows these five, can replay them. Sources: INTELLECT-2
(arXiv 2505.07291), fixed data sampling; docs/protocols/sampling.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from p2p.identity import PeerId
from p2p.shardcast.manifest import PolicyVersion
from proofs.sampling import draw_seed, task_seed
from roles.contract import Run
from roles.engines.base import GroupTask, Sampling
from roles.envs.base import Task


@dataclass(frozen=True, slots=True)
class DrawOrder:
    """The order of tasks of one node under one policy."""

    run: bytes
    node: PeerId
    version: PolicyVersion
    policy: bytes
    group_size: int
    groups: int
    """Number of groups per submission."""

    def task_seeds(self, index: int) -> list[bytes]:
        """Return the seeds from which the environment makes the tasks of the ``index``-th
        submission."""
        return [task_seed(*self._name, group) for group in self.numbers(index)]

    def with_draws(self, index: int, tasks: Sequence[Task]) -> list[tuple[Task, GroupTask]]:
        """Return the tasks of a submission, each with the seeds that its group is drawn
        with."""
        numbers = self.numbers(index)
        return [
            (task, self._draws(task, group)) for task, group in zip(tasks, numbers, strict=True)
        ]

    def numbers(self, index: int) -> range:
        """Return the numbers of the groups in the ``index``-th submission."""
        return range(index * self.groups, (index + 1) * self.groups)

    def _draws(self, task: Task, group: int) -> GroupTask:
        first = group * self.group_size
        seeds = tuple(
            draw_seed(*self._name, slot) for slot in range(first, first + self.group_size)
        )
        return GroupTask(group, tuple(task.prompt), seeds)

    @property
    def _name(self) -> tuple[bytes, bytes, bytes, int]:
        return self.run, self.policy, self.node.digest, int(self.version)


def draw_order(run: Run, node: PeerId, version: PolicyVersion, policy: bytes) -> DrawOrder:
    """Return the draw order of ``node`` under ``version``; ``policy`` is the digest of its
    weights."""
    recipe = run.terms.sampling
    return DrawOrder(
        run=run.id,
        node=node,
        version=version,
        policy=policy,
        group_size=recipe.group_size,
        groups=recipe.submission,
    )


def run_sampling(run: Run) -> Sampling:
    """Return how completions are drawn and proved in a run."""
    recipe = run.terms.sampling
    return Sampling(
        recipe.temperature,
        recipe.max_new_tokens,
        recipe.group_size,
        recipe.proof_values,
        recipe.turns,
        recipe.heard,
    )
