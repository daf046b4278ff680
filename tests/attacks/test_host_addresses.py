"""Strangers flush the address book. They hold the dial slots. They aim our dials."""

from __future__ import annotations

import socket
import threading

import pytest
import trio
import trio.testing

from p2p.errors import PeerUnreachable
from p2p.host import AddrSource
from p2p.identity import KeyPair, ProtocolId
from p2p.machine import open_world
from p2p.multiaddr import Multiaddr
from p2p.swarm.core import gater as peers_module
from p2p.swarm.core.gater import (
    MAX_HEARSAY_ADDRS,
    PENALTY_LIMIT,
    AddressBook,
    Scores,
)
from p2p.swarm.core.limits import (
    DialTargets,
    FadingCounts,
    group_of,
)
from p2p.swarm.swarm import SwarmConfig, open_host
from p2p.transport.memory import MemoryNetwork
from p2p.transport.tcp import TcpNetwork
from tests.support.hosts import QUIET, hosts, peer_at

NEWS = ProtocolId("/test/news")


def ip4(number: int, port: int = 4001) -> Multiaddr:
    return Multiaddr.tcp(f"{11 + (number >> 16)}.{number >> 8 & 255}.{number & 255}.7", port)


def test_strangers_push_out_neither_the_owners_nor_the_signed_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before, 10,000 strangers (40 s at 250 a second) flushed every address this node knew."""
    monkeypatch.setattr(peers_module, "MAX_PEERS", 500)
    connected = peer_at(3)
    book = AddressBook(keeps=lambda peer: peer == connected)
    book.add(peer_at(1), [ip4(1)], AddrSource.OWNER)
    book.add(peer_at(2), [ip4(2)], AddrSource.SIGNED)
    book.add(connected, [ip4(3)], AddrSource.HEARSAY)
    for number in range(100, 2100):
        book.add(peer_at(number), [ip4(number)], AddrSource.HEARSAY)
    assert book.of(peer_at(1)) == (ip4(1),)
    assert book.of(peer_at(2)) == (ip4(2),)
    assert book.of(connected) == (ip4(3),)
    assert book.counts()[AddrSource.HEARSAY] == 500


def test_one_network_pushes_out_its_own_only() -> None:
    """Hearsay is bounded by network, so that one /24 cannot flush the rest."""
    book = AddressBook()
    book.add(peer_at(1), [ip4(1)], AddrSource.HEARSAY)
    for number in range(100, 1_000):
        book.add(peer_at(number), [Multiaddr.tcp("12.0.0.1", number)], AddrSource.HEARSAY)
    assert book.of(peer_at(1)) == (ip4(1),)
    assert book.counts()[AddrSource.HEARSAY] == 1 + 312


def test_names_are_kept_on_the_owners_word_only() -> None:
    """A stranger's DNS name is a thread of ours for as long as its server likes."""
    name = Multiaddr.parse("/dns4/slow.example/tcp/1")
    book = AddressBook()
    for source in (AddrSource.HEARSAY, AddrSource.SIGNED):
        assert not book.add(peer_at(1), [name], source)
        assert book.of(peer_at(1)) == ()
    assert book.add(peer_at(1), [name], AddrSource.OWNER)


def test_minted_identities_wash_off_no_refusal() -> None:
    """10,000 identities with a point each made a host forget whom it refuses."""
    scores = Scores()
    assert scores.penalise(peer_at(0), PENALTY_LIMIT, now=0.0)
    scores.penalise(peer_at(1), PENALTY_LIMIT - 1, now=0.0)
    for number in range(2, 10_100):
        scores.penalise(peer_at(number), 1.0, now=0.0)
    assert scores.is_refused(peer_at(0), 1.0)
    assert scores.points.count(peer_at(1), 0.0) == PENALTY_LIMIT - 1


