"""Ask the home router to forward a port to this machine: by PCP, NAT-PMP or UPnP.

They are tried in this order, and the first that grants a public address wins. Specifications:
RFC 6887 (PCP), RFC 6886 (NAT-PMP), UPnP's WANIPConnection. The lease is renewed long before it
ends, so that a router that restarted, or has another address since, is noticed within minutes.

Whoever plays router in the local network can give us a wrong address, and no more: only the
default gateway is believed, where the system names one, and every answer is bounded. A mapping
opens the port to the whole internet, as listening on a public address does.
"""

from __future__ import annotations

import http.client
import io
import logging
import re
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from types import SimpleNamespace
from typing import Any, Final
from urllib.parse import urljoin, urlsplit

import trio

from p2p.concurrency import open_bare_nursery
from p2p.errors import BadMessage, ShoalError
from p2p.multiaddr import Multiaddr
from p2p.wire import KI
from p2p.world import World

MAX_ANSWER: Final = 64 * KI
"""Bytes of an answer over HTTP. Descriptions of routers have up to 10 KB."""
MAX_DATAGRAM: Final = 2 * KI

_PCP_REQUEST: Final = struct.Struct(">BBHI16s12sB3xHH16s")
_TCP: Final = 6
"""PCP's number of TCP; NAT-PMP's operation is 2."""
_NONE: Final = IPv4Address(0)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachConfig:
    """How a node makes itself reachable."""

    map_port: bool = True
    """True to ask the home router to forward the node's listening port."""

    find_relays: bool = True
    """True to find relays while nobody can dial this node."""


@dataclass(frozen=True, slots=True)
class Router:
    """Address of the router."""

    host: str | None
    """IPv4 address; None if the system does not name it, and UPnP must find it."""
    port: int = 5351
    """Port of PCP and NAT-PMP."""
    ssdp: tuple[str, int] = ("239.255.255.250", 1900)


@dataclass(frozen=True, slots=True)
class Answer:
    """A router's answer."""

    result: int
    """0 if the request was granted, otherwise the router's error number."""
    host: IPv4Address = _NONE
    port: int = 0
    """External port."""
    seconds: int = 0
    """Length of the lease; 0 for one without end."""
    epoch: int | None = None
    """Seconds since the router lost its mappings, if it says so."""


@dataclass(frozen=True, slots=True)
class Service:
    """A router's UPnP service that maps ports."""

    kind: str
    host: str
    port: int
    path: str

    async def call(
        self, action: str, arguments: dict[str, object], *names: str
    ) -> tuple[int, tuple[str, ...]]:
        """Return 0 or UPnP's error code, and the values of ``names``."""
        kind = f"urn:schemas-upnp-org:service:{self.kind}"
        inner = "".join(f"<{name}>{value}</{name}>" for name, value in arguments.items())
        envelope = (
            '<?xml version="1.0"?><s:Envelope'
            ' xmlns:s="http://schemas.xmlsoap.org/soap/envelope/"'
            ' s:encodingStyle="http://schemas.xmlsoap.org/soap/encoding/"><s:Body>'
            f'<u:{action} xmlns:u="{kind}">{inner}</u:{action}></s:Body></s:Envelope>'
        )
        head = f'Content-Type: text/xml; charset="utf-8"\r\nSOAPAction: "{kind}#{action}"\r\n'
        answer = await _http(self.host, self.port, f"POST {self.path}", head, envelope)
        return decode_soap_untrusted(*answer, names)


class _Unmapped(ShoalError):
    """The router forwards no port; the message says why."""


# What routers say.


