"""Terms of a DiLoCo run beside the model: data, optimisers, rounds, codec."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from p2p.identity import PeerId
from roles.contract.core.bounds import Bounds, check_bounds

MAX_CORPORA: Final = 64
"""Corpora of a mixture; INTELLECT-1 had five."""
_BOUNDS: Final[Bounds] = {
    "outer_steps": (1, 10**6),
    "inner_steps": (1, 10**6),
    "round_seconds": (0.0, 1e6),
    "sequences": (1, 1 << 16),
    "window": (2, 1 << 20),
    "rate": (0.0, 10.0),
    "betas": (0.0, 0.999_999),
    "weight_decay": (0.0, 10.0),
    "gradient_norm": (1e-9, 1e9),
    "warmup": (0, 10**9),
    "decay_share": (0.0, 1.0),
    "z_loss": (0.0, 1.0),
    "outer_rate": (0.0, 10.0),
    "outer_momentum": (0.0, 0.999),
    "grace": (0.1, 1e5),
    "patience": (0.2, 1e6),
    "held_out": (1, 1 << 16),
    "fragments": (1, 64),
}


class Codec(Enum):
    """Encoding of contributions and sums."""

    FP32 = "fp32"
    INT8 = "int8"
    INT4 = "int4"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundConfig:
    """Times of rounds, in seconds, and the limit of contributions."""

    beat: float = 1.0
    """Seconds between two beats to each other member."""
    silence: float = 6.0
    """Seconds of silence after which a member counts as dead: five lost beats are no
    accident."""
    grace: float = 20.0
    """Seconds that a ready majority waits for late members."""
    patience: float = 60.0
    """Seconds from a view's proposal to its record, at first."""
    max_tokens: int = 2**40
    """Most tokens that one contribution may claim."""

    def __post_init__(self) -> None:
        if not 0 < 3 * self.beat <= self.silence:
            raise ValueError("silence must allow for two lost beats (3 times beat)")
        if not 0 < self.grace < self.patience:
            raise ValueError("a view (patience) must outlast the wait for late members (grace)")


class Algorithm(Enum):
    """Learning of a run's trainers."""

    GRPO = "grpo"
    """One trainer learns from workers' rollouts."""
    DILOCO = "diloco"
    """Many trainers each learn from text, and average their updates now and then."""


class Inner(Enum):
    """Inner optimiser."""

    ADAMW = "adamw"
    MUON = "muon"
    """Muon for matrices except embedding and head, AdamW for the rest."""


class Goal(Enum):
    """Material of an inner step."""

    TEXT = "text"
    """The next token of the corpora."""
    REWARD = "reward"
    """Rewards of the run's environments: GRPO, on answers that each member draws itself."""


class Outer(Enum):
    """Outer optimiser."""

    NESTEROV = "nesterov"
    """DiLoCo: Nesterov momentum on the members' mean update."""
    PARALLEL = "parallel"
    """Synchronous data parallel: AdamW on the members' mean gradient of one step."""


