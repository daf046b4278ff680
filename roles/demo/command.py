"""``shoal demo``: one real swarm learns on one machine (also ``make demo``)."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from p2p.errors import BadMessage, ConfigError, MissingDependency
from p2p.machine import load_or_create_key
from p2p.node.process import check_key_place, check_platform
from p2p.node.usage import (
    FAILED,
    STANDARD_OUTPUT,
    WRONG_USAGE,
    CommandParser,
    check_target,
    complain,
    interruptible,
    whole_number,
    write_text,
)
from roles.contract import Run, decode_run_untrusted
from roles.contract.core.shape import SEEDS
from roles.demo.pretraining import PretrainingDemo
from roles.demo.shows import SORTING, RewardDemo, arithmetic
from roles.engines.hardware import free_memory
from roles.models.errors import BadModel
from roles.own import add_dashboard
from roles.own.draft import read_draft
from roles.own.editions import sign_edition, write_edition
from roles.own.layout import RunFolder
from roles.own.nodes import LocalNodes
from roles.own.play import check_torch, newest
from roles.own.stage import INTERRUPTED, Stage, play
from roles.own.view import size
from roles.rl.recipes import SMALL_MODEL

Demo = RewardDemo | PretrainingDemo

MAX_STEPS: Final = 100_000
"""Steps of a demo: a day and a half at 1.3 s a step, which it takes on two cores."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parse = CommandParser(prog="shoal demo", description=main.__doc__)
    add, seeds, steps = parse.add_argument, whole_number(*SEEDS), whole_number(1, MAX_STEPS)
    add("--seed", type=seeds, default=0, metavar="N", help="of weights and warm-up (default 0)")
    defaults = f"default {SORTING.steps}, with --model {SMALL_MODEL.sampling.steps}"
    add("--steps", type=steps, metavar="N", help=f"optimiser steps ({defaults})")
    add(
        "--model",
        metavar="MODEL",
        help="let this chat model learn arithmetic: smollm2 (after shoal models fetch smollm2),"
        " or a folder in Hugging Face's layout",
    )
    add(
        "--diloco",
        action="store_true",
        help="let four trainers pre-train on text instead; --steps are its rounds",
    )
    add("--json", type=Path, metavar="FILE", help="write the figures there")
    add_dashboard(parse)
    add(
        "--report",
        type=Path,
        metavar="FILE",
        help="write the page there at the end (default: among the temporary files)",
    )
    add(
        "--data",
        type=Path,
        metavar="DIR",
        help="the nodes' data (default: temporary)",
    )
    return parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Let a swarm of real processes learn here, a cheat among them.

    Returns 0 if the swarm learnt and every cheat was caught, 1 if not, 2 if it cannot be
    played, 130 after Ctrl-C.
    """
    return interruptible(partial(_main, arguments))


def _main(arguments: Sequence[str] | None) -> int:
    options = parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING)
    # Where standard output is for the figures, or for another program, people read the other.
    is_taken = options.json == STANDARD_OUTPUT
    is_piped = options.json is None and not sys.stdout.isatty()
    stage = Stage(
        console=Console(stderr=is_taken or is_piped),
        address=options.dashboard,
        report=options.report,
        command=_typed(options),
    )
    try:
        check_target("--json", options.json)
        check_target("--report", options.report, text=False)
        demo = choose(options)
        check_machine(demo.memory)
        folder = _folder(options.data, demo.disk)
        is_new = not folder.document.exists()
        promised = is_new and (options.steps is None or options.steps >= demo.steps)
        if options.steps is not None:
            demo = demo.with_steps(options.steps)
        run = prepare(demo, options.seed, folder)
    except (ConfigError, BadModel, MissingDependency) as error:
        complain(error)
        return WRONG_USAGE
    kept = f"the nodes' data is kept in {folder.path}"
    try:
        played = play(demo, partial(LocalNodes, folder, run, demo.cast), stage)
    except KeyboardInterrupt:
        stage.say(f"{INTERRUPTED}\n{kept}")
        raise
    figures: dict[str, Any] = {
        "seed": options.seed,
        "ended": played.trouble,
        **demo.figures(played.nodes),
        "seconds": played.seconds,
        "cpu_seconds": round(cpu_seconds(), 1),
        "report": str(played.report),
    }
    write_text("--json", options.json, json.dumps(figures, indent=2))
    promised = promised and not played.trouble
    first, *rest = demo.summary(figures, promised=promised)
    stage.say(f"\n{first}", style="bold")
    for line in rest:
        stage.say(line)
    failures = [] if played.trouble else list(demo.complaints(figures, promised=promised))
    for line in failures:
        stage.say(f"not as promised: {line}", style="red")
    if played.trouble:
        stage.say(f"\n{played.trouble}", style="" if played.is_interrupted else "red")
    if played.trouble or failures or options.data is not None:
        for line in (kept, *newest(folder, run)):
            stage.say(line)
    else:
        shutil.rmtree(folder.path)
    if played.trouble:
        stage.say(f"it goes on there with: {stage.command} --data {folder.path}")
    stage.say(f"\nthe whole run as a page: {played.report}")
    if played.is_interrupted:
        raise KeyboardInterrupt
    return FAILED if failures or played.trouble else 0


def _typed(options: argparse.Namespace) -> str:
    """Return the command line that plays the same demo."""
    words = ["shoal demo", *(["--diloco"] if options.diloco else []), f"--seed {options.seed}"]
    words += [f"--steps {options.steps}"] if options.steps is not None else []
    words += [f"--model {options.model}"] if options.model is not None else []
    return " ".join(words)


def choose(options: argparse.Namespace) -> Demo:
    """Return the demo that the options choose, of its usual length.

    Raises:
        ConfigError: The options are wrong.
        BadModel: The model cannot be used.
    """
    if not options.diloco:
        return SORTING if options.model is None else arithmetic(options.model)
    if options.model is not None:
        raise ConfigError("--diloco pre-trains a model of its own: leave --model out")
    return PretrainingDemo()


def check_machine(memory: int) -> None:
    """Check that the demo can be played on this machine.

    Raises:
        ConfigError: It cannot. The message says what to do.
    """
    check_platform()
    check_torch()
    free = free_memory()
    if free < memory:
        raise ConfigError(
            f"the demo needs {size(memory)} of free memory, and this machine has"
            f" {size(free)}: close other programs, or simulate the same swarm with python -m"
            " sim run spine, which needs 0.1 GB"
        )


def _folder(data: Path | None, disk: int) -> RunFolder:
    """Return the folder for the nodes' data.

    Raises:
        ConfigError: The folder cannot be used.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix="shoal-demo-")) if data is None else data
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise ConfigError(
            f"the nodes' data cannot be kept in {data}: {error.strerror}"
        ) from None
    if free < disk:
        raise ConfigError(
            f"the demo needs {size(disk)} of disk, and {folder} has {size(free)}: name "
            "a folder on another disk with --data"
        )
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"--data {folder}: no permission to write there")
    found = RunFolder(folder)
    check_key_place(found.owner)
    return found