def decode_pcp_untrusted(data: bytes, nonce: bytes, port: int) -> Answer:
    """Decode PCP's answer about our ``port``. Raise `BadMessage`, and nothing else."""
    if not 60 <= len(data) <= 1100:
        raise BadMessage(f"a PCP answer of {len(data)} bytes")
    fields = struct.unpack_from(">BBxBII12x12sB3xHH16s", data)
    version, op, result, seconds, epoch, echo, protocol, internal, external, host = fields
    if (version, op, echo, protocol, internal) != (2, 129, nonce, _TCP, port):
        raise BadMessage("a PCP answer to another request")
    if result:
        return Answer(result, epoch=epoch)
    return Answer(0, IPv6Address(host).ipv4_mapped or _NONE, external, seconds, epoch)


def decode_pmp_untrusted(data: bytes, op: int, port: int = 0) -> Answer:
    """Decode NAT-PMP's answer to operation 0 (the address) or 2 (a mapping of ``port``). Raise
    `BadMessage`, and nothing else."""
    if not 8 <= len(data) <= 16:
        raise BadMessage(f"a NAT-PMP answer of {len(data)} bytes")
    version, answered, result, epoch = struct.unpack_from(">BBHI", data)
    rest = data[8:]
    if (version, answered) != (0, 128 + op):
        raise BadMessage("a NAT-PMP answer to another request")
    if result:
        return Answer(result, epoch=epoch)
    if len(rest) != (8 if op else 4):
        raise BadMessage("a NAT-PMP answer is cut off")
    if not op:
        return Answer(0, IPv4Address(rest), epoch=epoch)
    internal, external, seconds = struct.unpack(">HHI", rest)
    if internal != port:
        raise BadMessage("a NAT-PMP answer about another port")
    return Answer(0, port=external, seconds=seconds, epoch=epoch)


def decode_http_untrusted(data: bytes) -> tuple[int, str]:
    """Return status and body of an HTTP response. Raise `BadMessage`, and nothing else."""
    if len(data) > MAX_ANSWER:
        raise BadMessage(f"an answer of over {MAX_ANSWER} bytes")
    sock: Any = SimpleNamespace(makefile=lambda _: io.BytesIO(data))
    try:
        response = http.client.HTTPResponse(sock)
        response.begin()
        return response.status, response.read().decode("utf-8", "replace")
    except (http.client.HTTPException, ValueError) as error:
        raise BadMessage(f"no HTTP response: {type(error).__name__}") from None


def decode_url_untrusted(url: str, host: str) -> tuple[int, str]:
    """Return port and path of a URL, which must lead to ``host``. Raise `BadMessage`, and
    nothing else."""
    try:
        parts = urlsplit(url)
        port = 80 if parts.port is None else parts.port
    except ValueError:
        raise BadMessage("no URL") from None
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    is_ours = (parts.scheme, parts.hostname) == ("http", host)
    if not is_ours or not re.fullmatch(r"/[!-~]{0,255}", target):
        raise BadMessage(f"a URL that does not lead to {host}")
    return port, target


def decode_ssdp_untrusted(data: bytes, host: str) -> tuple[int, str]:
    """Return port and path of the description that ``host`` offers. Raise `BadMessage`, and
    nothing else."""
    for line in data[:MAX_DATAGRAM].decode("latin-1").splitlines():
        name, _, value = line.partition(":")
        if name.strip().lower() == "location":
            return decode_url_untrusted(value.strip(), host)
    raise BadMessage("a search for UPnP answered without a location")


def decode_description_untrusted(text: str, host: str, port: int, path: str) -> Service:
    """Return the service of a router's description that maps ports.

    No XML parser sees what a router writes: there are no entities to expand. Raise
    `BadMessage`, and nothing else.
    """
    services = {
        _text_of(part, "serviceType").rpartition(":service:")[2]: _text_of(part, "controlURL")
        for part in text.split("<service>")[1:]
    }
    known = ("WANIPConnection:2", "WANIPConnection:1", "WANPPPConnection:1")
    kind = next((kind for kind in known if kind in services), None)
    if kind is None:
        raise BadMessage("UPnP describes no service that maps ports")
    try:
        url = urljoin(f"http://{host}:{port}{path}", services[kind])
    except ValueError:
        raise BadMessage("no URL") from None
    return Service(kind, host, *decode_url_untrusted(url, host))


