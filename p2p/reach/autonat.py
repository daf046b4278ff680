"""AutoNAT v2: peers try whether they can dial our addresses, and we try theirs.

Theory of operation
-------------------
The client asks three peers, in different networks, about each of its addresses, with a secret
number. A peer that can dial the address brings the number back over a new connection: only then
does its yes count. A majority decides, of two answers at least, so that one liar of three
decides nothing; who is refused or hears nothing learns nothing.

The server dials with a fresh identity and from a fresh port: a connection from the port at
which it listens would open a hole in the client's router, and prove nothing. It dials public IP
addresses only, and one that is not the client's own only when the client has sent more bytes
than the dial can cost its target.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import trio

from p2p.bounded import BoundedDict, RateLimit
from p2p.circuit.relay import PATIENCE
from p2p.concurrency import Notifier, open_bare_nursery
from p2p.door import check, check_fields
from p2p.errors import BadMessage
from p2p.host import PEER_TROUBLE, FrameReceiver, Stream, send_frame
from p2p.identity import KeyPair, PeerId
from p2p.multiaddr import Multiaddr
from p2p.network import Network
from p2p.reach.core.verdict import MIN_ANSWERS, judge
from p2p.reach.messages import (
    DIAL_BACK_ID,
    DIAL_DATA,
    DIAL_REQUEST_ID,
    MAX_DIAL_DATA,
    MAX_MESSAGE,
    DialDataRequest,
    DialDataResponse,
    DialRequest,
    DialResponse,
    DialStatus,
    Message,
    ResponseStatus,
    decode_dial_back_untrusted,
    decode_untrusted,
    encode_dial_back,
)
from p2p.swarm.core.limits import PUBLIC, reach_of
from p2p.swarm.swarm import SwarmConfig, SwarmHost, open_host

_STRANGE: Final = tuple(
    ipaddress.IPv6Network(net)
    for net in ("::ffff:0:0/96", "64:ff9b::/96", "2002::/16", "2001::/32")
)
"""IPv6 networks whose addresses contain an IPv4 address, which may be private."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AutonatConfig:
    """Asking peers whether they can dial us, and being asked."""

    enabled: bool = True
    private: bool = False
    """True to ask about private addresses and to dial them, for a swarm in one network."""
    interval: float = 3600.0
    """Seconds until peers are asked about the same addresses again."""
    pause: float = 60.0
    """Least seconds between two rounds, however often addresses change."""
    rate: float = 1.0
    """Dials a second for all peers together, and 60 times as many at once."""
    peer_rate: float = 0.2
    """Dials a second for one peer, and for one network, and 12 at once: three of our rounds."""
    delay: float = 3.0
    """Longest random delay, in seconds, of a dial to an address that is not the client's
    own, so that servers asked by a crowd do not dial at the same moment."""

    def __post_init__(self) -> None:
        check_fields(self)
        if min(self.interval, self.pause, self.rate, self.peer_rate) <= 0 or self.delay < 0:
            raise ValueError("times and rates of autonat must be positive")


