"""The command line of the simulator: list, run, sweep, diff, replay, shrink, trace."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import shutil
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from p2p.errors import ConfigError, ShoalError
from p2p.node.usage import (
    BEGINS_AGAIN,
    FAILED,
    INTERRUPTED,
    STANDARD_OUTPUT,
    WRONG_USAGE,
    CommandParser,
    check_target,
    ignore_interrupts,
    interruptible,
    whole_number,
    write_text,
)
from sim.errors import LabUnavailable, SimulationError
from sim.faults.plan import Fault, plan_from_table, save_plan
from sim.faults.shrink import shrink
from sim.kernel.simulation import SimOptions, Simulation
from sim.kernel.trace import EVERYTHING
from sim.run.catalogue import THEMES, cost
from sim.run.diff import Side, first_difference
from sim.run.meanings import in_a_sentence
from sim.run.observers import Progress as Report
from sim.run.perfetto import write_perfetto
from sim.run.report import report, sweep_report
from sim.run.result import Result
from sim.run.runner import check_scenario, run_scenario
from sim.run.scenario import (
    Scenario,
    load_scenario,
    scenario_from_table,
    scenario_to_table,
)
from sim.run.sweep import (
    SweepRun,
    changed,
    describe,
    grid,
    innermost,
    is_bug,
    open_executor,
    summarise,
    sweep,
)

EXIT_UNAVAILABLE: Final = 3
"""Exit status of a machine without level 3."""
TARGETS: Final = ("json", "report", "save_plan", "out")
"""Options that name a file to write: checked before anything is played."""
TOLD_SECONDS: Final = 5.0
"""Seconds between progress lines of a sweep whose output is no terminal: a person sees that it
goes on, and a log of an hour has 720 lines.
"""
LIST_WIDTH: Final = 80
"""Columns of the list of scenarios, however wide the terminal is: captions are read better."""
NAME_WIDTH: Final = 20
"""Width of scenario names: that of the longest, ``intellect2_reference``."""
MAX_COLUMNS: Final = 4
"""Metrics that a sweep prints beside each other: what fits 80 columns. The page has all."""
MAX_SEEDS: Final = 1_000_000
"""Most seeds of a sweep: a week of seconds. More is a typing error (1-20000000000) and would
fill memory."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Play scenarios in the simulator: run, sweep, replay, compare.

    Returns 0, 1 when an expectation or the simulation fails, 2 when the command makes no sense,
    3 when this machine has no level 3, 130 after Ctrl-C.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    return interruptible(partial(_main, given), BEGINS_AGAIN)


def _main(arguments: list[str]) -> int:
    complaints = Console(stderr=True)
    options = parser().parse_args(arguments)
    options.line = shlex.join(["shoal", "sim", *arguments])
    logging.basicConfig(level=logging.ERROR)
    if os.getcwd() not in sys.path and "" not in sys.path:
        # where `python -m sim` finds workloads, the command `shoal` does, too
        sys.path.append(os.getcwd())
    try:
        return COMMANDS[options.command](options, Console(stderr=_check_targets(options)))
    except ConfigError as error:
        complaints.print(f"[red]{escape(str(error))}[/red]", highlight=False, soft_wrap=True)
        return WRONG_USAGE
    except LabUnavailable as error:
        complaints.print(f"[yellow]{error}[/yellow]", highlight=False)
        return EXIT_UNAVAILABLE
    except (SimulationError, ShoalError, ExceptionGroup) as error:
        return _explain(error, complaints)


def _check_targets(options: argparse.Namespace) -> bool:
    """Check every file that is to be written. Return True if one of them is standard output
    (``-``).

    Then what is for people goes to standard error. Raises `ConfigError`.
    """
    targets = {f"--{name.replace('_', '-')}": getattr(options, name, None) for name in TARGETS}
    for option, path in targets.items():
        check_target(option, path)
    piped = [option for option, path in targets.items() if path == STANDARD_OUTPUT]
    if len(piped) > 1:
        raise ConfigError(
            f"{' and '.join(piped)} cannot both be -: standard output takes one of them"
        )
    return bool(piped)


