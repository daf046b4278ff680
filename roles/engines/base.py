"""The interface of an engine: prompts and seeds in; tokens, proofs, evidence and new weights
out.

An engine runs in a worker process of its own (`roles.engines.client`); these types are
exchanged between the processes. Groups are the unit everywhere: one task, drawn from (run,
policy, node, group), and its completions, each drawn with its own seed. Group numbers of a node
under one policy have no gaps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from p2p.errors import ShoalError
from proofs.checks import Evidence
from roles.rl.algorithms import base as algorithms


class EngineError(ShoalError):
    """An engine could not carry out a call. The message says which, and why."""


class EngineUnusable(Exception):
    """An engine's process cannot go on, but a new process could. The process ends with this
    error, as with a bug, and the node starts another (`roles.workers.client`)."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The engine, device and threads that compute on this machine."""

    engine: str
    """Kind of the engine, which is the chosen one if it was ``auto``."""

    device: str
    """Device, as torch names it."""

    threads: int

    idle: str = ""
    """Sentence about GPUs that are unused and how to use them; empty if none is unused."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling of completions; the same for all nodes of a run."""

    temperature: float
    """Sampling temperature; 0 is greedy."""

    max_new_tokens: int
    """Most tokens of a completion. A completion that reaches this without an end token is
    cut."""

    group_size: int
    """Number of completions per task."""

    proof_values: int = 62
    """`roles.contract.core.sampling.SamplingTerms.proof_values` of the run."""

    turns: int = 1
    """Turns of a completion, at most. After each but the last the environment may answer."""

    heard: int = 0
    """Most tokens that the environment may insert in one completion."""


@dataclass(frozen=True, slots=True)
class GroupTask:
    """A derived task, with one derived seed per completion."""

    group: int
    prompt: tuple[int, ...]
    seeds: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of a completion, other than the last, and what the environment said after it."""

    after: int
    """Number of drawn tokens of the completion up to the end of the turn, end token
    included."""

    inserted: tuple[int, ...]
    """Tokens that the model reads between this turn and the next."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer: its tokens (with the end token, if it ended), their log-probs, and the
    activation proof."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    """Log-probs of the tokens: from a generator its own, which do not leave the node; in a
    `TrainingGroup` the validator's; empty in completions that came over the wire."""
    proof: bytes = b""
    """Activation proof (`proofs.toploc`), one chunk for each 32 tokens; empty in a
    `TrainingGroup`, which a validator has checked."""
    turns: tuple[Turn, ...] = ()
    """All turns but the last; empty if the environment says nothing in between. Whoever replays
    a completion derives them (`with_inserted`). They are not on the wire, and inserted tokens
    have neither log-probs nor a proof."""
    heard: bytes = b""
    """Digest of all inserted tokens as the sender sent it; empty if the completion did not come
    over the wire."""

    @property
    def text(self) -> tuple[tuple[int, ...], Sequence[int]]:
        """All tokens in the order in which the model reads them, and the indices of the drawn
        tokens among them."""
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
    """Return the completion with the environment's answer after each turn but the last.

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
    """A completion under way whose turn has ended, so that it waits for the environment's
    answer."""

    group: int
    slot: int
    """Index of the completion in its group."""
    tokens: tuple[int, ...]
    """In `Generator.waiting`, all tokens drawn so far. In `Generator.hear`, the answer; empty
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
    """A scorer's result for one group."""

    evidence: Evidence
    logprobs: bytes
    """The scorer's own log-probs of all tokens, completion after completion, in little-endian
    float16. The error is at most 0.004 above -16 and 0.0002 above -1, where most tokens are."""


@dataclass(frozen=True, slots=True)
class TrainingGroup:
    """A group that a validator has accepted, ready to learn from."""

    prompt: tuple[int, ...]
    completions: tuple[Completion, ...]
    rewards: tuple[float, ...]


def seen_by_algorithm(
    group: TrainingGroup, end_tokens: Collection[int], limit: int
) -> algorithms.Group:
    """Return the algorithm's view of a group of answers of at most ``limit`` tokens."""
    drawn = [one.tokens for one in group.completions]
    return algorithms.Group(
        rewards=group.rewards,
        lengths=tuple(map(len, drawn)),
        ended=tuple(tokens[-1] in end_tokens for tokens in drawn),
        limit=limit,
    )


