"""Sorting digits: ``s9762711=`` is answered by ``1126779$``.

The warm-up shows 99 lists of 2 to 4 digits for each one of 5 to 8; training practises the long
ones (and one short list in ten, against forgetting) with nothing but right and wrong. One
prompt in eight is held out by its hash and never trained on, before or during RL.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from random import Random
from typing import Final

from roles.envs.base import Task

VOCABULARY: Final = "$0123456789+-*=<>|.#?abcdefghijklmnopqrstuvwxyz:, "
END: Final = 0
"""The token that ends an answer, the first of the vocabulary: a run of this environment names
it among its model's end tokens."""

SHORT: Final = (2, 4)
"""Digits of a short list, at least and at most: what the warm-up teaches."""
LONG: Final = (5, 8)
"""Digits of a long list, at least and at most: what RL has to find out. Longer ones are never
trained on."""
LONG_SHARE: Final = 0.9
"""Share of long lists among the tasks of RL. With none but long ones greedy ends at most 0.04
higher, and short lists are forgotten (those of two digits fall to 0.31 at worst); solved short
groups have no spread and cost sampling only."""
WARM_UP_LONG_SHARE: Final = 0.01
"""Share of long lists in the warm-up: with none RL has nothing to reinforce, with 4 in 100
little to do.
"""
HELD_OUT_BELOW: Final = 32
"""A prompt is held out if the first byte of its sha256 is below this: one in eight."""
EVALUATION_TASKS: Final = 512
"""Held-out tasks of an evaluation: the standard error of a share of them is at most 0.022 (sqrt
of 0.25 / 512)."""
EVALUATION_SEED: Final = 4242
"""Of those tasks: the same in every evaluation of every run, so that curves can be compared."""

_IDS: Final = {character: token for token, character in enumerate(VOCABULARY)}


class SortEnvironment:
    """Sort a list of digits; right or wrong, no partial credit."""

    name = "sort"
    vocabulary = VOCABULARY

    def task(self, seed: bytes, *, held_out: bool = False) -> Task:
        """A long list nine times in ten, else a short one."""
        rng = Random(seed)
        span = LONG if rng.random() < LONG_SHARE else SHORT
        return _draw(rng, rng.randint(*span), held_out=held_out)

    def reward(self, task: Task, tokens: Sequence[int]) -> float:
        """1 for exactly the answer and its end token, else 0."""
        return 1.0 if tuple(tokens) == task.answer else 0.0

    def solution(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """The digits between ``s`` and ``=`` in ascending order, and the end token."""
        text = decode(prompt)
        if not (text.startswith("s") and text.endswith("=") and text[1:-1].isdigit()):
            raise ValueError(f"not a prompt of the sort environment: {text!r}")
        return encode("".join(sorted(text[1:-1])) + "$")

    def evaluation(self) -> list[Task]:
        """512 held-out long lists."""
        rng = Random(EVALUATION_SEED)
        return [_draw(rng, rng.randint(*LONG), held_out=True) for _ in range(EVALUATION_TASKS)]

    def warm_up(self, rng: Random, count: int) -> list[Task]:
        """Clean examples, nearly all of them short."""
        spans = (LONG if rng.random() < WARM_UP_LONG_SHARE else SHORT for _ in range(count))
        return [_draw(rng, rng.randint(*span), held_out=False) for span in spans]


def encode(text: str) -> tuple[int, ...]:
    """Token ids of ``text``. Raises KeyError on a character outside the vocabulary."""
    return tuple(_IDS[character] for character in text)


def decode(tokens: Sequence[int]) -> str:
    """The characters of ``tokens``; ids outside the vocabulary become a replacement
    character.
    """
    return "".join(
        VOCABULARY[token] if 0 <= token < len(VOCABULARY) else "\N{REPLACEMENT CHARACTER}"
        for token in tokens
    )


def is_held_out(prompt: str) -> bool:
    """Whether a prompt belongs to the eighth that is never trained on."""
    return hashlib.sha256(prompt.encode()).digest()[0] < HELD_OUT_BELOW


def _draw(rng: Random, length: int, *, held_out: bool) -> Task:
    """A list of ``length`` uniform digits, redrawn until it is on the wanted side."""
    while True:
        digits = "".join(rng.choices("0123456789", k=length))
        prompt = f"s{digits}="
        if is_held_out(prompt) == held_out:
            return Task(encode(prompt), encode("".join(sorted(digits)) + "$"))
