"""Where the conformance suites get their subjects from.

A subject is a function that runs one law in a world of its own: it builds networks or hosts,
runs the law on trio (real or simulated clock), and tears everything down. To put another
network or host under the same laws, add a function to `NETWORKS` or `HOSTS`.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import trio

from p2p.circuit.core.book import RelayConfig
from p2p.circuit.relay import relaying
from p2p.host import Host
from p2p.identity import KeyPair
from p2p.machine import open_world
from p2p.multiaddr import Multiaddr
from p2p.network import Network
from p2p.swarm.swarm import SwarmConfig, open_host
from p2p.transport import connection
from p2p.transport.memory import MemoryNetwork
from p2p.transport.tcp import TcpNetwork
from sim.kernel.simulation import Simulation
from sim.kernel.virtual_time import run_simulation
from sim.node.swarm import SimNode, open_swarm

PATIENCE = 20.0
"""Seconds for one law; reached only when it fails."""


def law_of(subjects: str) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Turn a coroutine function into a test that a fixture runs over each of its subjects."""

    def decorate(law: Callable[..., Any]) -> Callable[..., None]:
        def test(**given: Any) -> None:
            given[subjects](law)

        test.__name__, test.__doc__ = law.__name__, law.__doc__
        parameter = inspect.Parameter(subjects, inspect.Parameter.KEYWORD_ONLY)
        test.__signature__ = inspect.Signature([parameter])  # type: ignore[attr-defined]
        return test

    return decorate


@dataclass(frozen=True)
class Networks:
    """Two machines that can reach each other."""

    dialer: Network
    listener: Network
    anywhere: Multiaddr
    """Where `listener` can listen, at a place of the network's choice."""
    nowhere: Multiaddr
    """Where nobody listens."""


@dataclass(frozen=True)
class Hosts:
    """Three hosts, a, b and c, that can reach each other, and know nothing of each other
    yet.
    """

    a: Host
    b: Host
    c: Host
    stranger: KeyPair
    """An identity that nobody runs."""
    nowhere: Multiaddr
    """Where nobody listens."""


NetworkLaw = Callable[[Networks], Awaitable[None]]
HostLaw = Callable[[Hosts], Awaitable[None]]


def on_memory(law: NetworkLaw) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        with trio.fail_after(PATIENCE):
            await law(
                Networks(
                    network,
                    network,
                    Multiaddr.parse("/memory/0"),
                    Multiaddr.parse("/memory/99"),
                )
            )

    trio.run(main)


def on_tcp(law: NetworkLaw) -> None:
    async def main() -> None:
        anywhere = Multiaddr.parse("/ip4/127.0.0.1/tcp/0")
        with trio.fail_after(PATIENCE):
            await law(
                Networks(
                    TcpNetwork(),
                    TcpNetwork(),
                    anywhere,
                    Multiaddr.parse("/ip4/127.0.0.1/tcp/1"),
                )
            )

    trio.run(main)


@pytest.fixture(autouse=True)
def _frequent_schedule_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conformance with trio's stream rules wants a schedule point in every call."""
    monkeypatch.setattr(connection.MuxedStream, "yield_every", 0)


def _run_hosts(law: HostLaw, network: Network, anywhere: str, nowhere: str) -> None:
    config = SwarmConfig()

    async def main() -> None:
        with trio.fail_after(PATIENCE):
            async with AsyncExitStack() as stack:
                hosts = []
                for seed in (1, 2, 3):
                    world = await stack.enter_async_context(
                        open_world(key=KeyPair(bytes([seed]) * 32))
                    )
                    host = open_host(
                        network=network,
                        world=world,
                        listen=(anywhere,),
                        strict=True,
                        config=config,
                    )
                    hosts.append(await stack.enter_async_context(host))
                await law(
                    Hosts(*hosts, stranger=KeyPair(bytes(32)), nowhere=Multiaddr.parse(nowhere))
                )

    trio.run(main)


def swarm_on_memory(law: HostLaw) -> None:
    _run_hosts(law, MemoryNetwork(), "/memory/0", "/memory/99")


def swarm_on_tcp(law: HostLaw) -> None:
    _run_hosts(law, TcpNetwork(), "/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/tcp/1")