def _explain(error: Exception, complaints: Console) -> int:
    """Print why a simulation could not be played to its end; for a bug with the traceback."""
    reason = innermost(error)
    if isinstance(reason, ConfigError):
        complaints.print(f"[red]{escape(str(reason))}[/red]", highlight=False, soft_wrap=True)
        return WRONG_USAGE
    if is_bug(reason):
        text = "".join(traceback.format_exception(reason))
        complaints.print(text, highlight=False, markup=False, soft_wrap=True)
    said = f"the simulation failed: {escape(describe(error))}"
    complaints.print(f"[red]{said}[/red]", highlight=False, soft_wrap=True)
    return FAILED


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands and their options."""
    root = CommandParser(prog="shoal sim", description="The production code on virtual time.")
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("list", help="show the scenarios")

    run = _scenario_parser(commands, "run", "run one scenario")
    run.add_argument(
        "--report", type=Path, metavar="FILE", help="write one self-contained HTML page there"
    )
    run.add_argument(
        "--baseline", type=Path, metavar="FILE", help="an earlier --json: print what changed"
    )
    run.add_argument(
        "--save-plan", type=Path, metavar="FILE", help="write the faults there, for replay"
    )

    many = _scenario_parser(
        commands, "sweep", "run many seeds and settings on all cores", seed=False
    )
    many.add_argument("--seeds", default="1-20", help="such as 1-200 or 3,5,8 (default 1-20)")
    many.add_argument(
        "--jobs", type=whole_number(1, 4096), help="processes at a time (default: all cores)"
    )
    many.add_argument(
        "--executor", metavar="MODULE:NAME", help="makes a concurrent.futures executor"
    )
    many.add_argument("--report", type=Path, metavar="FILE", help="write an HTML page there")

    differ = _scenario_parser(commands, "diff", "name the first event in which two runs differ")
    differ.add_argument("--seed2", type=int, help="seed of the second run (default: the same)")
    differ.add_argument(
        "--python", default=sys.executable, help="interpreter of the second run"
    )

    again = commands.add_parser("replay", help="run a saved plan of faults again")
    again.add_argument("file", type=Path)
    again.add_argument(
        "--json", type=Path, metavar="FILE", help="write the result there; - is standard output"
    )

    smaller = commands.add_parser(
        "shrink", help="leave out of a failing plan what does not matter"
    )
    smaller.add_argument("file", type=Path)
    smaller.add_argument("--out", type=Path, required=True, metavar="FILE")

    perfetto = _scenario_parser(commands, "trace", "write a trace for ui.perfetto.dev")
    perfetto.add_argument("--out", type=Path, required=True, metavar="FILE")
    return root


def _scenario_parser(
    commands: Any, name: str, text: str, *, seed: bool = True
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=text)
    command.add_argument("scenario", help="a name from `list`, or a TOML file")
    command.add_argument("--nodes", type=int, help="instead of the scenario's own number")
    command.add_argument(
        "--duration", type=float, help="virtual seconds, instead of the scenario's own"
    )
    command.add_argument(
        "--level", type=int, choices=(0, 1, 2, 3), help="rung of the ladder of fidelity"
    )
    command.add_argument(
        "--json", type=Path, metavar="FILE", help="write the result there; - is standard output"
    )
    metavar, text = ("KEY=VALUE", "a value") if seed else ("KEY=A,B", "values to try")
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar=metavar,
        help=f"{text} of [parameters], or nodes, latency, link.up ...; repeatable",
    )
    if seed:
        command.add_argument(
            "--seed", type=int, default=1, help="same seed, same trace (default 1)"
        )
    return command


def _changes(options: argparse.Namespace) -> dict[str, Any]:
    """Return the changes of a scenario by the options, for `sim.run.sweep.changed`."""
    given = {"nodes": options.nodes, "level": options.level, "duration": options.duration}
    return {key: value for key, value in given.items() if value is not None}


def _one_change(options: argparse.Namespace) -> dict[str, Any]:
    """Return the changes of a scenario by the options, ``--set`` included, for one setting."""
    changes = _changes(options)
    for text in options.set:
        key, values = _setting(text)
        if len(values) > 1:
            raise ConfigError(f"--set {text}: one value at a time; `sweep` tries several")
        changes[key] = values[0]
    return changes


def _scenario(options: argparse.Namespace, changes: Mapping[str, Any]) -> Scenario:
    """Return the scenario with the options' changes.

    Raises:
        ConfigError: The scenario cannot be played, as far as that is known beforehand.
    """
    scenario = changed(load_scenario(options.scenario), changes)
    check_scenario(scenario)
    return scenario


def list_scenarios(options: argparse.Namespace, console: Console) -> int:
    """Print every scenario with its question, by theme."""
    for theme, costs in THEMES.items():
        table = Table(
            Column("scenario", width=NAME_WIDTH),
            Column("nodes", justify="right", width=6),
            Column("cost", justify="right", width=6),
            Column("question", max_width=LIST_WIDTH - NAME_WIDTH - 17),
            box=None,
            padding=(0, 1, 0, 0),
            title=theme,
            title_justify="left",
            title_style="bold",
            show_header=theme == next(iter(THEMES)),
        )
        for name in costs:
            scenario = load_scenario(name)
            table.add_row(name, f"{scenario.nodes:,}", cost(name), scenario.caption)
        console.print(table)
        console.print()
    console.print("cost: CPU time of one run as it is; shoal sim run NAME plays it")
    return 0


def run(options: argparse.Namespace, console: Console) -> int:
    """Run one scenario and print its result."""
    scenario = _scenario(options, _one_change(options))
    baseline = None if options.baseline is None else _baseline(options.baseline)
    plan: list[Fault] = []
    try:
        with _progress(console, scenario) as progress:
            result = run_scenario(scenario, options.seed, progress=progress, plan=plan)
    except (SimulationError, ExceptionGroup) as error:
        if options.save_plan is not None:  # the plan that is wanted most
            _save(options.save_plan, scenario, options.seed, plan, describe(error))
        raise
    _write_result(options, result)
    write_text("--report", options.report, report(result, scenario.caption, options.line))
    if options.save_plan is not None:
        _save(
            options.save_plan,
            scenario,
            result.seed,
            plan_from_table(result.faults),
            _broken(result),
        )
    show(result, console)
    if baseline is not None:
        show_changes(baseline, result, console)
    return 0 if result.ok else FAILED


def _baseline(path: Path) -> dict[str, Any]:
    """Return an earlier result from its JSON file.

    Raises:
        ConfigError: The file is no result.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
        if not all(key in found for key in ("metrics", "level", "trace_hash")):
            raise ValueError("it lacks metrics, level or trace_hash")
    except OSError as error:
        raise ConfigError(f"--baseline {path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"--baseline {path} is no result of `sim run --json`: {error}"
        ) from None
    baseline: dict[str, Any] = found
    return baseline


