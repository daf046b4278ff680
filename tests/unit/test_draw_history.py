"""A worker's last submissions together: steering that hides in the noise of one adds up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from p2p.identity import KeyPair
from proofs.checks import LADDER, Evidence, Limits, Reason, Verdict, judge, judge_pool
from roles.protocol import history
from roles.protocol.history import SUBMISSIONS, DrawHistory
from tests.support.evidence import HONEST

LIMITS = Limits.bf16()
PEERS = [KeyPair(bytes((number,)) * 32).peer_id for number in range(4)]
WORKER, OTHER = PEERS[:2]
TOKENS = 123


def group(gaps: Sequence[float]) -> Evidence:
    """With these gaps, of `TOKENS` tokens."""
    off = tuple(sum(gap > step for gap in gaps) for step in LADDER)
    return replace(
        HONEST,
        tokens=TOKENS,
        gap_mean=sum(gaps) / TOKENS,
        gap_max=max(gaps, default=0.0),
        off=off,
    )


def submission(rng: np.random.Generator, steered: int = 0, cap: float = 0.0) -> list[Evidence]:
    """Eight groups as SmolLM2 has them: 1.6 % of tokens off, by 0.065 in the mean; and tokens
    that were taken because their gap was below ``cap``."""
    return [
        group(
            [
                *rng.exponential(0.065, int(rng.poisson(TOKENS * 0.016))).tolist(),
                *rng.uniform(0, cap, steered).tolist(),
            ]
        )
        for _ in range(8)
    ]


def test_honest_work_is_accepted_however_long() -> None:
    rng, draws = np.random.default_rng(0), DrawHistory()
    verdicts = {draws.judge(WORKER, submission(rng), LIMITS).verdict for _ in range(500)}
    assert verdicts == {Verdict.ACCEPTED}


def test_steering_that_one_submission_hides_is_found_in_twenty() -> None:
    """Two tokens a group by up to 0.25: 16 and 2 nats in a submission, of which each passes."""
    rng, draws = np.random.default_rng(1), DrawHistory()
    verdicts = []
    for _ in range(20):
        pool = submission(rng, steered=2, cap=0.25)
        alone = {judge(one, LIMITS).verdict for one in pool} | {
            judge_pool(pool, LIMITS).verdict
        }
        assert alone == {Verdict.ACCEPTED}
        verdicts.append(draws.judge(WORKER, pool, LIMITS).verdict)
    assert verdicts.count(Verdict.REJECTED) >= 1


def test_a_rejection_clears_the_record_of_its_worker_alone() -> None:
    rng, draws = np.random.default_rng(2), DrawHistory()
    heavy = [group([0.09] * 6)] * 8
    seen = [draws.judge(WORKER, heavy, LIMITS).reason for _ in range(20)]
    first = next(n for n, reason in enumerate(seen) if reason is not Reason.WITHIN_LIMITS)
    assert 0 < first < 10
    assert draws.judge(OTHER, heavy, LIMITS).verdict is Verdict.ACCEPTED
    assert seen[first + 1] is Reason.WITHIN_LIMITS
    assert draws.judge(WORKER, submission(rng), LIMITS).verdict is Verdict.ACCEPTED


def test_other_limits_begin_anew_and_old_work_is_forgotten() -> None:
    draws = DrawHistory()
    heavy = [group([0.09] * 6)] * 8
    assert draws.judge(WORKER, heavy, LIMITS).verdict is Verdict.ACCEPTED
    for number in range(2, 12):
        other = replace(LIMITS, surprise=20.0 + number)
        assert draws.judge(WORKER, heavy, other).verdict is Verdict.ACCEPTED
    light = [group([])] * 8
    for _ in range(SUBMISSIONS):
        assert draws.judge(WORKER, light, LIMITS).verdict is Verdict.ACCEPTED
    (record,) = draws._records.values()
    assert len(record) == SUBMISSIONS - 1
    assert {one.gap_mean for one in record} == {0.0}


def test_records_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "WORKERS", 3)
    draws = DrawHistory()
    for number in (0, 1, 2, 0, 3):
        draws.judge(PEERS[number], [group([])], LIMITS)
    assert list(draws._records) == [PEERS[2], PEERS[0], PEERS[3]]