class Autonat:
    """Client and server of one host. Open it with `open_autonat`."""

    def __init__(self, host: SwarmHost, config: AutonatConfig, network: Network | None) -> None:
        self._host = host
        self._world = host.world
        self._rng = host.world.rng("autonat")
        self._config = config
        self._network = network
        self.news = Notifier()
        """Notified when addresses have been judged."""
        self._nonces: dict[int, trio.Event] = {}
        self._standing: dict[Multiaddr, bool | None] = {}
        self._all = RateLimit(config.rate, 60 * config.rate)
        self._each: BoundedDict[str, RateLimit] = BoundedDict(4096)
        self._busy: set[PeerId] = set()

    # The client.

    @property
    def standing(self) -> dict[Multiaddr, bool | None]:
        """Own addresses, and whether others can dial them; None if that is unknown."""
        return dict(self._standing)

    @property
    def reachable(self) -> tuple[Multiaddr, ...]:
        """Own addresses that others can dial."""
        return tuple(addr for addr, can in self._standing.items() if can)

    async def run(self) -> None:
        """Ask when addresses change and every ``interval``, until cancelled."""
        wait = self._config.pause
        while True:
            addrs, servers = self.candidates(), self._servers()
            if not addrs or len(servers) < MIN_ANSWERS:
                await self._host.news.wait()
                continue
            await self.ask(addrs, servers)
            is_known = None not in self._standing.values()
            wait = min(self._config.interval, self._config.interval if is_known else 2 * wait)
            await self._world.sleep(self._config.pause)
            with trio.move_on_after(wait - self._config.pause):
                while set(self.candidates()) <= set(addrs):
                    await self._host.news.wait()

    async def ask(self, addrs: Sequence[Multiaddr], servers: Sequence[PeerId]) -> None:
        """Ask each of ``servers`` about each of ``addrs``, and judge."""
        answers = await self.survey(addrs, servers)
        before, self._standing = self._standing, {}
        for addr in addrs:
            can = self._standing[addr] = judge(answers[addr])
            if can is not None and can != before.get(addr):
                word = "yes" if can else "no"
                logger.info("autonat.judged addr=%s reachable=%s", addr, word)
        self.news.notify_all()

    async def survey(
        self, addrs: Sequence[Multiaddr], servers: Sequence[PeerId]
    ) -> dict[Multiaddr, list[bool | None]]:
        """Return each server's result for ``addrs``; None for a server that did not try."""
        answers: dict[Multiaddr, list[bool | None]] = {addr: [] for addr in addrs}

        async def ask_one(server: PeerId) -> None:
            for addr in addrs:
                answers[addr].append(await self._ask(server, addr))

        async with trio.open_nursery() as nursery:
            for server in servers:
                nursery.start_soon(ask_one, server)
        return answers

    def candidates(self) -> list[Multiaddr]:
        """Return up to four of our addresses that others may be asked about."""
        places = [addr.transport for addr in (*self._host.addrs, *self._host.observed)]
        return [addr for addr in dict.fromkeys(places) if self._may_dial(addr)][:4]

    def _servers(self) -> list[PeerId]:
        """Return up to three random peers that serve AutoNAT, each in another network."""
        found: dict[str, list[PeerId]] = {}
        for peer in self._host.connected:
            info = self._host.info(peer)
            if info and DIAL_REQUEST_ID in info.protocols and self._host.is_direct(peer):
                found.setdefault(self._host.network_of(peer) or str(peer), []).append(peer)
        chosen = self._rng.sample(sorted(found), min(3, len(found)))
        return [self._rng.choice(found[network]) for network in chosen]

    async def _ask(self, server: PeerId, addr: Multiaddr) -> bool | None:
        nonce = int.from_bytes(self._world.entropy(8), "big")
        dialled = self._nonces[nonce] = trio.Event()
        try:
            with trio.move_on_after(4 * PATIENCE):
                async with await self._host.open_stream(server, DIAL_REQUEST_ID) as stream:
                    receiver = FrameReceiver(stream, MAX_MESSAGE)
                    await send_frame(stream, DialRequest((addr,), nonce).encode())
                    answer = await _receive(receiver)
                    if isinstance(answer, DialDataRequest):
                        if not 0 < answer.size <= MAX_DIAL_DATA:
                            return None
                        for start in range(0, answer.size, 4000):
                            piece = bytes(min(4000, answer.size - start))
                            await send_frame(stream, DialDataResponse(piece).encode())
                        answer = await _receive(receiver)
                if not isinstance(answer, DialResponse) or answer.index != 0:
                    return None
                if answer.status == ResponseStatus.OK and answer.dial == DialStatus.OK:
                    with trio.fail_after(2.0):  # it may be slower than the answer
                        await dialled.wait()
                    return True
                if answer.status == ResponseStatus.OK and answer.dial == DialStatus.DIAL_ERROR:
                    return False
        except PEER_TROUBLE as error:
            logger.debug("%r does not say whether %s can be dialled: %s", server, addr, error)
        finally:
            del self._nonces[nonce]
        return None

    async def serve_dial_back(self, stream: Stream) -> None:
        """Take the secret number that a server brings. A server with another number is not
        answered."""
        data = None
        with trio.move_on_after(PATIENCE):
            data = await FrameReceiver(stream, MAX_MESSAGE).receive()
        dialled = self._nonces.get(decode_dial_back_untrusted(data)) if data else None
        if dialled is None or not self._host.is_direct(stream.peer):
            stream.reset()
            return
        dialled.set()
        await send_frame(stream, b"")  # all is well

    # The server.

    def _may_dial(self, addr: Multiaddr) -> bool:
        kind, value = addr.parts[0]
        if addr.relay is not None or kind not in ("ip4", "ip6"):
            return False
        ip = ipaddress.ip_address(value)
        if ip.version == 6 and any(ip in net for net in _STRANGE):
            return False
        return not ip.is_unspecified and (self._config.private or reach_of(addr) == PUBLIC)

    def _may_ask(self, peer: PeerId) -> bool:
        now = self._world.now()
        # Requests of 16 peers are served at a time.
        if peer in self._busy or len(self._busy) >= 16:
            return False
        rate = self._config.peer_rate
        for name in filter(None, (str(peer), self._host.network_of(peer))):
            limit = self._each.get(name) or RateLimit(rate, 60 * rate)
            self._each.renew(name, limit)
            if not limit.allows(1.0, now):
                return False
        return self._all.allows(1.0, now)

    async def serve(self, stream: Stream) -> None:
        """Answer one request."""
        peer, seen = stream.peer, self._host.remote_addr(stream.peer)
        if seen is None or seen.relay is not None or not self._may_ask(peer):
            answer = DialResponse(ResponseStatus.REQUEST_REJECTED)
        else:
            self._busy.add(peer)
            try:
                answer = await self._try(stream, seen)
            finally:
                self._busy.discard(peer)
        with trio.move_on_after(PATIENCE):
            await send_frame(stream, answer.encode())

    async def _try(self, stream: Stream, seen: Multiaddr) -> DialResponse:
        receiver = FrameReceiver(stream, MAX_MESSAGE)
        with trio.move_on_after(3 * PATIENCE):
            request = await _receive(receiver)
            if not isinstance(request, DialRequest):
                raise BadMessage("an AutoNAT stream does not begin with a request")
            found = next(
                (
                    (index, addr)
                    for index, addr in enumerate(request.addrs)
                    if addr is not None and self._may_dial(addr)
                ),
                None,
            )
            if found is None:
                return DialResponse(ResponseStatus.DIAL_REFUSED)
            index, addr = found
            if addr.parts[0] != seen.parts[0]:
                size = self._rng.randint(DIAL_DATA, MAX_DIAL_DATA)
                await send_frame(stream, DialDataRequest(index, size).encode())
                await _receive_data(receiver, size)
                await self._world.sleep(self._rng.uniform(0.0, self._config.delay))
            status = await self._dial_back(stream.peer, addr, request.nonce)
            return DialResponse(ResponseStatus.OK, index, status)
        return DialResponse(ResponseStatus.REQUEST_REJECTED)

    async def _dial_back(self, peer: PeerId, addr: Multiaddr, nonce: int) -> DialStatus:
        status = DialStatus.DIAL_ERROR
        try:
            with trio.fail_after(PATIENCE):
                async with open_host(
                    world=self._world,
                    network=self._network,
                    key=KeyPair(self._world.entropy(32)),
                    listen=(),
                    config=SwarmConfig(identify=False),
                ) as dialler:
                    await dialler.connect_addr(addr.with_peer(peer))
                    status = DialStatus.DIAL_BACK_ERROR
                    async with await dialler.open_stream(peer, DIAL_BACK_ID) as stream:
                        await send_frame(stream, encode_dial_back(nonce))
                        await FrameReceiver(stream, MAX_MESSAGE).receive()
                        status = DialStatus.OK
        except PEER_TROUBLE as error:
            logger.debug("dialled %r at %s for it: %s", peer, addr, error)
        return status


