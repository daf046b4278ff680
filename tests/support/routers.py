"""A home router on loopback that speaks PCP, NAT-PMP and UPnP."""

from __future__ import annotations

import re
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from ipaddress import IPv4Address

import trio

from p2p.reach.mapping import Router

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
