"""Replays of a trainer: what convicts a validator, what accuses nobody, and what is kept."""

from __future__ import annotations

import itertools
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

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
from roles.trainer.audit import LIES, SETTLING
from roles.trainer.core.lot import REPLAYED_SHARE, Lot
from roles.trainer.scoring import PolicyScorer
from tests.trainer_bench import JUDGE, WORKER, Bench, open_bench

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


def test_the_lot_falls_on_its_share_and_nobody_foresees_it() -> None:
    asked = [commitment(number) for number in range(20_000)]
    lot, other = Lot(b"one"), Lot(b"another")
    drawn = [lot.falls_on(one) for one in asked]
    assert sum(drawn) == pytest.approx(REPLAYED_SHARE * len(asked), abs=120)  # 4 sd
    both = sum(a and other.falls_on(one) for a, one in zip(drawn, asked, strict=True))
    assert both == pytest.approx(REPLAYED_SHARE**2 * len(asked), abs=30)
    assert drawn == [lot.falls_on(one) for one in asked]


def test_a_validator_that_always_lies_is_found_as_soon_as_computed() -> None:
    """Of 2,000 validators half are found within 14 deliveries, 99 of 100 within 90."""
    found = []
    for number in range(2_000):
        lot = Lot(b"secret %d" % number)
        found.append(next(at for at in range(2_000) if lot.falls_on(commitment(at))) + 1)
    for within in (14, 45, 90):
        share = sum(at <= within for at in found) / len(found)
        assert share == pytest.approx(1 - (1 - REPLAYED_SHARE) ** within, abs=0.045)
    assert sum(found) / len(found) == pytest.approx(1 / REPLAYED_SHARE, rel=0.1)


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


async def test_only_what_the_lot_falls_on_is_scored(tmp_path: Path) -> None:
    async with open_bench(tmp_path, is_drawn=False) as bench:
        assert await bench.hand_over(await bench.made_up(0)) == (Receipt.TAKEN, "")
        assert bench.auditor.counts.replayed == 0


async def test_a_validator_that_signs_made_up_tokens_is_refused_for_good(
    tmp_path: Path,
) -> None:
    """It was believed for ever: every submission has one validator, and nobody looked."""
    async with open_bench(tmp_path, is_drawn=False) as bench:
        await bench.hand_over(await bench.made_up(0))
        await bench.hand_over(await bench.made_up(1))
        before = len(bench.intake.buffer)
        bench.lot.is_drawn = True
        receipt, reason = await bench.hand_over(lie := await bench.made_up(2))
        assert receipt is Receipt.UNWANTED
        assert reason.startswith(LIED)
        # what was taken of it before is not learnt from
        assert len(bench.intake.buffer) == 0
        assert bench.intake.buffer.counts.discredited == before
        receipt, reason = await bench.hand_over(await bench.honest(3))
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
            bench.run, bench.environment, bench.engine, await bench.honest(4)
        )


async def test_a_conviction_survives_a_restart_and_what_it_taints_is_not_taken_up(
    tmp_path: Path,
) -> None:
    async with open_bench(tmp_path, is_drawn=False) as bench:
        await bench.hand_over(await bench.made_up(0))
        bench.lot.is_drawn = True
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
    async with open_bench(tmp_path / "wrong", is_drawn=False) as bench:
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
    async with open_bench(tmp_path / "impossible", is_drawn=False) as bench:
        rewards = (0.0,) * 7 + (3e38,)
        await bench.hand_over(await bench.honest(0, rewards=rewards))
        assert NO_REWARD in bench.auditor.liars[JUDGE.peer_id]


async def test_rewards_that_differ_by_rounding_accuse_nobody(tmp_path: Path) -> None:
    async with open_bench(tmp_path, is_drawn=False) as bench:
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


async def test_a_policy_that_goes_while_a_caller_waits_for_the_engine_ends_no_trainer() -> None:
    """It was looked for before the wait, and not found after it: a `KeyError`."""
    held = [PolicyVersion(7)]

    @contextmanager
    def pin(version: PolicyVersion) -> Iterator[str]:
        if version not in held:
            raise KeyError(version)
        yield "weights"

    async def nothing(_: object) -> None:
        await trio.lowlevel.checkpoint()

    shardcast = SimpleNamespace(holds=held.__contains__, pin=pin, check_weights=nothing)
    node, engine = SimpleNamespace(shardcast=shardcast), SimpleNamespace(load=nothing)
    scorer = PolicyScorer(cast(Any, node), cast(Any, engine))

    async def second() -> None:
        with pytest.raises(EngineError, match="not held any more"):
            async with scorer.holding(PolicyVersion(7), b""):
                pass

    async with trio.open_nursery() as nursery, scorer.holding(PolicyVersion(7), b""):
        nursery.start_soon(second)
        await trio.testing.wait_all_tasks_blocked()
        held.clear()
