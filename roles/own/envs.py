"""``shoal envs check NAME [FILE]`` tries what an environment pays, before a model learns it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from p2p.errors import ConfigError
from p2p.node.usage import (
    FAILED,
    STANDARD_OUTPUT,
    CommandParser,
    check_target,
    interruptible,
    say,
    write_text,
)
from roles.envs.base import make_environment
from roles.envs.check import check_rewards, why_not_repeatable
from roles.envs.contained import EnvironmentFailed
from roles.envs.data import MAX_DATA, pin_data, read_data
from roles.envs.questions import ExactEnvironment, read_questions
from roles.envs.text import TextTask, is_text
from roles.own.tables import as_question, is_other_form, read_rows

MOST_TASKS = 256  # of an evaluation that are tried unless told otherwise, evenly
SHOWN = 10  # faults of a kind that are printed; ``--json`` has all
FAULTS = ("does not earn itself", "pays a fragment", "pays a constant", "refused")


def main(argv: Sequence[str] | None = None) -> int:
    """Try an environment: what right answers and constant texts earn.

    Returns 0, or 1 if there is a fault, or 2 if the command makes no sense.
    """
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
    check.add_argument("--kinds", default="", help="of tasks, by commas; left out: its own")
    check.add_argument("--tasks", type=int, help=f"tasks to try; of an evaluation {MOST_TASKS}")
    check.add_argument("--out", type=Path, help="write the lines that are good, as JSON lines")
    check.add_argument("--json", action="store_true", help="all that was found, for machines")
    return interruptible(lambda: _main(parser.parse_args(argv)))


def _main(options: argparse.Namespace) -> int:
    if options.tasks is not None and options.tasks < 1:
        raise ConfigError(f"--tasks must be at least 1, not {options.tasks}")
    if options.json and options.out == STANDARD_OUTPUT:
        raise ConfigError("--json and --out - cannot both have standard output: name a file")
    check_target("--out", options.out)
    environment, tasks, refused = _open(options)
    if not is_text(environment):
        raise ConfigError(
            f"the environment {options.name!r} is of tokens: its answers are no text"
        )
    if why := why_not_repeatable(environment):
        raise EnvironmentFailed(why)
    report = check_rewards(environment, tasks, _show if sys.stderr.isatty() else _hide)
    found: dict[str, Any] = {
        "environment": options.name,
        "tasks": report.tasks,
        "without_answer": report.without_answer,
        "refused": refused,
        "earns_itself": report.tasks - report.without_answer - len(report.earns_nothing),
        "does_not_earn_itself": report.earns_nothing,
        "pays_a_fragment": report.pays_fragments,
        "pays_a_constant": report.pays_constants,
    }
    if options.json:
        say(json.dumps(found))
    else:
        people = sys.stderr if options.out == STANDARD_OUTPUT else sys.stdout
        print(*_summary(found), sep="\n", file=people)
    return 0 if report.is_sound else FAILED


def _open(options: argparse.Namespace) -> tuple[Any, list[TextTask], list[str]]:
    """Return an environment, the tasks to try, and sentences about lines that are refused."""
    kinds = dict.fromkeys(filter(None, map(str.strip, options.kinds.split(","))), 1.0)
    make = partial(make_environment, options.name, **({"kinds": kinds} if kinds else {}))
    if options.file is None:
        if options.out is not None:
            raise ConfigError("--out writes the good lines of a FILE: name one")
        environment = make()
        tasks = environment.evaluation()
        most = min(options.tasks or MOST_TASKS, len(tasks))
        return environment, [tasks[at * len(tasks) // most] for at in range(most)], []
    data, refused = _lines(options.file)
    # Made with other questions: those of the file may have faults, and are tried one by one.
    others = (f'{{"question": "{number}", "answer": "1"}}\n' for number in range(64))
    environment = make(data="".join(others).encode())
    if not isinstance(environment, ExactEnvironment):
        raise ConfigError(f"the environment {options.name!r} reads no FILE of questions here")
    questions, bad = read_questions(data, answers_alone=True)
    refused += bad
    lines = (json.dumps({"question": asked, "answer": answer}) for asked, answer in questions)
    write_text("--out", options.out, "\n".join(lines))
    tasks = [environment.task_of(*one) for one in questions[: options.tasks]]
    return environment, tasks, refused


def _lines(file: Path) -> tuple[bytes, list[str]]:
    """Return a file of questions as JSON lines, and a sentence about each row that is none."""
    if not is_other_form(file, ("question", "gold")):
        return read_data(pin_data(str(file)), str(file.parent)), []
    lines, refused = bytearray(), list[str]()
    for place, row in read_rows(file):
        try:
            lines += json.dumps(as_question(row)).encode()
        except ValueError as error:
            refused.append(f"{place} {error}")
        lines += b"\n"
        if len(lines) > MAX_DATA:
            raise ConfigError(f"{file} has over {MAX_DATA:,} bytes of questions")
    return bytes(lines), refused


def _show(done: int, of: int) -> None:
    end = "\r" if done < of else "\r\x1b[K"
    print(f"\rtried {done:,} of {of:,} tasks", end=end, file=sys.stderr, flush=True)  # noqa: T201


def _hide(done: int, of: int) -> None:
    pass


def _summary(found: Mapping[str, Any]) -> Iterator[str]:
    yield f"environment      {found['environment']}, {found['tasks']:,} tasks"
    asked = found["tasks"] - found["without_answer"]
    yield f"earns itself     {found['earns_itself']:,} of {asked:,} answers"
    yield f"pays a fragment  {len(found['pays_a_fragment']):,}"
    yield f"pays a constant  {len(found['pays_a_constant']):,}"
    if found["without_answer"]:
        yield f"without answer   {found['without_answer']:,} tasks: many answers are right"
    for what in FAULTS:
        said = found[what.replace(" ", "_")]
        yield from (f"{what}: {one}" for one in said[:SHOWN])
        if len(said) > SHOWN:
            yield f"{what}: {len(said) - SHOWN:,} more (--json has all)"
    if refused := found["refused"]:
        yield (
            f"refused {len(refused):,} lines: no run can open this file; --out GOOD writes one"
            " without them"
        )