def prepare(demo: Demo, seed: int, folder: RunFolder) -> Run:
    """Make every node's key and configuration, and sign the run file. If an earlier demo has
    left a run file, go on with that run.

    Raises:
        ConfigError: The folder's run has other terms, or has expired.
    """
    keys = {name: load_or_create_key(folder.node(name) / "key") for name in demo.cast}
    table = demo.draft(seed, {name: str(key.peer_id) for name, key in keys.items()})
    now = time.time()  # noqa: TID251 - a command line tool
    terms = read_draft(table | {"days": 1}, "the demo", now)
    if folder.document.exists():
        run = _earlier(folder.document)
        if run is None or run.expiry <= now or replace(run.terms, expiry=terms.expiry) != terms:
            raise ConfigError(
                f"--data {folder.path} holds the nodes of an earlier demo, whose run has its"
                " own seed and steps, and ends after a day: name another folder, or remove that"
                " one"
            )
        demo.furnish(folder, run)
        return run
    run = sign_edition(terms, load_or_create_key(folder.owner), folder.owner, folder.document)
    demo.furnish(folder, run)
    write_edition(run, folder.owner, folder.document)  # last: without it there is no run
    return run


def _earlier(document: Path) -> Run | None:
    with contextlib.suppress(BadMessage):
        return decode_run_untrusted(document.read_bytes())
    return None


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its ended children."""
    import resource  # which Windows lacks (`check_machine`)

    usage = [
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    ]
    return sum(use.ru_utime + use.ru_stime for use in usage)
