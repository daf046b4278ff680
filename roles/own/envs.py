"""``shoal envs``: ``check NAME [FILE]`` tries an environment before a model learns from it,
``new NAME`` begins a package with one of your own, ``list`` says what is installed."""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import pickle
import re
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from p2p.errors import ConfigError, ShoalError
from p2p.node.usage import (
    FAILED,
    STANDARD_OUTPUT,
    CommandParser,
    check_target,
    interruptible,
    say,
    write_text,
)
from roles.contract.core.pin import CAPSULE_SUFFIX
from roles.envs.base import environment_digest, environment_names, is_ours, make_environment
from roles.envs.capsule import pack
from roles.envs.check import Report, check_rewards, sample, why_not_repeatable
from roles.envs.code import convert, read_problems
from roles.envs.contained import EnvironmentFailed
from roles.envs.data import MAX_DATA, pin_data, read_data
from roles.envs.examine import Examiner, examine
from roles.envs.questions import ExactEnvironment, read_questions
from roles.envs.text import TextTask, is_text
from roles.own.draft import capsule
from roles.own.tables import as_question, is_other_form, read_rows

MOST_TASKS = 256  # of an evaluation that are tried unless told otherwise, evenly
READ = 400  # characters of a sample task that are printed, and of its answers
SHOWN = 10  # faults of a kind that are printed; ``--json`` has all
FAULTS = ("does not earn itself", "pays a fragment", "pays a constant", "refused", "unsound")
QUESTIONS = ("math", "math-exact")  # whose file is tried line by line

PYPROJECT = """\
[project]
name = "{name}"
version = "0.1"
dependencies = ["shoal"]

[project.entry-points."shoal.envs"]
{name} = "{name}:Vowels"

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
"""
HEAD = '''\
"""Tasks for a model that strangers train: every method is a function of its arguments."""

from random import Random

from roles.envs.answers import spoken
from roles.envs.text import Message, TextTask, is_held_out


def make_task(rng, held_out):
    while True:  # until the question is on the wanted side: one in eight is never trained on
        word = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(5, 12)))
        question = f"How many vowels (a, e, i, o, u) are in {word}? Say the number."
        if is_held_out(question) == held_out:
            answer = str(sum(letter in "aeiou" for letter in word))
            return TextTask((Message("user", question),), "", answer)


class Vowels:
    name = "NAME"

    def task(self, seed, *, held_out=False):
        return make_task(Random(seed), held_out)

    def evaluation(self):
        rng = Random("NAME evaluation")
        return [make_task(rng, True) for _ in range(128)]
'''
ONE_TURN = """
    async def reward(self, task, text, ended):
        return 1.0 if ended and spoken(text).strip(" .") == task.answer else 0.0
"""
TURNS = '''
    async def respond(self, task, said):
        """What the model hears behind its turns so far; None ends the completion."""
        is_right = spoken(said[-1]).strip(" .") == task.answer
        return None if is_right or len(said) > 1 else "No. Count again, and say the number."

    async def reward(self, task, said, ended):
        return 1.0 / len(said) if ended and spoken(said[-1]).strip(" .") == task.answer else 0.0
'''


