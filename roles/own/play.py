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
from p2p.node.process import check_platform, told_by_signals
from p2p.node.usage import (
    FAILED,
    WRONG_USAGE,
    complain,
    expanded,
    ignore_interrupts,
    is_interrupt,
)
from roles.demo.command import live_view
from roles.demo.page import DemoPage, open_page
from roles.demo.processes import LocalNodes
from roles.demo.shows import Decode
from roles.demo.status import SwarmStatus
from roles.envs import sort
from roles.own.layout import TRAINER, RunFolder
from roles.run import Run, decode_run_untrusted
from roles.run.core.file import MAX_RUN
from roles.shared.model_files import FOLDER

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
    try:
        trio.run(partial(play, folder, run, view, Console(), options.dashboard))
    except* (ShoalError, KeyboardInterrupt) as errors:
        trouble.extend(leaves(errors))
    if any(map(is_interrupt, trouble)):
        ignore_interrupts()
        Console().print(f"ended; shoal run start {folder.path} goes on", soft_wrap=True)
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
) -> None:
    """Start the nodes, show how they get on, and end them when the run is over. Raises
    `KeyboardInterrupt` once all have ended, if that was told."""
    began = time.monotonic()  # noqa: TID251 - a command line tool, outside every world
    told: list[bool] = []

    def seconds() -> float:
        return time.monotonic() - began  # noqa: TID251

    status: SwarmStatus | None = None
    async with trio.open_nursery() as nursery:

        def end() -> None:
            told.append(True)
            nursery.cancel_scope.cancel()

        nodes = LocalNodes(folder.path, run, folder.cast(), nursery)
        console.print(f"{run}: {', '.join(nodes.cast)}; Ctrl-C ends them", soft_wrap=True)
        page = DemoPage(run, nodes.children, f"shoal run start {folder.path}")
        with told_by_signals(end):
            try:
                async with open_page(page, address):
                    with live_view(console, view) as live:
                        await nodes.start()
                        console.print(_invitation(nodes, page), soft_wrap=True, markup=False)
                        status = await nodes.wait_done(lambda now: live(now, seconds()))
            finally:
                with trio.CancelScope(shield=True):
                    await nodes.stop()
        nursery.cancel_scope.cancel()
    if told or status is None:
        raise KeyboardInterrupt
    for line in results(folder, run, status):
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def _invitation(nodes: LocalNodes, page: DemoPage) -> str:
    folder = f"~/shoal-{nodes.run.id.hex()[:6]}"
    return (
        f"{page.invitation}\n"
        f"join from another shell: shoal node --role inference --data {folder}"
        f" --bootstrap {nodes.bootstrap}"
    )


def results(folder: RunFolder, run: Run, status: SwarmStatus) -> Sequence[str]:
    """What came of a run that is over."""
    figures: dict[str, Any] = status.figures()
    policy = f"{run.terms.recipe.steps:08d}"
    weights = policy if run.terms.model.base else f"{policy}.safetensors"
    return [
        f"{run.terms.recipe.steps} steps, {figures['rollouts_accepted']:,} answers accepted",
        f"  held-out reward   greedy {figures['greedy_start']:.3f} →"
        f" {figures['greedy_end']:.3f}, sampled {figures['reward_start']:.3f} →"
        f" {figures['reward_end']:.3f}",
        f"  last policy       {folder.node(TRAINER) / 'trainer' / 'weights' / weights}",
    ]
