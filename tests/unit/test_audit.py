"""Replays of a trainer: what convicts a validator, what accuses nobody, and what is kept."""

from __future__ import annotations

import itertools
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing
from roles.trainer.audit import LIES, SETTLING
from roles.trainer.scoring import ScoringDesk

from p2p.errors import BadMessage, WorkerDied
from p2p.identity import PeerId
from p2p.shardcast.manifest import PolicyVersion
from proofs.checks import Limits, Reason
from roles.engines.base import EngineError, Scored
from roles.protocol.core.findings import (
    BEYOND_DOUBT,
    LOGPROBS,
    MARGIN,
    NO_REWARD,
    REWARDS,
    STRIKES,
    WINDOW,
    Finding,
    Lie,
    Strikes,
    Weight,
    decode_lie_untrusted,
    open_lie,
    worst,
)
from roles.protocol.core.groups import LIED, Commitment, Receipt
from roles.protocol.core.statements import LIE_KIND
from roles.protocol.replay import examine
from tests.trainer_bench import JUDGE, WORKER, Bench, make_run, open_bench

GAP = Reason.DRAW_GAP.value


@pytest.mark.parametrize(
    ("finding", "weight"),
    [
        (Finding(GAP, 1.0, 0.9), Weight.BORDERLINE),
        (Finding(GAP, 1.108, 0.9), Weight.BORDERLINE),  # honest work of SmolLM2
        (Finding(GAP, 0.9 * MARGIN, 0.9), Weight.BORDERLINE),
        (Finding(GAP, 2.0, 0.9), Weight.STRIKE),
        (Finding(GAP, 0.9 * BEYOND_DOUBT, 0.9), Weight.STRIKE),
        (Finding(GAP, 13.0, 0.9), Weight.LIE),
        (Finding(Reason.DRAW_DISTANCE.value, 0.05, 1e-4), Weight.LIE),  # float32
        (Finding(Reason.MANTISSA_MEAN.value, 1.0, 0.05), Weight.LIE),  # a step older
        (Finding(Reason.MANTISSA_MEAN.value, 2.8, 1.7), Weight.STRIKE),  # int8, bfloat16
        (Finding(GAP, float("nan"), 0.9), Weight.BORDERLINE),
        (Finding(GAP, float("inf"), 0.9), Weight.LIE),
        (Finding(Reason.DRAW_MISMATCHES.value, 1, 0), Weight.BORDERLINE),
        (Finding(Reason.DRAW_MISMATCHES.value, 4, 0), Weight.STRIKE),
        (Finding(Reason.DRAW_MISMATCHES.value, 40, 0), Weight.LIE),
        (Finding(Reason.MALFORMED_PROOF.value, 1, 0), Weight.LIE),
        (Finding(Reason.IMPROBABLE_END.value, 9e-7, 1e-6), Weight.BORDERLINE),
        (Finding(Reason.IMPROBABLE_END.value, 1e-12, 1e-6), Weight.STRIKE),
        (Finding(Reason.IMPROBABLE_END.value, 0.0, 1e-6), Weight.STRIKE),
        (Finding(Reason.SURPRISE.value, 900.0, 20.0), Weight.STRIKE),
        (Finding(REWARDS, 1e-6, 1e-3), Weight.BORDERLINE),
        (Finding(REWARDS, 1.0, 1e-3), Weight.STRIKE),
        (Finding(NO_REWARD, 3e38, 1.0), Weight.LIE),
    ],
)
def test_a_finding_weighs_by_how_far_it_is_beyond_honest_numerics(
    finding: Finding, weight: Weight
) -> None:
    assert finding.weight is weight
    assert worst([Finding(GAP, 1.0, 0.9), finding]) in (finding, Finding(GAP, 1.0, 0.9))
    assert (worst([finding]) or finding).weight is weight