def decode_soap_untrusted(
    status: int, text: str, names: Sequence[str]
) -> tuple[int, tuple[str, ...]]:
    """Return 0 or UPnP's error code, and the values of ``names``. Raise `BadMessage`, and
    nothing else."""
    if status == 200:
        return 0, tuple(_text_of(text, name)[:64] for name in names)
    code = _text_of(text, "errorCode")
    if re.fullmatch("[1-9][0-9]{2}", code, re.ASCII):
        return int(code), ()
    raise BadMessage(f"HTTP status {status}")


def decode_ipv4_untrusted(text: str) -> IPv4Address:
    """Return an IPv4 address from a router's text; 0.0.0.0 if the router has none.

    Raises:
        BadMessage: The text is no address. Nothing else is raised.
    """
    try:
        return IPv4Address(text) if text else _NONE
    except AddressValueError:
        raise BadMessage(f"{text!r} is no IPv4 address") from None


def _text_of(text: str, name: str) -> str:
    """Return the text of the first element ``name``, in linear time."""
    return text.partition(name)[2].partition(">")[2].partition("<")[0].strip()


# How they are asked. Each function maps our TCP ``port``, to the external port ``wanted`` if
# that is free; with 0 ``seconds`` it removes the mapping.

Way = Callable[[Router, int, int, int], Awaitable[Answer]]
"""Raises `_Unmapped`, `BadMessage`, `OSError`."""


async def _exchange(
    router: Router, request: bytes, decode: Callable[[bytes], Answer]
) -> Answer:
    trouble = "no answer"
    with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        await sock.connect((router.host, router.port))  # others' datagrams are not received
        for patience in (0.25, 0.5, 1.0):
            with trio.move_on_after(patience):
                await sock.send(request)
                while True:
                    try:
                        answer = decode(await sock.recv(MAX_DATAGRAM))
                    except BadMessage as error:  # perhaps a late answer to another request
                        trouble = str(error)
                        continue
                    if answer.result:
                        raise _Unmapped(f"it refuses (result {answer.result})")
                    return answer
    raise _Unmapped(trouble)


def _own_address(host: str | None) -> str:
    """Return our address on the route to the router, without sending anything."""
    if host is None:
        raise _Unmapped("this system does not name its router")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def _check_public(host: IPv4Address) -> None:
    if host == _NONE:
        raise _Unmapped("it has no public address, like the inner one of two routers in a row")
    if not host.is_global or host.is_multicast:
        raise _Unmapped(f"two routers in a row: the first says {host}")


def _check_granted(answer: Answer) -> None:
    if not answer.port or not answer.seconds:
        raise BadMessage("it grants no port, or for no time")


async def _pcp(nonce: bytes, router: Router, port: int, wanted: int, seconds: int) -> Answer:
    own = IPv6Address(f"::ffff:{_own_address(router.host)}").packed
    rest = (own, nonce, _TCP, port, wanted, IPv6Address("::ffff:0:0").packed)
    decode = partial(decode_pcp_untrusted, nonce=nonce, port=port)
    answer = await _exchange(router, _PCP_REQUEST.pack(2, 1, 0, seconds, *rest), decode)
    if seconds:
        _check_granted(answer)
        try:
            _check_public(answer.host)
        except _Unmapped:
            await _exchange(router, _PCP_REQUEST.pack(2, 1, 0, 0, *rest), decode)
            raise
    return answer


async def _nat_pmp(router: Router, port: int, wanted: int, seconds: int) -> Answer:
    _own_address(router.host)
    place = Answer(0)
    if seconds:
        place = await _exchange(router, bytes(2), partial(decode_pmp_untrusted, op=0))
        _check_public(place.host)
    request = struct.pack(">BBHHHI", 0, 2, 0, port, wanted if seconds else 0, seconds)
    decode = partial(decode_pmp_untrusted, op=2, port=port)
    answer = await _exchange(router, request, decode)
    if seconds:
        _check_granted(answer)
    return replace(answer, host=place.host)