def _save(path: Path, scenario: Scenario, seed: int, plan: Sequence[Fault], why: str) -> None:
    """Write a plan with all settings of the run, so that it can be replayed after the scenario
    has changed."""
    settings = scenario_to_table(scenario)
    settings["faults"] = []
    save_plan(path, scenario.source, seed, scenario.nodes, plan, why, settings=settings)


def _write_result(options: argparse.Namespace, result: Result) -> None:
    write_text("--json", options.json, json.dumps(result.to_json(), indent=2))


def show(result: Result, console: Console) -> None:
    """Print a result for people."""
    console.print(in_a_sentence(result), highlight=False, style="bold")
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
        f"{result.nodes} nodes, {result.virtual_seconds:,.0f} virtual seconds"
        f" in {result.cpu_seconds:.1f} CPU seconds, {result.events:,} events ({rate:,.0f}/s),"
        f" trace {result.trace_hash}",
        highlight=False,
    )


def show_changes(before: dict[str, Any], result: Result, console: Console) -> None:
    """Print every metric that changed."""
    table = Table("metric", "before", "now", "change", box=None, title="against the baseline")
    old = before["metrics"]
    for name in dict.fromkeys((*old, *result.metrics)):
        was, now = old.get(name), result.metrics.get(name)
        if was != now:
            known = isinstance(was, int | float) and isinstance(now, int | float) and was
            table.add_row(
                name, str(was), str(now), f"{100 * (now / was - 1):+.1f} %" if known else ""
            )
    console.print(table if table.row_count else "no metric has changed", highlight=False)
    if before["level"] != result.level:
        console.print(
            f"before is level {before['level']}, now is level {result.level}", highlight=False
        )
        return
    same = before["trace_hash"] == result.trace_hash
    console.print(f"the trace is {'the same' if same else 'another one'}", highlight=False)


def run_sweep(options: argparse.Namespace, console: Console) -> int:
    """Run many seeds and settings. Ctrl-C ends it within a second or two; what had ended is
    kept."""
    changes = _changes(options)
    scenario = changed(load_scenario(options.scenario), changes)
    seeds = _seeds(options.seeds)
    settings = dict(_setting(text) for text in options.set)
    combinations = grid(settings)
    for combination in combinations:
        check_scenario(changed(scenario, combination))
    runs: list[SweepRun] = []
    total = len(seeds) * len(combinations)
    interrupted = False
    executor = open_executor(options.executor, options.jobs)
    try:
        with _telling(console, total) as tell:
            for one in sweep(scenario, seeds, settings, executor):
                runs.append(one)
                tell(runs)
    except KeyboardInterrupt:
        ignore_interrupts()
        interrupted = True
        console.print(f"interrupted: {len(runs)} of {total} runs had ended", highlight=False)
    summary = summarise(runs)
    summary["expected"] = list(dict.fromkeys(one.metric for one in scenario.expect))
    failed = _tell_sweep(options, console, scenario, summary)
    return INTERRUPTED if interrupted else FAILED if failed else 0