class Joining(Enum):
    """Rule by which peers may be members."""

    NAMED = "named"
    """The run's trainers."""
    ADMITTED = "admitted"
    """All peers that the run admits; its trainers found it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DilocoTerms:
    """All numbers of a DiLoCo run; the defaults are measured in bench/README.md."""

    goal: Goal = Goal.TEXT
    """Material of inner steps: ``text``, or ``reward`` for GRPO. With ``reward`` a member draws
    ``sequences`` tasks of the run's environments a step, each answered [sampling] group_size
    times; corpora are not read, and a task counts as a token."""

    corpora: Mapping[str, float] = field(default_factory=lambda: {"python": 1.0})
    """Sources of text by name, with weights; each machine's owner says where the files are.
    ``python`` is the library of the Python that runs the node."""

    anneal: Mapping[str, float] = field(default_factory=dict)
    """Mixture of the last ``decay_share`` of the inner steps; empty: ``corpora``. Good text
    counts most while the rate falls."""

    outer_steps: int = 20
    """Rounds of the run, with which the rate's schedule ends."""

    inner_steps: int = 100
    """Most steps between two exchanges."""

    round_seconds: float = 0.0
    """Seconds after which a member stops its inner steps; 0: all are taken. Slow machines then
    count by the tokens that they learnt from."""

    sequences: int = 8
    """Windows of text in an inner step of one member."""

    window: int = 64
    """Predicted tokens of a window."""

    inner: Inner = Inner.ADAMW
    """Inner optimiser."""

    rate: float = 4e-3
    """Peak learning rate of the inner optimiser."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of Adam's two moments."""

    weight_decay: float = 0.1
    """Decoupled weight decay, per unit of learning rate."""

    gradient_norm: float = 1.0
    """Global norm that gradients are clipped to."""

    warmup: int = 200
    """Inner steps over which the rate climbs to its peak."""

    decay_share: float = 0.2
    """Last share of the inner steps, in which the rate falls to zero by the square root."""

    z_loss: float = 0.0
    """Weight of the squared largest logit of a token; PRIME had 2e-4."""

    outer: Outer = Outer.NESTEROV
    """Outer optimiser: ``nesterov``, or ``parallel``, which averages gradients at each inner
    step."""

    outer_rate: float = 0.9
    """Learning rate of the outer step. PRIME has 0.7 with momentum 0.9, for hundreds of
    steps."""

    outer_momentum: float = 0.5
    """Nesterov momentum of the outer step."""

    overlap: bool = False
    """True if members take the next round's steps during an exchange and apply its result late.
    It costs some hundredths of a nat, and no member waits for a line."""

    fragments: int = 1
    """Parts of the model, one of which is exchanged a round. With four, and a quarter of
    the inner steps, the same bytes travel in bursts of a quarter."""

    codec: Codec = Codec.INT4
    """Encoding of updates and means: ``int4``, ``int8`` or ``fp32``."""

    joining: Joining = Joining.NAMED
    """Rule by which peers may be members: ``named`` trainers, or all ``admitted`` peers."""

    anchor: PeerId | None = None
    """Member whose vote decides when exactly half are left; none: they stop."""

    grace: float = 20.0
    """Seconds that a ready majority waits for late members."""

    patience: float = 60.0
    """Seconds after which an exchange begins anew with those that are present."""

    beat: float = 1.0
    """Seconds between two signs of life of a member."""

    held_out: int = 256
    """Windows for measuring the loss, on which no member trains."""

    def __post_init__(self) -> None:
        check_bounds(self, _BOUNDS)
        if not 0 < len(self.corpora) <= MAX_CORPORA:
            raise ValueError(f"a mixture has 1 to {MAX_CORPORA} corpora")
        if len(self.anneal) > MAX_CORPORA:
            raise ValueError(f"a mixture has at most {MAX_CORPORA} corpora")
        for name, weight in (*self.corpora.items(), *self.anneal.items()):
            if not name or not name.isprintable() or not 0 < weight < math.inf:
                raise ValueError(
                    f"a corpus has a name and a weight above zero, not {name!r:.40} and"
                    f" {weight!r:.40}: leave out what is not to be read"
                )
        self.rounds()
        is_parallel = self.outer is Outer.PARALLEL
        if is_parallel and (
            self.inner_steps > 1
            or self.inner is not Inner.ADAMW
            or self.fragments > 1
            or self.overlap
        ):
            raise ValueError(
                'outer = "parallel" averages the gradients of each step: it needs inner_steps ='
                ' 1, inner = "adamw", and neither overlap nor fragments'
            )

    def rounds(self) -> RoundConfig:
        """Return the timing of the rounds."""
        return RoundConfig(
            beat=self.beat,
            silence=6 * self.beat,
            grace=self.grace,
            patience=self.patience,
            max_tokens=self.phase_tokens,
        )

    @property
    def total_steps(self) -> int:
        """Inner steps of a member in all rounds together."""
        return self.outer_steps * self.inner_steps

    @property
    def phase_windows(self) -> int:
        """Windows of text of a member in a round."""
        return self.inner_steps * self.sequences

    @property
    def phase_tokens(self) -> int:
        """Most tokens that a member can learn from in a round."""
        return self.phase_windows * self.window

    @property
    def stable_steps(self) -> int:
        """Inner steps before the rate begins to fall, and the annealing mixture."""
        return round(self.total_steps * (1 - self.decay_share))

    def rate_at(self, step: int) -> float:
        """Return the learning rate of inner step ``step`` of the run: up, flat, down by the
        square root (WSD)."""
        stable = self.stable_steps
        if step < self.warmup:
            share = step / self.warmup
        elif step < stable:
            share = 1.0
        else:
            share = max(
                0.0, 1.0 - math.sqrt((step - stable) / max(1, self.total_steps - stable))
            )
        return self.rate * share
