"""Where the conformance suites get their subjects from.

A subject is a function that runs one law in a world of its own: it builds networks or hosts,
runs the law on trio (real or simulated clock), and tears everything down. To put another
network or host under the same laws, add a function to `NETWORKS` or `HOSTS`.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import trio

from p2p.circuit.core.book import RelayConfig
from p2p.circuit.relay import relaying
from p2p.host import Host
from p2p.identity import KeyPair
from p2p.multiaddr import Multiaddr
from p2p.network import Network
from p2p.swarm.swarm import open_host
from p2p.transport import connection
from p2p.transport.memory import MemoryNetwork
from p2p.transport.tcp import TcpNetwork
from sim.node.swarm import SimNode, Swarm
from tests.support.simulated import on_swarm

PATIENCE = 20.0  # seconds for one law; reached only when it fails


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


async def read_all(stream: trio.abc.ReceiveStream) -> bytes:
    data = bytearray()
    while piece := await stream.receive_some():
        data += piece
    return bytes(data)


@dataclass(frozen=True)
class Networks:
    """Two machines that can reach each other."""

    dialer: Network
    listener: Network
    anywhere: Multiaddr  # where `listener` can listen, at a place of the network's choice
    nowhere: Multiaddr  # where nobody listens


@dataclass(frozen=True)
class Hosts:
    """Three hosts that can reach each other, and know nothing of each other yet."""

    a: Host
    b: Host
    c: Host
    stranger: KeyPair  # an identity that nobody runs
    nowhere: Multiaddr  # where nobody listens


NetworkLaw = Callable[[Networks], Awaitable[None]]
HostLaw = Callable[[Hosts], Awaitable[None]]
Places = tuple[str, str]  # where a listener finds a place, and where nobody listens
MEMORY = "/memory/0", "/memory/99"
TCP = "/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/tcp/1"
INTERNET = "/ip4/0.0.0.0/tcp/0", "/ip4/20.2.0.1/tcp/9"


@pytest.fixture(autouse=True)
def _frequent_schedule_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conformance with trio's stream rules wants a schedule point in every call."""
    monkeypatch.setattr(connection.MuxedStream, "yield_every", 0)


def on_networks(law: NetworkLaw, one: Network, other: Network, places: Places) -> None:
    async def main() -> None:
        with trio.fail_after(PATIENCE):
            await law(Networks(one, other, *map(Multiaddr.parse, places)))

    trio.run(main)


def on_simulation(law: NetworkLaw, places: Places) -> None:
    async def idle(node: SimNode) -> None:
        await trio.sleep_forever()

    async def main(swarm: Swarm) -> None:
        networks = [swarm.add(name, idle).network for name in "ab"]
        await law(Networks(*networks, *map(Multiaddr.parse, places)))

    on_swarm(main)


ANYTHING = RelayConfig(
    strangers=True, request_rate=1e6, per_peer=10**4, rate=2**40, total_rate=2**40, bytes=2**40
)


def on_circuits(law: NetworkLaw) -> None:
    """Two hosts with reservations at a third."""

    async def main() -> None:
        async with AsyncExitStack() as stack:
            stack.enter_context(trio.fail_after(PATIENCE))
            keys = [KeyPair(bytes([seed]) * 32) for seed in (1, 2, 3, 4)]
            relay, one, other = [
                await stack.enter_async_context(open_host(key=key, strict=True))
                for key in keys[:3]
            ]
            stack.enter_context(relaying(relay.world, relay, keys[0], ANYTHING))
            place = relay.addrs[0].through
            nowhere = place.with_peer(keys[3].peer_id)
            await law(Networks(one.network, other.network, place, nowhere))

    trio.run(main)


def hosts_of(opened: Sequence[Host], places: Places) -> Hosts:
    return Hosts(*opened, stranger=KeyPair(bytes(32)), nowhere=Multiaddr.parse(places[1]))


def on_hosts(law: HostLaw, network: Network, places: Places) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            stack.enter_context(trio.fail_after(PATIENCE))
            opened = []
            for seed in (1, 2, 3):
                key = KeyPair(bytes([seed]) * 32)
                host = open_host(network=network, key=key, listen=places[:1], strict=True)
                opened.append(await stack.enter_async_context(host))
            await law(hosts_of(opened, places))

    trio.run(main)


def on_simulated_hosts(
    law: HostLaw, open_one: Callable[[SimNode], AbstractAsyncContextManager[Host]]
) -> None:
    opened: list[Host] = []

    async def live(node: SimNode) -> None:
        async with open_one(node) as host:
            opened.append(host)
            await trio.sleep_forever()

    async def main(swarm: Swarm) -> None:
        for name in "abc":
            swarm.add(name, live)
            await swarm.sleep(0.001)
        await law(hosts_of(opened, MEMORY))

    on_swarm(main)


def open_at_level_2(node: SimNode) -> AbstractAsyncContextManager[Host]:
    """Open the production host over the simulated network."""
    return open_host(network=node.network, world=node.world, listen=MEMORY[:1], strict=True)


NETWORKS: dict[str, Callable[[NetworkLaw], None]] = {
    "memory": lambda law: on_networks(law, *[MemoryNetwork()] * 2, MEMORY),
    "tcp": lambda law: on_networks(law, TcpNetwork(), TcpNetwork(), TCP),
    "simulated": lambda law: on_simulation(law, MEMORY),
    "simulated internet": lambda law: on_simulation(law, INTERNET),
    "circuits": on_circuits,
}
HOSTS: dict[str, Callable[[HostLaw], None]] = {
    "memory": lambda law: on_hosts(law, MemoryNetwork(), MEMORY),
    "tcp": lambda law: on_hosts(law, TcpNetwork(), TCP),
    "simulated": lambda law: on_simulated_hosts(law, SimNode.open_host),
    "L2": lambda law: on_simulated_hosts(law, open_at_level_2),
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
