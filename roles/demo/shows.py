"""What a demo plays: a model, its tasks, the recipe, and what is promised of it.

`SORTING` is the default of three minutes: 105,088 parameters that learn to sort digits.
`arithmetic` is the same swarm around a real chat model, a folder in Hugging Face's layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from p2p.node.usage import remark
from p2p.wire import KI, MIB
from proofs.checks import Limits
from roles.contract.core.file import Model
from roles.contract.core.sampling import SamplingTerms
from roles.contract.core.trust import TrustTerms
from roles.demo.gate import ARITHMETIC_PROMISE, SORTING_PROMISE, Promise
from roles.engines.config import GIB
from roles.envs import sort
from roles.envs.arithmetic import EVALUATION_TASKS
from roles.models.bundle import check_weights, pin_folder, read_config
from roles.models.ends import need_end_tokens
from roles.models.errors import NO_TEMPLATE, BadModel
from roles.rl.learner import LearnerConfig
from roles.rl.recipes import NETWORK, SMALL_MODEL, TRAINED

Decode = Callable[[Sequence[int]], str]
"""Tokens as text."""


DEMO_TRUST: Final = TrustTerms(share=0.25, probation=8, window=4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Show:
    """One play of the demo's cast."""

    environment: str
    """Where the tasks come from."""

    model: Model
    """What is trained; its seed is the plan's."""

    sampling: SamplingTerms
    """How answers are drawn."""

    learner: LearnerConfig
    """How the trainer learns."""

    limits: Limits
    """What the validator lets pass."""

    promise: Promise
    """What must come of it, and what is hoped for."""

    held_out: int
    """Held-out tasks of the kind that the promise is about: by them chance is reckoned."""

    chunk_bytes: int
    """Of SHARDCAST; 0 chooses by the policy's size."""

    base: Path | None = None
    """The model's folder, if it has one."""

    answers: int = 0
    """Held-out questions whose answers are shown, before and after."""

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

    kinds: Mapping[str, float] = field(default_factory=dict)
    """Weights of the environment's kinds of tasks; empty: its own."""

    judged: str = ""
    """The kind of task that the promise is about; empty: all."""

    keeps: float = 1.0
    """How much any other kind may lose before that is said."""

    checkpoint_every: int = 1
    """Steps between checkpoints."""

    trust: TrustTerms = field(default_factory=lambda: DEMO_TRUST)
    """How workers earn it that not all of their work is checked: a demo is short, so a newcomer
    owes little, and more is looked at to make up for it."""


# Calibrated on the demo's own policy: 4,000 honest groups have a mantissa mean of at most 0.047
# and one exponent mismatch; weights one step old at the lowest rate have a mean of 1.2 in the
# median group, and eight groups are judged at a time.
DEMO_LIMITS: Final = replace(Limits.fp32(), mantissa_mean=0.25, exponent_mismatches=3)

SORTING: Final = Show(
    environment="sort",
    model=Model(),
    sampling=NETWORK.sampling,
    learner=NETWORK.learner,
    limits=DEMO_LIMITS,
    promise=SORTING_PROMISE,
    held_out=sort.EVALUATION_TASKS,
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


def arithmetic(folder: Path) -> Show:
    """A chat model learns arithmetic. Raises `BadModel` if ``folder`` holds none that can be
    used here."""
    from roles.models.tokenizer import Tokenizer

    config = read_config(folder)
    check_weights(folder, config)
    ends = need_end_tokens(folder, config)
    if not ends.has_template:
        raise BadModel(NO_TEMPLATE)
    for note in (*config.notes, *ends.notes):
        remark(f"{folder}: {note}")
    tokenizer = Tokenizer.open(folder)
    weights = config.shape.parameters
    return Show(
        environment="arithmetic",
        model=Model(
            shape=config.shape,
            base=pin_folder(folder),
            context=config.context,
            end_tokens=ends.of_line,
        ),
        # After 24 steps of it addition, greedy, was at 0.69, 0.76 and, with seed 2, 0.60.
        sampling=SMALL_MODEL.sampling,
        learner=replace(SMALL_MODEL.learner, evaluate_every=15),
        limits=Limits.fp32(),
        promise=ARITHMETIC_PROMISE,
        held_out=EVALUATION_TASKS["addition"],
        kinds=TRAINED["arithmetic"],
        judged="addition",
        keeps=0.1,
        chunk_bytes=0,
        base=folder,
        answers=10,
        checkpoint_every=15,
        # A submission takes the cheat about 10 CPU s; without rest it would take a fourth of
        # the machine. At 5 s some 30 are made in the time that a demo takes.
        cheat_rest=5.0,
        # Weights in float32 in four engines; four times as much, and the activations, in the
        # trainer's; torch itself.
        memory=4 * weights * (4 + 5) + 4 * GIB,
        # Three policies in bfloat16 at five nodes, nine and two checkpoints of the trainer's.
        disk=2 * weights * (3 * 5 + 9) + 2 * 12 * weights,
        opening="the base is published and evaluated …",
        decode=tokenizer.decode,
    )