class SilentNetwork(MemoryNetwork):
    """IP addresses never answer, and are counted; `MemoryNetwork` otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.dialled: list[Multiaddr] = []
        self.open = self.most = 0

    async def dial(self, addr: Multiaddr) -> trio.abc.HalfCloseableStream:
        if addr.parts[0][0] != "ip4":
            return await super().dial(addr)
        self.dialled.append(addr)
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            await trio.sleep_forever()
        finally:
            self.open -= 1
        raise AssertionError


async def test_silent_contacts_do_not_hold_up_a_dial_that_was_asked_for(
    autojump_clock: trio.abc.Clock,
) -> None:
    """Before, contacts at silent addresses held all slots: an honest dial took 20 to 60 s."""
    network = SilentNetwork()
    async with (
        hosts(3, network=network) as (host, friend, contact),
        open_world(key=KeyPair(bytes(32))) as world,
    ):
        for number in range(100):
            host.add_addrs(peer_at(number), [ip4(number)], AddrSource.HEARSAY)
            host.send(peer_at(number), NEWS, b"x")
        await trio.testing.wait_all_tasks_blocked()
        assert network.open <= 16 * MAX_HEARSAY_ADDRS
        with trio.fail_after(1):
            await host.connect_addr(friend.addrs[0])
        host.add_addrs(contact.peer_id, contact.addrs, AddrSource.HEARSAY)
        before = world.now()
        await host.connect(contact.peer_id)  # on hearsay it waits its turn, and is not lost
        assert world.now() - before < 60
        for number in range(100, 400):
            host.add_addrs(peer_at(number), [ip4(number)], AddrSource.HEARSAY)
            host.send(peer_at(number), NEWS, b"x")
        await trio.testing.wait_all_tasks_blocked()
        host.add_addrs(peer_at(400), [ip4(400)], AddrSource.HEARSAY)
        with pytest.raises(PeerUnreachable, match="256 dials on hearsay wait already"):
            await host.connect(peer_at(400))


async def test_a_peer_whose_addresses_accept_and_say_nothing_is_given_up_in_seconds(
    autojump_clock: trio.abc.Clock,
) -> None:
    network = MemoryNetwork()
    silent = [await network.listen(Multiaddr.parse("/memory/0")) for _ in range(4)]
    async with hosts(1, network=network) as (host,):
        host.add_addrs(peer_at(1), [each.addr for each in silent], AddrSource.HEARSAY)
        with trio.fail_after(9), pytest.raises(PeerUnreachable):
            await host.connect(peer_at(1))


async def test_one_target_is_dialled_a_few_times_however_many_name_it(
    autojump_clock: trio.abc.Clock,
) -> None:
    """Before, each visiting stranger made us dial eight addresses of its choice."""
    network = SilentNetwork()
    async with open_host(network=network, listen=(), strict=True, config=QUIET) as host:
        async with trio.open_nursery() as nursery:

            async def be_sent(number: int) -> None:
                victim = [Multiaddr.tcp("11.1.1.1", 80 + port) for port in range(8)]
                host.add_addrs(peer_at(number), victim, AddrSource.HEARSAY)
                with pytest.raises(PeerUnreachable):
                    await host.connect(peer_at(number))

            for number in range(100):
                nursery.start_soon(be_sent, number)
        assert network.most <= 4
        assert len(network.dialled) <= 16


async def test_a_stranger_names_no_private_place_to_a_public_node() -> None:
    """Before, a stranger made a public node dial its own loopback and its router."""
    near = [
        "/ip4/127.0.0.1/tcp/22",
        "/ip4/192.168.0.1/tcp/80",
        "/ip4/169.254.169.254/tcp/80",
        "/ip6/::1/tcp/22",
    ]
    public = Multiaddr.parse("/ip4/8.8.8.8/tcp/4001")
    config = SwarmConfig(announce=(public,))
    async with open_host(network=MemoryNetwork(), listen=(), config=config) as host:
        said = [Multiaddr.parse(addr) for addr in near]
        host.add_addrs(peer_at(1), [*said, public], AddrSource.HEARSAY)
        assert [addr.transport for addr in host.addrs_of(peer_at(1))] == [public]
        host.add_addrs(peer_at(2), said, AddrSource.OWNER)
        assert len(host.addrs_of(peer_at(2))) == len(said)


async def test_slow_names_hold_up_no_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, names without an answer filled trio's threads: a write waited 17.5 s."""
    release = threading.Event()

    def slow(*_: object) -> list[object]:
        release.wait()
        return []

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    network = TcpNetwork()

    async def dial(number: int) -> None:
        with pytest.raises(PeerUnreachable):
            await network.dial(Multiaddr.parse(f"/dns4/name-{number}.example/tcp/1"))

    async with open_world() as world:
        try:
            async with trio.open_nursery() as nursery:
                for number in range(64):
                    nursery.start_soon(dial, number)
                await trio.testing.wait_all_tasks_blocked()
                assert network._name_threads.borrowed_tokens == 4
                with trio.fail_after(60):  # no name is looked up before these have returned
                    await world.disk.write("x", b"x")
                    assert await world.run_blocking(abs, -1, cost=0.0) == 1
                release.set()
        finally:
            release.set()


def test_targets_are_counted_by_host_and_network() -> None:
    """Failures fade, and a host that answers is never left alone."""
    targets = DialTargets()
    group = group_of(Multiaddr.parse("/ip4/11.1.1.1/tcp/1"))
    for _ in range(100):
        assert targets.begin(group, 0.0)
        targets.end(group, 0.0, answered=True)
    for together in [1] * 7 + [2]:
        assert all(targets.begin(group, 0.0) for _ in range(together))
        for _ in range(together):
            targets.end(group, 0.0, answered=False)
    assert not targets.begin(group, 5.0)
    assert targets.begin(group_of(Multiaddr.parse("/ip4/11.1.2.1/tcp/1")), 0.0)
    assert targets.begin(group, 120.0)


def test_counts_of_minted_names_are_bounded_and_do_not_push_out_the_worst() -> None:
    counts: FadingCounts[int] = FadingCounts(60.0, most=100)
    counts.add(-1, 0.0, 50.0)
    for number in range(1000):
        counts.add(number, 0.0)
    assert sum(counts.count(number, 0.0) > 0 for number in range(1000)) == 99
    assert counts.count(-1, 60.0) == 25.0
