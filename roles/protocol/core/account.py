"""Account of a node's accepted work: a question to the trainer, and its answer.

A verdict tells a worker that its work was accepted, and no more: whether anything was learnt
from it the trainer alone knows. So the trainer answers any peer that asks with that peer's own
figures, those of all nodes together, and what it is doing. The channel is authenticated and the
answer is for the one who asks, so nothing is signed. Wire table: docs/protocols/work.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Final

from p2p.errors import BadMessage
from p2p.wire import KI, fields_untrusted, pack, unpack_untrusted

MAX_ACCOUNT: Final = KI
"""Bytes of an answer; it has about 100."""
MAX_COUNT: Final = 2**53
"""Highest value of any count here: JSON carries it exactly."""
MAX_CURVE: Final = 32
"""Most points of a curve: they show its shape in 300 bytes."""


class TrainerDoing(Enum):
    """The activity of a trainer."""

    OPENS = "opens"
    """The trainer starts its engine, or reads what an earlier process left."""
    WARMS_UP = "warms up"
    """The trainer trains the first policy on examples."""
    EVALUATES = "evaluates"
    WAITS = "waits"
    """The trainer waits for enough accepted work for a step."""
    LEARNS = "learns"
    RESTS = "rests"
    """The run file does not let the trainer work now."""
    OVER = "over"
    """The run has all its steps."""


NOT_LEARNT: Final = {
    "no_spread": "scored alike",
    "stale": "too old",
    "left_over": "left over",
    "waiting": "waiting",
}
"""Maps each reason why accepted work was not learnt from to two words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fates:
    """Numbers of accepted groups that came to the trainer, by their fate. Each group counts
    once."""

    learnt: int = 0
    """Groups that a step has learnt from."""
    no_spread: int = 0
    """Groups whose answers all earned the same reward, from which GRPO learns nothing."""
    stale: int = 0
    """Groups whose policy was too old when they came, or when it was their turn."""
    left_over: int = 0
    """Groups that came when the run had all its steps, or waited then."""
    waiting: int = 0
    """Groups that wait for a step, or are in one."""

    def __post_init__(self) -> None:
        if not all(0 <= getattr(self, one.name) <= MAX_COUNT for one in fields(self)):
            raise ValueError(f"counts are from 0 to {MAX_COUNT}")

    @property
    def all(self) -> int:
        """Number of all groups that came."""
        return self.learnt + self.no_spread + self.stale + self.left_over + self.waiting

    def to_list(self) -> list[int]:
        """Return the wire form."""
        return [self.learnt, self.no_spread, self.stale, self.left_over, self.waiting]

    def times(self, each: int) -> Fates:
        """Return the counts in answers, of which a group has ``each``; at most `MAX_COUNT`."""
        return _fates([min(each * count, MAX_COUNT) for count in self.to_list()])


def _fates(counts: list[int]) -> Fates:
    learnt, no_spread, stale, left_over, waiting = counts
    return Fates(
        learnt=learnt,
        no_spread=no_spread,
        stale=stale,
        left_over=left_over,
        waiting=waiting,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """A trainer's answer to one peer."""

    doing: TrainerDoing
    step: int = 0
    """Number of steps that the trainer has taken."""
    steps: int = 0
    """Number of steps of the run."""
    pause: int = 0
    """Seconds to wait before the next question."""
    own: Fates | None = None
    """Groups of the peer that asked; None until the trainer has read its books."""
    total: Fates | None = None
    """Groups of all nodes."""
    curve: Sequence[tuple[int, int]] = ()
    """(Step, greedy reward on held-out tasks in thousandths). Newer trainers send it if
    asked."""

    def to_bytes(self) -> bytes:
        """Return the wire form."""
        both = [None if one is None else one.to_list() for one in (self.own, self.total)]
        curve = [list(map(list, self.curve))] if self.curve else []
        return pack([self.doing.value, self.step, self.steps, self.pause, *both, *curve])


def thinned(curve: Sequence[tuple[int, float, float]]) -> list[tuple[int, int]]:
    """Return at most `MAX_CURVE` points of (step, greedy, sampled), the newest among them."""
    every = -(-len(curve) // MAX_CURVE) or 1
    points = [(step, round(1000 * greedy)) for step, greedy, _ in curve[::-every]]
    return [one for one in reversed(points) if abs(one[1]) <= MAX_COUNT]


def decode_account_untrusted(data: bytes) -> Account:
    """Decode an account. Raises `BadMessage`, and nothing else, whatever the bytes."""
    books, value = (list, type(None)), unpack_untrusted(data)
    curve = value.pop() if isinstance(value, list) and len(value) == 7 else []
    if not isinstance(curve, list) or len(curve) > MAX_CURVE:
        raise BadMessage(f"a curve is a list of at most {MAX_CURVE} points")
    points = [tuple(fields_untrusted(one, int, int, what="point of a curve")) for one in curve]
    doing, step, steps, pause, own, total = fields_untrusted(
        value, str, int, int, int, books, books, what="account"
    )
    if not all(-MAX_COUNT <= number <= MAX_COUNT for point in points for number in point):
        raise BadMessage(f"numbers of a curve are at most {MAX_COUNT}")
    if not all(0 <= number <= MAX_COUNT for number in (step, steps, pause)):
        raise BadMessage(f"numbers of an account are from 0 to {MAX_COUNT}")
    try:
        return Account(
            doing=TrainerDoing(doing),
            step=step,
            steps=steps,
            pause=pause,
            own=_fates_untrusted(own),
            total=_fates_untrusted(total),
            curve=points,
        )
    except ValueError as error:
        raise BadMessage(f"an account makes no sense: {error}") from None


def _fates_untrusted(listed: list[object] | None) -> Fates | None:
    if listed is None:
        return None
    return _fates(fields_untrusted(listed, *[int] * len(fields(Fates)), what="row of fates"))
