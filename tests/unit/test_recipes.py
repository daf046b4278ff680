"""The table of recipes, what it refuses, and what the trainer says when a step goes wrong."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest

from p2p.errors import ConfigError
from roles.engines.base import StepReport
from roles.rl.learner import LearnerConfig, Schedule
from roles.rl.recipes import (
    KINDS,
    LARGE_MODEL,
    NETWORK,
    SMALL_MODEL,
    SORTER,
    check_suits,
    kind_of,
)
from roles.trainer.core.guards import LearningGuards
from tests import recipe

SMOLLM2 = 134_515_008


def test_each_kind_is_found_by_size_and_base() -> None:
    assert kind_of(105_088, has_base=False) is NETWORK
    assert kind_of(SMOLLM2, has_base=True) is SMALL_MODEL
    assert kind_of(8_190_735_360, has_base=True) is LARGE_MODEL


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_kinds_own_recipe_suits_it(kind: Any) -> None:
    size = 2 * 10**9 if kind is LARGE_MODEL else 10**6
    check_suits(kind.learner, size, has_base=kind.has_base)


def test_the_defaults_are_refused_for_a_base() -> None:
    """They ruined SmolLM2 in silence: ratio_max 227, k3 1.08, held-out 6 % -> 6 %."""
    with pytest.raises(ConfigError, match=r"rate = 0\.0008 in learner\.toml.*set rate = 6e-05"):
        check_suits(NETWORK.learner, SMOLLM2, has_base=True)
    check_suits(NETWORK.learner, SORTER.parameters, has_base=False)
    with pytest.raises(ConfigError, match=r"set rate = 1e-06"):
        check_suits(LearnerConfig(rate=3e-4), 8 * 10**9, has_base=True)


def report(step: int = 1, **change: float) -> StepReport:
    healthy = StepReport(
        step=step, loss=0.0, k3=0.05, ratio_max=3.4, clipped=0.0, capped=0.0, entropy=0.2,
        gradient_norm=1.0, tokens=100, changed=0.02,
    )  # fmt: skip
    return replace(healthy, **change)


def test_a_step_too_far_from_its_samplers_is_told() -> None:
    assert LearningGuards().why_wrong(report()) == ""
    for change, said in (
        ({"k3": 1.08}, "k3 is 1.08, over 0.5. Lower `rate`"),
        ({"ratio_max": 227.0, "k3": 0.2}, "ratio_max is 227, over 20. Lower `rate`"),
    ):
        why = LearningGuards().why_wrong(report(**change))
        assert why.startswith(f"step 1 goes wrong: {said}")


def test_entropy_that_rises_for_five_steps_is_told() -> None:
    guards = LearningGuards()
    rising = [guards.why_wrong(report(step, entropy=0.2 + 0.03 * step)) for step in range(7)]
    assert rising[:5] == [""] * 5
    assert "entropy rose 5 steps in a row, from 0.20 to 0.35" in rising[5]
    assert "entropy rose" in rising[6]
    assert guards.why_wrong(report(7, entropy=0.2)) == ""


def test_rates_climb_fall_and_stay() -> None:
    learner, warm_up = NETWORK.learner, NETWORK.learner.warm_up
    assert learner.rate_at(0, 60) == pytest.approx(8e-4 / 5)
    assert learner.rate_at(4, 60) == pytest.approx(8e-4 * (1 - 0.9 * 4 / 60))
    assert learner.rate_at(60, 60) == learner.rate_at(600, 60) == pytest.approx(8e-5)
    assert warm_up is not None
    assert warm_up.rate_at(0) == pytest.approx(4e-3 / 50)
    assert max(map(warm_up.rate_at, range(400))) == warm_up.rate_at(49)


@pytest.mark.parametrize(
    ("schedule", "halfway", "late"),
    [
        (Schedule.LINEAR, 0.55, 0.19),
        (Schedule.COSINE, 0.55, 0.1 + 0.9 * (1 + math.cos(0.9 * math.pi)) / 2),
        (Schedule.WSD, 1.0, 1 - 0.9 * math.sqrt(0.5)),
    ],
)
def test_a_rate_falls_by_its_schedule(schedule: Schedule, halfway: float, late: float) -> None:
    learner = LearnerConfig(rate=1.0, ramp=1, schedule=schedule)
    rates = [learner.rate_at(step, 100) for step in range(120)]
    assert rates[0] == 1.0
    assert rates == sorted(rates, reverse=True)
    assert (rates[50], rates[90]) == pytest.approx((halfway, late))
    assert rates[100] == rates[119] == pytest.approx(0.1)


def test_the_page_of_recipes_is_made_from_the_code() -> None:
    text = recipe.page()
    assert recipe.PAGE.read_text(encoding="utf-8") == text, "python -m tests.recipe --write"
    assert "| `rate` | Peak learning rate of AdamW" in text
    assert not [line for line in text.splitlines() if re.match(r"\| `\w+` \|  \|", line)]
