"""A foreign trainer in the learner's place: ``kind = "external"`` in learner.toml.

The node hands a step's groups to that trainer and takes its weights by files of one folder
(`roles.shared.exchange` has their names). Everything else stays with the node's own engine,
which goes on scoring while the trainer learns: it loads each version that comes, refuses what
is not this model, writes it as the policy that is published, and answers the evaluations.

A step is on the node's disk before it is handed out (`roles.trainer.intake`), and a version is
taken once: ``taken.json`` says up to which, and is written when the policy is on disk. So
whoever is killed finds the same groups and the same versions again.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from p2p.errors import StorageError
from p2p.node.tables import write_table
from p2p.world import World
from roles.contract import Run
from roles.contract.core.shape import Dtype
from roles.engines.base import (
    Answers,
    EngineError,
    GroupTask,
    Learner,
    Sampling,
    StepReport,
    TrainingGroup,
    seen_by_algorithm,
)
from roles.engines.config import EngineConfig
from roles.models.bundle import CONFIG, WEIGHTS as WEIGHTS_FILE
from roles.models.config import ModelConfig, write_config
from roles.rl.algorithms.find import find_algorithm
from roles.shared import exchange
from roles.shared.durable import Durable
from roles.shared.exchange import CHECKPOINT, GROUPS, REPORT, TAKEN, TASK, WEIGHTS, Row, name_of

logger = logging.getLogger(__name__)

FOLDER: Final = "trainer/external"
"""Folder on the node's disk that the trainer is given."""
_LARGEST: Final = 1e300
"""Largest number that is accepted in a report: JSON has integers that no float holds."""
_WHO: Final = re.compile(r"[0-9A-Za-z]{1,64}")
"""Allowed name of a trainer, which becomes part of a file's name."""
POLL: Final = 0.05
"""Seconds between two looks at the folder; steps take seconds."""
MAX_JSON: Final = 1 << 20
"""Most bytes of a file that the trainer writes, except weights: a report of 10,000 numbers."""


