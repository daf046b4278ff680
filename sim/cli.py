"""The command line of the simulator: list, run, sweep, diff, replay, shrink, trace."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from p2p.errors import ConfigError, ShoalError
from sim.diff import Side, first_difference
from sim.errors import SimulationError
from sim.faults import Fault, plan_from_table, save_plan
from sim.lab.namespaces import LabUnavailable
from sim.perfetto import write_perfetto
from sim.report import report, sweep_report
from sim.runner import Progress as Report, Result, run_scenario
from sim.scenario import Scenario, load_scenario, scenario_names
from sim.shrink import shrink
from sim.simulation import SimOptions, Simulation
from sim.sweep import Run, describe, grid, open_executor, summarise, sweep
from sim.trace import EVERYTHING

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_UNAVAILABLE: Final = 3
"""This machine has no level 3; the sentence says what is missing."""
EXIT_INTERRUPTED: Final = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0, 1 when an expectation or the simulation fails, 2 when the command makes no sense.

    3 when this machine has no level 3.
    """
    options = parser().parse_args(arguments)
    logging.basicConfig(level=logging.ERROR)
    console, complaints = Console(), Console(stderr=True)
    commands: dict[str, Callable[[argparse.Namespace, Console], int]] = {
        "list": list_scenarios,
        "run": run,
        "sweep": run_sweep,
        "diff": diff,
        "replay": replay,
        "shrink": run_shrink,
        "trace": trace,
    }
    try:
        return commands[options.command](options, console)
    except ConfigError as error:
        complaints.print(f"[red]{error}[/red]", highlight=False)
        return EXIT_USAGE
    except LabUnavailable as error:
        complaints.print(f"[yellow]{error}[/yellow]", highlight=False)
        return EXIT_UNAVAILABLE
    except (SimulationError, ShoalError, ExceptionGroup) as error:
        complaints.print(f"[red]the simulation failed: {describe(error)}[/red]", highlight=False)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def parser() -> argparse.ArgumentParser:
    """The whole grammar."""
    root = argparse.ArgumentParser(prog="shoal sim", description="The production code on virtual time.")
    commands = root.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="show the scenarios")

    run = _scenario_parser(commands, "run", "run one scenario")
    run.add_argument("--report", type=Path, metavar="FILE", help="write one self-contained HTML page there")
    run.add_argument("--baseline", type=Path, metavar="FILE", help="an earlier --json: print what changed")
    run.add_argument("--save-plan", type=Path, metavar="FILE", help="write the faults there, for replay")

    many = _scenario_parser(commands, "sweep", "run many seeds and settings on all cores", seed=False)
    many.add_argument("--seeds", default="1-20", help="such as 1-200 or 3,5,8 (default 1-20)")
    many.add_argument(
        "--set", action="append", default=[], metavar="KEY=A,B", help="values to try, repeatable"
    )
    many.add_argument("--jobs", type=int, help="processes at a time (default: all cores)")
    many.add_argument("--executor", metavar="MODULE:NAME", help="makes a concurrent.futures executor")
    many.add_argument("--report", type=Path, metavar="FILE", help="write an HTML page there")

    differ = _scenario_parser(commands, "diff", "name the first event in which two runs differ")
    differ.add_argument("--seed2", type=int, help="seed of the second run (default: the same)")
    differ.add_argument("--python", default=sys.executable, help="interpreter of the second run")

    again = commands.add_parser("replay", help="run a saved plan of faults again")
    again.add_argument("file", type=Path)
    again.add_argument("--json", type=Path, metavar="FILE", help="write the result there")

    smaller = commands.add_parser("shrink", help="leave out of a failing plan what does not matter")
    smaller.add_argument("file", type=Path)
    smaller.add_argument("--out", type=Path, required=True, metavar="FILE")

    perfetto = _scenario_parser(commands, "trace", "write a trace for ui.perfetto.dev")
    perfetto.add_argument("--out", type=Path, required=True, metavar="FILE")
    return root


def _scenario_parser(commands: Any, name: str, text: str, *, seed: bool = True) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=text)
    command.add_argument("scenario", help="a name from `list`, or a TOML file")
    command.add_argument("--nodes", type=int, help="instead of the scenario's own number")
    command.add_argument("--duration", type=float, help="virtual seconds, instead of the scenario's own")
    command.add_argument("--level", type=int, choices=(0, 1, 2, 3), help="rung of the ladder of fidelity")
    command.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    if seed:
        command.add_argument("--seed", type=int, default=1, help="same seed, same trace (default 1)")
    return command


def _scenario(options: argparse.Namespace) -> Scenario:
    scenario = load_scenario(options.scenario)
    return scenario.with_changes(nodes=options.nodes, level=options.level, duration=options.duration)


