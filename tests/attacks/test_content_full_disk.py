"""A full disk ends no node that can go on reading: relays and roles live on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from roles.contract.core.sampling import SamplingTerms
from roles.own.status import SwarmStatus
from sim.kernel.simulation import Simulation
from sim.kernel.virtual_time import run_simulation
from sim.node.disk import MAX_FILE
from sim.node.swarm import SimNode, Swarm, open_swarm
from sim.run.scenario import Scenario, load_scenario
from sim.workloads import spine

CAST = {
    "relay-1": "none",
    "trainer-1": "trainer",
    "validator-1": "validator",
    "inference-1": "inference",
    "inference-2": "inference",
}
FULL_SECONDS = 600.0
"""Ten minutes."""


class FullDisks(spine.Spine):
    """The spine, with the disks of ``who`` full for ten minutes once the first policy is
    out.
    """

    def __init__(self, *who: str) -> None:
        super().__init__(CAST)
        self.who = who
        self.during: Mapping[str, Any] = {}
        self.step_when_full = 0

    async def _play(
        self, swarm: Swarm, scenario: Scenario, sampling: SamplingTerms
    ) -> SwarmStatus:
        watcher = swarm.nodes["relay-1"].world
        while self._status(sampling).trainer.get("step", -1) < 1:
            await watcher.sleep(spine.LOOK)
        for name in self.who:
            swarm.nodes[name].disk.limit(0)
        self.step_when_full = self._status(sampling).trainer["step"]
        await watcher.sleep(FULL_SECONDS)
        self.during = self.health()
        for name in self.who:
            swarm.nodes[name].disk.limit(MAX_FILE)
        return await super()._play(swarm, scenario, sampling)


async def end_for_good(node: SimNode, process: Any) -> None:
    """No service manager starts a process again: what its disk ends stays ended, as the test
    then says.
    """
    await process(node)


def play(course: FullDisks, monkeypatch: pytest.MonkeyPatch, steps: int) -> Mapping[str, Any]:
    monkeypatch.setattr(spine, "supervise", end_for_good)
    scenario = load_scenario("spine").with_changes(nodes=len(CAST))
    changes = {"steps": steps, "kill_at_step": 10_000}
    scenario = replace(scenario, duration=1200.0, parameters={**scenario.parameters, **changes})

    async def main(simulation: Simulation) -> dict[str, Any]:
        async with open_swarm(simulation) as swarm:
            return {**await course.run(swarm, scenario), "health": course.health()}

    outcome = run_simulation(main, seed=5, horizon=2000)
    assert outcome.value is not None
    return outcome.value


@pytest.mark.deep
def test_a_relay_with_a_full_disk_serves_what_it_holds_and_catches_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    course = FullDisks("relay-1")
    end = play(course, monkeypatch, steps=4)
    during = course.during["relay-1"]["shardcast"]
    assert during["disk_refuses"]
    assert during["newest"] < 4 == course.during["trainer-1"]["shardcast"]["newest"]
    assert end["done"] == 1
    assert end["health"]["relay-1"]["shardcast"]["newest"] == 4
    assert not end["health"]["relay-1"]["shardcast"]["disk_refuses"]


def test_roles_with_full_disks_wait_and_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    who = ("trainer-1", "validator-1", "inference-1", "inference-2")
    course = FullDisks(*who)
    end = play(course, monkeypatch, steps=6)
    roles = {name: course.during[name]["roles"][name.partition("-")[0]] for name in who}
    assert roles["trainer-1"]["step"] <= course.step_when_full + 1
    assert any(role["waits_for_disk"] for role in roles.values())
    assert end["done"] == 1
    after = end["health"]["validator-1"]["roles"]["validator"]
    assert after["rejected"] == 0 < after["accepted"]
    assert not any(
        end["health"][name]["roles"][name.partition("-")[0]]["waits_for_disk"] for name in who
    )
