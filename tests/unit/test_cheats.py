"""The demo's cheat hands in only work that the run's limits must reject."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from p2p.shardcast.manifest import PolicyVersion
from proofs.checks import Evidence, Limits, Verdict, judge, judge_pool
from roles.demo.cheats import MARGIN, CheatMode, CheatSession, must_fail
from roles.demo.shows import DEMO_LIMITS
from roles.engines.base import Completion, EngineError, Group, GroupTask, Scored
from roles.inference.stats import InferenceCounts
from tests.unit.test_run_file import RUN

CLEAN = Evidence(
    tokens=1000,
    malformed="",
    exponent_mismatches=0,
    mantissa_mean=0.0,
    mantissa_median=0.0,
    draw_distance=0.0,
    draw_mismatches=0,
    end_probability=1.0,
    gap_mean=0.0,
    gap_max=0.0,
    surprise=0.0,
)
SURE = replace(CLEAN, draw_mismatches=1, draw_distance=5e-5)
"""Of a greedy answer under a policy that is nearly sure: within the limits, and rightly
accepted.
"""
CAUGHT = replace(CLEAN, draw_mismatches=400, draw_distance=0.4)
TASKS = [GroupTask(group=7, prompt=(1, 2), seeds=(bytes(32), bytes(32)))]


class SureEngine:
    """Says of each way to cheat what the test wants; a proof names the way."""

    def __init__(self, **evidence: Evidence) -> None:
        self.evidence = evidence
        self.loaded = 5

    async def load(self, weights: str) -> None:
        self.loaded = int(weights)

    async def generate(self, tasks, sampling) -> list[Group]:
        way = {0.0: "greedy", 1.0: "honest" if self.loaded == 5 else "stale"}.get(
            sampling.temperature, "hot"
        )
        if way == "hot":
            assert tasks[0].seeds != TASKS[0].seeds
        return [Group(task.group, (Completion((), (), way.encode()),)) for task in tasks]

    async def score(self, tasks, groups, sampling) -> list[Scored]:
        assert self.loaded == 5, "a validator has the policy that was claimed"
        assert (tasks, sampling.temperature) == (TASKS, 1.0)
        ways = [group.completions[0].proof.decode() for group in groups]
        return [Scored(self.evidence[way], b"") for way in ways]


@contextmanager
def pin(version: int) -> Iterator[str]:
    yield str(version)


async def handed_in(
    engine: SureEngine, *, stale_turn: bool, held: tuple[int, ...] = (5, 4)
) -> str:
    shardcast = SimpleNamespace(held=held, pin=pin, holds=held.__contains__)
    run: Any = SimpleNamespace(
        terms=SimpleNamespace(recipe=RUN.terms.recipe, limits=DEMO_LIMITS)
    )
    node: Any = SimpleNamespace(shardcast=shardcast, world=None, run=RUN)
    nothing: Any = None
    counts = InferenceCounts(version=PolicyVersion(5))
    working: Any = engine
    session = CheatSession(node, run, nothing, working, nothing, "cheat", counts)
    session.mode, session.is_stale_turn, session.in_engine = (
        CheatMode.TURNS,
        stale_turn,
        PolicyVersion(5),
    )
    (group,) = await session.draw(TASKS)
    return group.completions[0].proof.decode()


async def test_what_might_pass_is_not_handed_in() -> None:
    """Issue 10.11: late in a run a greedy submission was within limits: the demo ended with
    exit 1.
    """
    sure = SureEngine(greedy=SURE, stale=SURE, hot=CAUGHT)
    assert judge(SURE, DEMO_LIMITS).verdict is Verdict.ACCEPTED
    assert judge_pool([SURE], DEMO_LIMITS).verdict is Verdict.ACCEPTED
    assert await handed_in(sure, stale_turn=False) == "hot"
    assert await handed_in(sure, stale_turn=True) == "hot"
    assert (
        await handed_in(SureEngine(greedy=SURE, hot=CAUGHT), stale_turn=False, held=(5,))
        == "hot"
    )
    assert await handed_in(SureEngine(greedy=SURE, stale=CAUGHT), stale_turn=False) == "stale"
    assert await handed_in(SureEngine(greedy=CAUGHT, stale=SURE), stale_turn=True) == "greedy"
    for stale_turn, way in ((False, "greedy"), (True, "stale")):
        assert (
            await handed_in(SureEngine(greedy=CAUGHT, stale=CAUGHT), stale_turn=stale_turn)
            == way
        )
    with pytest.raises(EngineError, match="no way to cheat"):
        await handed_in(SureEngine(greedy=SURE, stale=SURE, hot=SURE), stale_turn=False)


@pytest.mark.parametrize("limits", [DEMO_LIMITS, Limits.fp32(), Limits.bf16()])
def test_a_margin_stays_to_what_a_validator_may_see(limits: Limits) -> None:
    """Issue 10.11: evidence just beyond a limit might be just within it elsewhere."""
    for name in ("mantissa_mean", "draw_distance", "gap_max"):
        limit = getattr(limits, name)
        assert not must_fail([replace(CLEAN, **{name: 1.5 * limit})], limits)
        assert must_fail([replace(CLEAN, **{name: 1.01 * MARGIN * limit})], limits)
    assert not must_fail([CLEAN], limits)
    assert must_fail([CLEAN, replace(CLEAN, malformed="no proof")], limits)
