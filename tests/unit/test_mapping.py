"""A port of the home router, by PCP, NAT-PMP and UPnP, against a router that speaks them."""

from __future__ import annotations

import logging
import re
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from ipaddress import IPv4Address

import pytest
import trio
from trio.testing import MockClock

from p2p.machine import open_world
from p2p.multiaddr import Multiaddr
from p2p.reach.mapping import PortMapping, Router
from p2p.swarm.swarm import SwarmConfig, open_host

PUBLIC = "8.8.4.4"
HOME = "127.0.0.1"


def now() -> float:
    return trio.current_time()  # noqa: TID251 - the test's own clock


@dataclass(slots=True, kw_only=True)
class FakeRouter:
    """What it speaks, and how well it does."""

    speaks: tuple[str, ...] = ("PCP", "NAT-PMP", "UPnP")
    public: str = PUBLIC
    lease: int = 3600  # seconds that it grants at most
    permanent_only: bool = False
    refuses: int = 0  # a result of PCP and NAT-PMP
    location: str = ""  # where SSDP points, instead of to its description
    mangle: Callable[[bytes], bytes] = bytes  # what becomes of each answer on its way
    table: dict[int, tuple[str, int, float]] = field(default_factory=dict)
    """External port: machine, its port, and when the mapping ends."""
    requests: list[str] = field(default_factory=list)
    booted: float = -1000.0

    def restart(self) -> None:
        """Forget all mappings."""
        self.booted = now()
        self.table.clear()

    @property
    def live(self) -> dict[int, tuple[str, int]]:
        """Mappings that have not ended."""
        return {key: row[:2] for key, row in self.table.items() if row[2] > now()}

    def grant(self, client: str, internal: int, wanted: int, seconds: int) -> int:
        """The external port, as PCP and NAT-PMP choose it; the one of before if there is."""
        own = [port for port, row in self.live.items() if row == (client, internal)]
        if not seconds:
            for port in own:
                del self.table[port]
            return 0
        port = own[0] if own else wanted
        while self.live.get(port, (client, internal)) != (client, internal):
            port += 1
        self.table[port] = client, internal, now() + seconds
        return port

    def answer(self, data: bytes, client: str) -> bytes | None:
        """To a datagram at port 5351."""
        epoch = int(now() - self.booted)
        if data[0] == 2 and "PCP" in self.speaks:
            seconds, own = struct.unpack_from(">I16s", data, 4)
            nonce, internal, wanted = struct.unpack_from(">12s4xHH", data, 24)
            seconds = min(seconds, self.lease)
            assert own == bytes(10) + b"\xff\xff" + IPv4Address(client).packed
            assert len(data) == 60
            assert data[36] == 6
            self.requests.append("PCP map" if seconds else "PCP delete")
            given = 0 if self.refuses else self.grant(client, internal, wanted, seconds)
            return (
                struct.pack(">BBBBII12x", 2, 129, 0, self.refuses, seconds, epoch)
                + struct.pack(">12sB3xHH", nonce, 6, internal, given)
                + bytes(10) + b"\xff\xff" + IPv4Address(self.public).packed
            )  # fmt: skip
        if data[0] == 0 and "NAT-PMP" in self.speaks:
            if data == b"\0\0":
                host = IPv4Address(self.public).packed
                return struct.pack(">BBHI", 0, 128, self.refuses, epoch) + host
            _, op, internal, wanted, seconds = struct.unpack(">BBxxHHI", data)
            assert op == 2
            self.requests.append("NAT-PMP map" if seconds else "NAT-PMP delete")
            seconds = min(seconds, self.lease)
            given = self.grant(client, internal, wanted, seconds)
            return struct.pack(
                ">BBHIHHI", 0, 130, self.refuses, epoch, internal, given, seconds
            )
        return None

    def soap(self, text: str) -> tuple[int, str]:
        """Status and body of UPnP's answer to a request."""
        action = re.findall(r'SOAPAction: ".*#(\w+)"', text)[0]
        said = dict(re.findall(r"<(New\w+)>([^<]*)<", text))
        port = int(said.get("NewExternalPort", 0))
        self.requests.append(f"UPnP {action}")
        reply = ""
        if action == "GetExternalIPAddress":
            reply = f"<NewExternalIPAddress>{self.public}</NewExternalIPAddress>"
        elif action == "GetSpecificPortMappingEntry":
            if port not in self.live:
                return self.error(714)
            client, internal = self.live[port]
            reply = f"<NewInternalPort>{internal}</NewInternalPort>"
            reply += f"<NewInternalClient>{client}</NewInternalClient>"
        elif action == "AddPortMapping":
            seconds = float(said["NewLeaseDuration"])
            if self.permanent_only and seconds:
                return self.error(725)
            ends = now() + (seconds or float("inf"))
            # Many routers replace another machine's mapping without a word, and so does this.
            self.table[port] = said["NewInternalClient"], int(said["NewInternalPort"]), ends
        else:
            assert action == "DeletePortMapping"
            del self.table[port]
        return 200, f"<s:Envelope><s:Body><u:{action}Response>{reply}</u:x></s:Body>"

    @staticmethod
    def error(code: int) -> tuple[int, str]:
        return 500, f"<s:Fault><UPnPError><errorCode>{code}</errorCode></UPnPError></s:Fault>"

    async def serve_http(self, stream: trio.SocketStream) -> None:
        """One request, then close."""
        data = b""
        async with stream:
            while b"\r\n\r\n" not in data:
                data += await stream.receive_some()
            head, _, body = data.partition(b"\r\n\r\n")
            length = int(re.findall(rb"Content-Length: (\d+)", head)[0])
            while len(body) < length:
                body += await stream.receive_some()
            if data.startswith(b"GET /root.xml "):
                kinds = ("Layer3Forwarding:1", "WANIPConnection:1")
                status, text = 200, "".join(
                    f"<service><serviceType>urn:schemas-upnp-org:service:{kind}</serviceType>"
                    f"<controlURL>/control/{kind[:5]}</controlURL></service>"
                    for kind in kinds
                )  # fmt: skip
            else:
                assert data.startswith(b"POST /control/WANIP ")
                status, text = self.soap(f"{head.decode()}\r\n\r\n{body.decode()}")
            answer = f"HTTP/1.1 {status} X\r\nContent-Length: {len(text)}\r\n\r\n{text}"
            with suppress(trio.BrokenResourceError):  # the client has had enough
                await stream.send_all(self.mangle(answer.encode()))

    async def serve_datagrams(
        self, sock: trio.socket.SocketType, answer: Callable[[bytes, str], bytes | None]
    ) -> None:
        while True:
            data, place = await sock.recvfrom(2000)
            reply = answer(data, place[0])
            if reply is not None:
                await sock.sendto(self.mangle(reply), place)

    def found(self, http: int, data: bytes, client: str) -> bytes | None:
        """SSDP's answer to a search."""
        assert data.startswith(b"M-SEARCH * HTTP/1.1\r\n")
        where = self.location or f"http://{HOME}:{http}/root.xml"
        text = f"HTTP/1.1 200 OK\r\nST: x\r\nLocation: {where}\r\n\r\n"
        return text.encode() if "UPnP" in self.speaks else None


@asynccontextmanager
async def open_router(router: FakeRouter) -> AsyncIterator[Router]:
    """Run a router for the length of the block; yields where it is."""
    udp = partial(trio.socket.socket, type=trio.socket.SOCK_DGRAM)
    with udp() as natpmp, udp() as ssdp:
        await natpmp.bind((HOME, 0))
        await ssdp.bind((HOME, 0))
        async with trio.open_nursery() as nursery:
            (listener,) = await trio.open_tcp_listeners(0, host=HOME)
            http = listener.socket.getsockname()[1]
            nursery.start_soon(trio.serve_listeners, router.serve_http, [listener])
            nursery.start_soon(router.serve_datagrams, natpmp, router.answer)
            nursery.start_soon(router.serve_datagrams, ssdp, partial(router.found, http))
            yield Router(HOME, natpmp.getsockname()[1], ssdp.getsockname())
            nursery.cancel_scope.cancel()


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
