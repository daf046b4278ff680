"""Topics as nodes use them, on the simulated host."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from p2p.errors import BadMessage, PeerUnreachable
from p2p.gossip import Gossip, GossipConfig, Validity, open_gossip
from p2p.identity import PeerId
from p2p.machine import open_world
from p2p.swarm.swarm import open_host
from p2p.transport.memory import MemoryNetwork
from sim.kernel.simulation import Simulation
from sim.kernel.virtual_time import run_simulation
from sim.node.swarm import SimNode, Swarm, open_swarm

TOPIC = "run/policy"


class Stage:
    """Nodes in a ring with chords that hear one topic, all but the last."""

    def __init__(self, swarm: Swarm, size: int) -> None:
        self.swarm = swarm
        self.size = size
        self.services: dict[str, Gossip] = {}
        self.heard: dict[str, list[tuple[PeerId, bytes]]] = {}
        for number in range(size):
            swarm.add(f"n{number}", self.live)

    async def live(self, node: SimNode) -> None:
        async with (
            node.open_host() as host,
            open_gossip(node.world, host, GossipConfig()) as service,
        ):
            self.services[node.name] = service
            self.heard[node.name] = []
            number = int(node.name[1:])
            if number != self.size - 1:
                service.subscribe(
                    TOPIC, self.validate, lambda *said: self.heard[node.name].append(said)
                )
            await self.swarm.sleep(0.1)
            for step in (1, 3):
                other = self.swarm.nodes[f"n{(number + step) % self.size}"]
                host.add_addrs(other.peer_id, [other.addr])
                try:
                    await host.connect(other.peer_id)
                except PeerUnreachable:
                    continue
            await trio.sleep_forever()

    def validate(self, author: PeerId, data: bytes) -> Validity:
        if data.startswith(b"old"):
            return Validity.IGNORE
        if data.startswith(b"bad"):
            raise BadMessage("as asked")
        return Validity.ACCEPT


def play(body: Callable[[Stage], Awaitable[Any]], size: int = 10) -> str:
    async def main(simulation: Simulation) -> None:
        async with open_swarm(simulation) as swarm:
            stage = Stage(swarm, size)
            await swarm.sleep(5)
            await body(stage)

    return run_simulation(main, seed=1, horizon=1000).trace_hash


def test_what_is_published_reaches_all_who_hear_and_nobody_else() -> None:
    async def body(stage: Stage) -> None:
        stage.services["n2"].publish(TOPIC, b"version 1")
        await stage.swarm.sleep(2)
        said = (stage.swarm.nodes["n2"].peer_id, b"version 1")
        for name, heard in stage.heard.items():
            assert heard == ([] if name in ("n2", "n9") else [said])

    play(body)


@pytest.mark.parametrize(("data", "reason"), [(b"old news", "ignore"), (b"bad news", "reject")])
def test_what_is_not_accepted_stays_where_it_is(data: bytes, reason: str) -> None:
    async def body(stage: Stage) -> None:
        stage.services["n2"].publish(TOPIC, data)
        await stage.swarm.sleep(2)
        assert not any(stage.heard.values())
        judged = sum(service.counters.get(reason, 0) for service in stage.services.values())
        assert 0 < judged <= 4  # whom n2 is connected to

    play(body)


async def test_a_real_host_tells_who_was_dialled(tmp_path: Path) -> None:
    network = MemoryNetwork()
    async with (
        open_world(tmp_path / "a") as one,
        open_world(tmp_path / "b") as other,
        open_host(network=network, world=one, listen=["/memory/0"], strict=True) as dialer,
        open_host(network=network, world=other, listen=["/memory/0"], strict=True) as listener,
        open_gossip(one, dialer, GossipConfig()) as chosen,
        open_gossip(other, listener, GossipConfig()) as visited,
    ):
        await dialer.connect_addr(listener.addrs[0])
        await trio.testing.wait_all_tasks_blocked()
        assert list(chosen._core._mesh._outbound) == [listener.peer_id]
        assert visited._core._mesh.is_connected(dialer.peer_id)
        assert not visited._core._mesh._outbound
