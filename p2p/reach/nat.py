"""All that a host does about routers, in one block: `open_nat`.

It asks the router for a port, asks peers whether they can dial us, keeps reservations at relays
while they cannot, and relays for others.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import trio

from p2p.circuit.core.book import RelayConfig
from p2p.circuit.relay import Relay, relaying
from p2p.concurrency import Notifier, open_bare_nursery
from p2p.door import check, check_each, check_fields
from p2p.identity import PeerId, Signer
from p2p.multiaddr import Multiaddr
from p2p.network import Network
from p2p.reach.autonat import Autonat, AutonatConfig, open_autonat
from p2p.reach.core.verdict import Reach, judge_reach
from p2p.reach.mapping import PortMapping, ReachConfig
from p2p.reach.relays import Offers, RelayKeeper, nowhere
from p2p.swarm.core.limits import PUBLIC, reach_of
from p2p.swarm.swarm import SwarmHost


@dataclass(frozen=True, slots=True, kw_only=True)
class NatConfig:
    """Configuration of how a host is reached behind routers."""

    reach: ReachConfig = field(default_factory=ReachConfig)
    autonat: AutonatConfig = field(default_factory=AutonatConfig)
    relay: RelayConfig | None = None
    """Limits of relaying for others; None to relay nothing."""

    def __post_init__(self) -> None:
        check_fields(self)


class Nat:
    """Reachability of a host. Open it with `open_nat`."""

    def __init__(self, host: SwarmHost, autonat: Autonat, relay: Relay | None) -> None:
        self._host = host
        self._autonat = autonat
        self._relay = relay
        self.router_answered = trio.Event()
        """Set when the router has said whether it forwards a port; at once if it is not
        asked."""

    @property
    def reach(self) -> Reach:
        """Reachability of this host for others."""
        return judge_reach(
            self._autonat.standing,
            is_announced=self._host.is_announced,
            has_public=any(
                addr.relay is None and reach_of(addr) == PUBLIC for addr in self._host.addrs
            ),
        )

    @property
    def reachable(self) -> tuple[Multiaddr, ...]:
        """Own addresses that peers have dialled at our request."""
        return self._autonat.reachable

    @property
    def relays(self) -> tuple[PeerId, ...]:
        """Relays with a reservation."""
        return self._host.network.relays

    def path(self, peer: PeerId) -> str:
        """Return how a connected peer is reached: ``direct`` or ``relay``; empty for others."""
        if peer not in self._host.connected:
            return ""
        return "direct" if self._host.is_direct(peer) else "relay"

    @property
    def places(self) -> int:
        """Reservations that this host, as a relay, has left: 0 unless others can dial it."""
        if self._relay is None or self.reach is not Reach.OPEN:
            return 0
        return self._relay.places

    @property
    def needs_relays(self) -> bool:
        """True if the host listens and nobody can dial it."""
        return self._host.listens and self.reach is Reach.CLOSED

    @property
    def needs_open_peers(self) -> bool:
        """True if only peers that can be dialled get direct connections with this host."""
        return self.needs_relays and self._host.is_symmetric

    @property
    def news(self) -> Notifier:
        """Notified when any of this may have changed."""
        return self._host.news

    def heard_router(self, addr: Multiaddr | None) -> None:
        """Note the address that the router forwards to us; None if there is none."""
        self._host.set_mapped(addr)
        self.router_answered.set()

    async def follow(self) -> None:
        """Tell the host which of its addresses can be dialled, until cancelled."""
        while True:
            self._host.set_standing(self._autonat.standing)
            await self._autonat.news.wait()

    async def look(self) -> None:
        """Find out, whenever relays change, whether the router gives each connection another
        port, until cancelled."""
        asked: tuple[PeerId, ...] = ()
        while True:
            if self.relays != asked and self.needs_relays:
                for relay in (asked := self.relays):
                    await self._host.look_from(relay)
            await self._host.news.wait()


@asynccontextmanager
async def open_nat(
    host: SwarmHost,
    signer: Signer,
    config: NatConfig | None = None,
    *,
    named: Sequence[Multiaddr] = (),
    is_member: Callable[[PeerId], bool] = lambda _: False,
    offers: Offers = tuple,
    seek: Callable[[], Awaitable[object]] = nowhere,
    network: Network | None = None,
) -> AsyncIterator[Nat]:
    """Make ``host`` reachable as far as that is possible, for the length of the block.

    Args:
        host: The host; ``signer`` is its own.
        signer: Signs what this host grants as a relay.
        config: What to do; by default all but to relay for others.
        named: Relays with which to keep a reservation in any case; addresses with ids.
        is_member: Returns True for peers for which to relay.
        offers: Returns peers that say that they relay, with the places that each has left.
        seek: Makes more relays known; called when too few are.
        network: Carries the dials that peers ask for by AutoNAT; TCP by default.
    """
    check("host", host, SwarmHost)
    if config is not None:
        check("config", config, NatConfig)
    config = config or NatConfig()
    named = check_each("named", named, Multiaddr)
    async with AsyncExitStack() as stack:
        relay = None
        if config.relay is not None:
            relay = stack.enter_context(
                relaying(host.world, host, signer, config.relay, is_member)
            )
        autonat = await stack.enter_async_context(open_autonat(host, config.autonat, network))
        nat = Nat(host, autonat, relay)
        port = host.port_to_map if config.reach.map_port else None
        if port is not None:
            mapping = PortMapping(host.world, port)
            await stack.enter_async_context(mapping.kept(nat.heard_router))
        else:
            nat.router_answered.set()
        keeper = RelayKeeper(host, lambda: nat.needs_relays, offers, seek)
        nursery = await stack.enter_async_context(open_bare_nursery())
        nursery.start_soon(nat.follow)
        nursery.start_soon(nat.look)
        for addr in named:
            nursery.start_soon(keeper.keep_named, addr)
        if config.reach.find_relays:
            nursery.start_soon(keeper.run)
        yield nat
        nursery.cancel_scope.cancel()
