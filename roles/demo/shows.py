"""What a demo plays: a model, its tasks, the recipe, and what is promised of it.

`SORTING` is the two-minute default: 105,088 parameters that learn to sort digits. `arithmetic`
is the same swarm around a real chat model, a folder in Hugging Face's layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from p2p.wire import KI, MIB
from proofs.checks import Limits
from roles.engines.config import GIB
from roles.envs import sort
from roles.rl.gate import SORTING_PROMISE, Promise
from roles.rl.recipe import Recipe
from roles.run.core.file import Model

Decode = Callable[[Sequence[int]], str]
"""Tokens as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Show:
    """One play of the demo's cast."""

    environment: str
    """Where the tasks come from."""

    model: Model
    """What is trained; its seed is the plan's."""

    recipe: Recipe
    """How."""

    limits: Limits
    """What the validator lets pass."""

    promise: Promise
    """What must come of it."""

    chunk_bytes: int
    """Of SHARDCAST; 0 chooses by the policy's size."""

    base: Path | None = None
    """The model's folder, if it has one."""

    answers: int = 0
    """Held-out questions whose answers are shown, before and after."""

    evaluate_every: int = 10
    """Steps between evaluations."""

    cheat_rest: float = 0.0
    """Seconds that the cheat rests after each submission."""

    memory: int
    """Bytes that all processes together need."""

    disk: int
    """Bytes that the nodes' folders need."""

    opening: str
    """What is shown until the first evaluation."""

    decode: Decode = field(repr=False)
    """For people."""


# Calibrated on the demo's own policy: 4,000 honest groups have a mantissa mean of at most 0.047
# and one exponent mismatch; weights one step old at the lowest rate have a mean of 1.2 in the
# median group, and eight groups are judged at a time. And 120,000 honest answers end with a
# token of probability 1e-6 once in eight runs, while the seeded draw already decides.
DEMO_LIMITS: Final = replace(
    Limits.fp32(), mantissa_mean=0.25, exponent_mismatches=3, end_probability=1e-12
)

SORTING: Final = Show(
    environment="sort",
    model=Model(),
    recipe=Recipe(),
    limits=DEMO_LIMITS,
    promise=SORTING_PROMISE,
    # So small that a policy of 420 kB, 13 chunks, has a forest to flow through.
    chunk_bytes=32 * KI,
    # Measured are 1.3 GB: six nodes of 42 MB, four engines of 172 MB, the trainer's of 304 MB,
    # this process; torch with CUDA takes more. A machine that swaps is slower than any
    # deadline.
    memory=2 * GIB,
    # Measured are 20 MB: each of six nodes keeps its newest policies of 0.4 MB, its ledger, its
    # log.
    disk=100 * MIB,
    opening="warming up: short lists, supervised …",
    decode=sort.decode,
)
"""Lists of digits."""