class _Log:
    """Lines on standard error, one every few seconds from a thread of its own, since the sweep
    waits for its processes."""

    def __init__(self, words: Callable[[Sequence[SweepRun]], str]) -> None:
        self._console = Console(stderr=True)
        self._words = words
        self._runs: Sequence[SweepRun] = ()
        self._is_over = threading.Event()

    def hear(self, runs: Sequence[SweepRun]) -> None:
        """Take the runs that have ended so far."""
        self._runs = runs

    def _say(self) -> None:
        self._console.print(self._words(self._runs), highlight=False)

    def _say_now_and_then(self) -> None:
        while not self._is_over.wait(TOLD_SECONDS):
            self._say()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Say it until the block ends, and a last time."""
        thread = threading.Thread(target=self._say_now_and_then, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            thread.join()
            self._say()


@contextmanager
def _telling(console: Console, total: int) -> Iterator[Callable[[Sequence[SweepRun]], None]]:
    """Says how far a sweep is: on a terminal in a line that changes, else, where a person reads
    a log, in a line every few seconds."""

    def words(runs: Sequence[SweepRun]) -> str:
        return f"{len(runs)} of {total} runs, {sum(not run.ok for run in runs)} failed"

    if console.is_terminal:
        with console.status(words(())) as status:
            yield lambda runs: status.update(words(runs))
        return
    log = _Log(words)
    with log.running():
        yield log.hear


def _tell_sweep(
    options: argparse.Namespace, console: Console, scenario: Scenario, summary: dict[str, Any]
) -> int:
    """Write and print the results of a sweep. Return the number of failed runs."""
    write_text("--json", options.json, json.dumps(summary, indent=2))
    page = sweep_report(scenario.name, scenario.caption, summary, options.line)
    write_text("--report", options.report, page)
    for entry in summary["failed"]:
        said = escape(f"seed {entry['seed']} {entry['changes'] or ''}: {entry['why']}")
        console.print(f"[red]{said}[/red]", highlight=False)
    console.print(_by_setting(summary))
    for title, counts in (
        ("claim held", summary["witnessed"]),
        ("site misbehaved", summary["fired"]),
    ):
        if counts:
            console.print(_counts(title, counts))
    console.print(
        f"{summary['runs']} runs, {len(summary['failed'])} failed, "
        f"{summary['cpu_seconds']:.0f} CPU seconds, "
        f"all traces {summary['trace_hash']}",
        highlight=False,
    )
    return len(summary["failed"])


def _by_setting(summary: Mapping[str, Any]) -> Table:
    """Return a table with one row for each setting: medians, and the middle four fifths."""
    names = [
        *summary["expected"],
        *(name for row in summary["settings"] for name in row["metrics"]),
    ]
    shown = [
        name
        for name in dict.fromkeys(names)
        if any(name in row["metrics"] for row in summary["settings"])
    ][:MAX_COLUMNS]
    table = Table("setting", "runs", *shown, box=None)
    for row in summary["settings"]:
        changes = ", ".join(f"{key}={value}" for key, value in row["changes"].items())
        cells = [_interval(row["metrics"].get(name)) for name in shown]
        table.add_row(changes or "as it is", str(row["runs"]), *cells)
    return table


def _interval(spread: Mapping[str, float] | None) -> str:
    if spread is None:
        return ""
    middle = f"{spread['median']:.4g}"
    low, high = f"{spread['low']:.4g}", f"{spread['high']:.4g}"
    return middle if low == high else f"{middle} ({low} to {high})"


def _counts(title: str, counts: Mapping[str, int]) -> Table:
    """Return counts as text; those that are 0 stand out."""
    table = Table(title, "times", box=None)
    for name, times in counts.items():
        table.add_row(name, f"{times:,}" if times else "[red]never[/red]")
    return table


def _seeds(text: str) -> list[int]:
    try:
        seeds: list[int] = []
        for part in text.split(","):
            first, _, last = part.partition("-")
            some = range(int(first), int(last or first) + 1)
            if not some or len(some) > MAX_SEEDS:
                raise ValueError("none, or too many")
            seeds.extend(some)
    except ValueError:
        raise ConfigError(f"--seeds {text}: write 1-200 or 3,5,8") from None
    return seeds


def _setting(text: str) -> tuple[str, list[Any]]:
    key, equals, values = text.partition("=")
    if not (key and equals and all(values.split(","))):
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
    changes = _one_change(options)
    scenario = _scenario(options, changes)
    if scenario.level == 3:
        raise ConfigError("the real world of level 3 leaves no trace to compare")
    if shutil.which(options.python) is None:
        raise ConfigError(f"--python {options.python}: there is no such program")
    second = options.seed if options.seed2 is None else options.seed2
    one = Side(options.scenario, options.seed, changes, "1")
    other = Side(options.scenario, second, changes, "2", options.python)
    difference = first_difference(one, other)
    found = None if difference is None else {"number": difference.number, "one": difference.one}
    if found is not None and difference is not None:
        found["other"] = difference.other
    write_text(
        "--json",
        options.json,
        json.dumps({"same": difference is None, "first": found}, indent=2),
    )
    if difference is None:
        console.print("both runs have the same trace", highlight=False)
        return 0
    console.print(f"event {difference.number} differs:", highlight=False)
    console.print(f"  one    {difference.one}", highlight=False, markup=False)
    console.print(f"  other  {difference.other}", highlight=False, markup=False)
    return FAILED


def _load_plan(path: Path) -> tuple[Scenario, int, tuple[Fault, ...]]:
    """Return the scenario, seed and faults of a saved plan.

    Raises:
        ConfigError: The file is no plan.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
        plan = plan_from_table(content["faults"])
        if "settings" in content:
            name = Path(content["scenario"]).stem
            scenario = replace(
                scenario_from_table(name, content["settings"]), source=str(content["scenario"])
            )
        else:
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
    _write_result(options, result)
    show(result, console)
    return 0 if result.ok else FAILED


