"""Who pays when a node is full: crowds of one host, of one network, and the useless."""

from __future__ import annotations

from collections import Counter

import pytest
import trio
import trio.testing

from p2p.errors import BadMessage
from p2p.identity import KeyPair, PeerId, ProtocolId
from p2p.multiaddr import AddrSource, Multiaddr
from p2p.swarm import identify
from p2p.swarm.core.gater import ConnectionGater
from p2p.swarm.core.limits import (
    UNKNOWN,
    Budget,
    DialTargets,
    HeldConnection,
    NetGroup,
    PendingHandshake,
    ResourceLimits,
    Usage,
    group_of,
)
from p2p.swarm.swarm import SwarmConfig, open_host
from p2p.transport.memory import MemoryNetwork
from p2p.wire import KI, encode_varint
from tests.support.hosts import peer_at

SMALL = ResourceLimits(connections=64, handshakes=64)


def at(host: str) -> NetGroup:
    return group_of(Multiaddr.tcp(host, 4001))


class House:
    """A budget of connections; those of lower numbers came earlier."""

    def __init__(self, limits: ResourceLimits = SMALL) -> None:
        self.asked = 0
        self.budget = Budget(limits, self._is_protected)
        self.inside: dict[HeldConnection, None] = {}
        self.number = 0

    def _is_protected(self, peer: PeerId) -> bool:
        self.asked += 1
        return False

    def enter(
        self,
        group: NetGroup,
        *,
        inbound: bool = True,
        used: float | None = None,
        useful: float = 0,
    ) -> HeldConnection:
        self.number += 1
        usage = Usage(self.number, self.number if used is None else used)
        usage.useful_at, usage.was_used = useful, used is not None and not useful
        held = HeldConnection(peer_at(self.number), group, inbound, usage, lambda: None)
        self.inside[held] = None
        for victim in self.budget.admit(held):
            del self.inside[victim]
        return held


def test_a_crowd_of_fifty_networks_leaves_most_of_those_who_were_there() -> None:
    house = House()
    honest = [house.enter(at(f"10.{number}.0.1"), used=number) for number in range(16)]
    for number in range(50):
        house.enter(at(f"20.0.{number}.1"), used=1000 + number)
    assert sum(one in house.inside for one in honest) >= 14


def test_a_host_and_a_network_hold_their_share_of_the_connections() -> None:
    house = House()
    honest = [house.enter(at(f"12.{number}.0.1")) for number in range(20)]
    for number in range(100):
        house.enter(at("11.1.1.1"))
        house.enter(at(f"11.1.2.{number}"))
    assert Counter(one.group.network for one in house.inside if one not in honest) == {
        at("11.1.1.1").network: 4,
        at("11.1.2.1").network: 8,
    }
    assert house.inside.keys() >= set(honest)


def test_those_who_dial_us_leave_room_for_our_own_dials() -> None:
    house = House()
    for number in range(200):
        house.enter(at(f"12.{number}.0.1"))
    before = house.inside.copy()
    dialled = [house.enter(UNKNOWN, inbound=False) for _ in range(64 - 48)]
    assert house.inside.keys() == before.keys() | set(dialled)


def test_the_network_with_the_most_pays_for_newcomers() -> None:
    house = House()
    honest = [house.enter(at(f"12.{number}.0.1")) for number in range(20)]
    for number in range(28):
        house.enter(at(f"11.1.{number % 4}.{number}"))
    for number in range(20):
        house.enter(at(f"13.{number}.0.1"))
    assert house.inside.keys() >= set(honest)


def test_a_flood_replaces_the_idle_and_not_those_of_use() -> None:
    house = House()
    veterans = [house.enter(UNKNOWN, used=1.0) for _ in range(12)]
    useful = [house.enter(UNKNOWN, used=1.0, useful=1.0) for _ in range(12)]
    idle = [house.enter(UNKNOWN) for _ in range(12)]
    busy = [house.enter(UNKNOWN, used=1e3 + number) for number in range(12)]
    for number in range(12):
        house.enter(UNKNOWN, used=2e3 + number)
    assert not house.inside.keys() & set(idle)
    assert house.inside.keys() >= {*veterans, *useful, *busy[2:]}
    for number in range(200):
        house.enter(UNKNOWN, used=3e3 + number)
    assert house.inside.keys() >= {*veterans, *useful}


def test_a_flood_is_not_ranked_for_each_newcomer() -> None:
    house = House(ResourceLimits())
    for number in range(1000):
        house.enter(at(f"12.0.{number % 10}.{number // 10}"))
    assert house.asked < 50_000


