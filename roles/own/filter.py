"""``shoal rl filter FOLDER --env NAME=FILE --out KEPT``: the lines that a model can learn from.

Answers that are all right, or all wrong, have no advantage: GRPO learns nothing from them. The
filter draws ``k`` answers to each line and keeps those that some of them solve, as INTELLECT-2
did before its training. Held-out lines (one in eight, by their hash) are kept as they are:
nothing is learnt from them, and evaluations before and after the filter are the same.
"""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from p2p.concurrency import leaves
from p2p.errors import ConfigError, ShoalError
from p2p.node.usage import (
    BEGINS_AGAIN,
    FAILED,
    CommandParser,
    check_target,
    expanded,
    interruptible,
    remark,
    whole_number,
    write_text,
)
from roles.chat.command import open_voice
from roles.chat.evaluate import FULL, TOGETHER, Exam, add_settings, open_exam
from roles.chat.find import Found, find_models
from roles.envs.base import Task, make_environment
from roles.envs.text import is_held_out, pack_text_task

if TYPE_CHECKING:
    from roles.chat.voice import Voice


def main(argv: Sequence[str] | None = None) -> int:
    """Keep the tasks of a run that a model solves sometimes."""
    parser = CommandParser(prog="shoal rl", description=main.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    sift = commands.add_parser("filter", help="keep lines that some of k answers solve")
    sift.add_argument("folder", type=Path, metavar="FOLDER", help="of a run, node or model")
    sift.add_argument(
        "--env", required=True, metavar="NAME=FILE|FILE", help="the file of a run's environment"
    )
    sift.add_argument("--out", type=Path, required=True, metavar="KEPT", help="JSON lines")
    sift.add_argument("--least", type=whole_number(0, 256), default=1, help="right answers (1)")
    sift.add_argument("--most", type=whole_number(0, 256), help="right answers (K - 1)")
    add_settings(sift, 8)
    return interruptible(partial(_main, parser.parse_args(argv)), BEGINS_AGAIN)


def _main(options: argparse.Namespace) -> int:
    most = options.k - 1 if options.most is None else options.most
    if not options.least <= most <= options.k:
        raise ConfigError(
            f"no line has {options.least} to {most} right answers of {options.k}: --least and"
            " --most lie between 0 and --k, in this order"
        )
    if options.env.endswith(".capsule"):
        raise ConfigError("a capsule makes its own tasks: it has no lines to keep")
    check_target("--out", options.out)
    folder = expanded(options.folder)
    found = find_models(folder, options.policy).newest
    voice = open_voice(found, folder, options.device)
    try:
        lines, right = trio.run(_sift, voice, found, options)
    except* ShoalError as errors:
        raise next(leaves(errors)) from None
    kept = [at for at, count in right.items() if options.least <= count <= most]
    held = sum(at not in right for at in range(len(lines)))
    never, always = (sum(one == all_of for one in right.values()) for all_of in (0, options.k))
    remark(
        f"{len(kept):,} of {len(right):,} lines kept: {options.least} to {most} of"
        f" {options.k} answers are right ({never:,} are never solved, {always:,} always);"
        f" {held:,} held-out lines stay"
    )
    if not kept or not held:
        remark("no run can use that: nothing is written")
        return FAILED
    write_text("--out", options.out, "\n".join(
        line for at, line in enumerate(lines) if at in kept or at not in right
    ))  # fmt: skip
    return 0


async def _sift(
    voice: Voice, found: Found, options: argparse.Namespace
) -> tuple[list[str], dict[int, int]]:
    """Return the lines of the file, and how many answers are right of those to learn from."""
    async with open_exam(voice, found, options) as exam:
        lines, tasks, right = _tasks(exam, options.tasks)
        for start in range(0, len(tasks), TOGETHER):
            part = tasks[start : start + TOGETHER]
            _, paid = await exam.sit(part, options.k, exam.temperature)
            for place, (at, _) in enumerate(part):
                own = paid[place * options.k : (place + 1) * options.k]
                right[at] = sum(one >= FULL for one in own)
            remark(f"{found.label}: {start + len(part):,} of {len(tasks):,} lines")
    return lines, right


def _tasks(
    exam: Exam, most: int | None
) -> tuple[list[str], list[tuple[int, Task]], dict[int, int]]:
    """Return the first lines, the tasks of those that are no held-out ones, and the lines that
    are too long for the model, with 0."""
    (part,) = exam.setup.parts
    if part.data is None:
        raise ConfigError(
            f"the environment {part.name!r} reads no FILE: there is no line to keep"
        )
    data = Path(exam.setup.folder, part.data.name).read_bytes()
    environment = make_environment(part.name, data=data)
    if not hasattr(environment, "task_of"):
        raise ConfigError(f"lines of the environment {part.name!r} cannot be tried one by one")
    names, tokenizer = inspect.signature(environment.task_of).parameters, exam.voice.tokenizer
    assert tokenizer is not None
    lines = [line.decode() for line in data.splitlines() if line.strip()][:most]
    tasks, right = list[tuple[int, Task]](), dict[int, int]()
    for at, row in enumerate(map(json.loads, lines)):
        if not is_held_out(row.get("question", "")):
            task = environment.task_of(**{name: row[name] for name in names if name in row})
            prompt = tuple(tokenizer.chat(task.messages, task.prefill))
            if len(prompt) + exam.tokens > exam.voice.context:
                right[at] = 0
                continue
            source = pack_text_task(task)
            tasks.append((at, Task(prompt, source=source, environment=part.name)))
    return lines, tasks, right
