"""The recipes that work, by kind of model, and the rates that ruin one.

One table: the demos play from it, ``shoal run init`` writes drafts and ``learner.toml`` from
it, and a trainer holds its ``learner.toml`` against it. `roles.contract.core.sampling` and
`roles.rl.learner` say what each number means.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Final

from p2p.errors import ConfigError
from p2p.node.entries import installed
from p2p.node.tables import MAX_TOML, parse_toml, read_table
from p2p.world import Disk
from roles.contract.core.file import Model, Run, Terms
from roles.contract.core.sampling import SamplingTerms
from roles.contract.core.shape import ModelShape
from roles.rl.algorithms.find import find_algorithm
from roles.rl.learner import BUILT_IN, FILE, SINKS, LearnerConfig, WarmUp


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKind:
    """Models that want the same recipe."""

    name: str
    """Name for people."""

    has_base: bool
    """True if the weights come from a folder; else they are drawn and warmed up."""

    parameters: float
    """Most parameters of such a model."""

    sampling: SamplingTerms
    """Sampling terms that work for this kind, and are signed."""

    learner: LearnerConfig
    """Settings of the learner that work for this kind, and are the trainer's alone."""

    max_rate: float
    """Highest learning rate: a higher one ruins the model, or does not even train it."""

    source: str
    """Source of the numbers."""

    reasons: Mapping[str, str] = field(default_factory=dict)
    """Maps keys of the learner to the reasons for their values."""


SORTER: Final = ModelShape(
    vocabulary=50,
    width=64,
    layers=2,
    query_heads=4,
    key_heads=2,
    head_width=16,
    feed_forward=192,
)
"""The network of 105,088 parameters that sorts digits; the vocabulary is that of ``sort``. With
128 features and four layers (751,488 parameters) a rate of 3e-4 is too high: 2e-4 swings, 1e-4
learns."""

SORTING: Final = Model(shape=SORTER)
"""The network that sorts, as a run's model."""

NETWORK: Final = ModelKind(
    name="a network that is drawn from a seed and warmed up",
    has_base=False,
    parameters=float("inf"),
    sampling=SamplingTerms(
        # 40, with the decay over 40, end 0.07 to 0.09 lower; from 20 on every seed has gained
        # 0.25.
        steps=60,
        group_size=16,
        submission=8,  # 128 rows fill an engine, 20 ms keep lag low
        max_new_tokens=12,  # the longest answer has eight digits and an end token
    ),
    learner=LearnerConfig(
        # With one update on an easier task 6e-4 was calm; with eight 1e-3 at lag 2 walked
        # randomly.
        rate=8e-4,
        # Half as many, with half the minibatches, cost half and end 0.06 to 0.12 lower.
        groups=64,
        # Eight at half the rate end at 0.76 greedy on the seed where four end at 0.82, and cost
        # a quarter more.
        minibatches=4,
        ramp=5,
        floor=0.1,  # without decay the end is 0.06 to 0.12 worse, and not monotone
        betas=(0.9, 0.99),  # the second remembers 100 updates, a dozen steps
        gradient_norm=0.1,  # raw norms are 0.2 to 2: every update is clipped
        # With 400 steps (8 CPU s) greedy starts at 0.19 to 0.43 over five seeds and ends at
        # 0.80 to 0.96: more leave RL nothing to do, fewer nothing to reinforce. The rate is
        # ten times RL's: labels point at the answer, rewards only at what was tried.
        warm_up=WarmUp(steps=400, rate=4e-3),
    ),
    max_rate=4e-3,
    source="measured for 105,088 parameters that sort digits, five seeds",
    reasons={"rate": "of AdamW at its peak; with width 128 and four layers take 1e-4"},
)
"""The highest rate is that of its supervised warm-up."""