class ExternalLearner:
    """Implements `roles.engines.base.Learner` by a shared folder and the node's own engine."""

    def __init__(self, engine: Learner, world: World, config: EngineConfig, run: Run) -> None:
        """Make a learner. ``engine`` computes everything that the foreign trainer does not."""
        assert config.learner is not None
        self._engine, self._world, self._disk = engine, world, world.disk
        self._config, self._recipe, self._run = config, config.learner, run
        self._durable = Durable(world, "trainer")
        self._objective = find_algorithm(config.learner.algorithm, config.learner.options)
        self._base = ""
        self._step = 0
        """Step of the policy that the engine holds."""
        self._taken = 0
        """Newest version whose policy is on the node's disk; all before it are as well."""
        self._first = 0
        """Version of the model that the trainer started with, from which it counts its own
        steps."""
        self._policy = ""
        self._life = self._who = ""
        self._finished = 0
        """Step that the trainer had finished, as it said when it came."""
        self._is_ready = False
        self._complaint = ""

    @property
    def warning(self) -> str:
        if self._complaint or self._is_ready:
            return self._complaint
        return f"waits for your own trainer: start it on {self._disk.locate(FOLDER)}"

    @property
    def writes_waiting(self) -> int:
        return self._engine.writes_waiting + self._durable.waiting

    async def open(self, checkpoint: str, base: str = "") -> int:
        """Wait for a trainer that can go on, and open the engine; see
        `roles.engines.base.Learner`."""
        self._base = base
        if await self._disk.size(_at(TAKEN)) is None:
            self._step = await self._engine.open(_at("none"), base)
        else:
            try:
                taken = json.loads(await self._disk.read(_at(TAKEN)))
                self._step, self._first = int(taken["step"]), int(taken["first"])
                self._policy = str(taken["policy"])
            except (ValueError, KeyError, TypeError) as error:
                raise EngineError(f"{self._disk.locate(_at(TAKEN))} is damaged") from error
            await self._engine.adopt(self._policy, self._step, base)
        self._taken = self._step
        await self._greet()
        return self._step

    async def adopt(self, weights: str, step: int, base: str = "") -> float:
        """Let the trainer begin anew from ``weights``, unless it is at ``step``; see
        `roles.engines.base.Learner`."""
        self._base = base
        changed = await self._engine.adopt(weights, step, base)
        self._step, self._policy = step, weights
        await self._note_taken()
        await self._greet()
        return changed

    async def step(self, groups: Sequence[TrainingGroup]) -> StepReport:
        """Hand ``groups`` out and wait for the version; see `roles.engines.base.Learner`."""
        step = self._step + 1
        content = exchange.encode_groups(step, self._rows(groups))
        path = _at(name_of(GROUPS, step))
        if await self._disk.size(path) is None:
            await self._durable.insist(partial(self._disk.replace, path, content))
            logger.info("external_step_given step=%d", step)
        elif await self._disk.read(path) != content:
            raise EngineError(
                f"{self._disk.locate(path)} was handed out with other groups: restore the"
                " trainer's data from a copy, or begin a new run"
            )
        while True:
            names = await self._look()
            wrong, said = self._out_of_turn(names, step), dict[str, Any]()
            if not wrong and self._has_come(names, step):
                try:
                    if name_of(REPORT, step) in names:
                        said = await self._read(name_of(REPORT, step))
                    version = _at(name_of(WEIGHTS, step))
                    changed = await self._engine.adopt(version, step, self._base)
                    break
                except EngineError as error:
                    wrong = (str(error), [name_of(WEIGHTS, step), name_of(REPORT, step)])
            if wrong:
                await self._refuse(*wrong)
            else:
                await self._world.sleep(POLL)
        self._step = step
        tokens = sum(len(one.tokens) for group in groups for one in group.completions)
        return _report(step, said, tokens, changed)

    async def save(self, checkpoint: str, weights: str) -> None:
        """Write the policy; see `roles.engines.base.Learner`. The trainer keeps its own
        checkpoint, and weights that are there are not written again."""
        if not weights:
            return
        if not await self._disk.walk(weights, 1):
            await self._engine.save("", weights)
        self._policy = weights
        await self._note_taken()
        names = await self._disk.list(FOLDER)
        covered = max(exchange.steps_of(CHECKPOINT, names), default=0)
        limits = {WEIGHTS: self._taken, REPORT: self._taken, GROUPS: covered,
                  CHECKPOINT: covered - 1}  # fmt: skip
        for kind, last in limits.items():
            for step in exchange.steps_of(kind, names):
                if step <= last:
                    await self._disk.remove(_at(name_of(kind, step)))

    async def answer(self, tasks: Sequence[GroupTask], sampling: Sampling) -> list[Answers]:
        return await self._engine.answer(tasks, sampling)

    async def _greet(self) -> None:
        """Write the task for the trainer, and wait for a trainer that can go on from here."""
        await self._write_task()
        logger.info("external_trainer_awaited folder=%s", self._disk.locate(FOLDER))
        while not self._is_ready:
            await self._look()
            await self._world.sleep(POLL)

    async def _write_task(self) -> None:
        self._life, self._who = self._world.entropy(8).hex(), ""
        self._is_ready = False
        for name in await self._disk.list(FOLDER):
            if name.startswith(("ready-", "refused-")):
                await self._disk.remove(_at(name))
        sampling, has_base = self._config.sampling, bool(self._base)
        task = {
            "format": exchange.FORMAT,
            "life": self._life,
            "run": self._run.id.hex(),
            "name": self._run.name,
            "model": self._disk.locate(await self._model()),
            "first": self._first,
            "dtype": "bfloat16" if has_base else "float32",
            "steps": sampling.steps,
            "groups": self._recipe.groups,
            "group_size": sampling.group_size,
            "temperature": sampling.temperature,
            "max_new_tokens": sampling.max_new_tokens,
            "end_tokens": list(self._config.end_tokens),
            "learner": write_table(self._recipe),
        }
        await self._replace(TASK, task)

    async def _model(self) -> str:
        """Return the folder that the trainer begins with: the base, or a folder made of the
        engine's policy."""
        if self._base and not self._first:
            return self._base
        folder = _at(f"model-{self._first:06d}")
        if await self._disk.size(f"{folder}/{CONFIG}") is not None:
            return folder
        if self._step != self._first:
            raise EngineError(f"{self._disk.locate(folder)} is gone: restore it from a copy")
        if self._base:
            await self._engine.save("", folder)
            return folder
        await self._engine.save("", f"{folder}/{WEIGHTS_FILE}")
        config = self._config
        made = ModelConfig(
            shape=config.shape,
            context=config.context,
            dtype=Dtype.FLOAT32.value,
            end_tokens=config.end_tokens,
        )
        await self._disk.replace(f"{folder}/{CONFIG}", write_config(made))
        return folder

    async def _look(self) -> list[str]:
        """Return the names in the folder. A trainer that is new in it is checked."""
        names = await self._disk.list(FOLDER)
        if exchange.ready(self._life) not in names:
            return names
        try:
            said = await self._read(exchange.ready(self._life))
            who, run, finished = str(said["who"]), said["run"], int(said["step"])
        except (EngineError, KeyError, ValueError, TypeError, OverflowError):
            return names  # of another format, or torn by hand: nobody has come
        if who == self._who or not _WHO.fullmatch(who):
            return names
        self._who, self._finished = who, finished
        given = max([self._taken, *exchange.steps_of(GROUPS, names)])
        there = set(exchange.steps_of(GROUPS, names))
        gone = [one for one in range(finished + 1, self._taken + 1) if one not in there]
        if run != self._run.id.hex():
            await self._refuse(
                f"your trainer is of another run than {self._run.name!r}: give it an output"
                " folder of its own, and this run's folder", []
            )  # fmt: skip
        elif finished > given:
            await self._refuse(
                f"your trainer has learnt step {finished}, and was given none after {given}:"
                " start it with an empty output folder", []
            )  # fmt: skip
        elif gone or finished < self._first:
            self._first = self._taken
            await self._note_taken()
            await self._write_task()
            self._who = who  # should it see the new task first
            await self._refuse(
                f"your trainer begins after step {finished}, and the groups of the next one are"
                f" gone: start it again with an empty output folder; it begins with the weights"
                f" of step {self._taken}", []
            )  # fmt: skip
        else:
            self._is_ready, self._complaint = True, ""
            logger.info("external_trainer_ready step=%d", finished)
        return names

    def _has_come(self, names: Sequence[str], step: int) -> bool:
        """Return True if the version of ``step`` is there. A trainer that died between the
        weights and the report, and began again after ``step``, does not write the report any
        more."""
        reported = name_of(REPORT, step) in names or self._finished >= step
        return self._is_ready and reported and name_of(WEIGHTS, step) in names

    def _out_of_turn(self, names: Sequence[str], step: int) -> tuple[str, list[str]] | None:
        """Return the fault of the steps that were handed in, in words, and the names to
        remove."""
        versions = exchange.steps_of(WEIGHTS, names)
        for one in versions + exchange.steps_of(REPORT, names):
            if one > step:
                return (
                    f"your trainer handed in step {one}, and was given none after {step}: count"
                    " versions from its global_step, as roles.trl does",
                    [name_of(WEIGHTS, one), name_of(REPORT, one)],
                )
        for one in versions:
            if one <= self._taken:
                return (
                    f"your trainer handed in version {one} a second time: the first one is out,"
                    " and no version is written twice",
                    [name_of(WEIGHTS, one), name_of(REPORT, one)],
                )
        return None

    async def _refuse(self, reason: str, names: Sequence[str]) -> None:
        """Tell the trainer's process to end, and remove the files ``names``."""
        logger.error("external_trainer_refused %s", reason)
        self._complaint, self._is_ready = reason, False
        for name in names:  # first: the next trainer may write at once what it is told
            await self._disk.remove(_at(name))
        if self._who:
            await self._replace(exchange.refused(self._who), {"reason": reason})

    def _rows(self, groups: Sequence[TrainingGroup]) -> list[list[Row]]:
        ends, limit = self._config.end_tokens, self._config.sampling.max_new_tokens
        seen = [seen_by_algorithm(group, ends, limit) for group in groups]
        made = []
        for group, advantages in zip(groups, self._objective.advantages(seen), strict=True):
            rows = []
            for answer, reward, advantage in zip(
                group.completions, group.rewards, advantages, strict=True
            ):
                text, places = answer.text
                drawn = len(group.prompt) + np.array(places, dtype=np.int64)
                ids = np.array((*group.prompt, *text), dtype=np.uint32)
                mask = np.zeros(len(ids), dtype=np.uint8)
                logprobs = np.zeros(len(ids), dtype=np.float32)
                mask[drawn], logprobs[drawn] = 1, answer.logprobs
                rows.append(Row(ids, mask, logprobs, reward, float(advantage)))
            made.append(rows)
        return made

    async def _note_taken(self) -> None:
        self._taken = self._step
        taken = {"step": self._step, "policy": self._policy, "first": self._first}
        await self._replace(TAKEN, taken)

    async def _replace(self, name: str, table: dict[str, Any]) -> None:
        data = json.dumps(table).encode()
        await self._durable.insist(partial(self._disk.replace, _at(name), data))

    async def _read(self, name: str) -> dict[str, Any]:
        """Return the JSON object in a file. Raises `EngineError` for other content."""
        try:
            found = json.loads(await self._disk.read(_at(name), 0, MAX_JSON + 1))
        except (ValueError, RecursionError, FileNotFoundError, StorageError) as error:
            raise EngineError(f"{name} of your trainer cannot be read: {error}") from error
        if not isinstance(found, dict):
            raise EngineError(f"{name} of your trainer is no JSON object")
        return found


def _at(name: str) -> str:
    return f"{FOLDER}/{name}"


def _report(step: int, said: dict[str, Any], tokens: int, changed: float) -> StepReport:
    """Return the trainer's report: figures by the names of `StepReport`, and other metrics."""
    numbers = {
        name: float(value)
        for name, value in said.items()
        if type(value) in (int, float) and abs(value) < _LARGEST
    }
    known = {
        name: numbers.pop(name, 0.0)
        for name in ("loss", "k3", "ratio_max", "clipped", "capped", "entropy", "gradient_norm")
    }
    numbers.pop("step", None)
    return StepReport(step=step, tokens=tokens, changed=changed, metrics=numbers, **known)
