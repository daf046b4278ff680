"""Weak signals find honest workers no oftener than is promised, and leaning ones."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import numpy as np
import pytest

from p2p.identity import PeerId
from p2p.shardcast.manifest import PolicyVersion
from roles.protocol.core.pooled import CHANCE, SUBMISSIONS, PooledSignals, Signals
from roles.run.core.trust import TrustTerms


@dataclass(frozen=True)
class Lean:
    """By which factors noise is larger, and where the mean of the surprise lies."""

    off: float = 1.0
    gap: float = 1.0
    mantissa: float = 1.0
    surprise: float = 0.0


MARGIN = TrustTerms().margin
ONE_ENGINE = 1.05
"""A margin that an owner may sign where all workers have the same engine."""
TOKENS = 1_000
"""Of a submission, as of those measured in bfloat16 (docs/trust.md)."""

ADAPTER = Lean(off=1.14, gap=1.26, mantissa=1.13)
"""Rank 8 on every matrix, a thousandth of its norm: what is off, by which factor."""
COOLER = Lean(surprise=-0.41)
"""Temperature 0.99, in standard deviations of a submission of 1,000 tokens."""


def name(number: int) -> PeerId:
    return PeerId.from_public_key(number.to_bytes(32, "big"))


def submission(dice: np.random.Generator, policy: int, lean: Lean) -> Signals:
    """As SmolLM2's: 1.6 % off in clumps, gaps of 0.88 nats, mantissas of 1.14, all of which
    move with the policy."""
    drift = 1 + 0.3 * float(np.sin(policy))
    return Signals(
        off=1.5 * float(dice.poisson(0.016 * TOKENS * lean.off * drift / 1.5)) / TOKENS,
        gap=lean.gap * drift * float(dice.gamma(3, 0.88 / 3)) / TOKENS,
        mantissa=lean.mantissa * drift * float(dice.normal(1.14, 0.08)),
        surprise=float(dice.normal(lean.surprise, 1.0)),
    )


def found(
    seed: int,
    *,
    policies: int,
    workers: int,
    chance: float,
    every: int,
    lean: Lean,
    margin: float = MARGIN,
) -> dict[PeerId, int]:
    """Who is found after how many policies, with a submission of everyone under each. Every so
    manyeth worker leans."""
    dice, pooled = np.random.default_rng(seed), PooledSignals(Random(seed), margin, chance)
    after: dict[PeerId, int] = {}
    for policy in range(policies):
        for worker in map(int, dice.permutation(workers)):
            seen = submission(dice, policy, lean if worker % every == 0 else Lean())
            if pooled.note(name(worker), PolicyVersion(policy), seen):
                after.setdefault(name(worker), policy + 1)
    return after


def test_honest_workers_are_found_no_oftener_than_is_promised() -> None:
    """200 workers with a chance of one in five, looked at after each of 150 submissions; a
    fifth of them with an engine whose noise is a sixth larger."""
    workers, chance = 200, 0.2
    for noise in (1.0, 1.15):
        assert noise < MARGIN
        other = Lean(off=noise, gap=noise, mantissa=noise)
        late = found(1, policies=150, workers=workers, chance=chance, every=5, lean=other)
        assert len(late) <= chance * workers


def test_the_stake_of_an_honest_worker_does_not_grow_on_the_average() -> None:
    """Ville's inequality rests on it: the mean over workers of what all bets come to."""
    dice, pooled, count = np.random.default_rng(2), PooledSignals(Random(2), 1.0, 1e-9), 300
    for policy in range(60):
        for worker in map(int, dice.permutation(count)):
            pooled.note(name(worker), PolicyVersion(policy), submission(dice, policy, Lean()))
    stakes = [pooled.stake(name(worker)) for worker in range(count)]
    assert 0 < np.mean(stakes) <= 1.2 * 60 / SUBMISSIONS


@pytest.mark.parametrize(
    ("lean", "margin", "most"),
    [
        (ADAPTER, ONE_ENGINE, 120),
        (COOLER, MARGIN, 700),
        (Lean(surprise=10 * COOLER.surprise), MARGIN, 40),  # submissions of 100,000 tokens
    ],
)
def test_who_leans_is_found_and_nobody_else(lean: Lean, margin: float, most: int) -> None:
    """In submissions of one worker, with the sizes that were measured."""
    after = found(
        3, policies=most, workers=30, chance=CHANCE, every=30, lean=lean, margin=margin
    )
    assert list(after) == [name(0)]
