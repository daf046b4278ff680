"""``shoal demo``: one real swarm learns on one machine (also ``make demo``)."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio
from rich.console import Console
from rich.live import Live

from roles.rl.recipe import Recipe
from roles.scoreboard import draw, size
from roles.stage import DemoPlan, Stage, StageError
from roles.summary import SwarmStatus

GAIN: Final = 0.35
"""By how much held-out reward must rise, greedy and sampled (``bench rl-controls``: no control does)."""
START: Final = 0.55
"""Below which it must start: what the warm-up alone can do."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parse = argparse.ArgumentParser(prog="shoal demo", description=__doc__)
    parse.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and warm-up (default 0)")
    parse.add_argument("--steps", type=int, default=60, metavar="N", help="optimiser steps (default 60)")
    parse.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parse.add_argument(
        "--data", type=Path, metavar="DIR", help="keep the nodes' data there (default: temporary)"
    )
    return parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Play the demo; 0 if the swarm learnt and every cheat was caught, 1 if not, 130 on Ctrl-C."""
    options = parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING)
    console = Console(stderr=options.json is None and not sys.stdout.isatty())
    folder = options.data or Path(tempfile.mkdtemp(prefix="shoal-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    recipe = replace(Recipe(), steps=options.steps)
    plan = DemoPlan(seed=options.seed, recipe=recipe, folder=folder)
    figures: dict[str, Any] = {}
    trouble: list[BaseException] = []
    try:
        figures = trio.run(partial(play, plan, console))
    except* (StageError, KeyboardInterrupt) as errors:
        trouble.extend(leaves(errors))
    if trouble:
        interrupted = isinstance(trouble[0], KeyboardInterrupt)
        console.print("interrupted" if interrupted else f"[red]{trouble[0]}[/red]")
        console.print(f"the nodes' data is kept in {folder}")
        return 130 if interrupted else 1
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    failures = list(complaints(figures))
    report(console, figures, failures)
    if failures:
        console.print(f"the nodes' data is kept in {folder}")
    elif options.data is None:
        shutil.rmtree(folder)
    return 1 if failures else 0


async def play(plan: DemoPlan, console: Console) -> dict[str, Any]:
    """Run the whole swarm once; returns the figures."""
    began = time.monotonic()  # noqa: TID251 - a command line tool, outside every world

    def seconds() -> float:
        return time.monotonic() - began  # noqa: TID251

    async with trio.open_nursery() as nursery:
        stage = Stage(plan, nursery)
        try:
            with _live(console) as live:
                await stage.start()
                console.print(f"join from another shell: {join_command(stage)}", soft_wrap=True, markup=False)
                status = await stage.wait_done(lambda now: live(now, seconds()))
        finally:
            with trio.CancelScope(shield=True):
                await stage.stop()
        nursery.cancel_scope.cancel()
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "seed": plan.seed,
        **status.figures(),
        "seconds": round(seconds(), 1),
        "cpu_seconds": round(sum(use.ru_utime + use.ru_stime for use in usage), 1),
    }


def leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    """The errors of a group, without the groups around them."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from leaves(error)
        else:
            yield error


def join_command(stage: Stage) -> str:
    """What a second shell types to take part."""
    return f"python -m p2p.node --role inference --data my-node --bootstrap {stage.bootstrap}"


@contextlib.contextmanager
def _live(console: Console) -> Iterator[Any]:
    """A function that shows a status: redrawn on a terminal, a line every ten steps elsewhere."""
    if console.is_terminal:
        with Live(console=console, refresh_per_second=4) as live:
            yield lambda status, seconds: live.update(draw(status, seconds))
        return
    shown: list[int] = []

    def show(status: SwarmStatus, seconds: float) -> None:
        curve = status.trainer.get("curve") or []
        if len(curve) > len(shown):
            shown.append(len(curve))
            step, greedy, sampled = curve[-1]
            console.print(
                f"{seconds:5.0f} s  step {step:3d}  held-out greedy {greedy:.3f}  sampled {sampled:.3f}",
                highlight=False,
            )

    yield show


def complaints(figures: dict[str, Any]) -> Iterator[str]:
    """What went otherwise than promised."""
    for kind in ("greedy", "reward"):
        start, end = figures[f"{kind}_start"], figures[f"{kind}_end"]
        if start >= START:
            yield f"{kind} started at {start:.3f}, not below {START}: the warm-up learnt too much"
        if end - start < GAIN:
            yield f"{kind} rose by {end - start:.3f}, not by {GAIN}"
    if figures["cheater_accepted"]:
        yield f"{figures['cheater_accepted']} submissions of the cheater were accepted"
    if figures["honest_rejected"]:
        yield f"{figures['honest_rejected']} submissions of honest nodes were rejected"


def report(console: Console, figures: dict[str, Any], failures: list[str]) -> None:
    """The summary for people."""
    per_policy = figures["policy_bytes"] * figures["policies"]
    console.print(
        f"\n[bold]{figures['peers']} peers, {figures['policies']} policies, {figures['seconds']:.0f} s, "
        f"{figures['cpu_seconds']:.0f} CPU s[/bold]\n"
        f"  held-out reward   greedy {figures['greedy_start']:.3f} → {figures['greedy_end']:.3f}, "
        f"sampled {figures['reward_start']:.3f} → {figures['reward_end']:.3f}\n"
        f"  rollouts          {figures['rollouts_accepted']} accepted, "
        f"{figures['rollouts_rejected']} rejected, "
        f"staleness at most {figures['staleness_max']}\n"
        f"  the cheater       {figures['cheater_submitted']} submissions, "
        f"{figures['cheater_accepted']} accepted; honest work rejected: {figures['honest_rejected']}\n"
        f"  weights           {size(figures['policy_bytes'])} a policy; the trainer sent "
        f"{figures['origin_upload_bytes'] / per_policy:.2f} × that in all,\n"
        f"                    five receivers got {figures['leaf_share_from_peers']:.0%} from each other",
        highlight=False,
    )
    for failure in failures:
        console.print(f"[red]not as promised: {failure}[/red]")


if __name__ == "__main__":
    sys.exit(main())
