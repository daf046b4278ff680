"""Keeps reservations at relays for a host that nobody can dial.

Relays that the owner names are asked again for as long as the host lives. Others are found: by
what members say in heartbeats, then among connected peers that speak the protocol, then by
``seek``. Two that answer soon and have room are kept, in different networks if possible;
`p2p.circuit.network` renews their reservations.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

import trio

from p2p.circuit.messages import HOP_ID
from p2p.circuit.relay import PATIENCE
from p2p.errors import ConfigError
from p2p.host import PEER_TROUBLE
from p2p.identity import PeerId
from p2p.multiaddr import AddrSource, Multiaddr
from p2p.reach.core.relays import WANTED, Candidate, Rests, rank
from p2p.swarm.core.limits import reach_of
from p2p.swarm.swarm import SwarmHost, ping

LONGEST: Final = 300.0
"""Longest wait until a named relay that was away is asked again, and longest pause between two
searches, in seconds. Both begin short and double each time."""

logger = logging.getLogger(__name__)

Offers = Callable[[], Iterable[tuple[PeerId, int]]]
"""Returns peers that offer to relay, and each peer's number of free places."""


async def nowhere() -> None:
    """Find no further relays (the default ``seek``)."""


class RelayKeeper:
    """The reservations of one host."""

    def __init__(
        self,
        host: SwarmHost,
        is_needed: Callable[[], bool],
        offers: Offers = tuple,
        seek: Callable[[], Awaitable[object]] = nowhere,
    ) -> None:
        """``is_needed`` says whether to find relays; ``seek`` makes more of them known."""
        self._host = host
        self._world = host.world
        self._is_needed = is_needed
        self._offers = offers
        self._seek = seek
        self._rests = Rests()
        self._named: set[PeerId] = set()

    async def keep_named(self, relay: Multiaddr) -> None:
        """Keep a reservation at the relay with this address, until cancelled."""
        assert relay.peer_id is not None
        self._named.add(relay.peer_id)
        wait = 1.0
        while True:
            while relay.peer_id in self._host.network.relays:
                await self._host.news.wait()
                wait = 1.0
            try:
                await self._host.listen(relay.through)
            except ConfigError as error:
                logger.info("relay.away relay=%s reason=%s", relay.peer_id.short, error)
                await self._world.sleep(wait)
                wait = min(2 * wait, LONGEST)

    async def run(self) -> None:
        """Find relays while they are needed, until cancelled."""
        pause, before = 0.5, 0
        while True:
            is_needed = self._is_needed()
            if not is_needed:  # the reservations that were found end
                for relay in self._host.network.relays:
                    if relay not in self._named:
                        await self._host.network.release(relay)
            elif len(self._host.network.relays) < WANTED:
                known = self._known()
                if not known:
                    await self._seek()
                    known = self._known()
                await self._reserve(await self._measure(known))
            held = len(self._host.network.relays)
            pause = 0.5 if held < before or not is_needed else min(2 * pause, LONGEST)
            before = held
            with trio.move_on_after(pause if is_needed and held < WANTED else LONGEST):
                while (held, self._is_needed()) == (before, is_needed):
                    await self._host.news.wait()
                    held = len(self._host.network.relays)

    def _known(self) -> dict[PeerId, int]:
        """Return the relays that may be asked now, those with the most free places first."""
        host, now = self._host, self._world.now()
        found = dict(self._offers())
        for peer in host.connected:
            info, is_ours = host.info(peer), host.has_dialled(peer) and host.is_direct(peer)
            if is_ours and info is not None and HOP_ID in info.protocols:
                found.setdefault(peer, 0)
        taken = (host.peer_id, *host.network.relays)
        return {
            peer: places
            for peer, places in sorted(found.items(), key=lambda item: -item[1])
            if peer not in taken and not self._rests.rests(peer, now)
        }

    async def _measure(self, known: dict[PeerId, int]) -> list[Candidate]:
        """Connect to some relays, and measure their round trips."""
        host, found = self._host, list[Candidate]()
        best = list(known)[:32]
        chosen = self._world.rng("relays").sample(best, min(8, len(best)))

        async def measure(peer: PeerId) -> None:
            try:
                with trio.fail_after(PATIENCE):
                    await host.connect(peer)
                    seconds = await ping(host, peer)
            except PEER_TROUBLE as error:
                logger.debug("%r may relay, and does not answer: %s", peer, error)
                self._rests.failed(peer, self._world.now())
                return
            if host.is_direct(peer):
                found.append(Candidate(peer, host.network_of(peer), seconds, known[peer]))

        async with trio.open_nursery() as nursery:
            for peer in chosen:
                nursery.start_soon(measure, peer)
        return found

    async def _reserve(self, candidates: Sequence[Candidate]) -> None:
        host, left = self._host, list(candidates)
        while left and len(host.network.relays) < WANTED and self._is_needed():
            held = {host.network_of(relay) for relay in host.network.relays}
            best = rank(left, held)[0]
            left.remove(best)
            places = [addr for addr in host.addrs_of(best.peer) if addr.relay is None]
            if not places:
                continue
            addr = max(places, key=reach_of)
            try:
                await host.listen(addr.through, AddrSource.HEARSAY)
            except ConfigError as error:
                logger.info("relay.refused relay=%s reason=%s", best.peer.short, error)
                self._rests.failed(best.peer, self._world.now())
            else:
                logger.info("relay.reserved addr=%s milliseconds=%d", addr, 1000 * best.seconds)
                self._rests.served(best.peer)
