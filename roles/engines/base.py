"""What an engine is to a role.

Prompts and seeds in; tokens, proofs, evidence and new weights out.

An engine runs in a worker process of its own (`roles.engines.client`); these types are what
crosses the border. Groups are the unit everywhere: one task, drawn from (run, policy, node,
group), and its completions, each drawn with its own seed. Group numbers of a node under one
policy have no gaps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from p2p.errors import ShoalError
from proofs.checks import Evidence
from roles.rl.algorithms import base as algorithms


class EngineError(ShoalError):
    """The engine could not do what was asked; the message says what, and why."""


class EngineUnusable(Exception):
    """An engine cannot go on, and another process could. Its own ends with this, as with a bug,
    and the node starts another (`roles.workers.client`)."""


@dataclass(frozen=True, slots=True)
class Placement:
    """What an engine computes with, on this machine."""

    engine: str
    """Its kind, chosen if it was ``auto``."""

    device: str
    """As torch names it."""

    threads: int

    idle: str = ""
    """The sentence about GPUs that lie idle, with what mends it; empty if none does."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How completions are drawn; the same for all nodes of a run."""

    temperature: float
    """0 is greedy."""

    max_new_tokens: int
    """A completion that reaches it without an end token is cut there."""

    group_size: int
    """Completions per task."""

    proof_values: int = 62
    """`roles.contract.core.sampling.SamplingTerms.proof_values` of the run."""

    turns: int = 1
    """Turns of a completion, at most. After each but the last the environment may answer."""

    heard: int = 0
    """Tokens that it may insert in one completion."""


@dataclass(frozen=True, slots=True)
class GroupTask:
    """What to generate: a derived task and one derived seed per completion."""

    group: int
    prompt: tuple[int, ...]
    seeds: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of a completion that is not its last one, and what the environment said then."""

    after: int
    """Drawn tokens of the completion up to its end, end token included."""

    inserted: tuple[int, ...]
    """What the model reads between this turn and the next."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The tokens of one answer (end token included, if it ended), log-probs of them, and the
    activation proof over them."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    """From a generator, its own, which do not leave the node; in a `TrainingGroup` the
    validator's; in what came over the wire none."""
    proof: bytes = b""
    """`proofs.toploc`, one chunk for each 32 tokens; empty in a `TrainingGroup`, which a
    validator has checked."""
    turns: tuple[Turn, ...] = ()
    """All but the last: none where the environment says nothing in between. Whoever replays a
    completion derives them (`with_inserted`); they are not on the wire, and there is neither a
    log-prob nor a proof of what was inserted."""
    heard: bytes = b""
    """As it came over the wire, the sender's digest of all that was inserted; else empty."""

    @property
    def text(self) -> tuple[tuple[int, ...], Sequence[int]]:
        """All tokens in the order in which the model reads them, and the places of the drawn
        ones among them."""
        if not self.turns:
            return self.tokens, range(len(self.tokens))
        text, places, start = list[int](), list[int](), 0
        for turn in self.turns:
            places += range(len(text), len(text) + turn.after - start)
            text += (*self.tokens[start : turn.after], *turn.inserted)
            start = turn.after
        last = self.tokens[start:]
        return (*text, *last), [*places, *range(len(text), len(text) + len(last))]


def with_inserted(
    completion: Completion, inserted: Sequence[tuple[int, ...]], end_tokens: Collection[int]
) -> Completion:
    """Return the completion with what the environment said after each turn but the last.

    A turn ends at an end token, so the drawn tokens alone say where turns begin.

    Raises:
        EngineError: There are not as many insertions as places for them.
    """
    ends = [end for end, one in enumerate(completion.tokens[:-1], 1) if one in end_tokens]
    if len(ends) != len(inserted) or not all(inserted):
        raise EngineError(
            f"the tokens of a completion end {len(ends)} turns before the last, and"
            f" {len(inserted)} insertions, some of them perhaps empty, do not fit them"
        )
    return replace(completion, turns=tuple(map(Turn, ends, inserted)))


@dataclass(frozen=True, slots=True)
class Row:
    """A completion under way whose turn has ended: it waits for the environment's answer."""

    group: int
    slot: int
    """Which of the group's completions."""
    tokens: tuple[int, ...]
    """In `Generator.waiting` all that were drawn so far; in `Generator.hear` the answer, empty
    if the completion is over."""


Answers = tuple[tuple[int, ...], ...]
"""The tokens of a task's completions."""


@dataclass(frozen=True, slots=True)
class Group:
    """The completions of one task, in the order of its seeds."""

    group: int
    completions: tuple[Completion, ...]


@dataclass(frozen=True, slots=True)
class Scored:
    """What a scorer says of one group."""

    evidence: Evidence
    logprobs: bytes
    """Its own, of all tokens, completion after completion: little-endian float16, as a trainer
    gets them. Off by 0.004 at most above -16, and by 0.0002 above -1, where most tokens are."""


@dataclass(frozen=True, slots=True)
class TrainingGroup:
    """A group that a validator has accepted, ready to learn from."""

    prompt: tuple[int, ...]
    completions: tuple[Completion, ...]
    rewards: tuple[float, ...]