def main(argv: Sequence[str] | None = None) -> int:
    """Try an environment with right answers and with constant texts.

    Returns 0, or 1 if there is a fault, or 2 if the command makes no sense.
    """
    parser = CommandParser(prog="shoal envs", description=main.__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    check = commands.add_parser("check", help="try what an environment pays")
    check.add_argument("name", nargs="?", help="one of shoal envs list, or a NAME.capsule")
    check.add_argument(
        "file",
        type=Path,
        nargs="?",
        help="questions of math and math-exact: JSON lines or Parquet",
    )
    new = commands.add_parser("new", help="begin a package with an environment of your own")
    new.add_argument("name", help="of package and environment: small letters, digits and _")
    new.add_argument("--turns", action="store_true", help="one that answers the model")
    new.add_argument("--capsule", action="store_true", help="one that travels with its run")
    packs = commands.add_parser("pack", help="make a capsule of a folder: one file for a run")
    packs.add_argument("folder", type=Path, help="with environment.py, as new --capsule makes")
    rows = commands.add_parser("convert", help="make problems of `code` of public collections")
    rows.add_argument("file", type=Path, help="JSON lines (docs/extending.md names them)")
    rows.add_argument("--out", type=Path, required=True, help="where the problems go")
    commands.add_parser("list", help="name the installed environments")
    check.add_argument(
        "--all", action="store_true",
        help="all that need no FILE, and each family of reasoning-gym, a line each",
    )  # fmt: skip
    check.add_argument("--kinds", default="", help="of tasks, by commas; left out: its own")
    check.add_argument("--tasks", type=int, help=f"tasks to try; of an evaluation {MOST_TASKS}")
    check.add_argument("--out", type=Path, help="write the lines that are good, as JSON lines")
    check.add_argument("--json", action="store_true", help="all that was found, for machines")
    options = parser.parse_args(argv)
    does = {"check": _main, "new": _new, "list": _list, "convert": _convert, "pack": _pack}[
        options.command
    ]
    return interruptible(lambda: does(options))


def _list(options: argparse.Namespace) -> int:
    for name in environment_names():
        what = "comes with Shoal" if is_ours(name) else "installed"
        say(f"{name:16} {environment_digest(name).hex()[:12]}  {what}")
    return 0


def _convert(options: argparse.Namespace) -> int:
    check_target("--out", options.out)
    data = read_data(pin_data(str(options.file)), str(options.file.parent))
    found, bad = list[str](), list[str]()
    for number, line in enumerate(data.splitlines(), 1):
        try:
            found.append(json.dumps(convert(json.loads(line))))
        except (LookupError, ValueError, TypeError, RecursionError, EOFError, MemoryError,
                zlib.error, pickle.UnpicklingError, AttributeError) as error:  # fmt: skip
            bad.append(f"line {number} {error!s:.80}")
    _, refused = read_problems("\n".join(found).encode())
    write_text("--out", options.out, "\n".join(found) + "\n")
    say(f"{len(found):,} problems written, {len(bad):,} lines refused")
    for one in (*bad[:SHOWN], *(f"of those written, {one}" for one in refused[:SHOWN])):
        say(one)
    return 0 if found and not bad and not refused else FAILED


def _new(options: argparse.Namespace) -> int:
    name = options.name
    if not re.fullmatch(r"[a-z][a-z0-9_]{1,39}", name):
        raise ConfigError(f"{name!r:.60} cannot be a name: 2 to 40 small letters, digits and _")
    if name in environment_names():
        raise ConfigError(f"an environment called {name!r} is installed: take another name")
    folder = Path(name)
    if folder.exists():
        raise ConfigError(f"{folder.absolute()} is there already: take another name")
    source, then = folder / name / "__init__.py", f"pip install -e {folder}"
    text = (HEAD + (TURNS if options.turns else ONE_TURN)).replace("NAME", name)
    if options.capsule:
        source, then = folder / "environment.py", f"shoal envs pack {folder}"
        text = text.replace("class Vowels", "class Environment")
        name += CAPSULE_SUFFIX
    else:
        folder.mkdir()
        (folder / "pyproject.toml").write_text(PYPROJECT.format(name=name))
    source.parent.mkdir()
    source.write_text(text)
    say(f"written   {source}: counting vowels; make it your own")
    say(f"next      {then} && shoal envs check {name}")
    return 0


def _pack(options: argparse.Namespace) -> int:
    if not options.folder.is_dir():
        raise ConfigError(
            f"{options.folder} is no folder: shoal envs new NAME --capsule makes one"
        )
    name = options.folder.absolute().name + CAPSULE_SUFFIX
    data = pack(options.folder)
    Path(name).write_bytes(data)
    say(f"written   {name}: {len(data):,} bytes, sha256 {hashlib.sha256(data).hexdigest()}")
    say(f"next      shoal envs check {name}")
    return 0


def _all(options: argparse.Namespace) -> int:
    """Print a line for each environment that is installed, of reasoning-gym for each family."""
    if options.name or options.kinds or options.tasks or options.out:
        raise ConfigError("--all goes with no other option but --json")
    is_sound = True
    for name in environment_names():
        families = [""]
        with suppress(ImportError):
            if name == "reasoning-gym":
                families = sorted(importlib.import_module("reasoning_gym.factory").DATASETS)
        with Examiner(name) as examiner:
            for family in families:
                kinds = {family: 1.0} if family else {}
                try:
                    environment = make_environment(name, **({"kinds": kinds} if kinds else {}))
                    found = examiner.examine(kinds) or _faults(environment)
                    verdict, why = "FAULT" if found else "sound", "; ".join(found)
                except ShoalError as error:
                    verdict, why = "refused", str(error)
                is_sound &= verdict != "FAULT"
                row = {"environment": name, "kind": family, "verdict": verdict, "why": why}
                shown = f"{verdict:8} {name} {family}".rstrip()
                say(json.dumps(row) if options.json else shown + f": {why}" * bool(why))
    return 0 if is_sound else FAILED


def _faults(environment: Any) -> list[str]:
    why = why_not_repeatable(environment)
    if why or not is_text(environment):
        return [why] if why else []
    return check_rewards(environment, environment.evaluation()[:MOST_TASKS]).faults


def _main(options: argparse.Namespace) -> int:
    if options.all:
        return _all(options)
    if options.name is None:
        raise ConfigError("name an environment (shoal envs list), or say --all")
    if options.tasks is not None and options.tasks < 1:
        raise ConfigError(f"--tasks must be at least 1, not {options.tasks}")
    if options.json and options.out == STANDARD_OUTPUT:
        raise ConfigError("--json and --out - cannot both have standard output: name a file")
    check_target("--out", options.out)
    if options.name.endswith(CAPSULE_SUFFIX):
        options.name, options.file = capsule(Path(options.name))
    kinds = _kinds(options)
    environment, tasks, refused = _open(options, kinds)
    if why := why_not_repeatable(environment):
        raise EnvironmentFailed(why)
    # math and math-exact: their own file is tried line by line, above
    file = options.file if options.name not in QUESTIONS else None
    unsound = [] if options.name in QUESTIONS else examine(options.name, file, kinds)
    report = Report(tasks=len(tasks))
    if is_text(environment):
        report = check_rewards(environment, tasks, _show if sys.stderr.isatty() else _hide)
    prompt, answers = sample(environment, tasks)
    found: dict[str, Any] = {
        "environment": options.name,
        "tasks": report.tasks,
        "without_answer": report.without_answer,
        "refused": refused,
        "earns_itself": report.tasks - report.without_answer - len(report.earns_nothing),
        "does_not_earn_itself": report.earns_nothing,
        "pays_a_fragment": report.pays_fragments,
        "pays_a_constant": report.pays_constants,
        "unsound": unsound,
        "sample": {"prompt": prompt, "answers": answers},
    }
    if options.json:
        say(json.dumps(found))
    else:
        people = sys.stderr if options.out == STANDARD_OUTPUT else sys.stdout
        print(*_summary(found), sep="\n", file=people)
    return FAILED if report.faults or unsound else 0


def _kinds(options: argparse.Namespace) -> dict[str, float]:
    return dict.fromkeys(filter(None, map(str.strip, options.kinds.split(","))), 1.0)


def _open(
    options: argparse.Namespace, kinds: Mapping[str, float]
) -> tuple[Any, list[TextTask], list[str]]:
    """Return an environment, the tasks to try, and sentences about lines that are refused."""
    make = partial(make_environment, options.name, **({"kinds": kinds} if kinds else {}))
    if options.file is None or options.name not in QUESTIONS:
        if options.out is not None:
            raise ConfigError("--out writes the good lines of a FILE of questions: name one")
        file = options.file
        options_of = {"data": read_data(pin_data(str(file)), str(file.parent))} if file else {}
        environment = make(**options_of)
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
    """Return a file of questions as JSON lines, and a sentence about each invalid row."""
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
    for label, text in (
        ("sample task", found["sample"]["prompt"]),
        *((f"pays {paid:g}", said) for said, paid in found["sample"]["answers"]),
    ):
        lines = text[:READ].splitlines() or ["(nothing)"]
        yield from (f"{label * (not at):17}{line}" for at, line in enumerate(lines))
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
