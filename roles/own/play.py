"""``shoal run start DIR``: every node of a run's folder, on this machine.

The trainer gets the run file and is the bootstrap peer of the others. Ctrl-C ends all; started
again, each goes on where it was, since all that it needs is on its disk.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import trio
from rich.console import Console

from p2p.concurrency import leaves
from p2p.errors import BadMessage, ConfigError, ShoalError
from p2p.node.process import check_platform
from p2p.node.usage import (
    FAILED,
    WRONG_USAGE,
    complain,
    expanded,
    ignore_interrupts,
    is_interrupt,
)
from roles.contract import Run, decode_run_untrusted
from roles.contract.core.file import MAX_RUN
from roles.demo.command import gain, live_view
from roles.demo.page import INTERRUPTED, Played, on_stage
from roles.demo.processes import DemoError, DemoFaces, LocalNodes
from roles.demo.shows import Decode
from roles.demo.status import SwarmStatus
from roles.envs import sort
from roles.own.layout import TRAINER, RunFolder
from roles.protocol.model_files import FOLDER

ANSWERS: Final = 1
"""Answers for reading, in a run of text: the last step's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRun:
    """What the live view must know of a run."""

    opening: str
    answers: int
    decode: Decode = field(repr=False)


def main(options: argparse.Namespace) -> int:
    """Play the folder until the run is over or Ctrl-C; the exit code."""
    folder = RunFolder(expanded(options.folder).absolute())
    try:
        check_platform()
        run = _open(folder)
        view = _view(folder, run)
    except ConfigError as error:
        complain(error)
        return WRONG_USAGE
    trouble: list[BaseException] = []
    played: Played[LocalNodes] | None = None
    console = Console()
    try:
        played = trio.run(partial(play, folder, run, view, console, options.dashboard))
    except* (ShoalError, KeyboardInterrupt) as errors:
        trouble.extend(leaves(errors))
    ignore_interrupts()
    is_interrupted = any(map(is_interrupt, trouble))
    if played is not None:
        is_interrupted = played.trouble == INTERRUPTED
        trouble += [DemoError(played.trouble)] if played.trouble and not is_interrupted else []
        lines = [
            *results(folder, run, played.cast.status),
            f"  as a page         {played.report}",
        ]
        console.print("\n".join(lines), soft_wrap=True, markup=False, highlight=False)
    if is_interrupted:
        console.print(f"ended; shoal run start {folder.path} goes on", soft_wrap=True)
        raise KeyboardInterrupt
    for failure in trouble:
        complain(failure)
    return FAILED if trouble else 0


def _open(folder: RunFolder) -> Run:
    """The run of a folder. Raises `ConfigError`."""
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
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            "the nodes of a run compute with torch, which this Python lacks: install it with"
            " pip install 'shoal[torch]'"
        )
    return run


def _view(folder: RunFolder, run: Run) -> OwnRun:
    if not run.terms.model.base:
        return OwnRun(
            opening="warming up, then policy 0 is evaluated …", answers=0, decode=sort.decode
        )
    return OwnRun(
        opening="the base is published and evaluated …",
        answers=ANSWERS,
        decode=_decoder(folder),
    )


def _decoder(folder: RunFolder) -> Decode:
    from roles.models.tokenizer import Tokenizer

    return Tokenizer.open(folder.node(TRAINER) / FOLDER).decode


async def play(
    folder: RunFolder, run: Run, view: OwnRun, console: Console, address: tuple[str, int]
) -> Played[LocalNodes]:
    """Start the nodes, show how they get on, and end them when the run is over.

    Raises what `roles.demo.page.on_stage` raises.
    """
    began = time.monotonic()  # noqa: TID251 - a command line tool, outside every world

    def seconds() -> float:
        return time.monotonic() - began  # noqa: TID251

    async def act(nodes: LocalNodes, invitation: str) -> None:
        console.print(f"{run}: {', '.join(nodes.cast)}; Ctrl-C ends them", soft_wrap=True)
        with live_view(console, view) as live:
            await nodes.start()
            console.print(_invitation(nodes, invitation), soft_wrap=True, markup=False)
            await nodes.wait_done(lambda now: live(now, seconds()))

    faces = DemoFaces(address, None, f"shoal run start {folder.path}")
    return await on_stage(partial(LocalNodes, folder.path, run, folder.cast()), act, faces)


def _invitation(nodes: LocalNodes, invitation: str) -> str:
    folder = f"~/shoal-{nodes.run.id.hex()[:6]}"
    return (
        f"{invitation}\n"
        f"join from another shell: shoal node --role inference --data {folder}"
        f" --bootstrap {nodes.bootstrap}"
    )


def results(folder: RunFolder, run: Run, status: SwarmStatus) -> Sequence[str]:
    """What came of a run until now."""
    figures: dict[str, Any] = status.figures()
    step = status.trainer.get("step")
    if step is None:
        return ["nothing was learnt yet"]
    policy = f"{step:08d}{'' if run.terms.model.base else '.safetensors'}"
    return [
        f"{step} of {run.terms.sampling.steps} steps, {figures['rollouts_accepted']:,} answers"
        " accepted",
        f"  held-out reward   {gain(figures)}",
        f"  last policy       {folder.node(TRAINER) / 'trainer' / 'weights' / policy}",
    ]