SMALL_MODEL: Final = ModelKind(
    name="a small language model (up to a billion parameters)",
    has_base=True,
    parameters=1e9,
    sampling=SamplingTerms(steps=30, group_size=8, submission=8, max_new_tokens=12),
    learner=LearnerConfig(rate=6e-5, groups=20, ramp=3, gradient_norm=1.0),
    max_rate=3e-4,
    source="measured for SmolLM2-135M-Instruct on two-digit addition (docs/performance.md)",
    reasons={
        "rate": "of AdamW at its peak; at 2e-5 steps are rounded away",
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
    sampling=SamplingTerms(steps=200, group_size=16, submission=4, max_new_tokens=1024),
    learner=LearnerConfig(rate=1e-6, groups=64, ramp=25, gradient_norm=0.1),
    max_rate=1e-4,
    source="by INTELLECT-2's recipe for 32 B (3e-7, ramp 25, 16 answers a task, norm 0.1) and"
    " the usual 1e-6 for 7 B; not measured here",
    reasons={
        "rate": "of AdamW at its peak; too low if `changed` is near 0 in metrics",
        "gradient_norm": "gradients grow in long runs even while the reward is stable",
    },
)
"""Nobody has trained one with Shoal yet: the numbers are other people's."""

KINDS: Final = (NETWORK, SMALL_MODEL, LARGE_MODEL)
"""All kinds of models, the smaller ones first."""
LORA_TIMES: Final = 10
"""Factor between the rates of a model's low-rank sums and of its weights."""

TRAINED: Final[Mapping[str, Mapping[str, float]]] = {
    "arithmetic": {"addition": 6.0, "tables": 1.0, "stories": 1.0, "largest": 2.0}
}
"""Kinds of tasks that a small model is trained on, by environment. What it does not solve once
in eight answers teaches nothing and costs as much: subtraction (0.02) and sums of three (0.06)
are measured only. Four in ten tasks are not addition, lest they be forgotten."""

ANSWER_TOKENS: Final[Mapping[str, int]] = {"sort": 12, "arithmetic": 12}
"""Tokens of the longest right answer, and some to spare, by environment."""
OTHER_ANSWER_TOKENS: Final = 96
"""Answer tokens of a small model in any other environment: a sentence, and the answer in its
box.
"""
TURNS: Final[Mapping[str, tuple[int, int]]] = {
    "guess": (4, 6),
    "calculator": (3, 96),
    "math-python": (4, 512),
}
"""Turns of an answer in an environment that speaks, and the tokens that it says."""
OTHER_TURNS: Final = (4, 256)


def kind_of(parameters: int, *, has_base: bool) -> ModelKind:
    """Return the kind of a model with this many parameters."""
    return next(
        kind for kind in KINDS if kind.has_base == has_base and parameters <= kind.parameters
    )


def read_learner(
    table: Mapping[str, object] | None, where: str, run: str, model: Model
) -> LearnerConfig:
    """Return the learning settings of the trainer of ``run``.

    Args:
        table: Table of ``learner.toml``; None if there is no such file, so that the recipe for
            the model's kind applies.
        where: The file, for errors.

    Raises:
        ConfigError: The file is of another run, has keys of the contract or unknown keys, or
            would ruin the model.
    """
    kind = kind_of(model.shape.parameters, has_base=bool(model.base))
    if table is None:
        if not model.base and model.engine != "fake":
            raise ConfigError(
                f"there is no {where}, and a model without a base has no usual way to learn:"
                " write one, or take that of shoal run init"
            )
        return kind.learner
    signed = {one.name for one in (*fields(SamplingTerms), *fields(Terms))} - {"algorithm"}
    for key in table:
        if key in signed:
            raise ConfigError(
                f"{where}: {key} is signed, since all nodes must agree on it: set it in the"
                " run's draft.toml, and sign that with shoal run start"
            )
    learner = read_table(LearnerConfig, table, where)
    if learner.run not in ("", run):
        raise ConfigError(
            f"{where} is for the run {learner.run!r}, and this is {run!r}: put the run's own"
            " file there, or write its name into this one"
        )
    try:
        find_algorithm(learner.algorithm, learner.options)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    if unknown := set(learner.sinks) - set(sinks := installed(SINKS)):
        raise ConfigError(
            f"{where}: there is no sink {min(unknown)!r}; installed are"
            f" {', '.join(sorted(sinks))} (packages add their own under the entry point group"
            f" {SINKS})"
        )
    check_suits(learner, model.shape.parameters, has_base=bool(model.base))
    return learner


async def read_own_learner(disk: Disk, run: Run) -> LearnerConfig:
    """Return how this trainer learns, by the ``learner.toml`` of its data folder.

    Raises:
        ConfigError: `read_learner` refuses it.
    """
    try:
        data = await disk.read(FILE, 0, MAX_TOML + 1)
    except FileNotFoundError:
        data = None
    where = disk.locate(FILE)
    table = None if data is None else parse_toml(data, where)
    return read_learner(table, where, run.name, run.terms.model)


def check_suits(learner: LearnerConfig, parameters: int, *, has_base: bool) -> None:
    """Check that the learning rate suits such a model.

    Raises:
        ConfigError: The rate would ruin it. The message says what to do.
    """
    kind = kind_of(parameters, has_base=has_base)
    times = 1 if learner.lora is None else LORA_TIMES
    if learner.kind == BUILT_IN and learner.rate > times * kind.max_rate:
        works, most = times * kind.learner.rate, times * kind.max_rate
        raise ConfigError(
            f"rate = {learner.rate:g} in {FILE} would ruin {kind.name}, of {parameters:,}"
            f" parameters: {works:g} works and {most:g} is the most; set rate = {works:g}"
        )
