"""A port of the home router, by PCP, NAT-PMP and UPnP, against a router that speaks them."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import MockClock

from p2p.machine import open_world
from p2p.multiaddr import Multiaddr
from p2p.reach.mapping import PortMapping
from p2p.swarm.swarm import SwarmConfig, open_host
from tests.support.routers import HOME, PUBLIC, FakeRouter, open_router

PORT = 4001
ADDR = Multiaddr.tcp(PUBLIC, PORT)
OTHER = "192.168.1.9", 8080, float("inf")
WAYS = ("PCP", "NAT-PMP", "UPnP")


async def wait(seconds: float) -> None:
    await trio.sleep(seconds)  # noqa: TID251 - on a virtual clock


@asynccontextmanager
async def asking(router: FakeRouter) -> AsyncIterator[PortMapping]:
    clock = trio.lowlevel.current_clock()
    assert isinstance(clock, MockClock)
    clock.autojump_threshold = 0.02  # nothing is waited for: time jumps once loopback is quiet
    async with open_router(router) as place, open_world() as world:
        yield PortMapping(world, PORT, place)


@pytest.mark.parametrize("way", WAYS)
async def test_a_port_is_mapped_renewed_and_removed(way: str, autojump_clock) -> None:
    router = FakeRouter(speaks=(way,), lease=60)
    told: list[Multiaddr | None] = []
    async with asking(router) as mapping:
        async with mapping.kept(told.append):
            for _ in range(6):
                await wait(97.0)
                assert router.live == {PORT: (HOME, PORT)}
            assert mapping.said == f"{way} maps {ADDR}"
        assert set(told[:-1]) == {ADDR}
        assert told[-1] is None
        assert router.live == {}
        assert router.requests[-1] in (f"{way} delete", "UPnP DeletePortMapping")


async def test_pcp_comes_first_and_upnp_last(autojump_clock) -> None:
    for number, way in enumerate(WAYS):
        async with asking(FakeRouter(speaks=WAYS[number:])) as mapping:
            await mapping.renew()
            assert mapping.said.startswith(way)


async def test_a_router_that_refuses_is_asked_in_another_way(autojump_clock) -> None:
    async with asking(FakeRouter(refuses=2)) as mapping:
        await mapping.renew()
        assert mapping.said == f"UPnP maps {ADDR}"
    async with asking(FakeRouter(speaks=WAYS[:2], refuses=2)) as mapping:
        await mapping.renew()
        assert mapping.addr is None
        assert "PCP: it refuses (result 2); NAT-PMP: it refuses (result 2)" in mapping.said


@pytest.mark.parametrize("way", WAYS)
async def test_a_port_of_another_machine_stays_its_own(way: str, autojump_clock) -> None:
    router = FakeRouter(speaks=(way,), table={PORT: OTHER})
    async with asking(router) as mapping:
        await mapping.renew()
        assert mapping.addr is not None
        port = mapping.addr.host_port[1]
        assert router.live == {PORT: OTHER[:2], port: (HOME, PORT)}
        await mapping.release()
        assert router.live == {PORT: OTHER[:2]}


@pytest.mark.parametrize("way", WAYS)
async def test_a_router_that_restarted_maps_again(
    way: str, caplog: pytest.LogCaptureFixture, autojump_clock
) -> None:
    """Another machine has the port by then."""
    caplog.set_level(logging.INFO)
    router = FakeRouter(speaks=(way,))
    told: list[Multiaddr | None] = []
    async with asking(router) as mapping, mapping.kept(told.append):
        await wait(10.0)
        assert told == [ADDR]
        router.restart()
        router.table[PORT] = OTHER
        router.public = "8.8.8.8"
        await wait(310.0)
        assert told[-1] == mapping.addr
        assert mapping.addr is not None
        host, port = mapping.addr.host_port
        assert host == "8.8.8.8"
        assert router.live == {PORT: OTHER[:2], port: (HOME, PORT)}
    assert ("mapping.restarted" in caplog.text) == (way != "UPnP")


@pytest.mark.parametrize("way", WAYS)
async def test_a_mapping_that_another_machine_took_is_left_to_it(
    way: str, autojump_clock
) -> None:
    router = FakeRouter(speaks=(way,))
    async with asking(router) as mapping:
        await mapping.renew()
        router.table[PORT] = OTHER
        await mapping.release()
        assert router.live == {PORT: OTHER[:2]}


@pytest.mark.parametrize("way", WAYS)
async def test_a_private_address_outside_means_two_routers(way: str, autojump_clock) -> None:
    router = FakeRouter(speaks=(way,), public="100.64.3.2")
    async with asking(router) as mapping:
        await mapping.renew()
        assert mapping.addr is None
        assert f"{way}: two routers in a row: the first says 100.64.3.2" in mapping.said
        assert router.live == {}


async def test_a_router_without_leases_gets_a_mapping_that_is_removed(autojump_clock) -> None:
    router = FakeRouter(speaks=("UPnP",), permanent_only=True)
    async with asking(router) as mapping:
        assert await mapping.renew() == 300.0
        assert router.table == {PORT: (HOME, PORT, float("inf"))}
        await mapping.release()
        assert router.table == {}


async def test_a_router_that_comes_later_is_found_and_one_that_goes_is_forgotten(
    autojump_clock,
) -> None:
    router = FakeRouter(speaks=())
    told: list[Multiaddr | None] = []
    async with asking(router) as mapping, mapping.kept(told.append):
        await wait(30.0)
        assert told == [None]
        router.speaks = WAYS
        await wait(700.0)
        assert told[-1] == ADDR
        router.speaks = ()
        await wait(310.0)
        assert told[-1] is None
        router.speaks = WAYS
        await wait(100.0)
        assert told[-1] == ADDR


LONG = bytes(1200)
LIES: tuple[tuple[str, Callable[[bytes], bytes], str], ...] = (
    ("PCP", lambda data: data[:-1], "an? PCP answer of 59 bytes"),
    ("PCP", lambda data: data + LONG, "an? PCP answer of 1260 bytes"),
    ("PCP", lambda data: data[:24] + bytes(12) + data[36:], "answer to another request"),
    ("PCP", lambda data: data[:-4] + bytes(4), "it has no public address"),
    ("PCP", lambda data: data[:42] + bytes(2) + data[44:], "grants no port"),
    ("PCP", lambda data: data[:4] + bytes(4) + data[8:], "or for no time"),
    ("NAT-PMP", lambda data: data[:-1], "cut off"),
    ("NAT-PMP", lambda data: data + LONG, "a NAT-PMP answer of 1212 bytes"),
    ("NAT-PMP", lambda data: bytes(len(data)), "answer to another request"),
    ("NAT-PMP", lambda data: data[:8] + bytes(2) + data[10:], "says 0.0.4.4|another port"),
    ("NAT-PMP", lambda data: data[:10] + bytes(2) + data[12:], "grants no port"),
    ("UPnP", lambda data: data[:-1], "no HTTP response"),
    (
        "UPnP",
        lambda data: data + (LONG * 60 if b"-Length" in data else b""),
        "over 65536 bytes",
    ),
    ("UPnP", lambda data: data.replace(b"200 X", b"302 X"), "no service|HTTP status 302"),
    ("UPnP", lambda data: data.replace(b"WANIPC", b"WANXYZ"), "no service that maps ports"),
    ("UPnP", lambda data: data.replace(b">/control", b">//8.8.8.8"), "does not lead to 127"),
    (
        "UPnP",
        lambda data: data.replace(PUBLIC.encode(), b"0.0.0.0"),
        "it has no public address",
    ),
    ("UPnP", lambda data: data.replace(PUBLIC.encode(), b"8.8.4.4.4"), "no IPv4 address"),
)


@pytest.mark.parametrize(("way", "lie", "reason"), LIES)
async def test_a_router_that_lies_gives_no_address(
    way: str, lie: Callable[[bytes], bytes], reason: str, autojump_clock
) -> None:
    async with asking(FakeRouter(speaks=(way,), mangle=lie)) as mapping:
        await mapping.renew()
        assert mapping.addr is None
        assert re.search(f"{way}: [^;]*({reason})", mapping.said), mapping.said


@pytest.mark.parametrize(
    "place", ["http://203.0.113.9/root.xml", "file:///etc/passwd", "http://["]
)
async def test_upnp_is_followed_to_no_other_host(place: str, autojump_clock) -> None:
    router = FakeRouter(speaks=("UPnP",), location=place)
    async with asking(router) as mapping:
        await mapping.renew()
        assert mapping.addr is None
        assert router.requests == []


async def test_a_host_tells_the_mapped_address() -> None:
    async with open_host() as host:
        assert host.port_to_map is None  # nobody can dial loopback, mapped or not
        own = host.addrs
        host.set_mapped(ADDR)
        assert host.addrs == (ADDR.with_peer(host.peer_id), *own)  # the widest reach first
        host.set_mapped(None)
        assert host.addrs == own
    config = SwarmConfig(announce=(ADDR,))
    async with open_host(listen=["/ip4/0.0.0.0/tcp/0"], config=config) as host:
        assert host.port_to_map is None
