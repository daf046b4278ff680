"""``shoal envs check NAME [FILE]`` tries what an environment pays, before a model learns it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from p2p.errors import ConfigError, ShoalError
from p2p.node.usage import (
    FAILED,
    STANDARD_OUTPUT,
    WRONG_USAGE,
    CommandParser,
    check_target,
    complain,
    interruptible,
    say,
    write_text,
)
from roles.envs.base import make_environment
from roles.envs.check import Report, check_rewards, why_not_repeatable
from roles.envs.contained import EnvironmentFailed
from roles.envs.data import pin_data, read_data
from roles.envs.questions import ExactEnvironment, read_questions
from roles.envs.text import TextTask, is_text

MOST_TASKS: Final = 256
"""Tasks that are tried unless told otherwise: of an evaluation, evenly. Of a file all are."""
SHOWN: Final = 10
"""Faults of a kind that are printed; ``--json`` has all."""
FILLER: Final = b"".join(
    b'{"question": "%d", "answer": "1"}\n' % number for number in range(64)
)
"""What an environment of questions is made with while the answers of a file are tried."""


def main(argv: Sequence[str] | None = None) -> int:
    """Try an environment: what right answers and constant texts earn.

    Returns 0, or 1 if there is a fault, or 2 if the command makes no sense.
    """
    return interruptible(partial(_main, argv))


def _main(argv: Sequence[str] | None) -> int:
    parser = CommandParser(prog="shoal envs", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="try what an environment pays")
    check.add_argument(
        "name", help="math, math-exact, arithmetic, reasoning-gym or an installed one"
    )
    check.add_argument(
        "file",
        type=Path,
        nargs="?",
        help="questions of math and math-exact: JSON lines or Parquet",
    )
    check.add_argument("--kinds", help="kinds of tasks, by commas; left out: its own")
    check.add_argument("--tasks", type=int, help=f"tasks to try; of an evaluation {MOST_TASKS}")
    check.add_argument("--out", type=Path, help="write the lines that are good, as JSON lines")
    check.add_argument("--json", action="store_true", help="all that was found, for machines")
    options = parser.parse_args(argv)
    try:
        if options.tasks is not None and options.tasks < 1:
            raise ConfigError(f"--tasks must be at least 1, not {options.tasks}")
        if options.json and options.out == STANDARD_OUTPUT:
            raise ConfigError(
                "--json and --out - cannot both have standard output: name a file"
            )
        check_target("--out", options.out)
        return _check(options)
    except ConfigError as error:
        complain(error)
        return WRONG_USAGE
    except ShoalError as error:
        complain(error)
        return FAILED


def _check(options: argparse.Namespace) -> int:
    environment, tasks, refused = _open(options)
    if not is_text(environment):
        raise ConfigError(
            f"the environment {options.name!r} is of tokens: its answers are no text"
        )
    if why := why_not_repeatable(environment):
        raise EnvironmentFailed(why)
    report = check_rewards(environment, tasks, _progress())
    if options.json:
        say(json.dumps(_table(options.name, report, refused)))
    elif options.out == STANDARD_OUTPUT:
        print(_summary(options.name, report, refused), file=sys.stderr)  # noqa: T201
    else:
        say(_summary(options.name, report, refused))
    return 0 if report.is_sound else FAILED


def _open(options: argparse.Namespace) -> tuple[Any, list[TextTask], list[str]]:
    """Return an environment, the tasks to try, and sentences about lines that are refused."""
    kinds = [kind.strip() for kind in (options.kinds or "").split(",") if kind.strip()]
    made: dict[str, object] = {"kinds": dict.fromkeys(kinds, 1.0)} if kinds else {}
    if options.file is None:
        if options.out is not None:
            raise ConfigError("--out writes the good lines of a FILE: name one")
        environment = make_environment(options.name, **made)
        tasks = environment.evaluation()
        most = min(options.tasks or MOST_TASKS, len(tasks))
        return environment, [tasks[at * len(tasks) // most] for at in range(most)], []
    data = read_data(pin_data(str(options.file)), str(options.file.parent))
    environment = make_environment(options.name, **made, data=FILLER)
    if not isinstance(environment, ExactEnvironment):
        raise ConfigError(f"the environment {options.name!r} reads no FILE of questions here")
    questions, refused = read_questions(data, answers_alone=True)
    lines = (json.dumps({"question": asked, "answer": answer}) for asked, answer in questions)
    write_text("--out", options.out, "\n".join(lines))
    tasks = [environment.task_of(*one) for one in questions[: options.tasks]]
    return environment, tasks, refused


def _progress() -> Callable[[int, int], object]:
    """Return what shows a person that something is done."""
    if not sys.stderr.isatty():
        return lambda done, of: None

    def show(done: int, of: int) -> None:
        end = "\r" if done < of else "\r\x1b[K"
        print(f"\rtried {done:,} of {of:,} tasks", end=end, file=sys.stderr, flush=True)  # noqa: T201

    return show


def _faults(report: Report) -> dict[str, list[str]]:
    return {
        "does not earn itself": report.earns_nothing,
        "pays a fragment": report.pays_fragments,
        "pays a constant": report.pays_constants,
    }


def _table(name: str, report: Report, refused: Sequence[str]) -> dict[str, object]:
    return {
        "environment": name,
        "tasks": report.tasks,
        "without_answer": report.without_answer,
        "refused": list(refused),
        "earns_itself": report.tasks - report.without_answer - len(report.earns_nothing),
        **{what.replace(" ", "_"): faults for what, faults in _faults(report).items()},
    }


def _summary(name: str, report: Report, refused: Sequence[str]) -> str:
    answers = report.tasks - report.without_answer
    lines = [
        f"environment      {name}, {report.tasks:,} tasks",
        f"earns itself     {answers - len(report.earns_nothing):,} of {answers:,} answers",
    ]
    lines += [f"pays a fragment  {len(report.pays_fragments):,}"]
    lines += [f"pays a constant  {len(report.pays_constants):,}"]
    if report.without_answer:
        lines += [f"without answer   {report.without_answer:,} tasks: many answers are right"]
    for what, said in {**_faults(report), "refused": refused}.items():
        lines += [f"{what}: {one}" for one in said[:SHOWN]]
        lines += [f"{what}: {len(said) - SHOWN:,} more (--json has all)"] * (len(said) > SHOWN)
    if refused:
        lines += [
            f"refused {len(refused):,} lines: no run can open this file; --out GOOD writes one"
            " without them"
        ]
    return "\n".join(lines)
