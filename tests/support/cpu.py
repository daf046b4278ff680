"""CPU seconds of the test files: which start first, and whether the suite keeps to its budget.

`tests/durations.txt` holds what each directory and each long file took, in the everyday suite
and in the deep one. Workers start with the longest files of that table. Two variables:

- ``SHOAL_BUDGET=check`` prints a table when the tests have ended, and fails the everyday suite
  if a directory took more than twice its row (or three seconds more, whichever is larger).
- ``SHOAL_BUDGET=write`` writes the table anew.

CPU seconds are those of the test process and of the processes that it waited for. A busy
machine changes them little, where it doubles the time on the wall.
"""

from __future__ import annotations

import os
import resource
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.sweeps import DEEP

TABLE: Final = Path(__file__).parent.parent / "durations.txt"
LONG = 3.0  # CPU seconds from which a file has a row
FACTOR = 2.0  # machines differ, suites that grew by half again do not
COLUMN = int(DEEP)
HEAD = """\
# CPU seconds of the everyday suite and of the deep one. `SHOAL_BUDGET=write make test` and
# `SHOAL_BUDGET=write make test-deep` write them anew.
"""

spent: defaultdict[str, float] = defaultdict(float)
"""CPU seconds of each test file; with workers, the controller adds up theirs."""


def cpu_seconds() -> float:
    """Return the CPU time of this process and of all children that it waited for."""
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)


def read_table() -> dict[str, list[float]]:
    if not TABLE.exists():
        return {}
    lines = TABLE.read_text("utf-8").splitlines()
    rows = [line.split() for line in lines if not line.startswith("#")]
    return {path: [float(usual), float(deep)] for usual, deep, path in rows}


def directories() -> dict[str, float]:
    """Return the seconds of each directory of tests; files directly in tests/ are ``tests``."""
    total: defaultdict[str, float] = defaultdict(float)
    for path, seconds in spent.items():
        total["/".join(path.split("/")[:2]) if path.count("/") > 1 else "tests"] += seconds
    return dict(total)


def write_table() -> None:
    table = {path: row for path, row in read_table().items() if not DEEP or row[0]}
    for row in table.values():
        row[COLUMN] = 0.0
    for path, seconds in {**spent, **directories()}.items():
        if path in table or path == "tests" or not path.endswith(".py") or seconds >= LONG:
            table.setdefault(path, [0.0, 0.0])[COLUMN] = seconds
    lines = [
        f"{usual:7.1f} {deep:7.1f} {path}"
        for path, (usual, deep) in sorted(table.items())
        if not path.endswith(".py") or max(usual, deep) >= LONG
    ]
    TABLE.write_text(HEAD + "\n".join(lines) + "\n", encoding="utf-8")


def overspent() -> list[str]:
    """Return a sentence for each directory of the everyday suite that costs too much."""
    table = read_table()
    return [
        f"{path} took {seconds:.0f} CPU seconds, its row in tests/durations.txt says"
        f" {table.get(path, [0.0])[0]:.0f}: mark tests `deep`, or write the table anew"
        for path, seconds in sorted(directories().items())
        if seconds > max(FACTOR * table.get(path, [0.0])[0], table.get(path, [0.0])[0] + LONG)
    ]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before = cpu_seconds()
    try:
        return (yield)
    finally:
        spent[item.nodeid.partition("::")[0]] += cpu_seconds() - before


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["spent"], output["cpu"] = dict(spent), cpu_seconds()
        return
    budget = os.environ.get("SHOAL_BUDGET")
    if budget == "write":
        write_table()
    elif budget == "check" and not DEEP and overspent():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    output = getattr(node, "workeroutput", {})
    for path, seconds in output.get("spent", {}).items():
        spent[path] += seconds


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if os.environ.get("SHOAL_BUDGET"):
        terminalreporter.section("CPU seconds")
        for path, seconds in sorted(directories().items()):
            terminalreporter.line(f"{seconds:7.1f} {path}")
        terminalreporter.line(f"{sum(spent.values()):7.1f} in all, collection not counted")
        if os.environ["SHOAL_BUDGET"] == "check" and not DEEP:
            for sentence in overspent():
                terminalreporter.line(sentence, red=True)
