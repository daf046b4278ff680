"""The demo's cheat hands in only work that the run's limits must reject."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2p.identity import KeyPair
from p2p.machine import RealWorld
from p2p.shardcast.manifest import PolicyVersion
from proofs.checks import LADDER, Evidence, Limits, Verdict, judge, judge_pool
from roles.demo.cheats import MARGIN, WARMTH, WAYS, CheatSession, must_fail
from roles.demo.shows import SORTING
from roles.engines.base import Completion, EngineError, Group, GroupTask, Scored
from roles.inference.status import InferenceCounts
from tests.model_folders import make_folder
from tests.support.runs import RUN

DEMO_LIMITS = replace(Limits.fp32(), **SORTING.tables["limits"])
CLEAN = Evidence(
    tokens=1000,
    malformed="",
    exponent_mismatches=0,
    mantissa_mean=0.0,
    mantissa_median=0.0,
    draw_distance=0.0,
    off=(0,) * len(LADDER),
    end_probability=1.0,
    gap_mean=0.0,
    gap_max=0.0,
    surprise=0.0,
    mantissa_worst=0.0,
    chunks=1.0,
)
SURE = replace(CLEAN, off=(1, 0, 0, 0, 0), draw_distance=5e-5)
"""Of a greedy answer under a policy that is nearly sure: within the limits, and rightly
accepted.
"""
CAUGHT = replace(CLEAN, off=(400, 300, 200, 100, 0), draw_distance=0.4)
TASKS = [GroupTask(group=7, prompt=(1, 2), seeds=(bytes(32), bytes(32)))]


class SureEngine:
    """Says of each way to cheat what the test wants; a proof names the way."""

    def __init__(self, **evidence: Evidence) -> None:
        self.evidence = evidence
        self.loaded = "5"
        self._ended: list[Group] = []

    async def load(self, weights: str) -> None:
        self.loaded = weights

    async def submit(self, tasks, sampling) -> None:
        is_redrawn = tasks[0].seeds != TASKS[0].seeds
        way = {
            ("5", 0.0, False): "greedy",
            ("4", 1.0, False): "stale",
            ("int8", 1.0, False): "int8",
            ("5", WARMTH, False): "warm",
            ("5", 1.0, True): "redrawn",
        }.get((self.loaded, sampling.temperature, is_redrawn), "hot")
        assert is_redrawn == (way in ("redrawn", "hot"))
        self._ended = [Group(task.group, (Completion((), (), way.encode()),)) for task in tasks]

    async def advance(self) -> list[Group]:
        return self._ended

    async def score(self, tasks, groups, sampling) -> list[Scored]:
        assert self.loaded == "5", "a validator has the policy that was claimed"
        assert (tasks, sampling.temperature) == (TASKS, 1.0)
        ways = [group.completions[0].proof.decode() for group in groups]
        return [Scored(self.evidence.get(way, SURE), b"") for way in ways]


class Rounding(CheatSession):
    async def _rounded(self, path: str) -> str:
        assert path == "5"
        return "int8"


@contextmanager
def pin(version: int) -> Iterator[str]:
    yield str(version)


async def handed_in(engine: SureEngine, turn: str, *, held: tuple[int, ...] = (5, 4)) -> str:
    shardcast = SimpleNamespace(held=held, pin=pin, holds=held.__contains__)
    terms = replace(RUN.terms, limits=DEMO_LIMITS)
    run: Any = SimpleNamespace(terms=terms)
    node: Any = SimpleNamespace(shardcast=shardcast, world=None, run=RUN)
    nothing: Any = None
    counts = InferenceCounts(version=PolicyVersion(5))
    working: Any = engine
    outbox: Any = SimpleNamespace(loose=lambda most: [])
    session = Rounding(node, run, nothing, working, outbox, "cheat", counts)
    session.turn, session.in_engine = turn, (PolicyVersion(5), False)
    (group,) = await session.draw(TASKS)
    return group.completions[0].proof.decode()


async def test_what_might_pass_is_not_handed_in() -> None:
    """Late in a run a greedy submission was within limits: the demo ended with
    exit 1.
    """
    assert judge(SURE, DEMO_LIMITS).verdict is Verdict.ACCEPTED
    assert judge_pool([SURE], DEMO_LIMITS).verdict is Verdict.ACCEPTED
    for turn in WAYS:
        assert await handed_in(SureEngine(hot=CAUGHT), turn) == "hot"
        with pytest.raises(EngineError, match="no way to cheat"):
            await handed_in(SureEngine(), turn)
    for turn in ("greedy", "warm"):
        assert await handed_in(SureEngine(stale=CAUGHT), turn) == "stale"
        assert await handed_in(SureEngine(stale=CAUGHT, hot=CAUGHT), turn, held=(5,)) == "hot"


@pytest.mark.parametrize("turn", WAYS)
async def test_each_turn_tries_its_own_way_first(turn: str) -> None:
    all_caught = {way: CAUGHT for way in WAYS}
    assert await handed_in(SureEngine(**all_caught), turn) == turn


async def test_rounded_weights_are_of_the_policy_that_is_claimed(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "node/store/v1")
    world = RealWorld(KeyPair(b"c" * 32), tmp_path / "node")
    nothing: Any = None
    outbox: Any = SimpleNamespace(loose=lambda most: [])
    node: Any = SimpleNamespace(world=world, run=RUN)
    session = CheatSession(node, RUN, nothing, nothing, outbox, "cheat", InferenceCounts())
    for _ in range(2):  # those of the turn before are replaced
        rounded = tmp_path / "node" / await session._rounded("store/v1")
    before, after = (
        {path.name: path.read_bytes() for path in where.iterdir()}
        for where in (folder, rounded)
    )
    assert before.keys() == after.keys()
    assert {name for name in before if before[name] != after[name]} == {"model.safetensors"}


@pytest.mark.parametrize("limits", [DEMO_LIMITS, Limits.fp32(), Limits.bf16()])
def test_a_margin_stays_to_what_a_validator_may_see(limits: Limits) -> None:
    """Evidence just beyond a limit might be just within it elsewhere."""
    for name in ("mantissa_mean", "draw_distance", "gap_max"):
        limit = getattr(limits, name)
        assert not must_fail([replace(CLEAN, **{name: 1.5 * limit})], limits)
        assert must_fail([replace(CLEAN, **{name: 1.01 * MARGIN * limit})], limits)
    assert not must_fail([CLEAN], limits)
    assert must_fail([CLEAN, replace(CLEAN, malformed="no proof")], limits)
