"""The recipe's losses against vectors worked out in float64, and its schedules and
advantages.
"""

import math

import pytest
import torch
from torch import Tensor

from roles.contract.core.sampling import SamplingTerms
from roles.rl.advantage import group_advantages, has_spread
from roles.rl.learner import LearnerConfig, Schedule
from roles.rl.losses import (
    GrpoOptions,
    clipped_loss,
    importance_weight,
    is_clipped,
    k3,
    token_logprobs,
)
from roles.rl.recipes import NETWORK


def vector(*values: float, grad: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "gradient"),
    [
        (1, 0.5, -0.5, -0.5),
        (1, 1.1, -1.1, -1.1),
        (1, 1.5, -1.2, 0),
        (1, 100, -1.2, 0),
        (-1, 0.5, 0.8, 0),
        (-1, 0.9, 0.9, 0.9),
        (-1, 1.5, 1.5, 1.5),
        (-1, 3.9, 3.9, 3.9),
        (-1, 4.5, 4.0, 0),
        (-1, 100, 4.0, 0),
    ],
)
def test_one_token(advantage: float, ratio: float, loss: float, gradient: float) -> None:
    current = vector(math.log(ratio), grad=True)
    old, weight = vector(0.0), vector(advantage)
    value = clipped_loss(current, old, weight, clip=0.2, clip_negative=4.0)
    torch.autograd.backward(value.sum())
    assert current.grad is not None
    assert value.item() == pytest.approx(loss)
    assert current.grad.item() == pytest.approx(gradient)
    clipped = is_clipped(current, old, weight, clip=0.2, clip_negative=4.0)
    assert clipped.item() is (gradient == 0)


# Two rows of three and two tokens with rewards 1 and 0, flattened. The fifth log-prob is above
# 0 on purpose: it drives the ratio beyond the second clip.
CURRENT = (-0.7, -0.6, -2.5, -0.2, 0.3)
OLD = vector(-1.0, -0.5, -2.0, -0.3, -1.2)
BEHAVIOUR = vector(-1.1, -0.5, -1.0, -0.3, -2.4)


@pytest.mark.parametrize(
    ("case", "loss", "gradient"),
    [
        ("two-sided", 0.338534, (0, -0.127963, -0.085776, 0.156295, 0)),
        ("one-sided", 0.406655, (0, -0.127963, -0.085776, 0.156295, 0.633806)),
        ("with TIS", 0.940592, (0, -0.127963, -0.031555, 0.156295, 0)),
        ("against behaviour", 0.392755, (0, -0.127963, -0.031555, 0.156295, 0)),
    ],
)
def test_two_rows(case: str, loss: float, gradient: tuple[float, ...]) -> None:
    first, second = group_advantages([1, 0], 1e-6)
    advantage = vector(first, first, first, second, second)
    current = vector(*CURRENT, grad=True)
    old = BEHAVIOUR if case == "against behaviour" else OLD
    bound = math.inf if case == "one-sided" else 4.0
    losses = clipped_loss(current, old, advantage, clip=0.2, clip_negative=bound)
    if case == "with TIS":
        losses = losses * importance_weight(OLD, BEHAVIOUR, 2.0)
    total = losses.sum() / 5
    torch.autograd.backward(total)
    assert current.grad is not None
    assert total.item() == pytest.approx(loss, abs=1e-6)
    assert current.grad.tolist() == pytest.approx(gradient, abs=1e-6)


def test_importance_weights() -> None:
    expected = [1.105171, 1, 0.367879, 1, 3.320117]
    assert importance_weight(OLD, BEHAVIOUR, math.inf).tolist() == pytest.approx(
        expected, abs=1e-6
    )
    assert importance_weight(OLD, BEHAVIOUR, 2.0).tolist() == pytest.approx(
        [*expected[:4], 2.0], abs=1e-6
    )
    impossible = vector(-math.inf)  # a sampler that claims to have drawn what it could not
    assert importance_weight(vector(-1.0), impossible, 2.0).item() == 2.0


def test_through_the_softmax() -> None:
    for old, loss, gradient in (
        (-1.2, -0.84, (0, 0, 0)),
        (-0.5, -0.584531, (0.299276, 0.181520, -0.480796)),
    ):
        logits = torch.tensor([[0.2, -0.1, 0.5]], dtype=torch.float64, requires_grad=True)
        current = token_logprobs(logits, torch.tensor([2]), 0.6)
        assert current.item() == pytest.approx(-0.680270, abs=1e-6)
        value = clipped_loss(
            current, vector(old), vector(0.7), clip=0.2, clip_negative=4.0
        ).sum()
        torch.autograd.backward(value)
        assert logits.grad is not None
        assert value.item() == pytest.approx(loss, abs=1e-6)
        assert logits.grad[0].tolist() == pytest.approx(gradient, abs=1e-6)


@pytest.mark.parametrize(
    ("difference", "value", "gradient"),
    [(0.1, 0.005171, -0.105171), (-0.3, 0.040818, 0.259182), (1.0, 0.718282, -1.718282)],
)
def test_k3(difference: float, value: float, gradient: float) -> None:
    current = vector(-1.0, grad=True)
    estimate = k3(vector(-1.0 + difference), current)
    torch.autograd.backward(estimate.sum())
    assert current.grad is not None
    assert estimate.item() == pytest.approx(value, abs=1e-6)
    assert current.grad.item() == pytest.approx(gradient, abs=1e-6)


def test_advantages() -> None:
    assert group_advantages([1, 0], 1e-6) == pytest.approx([0.707106, -0.707106], abs=1e-6)
    assert group_advantages([1, 1, 0, 0], 1e-6) == pytest.approx(
        [0.866024] * 2 + [-0.866024] * 2, abs=1e-6
    )
    assert group_advantages([1] + [0] * 7, 1e-6) == pytest.approx(
        [2.474867] + [-0.353552] * 7, abs=1e-6
    )
    with pytest.raises(ValueError, match="two completions"):
        group_advantages([1], 1e-6)


def test_spread_is_what_teaches() -> None:
    assert has_spread([0, 1, 1])
    assert not has_spread([1, 1, 1])
    assert not has_spread([1])
    assert not has_spread([])


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


def test_a_recipe_that_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match="clip_negative"):
        GrpoOptions(clip_negative=1.1)
    with pytest.raises(ValueError, match="group_size"):
        SamplingTerms(steps=1, group_size=1, max_new_tokens=1)


@pytest.mark.parametrize(("one", "other"), [(0.0, -65504.0), (-65504.0, 0.0), (-1.0, -400.0)])
def test_losses_are_numbers_however_far_log_probs_are_apart(one: float, other: float) -> None:
    """A ratio of e^89 is infinite in float32, and what a clip cuts off of its gradient is 0
    times that: no number, and the end of the trainer."""
    current = torch.tensor([one], requires_grad=True)
    old = torch.tensor([other])
    for advantage in (1.0, -1.0):
        value = clipped_loss(
            current, old, torch.tensor([advantage]), clip=0.2, clip_negative=4.0
        )
        value = value * importance_weight(old, current.detach(), 2.0) + k3(old, current)
        current.grad = None
        torch.autograd.backward(value.sum())
        assert current.grad is not None
        assert math.isfinite(value.item())
        assert math.isfinite(current.grad.item())
