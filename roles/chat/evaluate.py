"""``shoal eval FOLDER...``: rewards of models on held-out tasks, with intervals.

Every model gets the same tasks and the same seeds, so what differs is the model. ``pass@k`` is
the unbiased estimate of Chen et al. (arXiv 2107.03374) from ``k`` or more answers; an answer
passes if it earns the full reward. Intervals hold 95 % of 2,000 bootstrap samples of the tasks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

import numpy as np
import trio
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from p2p.concurrency import leaves
from p2p.errors import ConfigError, ShoalError
from p2p.machine import open_world
from p2p.node.usage import (
    BEGINS_AGAIN,
    CommandParser,
    expanded,
    interruptible,
    remark,
    say,
    whole_number,
)
from roles.chat.command import open_voice
from roles.chat.find import Found, find_models
from roles.engines.base import GroupTask, Sampling
from roles.engines.config import MachineLimits
from roles.envs.base import Ration, Task
from roles.envs.client import Answers, WorkerEnvironment, setup_of
from roles.envs.data import pin_data
from roles.envs.mix import EnvironmentPart, EnvironmentSetup
from roles.envs.text import TextModel

if TYPE_CHECKING:
    from roles.chat.voice import Voice

QUESTIONS: Final = "math-exact"
"""The environment that reads a file given as ``--env FILE``."""
TOGETHER: Final = 64
"""Tasks that are answered before the progress moves."""
RESAMPLES: Final = 2_000
FULL: Final = 1.0 - 1e-9

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Measure:
    """A mean over tasks, with the interval that holds 95 % of its bootstrap samples."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f}\n{self.low:.2f}-{self.high:.2f}"


