"""Guessing a number in several turns, for models without a base.

``g20-35=`` asks for a number from 20 to 35. To a guess such as ``27$`` the environment says
``<=`` (the number is lower) or ``>=`` (higher), and the model guesses again; the number itself
ends the completion and earns 1. Whoever halves what is left finds one of 15 in four turns: a
run should allow ``turns = 4, heard = 6`` and ``max_new_tokens = 12`` in its [sampling].

The warm-up shows guesses that ignore what was said, and few that use it: what hints are good
for has to be found out. One range in eight is held out by its hash.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Final

from roles.envs.base import Task
from roles.envs.sort import END, VOCABULARY, decode, encode, is_held_out

LOWEST: Final = (10, 80)
"""The least number of a range, at least and at most."""
WIDTHS: Final = (8, 16)
"""Numbers in a range."""
WARM_UP_GOOD_SHARE: Final = 0.05
"""Share of the warm-up's guesses that use the hints."""
EVALUATION_TASKS: Final = 256
"""Held-out tasks of an evaluation: the standard error of a share of them is at most 0.031."""
EVALUATION_SEED: Final = "guess 4242"
LOWER, HIGHER = encode("<="), encode(">=")


class GuessEnvironment:
    """Find a number by guesses; found or not, no partial credit."""

    name = "guess"
    vocabulary = VOCABULARY

    def task(self, seed: bytes, *, held_out: bool = False) -> Task:
        """A range, and a number in it."""
        return _draw(Random(seed), held_out=held_out)

    def respond(self, task: Task, tokens: Sequence[int], room: int) -> Sequence[int] | None:
        """Say where the number lies, seen from the last guess; None where it is found, or the
        guess is no number."""
        guess = (_guesses(tokens) or [None])[-1]
        if guess is None or guess == int(task.source):
            return None
        return LOWER if int(task.source) < guess else HIGHER

    def reward(self, task: Task, tokens: Sequence[int]) -> float:
        """1 if the last guess is the number."""
        return 1.0 if _guesses(tokens)[-1:] == [int(task.source)] else 0.0

    def solution(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """None is known from the prompt alone: raises ValueError."""
        raise ValueError(f"nobody knows the number of {decode(prompt)!r}")

    def evaluation(self) -> list[Task]:
        """Held-out ranges, each with a number."""
        rng = Random(EVALUATION_SEED)
        return [_draw(rng, held_out=True) for _ in range(EVALUATION_TASKS)]

    def warm_up(self, rng: Random, count: int) -> list[Task]:
        """Single guesses behind up to three earlier ones."""
        return [_example(rng) for _ in range(count)]


def _guesses(tokens: Sequence[int]) -> list[int | None]:
    """The guess of each turn that has ended; None for what is no number."""
    turns = decode(tokens).split(VOCABULARY[END])[:-1]
    return [int(turn) if len(turn) == 2 and turn.isascii() and turn.isdigit() else None
            for turn in turns]  # fmt: skip


def _draw(rng: Random, *, held_out: bool) -> Task:
    while True:
        low = rng.randint(*LOWEST)
        high = low + rng.randint(*WIDTHS) - 1
        prompt = f"g{low}-{high}="
        if is_held_out(prompt) == held_out:
            secret = rng.randint(low, high)
            return Task(encode(prompt), encode(f"{secret}$"), source=str(secret).encode())


def _example(rng: Random) -> Task:
    task = _draw(rng, held_out=False)
    low, high = map(int, decode(task.prompt)[1:-1].split("-"))
    secret, text, least, most = int(task.source), decode(task.prompt), low, high
    for _ in range(rng.randint(0, 3)):
        guess = rng.choice([one for one in range(low, high + 1) if one != secret])
        text += f"{guess}$" + ("<=" if secret < guess else ">=")
        least, most = (least, min(most, guess - 1)) if secret < guess else (
            max(least, guess + 1), most)  # fmt: skip
    good = rng.random() < WARM_UP_GOOD_SHARE
    guess = (least + most) // 2 if good else rng.randint(low, high)
    return Task(encode(text), encode(f"{guess}$"))
