"""What came of one run: what its JSON holds, and the curves and histograms of its report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Result:
    """What the JSON of a simulation holds."""

    scenario: str
    seed: int
    level: int
    nodes: int
    trace_hash: str
    """Empty at level 3: the world leaves no trace that could be repeated."""
    events: int
    virtual_seconds: float
    """At level 3 they are real."""
    cpu_seconds: float
    metrics: Mapping[str, float | int | str]
    expectations: list[dict[str, object]]
    faults: list[dict[str, Any]]
    """What went wrong on purpose, as a plan that can be replayed."""
    witnessed: Mapping[str, int]
    """How often each `sometimes` claim held."""
    fired: Mapping[str, int]
    """How often each `buggify` site misbehaved; 0 for those that were reached and never did."""
    series: Mapping[str, list[tuple[float, float]]]
    """Curves over virtual seconds, for reports."""
    distributions: Mapping[str, list[float]]
    """One value per node, for reports."""

    @property
    def ok(self) -> bool:
        """Whether every expectation was met."""
        return all(entry["ok"] for entry in self.expectations)

    def to_json(self) -> dict[str, Any]:
        """As plain values, without what only reports show."""
        values = asdict(self)
        del values["series"], values["distributions"]
        return values


def plain_metrics(
    metrics: Mapping[str, float | int | str],
) -> dict[str, float | int | str]:
    """The metrics as JSON can hold them: it knows no infinity, so what did not happen is
    ``never``."""
    return {
        name: value if isinstance(value, str) or math.isfinite(value) else "never"
        for name, value in metrics.items()
    }
