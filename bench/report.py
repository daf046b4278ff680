"""Results of a bench, as one JSON document.

``{"bench", "machine": {cores, load, python, versions}, "rows": [{"case", "subject", "metric",
"unit", "values", "median"}], "ratios": [{"case", "metric", "of", "to", "median"}]}``. A ratio
compares two subjects of one case, measured in turns, so that a busy machine hits both alike.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

STANDARD_OUTPUT = Path("-")
PACKAGES = (
    "shoal",
    "trio",
    "torch",
    "numpy",
    "zstandard",
    "pynacl",
    "cryptography",
    "blake3",
    "kademlia",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Several measurements of one subject."""

    case: str
    subject: str
    metric: str
    unit: str
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median of the values."""
        return statistics.median(self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """The median ratio of two subjects, ``of`` to ``to``, pair by pair."""

    case: str
    metric: str
    of: str
    to: str
    median: float


@dataclass(slots=True)
class Report:
    """The rows of one bench, and the comparisons that follow from them."""

    bench: str
    rows: list[Row] = field(default_factory=list)
    ratios: list[Ratio] = field(default_factory=list)

    def add(
        self, case: str, subject: str, metric: str, unit: str, values: Sequence[float]
    ) -> None:
        """Record one subject's values (at least one)."""
        if not values:
            raise ValueError(f"{case}: {subject} has no values of {metric}")
        self.rows.append(
            Row(case=case, subject=subject, metric=metric, unit=unit, values=tuple(values))
        )

    def compare(self, case: str, metric: str, of: str, to: str) -> float:
        """Record and return the median of ``of``'s values over ``to``'s, pairs in the order
        measured.
        """
        pairs = zip(self._values(case, of, metric), self._values(case, to, metric), strict=True)
        ratio = statistics.median(one / other for one, other in pairs)
        self.ratios.append(Ratio(case=case, metric=metric, of=of, to=to, median=ratio))
        return ratio

    def _values(self, case: str, subject: str, metric: str) -> tuple[float, ...]:
        for row in self.rows:
            if (row.case, row.subject, row.metric) == (case, subject, metric):
                return row.values
        raise KeyError(f"no values of {metric} for {subject} in {case}")

    def to_json(self) -> str:
        """Return the whole report as JSON."""
        table = {
            "bench": self.bench,
            "machine": machine(),
            "rows": [{**asdict(row), "median": row.median} for row in self.rows],
            "ratios": [asdict(ratio) for ratio in self.ratios],
        }
        return json.dumps(table, indent=2)

    def write(self, path: Path | None) -> None:
        """Write the report to a file, if one was asked for; ``-`` is standard output.

        Not to `sys.stdout`: where ``-`` was given, `bench.__main__` has put standard error
        there, so that the tables for people do not come between the JSON.
        """
        if path == STANDARD_OUTPUT:
            print(self.to_json(), file=sys.__stdout__, flush=True)
        elif path is not None:
            path.write_text(self.to_json() + "\n", encoding="utf-8")

    def __str__(self) -> str:
        """Return a line per row, then the ratios."""
        lines = [
            f"{row.case:24} {row.subject:24} {row.metric:20} {row.median:12.4g} {row.unit}"
            for row in self.rows
        ]
        lines += [
            f"{r.case:24} {r.of} / {r.to}: {r.metric} {r.median:.3g}" for r in self.ratios
        ]
        return "\n".join(lines)


def machine() -> dict[str, object]:
    """Return the machine of the measurement."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
