"""DCUtR: two peers that talk through a relay open a direct connection at the same moment.

Each dials the other from the port at which it listens. Each router then takes the other's first
packet for an answer to its own. The peer that accepted the circuit (B) starts and is the server
in what follows; the dialer of the circuit (A) is the client. In the third try they change
parts, for peers that have them the other way round: go-libp2p did until 0.41. Specification:
libp2p/specs, relay/DCUtR.md.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

import trio

from p2p.bounded import BoundedDict
from p2p.circuit.messages import (
    DCUTR_ID,
    MAX_ADDRS,
    HolePunch,
    PunchType,
    decode_punch_untrusted,
)
from p2p.circuit.relay import PATIENCE, CircuitHost, receive_message
from p2p.errors import BadMessage
from p2p.host import PEER_TROUBLE, Stream, send_frame
from p2p.identity import PeerId
from p2p.multiaddr import Multiaddr
from p2p.world import World

TRIES: Final = 3

logger = logging.getLogger(__name__)


class PunchHost(CircuitHost, Protocol):
    """A host that can dial from the port at which it listens."""

    @property
    def observed(self) -> tuple[Multiaddr, ...]:
        """Our own addresses as others may see them, the likeliest first."""

    def has_dialled(self, peer: PeerId) -> bool:
        """Return True if we opened the connection to ``peer``."""

    async def dial_direct(self, peer: PeerId) -> bool:
        """Dial the public addresses that a peer names. Return True if there is a direct
        connection; the caller sets the deadline."""

    async def punch(self, peer: PeerId, addrs: Sequence[Multiaddr], *, is_client: bool) -> bool:
        """Try for a few seconds to make a direct connection. Return True if there is one."""


class Puncher:
    """Makes direct connections of circuits, in both parts."""

    def __init__(self, world: World, host: PunchHost) -> None:
        self._world = world
        self._host = host
        self._busy: set[PeerId] = set()
        self._resting: BoundedDict[PeerId, float] = BoundedDict(1024)
        """Peers with which all tries failed, and the end of their rest."""
        self._tries: BoundedDict[PeerId, tuple[int, float]] = BoundedDict(1024)
        """Number of tries that each peer has begun, and the time of the last."""

    async def upgrade(self, peer: PeerId) -> None:
        """Replace a circuit that we accepted from ``peer`` (part B)."""
        now = self._world.now()
        if now < self._resting.get(peer, now) or not self._begin(peer):
            return
        try:
            with trio.move_on_after(2.0):  # a peer with an open port needs no hole
                if await self._host.dial_direct(peer):
                    logger.info("punch.direct peer=%s tries=%d", peer.short, 0)
                    return
            for number in range(1, TRIES + 1):
                if number > 1:
                    await self._world.sleep(0.5)  # the other side's try ends as well
                if self._host.is_direct(peer) or await self._try(peer, number):
                    logger.info("punch.direct peer=%s tries=%d", peer.short, number)
                    return
            # Seconds without a try after all have failed: the life of a circuit.
            self._resting.renew(peer, self._world.now() + 600.0)
            logger.info("punch.failed peer=%s reason=%s", peer.short, f"{TRIES} tries")
        except PEER_TROUBLE as error:
            logger.info("punch.failed peer=%s reason=%s", peer.short, error)
        finally:
            self._busy.discard(peer)

    async def _try(self, peer: PeerId, number: int) -> bool:
        async with await self._host.open_stream(peer, DCUTR_ID) as stream:
            started = self._world.now()
            with trio.fail_after(PATIENCE):
                await send_frame(stream, self._connect())
                theirs = await _receive(stream, PunchType.CONNECT)
                round_trip = self._world.now() - started
                await send_frame(stream, HolePunch(PunchType.SYNC).encode())
            await self._world.sleep(round_trip / 2)
        is_client = number == TRIES
        return await self._host.punch(peer, _worth_dialling(theirs), is_client=is_client)

    async def serve(self, stream: Stream) -> None:
        """Answer a peer that accepted our circuit (part A)."""
        peer, host = stream.peer, self._host
        if not host.has_dialled(peer) or host.is_direct(peer) or not self._begin(peer):
            stream.reset()
            return
        try:
            with trio.fail_after(PATIENCE):
                theirs = await _receive(stream, PunchType.CONNECT)
                await send_frame(stream, self._connect())
                await _receive(stream, PunchType.SYNC)
            is_client = self._count(peer) != TRIES
            await self._host.punch(peer, _worth_dialling(theirs), is_client=is_client)
        except trio.TooSlowError:
            stream.reset()
        finally:
            self._busy.discard(peer)

    def _count(self, peer: PeerId) -> int:
        """Return the number of this try of ``peer``."""
        now = self._world.now()
        tries, last = self._tries.get(peer, (0, now))
        # Tries within a minute belong together.
        tries = tries + 1 if tries < TRIES and now < last + 60.0 else 1
        self._tries.renew(peer, (tries, now))
        return tries

    def _begin(self, peer: PeerId) -> bool:
        # At most eight punches of this host at a time.
        if peer in self._busy or len(self._busy) >= 8:
            return False
        self._busy.add(peer)
        return True

    def _connect(self) -> bytes:
        return HolePunch(PunchType.CONNECT, self._host.observed[:MAX_ADDRS]).encode()


async def _receive(stream: Stream, kind: PunchType) -> tuple[Multiaddr, ...]:
    message = decode_punch_untrusted(await receive_message(stream))
    if message.kind is not kind:
        raise BadMessage(f"a hole punch sent {message.kind.name} for {kind.name}")
    return message.addrs


def _worth_dialling(addrs: Iterable[Multiaddr]) -> list[Multiaddr]:
    """Return the TCP addresses that a router may have given to a client. None maps a client to
    a port below 1024."""
    return [
        addr
        for addr in addrs
        if addr.relay is None
        and addr.parts[0][0] in ("ip4", "ip6")
        and addr.host_port[1] >= 1024
    ]