def list_scenarios(options: argparse.Namespace, console: Console) -> int:
    """Print every scenario with its caption."""
    table = Table("scenario", "nodes", "level", "question", box=None)
    for name in scenario_names():
        scenario = load_scenario(name)
        table.add_row(name, f"{scenario.nodes:,}", f"L{scenario.level}", scenario.caption)
    console.print(table)
    return 0


def run(options: argparse.Namespace, console: Console) -> int:
    """Run one scenario, print what came of it."""
    scenario = _scenario(options)
    with _progress(console, scenario) as progress:
        result = run_scenario(scenario, options.seed, progress=progress)
    _write(options.json, json.dumps(result.to_json(), indent=2))
    _write(options.report, report(result, scenario.caption))
    if options.save_plan is not None:
        plan = plan_from_table(result.faults)
        save_plan(options.save_plan, options.scenario, result.seed, result.nodes, plan, _broken(result))
    show(result, console)
    if options.baseline is not None:
        show_changes(json.loads(options.baseline.read_text(encoding="utf-8")), result, console)
    return 0 if result.ok else EXIT_FAILED


def show(result: Result, console: Console) -> None:
    """Print a result for people."""
    table = Table("metric", "value", box=None, title=f"{result.scenario}, seed {result.seed}")
    for name, value in result.metrics.items():
        table.add_row(name, f"{value:,}" if isinstance(value, int) else str(value))
    console.print(table)
    if result.faults:
        console.print(f"{len(result.faults)} faults happened on purpose", highlight=False)
    for entry in result.expectations:
        mark = "[green]met[/green]" if entry["ok"] else "[red]FAILED[/red]"
        console.print(f"{mark}  {entry['name']}  (is {entry['value']})", highlight=False)
    if not result.trace_hash:
        console.print(
            f"{result.nodes} processes, {result.virtual_seconds:,.0f} real seconds,"
            f" {result.cpu_seconds:.1f} CPU seconds, no trace",
            highlight=False,
        )
        return
    rate = result.events / max(result.cpu_seconds, 1e-9)
    console.print(
        f"{result.nodes} nodes, {result.virtual_seconds:,.0f} virtual seconds in {result.cpu_seconds:.1f} CPU"
        f" seconds, {result.events:,} events ({rate:,.0f}/s), trace {result.trace_hash}",
        highlight=False,
    )


def show_changes(before: dict[str, Any], result: Result, console: Console) -> None:
    """Print every metric that is not what it was."""
    table = Table("metric", "before", "now", "change", box=None, title="against the baseline")
    old = before["metrics"]
    for name in dict.fromkeys((*old, *result.metrics)):
        was, now = old.get(name), result.metrics.get(name)
        if was != now:
            known = isinstance(was, int | float) and isinstance(now, int | float) and was
            table.add_row(name, str(was), str(now), f"{100 * (now / was - 1):+.1f} %" if known else "")
    console.print(table if table.row_count else "no metric has changed", highlight=False)
    if before["level"] != result.level:
        console.print(f"before is level {before['level']}, now is level {result.level}", highlight=False)
        return
    same = before["trace_hash"] == result.trace_hash
    console.print(f"the trace is {'the same' if same else 'another one'}", highlight=False)


def run_sweep(options: argparse.Namespace, console: Console) -> int:
    """Run many seeds and settings."""
    scenario = _scenario(options)
    seeds = _seeds(options.seeds)
    settings = dict(_setting(text) for text in options.set)
    runs: list[Run] = []
    total = len(seeds) * len(grid(settings))
    with console.status(f"0 of {total} runs") as status:
        for one in sweep(scenario, seeds, settings, open_executor(options.executor, options.jobs)):
            runs.append(one)
            status.update(f"{len(runs)} of {total} runs, {sum(not run.ok for run in runs)} failed")
    summary = summarise(runs)
    _write(options.json, json.dumps(summary, indent=2))
    _write(options.report, sweep_report(scenario.name, scenario.caption, summary))
    for entry in summary["failed"]:
        console.print(
            f"[red]seed {entry['seed']} {entry['changes'] or ''}: {entry['why']}[/red]", highlight=False
        )
    for title, counts in (("claim held", summary["witnessed"]), ("site misbehaved", summary["fired"])):
        if counts:
            console.print(_counts(title, counts))
    console.print(
        f"{summary['runs']} runs, {len(summary['failed'])} failed, {summary['cpu_seconds']:.0f} CPU seconds, "
        f"all traces {summary['trace_hash']}",
        highlight=False,
    )
    return EXIT_FAILED if summary["failed"] else 0


