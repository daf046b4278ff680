"""The result of one run: the content of its JSON, and the curves and histograms of its
report.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a run, as its JSON holds it."""

    scenario: str
    seed: int
    level: int
    nodes: int
    trace_hash: str
    """Empty at level 3: the world leaves no trace that could be repeated."""
    events: int
    virtual_seconds: float
    """Virtual seconds; at level 3 real ones."""
    cpu_seconds: float
    metrics: Mapping[str, float | int | str]
    expectations: list[dict[str, object]]
    faults: list[dict[str, Any]]
    """The faults that were played, as a plan that can be replayed."""
    witnessed: Mapping[str, int]
    """Number of times that each `sometimes` claim held."""
    fired: Mapping[str, int]
    """Number of times that each `buggify` site misbehaved; 0 if it was reached and never
    did.
    """
    series: Mapping[str, list[tuple[float, float]]]
    """Curves over virtual seconds, for reports."""
    distributions: Mapping[str, list[float]]
    """Histograms for reports, by name: one value per node."""
    lives: Mapping[str, list[list[float]]] = field(default_factory=dict)
    """Beginning and end of each life of a node, for reports; one that goes on has no end."""

    @property
    def ok(self) -> bool:
        """True if every expectation was met."""
        return all(entry["ok"] for entry in self.expectations)

    def to_json(self) -> dict[str, Any]:
        """Return plain values, without those that only reports show."""
        values = asdict(self)
        del values["series"], values["distributions"], values["lives"]
        return values


def plain_metrics(
    metrics: Mapping[str, float | int | str],
) -> dict[str, float | int | str]:
    """Return the metrics for JSON, which has no infinity: infinite values become ``never``."""
    return {
        name: value if isinstance(value, str) or math.isfinite(value) else "never"
        for name, value in metrics.items()
    }
