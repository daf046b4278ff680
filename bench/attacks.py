"""``python -m bench attacks``: a live node under each kind of attack, on loopback.

Gate: the node lives, an honest newcomer is served within a second while the attack runs, the
node never uses more than 150 MiB, and gives everything back within a minute. Exit status 1 if a
kind breaks it. ``--tree PATH`` measures the code of another checkout with the same attacks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import trio
from rich.console import Console
from rich.table import Table

from bench.hostile.kinds import KINDS
from bench.hostile.live import HERE, SETTLE, Outcome, attack_live
from bench.report import Report

COLUMNS: Final = (
    "worst s",
    "median s",
    "gave up",
    "MiB",
    "after",
    "files",
    "threads",
    "CPU %",
    "freed s",
)
UNITS: Final = {
    "newcomer_worst": "s",
    "newcomer_median": "s",
    "newcomers_gave_up": "count",
    "memory_most": "MiB",
    "memory_after": "MiB",
    "files_most": "count",
    "threads_most": "count",
    "cpu": "% of a core",
    "freed_after": "s",
    "alive": "bool",
    "tracebacks": "count",
    "penalties": "count",
}


def figures(outcome: Outcome) -> dict[str, float]:
    """Return the numbers of an outcome, by the names of `UNITS`."""
    return {
        "newcomer_worst": outcome.worst,
        "newcomer_median": outcome.median,
        "newcomers_gave_up": outcome.failures,
        "memory_most": outcome.mib_most,
        "memory_after": outcome.mib_after,
        "files_most": outcome.files_most,
        "threads_most": outcome.threads_most,
        "cpu": outcome.cpu_percent,
        "freed_after": min(outcome.freed_after, 1e6),
        "alive": outcome.alive,
        "tracebacks": outcome.crashes,
        "penalties": outcome.blamed,
    }


def show(outcomes: Sequence[Outcome]) -> Table:
    """Return a table with a row for each kind."""
    table = Table(title="a live node under attack")
    table.add_column("kind")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    table.add_column("what broke")
    for outcome in outcomes:
        table.add_row(
            outcome.name,
            f"{outcome.worst:.2f}",
            f"{outcome.median:.2f}",
            f"{outcome.failures}/{len(outcome.served)}",
            f"{outcome.mib_most:.0f}",
            f"{outcome.mib_after:.0f}",
            str(outcome.files_most),
            str(outcome.threads_most),
            f"{outcome.cpu_percent:.0f}",
            f"{outcome.freed_after:.0f}",
            "; ".join(outcome.broken()),
        )
    return table


def run(args: Sequence[str]) -> int:
    """Run ``python -m bench attacks [--json FILE] [--only NAME] [--seconds N] [--settle N]
    [--tree PATH]``.
    """
    parser = argparse.ArgumentParser(prog="python -m bench attacks", description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="may be given several times"
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="each attack lasts")
    parser.add_argument(
        "--settle", type=float, default=SETTLE, help="seconds to wait for what was held"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--tree", type=Path, default=HERE, help="checkout whose code the node runs"
    )
    parser.add_argument("--list", action="store_true", help="name the kinds and end")
    options = parser.parse_args(args)
    if options.list:
        for kind in KINDS.values():
            print(f"{kind.name:28} {kind.about}")
        return 0
    unknown = [name for name in options.only or () if name not in KINDS]
    if unknown:
        print(f"no attack is called {', '.join(unknown)}; see --list", file=sys.stderr)
        return 2
    report, outcomes = Report("attacks"), []
    for name in options.only or KINDS:
        outcome = trio.run(_attack, name, options)
        outcomes.append(outcome)
        broken = "; ".join(outcome.broken()) or "held"
        print(f"{name}: {broken} {outcome.tally} {outcome.said}", file=sys.stderr, flush=True)
        for metric, value in figures(outcome).items():
            report.add(name, "node", metric, UNITS[metric], (float(value),))
        report.write(options.json)
    Console(width=200).print(show(outcomes))
    return int(any(outcome.broken() for outcome in outcomes))


async def _attack(name: str, options: argparse.Namespace) -> Outcome:
    return await attack_live(
        name,
        options.tree.resolve(),
        seconds=options.seconds,
        settle=options.settle,
        seed=options.seed,
    )
