"""The trainer's pool: oldest first, never stale, never without spread."""

from __future__ import annotations

from p2p.shardcast.manifest import PolicyVersion
from roles.engines.base import TrainingGroup
from roles.trainer.core.buffer import BufferedGroup, GroupBuffer


def group(version: int, *rewards: float, source: bytes = b"s") -> BufferedGroup:
    return BufferedGroup(
        PolicyVersion(version), source, 0, TrainingGroup((version,), (), rewards)
    )


def test_takes_the_oldest_first_and_only_when_there_are_enough() -> None:
    pool = GroupBuffer(staleness=2)
    pool.add([group(3, 0, 1), group(2, 0, 1)])
    assert pool.take(3, step=3) is None
    pool.add([group(1, 0, 1)])
    taken = pool.take(2, step=3)
    assert taken is not None
    assert [item.group.prompt for item in taken] == [(1,), (2,)]
    assert (pool.counts.staleness_max, len(pool)) == (2, 1)
    assert sum(pool.counts.staleness.values()) == 2
    assert max(pool.counts.staleness) == 2


def test_stale_groups_are_dropped_and_counted() -> None:
    pool = GroupBuffer(staleness=2)
    pool.add([group(0, 0, 1), group(1, 0, 1)])
    assert pool.take(2, step=3) is None
    assert (pool.counts.stale, len(pool)) == (1, 1)


def test_groups_without_spread_teach_nothing() -> None:
    pool = GroupBuffer(staleness=2)
    pool.add([group(0, 1, 1), group(0, 0, 0), group(0, 1, 0, source=b"t")])
    assert (pool.counts.without_spread, len(pool)) == (2, 1)
    assert list(pool.sources) == [b"t"]
