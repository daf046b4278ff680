"""mDNS: peers in the same local network find each other without a bootstrap address.

Specification: libp2p/specs, discovery/mdns.md. It tells everybody in the network our id and
address, so it is off unless the owner asks for it. Of what others say, only addresses count
that their datagram comes from: nobody can point us at a third machine.
"""

from __future__ import annotations

import logging
import socket
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import trio

from p2p.bounded import BoundedDict
from p2p.concurrency import Notifier, open_bare_nursery
from p2p.door import check
from p2p.errors import BadMessage, ConfigError
from p2p.identity import PeerId
from p2p.multiaddr import Multiaddr
from p2p.swarm.core.limits import PUBLIC, reach_of
from p2p.swarm.swarm import SwarmHost
from p2p.transport.dns import (
    MAX_DATAGRAM,
    PTR,
    TXT,
    decode_dns_untrusted,
    dnsaddrs_untrusted,
    encode_name,
    encode_question,
    encode_record,
)

GROUP: Final = "224.0.0.251"
PORT: Final = 5353
SERVICE: Final = "_p2p._udp.local"
LIFETIME: Final = 120
"""Seconds for which others may believe an answer."""
PAUSE: Final = 1.0
"""Seconds between two answers at least, and between the first two questions."""

logger = logging.getLogger(__name__)


class Lan:
    """Peers that were found in the local network. Open it with `open_lan`."""

    def __init__(self, host: SwarmHost, sock: trio.socket.SocketType, links: list[int]) -> None:
        self._host = host
        self._sock = sock
        self._links = links
        # Others must not see by this name that a machine has come back.
        self._name = f"{host.world.entropy(20).hex()}.{SERVICE}"
        self._rng = host.world.rng("lan")
        self._answered = host.world.now() - PAUSE
        self._found: BoundedDict[PeerId, Multiaddr] = BoundedDict(64)
        self.news = Notifier()
        """Notified when a peer was found, or has another address."""

    @property
    def found(self) -> tuple[Multiaddr, ...]:
        """Where peers are, each address with an id."""
        return tuple(self._found.values())

    def some(self) -> Sequence[Multiaddr]:
        """Return up to eight random addresses, to ask for a run."""
        found = self.found
        return self._rng.sample(found, min(8, len(found)))

    def _answer(self) -> bytes:
        own = [one for one in self._host.addrs if one.relay is None and reach_of(one) < PUBLIC]
        texts = [f"dnsaddr={addr}".encode() for addr in own[:4]]
        texts = [bytes([len(text)]) + text for text in texts if len(text) < 256]
        if not texts:
            return b""
        named = encode_record(SERVICE, PTR, LIFETIME, encode_name(self._name))
        head = struct.pack(">HHHHHH", 0, 0x8400, 0, 1, 0, 1)  # one record, one more beside it
        return head + named + encode_record(self._name, TXT, LIFETIME, b"".join(texts))

    async def _send(self, data: bytes) -> None:
        for link in self._links:
            try:
                self._sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, _request(link))
                await self._sock.sendto(data, (GROUP, PORT))
            except OSError as error:  # a link that has gone, or carries no multicast
                logger.debug("link %d carries no mDNS: %s", link, error)

    async def ask(self) -> None:
        """Ask less and less often, at least once a minute, until cancelled."""
        pause = PAUSE
        while True:
            await self._send(encode_question(SERVICE, PTR))
            await self._host.world.sleep(pause)
            pause = min(2 * pause, 60.0)

    async def listen(self) -> None:
        """Answer, and take answers, until cancelled."""
        while True:
            try:
                data, place = await self._sock.recvfrom(MAX_DATAGRAM)
                message = decode_dns_untrusted(data)
            except (BadMessage, OSError):  # others' services, or a link that has gone
                await trio.lowlevel.checkpoint()
                continue
            if message.is_answer:
                texts = [text for _, strings in message.texts for text in strings]
                self._hear(dnsaddrs_untrusted(texts), place[0])
            elif (SERVICE, PTR) in message.questions:
                now, data = self._host.world.now(), self._answer()
                if data and now >= self._answered + PAUSE:
                    self._answered = now
                    await self._send(data)

    def _hear(self, addrs: list[Multiaddr], source: str) -> None:
        for addr in addrs:
            peer = addr.peer_id
            if peer is None or peer == self._host.peer_id or addr.parts[0] != ("ip4", source):
                continue
            if reach_of(addr) == PUBLIC:  # anybody in the world can send to our port
                continue
            if addr.relay is None and self._found.get(peer) != addr:
                logger.info("lan.found addr=%s", addr)
                self._found.renew(peer, addr)
                self.news.notify_all()


def _request(link: int) -> bytes:
    # Linux takes no address of loopback for a source unless it is told to.
    is_loopback = socket.if_indextoname(link).startswith("lo")
    own = socket.inet_aton("127.0.0.1" if is_loopback else "0.0.0.0")
    return struct.pack("=4s4si", socket.inet_aton(GROUP), own, link)


@asynccontextmanager
async def open_lan(host: SwarmHost) -> AsyncIterator[Lan]:
    """Find peers in the local network, and be found, for the length of the block. Raises
    `ConfigError` where there is no multicast."""
    check("host", host, SwarmHost)
    with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        links = list[int]()
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 255)
            await sock.bind(("", PORT))
        except OSError as error:
            raise ConfigError(
                f"cannot look for peers in the local network: UDP port {PORT}: {error}"
            ) from error
        for link, _ in socket.if_nameindex():
            try:
                sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, _request(link))
                links.append(link)
            except OSError as error:
                logger.debug("link %d has no multicast: %s", link, error)
        lan = Lan(host, sock, links)
        async with open_bare_nursery() as nursery:
            nursery.start_soon(lan.listen)
            nursery.start_soon(lan.ask)
            yield lan
            nursery.cancel_scope.cancel()
