"""Nodes in debt that make the most of what the scorer has to spare for them."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import trio
from roles.validator.core.fair_queue import (
    DEBT_HALF_LIFE,
    EARNS,
    PARDONS,
    STRANGERS_SHARE,
    FairQueue,
)
from roles.validator.judge import Judge
from roles.validator.replay import Replayer

from p2p.identity import KeyPair
from p2p.ledger import open_ledger
from p2p.machine import open_world
from proofs.checks import Evidence, Limits, Verdict
from roles.engines.base import Group, GroupTask, Scored
from roles.inference.role import Inference
from roles.inference.session import InferenceSession
from roles.protocol.core.groups import Commitment, SignedVerdict
from roles.protocol.core.statements import VERDICT_KIND
from roles.protocol.stats import ScoringStats
from roles.rl.recipe import Recipe
from roles.validator.session import ValidatorSession
from tests.attacks.judged import accepted, play, validator
from tests.attacks.test_validator_turns import (
    OTHER,
    V0,
    V1,
    WORKER,
    WellFormed,
    replays,
    served,
    spoil_places,
    turns,
)

__all__ = ["replays"]  # a fixture

SLOW_TRAINER = {"trainer": {"evaluate_every": 0, "profile": {"step_seconds": 2.0}}}
"""It takes less than four workers draw and the validator judges."""


class Debtor(Inference):
    """Honest work, but for a spoilt submission every 40 s: it is always in debt."""

    name: ClassVar[str] = "inference"

    def make_session(self, *parts: Any) -> InferenceSession:
        session = super().make_session(*parts)
        spoilt_at = -40.0

        def spoil(groups: list[Group]) -> list[Group]:
            nonlocal spoilt_at
            now = session.node.world.now()
            if now < spoilt_at + 40.0:
                return groups
            spoilt_at = now
            return [replace(group, completions=group.completions[:1]) for group in groups]

        spoil_places(session, spoil)
        return session


def test_a_node_in_debt_does_not_take_the_trainer_from_honest_ones() -> None:
    """Work of nodes in debt alone was judged while the trainer was full: of one that handed in
    a bad submission every 40 s 176 were accepted in 90 s, of three honest workers 69.
    """
    cast = {f"inference-{number}": "inference" for number in (1, 2, 3)}
    health = play(
        {**cast, "debtor-1": f"{__name__}:Debtor"}, 45.0, role_config=SLOW_TRAINER, steps=1000
    )
    assert validator(health)["rejected"] == 1
    assert 0 < accepted(health, "debtor") < accepted(health, "inference") / 3


def test_what_is_accepted_of_nodes_in_debt_out_of_turn_counts_as_their_share() -> None:
    queue = turns(WORKER)
    queue.blame(OTHER, 0.0)
    queue.push(OTHER, V0, "good after all", 0.0)
    queue.push(OTHER, V0, "next", 0.0)
    assert queue.has_debtor(0.0)
    assert queue.pop(0.0, of_debtors=True) == "good after all"
    queue.charge(1.0)
    queue.note_accepted(of_debtors=True)
    for _ in range(round(1 / STRANGERS_SHARE)):
        assert not queue.has_debtor(0.0)
        queue.push(WORKER, V0, "worker", 0.0)
        assert served(queue, 1) == ["worker"]
        queue.note_accepted(of_debtors=False)
    assert queue.has_debtor(0.0)


def test_a_debt_that_is_forgiven_while_the_scorer_looks_ends_no_validator() -> None:
    """The clock was read twice, and between the readings the last debtor was none any more:
    `pop` of nobody raised ValueError, and the node ended.
    """
    ticks = itertools.count(DEBT_HALF_LIFE - 5e-7, 1e-6)
    node: Any = SimpleNamespace(world=SimpleNamespace(now=lambda: next(ticks)))
    deliveries: Any = SimpleNamespace(has_room=lambda beyond=0: beyond > 0)
    standing: Any = SimpleNamespace(wait=trio.lowlevel.checkpoint)
    nothing: Any = None

    class Enough(Exception):
        """The submission came so far."""

    async def decide(job: Any) -> None:
        raise Enough

    judge: Any = SimpleNamespace(decide=decide, has_worked=lambda peer: False)
    session = ValidatorSession(node, nothing, judge, nothing, standing, ScoringStats())
    job: Any = SimpleNamespace(
        submission=SimpleNamespace(commitment=SimpleNamespace(node=OTHER))
    )
    quiet: Any = SimpleNamespace(examine=trio.lowlevel.checkpoint)
    session._prosecution = quiet
    session._queue.blame(OTHER, 0.0)
    session._queue.push(OTHER, V0, job, 0.0)
    with pytest.raises(Enough):
        trio.run(session._judge_next, deliveries, nothing)


class OneBadGroup(Inference):
    """Honest work, but for one group of each submission, another each time."""

    name: ClassVar[str] = "inference"

    def make_session(self, *parts: Any) -> InferenceSession:
        session = super().make_session(*parts)
        bad = itertools.count()

        def spoil(groups: list[Group]) -> list[Group]:
            number = next(bad) % len(groups)
            task = GroupTask(groups[number].group, (0,), (0,))
            nothing: Any = None
            groups[number : number + 1] = WellFormed.groups(nothing, session.node, [task])
            return groups

        spoil_places(session, spoil)
        return session


def test_one_bad_group_of_a_submission_is_found_wherever_it_is() -> None:
    """A node in debt has one group scored first: that it is in order says nothing of the
    others.
    """
    health = play({"inference-1": f"{__name__}:OneBadGroup"}, 20.0, steps=1000)
    assert validator(health)["rejected"] > 8
    assert accepted(health, "inference") == 0


@pytest.mark.parametrize("is_suspect", [False, True])
async def test_scores_are_in_the_order_of_the_groups_whichever_came_first(
    is_suspect: bool,
) -> None:
    """A trainer learns with these log-probs, and nothing else would show that they are of
    another group.
    """
    evidence = Evidence(
        tokens=1, malformed="", exponent_mismatches=0, mantissa_mean=0.0, mantissa_median=0.0,
        draw_distance=0.0, off=(0,) * 5, gap_mean=0.0, gap_max=0.0, end_probability=1.0,
        surprise=0.0, mantissa_worst=0.0, chunks=1.0,
    )  # fmt: skip

    async def score(tasks: Any, groups: Any, _: Any) -> list[Scored]:
        assert [task.group for task in tasks] == [group.group for group in groups]
        return [Scored(evidence, bytes([group.group])) for group in groups]

    terms = SimpleNamespace(limits=Limits.fp32(), recipe=Recipe())
    standing: Any = SimpleNamespace(run=SimpleNamespace(terms=terms))
    engine: Any = SimpleNamespace(score=score)
    nothing: Any = None
    world = SimpleNamespace(buggify=lambda _: False, rng=lambda _: random.Random(5))
    node: Any = SimpleNamespace(world=world)
    replayer = Replayer(node, nothing, nothing, engine, standing)
    tasks = [GroupTask(number, (1,), ()) for number in range(8)]
    groups = tuple(Group(number, ()) for number in range(8))
    for _ in range(16):
        judgement, logprobs = await replayer._replay(
            tasks, groups, WORKER, is_suspect=is_suspect
        )
        assert judgement.verdict is Verdict.ACCEPTED
        assert logprobs == bytes(range(8))


def praised(times: int) -> FairQueue[str]:
    queue = turns(WORKER, OTHER)
    for _ in range(times):
        queue.praise(WORKER)
    return queue


def test_one_rejection_among_many_acceptances_leaves_turn_and_standing_as_they_were() -> None:
    """An honest submission in 1,000 is refused by limits that fit; its node stood behind
    strangers for a minute, and its work was scored twice.
    """
    queue = praised(EARNS)
    queue.blame(WORKER, 0.0)
    assert queue.is_proven(WORKER, 0.0)
    assert queue.debt(WORKER, 0.0) == 0.0
    queue.push(WORKER, V0, "worker", 0.0)
    queue.push(OTHER, V1, "other", 0.0)
    assert served(queue, 2) == ["worker", "other"]
    assert not queue.has_debtor(0.0)
    queue.blame(WORKER, 0.0)
    assert queue.is_in_debt(WORKER, 0.0), "the second at once is a debt"


def test_a_newcomers_rejection_counts_and_so_do_ten_in_a_row() -> None:
    queue = praised(100 * EARNS)
    queue.blame(OTHER, 0.0)
    assert queue.is_in_debt(OTHER, 0.0)
    for _ in range(10):
        queue.blame(WORKER, 0.0)
    assert queue.debt(WORKER, 0.0) == 10 - PARDONS
    assert not queue.is_proven(WORKER, 60.0)


@pytest.mark.parametrize(("rate", "most"), [(1e-4, 1e-6), (1e-3, 1e-5), (0.5, 1.0)])
def test_what_is_refused_by_chance_is_seldom_a_debt_and_a_cheat_is_always_in_debt(
    rate: float, most: float
) -> None:
    """The arithmetic of the module's theory: three within `EARNS` acceptances."""
    queue, rng, debts, count = praised(2 * EARNS), random.Random(3), 0, 400_000
    if rate == 0.5:
        count = 1000
    for _ in range(count):
        if rng.random() < rate:
            before = queue.debt(WORKER, 0.0)
            queue.blame(WORKER, 0.0)
            debts += queue.debt(WORKER, 0.0) > before
        else:
            queue.praise(WORKER)
    assert debts <= most * count
    assert debts > 400 or rate < 0.5


