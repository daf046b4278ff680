"""Every number of the learning recipe, with its meaning (measured curves: docs/performance.md).

Asynchronous GRPO as INTELLECT-2 ran it (two-sided clip, token-level loss, groups without spread
dropped, hard gradient clipping), with truncated importance sampling against the samplers' own
log-probs. The warm-up shows clean examples; what it leaves unlearned is practised with nothing
but right and wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from roles.contract.core.bounds import Bounds, check_bounds

MAX_SUBMISSION_GROUPS: Final = 256
"""What `roles.protocol.core.groups` can carry."""
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
"""Not what is wise, but what makes sense at all: a rate above 10 or a ramp of 0 is a
mistake."""
_WARM_UP: Final[Bounds] = {
    **_OPTIMISER,
    "steps": (0, 10**9),
    "batch": (1, 1 << 20),
    "weight_decay": (0.0, 10.0),
}
"""As `_OPTIMISER`; no more than a billion steps, nor a million examples in each."""
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
    "kl": (0.0, 1e6),
    "minibatches": (1, 1 << 20),
    "proof_values": (8, 1024),  # fewer say nothing; proofs.toploc.MAX_TOP_K
    "evaluation_seed": (-(1 << 63), (1 << 63) - 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """Supervised learning on the environment's clean examples, before the first policy is
    published."""

    steps: int = 400
    """Optimiser steps: 8 CPU s. More leave RL nothing to do, fewer nothing to reinforce: with
    400 greedy starts at 0.19 to 0.43 over five seeds and ends at 0.80 to 0.96."""

    batch: int = 64
    """Fresh examples per step: 25,600 in all, of which 256 show a long list
    (`roles.envs.sort.WARM_UP_LONG_SHARE`)."""

    rate: float = 4e-3
    """Peak learning rate of AdamW. Ten times RL's: labels point at the answer, rewards only at
    what was tried."""

    ramp: int = 50
    """Steps over which the rate climbs to its peak; then it falls linearly to ``floor`` of
    it."""

    floor: float = 0.1
    """Share of the peak rate that is left at the last step, so that the weights come to rest
    where RL takes them up."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of Adam's two moments: the second forgets in 20 steps, as 400 are few."""

    weight_decay: float = 0.01
    """Decoupled, per unit of learning rate: 400 steps at 4e-3 take 1.6 % of a weight at
    most."""

    gradient_norm: float = 1.0
    """The global norm that gradients are clipped to: 1 is the field's habit, not tuned."""

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
    """Optimiser steps over which the rate decays. Later steps continue at the final rate. 40,
    with the decay over 40, end 0.07 to 0.09 lower; from 20 on every seed has gained 0.25."""

    groups: int = 64
    """Groups with spread per step: 1,024 rows. Half as many, with half the minibatches, cost
    half and end 0.06 to 0.12 lower."""

    group_size: int = 16
    """Completions per task, as in INTELLECT-2: with a chance of one in ten, four groups of five
    hold a right answer to learn from (1 - 0.9^16 = 0.81)."""

    submission: int = 8
    """Groups that a node draws, proves and submits in one go: 128 rows fill an engine, 20 ms
    keep lag low."""

    draw: int = 64
    """Tasks drawn at a time, until ``groups`` of them show spread. That filter is the
    curriculum: tasks that are always or never solved drop out by themselves."""

    draw_limit: int = 256
    """Most tasks drawn for one step: with a reward near 0 or 1 few groups show spread. On the
    mean a step takes 160 to 190."""

    temperature: float = 1.0
    """Of sampling, and of every log-prob in the loss."""

    max_new_tokens: int = 12
    """A completion that reaches it is cut there, and wrong. The longest answer has eight digits
    and an end token."""

    lag: int = 2
    """Oldest usable policy, in steps behind the trainer's. It is rate times lag that
    destabilises: with eight updates at 4e-4 lag 4 ends at 0.84 and 0.94 on two seeds where lag
    2 ends at 0.86 and 0.96, with a largest k3 of 0.26 instead of 0.20."""

    advantage_epsilon: float = 1e-6
    """Added to a group's standard deviation, which is 0.25 at least where one of 16 rewards
    differs: it changes nothing but a division by zero."""

    clip: float = 0.2
    """PPO's epsilon: the ratio is clipped to 1 +- this. The paper's 0.2; the first minibatch is
    at a ratio of 1, the last of four three updates from it."""

    clip_negative: float = 4.0
    """The second side: bounds ratio times a negative advantage, INTELLECT-2's delta of 4.
    Without it the loss of one token grows with its ratio without end; runs at too high a rate
    reached 80. More than 1 + ``clip``."""

    importance_cap: float = 2.0
    """Cap of the weight exp(old - behaviour) by which a stale token counts (TIS). At lag 2 it
    changes little; on an easier task lag 8 learned with it and, without, climbed to 0.73 to
    0.83 and fell again."""

    kl: float = 0.0
    """Weight of k3 between the policy that drew and the one that is trained: a pull towards
    what the samplers do, not towards the base. 0 leaves it out, as DAPO and INTELLECT-2's
    successors do: clip and lag bound the step already, and a model that forgets is better
    served by mixed tasks."""

    minibatches: int = 4
    """Optimiser updates per step, one epoch over all rows: 256 rows each, four of every group.
    With Adam each moves every weight by about the rate whatever the gradient's size. Eight at
    half the rate end at 0.76 greedy on the seed where four end at 0.82, and cost a quarter
    more: a group's prompt is read once a minibatch. Models that begin with a base take one."""

    rate: float = 8e-4
    """Peak learning rate of AdamW, with four updates a step. It is rate times updates times lag
    that counts: with one update on an easier task 6e-4 was calm, with eight 1e-3 at lag 2
    walked randomly. A base in bfloat16 wants 6e-5 (docs/performance.md): its weights lie on a
    grid that smaller steps leave one by one."""

    ramp: int = 5
    """Steps over which the rate climbs: Adam's second moment is an estimate from nothing at
    first."""

    floor: float = 0.1
    """Share of the rate that is left at step ``steps``. Without decay the end is 0.06 to 0.12
    worse, and not monotone."""

    betas: tuple[float, float] = (0.9, 0.99)
    """Decay of Adam's two moments: the second remembers 100 updates, a dozen steps, of noisy
    gradients."""

    gradient_norm: float = 0.1
    """The global norm that gradients are clipped to; raw norms are 0.2 to 2, so every update is
    clipped, which with Adam only makes updates alike."""

    proof_values: int = 62
    """Values of each 32 tokens' hidden states that an activation proof holds: 3.94 bytes a
    token, so that one of three bytes takes 7 on the wire. The package toploc has 128; what the
    fewer cost is in docs/protocols/toploc.md."""

    evaluation_seed: int = 9
    """Seed of the draws of the sampled evaluation, fixed so that two evaluations differ by the
    policy alone."""

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