async def test_a_lie_says_what_a_bystander_needs(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        work = await bench.made_up(0)
        lie = Lie(work.verdict, Finding(GAP, 13.0, 0.9), f"{LIES}/x")
        data, verify = lie.to_bytes(), bench.world.verify
        assert decode_lie_untrusted(data, verify) == lie
        assert open_lie(data, work.to_bytes(), verify) == work
        other = await bench.honest(1)
        for entry, kept in (
            (data[:-1], work.to_bytes()),
            (data, other.to_bytes()),
            (data, work.to_bytes()[:-1]),
            (replace(lie, verdict=other.verdict).to_bytes(), work.to_bytes()),
        ):
            with pytest.raises(BadMessage):
                open_lie(entry, kept, verify)


def commitment(number: int) -> Commitment:
    return Commitment(bytes(32), WORKER.peer_id, PolicyVersion(0), bytes(32), number, bytes(32))


def test_strikes_convict_only_when_they_are_many_of_the_last_looks() -> None:
    strike: Any = type("Strike", (), {"finding": Finding(GAP, 2.0, 0.9), "path": "p"})()
    strikes, numbers = Strikes(), itertools.count()

    def note(validator: PeerId, kind: str, found: Any) -> tuple[Lie, ...]:
        judged = replace(commitment(0), content=next(numbers).to_bytes(32, "big"))
        verdict: Any = SimpleNamespace(validator=validator, commitment=judged)
        return strikes.note(verdict, kind, found)

    me, other = WORKER.peer_id, JUDGE.peer_id
    for _ in range(3):  # with a window of clean looks between them
        for _ in range(STRIKES - 1):
            assert note(me, "replay", strike) == ()
        assert note(other, "replay", strike) == ()
        for _ in range(WINDOW):
            assert note(me, "replay", None) == ()
            note(other, "replay", None)
    for _ in range(STRIKES - 1):
        assert note(me, "rewards", strike) == ()
        assert note(me, "replay", strike) == ()
    assert note(me, "replay", strike) == (strike,) * STRIKES


async def test_honest_work_is_replayed_and_taken(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        for index in range(5):
            assert await bench.hand_over(await bench.honest(index)) == (Receipt.TAKEN, "")
        assert bench.auditor.counts.replayed == 5
        assert bench.auditor.counts.lies == bench.auditor.counts.unsure == 0
        assert bench.auditor.liars == {}
        assert await bench.world.disk.list(LIES) == []
        assert bench.ledger.count(LIE_KIND) == 0


async def test_a_validator_that_signs_made_up_tokens_is_refused_for_good(
    tmp_path: Path,
) -> None:
    """It was believed for ever: every submission has one validator, and nobody looked."""
    async with open_bench(tmp_path) as bench:
        for index in range(4):
            await bench.hand_over(await bench.honest(index))
        before = len(bench.intake.buffer)
        assert before > 0
        receipt, reason = await bench.hand_over(lie := await bench.made_up(4))
        assert receipt is Receipt.UNWANTED
        assert reason.startswith(LIED)
        # what was taken of it before is not learnt from
        assert len(bench.intake.buffer) == 0
        assert bench.intake.buffer.counts.discredited == before
        receipt, reason = await bench.hand_over(await bench.honest(5))
        assert receipt is Receipt.UNWANTED
        assert reason.startswith(LIED)
        entries = [entry.body async for entry in bench.ledger.entries(LIE_KIND)]
        assert len(entries) == 1
        verify = bench.world.verify
        kept = await bench.world.disk.read(decode_lie_untrusted(entries[0], verify).path)
        assert open_lie(entries[0], kept, verify) == lie
        # a bystander with the policy repeats it, and an honest one is clean
        found = worst(await examine(bench.run, bench.environment, bench.engine, lie))
        assert found is not None
        assert found.weight is Weight.LIE
        assert not await examine(
            bench.run, bench.environment, bench.engine, await bench.honest(6)
        )


async def test_a_conviction_survives_a_restart_and_what_it_taints_is_not_taken_up(
    tmp_path: Path,
) -> None:
    async with open_bench(tmp_path) as bench:
        await bench.hand_over(await bench.honest(0))
        await bench.hand_over(await bench.made_up(1))
        await bench.world.disk.replace(f"{LIES}/stray", b"a strike of an earlier life")
        bench.open_trainer()
        await bench.intake.recall()
        await bench.intake.restore(0)
        assert len(bench.intake.buffer) == 0
        assert (await bench.hand_over(await bench.honest(2)))[1].startswith(LIED)
        assert len(await bench.world.disk.list(LIES)) == 1


async def test_a_conviction_outlives_its_damaged_proof(tmp_path: Path) -> None:
    """The ledger says who is refused; the proof beside it may rot or go."""
    async with open_bench(tmp_path) as bench:
        await bench.hand_over(await bench.made_up(0))
        (proof,) = await bench.world.disk.list(LIES)
        await bench.world.disk.replace(f"{LIES}/{proof}", b"rotten")
        bench.open_trainer()
        await bench.intake.recall()
        assert (await bench.hand_over(await bench.honest(1)))[1].startswith(LIED)


async def test_invented_log_probs_are_a_lie_and_a_little_noise_is_none(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        honest = await bench.honest(0)
        count = len(honest.logprobs) // 2
        values = struct.unpack(f"<{count}e", honest.logprobs)
        noisy = struct.pack(f"<{count}e", *(value - 0.1 for value in values))
        work = await bench.verdict_on(await bench.draw(0), 0, logprobs=noisy)
        assert (await bench.hand_over(work))[0] is Receipt.TAKEN
        count = len((await bench.honest(1)).logprobs) // 2
        invented = struct.pack(f"<{count}e", *[-18.0] * count)
        work = await bench.verdict_on(await bench.draw(1), 1, logprobs=invented)
        receipt, reason = await bench.hand_over(work)
        assert receipt is Receipt.UNWANTED
        assert LOGPROBS in reason
        assert JUDGE.peer_id in bench.auditor.liars


async def test_wrong_rewards_convict_at_the_third_and_impossible_ones_at_once(
    tmp_path: Path,
) -> None:
    """An environment is others' code: once may be a machine's fault, and is never learnt
    from."""
    async with open_bench(tmp_path / "wrong") as bench:
        for index in range(STRIKES):
            assert bench.auditor.liars == {}
            honest = await bench.honest(index)
            wrong = tuple(1.0 - paid for paid in honest.verdict.rewards)
            receipt, reason = await bench.hand_over(await bench.honest(index, rewards=wrong))
            assert receipt is Receipt.UNWANTED
            assert REWARDS in reason
        assert JUDGE.peer_id in bench.auditor.liars
        assert bench.ledger.count(LIE_KIND) == STRIKES
        assert len(await bench.world.disk.list(LIES)) == STRIKES
        assert len(bench.intake.buffer) == 0
    async with open_bench(tmp_path / "impossible") as bench:
        rewards = (0.0,) * 7 + (3e38,)
        await bench.hand_over(await bench.honest(0, rewards=rewards))
        assert NO_REWARD in bench.auditor.liars[JUDGE.peer_id]


async def test_rewards_that_differ_by_rounding_accuse_nobody(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        bench.environment.bonus = 1e-4
        for index in range(2 * STRIKES):
            receipt, _ = await bench.hand_over(await bench.honest(index))
            assert receipt is Receipt.UNWANTED
        assert bench.auditor.liars == {}
        assert bench.auditor.counts.unsure == 2 * STRIKES


def leaning(bench: Bench, gap: float) -> None:
    """The engine finds a gap in all that it scores."""
    score = bench.engine.score

    async def scored(*asked: Any) -> list[Scored]:
        said: Sequence[Scored] = await score(*asked)
        return [replace(one, evidence=replace(one.evidence, gap_max=gap)) for one in said]

    bench.engine.score = scored


@pytest.mark.parametrize(
    ("gap", "convicted_after"), [(2.0, 0), (3.0, STRIKES), (20.0, 1)], ids=str
)
async def test_noisy_limits_convict_by_many_or_by_far(
    tmp_path: Path, gap: float, convicted_after: int
) -> None:
    """Honest work of a run in bfloat16 exceeds a limit now and then: once convicts nobody."""
    async with open_bench(tmp_path, limits=Limits.bf16()) as bench:
        works = [await bench.honest(index) for index in range(STRIKES + 3)]
        leaning(bench, gap)
        for number, work in enumerate(works, start=1):
            receipt, _ = await bench.hand_over(work)
            assert receipt is Receipt.UNWANTED
            is_convicted = bool(bench.auditor.liars)
            assert is_convicted is (0 < convicted_after <= number)
        assert bench.ledger.count(LIE_KIND) == convicted_after


async def test_what_was_kept_of_old_strikes_is_removed(tmp_path: Path) -> None:
    async with open_bench(tmp_path, limits=Limits.bf16()) as bench:
        works = [await bench.honest(index) for index in range(2)]
        leaning(bench, 3.0)
        await bench.hand_over(works[0])
        assert len(await bench.world.disk.list(LIES)) == 1
        for number in range(WINDOW):
            other = replace(works[0].verdict.commitment, content=number.to_bytes(32, "big"))
            looked_at = replace(works[0].verdict, commitment=other)
            bench.auditor._strikes.note(looked_at, "replay", None)
        await bench.hand_over(works[1])
        assert await bench.world.disk.list(LIES) == [works[1].verdict.commitment.content.hex()]


async def test_an_engine_that_fails_accuses_nobody(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        work = await bench.made_up(0)

        async def fails(*_: object) -> list[Scored]:
            await trio.lowlevel.checkpoint()
            raise EngineError("out of memory")

        bench.engine.score = fails
        receipt, reason = await bench.hand_over(work)
        assert receipt is Receipt.UNWANTED
        assert "could not replay" in reason
        assert bench.auditor.liars == {}
        assert bench.auditor.counts.unsure == 1


async def test_an_engine_that_dies_ends_the_session_and_accuses_nobody(tmp_path: Path) -> None:
    """The learner is in the same process: its role must take all from the disk again."""

    async def dies(*_: object) -> list[Scored]:
        await trio.lowlevel.checkpoint()
        raise WorkerDied("killed")

    answers: list[tuple[Receipt, str]] = []
    auditors: list[Any] = []

    async def play() -> None:
        async with open_bench(tmp_path) as bench:
            auditors.append(bench.auditor)
            work = await bench.made_up(0)
            bench.engine.score = dies
            with trio.CancelScope(shield=True):
                answers.append(await bench.hand_over(work))

    with pytest.RaisesGroup(WorkerDied, flatten_subgroups=True):
        await play()
    assert [receipt for receipt, _ in answers] == [Receipt.UNWANTED]
    assert auditors[0].liars == {}


async def test_after_other_limits_came_nobody_is_accused_for_a_while(tmp_path: Path) -> None:
    """What a validator had under way was judged by the limits before."""
    async with open_bench(tmp_path) as bench:
        now = [1000.0]
        bench.world.now = lambda: now[0]  # type: ignore[method-assign]
        tighter = replace(bench.run.terms, limits=replace(Limits.fp32(), draw_distance=1e-5))
        bench.standing.run = replace(bench.run, terms=tighter)
        assert (await bench.hand_over(await bench.made_up(0)))[0] is Receipt.UNWANTED
        assert bench.auditor.liars == {}
        now[0] += SETTLING
        await bench.hand_over(await bench.made_up(1))
        assert JUDGE.peer_id in bench.auditor.liars


async def test_the_same_delivery_twice_at_a_time_is_replayed_once(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        work = await bench.honest(0)
        answers: Counter[Receipt] = Counter()

        async def hand_over() -> None:
            answers[(await bench.hand_over(work))[0]] += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(hand_over)
            nursery.start_soon(hand_over)
        assert answers == {Receipt.TAKEN: 2}
        assert bench.auditor.counts.replayed == 1


async def test_a_tiny_model_in_float32_convicts_no_honest_validator_and_each_liar(
    tmp_path: Path,
) -> None:
    """The whole way with tokens that were drawn, by the real engine."""
    async with open_bench(tmp_path, "torch") as bench:
        for index in range(24):
            assert await bench.hand_over(await bench.honest(index)) == (Receipt.TAKEN, "")
        assert bench.auditor.counts.replayed == 24
        assert bench.auditor.counts.unsure == bench.auditor.counts.lies == 0
        assert (await bench.hand_over(await bench.made_up(24)))[1].startswith(LIED)
        assert list(bench.auditor.liars) == [JUDGE.peer_id]


class Policies:
    """An engine and the policies that it may load, in the order in which it is asked."""

    def __init__(self, *held: int) -> None:
        self.held, self.asked = list(held), list[Any]()
        self.opened = trio.Event()
        """Before it nothing is scored."""
        self.shardcast = SimpleNamespace(
            holds=self.held.__contains__, pin=self.pin, check_weights=self.check
        )

    @contextmanager
    def pin(self, version: PolicyVersion) -> Iterator[str]:
        assert version in self.held, f"{version} is not held"
        yield f"weights {version}"

    async def check(self, _: object) -> None:
        await trio.lowlevel.checkpoint()

    async def load(self, weights: str) -> None:
        await trio.lowlevel.checkpoint()
        self.asked.append(weights)

    async def score(self, tasks: Sequence[int], groups: Sequence[int], _: object) -> list[int]:
        await self.opened.wait()
        self.asked.append(len(groups))
        return list(groups)


@asynccontextmanager
async def desk_on(policies: Policies) -> AsyncIterator[ScoringDesk]:
    node: Any = SimpleNamespace(shardcast=policies.shardcast, run=make_run())
    desk = ScoringDesk(node, cast(Any, policies))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(desk.work_forever)
        yield desk
        nursery.cancel_scope.cancel()


async def asked_for(
    desk: ScoringDesk, meanwhile: Callable[[], object], *versions: int
) -> list[Any]:
    """What the desk answers submissions of two groups under these versions, which come while
    the first of them is scored."""
    answers: list[Any] = [None] * len(versions)

    async def ask(at: int, version: int) -> None:
        pair: Any = [at, at]
        try:
            answers[at] = await desk.score(PolicyVersion(version), b"", pair, pair)
        except EngineError as error:
            answers[at] = str(error)

    async with trio.open_nursery() as nursery:
        for at, version in enumerate(versions):
            nursery.start_soon(ask, at, version)
            await trio.testing.wait_all_tasks_blocked()
        meanwhile()
    return answers


@pytest.mark.parametrize("versions", [(5, 6, 7) * 4, (7, 6, 5) * 4, (6, 5, 5, 7, 5, 6)])
async def test_each_policy_is_loaded_once_a_pass_the_oldest_first(
    versions: tuple[int, ...],
) -> None:
    """With three versions in flight each delivery hashed and loaded all weights again."""
    policies = Policies(5, 6, 7)
    async with desk_on(policies) as desk:
        answers = await asked_for(desk, policies.opened.set, *versions)
    assert answers == [[at, at] for at in range(len(versions))]
    # when the first pass began nothing else had come
    turns = [versions[0], *sorted(versions[1:])]
    expected = [f"weights {version}" for version, _ in itertools.groupby(turns)]
    assert [one for one in policies.asked if isinstance(one, str)] == expected
    assert [one for one in policies.asked if isinstance(one, int)] == [2] * len(versions)


async def test_a_stream_of_new_work_keeps_no_old_policy_waiting() -> None:
    policies = Policies(5, 6)
    policies.opened.set()
    async with desk_on(policies) as desk, trio.open_nursery() as nursery:

        async def stream() -> None:
            while True:
                await desk.score(PolicyVersion(6), b"", [], [])

        for _ in range(3):
            nursery.start_soon(stream)
        while len(policies.asked) < 9:
            await trio.lowlevel.checkpoint()
        await desk.score(PolicyVersion(5), b"", [], [])
        assert len(policies.asked) < 30
        nursery.cancel_scope.cancel()


async def test_a_policy_that_goes_while_its_work_waits_ends_no_trainer() -> None:
    """It was looked for before the wait, and not found after it: a `KeyError`."""
    policies = Policies(6, 7)

    def drop() -> None:
        policies.held.remove(7)
        policies.opened.set()

    async with desk_on(policies) as desk:
        answers = await asked_for(desk, drop, 6, 7)
    assert answers == [[0, 0], "the policy is not held any more"]