def test_a_host_and_a_network_hold_their_share_of_the_handshakes() -> None:
    budget, held = Budget(SMALL), dict[PendingHandshake, None]()
    crowds = [[at("11.1.1.1"), at(f"11.1.2.{number}")] for number in range(100)]
    honest = [[at(f"12.{number}.0.1")] for number in range(100)]
    for number, groups in enumerate((*crowds, *honest)):
        if number == 100:
            assert Counter(pending.group.network for pending in held) == {
                at("11.1.1.1").network: 64 // 8,
                at("11.1.2.1").network: 64 // 4,
            }
        for group in groups:
            pending = PendingHandshake(group, number, lambda: None)
            held[pending] = None
            victim = budget.begin_handshake(pending)
            if victim is not None:
                del held[victim]
    assert len(held) == 64


@pytest.mark.parametrize(
    ("together", "answered", "most"), [(True, True, 8), (False, False, 32)]
)
def test_one_network_is_dialled_a_few_times(together: bool, answered: bool, most: int) -> None:
    targets, begun = DialTargets(), 0
    for number in range(100):
        group = at(f"11.1.1.{number}")
        if targets.begin(group, 0.0):
            begun += 1
            if not together:
                targets.end(group, 0.0, answered=False)
    assert begun == most
    assert targets.begin(at("11.1.2.1"), 0.0)


def test_a_peer_has_few_addresses_and_fewer_on_hearsay() -> None:
    gater = ConnectionGater(peer_at(0), lambda _: False)
    addrs = [Multiaddr.tcp(f"81.2.{number}.1", 4001) for number in range(20)]
    for one in addrs:
        gater.add_addrs(peer_at(1), [one], AddrSource.HEARSAY)
        gater.add_addrs(peer_at(2), [one], AddrSource.SIGNED)
    assert gater.book.of(peer_at(1)) == tuple(addrs[:-5:-1])
    assert gater.book.of(peer_at(2)) == tuple(addrs[:-9:-1])


def test_many_networks_together_push_out_their_own() -> None:
    gater = ConnectionGater(peer_at(0), lambda _: False)
    gater.protect("members", [peer_at(1)])
    book = gater.book
    for number in range(1, 100):
        book.add(peer_at(number), [Multiaddr.tcp(f"12.{number}.0.1", 1)], AddrSource.HEARSAY)
    kept = Multiaddr.tcp("11.1.0.1", 1)
    book.add(peer_at(1), [kept], AddrSource.HEARSAY)
    for number in range(100, 15_000):
        addr = Multiaddr.tcp(f"11.1.{number % 50}.1", number)
        book.add(peer_at(number), [addr], AddrSource.HEARSAY)
    assert all(book.of(peer_at(number)) for number in range(1, 100))
    assert kept in book.of(peer_at(1))
    assert book.counts()[AddrSource.HEARSAY] == 10_000


def test_a_relay_comes_after_a_direct_way() -> None:
    gater = ConnectionGater(peer_at(0), lambda _: False)
    direct = Multiaddr.tcp("81.2.3.4", 1)
    circuit = Multiaddr.tcp("81.2.3.5", 1).with_peer(KeyPair(bytes(32)).peer_id).through
    gater.add_addrs(peer_at(1), [circuit, direct], AddrSource.SIGNED)
    assert gater.places_to_dial(peer_at(1), 0.0) == (direct, circuit)


async def test_a_peer_claims_little_about_itself() -> None:
    addrs = [Multiaddr.tcp(f"81.2.{number}.1", 4001) for number in range(40)]
    names = [ProtocolId(f"/{number}") for number in range(200)]
    plain = identify.decode_info_untrusted(identify.encode_info(peer_at(1), names, addrs, None))
    assert plain.listen_addrs == tuple(addrs[:16])
    assert plain.protocols == tuple(names[:128])
    wide = identify.encode_info(peer_at(1), [ProtocolId("/\N{SNAKE}")], addrs, None)
    assert not identify.decode_info_untrusted(wide).protocols
    sender, receiver = trio.testing.memory_stream_one_way_pair()
    await sender.send_all(encode_varint(8 * KI + 1))
    await sender.aclose()
    with pytest.raises(BadMessage, match="over the limit"):
        await identify.receive_info(receiver)  # type: ignore[arg-type]


async def test_a_peer_does_not_push_news_without_end(autojump_clock: trio.abc.Clock) -> None:
    network, config = MemoryNetwork(), SwarmConfig(keepalive=float("inf"))
    async with (
        open_host(network=network, listen=("/memory/0",), strict=True, config=config) as host,
        open_host(network=network, listen=(), config=config) as peer,
    ):
        await peer.connect_addr(host.addrs[0])
        learnt = []
        for number in range(8):
            async with await peer.open_stream(host.peer_id, identify.PUSH_ID) as stream:
                addrs = [Multiaddr.tcp("81.2.3.4", number)]
                names = [ProtocolId(f"/{number}/{index}") for index in range(128)]
                await identify.send_info(
                    stream, identify.encode_info(peer.peer_id, names, addrs, None)
                )
            await host.world.sleep(1.0)
            known = host.info(peer.peer_id)
            assert known is not None
            learnt.append(known.listen_addrs)
        assert len(set(learnt)) == 3
        connection = host._connector.live(peer.peer_id)
        assert connection is not None
        assert len(connection.spoken) == 256
