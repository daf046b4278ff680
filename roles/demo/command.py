"""``shoal demo``: one real swarm learns on one machine (also ``make demo``)."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio
from rich.console import Console
from rich.live import Live

from p2p.concurrency import leaves
from p2p.errors import ConfigError, MissingDependency, StorageError
from p2p.node.process import check_key_place
from p2p.node.usage import (
    FAILED,
    STANDARD_OUTPUT,
    WRONG_USAGE,
    CommandParser,
    check_target,
    complain,
    host_port,
    ignore_interrupts,
    interruptible,
    is_interrupt,
    whole_number,
    write_text,
)
from roles.contract.core.shape import SEEDS
from roles.demo import pretraining
from roles.demo.gate import LearningGate
from roles.demo.guests import Doorbell
from roles.demo.page import INTERRUPTED, on_stage
from roles.demo.processes import RUN_FILE, DemoFaces, DemoNodes, DemoPlan, write_run
from roles.demo.shows import SORTING, Show, arithmetic
from roles.demo.status import SwarmStatus
from roles.demo.view import Readable, draw, plain, sample_line, size
from roles.engines.evaluation import Evaluation
from roles.models.errors import BadModel
from roles.rl.recipes import SMALL_MODEL

try:
    import resource
except ImportError:
    resource = None  # type: ignore[assignment]  # `check_machine` says what to do

MAX_STEPS: Final = 100_000
"""Steps of a demo: a day and a half at 1.3 s a step, which it takes on two cores."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parse = CommandParser(prog="shoal demo", description=__doc__)
    seeds, steps = whole_number(*SEEDS), whole_number(1, MAX_STEPS)
    parse.add_argument(
        "--seed", type=seeds, default=0, metavar="N", help="of weights and warm-up (default 0)"
    )
    parse.add_argument(
        "--steps",
        type=steps,
        metavar="N",
        help=f"optimiser steps (default {SORTING.sampling.steps}, with --model"
        f" {SMALL_MODEL.sampling.steps})",
    )
    parse.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="let this chat model learn arithmetic, a Hugging Face folder (shoal models fetch"
        " smollm2 makes one)",
    )
    parse.add_argument(
        "--diloco",
        action="store_true",
        help="let four trainers pre-train on text instead; --steps are its rounds",
    )
    parse.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parse.add_argument(
        "--dashboard",
        type=host_port,
        metavar="HOST:PORT",
        default=DemoFaces().address,
        help="show the swarm's page there (default 127.0.0.1, at a free port)",
    )
    parse.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="write the page there at the end (default: among the temporary files)",
    )
    parse.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="keep the nodes' data there (default: temporary)",
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
    console = Console(stderr=_is_piped(options.json))
    try:
        check_target("--json", options.json)
        check_target("--report", options.report, text=False)
        if options.diloco:
            return _pretrain(options, console)
        show = SORTING if options.model is None else arithmetic(options.model)
        promised = options.steps is None or options.steps >= show.sampling.steps
        if options.steps is not None:
            show = replace(show, sampling=replace(show.sampling, steps=options.steps))
        check_machine(show.memory)
        folder = _folder(options.data, show.disk)
        promised = promised and not (folder / RUN_FILE).exists()
        plan = DemoPlan(seed=options.seed, show=show, folder=folder, faces=faces_of(options))
        write_run(plan)
    except (ConfigError, BadModel, MissingDependency) as error:
        complain(error)
        return WRONG_USAGE
    figures = _played(partial(play, plan, console), console, folder)
    if figures is None:
        return FAILED
    write_text("--json", options.json, json.dumps(figures, indent=2))
    is_whole = not figures["ended"]
    failures = list(complaints(figures, show, promised=promised)) if is_whole else []
    report(console, figures, failures)
    for line in shortfalls(figures, show) if promised and is_whole else ():
        console.print(f"  not quite: {line}", markup=False, highlight=False, soft_wrap=True)
    for line in (*by_kind(figures, show), *answers(figures, show)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return _end(options, console, figures, folder, failures)


def faces_of(options: argparse.Namespace) -> DemoFaces:
    """Where the demo is shown."""
    words = ["shoal demo", *(["--diloco"] if options.diloco else []), f"--seed {options.seed}"]
    words += [f"--steps {options.steps}"] if options.steps is not None else []
    words += [f"--model {options.model}"] if options.model is not None else []
    return DemoFaces(options.dashboard, options.report, " ".join(words))


def _end(
    options: argparse.Namespace,
    console: Console,
    figures: dict[str, Any],
    folder: Path,
    failures: list[str],
) -> int:
    """Say why a play ended, what is kept of it, and how it goes on; the exit code.

    Raises `KeyboardInterrupt` if that is what ended it.
    """
    ended = figures["ended"]
    if ended:
        console.print(f"\n{ended}", style="" if ended == INTERRUPTED else "red", markup=False,
                      highlight=False, soft_wrap=True)  # fmt: skip
    if ended or failures:
        _say_kept(console, folder)
    elif options.data is None:
        shutil.rmtree(folder)
    if ended:
        line = faces_of(options).command
        console.print(f"it goes on there with: {line} --data {folder}", soft_wrap=True,
                      highlight=False, markup=False)  # fmt: skip
    console.print(f"\nthe whole run as a page: {figures['report']}", highlight=False,
                  soft_wrap=True, markup=False)  # fmt: skip
    if ended == INTERRUPTED:
        raise KeyboardInterrupt
    return FAILED if failures or ended else 0


def _say_kept(console: Console, folder: Path) -> None:
    console.print(f"the nodes' data is kept in {folder}", soft_wrap=True, markup=False,
                  highlight=False)  # fmt: skip


def _played(
    work: Callable[[], Awaitable[dict[str, Any]]], console: Console, folder: Path
) -> dict[str, Any] | None:
    """The figures of a play, or None if it did not begin. Raises `KeyboardInterrupt`."""
    trouble: list[BaseException] = []
    try:
        return trio.run(work)
    except* (ConfigError, StorageError, KeyboardInterrupt) as errors:
        trouble.extend(leaves(errors))
    ignore_interrupts()
    if any(map(is_interrupt, trouble)):
        console.print(INTERRUPTED)
        _say_kept(console, folder)
        raise KeyboardInterrupt
    complain(trouble[0])
    return None


def _pretrain(options: argparse.Namespace, console: Console) -> int:
    """``--diloco``: see `roles.demo.pretraining`. Raises `ConfigError`."""
    if options.model is not None:
        raise ConfigError("--diloco pre-trains a model of its own: leave --model out")
    check_machine(pretraining.MEMORY)
    folder = _folder(options.data, pretraining.DISK)
    is_judged = options.steps is None and not (folder / RUN_FILE).exists()
    plan = pretraining.with_rounds(
        pretraining.PretrainingPlan(seed=options.seed, folder=folder, faces=faces_of(options)),
        options.steps,
    )
    pretraining.write_run(plan)
    found = _played(partial(pretraining.play, plan, console), console, folder)
    if found is None:
        return FAILED
    found["cpu_seconds"] = round(cpu_seconds(), 1)
    write_text("--json", options.json, json.dumps(found, indent=2))
    is_judged = is_judged and not found["ended"]
    failures = list(pretraining.complaints(found)) if is_judged else []
    pretraining.report(console, found, failures)
    return _end(options, console, found, folder, failures)


def _is_piped(target: Path | None) -> bool:
    """Whether standard output is for the figures, or for another program: then people read
    standard error."""
    return target == STANDARD_OUTPUT or (target is None and not sys.stdout.isatty())


def check_machine(memory: int) -> None:
    """Raise `ConfigError`, with the remedy, if the demo cannot be played on this machine."""
    if resource is None:
        raise ConfigError(
            "the demo runs on Linux and macOS; on Windows install Shoal in WSL2 and play it "
            "there"
        )
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            "the demo trains a model and needs torch, which this Python lacks: "
            "install it with pip install 'shoal[torch]', or use make demo"
        )
    free = free_memory()
    if free < memory:
        raise ConfigError(
            f"the demo needs {size(memory)} of free memory, and this machine has"
            f" {size(free)}: close other programs, or simulate the same swarm with python -m"
            " sim run spine, which needs 0.1 GB"
        )