def seen_by_algorithm(
    group: TrainingGroup, end_tokens: Collection[int], limit: int
) -> algorithms.Group:
    """Return what an algorithm sees of a group of answers of at most ``limit`` tokens."""
    drawn = [one.tokens for one in group.completions]
    return algorithms.Group(
        rewards=group.rewards,
        lengths=tuple(map(len, drawn)),
        ended=tuple(tokens[-1] in end_tokens for tokens in drawn),
        limit=limit,
    )


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one optimiser step looked like; the guards of the recipe read it."""

    step: int
    loss: float
    k3: float
    """Mean of exp(o-b) - (o-b) - 1 over the step's tokens: how far the samplers were from the
    trainer."""
    ratio_max: float
    clipped: float
    """Share of tokens at which the two-sided clip cut the gradient."""
    capped: float
    """Share of tokens whose importance weight is at its cap."""
    entropy: float
    gradient_norm: float
    """Before it was clipped, in the mean of the step's updates."""
    tokens: int
    changed: float
    """Share of the weights that are another number in bfloat16 than before the step: what a
    patch of the policy carries. Near 0 the rate is too low for weights that were rounded."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What else the algorithm reports, in the mean over the step's tokens: `k3_reference`, and
    its own."""


class Generator(Protocol):
    """Samples completions from a policy. Paths, here and below, are those of the node's
    `p2p.world.Disk`.

    Groups come and go while others are decoded. An engine decodes only while it is told to, in
    `advance`: a role that stops asking draws nothing more. A policy is changed in two moves.
    What is under way is drawn to its end, or dropped; then the next policy is loaded. So a role
    may drop, in the middle of a drain, what has become too old.
    """

    @property
    def has_room(self) -> bool:
        """Whether more completions than are under way could be decoded at once."""
        ...

    async def load(self, weights: str) -> None:
        """Replace the weights in place by those of a safetensors file. `EngineError` while
        groups are under way: none is written by two policies."""
        ...

    async def submit(self, tasks: Sequence[GroupTask], sampling: Sampling) -> None:
        """Begin these groups, behind those that are under way.

        `EngineError`, and nothing has begun, if a prompt leaves too little of the context, a
        group of that number is under way, or what is under way is sampled otherwise.
        """
        ...

    async def advance(self) -> list[Group]:
        """Decode for a moment, or until nothing is under way. The groups that have ended since
        the last call, proofs included, in any order.

        `EngineError` if it cannot: all that was under way is dropped then.
        """
        ...

    @property
    def waiting(self) -> Sequence[Row]:
        """Completions that cannot go on before `hear`, as of the last `advance`: empty unless
        ``Sampling.turns`` is above 1."""
        ...

    async def hear(self, answers: Sequence[Row]) -> None:
        """Go on with some of `waiting`: read what each of them is told."""
        ...

    async def drop(self) -> None:
        """Forget what is under way."""
        ...


async def draw_all(
    generator: Generator, tasks: Sequence[GroupTask], sampling: Sampling
) -> list[Group]:
    """Draw these alone: one group per task, in order. Nothing else may be under way."""
    await generator.submit(tasks, sampling)
    ended: dict[int, Group] = {}
    while len(ended) < len(tasks):
        ended |= {group.group: group for group in await generator.advance()}
    return [ended[task.group] for task in tasks]


def check_numbers(tasks: Sequence[GroupTask], under_way: Collection[int]) -> None:
    """Raise `EngineError` if a group would be drawn twice at a time: an answer could be
    either's."""
    numbers = [task.group for task in tasks]
    twice = {number for number in numbers if number in under_way or numbers.count(number) > 1}
    if twice:
        raise EngineError(f"group {min(twice)} is under way: it is drawn once at a time")


class Scorer(Protocol):
    """Replays other nodes' completions by one prefill and says what it saw."""

    async def load(self, weights: str) -> None:
        """Replace the weights in place by those of a safetensors file."""
        ...

    async def score(
        self, tasks: Sequence[GroupTask], groups: Sequence[Group], sampling: Sampling
    ) -> list[Scored]:
        """One `Scored` per group, in order. Shapes were checked before (`proofs.checks`)."""
        ...


def previous_generation(checkpoint: str) -> str:
    """Where the checkpoint before the newest is kept, lest damage to one file lose the
    optimiser's state."""
    return f"{checkpoint}.previous"


class Learner(Protocol):
    """Owns the policy and its optimiser."""

    async def open(self, checkpoint: str, base: str = "") -> int:
        """Continue from the checkpoint file if it exists, else start: at ``base``, the folder
        of a model, or with drawn weights and a warm-up. Returns the step.

        A damaged checkpoint is passed over for the one before it; `EngineError` if that is
        damaged too.
        """
        ...

    @property
    def warning(self) -> str:
        """What it waits for that a person must do; empty if nothing."""
        ...

    @property
    def writes_waiting(self) -> int:
        """Calls whose content the disk has refused so far."""
        ...

    async def adopt(self, weights: str, step: int, base: str = "") -> float:
        """Go on from a policy that was learnt elsewhere, or whose checkpoint is lost: with a
        fresh optimiser. ``base`` as for `open`.

        Returns:
            The share of the weights that differ, in bfloat16, from those that were there; 0 if
            none were.
        """
        ...

    async def step(self, groups: Sequence[TrainingGroup]) -> StepReport:
        """One optimiser step over groups of equal size, rewards not all equal within a
        group."""
        ...

    async def save(self, checkpoint: str, weights: str) -> None:
        """Write optimiser state and the policy, each file atomically and synced. An empty path
        is not written.

        The checkpoint that was there is kept, as `previous_generation` names it. The policy is
        a safetensors file; of a run with a base a folder as the base is, in bfloat16.
        """
        ...

    async def answer(self, tasks: Sequence[GroupTask], sampling: Sampling) -> list[Answers]:
        """The tokens of each completion of each task, in order, under the policy in training.

        For evaluation: there are no proofs.
        """
        ...


class Engine(Generator, Scorer, Learner, Protocol):
    """All three; a node uses the part that its role needs."""
