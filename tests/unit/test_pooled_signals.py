"""Weak signals find honest workers no oftener than is promised, and leaning ones."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from p2p.identity import PeerId
from p2p.shardcast.manifest import PolicyVersion
from roles.protocol.core.pooled import MARGIN, SUBMISSIONS, PooledSignals, Signals

TOKENS = 1_000
"""Of a submission, as of those measured in bfloat16 (docs/performance.md)."""


def name(number: int) -> PeerId:
    return PeerId.from_public_key(number.to_bytes(32, "big"))


def submission(
    dice: np.random.Generator, policy: int, noise: float = 1.0, surprise: float = 0.0
) -> Signals:
    """As SmolLM2's: 1.6 % off in clumps, gaps of 0.88 nats, mantissas of 1.14, all of which
    move with the policy."""
    noise *= 1 + 0.3 * float(np.sin(policy))
    return Signals(
        off=1.5 * float(dice.poisson(0.016 * TOKENS * noise / 1.5)) / TOKENS,
        gap=noise * float(dice.gamma(3, 0.88 / 3)) / TOKENS,
        mantissa=noise * float(dice.normal(1.14, 0.08)),
        surprise=float(dice.normal(surprise, 1.0)),
    )


def found(
    seed: int,
    *,
    policies: int,
    workers: int,
    chance: float,
    noise: float = 1.0,
    lean: float = 0.0,
) -> dict[PeerId, int]:
    """Who is found after how many policies, with a submission of everyone under each. ``noise``
    is that of every fifth worker, ``lean`` the surprise of the first."""
    dice, pooled = np.random.default_rng(seed), PooledSignals(Random(seed), chance)
    after: dict[PeerId, int] = {}
    for policy in range(policies):
        for worker in map(int, dice.permutation(workers)):
            seen = submission(
                dice, policy, noise if worker % 5 == 0 else 1.0, 0.0 if worker else lean
            )
            if pooled.note(name(worker), PolicyVersion(policy), seen):
                after.setdefault(name(worker), policy + 1)
    return after


def test_honest_workers_are_found_no_oftener_than_is_promised() -> None:
    """200 workers with a chance of one in five, looked at after each of 150 submissions; a
    fifth of them with an engine whose noise is a sixth larger."""
    workers, chance = 200, 0.2
    for noise in (1.0, 1.15):
        assert noise < MARGIN
        late = found(1, policies=150, workers=workers, chance=chance, noise=noise)
        assert len(late) <= chance * workers


def test_the_stake_of_an_honest_worker_does_not_grow_on_the_average() -> None:
    """Ville's inequality rests on it: the mean over workers of what all bets come to."""
    dice, pooled, count = np.random.default_rng(2), PooledSignals(Random(2), 1e-9), 300
    for policy in range(60):
        for worker in map(int, dice.permutation(count)):
            pooled.note(name(worker), PolicyVersion(policy), submission(dice, policy))
    stakes = [pooled.stake(name(worker)) for worker in range(count)]
    assert 0 < np.mean(stakes) <= 1.2 * 60 / SUBMISSIONS


@pytest.mark.parametrize(("lean", "most"), [(0.5, 400), (-1.0, 90), (3.0, 40)])
def test_a_lean_of_surprise_is_found_and_nobody_else(lean: float, most: int) -> None:
    """In standard deviations of one submission: half of one takes up to 400 of them."""
    after = found(3, policies=most, workers=40, chance=1e-4, lean=lean)
    assert list(after) == [name(0)]


def test_noise_beyond_the_margin_is_found_and_below_it_is_not() -> None:
    noisy = found(4, policies=120, workers=40, chance=1e-4, noise=1.5)
    assert set(noisy) == {name(worker) for worker in range(0, 40, 5)}
    assert found(4, policies=120, workers=40, chance=1e-4, noise=1.15) == {}
