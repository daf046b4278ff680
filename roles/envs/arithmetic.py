"""Arithmetic in words for small models: ``What is 27 + 82?`` is answered by ``27 + 82 = 109``.

Two-digit addition is what a chat model of 135 M parameters can learn within minutes: it knows
how, and does it seldom (greedy one in four right, bench/README.md). Trained alone it costs
the model what it knew beside it (the times table fell from 0.55 to nothing), so the mix
practises other kinds too. Three-digit addition is measured and not trained, unless a run asks
for it: what rises there was not learnt by heart.

A question in eight is held out by its hash and never trained on, whatever its kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from random import Random
from typing import Final

from p2p.errors import ConfigError
from roles.envs.answers import spoken
from roles.envs.text import Message, TextTask, is_held_out

MIX: Final[Mapping[str, float]] = {
    "addition": 5.0,
    "subtraction": 1.0,
    "tables": 1.0,
    "sums": 1.0,
    "stories": 1.0,
    "largest": 1.0,
}
"""Weights of the kinds, if a run names none: half of the tasks are what is to be learnt, a
tenth each what is to be kept."""
EVALUATION_TASKS: Final[Mapping[str, int]] = {
    "addition": 256,
    "three_digits": 64,
    "subtraction": 64,
    "tables": 64,
    "sums": 64,
    "stories": 64,
    "largest": 64,
}
"""Held-out tasks of an evaluation, each once, or all that there are. 256 of what is trained
for: the standard error of a share of them is at most 0.031; 0.030 for the five others
together."""
EVALUATION_SEED: Final = "arithmetic 4242"
"""Of those tasks: the same in every evaluation of every run, so that curves can be compared."""
MOST_DRAWS: Final = 1024
"""Draws for one task. One in eight is held out: 1,024 in vain have a probability of 10^-59."""
EVALUATION_DRAWS: Final = 16
"""Draws of held-out tasks for each that an evaluation wants: enough to meet all 30 of the
tables, of which 64 are wanted."""

_NUMBER: Final = re.compile(r"(?:[-−]|(?<![\w^]))[0-9]+(?:[.,/:^][0-9]+)*")
"""All of a number: 12.5 is not 5, and 1,009 not 9."""
_GROUPS: Final = re.compile(r"-?[0-9]{1,3}(?:,[0-9]{3})+")

Question = tuple[str, str, int]
"""What the user asks, how the answer begins, and the number that is right."""


def _addition(rng: Random) -> Question:
    return _sum_of(rng.randint(10, 99), rng.randint(10, 99))


def _three_digits(rng: Random) -> Question:
    return _sum_of(rng.randint(100, 999), rng.randint(100, 999))


def _sums(rng: Random) -> Question:
    return _sum_of(*(rng.randint(2, 10) for _ in range(3)))


def _sum_of(*numbers: int) -> Question:
    return _calculation(" + ".join(map(str, numbers)), sum(numbers))


def _subtraction(rng: Random) -> Question:
    less, more = sorted(rng.randint(10, 99) for _ in range(2))
    return _calculation(f"{more} - {less}", more - less)


def _tables(rng: Random) -> Question:
    factors = [rng.randint(2, 9), rng.randint(2, 20)]
    rng.shuffle(factors)
    return _calculation(f"{factors[0]} * {factors[1]}", factors[0] * factors[1])


def _calculation(formula: str, result: int) -> Question:
    return f"What is {formula}?", f"{formula} =", result


_STORIES: Final[tuple[tuple[str, int], ...]] = (
    ("Tom has {0} apples and buys {1} more. How many apples does Tom have now?", 1),
    ("There are {0} birds in a tree and {1} more come. How many birds are in the tree?", 1),
    ("Anna reads {0} pages on Monday and {1} on Tuesday. How many pages does she read?", 1),
    ("Ben has {0} marbles and gives {1} away. How many marbles does Ben have left?", -1),
    ("A bus carries {0} people and {1} get off. How many people are still on the bus?", -1),
    ("A box holds {0} pencils. {1} are taken out. How many pencils are in the box?", -1),
)
"""Each with the sign of its second number."""


def _stories(rng: Random) -> Question:
    text, sign = rng.choice(_STORIES)
    less, more = sorted(rng.sample(range(2, 21), 2))
    return text.format(more, less), "Answer:", more + sign * less


def _largest(rng: Random) -> Question:
    numbers = rng.sample(range(10, 100), 3)
    first, second, third = numbers
    asked = f"Which number is the largest: {first}, {second} or {third}?"
    return asked, "The largest number is", max(numbers)


_KINDS: Final[Mapping[str, Callable[[Random], Question]]] = {
    "addition": _addition,
    "three_digits": _three_digits,
    "subtraction": _subtraction,
    "tables": _tables,
    "sums": _sums,
    "stories": _stories,
    "largest": _largest,
}


class ArithmeticEnvironment:
    """A weighted mix of kinds of questions with a number for an answer; right or wrong."""

    name = "arithmetic"

    def __init__(self, kinds: Mapping[str, float] = MIX) -> None:
        """Raises `ConfigError` on a kind that there is not."""
        strange = [kind for kind in kinds if kind not in _KINDS]
        if strange:
            raise ConfigError(
                f"arithmetic has no kind {strange[0]!r:.40}; it has {', '.join(_KINDS)}"
            )
        self._kinds = list(kinds)
        self._weights = list(kinds.values())

    def task(self, seed: bytes, *, held_out: bool = False) -> TextTask:
        """A question of a kind that is drawn by weight."""
        rng = Random(seed)
        kind = rng.choices(self._kinds, self._weights)[0]
        return _draw(rng, kind, held_out=held_out)

    async def reward(self, task: TextTask, text: str, ended: bool) -> float:
        """1 if the model stopped by itself and the last number that it said is right."""
        said = _NUMBER.findall(spoken(text))
        return 1.0 if ended and said and _plain(said[-1]) == task.answer else 0.0

    def evaluation(self) -> list[TextTask]:
        """Held-out questions of every kind, also of those that the run does not train."""
        return [task for kind, count in EVALUATION_TASKS.items() for task in _held(kind, count)]


def _plain(number: str) -> str:
    """Without needless zeros; as text, since a stranger's number may have a million digits."""
    number = number.replace("−", "-")
    whole, point, zeros = number.partition(".")
    number = whole if point and not zeros.strip("0") else number
    number = number.replace(",", "") if _GROUPS.fullmatch(number) else number
    sign = "-" if number.startswith("-") else ""
    return sign + (number.removeprefix("-").lstrip("0") or "0")


def _draw(rng: Random, kind: str, *, held_out: bool) -> TextTask:
    """A question, drawn again until it is on the wanted side."""
    for _ in range(MOST_DRAWS):
        question, prefill, result = _KINDS[kind](rng)
        if is_held_out(question) == held_out:
            return TextTask((Message("user", question),), prefill, str(result), kind=kind)
    raise LookupError(f"{MOST_DRAWS} draws found no {kind} with held_out={held_out}")


def _held(kind: str, count: int) -> list[TextTask]:
    """Different held-out questions of a kind, ``count`` of them or all that there are."""
    rng, found = Random(f"{EVALUATION_SEED} {kind}"), dict[str, TextTask]()
    for _ in range(EVALUATION_DRAWS * count):
        if len(found) < count:
            task = _draw(rng, kind, held_out=True)
            found.setdefault(task.messages[0].content, task)
    return list(found.values())
