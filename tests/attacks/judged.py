"""A swarm with hostile workers around one validator, on virtual time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import trio

from sim.kernel.simulation import Simulation
from sim.kernel.virtual_time import run_simulation
from sim.node.swarm import open_swarm
from sim.run.scenario import Scenario, load_scenario
from sim.workloads import spine
from tests.support.swarm import scored

CAST = {"relay-1": "none", "trainer-1": "trainer", "validator-1": "validator"}

Health = Mapping[str, Any]


def play(
    roles: Mapping[str, str],
    seconds: float,
    *,
    seed: int = 7,
    role_config: Mapping[str, Mapping[str, object]] | None = None,
    change: Callable[[spine.Spine], None] = lambda _: None,
    **parameters: float,
) -> Health:
    """Every node's health after ``seconds`` of a swarm with ``roles`` by name, or when the run
    is done.
    """
    cast = {**CAST, **roles}
    stage = spine.Spine(cast)
    change(stage)
    scenario: Scenario = load_scenario("spine").with_changes(nodes=len(cast), duration=seconds)
    scenario = replace(
        scenario,
        parameters={**scenario.parameters, "steps": 12, "kill_at_step": 999, **parameters},
    )
    configured = spine._config()
    config = replace(configured, role={**configured.role, **(role_config or {})})

    async def main(simulation: Simulation) -> Health:
        async with open_swarm(simulation) as swarm:
            with trio.move_on_after(seconds):
                await stage.run(swarm, scenario)
            return {"seconds": simulation.now, **stage.health()}

    before, spine._config = spine._config, lambda: config
    try:
        outcome = run_simulation(main, seed=seed, horizon=seconds + 600)
    finally:
        spine._config = before
    assert outcome.value is not None
    return outcome.value


def validator(health: Health) -> Health:
    """What the validator says of itself."""
    found: Health = health["validator-1"]["roles"]["validator"]
    return found


def trainer(health: Health) -> Health:
    """What the trainer says of itself."""
    found: Health = health["trainer-1"]["roles"]["trainer"]
    return found


def accepted(health: Health, prefix: str) -> int:
    """Accepted places of the nodes whose names begin with ``prefix``."""
    names = [name for name in health if name.startswith(prefix)]
    return sum(scored(health, name)["accepted"] for name in names)