async def _upnp(
    any_port: Callable[[], int], router: Router, port: int, wanted: int, seconds: int
) -> Answer:
    """Map a port by UPnP. Mappings of other machines are left alone, although many routers
    would let us replace them."""
    service = await _find_service(router)
    own = _own_address(service.host)

    async def is_free(external: int) -> bool:
        names = ("NewInternalClient", "NewInternalPort")
        code, values = await service.call(
            "GetSpecificPortMappingEntry", _mapping(external), *names
        )
        return code != 0 or values == (own, str(port))

    if not seconds:
        if await is_free(wanted):  # else it leads to another machine by now
            await service.call("DeletePortMapping", _mapping(wanted))
        return Answer(0)
    code, values = await service.call("GetExternalIPAddress", {}, "NewExternalIPAddress")
    host = decode_ipv4_untrusted("" if code else values[0])
    _check_public(host)
    for _ in range(6):
        code = 718  # ConflictInMappingEntry
        if await is_free(wanted):
            arguments = _mapping(wanted) | {
                "NewInternalPort": port,
                "NewInternalClient": own,
                "NewEnabled": 1,
                "NewPortMappingDescription": "shoal",
                "NewLeaseDuration": seconds,
            }
            code, _values = await service.call("AddPortMapping", arguments)
        if not code:
            return Answer(0, host, wanted, seconds)
        if code == 718:
            wanted = any_port()
        elif code == 725 and seconds:  # OnlyPermanentLeasesSupported
            seconds = 0
        else:
            raise _Unmapped(f"it refuses (error {code})")
    raise _Unmapped("every port that we asked for is another machine's")


def _mapping(external: int) -> dict[str, object]:
    return {"NewRemoteHost": "", "NewExternalPort": external, "NewProtocol": "TCP"}


async def _find_service(router: Router) -> Service:
    trouble, target = "no answer", "urn:schemas-upnp-org:device:InternetGatewayDevice:1"
    search = (
        f"M-SEARCH * HTTP/1.1\r\nHOST: {router.ssdp[0]}:{router.ssdp[1]}\r\n"
        f'MAN: "ssdp:discover"\r\nMX: 1\r\nST: {target}\r\n\r\n'
    )
    with (
        trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock,
        trio.move_on_after(3.0),  # with the router's description
    ):
        for _ in range(2):  # multicast is often lost on its way through the air
            await sock.sendto(search.encode(), router.ssdp)
        while True:
            data, (host, _port) = await sock.recvfrom(MAX_DATAGRAM)
            if host != router.host if router.host else IPv4Address(host).is_global:
                continue
            try:
                port, path = decode_ssdp_untrusted(data, host)
                _status, text = await _http(host, port, f"GET {path}")
                return decode_description_untrusted(text, host, port, path)
            except (BadMessage, OSError) as error:
                trouble = str(error)
    raise _Unmapped(trouble)


async def _http(
    host: str, port: int, what: str, head: str = "", body: str = ""
) -> tuple[int, str]:
    request = (
        f"{what} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n"
        f"{head}Content-Length: {len(body)}\r\n\r\n{body}"
    )
    data = bytearray()
    # Routers answer in 0.1 s.
    with trio.move_on_after(3.0), suppress(trio.BrokenResourceError):
        async with await trio.open_tcp_stream(host, port) as stream:
            await stream.send_all(request.encode())
            while len(data) <= MAX_ANSWER and (more := await stream.receive_some()):
                data += more
    return decode_http_untrusted(bytes(data))  # what came before a timeout may be all


