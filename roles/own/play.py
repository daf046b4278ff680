"""``shoal run start DIR``: every node of a run's folder, on this machine.

The trainer gets the run file and is the bootstrap peer of the others. Ctrl-C ends all; started
again, each goes on where it was, since all that it needs is on its disk.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from rich.console import Console

from p2p.errors import BadMessage, ConfigError
from p2p.node.process import check_platform
from p2p.node.tables import load_toml
from p2p.node.usage import FAILED, complain, expanded
from roles.chat.find import find_models
from roles.contract import Run, decode_run_untrusted
from roles.contract.core.diloco import Algorithm, Goal
from roles.contract.core.file import MAX_RUN
from roles.envs import sort
from roles.own import rounds
from roles.own.init import renew
from roles.own.layout import TRAINER, RunFolder
from roles.own.nodes import LocalNodes
from roles.own.rounds import Rounds
from roles.own.stage import Stage, play
from roles.own.status import SwarmStatus
from roles.own.view import Learning, gain
from roles.protocol.model_files import FOLDER
from roles.rl.learner import LearnerConfig
from roles.rl.recipes import read_learner


def main(options: argparse.Namespace) -> int:
    """Play the folder until the run is over or Ctrl-C; the exit code."""
    folder = RunFolder(expanded(options.folder).absolute())
    stage = Stage(
        console=Console(),
        address=options.dashboard,
        report=folder.path / "report.html",
        command=f"shoal run start {folder.path}",
    )
    check_platform()
    learner = _learner(folder, _open(folder))  # a mistake in it ends this before any signature
    if said := renew(folder):
        stage.say(said)
    run = _open(folder)
    show = _show(folder, run)
    cast = folder.cast()
    stage.say(f"{run}: {', '.join(cast)}; Ctrl-C ends them")
    if learner is not None:
        stage.say(
            f"learns by {learner.algorithm} at a rate of {learner.rate:g}, as {folder.learner}"
            " says"
        )
    goes_on = f"ended; {stage.command} goes on"
    try:
        played = play(show, partial(LocalNodes, folder, run, cast), stage)
    except KeyboardInterrupt:
        for line in (*newest(folder, run), goes_on):
            stage.say(line)
        raise
    if isinstance(show, Rounds):
        lines = rounds.results(show.figures(played.nodes), run.terms.diloco.outer_steps)
    else:
        lines = results(run, played.nodes.status)
    for line in (*lines, *newest(folder, run)):
        stage.say(line)
    stage.say(f"  as a page         {played.report}")
    if played.is_interrupted:
        stage.say(goes_on)
        raise KeyboardInterrupt
    if played.trouble:
        complain(played.trouble)
        return FAILED
    return 0


def _open(folder: RunFolder) -> Run:
    """Return the run of a folder.

    Raises:
        ConfigError: The folder has none.
    """
    try:
        with folder.document.open("rb") as file:
            run = decode_run_untrusted(file.read(MAX_RUN + 1))
    except OSError as error:
        raise ConfigError(
            f"{folder.document} cannot be read: {error.strerror}; shoal run init"
            f" {folder.path} makes a run"
        ) from None
    except BadMessage as error:
        raise ConfigError(f"{folder.document} cannot be used: {error}") from None
    check_torch()
    return run


def _learner(folder: RunFolder, run: Run) -> LearnerConfig | None:
    """Return the learning settings of a folder's trainer; None if its run pre-trains.

    Raises:
        ConfigError: Its trainer would refuse the ``learner.toml``.
    """
    if run.terms.algorithm is Algorithm.DILOCO:
        return None
    table = load_toml(folder.learner) if folder.learner.exists() else None
    return read_learner(table, str(folder.learner), run.name, run.terms.model)


def check_torch() -> None:
    """Check that nodes can compute here.

    Raises:
        ConfigError: They cannot. The message says what to do.
    """
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            "the nodes of a run compute with torch, which this Python lacks: install it with"
            " pip install 'shoal[torch]'"
        )


def _show(folder: RunFolder, run: Run) -> Learning | Rounds:
    if run.terms.algorithm is Algorithm.DILOCO:
        return Rounds()
    if not run.terms.model.base:
        opening = "warming up, then policy 0 is evaluated …"
        return Learning(opening=opening, decode=sort.decode)
    from roles.models.tokenizer import Tokenizer

    return Learning(
        opening="the base is published and evaluated …",
        answers=1,
        decode=Tokenizer.open(folder.node(TRAINER) / FOLDER).decode,
    )


def newest(folder: RunFolder, run: Run) -> Iterator[str]:
    """Yield where the newest model is, and the command that tries it."""
    with suppress(ConfigError):  # there is none yet
        yield f"  newest model      {find_models(folder.path).newest.path}"
        word = "eval" if not run.terms.model.base else "chat"
        if run.terms.algorithm is Algorithm.DILOCO and run.terms.diloco.goal is Goal.TEXT:
            word = "sample --prompt 'The '"
        yield f"  try it            shoal {word} {folder.path}"


def results(run: Run, status: SwarmStatus) -> Iterator[str]:
    """Yield the results of a run so far, in lines for people."""
    figures: dict[str, Any] = status.figures()
    step = status.trainer.get("step")
    if step is None:
        yield "the trainer had not begun"
        return
    yield (
        f"{step} of {run.terms.sampling.steps} steps, {figures['rollouts_accepted']:,} answers"
        " accepted"
    )
    yield f"  held-out reward   {gain(figures)}"
