"""The recipes that work, by kind of model, and the rates that ruin one.

One table: the demos play from it, ``shoal run init`` writes drafts from it, and ``shoal run
create`` holds a draft against it. `roles.contract.core.recipe` says what each number means.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from p2p.errors import ConfigError
from roles.contract.core.recipe import Recipe, WarmUp


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKind:
    """Models that want the same recipe."""

    name: str
    """For people."""

    has_base: bool
    """Whether its weights come from a folder; without one they are drawn and warmed up."""

    parameters: float
    """It has at most so many."""

    recipe: Recipe
    """What works for it."""

    max_rate: float
    """A higher learning rate than this ruins it, or does not even train it."""

    source: str
    """Where the numbers come from."""

    reasons: Mapping[str, str] = field(default_factory=dict)
    """By key of the recipe, why it has this value."""


NETWORK: Final = ModelKind(
    name="a network that is drawn from a seed and warmed up",
    has_base=False,
    parameters=float("inf"),
    recipe=Recipe(),
    max_rate=4e-3,
    source="measured for 105,088 parameters that sort digits, five seeds",
    reasons={
        "steps": "each is a policy; the rate falls over them",
        "rate": "of AdamW at its peak; with width 128 and four layers take 1e-4",
        "groups": "tasks a step whose answers are not all equally good",
        "group_size": "answers to each task",
        "max_new_tokens": "an answer that is longer is cut, and wrong",
        "lag": "oldest usable policy, in steps behind the trainer",
        "minibatches": "optimiser updates a step",
    },
)
"""The highest rate is that of its supervised warm-up."""

SMALL_MODEL: Final = ModelKind(
    name="a small language model (up to a billion parameters)",
    has_base=True,
    parameters=1e9,
    recipe=Recipe(
        warm_up=WarmUp(steps=0),
        steps=30,
        groups=20,
        group_size=8,
        submission=8,
        draw=64,
        draw_limit=256,
        temperature=1.0,
        max_new_tokens=12,
        lag=2,
        minibatches=1,
        rate=6e-5,
        ramp=3,
        betas=(0.9, 0.99),
        gradient_norm=1.0,
    ),
    max_rate=3e-4,
    source="measured for SmolLM2-135M-Instruct on two-digit addition (docs/performance.md)",
    reasons={
        "steps": "each is a policy; the rate falls over them",
        "rate": "of AdamW at its peak; at 2e-5 steps are rounded away",
        "groups": "tasks a step whose answers are not all equally good",
        "group_size": "answers to each task",
        "max_new_tokens": "an answer that is longer is cut, and wrong",
        "lag": "oldest usable policy, in steps behind the trainer",
        "minibatches": "optimiser updates a step; a base takes one",
        "gradient_norm": "raw norms are 2 to 7",
    },
)
"""Weights of the usual folder lie on the bfloat16 grid. At a rate of 2e-5 Adam's first steps
are half a step of that grid, and are rounded away; at 6e-5 addition rises from 0.25 to 0.80 in
20 steps. At 8e-4 the ratio to the samplers' policy grows to 227 and nothing is learnt."""

LARGE_MODEL: Final = ModelKind(
    name="a language model of more than a billion parameters",
    has_base=True,
    parameters=float("inf"),
    recipe=Recipe(
        warm_up=WarmUp(steps=0),
        steps=200,
        groups=64,
        group_size=16,
        submission=4,
        draw=64,
        draw_limit=512,
        temperature=1.0,
        max_new_tokens=1024,
        lag=2,
        minibatches=1,
        rate=1e-6,
        ramp=25,
        betas=(0.9, 0.99),
        gradient_norm=0.1,
    ),
    max_rate=1e-4,
    source="by INTELLECT-2's recipe for 32 B (3e-7, ramp 25, 16 answers a task, norm 0.1) and"
    " the usual 1e-6 for 7 B; not measured here",
    reasons={
        "steps": "each is a policy; the rate falls over them",
        "rate": "of AdamW at its peak; too low if `changed` is near 0 in metrics",
        "groups": "tasks a step whose answers are not all equally good",
        "group_size": "answers to each task",
        "max_new_tokens": "an answer that is longer is cut, and wrong",
        "lag": "oldest usable policy, in steps behind the trainer",
        "minibatches": "optimiser updates a step; a base takes one",
        "gradient_norm": "gradients grow in long runs even while the reward is stable",
    },
)
"""Nobody has trained one with Shoal yet: the numbers are other people's."""

KINDS: Final = (NETWORK, SMALL_MODEL, LARGE_MODEL)
"""The smaller ones first."""

TRAINED: Final[Mapping[str, Mapping[str, float]]] = {
    "arithmetic": {"addition": 6.0, "tables": 1.0, "stories": 1.0, "largest": 2.0}
}
"""Kinds of tasks that a small model is trained on, by environment. What it does not solve once
in eight answers teaches nothing and costs as much: subtraction (0.02) and sums of three (0.06)
are measured only. Four in ten tasks are not addition, lest they be forgotten."""

ANSWER_TOKENS: Final[Mapping[str, int]] = {"sort": 12, "arithmetic": 12}
"""Tokens of the longest right answer, and some to spare, by environment."""
OTHER_ANSWER_TOKENS: Final = 96
"""Of a small model, in any other environment: a sentence, and the answer in its box."""


def kind_of(parameters: int, *, has_base: bool) -> ModelKind:
    """The kind of a model."""
    return next(
        kind for kind in KINDS if kind.has_base == has_base and parameters <= kind.parameters
    )


def check_suits(recipe: Recipe, parameters: int, *, has_base: bool) -> None:
    """Raise `ConfigError`, with the remedy, if a recipe would ruin such a model."""
    kind = kind_of(parameters, has_base=has_base)
    if recipe.rate > kind.max_rate:
        raise ConfigError(
            f"rate = {recipe.rate:g} in [recipe] would ruin {kind.name}, of {parameters:,}"
            f" parameters: {kind.recipe.rate:g} works and {kind.max_rate:g} is the most; set"
            f" rate = {kind.recipe.rate:g}, or take the whole recipe that shoal run init writes"
        )