async def _idle(node: SimNode) -> None:
    await trio.sleep_forever()


ANYTHING = RelayConfig(
    strangers=True, request_rate=1e6, per_peer=10**4, rate=2**40, total_rate=2**40, bytes=2**40
)


def on_circuits(law: NetworkLaw) -> None:
    """Two hosts with reservations at a third."""

    async def main() -> None:
        async with AsyncExitStack() as stack:
            stack.enter_context(trio.fail_after(PATIENCE))
            keys = [KeyPair(bytes([seed]) * 32) for seed in (1, 2, 3, 4)]
            config = SwarmConfig()
            relay, one, other = [
                await stack.enter_async_context(open_host(key=key, strict=True, config=config))
                for key in keys[:3]
            ]
            stack.enter_context(relaying(relay.world, relay, keys[0], ANYTHING))
            place = relay.addrs[0].through
            nowhere = place.with_peer(keys[3].peer_id)
            await law(Networks(one.network, other.network, place, nowhere))

    trio.run(main)


def on_simulation(
    law: NetworkLaw, anywhere: str = "/memory/0", nowhere: str = "/memory/99"
) -> None:
    async def main(simulation: Simulation) -> None:
        async with open_swarm(simulation) as swarm:
            networks = [swarm.add(name, _idle).network for name in "ab"]
            await law(Networks(*networks, *map(Multiaddr.parse, (anywhere, nowhere))))

    run_simulation(main, seed=1, horizon=3600)


def on_simulated_internet(law: NetworkLaw) -> None:
    on_simulation(law, "/ip4/0.0.0.0/tcp/0", "/ip4/20.2.0.1/tcp/9")


def simulated_hosts(law: HostLaw) -> None:
    async def main(simulation: Simulation) -> None:
        async with open_swarm(simulation) as swarm:
            opened: list[Host] = []

            async def live(node: SimNode) -> None:
                async with node.open_host() as host:
                    opened.append(host)
                    await trio.sleep_forever()

            for name in "abc":
                swarm.add(name, live)
                await swarm.sleep(0.001)
            await law(
                Hosts(
                    *opened, stranger=KeyPair(bytes(32)), nowhere=Multiaddr.parse("/memory/99")
                )
            )

    run_simulation(main, seed=1, horizon=3600)


def swarm_on_simulation(law: HostLaw) -> None:
    """The production host over the simulated network: level L2."""

    async def main(simulation: Simulation) -> None:
        async with open_swarm(simulation) as swarm:
            opened: list[Host] = []

            async def live(node: SimNode) -> None:
                config = SwarmConfig(strict=True)
                host = open_host(
                    network=node.network, world=node.world, listen=("/memory/0",), config=config
                )
                async with host as swarm_host:
                    opened.append(swarm_host)
                    await trio.sleep_forever()

            for name in "abc":
                swarm.add(name, live)
                await swarm.sleep(0.001)
            await law(
                Hosts(
                    *opened, stranger=KeyPair(bytes(32)), nowhere=Multiaddr.parse("/memory/99")
                )
            )

    run_simulation(main, seed=1, horizon=3600)


NETWORKS: dict[str, Callable[[NetworkLaw], None]] = {
    "memory": on_memory,
    "tcp": on_tcp,
    "simulated": on_simulation,
    "simulated internet": on_simulated_internet,
    "circuits": on_circuits,
}
HOSTS: dict[str, Callable[[HostLaw], None]] = {
    "memory": swarm_on_memory,
    "tcp": swarm_on_tcp,
    "simulated": simulated_hosts,
    "L2": swarm_on_simulation,
}


@pytest.fixture(params=list(NETWORKS))
def networks(request: pytest.FixtureRequest) -> Callable[[NetworkLaw], None]:
    """Runs a law over two networks."""
    return NETWORKS[request.param]


@pytest.fixture(params=[name for name in NETWORKS if name != "circuits"])
def places(request: pytest.FixtureRequest) -> Callable[[NetworkLaw], None]:
    """The same, where a listener has a place of its own, whoever it is."""
    return NETWORKS[request.param]


@pytest.fixture(params=list(HOSTS))
def hosts(request: pytest.FixtureRequest) -> Callable[[HostLaw], None]:
    """Runs a law over three hosts."""
    return HOSTS[request.param]