def run_shrink(options: argparse.Namespace, console: Console) -> int:
    """Shrink a plan to the faults that matter, and write it."""
    scenario, seed, plan = _load_plan(options.file)

    def fails(attempt: Sequence[Fault]) -> bool:
        failed = not _holds(replace(scenario, faults=tuple(attempt)), seed)
        console.print(
            f"{len(attempt)} faults: {'still fails' if failed else 'holds'}", highlight=False
        )
        return failed

    if not fails(plan):
        console.print("the plan does not fail: nothing to shrink", highlight=False)
        return 0
    smallest = shrink(plan, fails)
    _save(options.out, scenario, seed, smallest, "shrunk")
    for fault in smallest:
        console.print(f"  {fault}", highlight=False)
    return FAILED


def _holds(scenario: Scenario, seed: int) -> bool:
    try:
        return run_scenario(scenario, seed).ok
    except (SimulationError, ExceptionGroup):
        return False


def trace(options: argparse.Namespace, console: Console) -> int:
    """Run one scenario and keep everything that happened."""
    simulations: list[Simulation] = []
    keep = SimOptions(keep_trace=EVERYTHING)
    scenario = _scenario(options, _one_change(options))
    result = run_scenario(scenario, options.seed, options=keep, started=simulations.append)
    _write_result(options, result)
    kept = simulations[0].trace.kept
    if options.out == STANDARD_OUTPUT:
        count = write_perfetto(kept, sys.stdout)
    else:
        with options.out.open("w", encoding="utf-8") as out:
            count = write_perfetto(kept, out)
    console.print(
        f"{count:,} events in {options.out}; open it at https://ui.perfetto.dev",
        highlight=False,
    )
    return 0


def _broken(result: Result) -> str:
    return "; ".join(str(entry["name"]) for entry in result.expectations if not entry["ok"])


@contextmanager
def _progress(console: Console, scenario: Scenario) -> Iterator[Report | None]:
    """Show a progress bar in seconds of the scenario, on a terminal only."""
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
    with Progress(
        *columns, console=Console(stderr=True), transient=True, auto_refresh=False
    ) as bar:
        task = bar.add_task(scenario.name, total=scenario.duration)

        def report(seconds: float, doing: str) -> None:
            done = min(seconds, scenario.duration)
            bar.update(
                task, completed=done, description=f"{scenario.name}, {doing}", refresh=True
            )

        yield report


COMMANDS: Final[Mapping[str, Callable[[argparse.Namespace, Console], int]]] = {
    "list": list_scenarios,
    "run": run,
    "sweep": run_sweep,
    "diff": diff,
    "replay": replay,
    "shrink": run_shrink,
    "trace": trace,
}