def _counts(title: str, counts: Mapping[str, int]) -> Table:
    """How often each happened; what never did stands out."""
    table = Table(title, "times", box=None)
    for name, times in counts.items():
        table.add_row(name, f"{times:,}" if times else "[red]never[/red]")
    return table


def _seeds(text: str) -> list[int]:
    try:
        seeds: list[int] = []
        for part in text.split(","):
            first, _, last = part.partition("-")
            seeds.extend(range(int(first), int(last or first) + 1))
    except ValueError:
        raise ConfigError(f"--seeds {text}: write 1-200 or 3,5,8") from None
    return seeds


def _setting(text: str) -> tuple[str, list[Any]]:
    key, equals, values = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text}: write KEY=VALUE or KEY=A,B,C")
    return key, [_value(value) for value in values.split(",")]


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def diff(options: argparse.Namespace, console: Console) -> int:
    """Run twice, in processes with different hash seeds, and compare."""
    second = options.seed if options.seed2 is None else options.seed2
    one = Side(options.scenario, options.seed, options.nodes, "1")
    other = Side(options.scenario, second, options.nodes, "2", options.python)
    difference = first_difference(one, other)
    if difference is None:
        console.print("both runs have the same trace", highlight=False)
        return 0
    console.print(f"event {difference.number} differs:", highlight=False)
    console.print(f"  one    {difference.one}", highlight=False)
    console.print(f"  other  {difference.other}", highlight=False)
    return EXIT_FAILED


def _load_plan(path: Path) -> tuple[Scenario, int, tuple[Fault, ...]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        plan = plan_from_table(content["faults"])
        scenario = load_scenario(content["scenario"]).with_changes(nodes=content["nodes"])
        draw = scenario.draw and replace(scenario.draw, kinds=())  # sites misbehave as they did
        return replace(scenario, draw=draw, faults=plan), int(content["seed"]), plan
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no saved plan: {error!r}") from None


def replay(options: argparse.Namespace, console: Console) -> int:
    """Run a saved plan again."""
    scenario, seed, plan = _load_plan(options.file)
    for fault in plan:
        console.print(f"  {fault}", highlight=False)
    result = run_scenario(scenario, seed)
    _write(options.json, json.dumps(result.to_json(), indent=2))
    show(result, console)
    return 0 if result.ok else EXIT_FAILED


def run_shrink(options: argparse.Namespace, console: Console) -> int:
    """Leave out what does not matter, and write what remains."""
    scenario, seed, plan = _load_plan(options.file)

    def fails(attempt: Sequence[Fault]) -> bool:
        failed = not _holds(replace(scenario, faults=tuple(attempt)), seed)
        console.print(f"{len(attempt)} faults: {'still fails' if failed else 'holds'}", highlight=False)
        return failed

    if not fails(plan):
        console.print("the plan does not fail: nothing to shrink", highlight=False)
        return 0
    smallest = shrink(plan, fails)
    save_plan(options.out, scenario.name, seed, scenario.nodes, smallest, "shrunk")
    for fault in smallest:
        console.print(f"  {fault}", highlight=False)
    return EXIT_FAILED


def _holds(scenario: Scenario, seed: int) -> bool:
    try:
        return run_scenario(scenario, seed).ok
    except (SimulationError, ExceptionGroup):
        return False


def trace(options: argparse.Namespace, console: Console) -> int:
    """Run one scenario and keep everything that happened."""
    simulations: list[Simulation] = []
    keep = SimOptions(keep_trace=EVERYTHING)
    run_scenario(_scenario(options), options.seed, options=keep, started=simulations.append)
    with options.out.open("w", encoding="utf-8") as out:
        count = write_perfetto(simulations[0].trace.kept, out)
    console.print(f"{count:,} events in {options.out}; open it at https://ui.perfetto.dev", highlight=False)
    return 0


def _broken(result: Result) -> str:
    return "; ".join(str(entry["name"]) for entry in result.expectations if not entry["ok"])


def _write(path: Path | None, text: str) -> None:
    if path is not None:
        path.write_text(text.rstrip("\n") + "\n", encoding="utf-8")


@contextmanager
def _progress(console: Console, scenario: Scenario) -> Iterator[Report | None]:
    """A bar in seconds of the scenario, on a terminal only."""
    if not (console.is_terminal and sys.stderr.isatty()):
        yield None
        return
    unit = "s" if scenario.level == 3 else "virtual s"
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn(f"{{task.completed:,.0f}} of {{task.total:,.0f}} {unit}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task(scenario.name, total=scenario.duration)

        def report(seconds: float, doing: str) -> None:
            done = min(seconds, scenario.duration)
            bar.update(task, completed=done, description=f"{scenario.name}, {doing}", refresh=True)

        yield report
