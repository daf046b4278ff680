"""Every number of the learning recipe, with its meaning (measured curves: docs/performance.md).

Asynchronous GRPO as INTELLECT-2 ran it (two-sided clip, token-level loss, groups without spread
dropped, hard gradient clipping), with truncated importance sampling against the samplers' own
log-probs. The warm-up shows clean examples; what it leaves unlearned is practised with nothing
but right and wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from roles.shared.bounds import Bounds, check_bounds

MAX_SUBMISSION_GROUPS: Final = 256
"""What `roles.protocol.core.messages` can carry."""
MAX_COMPLETIONS: Final = 8192
"""Per submission: a verdict carries 4 bytes of reward for each, and is one ledger entry of at
most 64 KiB."""

_OPTIMISER: Final[Bounds] = {
    "rate": (0.0, 10.0),
    "ramp": (1, 10**9),
    "floor": (0.0, 1.0),
    "betas": (0.0, 0.999_999),
    "gradient_norm": (1e-9, 1e9),
}
_WARM_UP: Final[Bounds] = {
    **_OPTIMISER,
    "steps": (0, 10**9),
    "batch": (1, 1 << 20),
    "weight_decay": (0.0, 10.0),
}
_RECIPE: Final[Bounds] = {
    **_OPTIMISER,
    "steps": (0, 10**9),
    "groups": (1, 1 << 20),
    "group_size": (2, MAX_COMPLETIONS),  # an advantage is relative to the group
    "submission": (1, MAX_SUBMISSION_GROUPS),
    "draw": (1, 1 << 20),
    "draw_limit": (1, 1 << 24),
    "temperature": (0.0, 100.0),  # 0 is greedy
    "max_new_tokens": (1, 1 << 20),
    "lag": (0, 1024),
    "advantage_epsilon": (0.0, 1.0),
    "clip": (0.0, 1e6),
    "clip_negative": (0.0, 1e6),
    "importance_cap": (0.0, 1e6),
    "minibatches": (1, 1 << 20),
    "evaluation_seed": (-(1 << 63), (1 << 63) - 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """Supervised learning on the environment's clean examples, before the first policy is
    published."""

    steps: int = 400
    """Optimiser steps. More leave RL nothing to do, fewer nothing to reinforce."""

    batch: int = 64
    """Fresh examples per step."""

    rate: float = 4e-3
    """Peak learning rate of AdamW."""

    ramp: int = 50
    """Steps over which the rate climbs to its peak; then it falls linearly to ``floor`` of
    it."""

    floor: float = 0.1
    """Share of the peak rate that is left at the last step."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of Adam's two moments."""

    weight_decay: float = 0.01
    """Decoupled, per unit of learning rate."""

    gradient_norm: float = 1.0
    """The global norm that gradients are clipped to."""

    def __post_init__(self) -> None:
        check_bounds(self, _WARM_UP)

    def rate_at(self, step: int) -> float:
        """The learning rate of warm-up step ``step`` (from 0)."""
        return self.rate * _climb_and_fall(step, self.steps, self.ramp, self.floor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The numbers of one run. The same everywhere: it is part of the signed run file."""

    warm_up: WarmUp = field(default_factory=WarmUp)
    """What comes before."""

    steps: int = 60
    """Optimiser steps over which the rate decays. Later steps continue at the final rate."""

    groups: int = 64
    """Groups with spread per step."""

    group_size: int = 16
    """Completions per task."""

    submission: int = 8
    """Groups that a node draws, proves and submits in one go: 128 rows fill an engine, 20 ms
    keep lag low."""

    draw: int = 64
    """Tasks drawn at a time, until ``groups`` of them show spread."""

    draw_limit: int = 256
    """Most tasks drawn for one step: with a reward near 0 or 1 few groups show spread."""

    temperature: float = 1.0
    """Of sampling, and of every log-prob in the loss."""

    max_new_tokens: int = 12
    """A completion that reaches it is cut there, and wrong."""

    lag: int = 2
    """Oldest usable policy, in steps behind the trainer's. It is rate times lag that
    destabilises."""

    advantage_epsilon: float = 1e-6
    """Added to a group's standard deviation."""

    clip: float = 0.2
    """PPO's epsilon: the ratio is clipped to 1 +- this."""

    clip_negative: float = 4.0
    """The second side: bounds ratio times a negative advantage. More than 1 + ``clip``."""

    importance_cap: float = 2.0
    """Cap of the weight exp(old - behaviour) by which a stale token counts (TIS)."""

    minibatches: int = 8
    """Optimiser updates per step, one epoch over all rows."""

    rate: float = 4e-4
    """Peak learning rate of AdamW. At 1e-3 and lag 2 the policy walks randomly."""

    ramp: int = 5
    """Steps over which the rate climbs."""

    floor: float = 0.1
    """Share of the rate that is left at step ``steps``. Without decay the end is 0.1 worse."""

    betas: tuple[float, float] = (0.9, 0.99)
    """Decay of Adam's two moments."""

    gradient_norm: float = 0.1
    """The global norm that gradients are clipped to; raw norms are 0.2 to 2."""

    evaluation_seed: int = 9
    """Seed of the draws of the sampled evaluation."""

    def __post_init__(self) -> None:
        check_bounds(self, _RECIPE)
        if (
            self.submission > MAX_SUBMISSION_GROUPS
            or self.submission * self.group_size > MAX_COMPLETIONS
        ):
            raise ValueError(
                f"a submission has at most {MAX_SUBMISSION_GROUPS} groups and {MAX_COMPLETIONS}"
                f" completions, not {self.submission} and {self.submission * self.group_size}"
            )
        if self.clip_negative <= 1 + self.clip:
            raise ValueError(
                f"clip_negative must exceed 1 + clip ({1 + self.clip}), not"
                f" {self.clip_negative}"
            )
        if self.draw_limit < self.groups:
            raise ValueError("draw_limit must be at least groups")

    def rate_at(self, step: int) -> float:
        """The learning rate of optimiser step ``step`` (from 0)."""
        return self.rate * _climb_and_fall(step, self.steps, self.ramp, self.floor)


def _climb_and_fall(step: int, steps: int, ramp: int, floor: float) -> float:
    """A linear climb over ``ramp`` steps times a linear fall to ``floor``, where it stays."""
    return min(1.0, (step + 1) / ramp) * (1 - (1 - floor) * min(1.0, step / max(1, steps)))
