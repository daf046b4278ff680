"""The trainer's learning settings: ``learner.toml``, which lies in its data folder and is not
signed.

A change of it is an edit and a restart of the trainer. No other node reads it; each policy's
manifest carries its digest.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Final

from p2p.node.tables import LATER, write_table, write_toml
from roles.contract.core.bounds import Bounds, check_bounds
from roles.rl.algorithms.find import find_algorithm

FILE: Final = "learner.toml"
"""Name of the file in the trainer's data folder."""

BUILT_IN: Final = "torch"
EXTERNAL: Final = "external"

SINKS: Final = "shoal.sinks"
"""Packages add sinks of metrics under this entry point group: ``name = module:Class``."""

_OPTIMISER: Final[Bounds] = {
    "rate": (0.0, 10.0),
    "ramp": (1, 10**9),
    "floor": (0.0, 1.0),
    "betas": (0.0, 0.999_999),
    "weight_decay": (0.0, 10.0),
    "gradient_norm": (1e-9, 1e9),
}
"""Bounds of sane options: a rate above 10 or a ramp of 0 is a mistake."""
_WARM_UP: Final[Bounds] = {**_OPTIMISER, "steps": (0, 10**9), "batch": (1, 1 << 20)}
_LEARNER: Final[Bounds] = {
    **_OPTIMISER,
    "groups": (1, 1 << 20),
    "minibatches": (1, 1 << 20),
    "decay_share": (0.0, 1.0),
    "evaluate_every": (0, 10**9),
    "evaluate_tasks": (0, 1 << 20),
    "evaluation_seed": (-(1 << 63), (1 << 63) - 1),
}


