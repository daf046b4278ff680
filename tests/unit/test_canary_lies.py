"""Canaries: each kind of lie is one that a replay finds, told once, and known beforehand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2p.errors import ConfigError
from roles.demo.canary import (
    LIES,
    Canary,
    CanaryAppeals,
    CanaryConfig,
    CanaryLie,
    CanarySession,
)
from roles.engines.base import GroupTask, Sampling
from roles.inference.places import OpenPlace
from roles.protocol.core.assignment import draw_order
from roles.protocol.core.findings import Acceptance
from roles.protocol.core.refusals import Appeal
from tests.trainer_bench import POLICY, VERSION, WORKER, Bench, make_run
from tests.unit.test_appeals import Ruled, open_court


def canary(bench: Bench, kind: CanaryLie, turn: int) -> CanarySession:
    """A session that lies in its ``turn``-th place."""
    session = CanarySession.__new__(CanarySession)
    session.run = bench.run
    dice: Any = SimpleNamespace(choice=lambda _: kind.value, randint=lambda *_: turn - 1)
    session.plan(CanaryConfig(), dice)
    session.engine = SubmittedTo(bench)
    return session


class SubmittedTo:
    """Draws at once what it is given."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.groups: list[Any] = []

    async def submit(self, tasks: list[GroupTask], sampling: Sampling) -> None:
        self.groups = await self._bench.engine.draw(tasks, sampling)


async def make(bench: Bench, session: CanarySession, index: int) -> Any:
    """The acceptance of what it hands in at a place."""
    order = draw_order(bench.run, WORKER.peer_id, VERSION, POLICY)
    made = await bench.environment.tasks(order.task_seeds(index))
    tasks = [task for _, task in order.with_draws(index, made)]
    place = OpenPlace(order, index, tasks)
    await session.begin(place)
    engine: Any = session.engine
    place.ended |= {group.group: group for group in engine.groups}
    work = await bench.verdict_on(session.groups_of(place), index, logprobs=b"", rewards=())
    return Acceptance(work.verdict, work.submission)


@pytest.mark.parametrize("kind", LIES)
async def test_a_canary_works_honestly_and_then_lies_in_a_way_that_convicts(
    tmp_path: Path, kind: CanaryLie
) -> None:
    async with open_court(tmp_path) as court:
        session = canary(court.bench, kind, turn=3)
        for index in range(2):
            honest = await make(court.bench, session, index)
            assert not session.has_lied
            assert await court.desk._replay(honest.submission) is None
        lie = await make(court.bench, session, 2)
        assert session.has_lied
        assert await court.hear(lie) is Ruled.UPHELD
        assert len(court.liars) == 1


async def test_a_place_that_was_drawn_wrong_and_dropped_is_not_the_lie(tmp_path: Path) -> None:
    """What is called a lie beforehand must be one, and nothing else may be."""
    async with open_court(tmp_path) as court:
        session = canary(court.bench, CanaryLie.REDRAWN, turn=2)
        await make(court.bench, session, 0)
        order = draw_order(court.bench.run, WORKER.peer_id, VERSION, POLICY)
        await session.begin(OpenPlace(order, 9, []))  # under a policy that goes stale
        lie = await make(court.bench, session, 1)
        assert session.has_lied
        assert await court.desk._replay(lie.submission) is not None


async def test_of_its_lie_a_canary_tells_acceptances_and_of_honest_work_rejections(
    tmp_path: Path,
) -> None:
    async with open_court(tmp_path) as court:
        told = CanaryAppeals.__new__(CanaryAppeals)
        kept: list[Any] = []
        told._is_on, told._is_barred = True, False
        told._offered = {}  # type: ignore[assignment]
        told.tell = lambda _, asked: kept.append(asked)  # type: ignore[method-assign]
        rejected, lie = await court.refused(0), await court.bench.made_up(1)
        told.lie = lie.verdict.commitment.content
        told.note_verdict(rejected.submission, rejected.verdict)
        told.note_verdict(lie.submission, lie.verdict)
        denied = await court.refused(1, made_up=True)
        told.note_verdict(denied.submission, denied.verdict)  # as it should be
        assert [type(asked) for asked in kept] == [Appeal, Acceptance]


@pytest.mark.parametrize("table", [{"lies": []}, {"lies": ["smiles"]}, {"honest": 0}])
def test_a_canary_says_what_is_wrong_with_its_table(table: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="honest is at least 1"):
        Canary.from_config(table)


def test_a_canary_is_refused_where_nobody_would_hear_of_what_it_finds() -> None:
    node: Any = None
    with pytest.raises(ConfigError, match="appeals = true"):
        Canary(CanaryConfig()).make_session(node, make_run(), node, node, node)
