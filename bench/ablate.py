"""What each rule of the network is worth: its exams with the rule off, against all rules on.

``python -m bench ablate SERVICE [--rules NAME ...] [--scenarios NAME ...] [--tests ARG ...]
[--seeds N] [--jobs N] [--write]``

An exam is a scenario of the simulator or a test (`bench.rules`). The table gives a scenario's
metrics as ratios, the median over the seeds, where they differ by a tenth; "!" marks a scenario
that breaks its own expectations; a file of tests stands with the number of its tests that fail.
``--write`` replaces the measured rows of ``bench/rules.md``. A rule without an effect, or that
helps its own scenario alone by less than a tenth, goes.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Final

from bench.rules import SERVICES
from bench.rules.off import VARIABLE
from bench.rules.rule import Exam, Service, switch_off
from sim.run.runner import run_scenario
from sim.run.scenario import load_scenario
from sim.run.sweep import changed

ALL_ON: Final = ""
TABLE: Final = Path(__file__).with_name("rules.md")
HEAD: Final = """# The value of each rule of the network

`python -m bench ablate SERVICE --write` writes this page. Effect of switching a rule off:
metrics of scenarios as ratios to all rules on, where they differ by a tenth ("!": the scenario
breaks its own expectations), and how many tests of a file fail.
"""
PATIENCE: Final = 300
"""Seconds for the tests of one rule, which may hang without it."""
Table = dict[str, dict[str, tuple[str, str]]]
"""Maps each service and rule to the rule's law and effect."""


def measure(
    service: str, rule: str, scenario: str, seed: int
) -> tuple[Mapping[str, float], bool]:
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
    usual: Sequence[tuple[Mapping[str, float], bool]],
    runs: Sequence[tuple[Mapping[str, float], bool]],
) -> str:
    """Return what a scenario shows of a rule, or nothing."""
    found = []
    for name in exam.metrics:
        before, after = (median(values[name] for values, _ in each) for each in (usual, runs))
        if before == after or (before and abs(after / before - 1) < 0.1):
            continue
        metric = name + " " if len(exam.metrics) > 1 else ""
        found.append(metric + (f"{after / before:.2f}" if before else f"0 to {after:.3g}"))
    broken = "" if all(is_ok for _, is_ok in runs) else " !"
    return f"{scenario} {', '.join(found)}{broken}" if found or broken else ""


def failing(service: str, rule: str, tests: Sequence[str]) -> str:
    """Return how many of ``tests`` fail with a rule off, by file."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "bench.rules.off"]
    played = [*command, "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, VARIABLE: f"{service}:{rule}"}
    try:
        done = subprocess.run(
            played, env=environment, capture_output=True, text=True, timeout=PATIENCE
        )
    except subprocess.TimeoutExpired:
        return "a test hangs"
    if done.returncode > 1:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
    found = re.findall(r"^(?:FAILED|ERROR) \S*?(\w+)\.py::", done.stdout, re.MULTILINE)
    return ", ".join(f"{name} {count}" for name, count in sorted(Counter(found).items()))


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
    parser.add_argument("--tests", nargs="*")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(args)
    service = SERVICES[options.service]
    unknown = set(options.rules or ()) - set(service.rules)
    if unknown:
        parser.error(f"no rule of {service.name}: {', '.join(unknown)}")
    rows = effects(service, options)
    for rule, effect in rows.items():
        print(f"| {rule} | {service.rules[rule].law} | {effect} |")
    if options.write:
        table = read_table(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {}
        for rule, effect in rows.items():
            table.setdefault(service.name, {})[rule] = service.rules[rule].law, effect
        TABLE.write_text(write_table(table), encoding="utf-8")
    return 0


def effects(service: Service, options: argparse.Namespace) -> dict[str, str]:
    """Play the exams of the rules that are asked for. Return the effect of each."""
    rules = {name: service.rules[name] for name in options.rules or service.rules}
    scenarios = {
        name: first_given(options.scenarios, rule.scenarios, tuple(service.scenarios))
        for name, rule in rules.items()
    }
    scenarios[ALL_ON] = tuple({each: None for names in scenarios.values() for each in names})
    seeds = range(1, options.seeds + 1)
    found: dict[str, str] = {}
    # One run a process: what is switched off stays off, and a simulation leaves memory behind.
    with ProcessPoolExecutor(options.jobs, max_tasks_per_child=1) as pool:
        runs = {
            (rule, name): [
                pool.submit(measure, service.name, rule, name, seed) for seed in seeds
            ]
            for rule in (ALL_ON, *rules)
            for name in scenarios[rule]
        }
        for name, rule in rules.items():
            shown = []
            for each in scenarios[name]:
                usual, off = (
                    [done.result() for done in runs[key, each]] for key in (ALL_ON, name)
                )
                shown.append(compared(each, service.scenarios[each], usual, off))
            tests = first_given(options.tests, rule.tests, service.tests)
            shown.append(failing(service.name, name, tests) if tests else "")
            found[name] = "; ".join(filter(None, shown)) or "none"
            print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    return found


def first_given(*choices: Sequence[str] | None) -> Sequence[str]:
    """Return the first choice that is not None."""
    return next(choice for choice in choices if choice is not None)