async def _receive(receiver: FrameReceiver) -> Message:
    data = await receiver.receive()
    if data is None:
        raise trio.BrokenResourceError("the peer has no more to say")
    return decode_untrusted(data)


async def _receive_data(receiver: FrameReceiver, size: int) -> None:
    """Receive dial data. Raise `BadMessage` unless ``size`` bytes come in few enough
    messages."""
    left = size
    for _ in range(size // 100):  # of 100 bytes on average: each message costs us work
        piece = await _receive(receiver)
        if not isinstance(piece, DialDataResponse):
            break
        left -= len(piece.data)
        if left <= 0:
            return
    raise BadMessage("dial data that was asked for did not come")


@asynccontextmanager
async def open_autonat(
    host: SwarmHost, config: AutonatConfig | None = None, network: Network | None = None
) -> AsyncIterator[Autonat]:
    """Ask peers, and answer them, for the length of the block; ``network`` carries the dials
    that peers ask for, TCP by default."""
    check("host", host, SwarmHost)
    config = config or AutonatConfig()
    autonat = Autonat(host, config, network)
    if not config.enabled:
        yield autonat
        return
    with (
        host.serving(DIAL_REQUEST_ID, autonat.serve),
        host.serving(DIAL_BACK_ID, autonat.serve_dial_back),
    ):
        async with open_bare_nursery() as nursery:
            nursery.start_soon(autonat.run)
            yield autonat
            nursery.cancel_scope.cancel()
