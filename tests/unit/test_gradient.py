"""The gradient of a step, however it is cut: into rows, batches, slices of the head."""

import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor

from roles.contract.core.shape import Family
from roles.engines.base import Completion, TrainingGroup
from roles.engines.torch import gradient
from roles.engines.torch.gradient import (
    Aim,
    LearningBatch,
    Tally,
    add_gradient,
    learning_batches,
    old_log_probs,
)
from roles.engines.torch.learner import TorchLearner
from roles.engines.torch.model import TransformerModel
from roles.rl.algorithms.find import Objective, find_algorithm
from roles.rl.recipes import SORTER
from tests.support.models import SHAPES
from tests.support.toys import sorting_engine, sorting_learner

TEMPERATURE = 0.7
GRPO = find_algorithm("grpo", {"kl_sampler": 0.1})


def some_groups(seed: int = 3, count: int = 5, size: int = 4) -> list[TrainingGroup]:
    rng = Random(seed)

    def tokens(most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(97) for _ in range(rng.randint(1, most)))

    groups = []
    for _ in range(count):
        drawn = [tokens(9) for _ in range(size)]
        completions = tuple(
            Completion(one, tuple(-6 * rng.random() for _ in one)) for one in drawn
        )
        groups.append(TrainingGroup(tokens(12), completions, ()))
    return groups


ADVANTAGES = [np.array([1.0, -0.5, 0.25, -0.75], np.float32)] * 5


def aim(batches: list[LearningBatch], objective: Objective = GRPO) -> Aim:
    """One minibatch of all batches."""
    return Aim(
        objective=objective,
        temperature=TEMPERATURE,
        limit=9,
        tokens=sum(map(len, batches)),
        sequences=sum(len(one.packed.pieces) for one in batches),
    )


@pytest.fixture(params=SHAPES, ids=lambda family: family.value)
def model(request: pytest.FixtureRequest) -> TransformerModel:
    torch.set_num_threads(1)
    model = TransformerModel(SHAPES[request.param])
    model.initialise(5)
    return model


def gradients(
    model: TransformerModel,
    row_tokens: int = 1024,
    *,
    is_later: bool = False,
    objective: Objective = GRPO,
) -> tuple[Tally, list[Tensor]]:
    """What the groups add up to; ``is_later`` moves the policy after its log-probs were
    taken."""
    batches = learning_batches(some_groups(), ADVANTAGES, row_tokens=row_tokens)
    old = [old_log_probs(model, one, TEMPERATURE) + 0.3 for one in batches]
    model.zero_grad()
    tally = Tally()
    for batch, before in zip(batches, old, strict=True):
        reference = before - 0.1 if objective.shared.kl_reference else None
        wanted = aim(batches, objective)
        tally += add_gradient(model, batch, wanted, before if is_later else None, reference)
    return tally, [torch.clone(one.grad) for one in model.parameters() if one.grad is not None]


def assert_same(
    one: tuple[Tally, list[Tensor]], other: tuple[Tally, list[Tensor]], atol: float = 1e-5
) -> None:
    assert one[0].tokens == other[0].tokens
    assert one[0].loss == pytest.approx(other[0].loss, rel=1e-4, abs=atol)
    assert one[0].ratio_max == pytest.approx(other[0].ratio_max, rel=1e-4)
    assert one[0].sums == pytest.approx(other[0].sums, rel=1e-4, abs=atol)
    for mine, theirs in zip(one[1], other[1], strict=True):
        torch.testing.assert_close(mine, theirs, atol=atol, rtol=0)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("grpo", {"kl_sampler": 0.1}),
        ("dr_grpo", {"kl_reference": 0.1}),
        ("cispo", {"entropy": 0.1}),
        ("gspo", {"clip_low": 0.5, "clip_high": 0.5}),
    ],
)
def test_a_head_in_slices_is_the_head(
    name: str, options: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slice of 7 cuts completions in two; a loss over whole completions does not notice."""
    model = TransformerModel(SHAPES[Family.QWEN3])
    model.initialise(5)
    objective = find_algorithm(name, options)
    whole = gradients(model, is_later=True, objective=objective)
    monkeypatch.setattr(gradient, "SLICE", 7)
    assert_same(gradients(model, is_later=True, objective=objective), whole)


def test_logits_of_one_slice_are_all_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TransformerModel(SHAPES[Family.LLAMA])
    model.initialise(5)
    monkeypatch.setattr(gradient, "SLICE", 7)
    sizes = []

    def note(_: object, __: object, logits: Tensor) -> None:
        sizes.append(len(logits))

    model.lm_head.register_forward_hook(note)
    tally, _ = gradients(model)
    assert max(sizes) == 7
    # for the old log-probs, to measure, and for the gradient, but for each batch's first slice
    assert 2 * tally.tokens < sum(sizes) < 3 * tally.tokens


def test_the_loss_is_the_mean_over_tokens_by_hand() -> None:
    """A long answer and a short one: each of their tokens counts the same."""
    shape = replace(SORTER, vocabulary=97)
    model = TransformerModel(shape)
    model.initialise(1)
    with torch.no_grad():
        model.lm_head.weight.zero_()  # every log-prob is -log 97
    drawn = -math.log(97)
    group = TrainingGroup(
        (1, 2),
        (
            Completion((3, 4, 5, 6, 7, 8), (drawn,) * 6),
            # twice as likely now as when it was drawn, and more than the cap of 2
            Completion((9, 10), (drawn - math.log(2), drawn - 9)),
        ),
        (1.0, 0.0),
    )
    (batch,) = learning_batches([group], [np.array([1.0, -1.0], np.float32)])
    tally = add_gradient(model, batch, aim([batch], find_algorithm("grpo")))
    assert tally.tokens == 8
    assert tally.loss == pytest.approx((-6 * 1.0 + 2 * 2.0) / 8)
    assert tally.sums["capped"] == 2
    assert tally.sums["entropy"] / 8 == pytest.approx(math.log(97))
    assert tally.ratio_max == 1.0
    assert tally.sums["clipped"] == 0


def test_every_token_of_a_step_counts_the_same_in_whatever_minibatch() -> None:
    torch.set_num_threads(1)
    groups = some_groups()
    shape = SHAPES[Family.QWEN3]
    losses = []
    for minibatches in (1, 3, 8):
        rules = sorting_learner(minibatches=minibatches, rate=0.0)
        learner = TorchLearner(sorting_engine(shape=shape, learner=rules))
        learner.model.initialise(2)
        report = learner.update(groups, ADVANTAGES)
        assert report.tokens == sum(len(c.tokens) for g in groups for c in g.completions)
        losses.append((report.loss, report.k3, report.entropy, report.capped, report.changed))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[2] == pytest.approx(losses[0], rel=1e-4)
    assert losses[0][-1] == 0.0  # at a rate of 0 nothing changes


def test_bfloat16_products_leave_float32_gradients_close_to_the_right_ones() -> None:
    model = TransformerModel(SHAPES[Family.LLAMA])
    model.initialise(5)
    _, exact = gradients(model)
    with torch.autocast("cpu", torch.bfloat16):
        _, rounded = gradients(model)
    for mine, theirs in zip(rounded, exact, strict=True):
        assert mine.dtype == torch.float32
        cosine = torch.nn.functional.cosine_similarity(mine.flatten(), theirs.flatten(), 0)
        assert cosine > 0.99