async def test_pardons_are_remembered_over_a_restart(tmp_path: Path) -> None:
    """They follow from the ledger."""
    judge = KeyPair(b"j" * 32)
    async with open_world(tmp_path, key=judge) as world, open_ledger(world, "ledger") as ledger:
        for index in range(EARNS + 10):
            commitment = Commitment(bytes(32), WORKER, V1, bytes(32), index, bytes(32))
            signed = SignedVerdict(
                judge.peer_id, commitment, Verdict.ACCEPTED, "", 0.0, 0.0, ()
            ).signed(judge)
            await ledger.append(VERDICT_KIND, signed.to_bytes())
        node: Any = SimpleNamespace(world=world)
        nothing: Any = None
        stats = ScoringStats()
        judged = Judge(node, nothing, nothing, stats)
        session = ValidatorSession(node, nothing, judged, ledger, nothing, stats)
        await session.recall()
    session._queue.blame(WORKER, 0.0)
    assert session._queue.is_proven(WORKER, 0.0)


class Unlucky(Inference):
    """An honest worker of which one submission is refused, when many were accepted."""

    name: ClassVar[str] = "inference"

    def make_session(self, *parts: Any) -> InferenceSession:
        session = super().make_session(*parts)
        drawn = itertools.count()

        def spoil(groups: list[Group]) -> list[Group]:
            if next(drawn) != EARNS + 12:
                return groups
            return [replace(group, completions=group.completions[:1]) for group in groups]

        spoil_places(session, spoil)
        return session


def test_a_refusal_by_chance_costs_a_worker_no_turns(replays: list[int]) -> None:
    """It was behind strangers for a minute, and what it handed in was scored in two parts."""
    cast = {"inference-1": "inference", "unlucky-1": f"{__name__}:Unlucky"}
    health = play(cast, 60.0, steps=1000)
    record = validator(health)["nodes"][health["unlucky-1"]["peer"]]
    assert record["rejected"] == 1
    assert record["accepted"] > EARNS + 12
    assert 1 not in replays