class Schedule(Enum):
    """Shape of the learning rate's fall from its peak to ``floor`` of it."""

    LINEAR = "linear"
    COSINE = "cosine"
    """Half a cosine (SGDR, arXiv 1608.03983, without restarts)."""
    WSD = "wsd"
    """Flat, then in the last ``decay_share`` of the steps by 1 - sqrt (arXiv 2405.18392)."""

    def share(self, progress: float, floor: float, decay_share: float) -> float:
        """Return the share of the peak at ``progress`` (0 to 1) of the run's steps."""
        if self is Schedule.LINEAR:
            return 1 - (1 - floor) * progress
        if self is Schedule.COSINE:
            return floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2
        if progress < 1 - decay_share or not decay_share:
            return 1.0
        return 1 - (1 - floor) * math.sqrt((progress - 1 + decay_share) / decay_share)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """Supervised learning on an environment's examples, before a model without a base publishes
    its first policy."""

    steps: int
    """Number of optimiser steps."""

    rate: float
    """Peak learning rate of AdamW."""

    batch: int = 64
    """Fresh examples in each step."""

    ramp: int = 50
    """Steps over which the rate climbs to its peak, to fall linearly afterwards."""

    floor: float = 0.1
    """Share of the peak rate at the last step."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of Adam's two moments: the second forgets in 20 steps, as a warm-up is short."""

    weight_decay: float = 0.01
    """Decoupled weight decay, per unit of learning rate."""

    gradient_norm: float = 1.0
    """Global norm that gradients are clipped to."""

    def __post_init__(self) -> None:
        check_bounds(self, _WARM_UP)

    def rate_at(self, step: int) -> float:
        """Return the learning rate of warm-up step ``step`` (from 0)."""
        return self.rate * _shared(Schedule.LINEAR, step, self.steps, self.ramp, self.floor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Learn low-rank sums to some matrices, and leave the rest (arXiv 2106.09685)."""

    rank: int
    """Outer products of each sum."""

    alpha: float
    """Sums are multiplied by alpha / rank."""

    targets: tuple[str, ...] = (
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    )  # fmt: skip
    """Last names of the matrices, in every layer."""

    def __post_init__(self) -> None:
        check_bounds(self, {"rank": (1, 4096), "alpha": (1e-9, 1e9)})
        if not self.targets:
            raise ValueError("lora without targets learns nothing")


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerConfig:
    """The keys of ``learner.toml``. `roles.rl.recipes` has the numbers that work, by model."""

    run: str = ""
    """Name of its run; a trainer of another run refuses the file."""

    kind: str = BUILT_IN
    """The learner: ``torch`` is the node's own engine; ``external`` is another trainer
    (docs/howto/own-trainer.md), which is only told the numbers below.
    """

    algorithm: str = "grpo"
    """Algorithm: `grpo`, `dapo`, `dr_grpo`, `cispo`, `gspo`, or an installed package's."""

    options: Mapping[str, object] = field(default_factory=dict)
    """Options of the algorithm, each with a default of its own."""

    rate: float
    """Peak learning rate of AdamW. It is rate times updates times lag that counts."""

    groups: int = 64
    """Groups with spread per step. That filter is the curriculum: tasks that are always or
    never solved drop out by themselves."""

    minibatches: int = 1
    """Optimiser updates per step, one epoch over all groups. With Adam each moves every weight
    by about the rate whatever the gradient's size."""

    schedule: Schedule = Schedule.LINEAR
    """Shape of the rate's fall over the run's steps: ``linear``, ``cosine`` or ``wsd``."""

    ramp: int = 5
    """Steps over which the rate climbs, while Adam's second moment is unreliable."""

    floor: float = 0.1
    """Share of the peak rate at the run's last step."""

    decay_share: float = 0.2
    """Last share of the run's steps, in which the rate of ``wsd`` falls."""

    betas: tuple[float, float] = (0.9, 0.99)
    """Decay of Adam's two moments."""

    weight_decay: float = 0.0
    """Decoupled weight decay, per unit of learning rate."""

    gradient_norm: float = 1.0
    """Global norm that gradients are clipped to."""

    evaluate_every: int = 10
    """Steps between evaluations on the held-out tasks (0: only at the start and the end)."""

    evaluate_tasks: int = 0
    """Held-out tasks of an evaluation, each answered twice (0: all that there are)."""

    evaluation_seed: int = 9
    """Seed of the draws of an evaluation, so that two differ by the policy alone."""

    sinks: tuple[str, ...] = ("jsonl", "tensorboard")
    """Sinks of metrics: ``jsonl``, ``tensorboard``, or an installed package's."""

    warm_up: WarmUp | None = None
    """Supervised steps before the first policy of a model without a base."""

    lora: Lora | None = field(default=None, metadata=LATER)
    """Adapter that learns in place of the weights of a model with a base; None: every weight
    learns.
    """

    def __post_init__(self) -> None:
        check_bounds(self, _LEARNER)
        if self.kind not in (BUILT_IN, EXTERNAL):
            raise ValueError(f"kind is {BUILT_IN!r} or {EXTERNAL!r}, not {self.kind!r:.40}")
        for name, value in self.options.items():
            if isinstance(value, int) and value.bit_length() > 63:
                raise ValueError(f"the option {name} is too large for a number")

    @property
    def digest(self) -> str:
        """SHA-256 of these numbers, defaults included, in hexadecimal. Each policy's manifest
        carries it."""
        objective = find_algorithm(self.algorithm, self.options)
        options = write_table(objective.shared) | write_table(objective.algorithm)
        table = write_table(self) | {"options": options}
        if self.kind == BUILT_IN:  # as it was before there were others
            del table["kind"]
        text = json.dumps(table, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    def rate_at(self, step: int, steps: int) -> float:
        """Return the learning rate of step ``step`` (from 0) of a run of ``steps`` steps."""
        share = _shared(self.schedule, step, steps, self.ramp, self.floor, self.decay_share)
        return self.rate * share


REASONS: Final[Mapping[str, str]] = {
    "kind": "or external: a trainer of your own",
    "algorithm": "or dapo, dr_grpo, cispo, gspo, or that of an installed package",
    "options": "of the algorithm; without a line of its own each has its default",
    "groups": "tasks a step whose answers are not all equally good",
    "minibatches": "optimiser updates a step; a base takes one",
    "schedule": "of the rate: linear, cosine or wsd",
    "ramp": "steps over which the rate climbs",
    "floor": "share of the rate that is left at the end",
    "decay_share": "of wsd: the last share of the steps, in which the rate falls",
    "evaluate_every": "steps between evaluations on the held-out tasks",
    "evaluate_tasks": "of them, at most; 0: all",
    "sinks": "where metrics go",
    "warm_up": "on right answers, before the first policy",
    "lora": "what learns, instead of every weight",
}
"""Comments of a ``learner.toml``."""


def write_learner(learner: LearnerConfig, reasons: Mapping[str, str] = {}) -> str:
    """Return the text of a ``learner.toml`` with comments, to which ``reasons`` are added.

    Options that have their defaults are comments: so another ``algorithm`` finds none of this
    one's in the file.
    """
    text = write_toml(write_table(learner), {**REASONS, **reasons})
    head = next(line for line in text.splitlines() if line.startswith("[options]"))
    return text.replace(head, "\n".join([head, *_usual_options(learner)]), 1)


def _usual_options(learner: LearnerConfig) -> Iterator[str]:
    objective = find_algorithm(learner.algorithm, learner.options)
    for whose, options in (
        (f"of {learner.algorithm}", write_table(objective.algorithm)),
        ("of every algorithm", write_table(objective.shared)),
    ):
        for name, value in options.items():
            if name not in learner.options:
                yield f"{f'# {name} = {value}':<31} # {whose}"


KEYS: Final = frozenset(one.name for one in fields(LearnerConfig)) - {"run", "algorithm"}
"""Keys that the contract does not have."""


def _shared(
    schedule: Schedule, step: int, steps: int, ramp: int, floor: float, decay_share: float = 0
) -> float:
    progress = min(1.0, step / max(1, steps))
    return min(1.0, (step + 1) / ramp) * schedule.share(progress, floor, decay_share)