def free_memory() -> float:
    """Bytes that processes may still take: what the kernel has available, within the control
    group's limit.

    Infinite where neither is to be had, as on macOS, which compresses and swaps before it
    refuses.
    """
    free = _number_in(Path("/proc/meminfo"), "MemAvailable:") * 1024
    group = Path("/sys/fs/cgroup")
    allowed, used = _number_in(group / "memory.max"), _number_in(group / "memory.current")
    return min(free, max(0.0, allowed - used) if used < float("inf") else allowed)


def _number_in(path: Path, key: str = "") -> float:
    """The number behind ``key`` in a file of the kernel; infinite if there is none."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in path.read_text().splitlines():
            if line.startswith(key):
                return float(line[len(key) :].split()[0])
    return float("inf")


def _folder(data: Path | None, disk: int) -> Path:
    """Where the nodes keep their data. Raises `ConfigError` if they cannot."""
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
    check_key_place(folder / "owner.key")
    return folder


async def play(plan: DemoPlan, console: Console) -> dict[str, Any]:
    """Run the whole swarm once; returns the figures, also of a play that ended early.

    Raises what `roles.demo.page.on_stage` raises.
    """
    began = time.monotonic()  # noqa: TID251 - a command line tool, outside every world

    def seconds() -> float:
        return time.monotonic() - began  # noqa: TID251

    async def act(nodes: DemoNodes, invitation: str) -> None:
        with live_view(console, plan.show) as live:
            console.print(invitation, soft_wrap=True, markup=False)
            await nodes.start()
            _invite(console, nodes)
            await nodes.wait_done(lambda now: live(now, seconds()))

    played = await on_stage(partial(DemoNodes, plan), act, plan.faces)
    status = played.cast.status
    return {
        "seed": plan.seed,
        "steps": plan.show.sampling.steps,
        "ended": played.trouble,
        **status.figures(),
        **status.answers(),
        "seconds": round(seconds(), 1),
        "cpu_seconds": round(cpu_seconds(), 1),
        "report": str(played.report),
    }


def cpu_seconds() -> float:
    """Of this process and of all that have ended below it."""
    usage = [
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    ]
    return sum(use.ru_utime + use.ru_stime for use in usage)


def _invite(console: Console, nodes: DemoNodes) -> None:
    console.print(
        f"join from another shell: {join_command(nodes)}", soft_wrap=True, markup=False
    )


def join_command(nodes: DemoNodes) -> str:
    """What a second shell types to take part. Each demo is another run, for which a node has
    another folder.

    That is in the home folder, and not in the working directory: in a checkout ``git add .``
    would take the node's private key along.
    """
    folder = f"~/shoal-{nodes.run.id.hex()[:6]}"
    return f"shoal node --role inference --data {folder} --bootstrap {nodes.bootstrap}"


@contextlib.contextmanager
def live_view(console: Console, show: Readable) -> Iterator[Any]:
    """A function that shows a status: redrawn on a terminal, a line every ten steps
    elsewhere."""
    doorbell = Doorbell()

    def greet(status: SwarmStatus) -> None:
        for line in doorbell.news(status):
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    if console.is_terminal:
        with Live(console=console, refresh_per_second=4) as live:

            def redraw(status: SwarmStatus, seconds: float) -> None:
                greet(status)
                live.update(draw(status, seconds, show))

            yield redraw
        return
    shown: list[int] = []
    steps: list[int] = []

    def tell(status: SwarmStatus, seconds: float) -> None:
        greet(status)
        curve = status.trainer.get("curve") or []
        if len(curve) > len(shown):
            shown.append(len(curve))
            step, greedy, sampled = curve[-1]
            console.print(
                f"{seconds:5.0f} s  step {step:3d}  held-out "
                f"greedy {greedy:.3f}  sampled {sampled:.3f}",
                highlight=False,
            )
        line = sample_line(status.trainer, show)
        if line and status.trainer["step"] not in steps:
            steps.append(status.trainer["step"])
            console.print(
                f"{seconds:5.0f} s  {line}", markup=False, highlight=False, soft_wrap=True
            )

    yield tell


def complaints(figures: dict[str, Any], show: Show, *, promised: bool = True) -> Iterator[str]:
    """What went otherwise than promised; a gain is ``promised`` for the default number of steps
    and more."""
    if promised:
        yield from _gate(figures, show).failures()
    if promised and not figures["cheater_submitted"]:
        yield "the cheater handed in nothing, so that it was not shown that it is caught"
    if figures["cheater_accepted"]:
        yield f"{figures['cheater_accepted']} submissions of the cheater were accepted"
    if figures["cheater_submitted"] and not figures["cheater_bans"]:
        yield "the cheater was caught, and not banned"
    if figures["honest_rejected"]:
        yield f"{figures['honest_rejected']} submissions of honest nodes were rejected"


def shortfalls(figures: dict[str, Any], show: Show) -> Iterator[str]:
    """What was hoped for and did not come: it is said, and is no failure."""
    yield from _gate(figures, show).shortfalls()
    first, last = figures["kinds_start"], figures["kinds_end"]
    for kind, (before, _) in first.items():
        if kind != _judged(show) and last[kind][0] < before - show.keeps:
            yield (
                f"{kind} fell from {before:.3f} to {last[kind][0]:.3f}, by more than"
                f" {show.keeps}"
            )


def _judged(show: Show) -> str:
    return show.judged and f"{show.environment}/{show.judged}"


def _gate(figures: dict[str, Any], show: Show) -> LearningGate:
    """The first evaluation against the last, of the kind of task that the promise is about."""
    judged = _judged(show)
    start = Evaluation(*figures["kinds_start"][judged]) if judged else _whole(figures, "start")
    end = Evaluation(*figures["kinds_end"][judged]) if judged else _whole(figures, "end")
    return LearningGate(start, end, show.promise, show.held_out)


def _whole(figures: dict[str, Any], when: str) -> Evaluation:
    return Evaluation(figures[f"greedy_{when}"], figures[f"reward_{when}"])


def by_kind(figures: dict[str, Any], show: Show) -> Iterator[str]:
    """The held-out rewards of each kind of task, where the environment has several."""
    first, last = figures["kinds_start"] or {}, figures["kinds_end"] or {}
    if len(first) < 2:
        return
    yield "\n  held-out by kind    greedy          sampled"
    for kind, before in first.items():
        name, after = kind.rpartition("/")[2], last[kind]
        gains = "   ".join(f"{a:.3f} → {b:.3f}" for a, b in zip(before, after, strict=True))
        yield f"  {name:<18}  {gains}{'' if name in show.kinds else '   not trained'}"


def answers(figures: dict[str, Any], show: Show) -> Iterator[str]:
    """What the policy said to a few held-out questions, before and after."""
    before, after = figures["shown_start"] or [], figures["shown_end"] or []
    if show.answers and before and after:
        yield "\n  held-out questions: before → after (✓ right)"
    for (prompt, first, paid), (_, last, earned) in list(zip(before, after, strict=False))[
        : show.answers
    ]:
        said = [
            f"{plain(show, tokens)} {'✓' if reward == 1 else '✗'}"
            for tokens, reward in ((first, paid), (last, earned))
        ]
        yield f"  {plain(show, prompt)} {said[0]} → {said[1]}"


def report(console: Console, figures: dict[str, Any], failures: list[str]) -> None:
    """The summary for people."""
    console.print(
        f"\n[bold]{figures['peers']} peers, {figures['policies']} policies, "
        f"{figures['seconds']:.0f} s, {figures['cpu_seconds']:.0f} CPU s[/bold]\n"
        f"  held-out reward   {gain(figures)}\n"
        f"  rollouts          {figures['rollouts_accepted']} accepted, "
        f"{figures['rollouts_rejected']} rejected{_staleness(figures)}\n"
        f"  the cheater       {figures['cheater_submitted']} submissions, "
        f"{figures['cheater_accepted']} accepted; honest work rejected: "
        f"{figures['honest_rejected']}\n"
        f"  its bans          {_bans(figures)}\n"
        f"  weights           {_weights(figures)}",
        highlight=False,
    )
    for failure in failures:
        console.print(f"[red]not as promised: {failure}[/red]", soft_wrap=True)


def gain(figures: dict[str, Any]) -> str:
    """The held-out rewards at the start and at the end, in words."""
    if figures["greedy_start"] is None:
        return "no policy was examined"
    return (
        f"greedy {figures['greedy_start']:.3f} → {figures['greedy_end']:.3f},"
        f" sampled {figures['reward_start']:.3f} → {figures['reward_end']:.3f}"
    )


def _staleness(figures: dict[str, Any]) -> str:
    learnt = figures["policies"] > 1
    return f", staleness at most {figures['staleness_max']}" if learnt else ""


def _bans(figures: dict[str, Any]) -> str:
    times = figures["cheater_bans"]
    return f"{times}, proven by the trainer's own replay" if times else "none"


def _weights(figures: dict[str, Any]) -> str:
    """What policies cost to spread, in words."""
    if not figures["policy_bytes"]:
        return "no policy was published"
    return (
        f"{size(figures['policy_bytes'])} a whole policy; for "
        f"{figures['policies']} the trainer sent {size(figures['origin_upload_bytes'])},\n"
        "                    five receivers got "
        f"{figures['leaf_share_from_peers']:.0%} from each other"
    )
