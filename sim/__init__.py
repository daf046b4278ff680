"""The production code on virtual time: seeded, deterministic, far faster than real.

``python -m sim list`` shows the scenarios; docs/simulation.md how to simulate a protocol of
your own.
"""

from sim.errors import NodeFailed, SimDeadlock, SimForbidden, SimStuck, SimulationError
from sim.kernel.simulation import SimOptions, Simulation
from sim.kernel.virtual_time import Outcome, run_simulation
from sim.node.world import SimWorld

__all__ = [
    "NodeFailed",
    "Outcome",
    "SimDeadlock",
    "SimForbidden",
    "SimOptions",
    "SimStuck",
    "SimWorld",
    "Simulation",
    "SimulationError",
    "run_simulation",
]