@dataclass(frozen=True, slots=True)
class Result:
    """The rewards of one model."""

    model: str
    tasks: int
    greedy: Measure
    """Reward of the most probable answer."""
    sampled: Measure
    """Mean reward of the drawn answers."""
    passed: Measure
    """pass@1 of the drawn answers."""
    passed_k: Measure
    """Share of tasks that at least one of k answers solved (pass@k)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure models on held-out tasks: those of a run before and after."""
    parser = CommandParser(prog="shoal eval", description=main.__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument(
        "--env", metavar="NAME[=FILE]|FILE",
        help="environment, or a JSONL file of questions and answers (those of the run)",
    )  # fmt: skip
    parser.add_argument(
        "--lm-eval", metavar="TASK", action="append", default=[],
        help="lm-eval's task of this name, or a YAML file of one (pip install lm-eval)",
    )  # fmt: skip
    parser.add_argument(
        "--chat", action="store_true", help="lm-eval's through the model's chat template"
    )
    add_settings(parser, 4)
    parser.add_argument("--show", type=whole_number(0, 1024), default=0, metavar="N",
                        help="print so many questions with their greedy answers")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object a model")
    return interruptible(partial(_main, parser.parse_args(argv)), BEGINS_AGAIN)


def add_settings(parser: CommandParser, k: int) -> None:
    """Add the options of `open_exam`, with ``k`` answers to each task."""
    parser.add_argument("--policy", type=whole_number(0, 2**53), metavar="N", help="of a run")
    parser.add_argument(
        "--tasks", type=whole_number(1, 2**20), metavar="N", help="the first N (all)"
    )
    parser.add_argument(
        "--k", type=whole_number(1, 256), default=k, metavar="K", help=f"answers to each ({k})"
    )
    parser.add_argument("--temperature", type=float, metavar="T", help="(the run's, or 1)")
    parser.add_argument(
        "--tokens", type=whole_number(1, 32_768), metavar="N",
        help="most tokens of an answer (the run's, or 256)",
    )  # fmt: skip
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:N, mps (auto)")


def _main(options: argparse.Namespace) -> int:
    if options.lm_eval:
        return _main_of_lm_eval(options)
    results = []
    for folder, found in _models(options):
        voice = open_voice(found, folder, options.device, has_words=False)
        try:
            results.append(trio.run(_measure, voice, found, options))
        except* ShoalError as errors:
            raise next(leaves(errors)) from None
    if options.json:
        for result in results:
            say(json.dumps(asdict(result)))
        return 0
    Console().print(_table(results, options.k))
    return 0


def _main_of_lm_eval(options: argparse.Namespace) -> int:
    from roles.chat import harness

    table = Table("model", "task", "metric", "value", "error", box=None)
    for folder, found in _models(options):
        voice = open_voice(found, folder, options.device)
        rows = harness.measure(voice, options.lm_eval, options.tasks, is_chat=options.chat)
        if options.json:
            say(json.dumps({"model": found.label, "lm_eval": rows}))
        for task, row in rows.items():
            for metric in row:
                name, _, kind = metric.partition(",")
                error = row.get(f"{name}_stderr{',' * bool(kind)}{kind}")
                if not name.endswith("_stderr") and name != "sample_len":
                    table.add_row(
                        found.label, task, metric, f"{row[metric]:.4f}",
                        "" if error is None else f"{error:.4f}",
                    )  # fmt: skip
    if not options.json:
        Console().print(table)
    return 0


def _models(options: argparse.Namespace) -> list[tuple[Path, Found]]:
    found: list[tuple[Path, Found]] = []
    for name in options.folders:
        folder = expanded(name)
        models = find_models(folder, options.policy)
        if models.first is not None and models.first.path != models.newest.path:
            found.append((folder, models.first))
        found.append((folder, models.newest))
    return found


@dataclass(frozen=True, slots=True)
class Exam:
    """A model and an environment that pays its answers."""

    voice: Voice
    environment: WorkerEnvironment
    setup: EnvironmentSetup
    ends: Sequence[int]
    tokens: int
    """Most tokens of an answer."""
    temperature: float

    async def sit(
        self, tasks: Sequence[tuple[int, Task]], draws: int, temperature: float
    ) -> tuple[Answers, list[float]]:
        """Return numbered tasks with ``draws`` answers to each, and the reward of each answer.
        The draws of a task follow from its number."""
        asked = [_asked(number, task, draws) for number, task in tasks]
        answers = await trio.to_thread.run_sync(
            self.voice.answers, asked, Sampling(temperature, self.tokens, draws), self.ends,
            abandon_on_cancel=True,
        )  # fmt: skip
        given = list(zip((task for _, task in tasks), answers, strict=True))
        return given, await self.environment.rewards(given)


@asynccontextmanager
async def open_exam(
    voice: Voice, found: Found, options: argparse.Namespace
) -> AsyncIterator[Exam]:
    """Open the environment that ``options`` name, with the run's settings or theirs."""
    ends, temperature, tokens = voice.ends, 1.0, 256
    if found.run is not None:
        terms = found.run.terms
        ends = terms.model.end_tokens
        temperature, tokens = terms.sampling.temperature, terms.sampling.max_new_tokens
    temperature = temperature if options.temperature is None else options.temperature
    tokens = min(options.tokens or tokens, voice.context - 1)
    setup = _setup(voice, found, options.env, tokens)
    with TemporaryDirectory(prefix="shoal-eval-") as place:
        async with open_world(place) as world, AsyncExitStack() as stack:
            environment = WorkerEnvironment(
                world, setup, Ration(), stack, vocabulary=voice.shape.vocabulary,
                context=voice.context, required=False,
            )  # fmt: skip
            await environment.open()
            yield Exam(voice, environment, setup, ends, tokens, temperature)


async def _measure(voice: Voice, found: Found, options: argparse.Namespace) -> Result:
    async with open_exam(voice, found, options) as exam:
        tasks = (await exam.environment.evaluation())[: options.tasks]
        greedy: list[float] = []
        drawn: list[float] = []
        for start in range(0, len(tasks), TOGETHER):
            part = list(enumerate(tasks))[start : start + TOGETHER]
            given, paid = await exam.sit(part, 1, 0.0)
            greedy += paid
            if start < options.show:
                said = await exam.environment.texts(given[: options.show - start])
                for (question, answer), one in zip(said, paid, strict=False):
                    remark(f"{question.strip()}\n  -> {answer.strip()}  ({one:g})")
            drawn += (await exam.sit(part, options.k, exam.temperature))[1]
            remark(f"{found.label}: {len(greedy)} of {len(tasks)} tasks")
    return result_of(found.label, np.array(greedy), np.array(drawn).reshape(len(tasks), -1))


def _asked(number: int, task: Task, draws: int) -> GroupTask:
    seeds = [hashlib.sha256(f"eval {number} {draw}".encode()).digest() for draw in range(draws)]
    return GroupTask(number, tuple(task.prompt), tuple(seeds))


def _setup(voice: Voice, found: Found, env: str | None, tokens: int) -> EnvironmentSetup:
    """Return the setup of the run's environments, or of the named environment.

    Raises:
        ConfigError: There is no such environment.
    """
    model_path = found.path.absolute()  # a confined process reads absolute paths only
    folder = str(model_path) if voice.tokenizer is not None else None
    if env is None:
        if found.run is None or not found.run.terms.environments:
            raise ConfigError(
                f"{found.path} is of no run that has tasks: say --env NAME, or --env FILE with"
                " a file of questions"
            )
        data = str(model_path.parent)
        for place in model_path.parents:
            if (place / "data").is_dir():
                data = str(place / "data")
                break
        setup = setup_of(found.run, MachineLimits(environment_data=data), folder)
        model = setup.model
        return replace(setup, model=model and replace(model, max_new_tokens=tokens))
    name, _, file = env.partition("=")
    if not file and Path(name).suffix and expanded(Path(name)).exists():
        name, file = QUESTIONS, name
    path = expanded(Path(file)).absolute() if file else None
    part = EnvironmentPart(name=name, data=None if path is None else pin_data(str(path)))
    model = None
    if folder is not None:
        model = TextModel(
            folder=folder, end_tokens=voice.ends, vocabulary=voice.shape.vocabulary,
            context=voice.context, max_new_tokens=tokens,
        )  # fmt: skip
    return EnvironmentSetup(
        parts=(part,), model=model, folder="" if path is None else str(path.parent)
    )


def result_of(label: str, greedy: Floats, drawn: Floats) -> Result:
    """Sum up the rewards of one model.

    Args:
        label: Name of the model for people.
        greedy: Rewards of the most probable answers, (tasks,).
        drawn: Rewards of the drawn answers, (tasks, k).
    """
    right = (drawn >= FULL).sum(axis=1)
    count = drawn.shape[1]
    at_k = np.array([pass_at(count, int(one), count) for one in right])
    return Result(
        label, len(greedy), measure(greedy), measure(drawn.mean(axis=1)),
        measure(right / count), measure(at_k),
    )  # fmt: skip


def pass_at(answers: int, right: int, k: int) -> float:
    """Return pass@k: the chance that at least one of ``k`` answers is right."""
    if answers - right < k:
        return 1.0
    return 1.0 - math.comb(answers - right, k) / math.comb(answers, k)


def measure(values: Floats) -> Measure:
    """Return the mean of the tasks' values with its bootstrap interval."""
    rng = np.random.default_rng(0)
    picks = rng.integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(values[picks].mean(axis=1), (0.025, 0.975))
    return Measure(float(values.mean()), float(low), float(high))


def _table(results: Sequence[Result], k: int) -> Table:
    table = Table(
        box=None, caption_justify="left", caption="below each mean, its 95 % interval"
    )
    for name in ("model", "tasks", "greedy", "sampled", "pass@1", f"pass@{k}"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for one in results:
        cells = (one.greedy, one.sampled, one.passed, one.passed_k)
        table.add_row(one.model, str(one.tasks), *map(str, cells))
    return table
