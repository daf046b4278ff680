"""What each rule of the network is worth: its exams with the rule off, against all rules on.

``python -m bench ablate SERVICE [--rules NAME ...] [--scenarios NAME ...] [--tests NAMES]
[--seeds N] [--write]``

An exam is a scenario of the simulator or a test (`bench.rules`). The table gives a scenario's
metrics as ratios, the median over the seeds, where they differ by a tenth; "!" marks a scenario
that breaks its own expectations; the first test that fails stands with its file.
``--write`` replaces the measured rows of ``bench/rules.md``. A rule without an effect, or that
helps its own scenario alone by less than a tenth, goes.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Final, TypeVar, cast

import pytest

from bench.rules import SERVICES
from bench.rules.rule import Exam, Service, switch_off
from sim.run.runner import run_scenario
from sim.run.scenario import load_scenario
from sim.run.sweep import changed

T = TypeVar("T")
ALL_ON: Final = ""
TABLE: Final = Path(__file__).with_name("rules.md")
HEAD: Final = """# The value of each rule of the network

`python -m bench ablate SERVICE --write` writes this page. Effect of switching a rule off:
metrics of scenarios as ratios to all rules on, where they differ by a tenth ("!": the scenario
breaks its own expectations), and the first test that fails.
"""
PATIENCE: Final = 300
"""Seconds for an exam of a rule, which may hang without it."""
Run = tuple[Mapping[str, float], bool]
"""Metrics of a run, and whether it keeps the scenario's expectations."""
Table = dict[str, dict[str, tuple[str, str]]]
"""Maps each service and rule to the rule's law and effect."""


def measure(service: str, rule: str, scenario: str, seed: int) -> Run:
    """Return a scenario's metrics with a rule off, and whether it keeps its expectations.

    Call it in a process of its own.
    """
    if rule != ALL_ON:
        switch_off(SERVICES[service].rules[rule])
    exam = SERVICES[service].scenarios[scenario]
    result = run_scenario(changed(load_scenario(scenario), dict(exam.changes)), seed)
    values = {name: result.metrics[name] for name in exam.metrics}
    return {
        name: float("inf") if isinstance(value, str) else float(value)
        for name, value in values.items()
    }, result.ok


def compared(
    scenario: str,
    exam: Exam,
    usual: Sequence[Run],
    runs: Sequence[Run],
) -> str:
    """Return what a scenario shows of a rule, or nothing."""
    if not all(values for values, _ in runs):
        return f"{scenario} does not end"
    found = []
    for name in exam.metrics:
        before, after = (median(values[name] for values, _ in each) for each in (usual, runs))
        if before == after or (before and abs(after / before - 1) < 0.1):
            continue
        metric = name + " " if len(exam.metrics) > 1 else ""
        found.append(metric + (f"{after / before:.2f}" if before else f"0 to {after:.3g}"))
    broken = "" if all(is_ok for _, is_ok in runs) else " !"
    return f"{scenario} {', '.join(found)}{broken}" if found or broken else ""


def failing(service: str, rule: str, named: str) -> str:
    """Return the service's first test, of those ``named``, that fails with a rule off. The
    tests keep the constants that they imported; only p2p has others.

    Call it in a process of its own.
    """
    found: list[str] = []

    class Plugin:
        def pytest_collection_finish(self) -> None:
            switch_off(SERVICES[service].rules[rule])

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                file, _, test = report.nodeid.partition("::")
                found.append(f"{Path(file).stem}: {test.partition('[')[0]}")

    options = ["-qx", "--tb=no", "-p", "no:cacheprovider", "-k", named]
    with redirect_stdout(io.StringIO()) as said:
        code = pytest.main([*options, *SERVICES[service].tests], plugins=[Plugin()])
    if code > 1:
        raise RuntimeError(said.getvalue())
    return next(iter(found), "")


def in_a_child(function: Callable[..., T], *args: object) -> T | None:
    """Call a function in a process of its own, since what is switched off stays off. Return
    None if it hangs."""
    context = get_context("fork")
    ours, theirs = context.Pipe()

    def play() -> None:
        os.setpgrp()  # with the processes that a test starts
        theirs.send(function(*args))

    child = context.Process(target=play)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # for good in the child
    child.start()
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        theirs.close()
        return cast(T, ours.recv()) if ours.poll(PATIENCE) else None
    except EOFError:
        raise RuntimeError(f"{args}: the exam broke, see above") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(cast(int, child.pid), signal.SIGKILL)
        child.kill()  # also if it has not come to its group
        child.join()


def read_table(text: str) -> Table:
    """Read the page that `write_table` writes."""
    found: Table = {}
    for line in text.splitlines():
        if line.startswith("## "):
            rows = found[line[3:]] = {}
        elif line.startswith("| ") and not line.startswith("| rule "):
            rule, law, effect = line.strip("| ").split(" | ")
            rows[rule] = law, effect
    return found


def write_table(table: Table) -> str:
    """Return the page for a table, with the rows that are rules, in their order."""
    parts = [HEAD]
    for name, service in SERVICES.items():
        rows = table.get(name, {})
        lines = [
            f"| {rule} | {' | '.join(rows[rule])} |" for rule in service.rules if rule in rows
        ]
        if lines:
            heading = ["| rule off | its law | effect |", "|---|---|---|"]
            parts.append("\n".join([f"## {name}", "", *heading, *lines]) + "\n")
    return "\n".join(parts)


def run(args: Sequence[str]) -> int:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="python -m bench ablate", description=__doc__)
    parser.add_argument("service", choices=list(SERVICES))
    parser.add_argument("--rules", nargs="+")
    parser.add_argument("--scenarios", nargs="*")
    parser.add_argument("--tests")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(args)
    service = SERVICES[options.service]
    unknown = set(options.rules or ()) - set(service.rules)
    if unknown:
        parser.error(f"no rule of {service.name}: {', '.join(unknown)}")
    for rule, effect in effects(service, options):
        law = service.rules[rule].law
        print(f"| {rule} | {law} | {effect} |", flush=True)
        if options.write:
            table = read_table(TABLE.read_text(encoding="utf-8"))
            table.setdefault(service.name, {})[rule] = law, effect
            TABLE.write_text(write_table(table), encoding="utf-8")
    return 0


def effects(service: Service, options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Play the exams of the rules that are asked for, and yield the effect of each."""
    usual: dict[str, list[Run]] = {}

    def played(rule: str, scenario: str) -> list[Run]:
        seeds = range(1, options.seeds + 1)
        runs = [in_a_child(measure, service.name, rule, scenario, seed) for seed in seeds]
        return [({}, False) if run is None else run for run in runs]

    for name in options.rules or service.rules:
        rule, shown = service.rules[name], []
        for each in rule.scenarios if options.scenarios is None else options.scenarios:
            if each not in usual:
                usual[each] = played(ALL_ON, each)
            shown.append(
                compared(each, service.scenarios[each], usual[each], played(name, each))
            )
        named = rule.tests if options.tests is None else options.tests
        if service.tests:
            found = in_a_child(failing, service.name, name, named)
            shown.append("a test hangs" if found is None else found)
        yield name, "; ".join(filter(None, shown)) or "none"
