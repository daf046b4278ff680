"""PRIME on its published sites, by its own design. (L0)

After an inner phase all sites stop. Eight rings, one for each GPU of a site, reduce an eighth
of the update each: eight connections over every edge of the order whose slowest edge is
fastest. A byte a weight (int8 and its tables) goes 2 (n - 1) hops of an n-th; the slowest edge
sets the pace. Then comes the outer step, and compute goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final

from sim.kernel.simulation import Simulation
from sim.run.scenario import Scenario
from sim.studies.intellect1.ring import bottleneck_ring
from sim.studies.intellect1.sites import (
    CITIES,
    LINE,
    PHASE,
    STAGES,
    STEP,
    WEIGHTS,
    connection,
)

CONNECTIONS: Final = 8
"""Connections of one edge: a ring for each GPU of a site."""


class PrimeRing:
    """All-reduce of each stage of the published run."""

    levels: ClassVar = (0,)
    parameters: ClassVar = ()

    def run_bare(
        self, simulation: Simulation, scenario: Scenario
    ) -> Mapping[str, float | int | str]:
        """Compute; nothing is drawn, so seeds give the same."""
        found: dict[str, float] = {}
        for stage in STAGES:
            seconds = all_reduce(stage.sites)
            found[f"{stage.name}_seconds"] = round(seconds, 1)
            found[f"{stage.name}_utilised"] = round(PHASE / (PHASE + seconds), 4)
        return found


def all_reduce(sites: int) -> float:
    """Seconds of one all-reduce and outer step among the first ``sites`` cities."""
    cities = CITIES[:sites]
    costs = [
        [1 / min(LINE, CONNECTIONS * connection(one, other)) for other in cities]
        for one in cities
    ]
    slowest, _ = bottleneck_ring(costs)
    megabits = 8 * WEIGHTS / 1e6
    return 2 * (sites - 1) / sites * megabits * slowest + STEP
