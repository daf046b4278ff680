"""reasoning-gym's families of puzzles: an adapter.

The package (Apache-2.0, extra ``gym``) generates 106 families of tasks and knows how good an
answer is, from 0 to 1. A run says under ``kinds`` which families it wants, by weight. Most are
too hard for small models: a chat model of 135 M parameters solves one ``chain_sum`` in 200.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping
from functools import lru_cache
from random import Random
from typing import Any, Final

from p2p.errors import ConfigError
from roles.envs.installed import require
from roles.envs.text import Message, TextTask, is_held_out

PACKAGES: Final = {"reasoning-gym": "0.1.25"}
"""Its version decides what a seed's task is: all nodes must have the same."""
FAMILIES: Final[Mapping[str, float]] = {"basic_arithmetic": 1.0, "chain_sum": 1.0, "gcd": 1.0}
"""Weights, if a run names none: the easiest three that have no end of tasks."""
NEEDS_SETTINGS: Final = frozenset({"composite"})
"""Families that are made of others, which a weight alone does not name."""
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

_INSTRUCTION: Final = "\nWrite the final answer between <answer> and </answer>."
_TAGGED: Final = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class GymEnvironment:
    """A weighted mix of families of reasoning-gym."""

    name = "reasoning-gym"

    def __init__(self, kinds: Mapping[str, float] = FAMILIES) -> None:
        """Raises `ConfigError` without the package, or on a family that it has not."""
        require(PACKAGES, extra="gym", what=f"the environment {self.name!r}")
        self._gym = importlib.import_module("reasoning_gym")
        known = importlib.import_module("reasoning_gym.factory").DATASETS
        for family in kinds:
            if family not in known or family in NEEDS_SETTINGS:
                raise ConfigError(
                    f"reasoning-gym {PACKAGES['reasoning-gym']} has no family {family!r:.40}"
                    " that needs no settings"
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
        """What the package gives for the text between the last tags, or for all of it; nothing
        for what was cut off."""
        if not ended:
            return 0.0
        family, seed = json.loads(task.info)
        dataset, entry = self._entry(family, seed)
        said = (_TAGGED.findall(text) or [text])[-1].strip()
        return min(1.0, max(0.0, float(dataset.score_answer(said, entry))))

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
