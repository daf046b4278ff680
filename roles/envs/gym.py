"""reasoning-gym's families of puzzles: an adapter.

The package (Apache-2.0, extra ``gym``) generates 106 families of tasks and knows how good an
answer is, from 0 to 1. A run says under ``kinds`` which families it wants, by weight. Most are
too hard for small models: a chat model of 135 M parameters solves one ``chain_sum`` in 200.

Its authors grade their own models; here an answer may come from a hostile one. So an answer
reaches a scorer only if that can do no more with it than compare: families that evaluate what
they are told are refused, and of four others answers that would cost more than seconds earn
nothing. tests/attacks/test_hostile_scorers.py pays what is hostile to all of them.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping
from copy import deepcopy
from functools import lru_cache
from random import Random
from typing import Any, Final

from p2p.errors import ConfigError
from p2p.wire import KI
from roles.envs.answers import spoken
from roles.envs.installed import require
from roles.envs.text import Message, TextTask, is_held_out

PACKAGES: Final = {"reasoning-gym": "0.1.25"}
"""Its version decides what a seed's task is: all nodes must have the same."""
FAMILIES: Final[Mapping[str, float]] = {"basic_arithmetic": 1.0, "chain_sum": 1.0, "gcd": 1.0}
"""Weights, if a run names none: the easiest three that have no end of tasks."""
NEEDS_SETTINGS: Final = frozenset({"composite"})
"""Families that are made of others, which a weight alone does not name."""
EVALUATING: Final = frozenset(
    {
        "binary_matrix",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)
"""Families whose scorers run the answer as Python, by ``eval`` or sympy's ``parse_expr``: a
hostile model would run code on the trainer and the validators."""
GUESSED: Final = frozenset(
    {
        "circuit_logic",
        "coin_flip",
        "complex_arithmetic",
        "course_schedule",
        "game_of_life",
        "game_of_life_halting",
        "isomorphic_strings",
        "ransom_note",
        "syllogism",
        "time_intervals",
    }
)
"""Families that pay a constant half of their rewards or more. Any text is right in
game_of_life_halting, "nan" in complex_arithmetic; 0 earns 0.88 in coin_flip, a board of zeros
0.91 in game_of_life, and "6 :00", read as a date and as a time, 0.56 in time_intervals; in the
others one of two answers is right. A model would learn the text."""
COSTLY: Final[Mapping[str, re.Pattern[str]]] = {
    "propositional_logic": re.compile(r"[^A-Z¬∧∨→↔()\s]"),
    "rubiks_cube": re.compile(r"\d\d|.{2000}", re.DOTALL),
    "rush_hour": re.compile(r"\d\d"),
}
"""Answers that earn nothing, as their scorers would take minutes: a truth table of any names,
moves that are made a million times."""
MAX_ANSWER: Final = 16 * KI
"""Characters of an answer that is looked at: the longest right ones have 5,000."""
EVALUATION_TASKS: Final = 32
"""Held-out tasks of a family in an evaluation: the standard error of a share is at most 0.09.
Eight must be made for each, of 1 to 320 ms."""
EVALUATION_SEED: Final = "reasoning-gym 4242"
"""Of those tasks: the same in every evaluation of every run."""
MOST_DRAWS: Final = 512
"""Draws for one task. One in eight is held out: 512 in vain have a probability of 10^-30, but
in a family with few tasks."""
KEPT: Final = 64
"""Tasks that are kept between calls: each completion of a group needs its task again, and one
takes up to 0.3 s to make."""

_NO_NUMBER: Final = re.compile(r"\b(?:nan|inf|infinity)\b", re.IGNORECASE)
"""What Python reads as a number that no comparison tells from the right one."""
_INSTRUCTION: Final = "\nWrite the final answer between <answer> and </answer>."


class GymEnvironment:
    """A weighted mix of families of reasoning-gym."""

    name = "reasoning-gym"

    def __init__(self, kinds: Mapping[str, float] = FAMILIES) -> None:
        """Raises `ConfigError` without the package, on a family that it has not, and on one of
        `EVALUATING` and `GUESSED`."""
        require(PACKAGES, extra="gym", what=f"the environment {self.name!r}")
        self._gym = importlib.import_module("reasoning_gym")
        known = importlib.import_module("reasoning_gym.factory").DATASETS
        for family in kinds:
            if family not in known or family in NEEDS_SETTINGS:
                raise ConfigError(
                    f"reasoning-gym {PACKAGES['reasoning-gym']} has no family {family!r:.40}"
                    " that needs no settings"
                )
            if family in EVALUATING:
                raise ConfigError(
                    f"the family {family!r} of reasoning-gym runs answers as code, which"
                    " strangers write: take another family"
                )
            if family in GUESSED:
                raise ConfigError(
                    f"the family {family!r} of reasoning-gym pays one constant answer for half"
                    " of its tasks or more, whatever is asked: take another family"
                )
        self._families = list(kinds)
        self._weights = list(kinds.values())
        self._entry = lru_cache(KEPT)(self._generate)

    def task(self, seed: bytes, *, held_out: bool = False) -> TextTask:
        """A task of a family that is drawn by weight."""
        rng = Random(seed)
        family = rng.choices(self._families, self._weights)[0]
        return self._draw(rng, family, held_out=held_out)

    async def reward(self, task: TextTask, text: str, ended: bool) -> float:
        """Return what the package gives for the text between the last tags, or for all of it.

        Nothing for what was cut off, for thoughts, and for tags that do not end.
        """
        if not ended:
            return 0.0
        family, seed = json.loads(task.info)
        dataset, entry = self._entry(family, seed)
        said = _answer(text)
        costly = COSTLY.get(family)
        if len(said) > MAX_ANSWER or (costly and costly.search(said)):
            return 0.0
        if _NO_NUMBER.search(said) and not _NO_NUMBER.search(task.answer):
            return 0.0
        # A copy, lest one answer changes what the next is compared with.
        return min(1.0, max(0.0, float(dataset.score_answer(said, deepcopy(entry)))))

    def evaluation(self) -> list[TextTask]:
        """Held-out tasks of the families of this run."""
        tasks = []
        for family in self._families:
            rng = Random(f"{EVALUATION_SEED} {family}")
            tasks += [self._draw(rng, family, held_out=True) for _ in range(EVALUATION_TASKS)]
        return tasks

    def _draw(self, rng: Random, family: str, *, held_out: bool) -> TextTask:
        """A task, drawn again until it is on the wanted side."""
        for _ in range(MOST_DRAWS):
            seed = rng.randrange(1 << 31)
            _, entry = self._entry(family, seed)
            question = str(entry["question"])
            if is_held_out(question) == held_out:
                turn = Message("user", question + _INSTRUCTION)
                info = json.dumps([family, seed])
                return TextTask((turn,), "", str(entry["answer"]), info, kind=family)
        raise LookupError(f"{MOST_DRAWS} draws found no {family} with held_out={held_out}")

    def _generate(self, family: str, seed: int) -> tuple[Any, dict[str, Any]]:
        dataset = self._gym.create_dataset(family, seed=seed, size=1)
        return dataset, dataset[0]


def _answer(text: str) -> str:
    """Return what stands between the last tags, or else all that was said."""
    said = spoken(text)
    _, opening, last = said.rpartition("<answer>")
    answer, closing, _ = last.partition("</answer>")
    if not opening:
        return said.strip()
    return answer.strip() if closing else ""
