"""The peer policy of hosts, without a host."""

from __future__ import annotations

from p2p.identity import KeyPair, PeerId
from p2p.multiaddr import AddrSource, Multiaddr
from p2p.swarm.core.gater import ConnectionGater

ME, PEER, OTHER = (KeyPair(bytes([number]) * 32).peer_id for number in (1, 2, 3))
HERE = Multiaddr.parse("/ip4/81.2.3.4/tcp/1")
THERE = Multiaddr.parse("/ip4/81.2.3.5/tcp/1")


def gater(*connected: PeerId) -> ConnectionGater:
    return ConnectionGater(ME, connected.__contains__)


def test_a_back_off_ends_in_time() -> None:
    mine = gater()
    mine.dial_failed(PEER, 10.0)
    mine.dial_failed(OTHER, 10.0, 1.0)
    ends = 15.0
    assert not mine.may_send(PEER, ends - 0.1)
    assert mine.may_send(PEER, ends)
    assert not mine.may_send(OTHER, ends)
    assert mine.may_send(OTHER, ends + 1.0)
    mine.check_dial(OTHER, 10.0)  # a caller's own wish is not held back


def test_an_address_that_fails_again_and_again_rests_ever_longer() -> None:
    """Dead addresses of a peer were dialled beside the living one for ever."""
    mine, now, dialled = gater(), 0.0, 0
    mine.add_addrs(PEER, [HERE, THERE], AddrSource.SIGNED)
    while now < 3600.0:
        places = mine.places_to_dial(PEER, now)
        assert THERE in places
        mine.addr_answered(PEER, THERE)
        if HERE in places:
            dialled += 1
            mine.addr_failed(PEER, HERE, now)
        now += 1.0
    assert dialled < 3600.0 / 600.0 + 10
    assert mine.places_to_dial(PEER, now)[0] == THERE, "where it answered last comes first"
    mine.add_addrs(PEER, [HERE], AddrSource.SIGNED)  # what a heartbeat repeats is no news
    assert mine.places_to_dial(PEER, now) == (THERE,)
    mine.add_addrs(PEER, [HERE], AddrSource.OWNER)
    assert mine.places_to_dial(PEER, now) == (THERE, HERE)


def test_of_addresses_that_all_rest_one_is_tried() -> None:
    mine = gater()
    mine.add_addrs(PEER, [HERE, THERE], AddrSource.SIGNED)
    assert gater().places_to_dial(PEER, 0.0) == ()
    tried = []
    for now in range(8):
        places = mine.places_to_dial(PEER, float(now))
        for addr in places:
            mine.addr_failed(PEER, addr, float(now))
        tried.append(places)
    assert tried[:2] == [(HERE, THERE)] * 2, "one failure may be chance"
    assert all(len(places) == 1 for places in tried[2:])
    assert {HERE, THERE} == {addr for places in tried[2:] for addr in places}


def test_failures_that_are_over_are_forgotten() -> None:
    mine = gater()
    for number in range(100):
        mine.dial_failed(KeyPair(bytes([number]) * 32).peer_id, float(number))
    assert len(mine._unreachable) == 5


def test_what_is_sure_is_our_own_wish() -> None:
    mine = gater()
    mine.add_addrs(PEER, [HERE], AddrSource.HEARSAY)
    assert not mine.is_sure(PEER)
    mine.protect("work", [PEER])
    assert mine.is_sure(PEER)
    mine.protect("work", [])
    assert not mine.is_sure(PEER)
    mine.add_addrs(PEER, [THERE], AddrSource.SIGNED)
    assert mine.is_sure(PEER)
    assert mine.addrs_of(PEER) == (THERE.with_peer(PEER), HERE.with_peer(PEER))