@dataclass(frozen=True, slots=True)
class StepReport:
    """Figures of one optimiser step, which the guards of the recipe read."""

    step: int
    loss: float
    k3: float
    """Mean of exp(o-b) - (o-b) - 1 over the step's tokens: the distance between samplers and
    trainer."""
    ratio_max: float
    clipped: float
    """Share of tokens at which the two-sided clip cut the gradient."""
    capped: float
    """Share of tokens whose importance weight is at its cap."""
    entropy: float
    gradient_norm: float
    """Norm of the gradient before clipping, averaged over the step's updates."""
    tokens: int
    changed: float
    """Share of the weights whose bfloat16 value the step changed: what a patch of the policy
    carries. If it is near 0, the rate is too low for weights that are rounded."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Other metrics of the algorithm, averaged over the step's tokens: `k3_reference` and its
    own."""


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
        """True if more completions than are under way could be decoded at once."""
        ...

    async def load(self, weights: str) -> None:
        """Replace the weights in place by those of a safetensors file. Raises `EngineError`
        while groups are under way, since no group may be drawn by two policies."""
        ...

    async def submit(self, tasks: Sequence[GroupTask], sampling: Sampling) -> None:
        """Begin these groups after those that are under way.

        Raises `EngineError`, and begins nothing, if a prompt leaves too little of the context,
        a group of that number is under way, or the groups under way are sampled otherwise.
        """
        ...

    async def advance(self) -> list[Group]:
        """Decode for a moment, or until nothing is under way. Returns the groups that have
        ended since the last call, with proofs, in any order.

        Raises `EngineError` if decoding fails: all that was under way is dropped then.
        """
        ...

    @property
    def waiting(self) -> Sequence[Row]:
        """Completions that cannot go on before `hear`, as of the last `advance`: empty unless
        ``Sampling.turns`` is above 1."""
        ...

    async def hear(self, answers: Sequence[Row]) -> None:
        """Give some of the `waiting` completions their answers, so that they go on."""
        ...

    async def drop(self) -> None:
        """Drop the groups that are under way."""
        ...


async def draw_all(
    generator: Generator, tasks: Sequence[GroupTask], sampling: Sampling
) -> list[Group]:
    """Draw these tasks alone: one group per task, in order. Nothing else may be under way."""
    await generator.submit(tasks, sampling)
    ended: dict[int, Group] = {}
    while len(ended) < len(tasks):
        ended |= {group.group: group for group in await generator.advance()}
    return [ended[task.group] for task in tasks]


def check_numbers(tasks: Sequence[GroupTask], under_way: Collection[int]) -> None:
    """Raise `EngineError` if a group would be drawn twice at a time, since its answers would be
    indistinguishable."""
    numbers = [task.group for task in tasks]
    twice = {number for number in numbers if number in under_way or numbers.count(number) > 1}
    if twice:
        raise EngineError(f"group {min(twice)} is under way: it is drawn once at a time")


class Scorer(Protocol):
    """Replays other nodes' completions by one prefill and returns evidence and log-probs."""

    async def load(self, weights: str) -> None:
        """Replace the weights in place by those of a safetensors file."""
        ...

    async def score(
        self, tasks: Sequence[GroupTask], groups: Sequence[Group], sampling: Sampling
    ) -> list[Scored]:
        """Return one `Scored` per group, in order. Shapes were checked before
        (`proofs.checks`)."""
        ...


def previous_generation(checkpoint: str) -> str:
    """Return the path at which the previous checkpoint is kept, so that damage to one file does
    not lose the optimiser's state."""
    return f"{checkpoint}.previous"


class Learner(Protocol):
    """Owns the policy and its optimiser."""

    async def open(self, checkpoint: str, base: str = "") -> int:
        """Continue from the checkpoint file if it exists. Else start from ``base``, the folder
        of a model, or from drawn weights and a warm-up. Returns the step.

        A damaged checkpoint is passed over for the one before it; `EngineError` if that is
        damaged too.
        """
        ...

    @property
    def warning(self) -> str:
        """Reason to wait for something that a person must do; empty if there is none."""
        ...

    @property
    def writes_waiting(self) -> int:
        """Calls whose content the disk has refused so far."""
        ...

    async def adopt(self, weights: str, step: int, base: str = "") -> float:
        """Continue with a policy that was learnt elsewhere or whose checkpoint is lost, and a
        fresh optimiser. ``base`` as for `open`.

        Returns:
            The share of the weights that differ, in bfloat16, from those that were there; 0 if
            none were.
        """
        ...

    async def step(self, groups: Sequence[TrainingGroup]) -> StepReport:
        """Take one optimiser step over groups of equal size, with spread in the rewards of each
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
        """Return the tokens of each completion of each task, in order, under the policy in
        training.

        The answers are for evaluation and have no proofs.
        """
        ...


class Engine(Generator, Scorer, Learner, Protocol):
    """Generator, scorer and learner in one; a node uses the part that its role needs."""
