"""`open_dht` on simulated machines."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio

from p2p.dht import Dht, DhtConfig, Namespace, open_dht
from p2p.dht.core.validation import ADDRESSES
from p2p.dht.service import STAMP_PATH
from p2p.dht.stamp import make_stamp
from p2p.host import Host
from p2p.identity import PeerId
from sim.kernel.simulation import Simulation
from sim.kernel.virtual_time import run_simulation
from sim.node.clock import ClockModel
from sim.node.disk import DiskModel
from sim.node.swarm import SimNode, Swarm, open_swarm

CONFIG = DhtConfig(difficulty=6, refresh_interval=60)


class Town:
    """Nodes that all open a DHT and then wait."""

    def __init__(self, swarm: Swarm, namespaces: tuple[Namespace, ...] = ()) -> None:
        self.swarm = swarm
        self.dhts: dict[str, Dht] = {}
        self.hosts: dict[str, Host] = {}
        self._namespaces = namespaces

    async def live(self, node: SimNode) -> None:
        async with (
            node.open_host() as host,
            open_dht(node.world, host, CONFIG, namespaces=self._namespaces) as dht,
        ):
            self.dhts[node.name] = dht
            self.hosts[node.name] = host
            await trio.sleep_forever()

    async def grow(self, size: int) -> list[Dht]:
        """``size`` nodes that have all joined through the first."""
        nodes = [self.swarm.add(f"n{index}", self.live) for index in range(size)]
        await self.swarm.nodes["n0"].world.sleep(1)
        for node in nodes[1:]:
            assert await self.dhts[node.name].bootstrap([nodes[0].addr]) > 0
        return [self.dhts[node.name] for node in nodes]


def in_town(main: Callable[[Town], Awaitable[None]], **options: object) -> str:
    async def course(simulation: Simulation) -> None:
        async with open_swarm(simulation) as swarm:
            await main(Town(swarm, **options))  # type: ignore[arg-type]

    outcome = run_simulation(course, seed=1, horizon=5000)
    assert outcome.finished
    return outcome.trace_hash


def test_put_get_and_find_peer() -> None:
    async def main(town: Town) -> None:
        dhts = await town.grow(12)
        assert await dhts[3].put("run", b"name", b"value", 600) > 8
        (record,) = await dhts[9].get("run", b"name")
        assert record.value == b"value"
        assert record.publisher == dhts[3].contact.peer
        assert await dhts[9].get("run", b"nothing") == []
        sought = town.swarm.nodes["n7"]
        assert await dhts[2].find_peer(sought.peer_id) == (sought.addr,)
        known = town.hosts["n2"].addrs_of(sought.peer_id)
        assert [addr.transport for addr in known] == [sought.addr.transport]
        assert await dhts[2].find_peer(PeerId.from_public_key(bytes(32))) == ()
        assert repr(dhts[0]).startswith("Dht(11 contacts")

    first = in_town(main)
    assert in_town(main) == first


def test_the_first_node_is_alone_and_content() -> None:
    async def main(town: Town) -> None:
        town.swarm.add("n0", town.live)
        await town.swarm.nodes["n0"].world.sleep(1)
        dht = town.dhts["n0"]
        assert await dht.put("run", b"name", b"early", 600) == 0
        assert [record.value for record in await dht.get("run", b"name")] == [b"early"]
        late = town.swarm.add("late", town.live)
        await late.world.sleep(1)
        assert await town.dhts["late"].bootstrap([town.swarm.nodes["n0"].addr]) == 1
        await late.world.sleep(60)
        assert town.dhts["late"].records > 0, "what nobody took is published again"

    in_town(main)


def test_a_dead_seed_is_no_error_and_is_asked_again() -> None:
    async def main(town: Town) -> None:
        seed = town.swarm.add("n0", town.live)
        await seed.world.sleep(1)
        town.swarm.kill("n0", silent=True)
        other = town.swarm.add("n1", town.live)
        await other.world.sleep(1)
        assert await town.dhts["n1"].bootstrap([seed.addr]) == 0
        town.swarm.restart("n0")
        await other.world.sleep(150)
        assert town.dhts["n1"].contacts == 1

    in_town(main)


def test_a_crash_in_the_first_write_and_a_clock_set_back_take_nothing_from_the_next_life() -> (
    None
):
    async def main(town: Town) -> None:
        async def live_on_a_slow_disk(node: SimNode) -> None:
            await node.world.disk.replace(
                STAMP_PATH, make_stamp(node.peer_id, CONFIG.difficulty)
            )
            node.disk.model = DiskModel(fsync=2)
            await town.live(node)

        async def say(value: bytes) -> None:
            await node.world.sleep(10)
            await town.dhts["late"].bootstrap([town.swarm.nodes["n0"].addr])
            assert await town.dhts["late"].put("run", b"name", value, 600) > 0
            assert [record.value for record in await dhts[1].get("run", b"name")] == [value]

        dhts = await town.grow(3)
        node = town.swarm.add("late", live_on_a_slow_disk)
        await say(b"before")
        town.swarm.kill("late")
        node.clock.set_model(ClockModel(skew=-600))
        town.swarm.restart("late")
        await say(b"after")

    in_town(main)


def test_a_full_disk_stops_no_publishing() -> None:
    async def main(town: Town) -> None:
        async def live_on_a_full_disk(node: SimNode) -> None:
            await node.world.disk.replace(
                STAMP_PATH, make_stamp(node.peer_id, CONFIG.difficulty)
            )
            node.disk.model = DiskModel(capacity=0)
            await town.live(node)

        await town.grow(3)
        node = town.swarm.add("late", live_on_a_full_disk)
        await node.world.sleep(1)
        await town.dhts["late"].bootstrap([town.swarm.nodes["n0"].addr])
        assert await town.dhts["late"].put("run", b"name", b"value", 600) > 0

    in_town(main)


def test_namespaces_are_enforced_by_holders() -> None:
    only_short = Namespace("short", lambda record: len(record.value) < 4, max_lifetime=100)

    async def main(town: Town) -> None:
        dhts = await town.grow(4)
        assert await dhts[1].put("short", b"name", b"abc", 60) > 0
        assert await dhts[1].put("short", b"other", b"much too long", 60) == 0
        with pytest.raises(ValueError, match="lifetime must be 1 to 100 seconds"):
            await dhts[1].put("short", b"name", b"abc", 101)
        assert [record.value for record in await dhts[2].get("short", b"name")] == [b"abc"]
        assert await dhts[2].get("short", b"other") == []

    in_town(main, namespaces=(only_short,))


def test_an_address_record_that_others_would_refuse_is_refused_in_the_configuration() -> None:
    """With 18 hours each node put its record again every half minute, since none held it."""
    assert DhtConfig(addr_lifetime=ADDRESSES.max_lifetime).addr_lifetime == 7200
    with pytest.raises(ValueError, match="addr_lifetime is at most 7200 s, not 64800"):
        DhtConfig(addr_lifetime=18 * 3600.0)