def home_router() -> Router:
    """Return the default gateway, which Linux names in a file."""
    try:
        with open("/proc/net/route", encoding="ascii") as file:
            rows = [line.split() for line in file.read(MAX_ANSWER).splitlines()[1:]]
    except OSError:
        return Router(None)
    for _, target, gateway, flags, *_ in rows:
        if int(target, 16) == 0 and int(flags, 16) & 2:  # RTF_GATEWAY
            return Router(socket.inet_ntoa(struct.pack("=I", int(gateway, 16))))
    return Router(None)


# A mapping's life.


class PortMapping:
    """Mapping of one TCP port of this machine by the home router."""

    def __init__(self, world: World, port: int, router: Router | None = None) -> None:
        """``router`` is the default gateway unless it is given."""
        self._world = world
        self._port = port
        self._router = router
        chance = world.rng("reach/mapping")
        self._ways: dict[str, Way] = {
            "PCP": partial(_pcp, world.entropy(12)),
            "NAT-PMP": _nat_pmp,
            "UPnP": partial(_upnp, lambda: chance.randrange(1024, 65536)),
        }
        self._way = ""
        """Protocol that worked last."""
        self._epoch = self._heard = 0.0
        """Epoch in the router's last answer, and the time of that answer."""
        self.addr: Multiaddr | None = None
        """Address at which the internet can dial us, according to the router."""
        self.said = ""
        """The router's answer for people."""

    async def renew(self) -> float:
        """Create or renew the mapping. Return the seconds until the next renewal."""
        router = self._router or home_router()
        wanted = self._port if self.addr is None else self.addr.host_port[1]
        refusals = []
        for way in sorted(self._ways, key=lambda way: way != self._way):
            try:
                # A lease of an hour is asked for.
                answer = await self._ways[way](router, self._port, wanted, 3600)
            except (_Unmapped, BadMessage, OSError) as error:
                refusals.append(f"{way}: {error}")
                continue
            now = self._world.now()
            if answer.epoch is not None:
                # Clocks of routers are off by up to an eighth (RFC 6887, 8.5). The request that
                # shows a restart has made the mapping again.
                least = self._epoch + (now - self._heard) * 7 / 8 - 2
                if way == self._way and answer.epoch < least:
                    logger.info("mapping.restarted way=%s", way)
                self._epoch, self._heard = answer.epoch, now
            addr = Multiaddr.tcp(str(answer.host), answer.port)
            if addr != self.addr:  # also if another machine has the port that we had
                logger.info("mapping.granted way=%s addr=%s was=%s", way, addr, self.addr)
            self._way, self.addr, self.said = way, addr, f"{way} maps {addr}"
            # A router that forgot us is noticed within 5 minutes, however long the lease is.
            return min(300.0, max(10.0, answer.seconds / 2)) if answer.seconds else 300.0
        self.said = "; ".join(refusals)
        logger.info("mapping.refused port=%d reason=%s", self._port, self.said)
        self.addr = None
        # A router that had it may be restarting; one that never did rarely learns.
        return 60.0 if self._way else 600.0

    async def release(self) -> None:
        """Remove the mapping, if there is one and the router answers soon."""
        addr, self.addr = self.addr, None
        if addr is None:
            return
        with trio.move_on_after(2.0, shield=True):
            try:
                router = self._router or home_router()
                await self._ways[self._way](router, self._port, addr.host_port[1], 0)
            except (_Unmapped, BadMessage, OSError) as error:
                logger.info("mapping.kept addr=%s reason=%s", addr, error)

    @asynccontextmanager
    async def kept(self, on_change: Callable[[Multiaddr | None], None]) -> AsyncIterator[None]:
        """Renew in the background for the length of the block, then remove the mapping.
        ``on_change`` gets the address each time."""

        async def keep() -> None:
            try:
                while True:
                    pause = await self.renew()
                    on_change(self.addr)
                    await self._world.sleep_until(self._world.now() + pause)
            finally:
                on_change(None)
                await self.release()

        async with open_bare_nursery() as nursery:
            nursery.start_soon(keep)
            yield
            nursery.cancel_scope.cancel()
