"""What a node says of its clock: only what peers have told it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import trio

from p2p.node.config import NodeConfig
from p2p.node.node import Node, open_node
from p2p.node.screen import facts_about
from sim.node.swarm import SimNode, Swarm
from sim.workloads.run_file import write_run
from tests.support.simulated import on_swarm


def clocks_of(skews: Mapping[str, float], seconds: float = 90.0) -> dict[str, tuple[str, str]]:
    """What each node of a swarm says of its clock, in its status and on its screen."""

    async def main(swarm: Swarm) -> dict[str, tuple[str, str]]:
        run = write_run(swarm.simulation.keys, "clocks", "n0", "n1")
        config = replace(NodeConfig(), dht=replace(NodeConfig().dht, difficulty=4))
        nodes: dict[str, Node] = {}

        async def live(machine: SimNode) -> None:
            first = machine.siblings[0]
            bootstrap = () if machine is first else (first.addr,)
            async with (
                machine.open_host() as host,
                open_node(
                    machine.world, host, config, document=run.document, bootstrap=bootstrap
                ) as node,
            ):
                nodes[machine.name] = node
                await trio.sleep_forever()

        for name, skew in skews.items():
            swarm.add(name, live).clock.change(skew=skew)
        await swarm.sleep(seconds)
        said = {name: facts_about(node, ()) for name, node in nodes.items()}
        return {
            name: (str(node.health()["clock"]), " ".join(fact.text for fact in said[name]))
            for name, node in nodes.items()
        }

    return on_swarm(main)


def test_a_node_alone_knows_nothing_of_its_clock() -> None:
    assert clocks_of({"n0": 0.0})["n0"][0] == "unknown: no peer has told the time"


@pytest.mark.parametrize("skew", [7200.0, -7200.0, 86_400.0])
def test_a_clock_that_is_hours_off_is_not_said_to_agree(skew: float) -> None:
    """Nobody believes its heartbeats, so it has no members, and said that it agrees."""
    clocks = clocks_of({"n0": 0.0, "n1": 0.0, "n2": 0.0, "n3": skew})
    for name in ("n0", "n1", "n2"):
        assert clocks[name][0] == "agrees with that of 2 peers"
    said, shown = clocks["n3"]
    assert said.startswith(f"the clock of this machine differs by about {abs(skew):.0f} s")
    assert said in shown


def test_before_anybody_was_asked_nothing_is_claimed() -> None:
    clocks = clocks_of({"n0": 0.0, "n1": 7200.0}, seconds=2.0)
    assert clocks["n1"][0] == "unknown: no peer has told the time"
