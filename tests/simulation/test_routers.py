"""Routers in the simulated network, and what production's hosts make of them."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import product
from statistics import median

import pytest
import trio

from p2p import SwarmConfig, SwarmHost, open_host
from p2p.circuit.core.book import RelayConfig
from p2p.circuit.relay import relaying
from p2p.errors import PeerUnreachable
from p2p.host import request, serve_requests
from p2p.multiaddr import Multiaddr
from p2p.reach.mapping import ReachConfig
from p2p.reach.nat import NatConfig, open_nat
from sim.net.link import NATS, LinkSpec
from sim.node.swarm import SimNode, Swarm
from sim.run.runner import run_scenario
from sim.run.scenario import Scenario, load_scenario
from tests.support.simulated import on_swarm
from tests.unit.test_circuit import ECHO, echo, until

PORT = 4001
KINDS = ("", *NATS)


def can_punch(one: str, other: str) -> bool:
    """The formula that 81 of 81 pairs of real routers followed."""
    changes, filters = ("symmetric",), ("port", "symmetric")
    return (one not in changes or other not in filters) and (
        other not in changes or one not in filters
    )


@pytest.mark.parametrize(("one", "other"), list(product(KINDS, KINDS)))
def test_routers_let_in_what_real_ones_let_in(one: str, other: str) -> None:
    """Nobody behind a router is dialled unasked; two that dial at once meet by the formula."""
    met: list[str] = []

    async def live(node: SimNode) -> None:
        listener = await node.network.listen(Multiaddr.tcp("0.0.0.0", PORT))
        there = next(other for other in node.siblings if other is not node)
        place = Multiaddr.tcp(there.endpoint.ip, PORT)
        if node.name == "b":
            await node.world.sleep(20.0)
        try:
            async with await node.network.dial(place):
                assert there.endpoint.spec.nat == ""
        except PeerUnreachable:
            assert there.endpoint.spec.nat != ""
        await node.world.sleep_until(40.0 if node.name == "a" else 40.5)

        async def accept() -> None:
            while True:
                stream = await listener.accept()
                if isinstance(await stream.receive_some(1), bytes):
                    met.append("accepted")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept)
            try:
                await (await node.network.punch(place)).send_all(b"x")
                met.append("dialled")
            except PeerUnreachable:
                pass
            await node.world.sleep_until(60.0)
            nursery.cancel_scope.cancel()
        assert node.endpoint.punches == {}

    async def body(swarm: Swarm) -> None:
        for name, kind in zip("ab", (one, other), strict=True):
            swarm.add(name, live, link=LinkSpec(nat=kind))
        await swarm.sleep(70.0)

    on_swarm(body)
    assert ("dialled" in met) is can_punch(one, other)


@pytest.mark.parametrize(
    ("home", "guest", "is_direct"),
    [("port", "port", True), ("port", "symmetric", False), ("cone", "symmetric", True)],
)
def test_two_homes_meet_by_productions_code(home: str, guest: str, is_direct: bool) -> None:
    """A symmetric router is known by the two ports at which the relays see its home."""
    opened: dict[str, SwarmHost] = {}
    looks: dict[str, bool] = {}

    async def live(node: SimNode) -> None:
        async with AsyncExitStack() as stack:
            enter = stack.enter_async_context
            listen = [f"/ip4/0.0.0.0/tcp/{PORT}"]
            config = SwarmConfig(punch=True)
            host = await enter(
                open_host(
                    network=node.network, world=node.world, listen=listen, strict=True,
                    config=config,
                )
            )  # fmt: skip
            opened[node.name] = host
            signer = node.world.signer
            if node.endpoint.spec.nat == "":
                stack.enter_context(
                    relaying(node.world, host, signer, RelayConfig(strangers=True))
                )
                await trio.sleep_forever()
            stack.enter_context(host.serving(ECHO, serve_requests(echo)))
            for relay in node.siblings[:2]:
                place = Multiaddr.tcp(relay.endpoint.ip, PORT).with_peer(relay.peer_id)
                await host.connect_addr(place)
            nat = await enter(
                open_nat(
                    host, signer, NatConfig(reach=ReachConfig(map_port=False)),
                    network=node.network,
                )
            )  # fmt: skip
            await until(host, lambda: len(nat.relays) == 2)
            await node.world.sleep(20.0)
            looks[node.endpoint.spec.nat] = nat.needs_open_peers
            if node.name == "guest":
                there = opened["home"]
                host.add_addrs(there.peer_id, there.addrs)
                assert await request(host, there.peer_id, ECHO, b"hello") == b"hello"
                await node.world.sleep(30.0)
                assert host.is_direct(there.peer_id) is is_direct
            await trio.sleep_forever()

    async def body(swarm: Swarm) -> None:
        for name, kind in (("r1", ""), ("r2", ""), ("home", home), ("guest", guest)):
            swarm.add(name, live, link=LinkSpec(nat=kind))
            await swarm.sleep(1.0)
        await swarm.sleep(100.0)

    on_swarm(body)
    assert looks == {kind: kind == "symmetric" for kind in (home, guest)}


@pytest.mark.deep
def test_most_nodes_behind_routers_get_versions_nearly_as_soon_as_an_open_swarm() -> None:
    scenario = load_scenario("nat_majority")
    opened = replace(scenario, parameters={**scenario.parameters, "nat_share": 0.0})

    def seconds(which: Scenario) -> float:
        runs = [run_scenario(which, seed).metrics for seed in (1, 2, 3)]
        assert {run["arrived_share"] for run in runs} == {1.0}
        return median(float(run["seconds_100"]) for run in runs)

    # One seed alone scatters: 1.31 to 1.87 over five, with a median of 1.42 to 1.47.
    assert seconds(scenario) < 1.6 * seconds(opened)
