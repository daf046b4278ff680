"""The production code on virtual time: seeded, deterministic, far faster than real.

Each folder knows only those below it in this list, and opens with a map of its own:

- `sim.workloads`: what nodes do in the scenarios that come with the simulator
- `sim.run`: scenario files, runs, sweeps, traces of two runs compared, reports (`sim.cli` calls
  it)
- `sim.faults`: what goes wrong: plans of faults, and machines that come and go
- `sim.node`: one simulated machine (world, disk, clock, host, network), and the swarm of them
- `sim.net`: lines, wires and streams between machines
- `sim.kernel`: the heap of events, trio on it, the trace, the seed's keys

`sim.studies` stands beside them: published runs, and processes on shaped lines.

Read `sim.kernel.queue` first (the heap), then `sim.kernel.virtual_time` (how trio runs on it)
and `sim.node.swarm` (how a node lives and dies).

How a run flows: `run_simulation` makes a `Simulation` and runs ``main`` on trio; `open_swarm`
adds machines; each life of a node is a coroutine that opens its host (`SimNode.open_host`) and
runs the production services on it. Everything that takes time (a sleep, a message on a line, a
disk) is an event on one heap. The trace records every event; two runs with the same hash of
the trace were the same.

What a newcomer calls: `run_simulation`, `open_swarm`, `Swarm.add`, `SimNode.open_host`; for
machines that come and go `Churn`; for a page with curves `drawing`. docs/cookbook/simulate.md
shows a whole program, docs/simulation.md how to write a scenario; ``python -m sim list`` names
the scenarios.
"""

from sim.errors import NodeFailed, SimDeadlock, SimForbidden, SimStuck, SimulationError
from sim.faults.churn import Churn, ChurnModel, Lognormal, Weibull
from sim.kernel.simulation import SimOptions, Simulation
from sim.kernel.virtual_time import Outcome, run_simulation
from sim.node.swarm import SimNode, Swarm, open_swarm
from sim.node.world import SimWorld
from sim.run.report import drawing
from sim.run.sweep import play

__all__ = [
    "Churn",
    "ChurnModel",
    "Lognormal",
    "NodeFailed",
    "Outcome",
    "SimDeadlock",
    "SimForbidden",
    "SimNode",
    "SimOptions",
    "SimStuck",
    "SimWorld",
    "Simulation",
    "SimulationError",
    "Swarm",
    "Weibull",
    "drawing",
    "open_swarm",
    "play",
    "run_simulation",
]
