"""Accepted groups that wait for the trainer's next step.

They are fresh enough, have something to learn, and are not too many.

Sans I/O: `roles.trainer.intake` owns one. A group whose rewards are all equal teaches nothing
under GRPO and is counted, not kept (DAPO's dynamic sampling, arXiv 2503.14476).
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
    """Which of the submission's groups it is, from 0."""
    group: TrainingGroup


@dataclass(slots=True)
class BufferCounts:
    """What became of the groups so far."""

    without_spread: int = 0
    stale: int = 0
    discredited: int = 0
    """Groups of validators that were found to lie."""
    staleness_max: int = 0
    staleness: dict[int, int] = field(default_factory=dict)
    """Used groups by how many steps behind they were."""


class GroupBuffer:
    """Groups by age."""

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
        """Submissions of which a group is still here, in order of arrival."""
        return dict.fromkeys(pooled.source for pooled in self._groups)

    def add(self, groups: Iterable[BufferedGroup]) -> None:
        """Keep those with spread."""
        for pooled in groups:
            if has_spread(pooled.group.rewards):
                self._groups.append(pooled)
            else:
                self.counts.without_spread += 1

    def drop_stale(self, step: int) -> None:
        """Drop what was drawn more than the staleness bound before ``step``."""
        fresh = [pooled for pooled in self._groups if step - pooled.version <= self._staleness]
        self.counts.stale += len(self._groups) - len(fresh)
        self._groups = fresh

    def drop(self, sources: Collection[bytes]) -> None:
        """Drop what came in these submissions."""
        kept = [pooled for pooled in self._groups if pooled.source not in sources]
        self.counts.discredited += len(self._groups) - len(kept)
        self._groups = kept

    def take(self, count: int, step: int) -> list[BufferedGroup] | None:
        """The ``count`` oldest groups, for the step that follows ``step``; None while there are
        fewer."""
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
