"""A host that nobody can dial finds relays, and keeps them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import trio

from p2p import SwarmHost, open_host
from p2p.circuit.core.book import RelayConfig
from p2p.circuit.relay import relaying
from p2p.host import request, serve_requests
from p2p.identity import KeyPair, PeerId
from p2p.multiaddr import Multiaddr
from p2p.reach.core.relays import Candidate, Rests, rank
from p2p.reach.core.verdict import Reach, judge_reach
from p2p.reach.relays import RelayKeeper
from tests.unit.test_circuit import ECHO, KEYS, OPEN, echo, until

PLACE = Multiaddr.parse("/ip4/198.51.100.7/tcp/4001")


@asynccontextmanager
async def open_relays(
    keys: Sequence[KeyPair], config: RelayConfig = OPEN
) -> AsyncIterator[list[SwarmHost]]:
    async with AsyncExitStack() as stack:
        hosts = []
        for key in keys:
            host = await stack.enter_async_context(open_host(key=key, strict=True))
            stack.enter_context(relaying(host.world, host, key, config))
            hosts.append(host)
        yield hosts


@asynccontextmanager
async def keeping(keeper: RelayKeeper, *named: Multiaddr) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keeper.run)
        for addr in named:
            nursery.start_soon(keeper.keep_named, addr)
        yield
        nursery.cancel_scope.cancel()


def test_near_relays_in_other_networks_with_free_places_come_first() -> None:
    peers = [key.peer_id for key in KEYS]
    near_full = Candidate(peers[0], "a", 0.010, 1)
    near_free = Candidate(peers[1], "a", 0.012, 99)
    far = Candidate(peers[2], "b", 0.200, 120)
    assert rank([far, near_full, near_free], ()) == [near_free, near_full, far]
    assert rank([near_free, far], {"a"}) == [far, near_free]


def test_a_relay_of_no_use_rests_ever_longer() -> None:
    rests, relay = Rests(), KEYS[0].peer_id
    now = 0.0
    lengths = []
    for _ in range(12):
        rests.failed(relay, now)
        begin = now
        while rests.rests(relay, now):
            now += 10.0
        lengths.append(now - begin)
    assert lengths[:3] == [30.0, 60.0, 120.0]
    assert lengths[-1] == 3600.0
    rests.served(relay)
    assert not rests.rests(relay, now)


def test_reach_follows_the_owner_then_peers_then_addresses() -> None:
    for standing, announced, public, reach in [
        ({PLACE: False}, True, False, Reach.OPEN),
        ({PLACE: True}, False, False, Reach.OPEN),
        ({PLACE: False}, False, True, Reach.CLOSED),
        ({PLACE: None}, False, True, Reach.UNKNOWN),
        ({}, False, False, Reach.CLOSED),
    ]:
        assert judge_reach(standing, is_announced=announced, has_public=public) is reach


async def test_two_of_the_relays_that_members_offer_are_kept() -> None:
    async with (
        open_relays(KEYS[:3]) as relays,
        open_host(key=KEYS[4], strict=True) as home,
        open_host(key=KEYS[5], strict=True) as guest,
    ):
        for relay in relays:
            home.add_addrs(relay.peer_id, relay.addrs)
        offers = [(relay.peer_id, 9) for relay in relays]
        keeper = RelayKeeper(home, lambda: True, lambda: offers)
        with home.serving(ECHO, serve_requests(echo)):
            async with keeping(keeper):
                await until(home, lambda: len(home.network.relays) == 2)
                for addr in [one for one in home.addrs if one.relay is not None]:
                    await guest.connect_addr(addr)
                    assert await request(guest, home.peer_id, ECHO, b"hello") == b"hello"
                    await guest.disconnect(home.peer_id)


async def test_a_relay_that_dies_is_replaced() -> None:
    async with open_host(key=KEYS[4], strict=True) as home:
        offers: list[tuple[PeerId, int]] = []
        keeper = RelayKeeper(home, lambda: True, lambda: offers)
        async with open_relays(KEYS[1:2]) as [second]:
            async with open_relays(KEYS[:1]) as [first]:
                for relay in (first, second):
                    home.add_addrs(relay.peer_id, relay.addrs)
                    offers.append((relay.peer_id, 9))
                async with keeping(keeper):
                    await until(home, lambda: len(home.network.relays) == 2)
            async with open_relays(KEYS[2:3]) as [third]:
                home.add_addrs(third.peer_id, third.addrs)
                offers.append((third.peer_id, 9))
                async with keeping(keeper):
                    await until(
                        home,
                        lambda: set(home.network.relays) == {KEYS[1].peer_id, third.peer_id},
                    )


async def test_found_relays_are_let_go_when_others_can_dial_us_and_named_ones_are_not() -> None:
    async with (
        open_relays(KEYS[:2]) as [named, found],
        open_host(key=KEYS[4], strict=True) as home,
    ):
        home.add_addrs(found.peer_id, found.addrs)
        keeper = RelayKeeper(home, lambda: is_closed, lambda: [(found.peer_id, 9)])
        is_closed = True
        async with keeping(keeper, named.addrs[0]):
            await until(home, lambda: len(home.network.relays) == 2)
            is_closed = False
            home.news.notify_all()
            await until(home, lambda: home.network.relays == (named.peer_id,))


async def test_a_named_relay_that_is_away_is_asked_again() -> None:
    async with open_host(key=KEYS[4], strict=True) as home:
        async with open_relays(KEYS[:1]) as [relay]:
            place = relay.addrs[0]
        keeper = RelayKeeper(home, lambda: False)
        async with keeping(keeper, place):
            with trio.move_on_after(0.5):
                await until(home, lambda: home.network.relays != ())
            assert home.network.relays == ()
            async with open_host(listen=[place.transport], key=KEYS[0]) as again:
                with relaying(again.world, again, KEYS[0], OPEN):
                    await until(home, lambda: home.network.relays == (again.peer_id,))
