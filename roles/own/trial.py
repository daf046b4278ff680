"""Trial of a run of text before it is signed, to find faults that would keep its nodes from
working.

One task of each environment goes its whole way: chat template, tokenizer, engine, reward. What
is tried is what nodes do, with the same processes; a model that cannot be asked, or whose right
answers the run's end tokens would cut, costs a sentence now and not a run that stands still.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import trio

from p2p.concurrency import leaves
from p2p.errors import ConfigError, ShoalError
from p2p.machine import open_world
from p2p.node.usage import remark
from p2p.world import World
from roles.contract import Run
from roles.engines.base import EngineError, GroupTask, draw_all
from roles.engines.client import open_engine
from roles.engines.config import GIB, MachineLimits, engine_of
from roles.engines.hardware import free_memory
from roles.envs.base import Ration, Task
from roles.envs.client import WorkerEnvironment, setup_of
from roles.envs.contained import EnvironmentFailed
from roles.envs.text import unpack_text_task_untrusted
from roles.models.errors import NO_TEMPLATE, BadModel
from roles.models.trial import try_tokenizer
from roles.own.layout import lay_base
from roles.own.view import size
from roles.protocol.core.assignment import run_sampling
from roles.protocol.model_files import FOLDER

TASKS = 4  # of each environment that are made; the first is answered
TOKENS = 8  # of that answer at most: a word or two


def try_run(run: Run, node: Path, data: str) -> None:
    """Try to open a run as its nodes would.

    Its base lies in the folder of a ``node``, its questions in ``data``.

    Raises:
        ConfigError: No node could work on ``run``.
        BadModel: The model's folder cannot be used.
    """
    trouble: list[BaseException] = []
    try:
        with TemporaryDirectory(prefix="trial-", dir=node.parent) as place:
            lay_base(node / FOLDER, Path(place) / FOLDER, run)
            trio.run(_try_run, run, Path(place), node / FOLDER, data)
    except* ShoalError as errors:
        trouble.extend(leaves(errors))
    if trouble:
        raise trouble[0]


async def _try_run(run: Run, place: Path, base: Path, data: str) -> None:
    model = run.terms.model
    setup = setup_of(run, MachineLimits(environment_data=data), str(base))
    facts = try_tokenizer(base, model.end_tokens)
    if setup.parts and not facts.has_template:
        raise BadModel(NO_TEMPLATE)
    for source, tokens in facts.end_tokens.items():
        for token in set(tokens).difference(model.end_tokens):
            remark(
                f"token {token} ends answers by {source}, and the draft's end_tokens lack it:"
                " an answer that ends with it goes on to max_new_tokens"
            )
    async with open_world(place) as world, AsyncExitStack() as stack:
        asked = list[tuple[str, WorkerEnvironment, Task]]()
        for part in setup.parts:
            alone = replace(setup, parts=(part,))
            environment = WorkerEnvironment(
                world, alone, Ration(), stack, vocabulary=model.shape.vocabulary,
                context=model.context, required=False,
            )  # fmt: skip
            await environment.open()
            try:
                tasks = await environment.tasks([bytes([one]) * 32 for one in range(TASKS)])
                await environment.evaluation()
            except EnvironmentFailed as error:
                raise ConfigError(
                    f"this model cannot be asked what {alone} asks: {error}"
                ) from error
            _check_words(part.name, model.end_tokens, base, tasks)
            asked.append((part.name, environment, tasks[0]))
        drawn = await _draw(world, run, [task for *_, task in asked])
        for (name, environment, task), answer in zip(asked, drawn, strict=True):
            try:
                payment = await environment.try_to_pay([(task, [answer])])
            except EnvironmentFailed as error:
                raise ConfigError(f"{name!r} pays no answer: {error}") from error
            if payment.failures:
                remark(f"{payment.said}: such an answer earns nothing")


def _check_words(name: str, ends: tuple[int, ...], base: Path, tasks: list[Task]) -> None:
    """Check that prompts tell questions apart, and that tokens tell answers apart.

    Raises:
        ConfigError: They do not, or an answer holds an end token.
    """
    asked = [unpack_text_task_untrusted(task.source) for task in tasks]
    said = [[(turn.role, turn.content) for turn in one.messages] for one in asked]
    answers = [one.answer.strip() for one in asked]
    questions = [
        (turns, one.prefill, f" {answer}")
        for turns, one, answer in zip(said, asked, answers, strict=True)
    ]
    found = try_tokenizer(base, ends, questions)
    if _merges(said, found.prompts):
        raise ConfigError(
            f"different questions of {name!r} make one prompt: the chat template leaves the"
            " question out, or the tokenizer has no tokens for its words"
        )
    if _merges(answers, found.answers):
        raise ConfigError(
            f"different answers of {name!r} have the same tokens: the tokenizer has none for"
            " their words"
        )
    for answer, tokens in zip(answers, found.answers, strict=True):
        if cut := set(tokens) & set(ends):
            raise ConfigError(
                f"end_tokens names token {min(cut)}, which is part of a right answer"
                f" ({answer!r:.60}): such answers would be cut, and earn nothing; leave it out"
                " of [model] in the draft"
            )


def _merges(texts: Sequence[object], tokens: Sequence[Sequence[int]]) -> bool:
    """Return True if different texts have the same tokens."""
    return len(set(map(tuple, tokens))) < len(set(map(repr, texts)))


async def _draw(world: World, run: Run, tasks: list[Task]) -> list[tuple[int, ...]]:
    """Return the answer of the base itself; empty if this machine cannot compute it."""
    model = run.terms.model
    needs = 4 * model.shape.parameters + GIB
    lack = ""
    if importlib.util.find_spec("torch") is None:
        lack = "this Python lacks torch, which nodes need"
    elif free_memory() < needs:
        lack = f"it needs {size(needs)} of free memory"
    if lack:
        remark(f"the engine was not tried: {lack}")
        return [model.end_tokens[:1]] * len(tasks)
    sampling = replace(run_sampling(run), group_size=1, max_new_tokens=TOKENS, turns=1, heard=0)
    groups = [GroupTask(at, task.prompt, (bytes(32),)) for at, task in enumerate(tasks)]
    try:
        engine_of(run)
    except ConfigError as error:
        remark(f"of each node's machine {error}")
    config = engine_of(run, MachineLimits(memory=1 << 62, max_new_tokens=1 << 62))
    try:
        async with open_engine(world, config, name="trial", learns=False) as engine:
            await engine.load(FOLDER)
            drawn = await draw_all(engine, groups, sampling)
    except EngineError as error:
        raise BadModel(f"the engine cannot compute with this model: {error}") from error
    return [one.completions[0].tokens for one in drawn]
