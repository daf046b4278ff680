"""The command line of the simulator: ``shoal sim list``, ``shoal sim run SCENARIO``."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from p2p.errors import ConfigError
from sim.errors import SimulationError
from sim.runner import Progress as Report, Result, run_scenario
from sim.scenario import load_scenario, scenario_names
from sim.simulation import Simulation

EXIT_FAILED = 1
EXIT_USAGE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0, 1 when an expectation or the simulation fails, 2 when the command makes no sense."""
    options = parser().parse_args(arguments)
    logging.basicConfig(level=logging.ERROR)
    console = Console(stderr=False)
    try:
        if options.command == "list":
            return list_scenarios(console)
        return run(options, console)
    except ConfigError as error:
        Console(stderr=True).print(f"[red]{error}[/red]", highlight=False)
        return EXIT_USAGE
    except SimulationError as error:
        Console(stderr=True).print(f"[red]the simulation failed: {error}[/red]", highlight=False)
        return EXIT_FAILED


def parser() -> argparse.ArgumentParser:
    """The whole grammar."""
    root = argparse.ArgumentParser(prog="shoal sim", description=__doc__)
    commands = root.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="show the scenarios")
    run = commands.add_parser("run", help="run one scenario")
    run.add_argument("scenario", help="a name from `list`, or a TOML file")
    run.add_argument("--nodes", type=int, help="instead of the scenario's own number")
    run.add_argument("--seed", type=int, default=1, help="the same seed gives the same trace (default 1)")
    run.add_argument("--level", type=int, choices=(0, 1, 2, 3), help="rung of the ladder of fidelity")
    run.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    return root


def list_scenarios(console: Console) -> int:
    """Print every scenario with its caption."""
    table = Table("scenario", "nodes", "level", "question", box=None)
    for name in scenario_names():
        scenario = load_scenario(name)
        table.add_row(name, str(scenario.nodes), f"L{scenario.level}", scenario.caption)
    console.print(table)
    return 0


def run(options: argparse.Namespace, console: Console) -> int:
    """Run one scenario, print what came of it."""
    scenario = load_scenario(options.scenario).with_changes(nodes=options.nodes, level=options.level)
    with _progress(console, scenario.duration, scenario.name) as report:
        result = run_scenario(scenario, options.seed, progress=report)
    if options.json is not None:
        options.json.write_text(json.dumps(result.to_json(), indent=2) + "\n", encoding="utf-8")
    show(result, console)
    return 0 if result.ok else EXIT_FAILED


def show(result: Result, console: Console) -> None:
    """Print a result for people."""
    table = Table("metric", "value", box=None, title=f"{result.scenario}, seed {result.seed}")
    for name, value in result.metrics.items():
        table.add_row(name, f"{value:,}" if isinstance(value, int) else str(value))
    console.print(table)
    for entry in result.expectations:
        mark = "[green]met[/green]" if entry["ok"] else "[red]FAILED[/red]"
        console.print(f"{mark}  {entry['name']}  (is {entry['value']})", highlight=False)
    rate = result.events / max(result.cpu_seconds, 1e-9)
    console.print(
        f"{result.nodes} nodes, {result.virtual_seconds:,.0f} virtual seconds in {result.cpu_seconds:.1f} CPU"
        f" seconds, {result.events:,} events ({rate:,.0f}/s), trace {result.trace_hash}",
        highlight=False,
    )


@contextmanager
def _progress(console: Console, duration: float, name: str) -> Iterator[Report | None]:
    """A bar in virtual seconds, on a terminal only."""
    if not (console.is_terminal and sys.stderr.isatty()):
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} virtual s"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task(name, total=duration)

        def report(simulation: Simulation) -> None:
            bar.update(task, completed=min(simulation.now, duration), refresh=True)

        yield report
