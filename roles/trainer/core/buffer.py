"""Accepted groups that wait for the trainer's next step.

The buffer keeps groups that are fresh enough and have spread, up to a bound. A group whose
rewards are all equal teaches nothing under GRPO, so it is counted and not kept (DAPO's dynamic
sampling, arXiv 2503.14476). The buffer does no I/O; `roles.trainer.intake` owns one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from p2p.shardcast.manifest import PolicyVersion
from roles.engines.base import TrainingGroup
from roles.rl.algorithms.base import has_spread


@dataclass(frozen=True, slots=True)
class BufferedGroup:
    """A group, the policy that drew it and the submission it came in."""

    version: PolicyVersion
    source: bytes
    """Content digest of the submission."""
    number: int
    """Index, from 0, of the group in its submission."""
    group: TrainingGroup


@dataclass(slots=True)
class BufferCounts:
    """Counts of groups by what became of them."""

    without_spread: int = 0
    stale: int = 0
    discredited: int = 0
    """Groups dropped because their validator was found to lie."""
    staleness_max: int = 0
    staleness: dict[int, int] = field(default_factory=dict)
    """Number of used groups for each number of steps that they were behind."""


class GroupBuffer:
    """Groups in order of age."""

    def __init__(self, staleness: int) -> None:
        self._staleness = staleness
        self._groups: list[BufferedGroup] = []
        self.counts = BufferCounts()

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[BufferedGroup]:
        return iter(self._groups)

    @property
    def sources(self) -> dict[bytes, None]:
        """Submissions with a group in the buffer, in order of arrival."""
        return dict.fromkeys(pooled.source for pooled in self._groups)

    def add(self, groups: Iterable[BufferedGroup]) -> None:
        """Add the groups that have spread, and count the others."""
        for pooled in groups:
            if has_spread(pooled.group.rewards):
                self._groups.append(pooled)
            else:
                self.counts.without_spread += 1

    def drop_stale(self, step: int) -> None:
        """Drop groups that were drawn more than the staleness bound before ``step``."""
        fresh = [pooled for pooled in self._groups if step - pooled.version <= self._staleness]
        self.counts.stale += len(self._groups) - len(fresh)
        self._groups = fresh

    def drop(self, sources: Collection[bytes]) -> None:
        """Drop the groups of these submissions."""
        kept = [pooled for pooled in self._groups if pooled.source not in sources]
        self.counts.discredited += len(self._groups) - len(kept)
        self._groups = kept

    def take(self, count: int, step: int) -> list[BufferedGroup] | None:
        """Remove and return the ``count`` oldest groups for the step that follows ``step``;
        None while there are fewer."""
        self.drop_stale(step)
        if len(self._groups) < count:
            return None
        self._groups.sort(key=lambda pooled: pooled.version)
        taken, self._groups = self._groups[:count], self._groups[count:]
        for pooled in taken:
            behind = step - pooled.version
            self.counts.staleness[behind] = self.counts.staleness.get(behind, 0) + 1
        self.counts.staleness_max = max(self.counts.staleness_max, *self.counts.staleness)
        return taken
