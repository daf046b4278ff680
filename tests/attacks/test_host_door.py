"""Idle connections shut a node's door. Silent sockets do. One identity does."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

import p2p
from p2p.errors import RemoteProtocolError
from p2p.host import serve_requests
from p2p.identity import KeyPair, PeerId, ProtocolId
from p2p.machine import RealWorld, open_world
from p2p.swarm import connector
from p2p.swarm.core.limits import UNKNOWN, Budget, NetGroup, PendingHandshake, ResourceLimits
from p2p.swarm.swarm import SwarmConfig, SwarmHost, open_host
from p2p.transport.memory import MemoryNetwork
from tests.attacks.hostile_mux import Hostile
from tests.support.hosts import hosts

ECHO = ProtocolId("/test/echo")
NEWS = ProtocolId("/test/news")
SMALL = ResourceLimits(connections=32, handshakes=16)
QUIET = float("inf")


async def echo(peer: PeerId, data: bytes) -> bytes:
    return data


@asynccontextmanager
async def victim(
    limits: ResourceLimits = SMALL,
) -> AsyncIterator[tuple[MemoryNetwork, SwarmHost]]:
    network = MemoryNetwork()
    config = SwarmConfig(limits=limits, keepalive=QUIET)
    async with open_host(
        network=network, listen=("/memory/0",), strict=True, config=config
    ) as host:
        host.set_handler(ECHO, serve_requests(echo))
        yield network, host


async def honest(network: MemoryNetwork, host: SwarmHost) -> None:
    """A newcomer's dial, ping and identify, within a second."""
    with trio.fail_after(1):
        async with open_host(network=network, listen=()) as newcomer:
            peer = await newcomer.connect_addr(host.addrs[0])
            await p2p.ping(newcomer, peer)
            while newcomer.info(peer) is None:
                await trio.lowlevel.checkpoint()


async def stranger(
    network: MemoryNetwork, host: SwarmHost, world: RealWorld, seed: int
) -> Hostile:
    """A connection that shakes hands and then says nothing for ever."""
    return await Hostile.dial(world, network, host.addrs[0], KeyPair(seed.to_bytes(32, "big")))


async def test_idle_connections_make_room_for_newcomers_and_for_our_own_dials() -> None:
    """Before, a host full of idle connections refused newcomers, and dialled nobody itself."""
    async with victim() as (network, host), open_world(key=KeyPair(bytes(32))) as world:
        for seed in range(1, SMALL.connections + 9):
            await stranger(network, host, world, seed)
            if seed % 8 == 0:
                await honest(network, host)
        assert host.budget.connections <= SMALL.inbound
        async with open_host(network=network, listen=("/memory/0",)) as friend:
            await host.connect_addr(friend.addrs[0])
            await p2p.ping(host, friend.peer_id)


async def test_silent_sockets_do_not_keep_dialers_out() -> None:
    """Before, 64 silent sockets held all handshakes for 10 s: 0 of 97 honest dials."""
    async with victim() as (network, host), trio.open_nursery() as nursery:
        sockets = []

        async def keep_coming() -> None:
            while True:
                sockets.append(await network.dial(host.addrs[0]))
                await trio.lowlevel.checkpoint()

        nursery.start_soon(keep_coming)
        while len(sockets) < 4 * SMALL.handshakes:
            await trio.lowlevel.checkpoint()
        for _ in range(20):
            await honest(network, host)
        assert host.budget.handshakes <= SMALL.handshakes
        nursery.cancel_scope.cancel()


async def test_who_has_spoken_is_known_before_it_is_read() -> None:
    """In a batch that the kernel hands over at once, speakers counted as silent."""
    hello = b"\x13/multistream/1.0.0\n"
    config = SwarmConfig(limits=SMALL, keepalive=QUIET)
    async with open_host(listen=("/ip4/127.0.0.1/tcp/0",), strict=True, config=config) as host:
        with contextlib.ExitStack() as sockets:
            place = host.addrs[0].host_port
            # None of these lets the host run: all wait in the kernel.
            spoken = [
                sockets.enter_context(socket.create_connection(place))
                for _ in range(SMALL.handshakes // 2)
            ]
            for one in spoken:
                one.sendall(hello)
            for _ in range(3 * SMALL.handshakes):
                sockets.enter_context(socket.create_connection(place))
            for one in spoken:
                one.setblocking(False)
                with trio.fail_after(60):
                    await trio.lowlevel.wait_readable(one)
                assert one.recv(len(hello)) == hello  # not its end


async def test_first_words_alone_do_not_keep_dialers_out(
    autojump_clock: trio.abc.Clock,
) -> None:
    """300 sockets a second send the first line of a handshake and then nothing."""
    async with victim() as (network, host), trio.open_nursery() as nursery:
        sockets = []

        async def keep_coming() -> None:
            while True:
                sockets.append(await network.dial(host.addrs[0]))
                await sockets[-1].send_all(b"\x13/multistream/1.0.0\n")
                await host.world.sleep(1 / 300)

        nursery.start_soon(keep_coming)
        await host.world.sleep(4 * SMALL.handshakes / 300)
        for _ in range(20):
            await honest(network, host)
        assert host.budget.handshakes <= SMALL.handshakes
        nursery.cancel_scope.cancel()


async def test_one_identity_has_four_connections_however_slowly_they_end() -> None:
    """Before, the fifth made the first say goodbye and wait for its reader: 447 were open."""
    async with victim() as (network, host), open_world(key=KeyPair(bytes(32))) as world:
        kept = []
        for _ in range(40):
            kept.append(await stranger(network, host, world, seed=1))
        await trio.testing.wait_all_tasks_blocked()
        (connections,) = host._connector._connections.values()
        assert len(connections) == host.budget.connections == SMALL.per_peer
        await honest(network, host)


async def test_newcomers_do_not_wait_behind_a_crowd_that_comes_again(
    autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """400 dialers of one identity come again as soon as they are closed."""
    rate, crowd = 100.0, 56
    monkeypatch.setattr(connector, "HANDSHAKE_RATE", rate)
    limits = ResourceLimits(connections=32, handshakes=64)
    async with (
        victim(limits) as (network, host),
        open_world(key=KeyPair(bytes(32))) as world,
        trio.open_nursery() as nursery,
    ):

        async def keep_coming() -> None:
            while True:
                with contextlib.suppress(trio.BrokenResourceError, RemoteProtocolError):
                    crowding = await stranger(network, host, world, seed=1)
                    while await crowding.raw.receive_some():
                        pass
                await world.sleep(0.05)

        for _ in range(crowd):
            nursery.start_soon(keep_coming)
        await world.sleep(2)
        for _ in range(5):
            start = world.now()
            await honest(network, host)
            assert world.now() - start < 0.2 < crowd / rate
            await world.sleep(0.2037)  # not when a turn has just come up
        nursery.cancel_scope.cancel()


def test_who_was_answered_goes_after_who_waits_for_a_turn() -> None:
    """The oldest that had spoken went first: those whose answer was on its way."""
    budget = Budget(ResourceLimits(connections=32, handshakes=16))
    answered, waiting, silent = (
        [PendingHandshake(UNKNOWN, 0.0, bool, heard=heard, begun=begun) for _ in range(count)]
        for heard, begun, count in ((True, True, 6), (True, False, 6), (False, False, 4))
    )
    for one in (*answered, *waiting, *silent):
        assert budget.begin_handshake(one) is None
    newcomers = [PendingHandshake(UNKNOWN, 0.0, bool, heard=True) for _ in range(4)]
    gone = [budget.begin_handshake(one) for one in newcomers]
    assert gone == waiting[:4]
    for one in (*waiting, *newcomers):
        one.begun = True  # most have been answered, and say nothing more: they make room too
    assert budget.begin_handshake(PendingHandshake(UNKNOWN, 0.0, bool)) is answered[0]
    assert budget.begin_handshake(PendingHandshake(UNKNOWN, 0.0, bool)) is silent[0]


def test_dialers_that_have_hung_up_take_no_turns() -> None:
    """2,000 sockets a second, closed behind their first words, each took a turn."""
    turns = connector._Turns(64)
    home = NetGroup("127.0.0.1", "loopback", limited=False)
    early, late = (PendingHandshake(home, 0.0, bool) for _ in range(2))
    gone = [PendingHandshake(home, 0.0, bool, lambda: True) for _ in range(9)]
    waiting = [turns.wait(one) for one in (early, *gone, late, *gone)]
    turns.call(10.0)
    assert [turn.is_set() for turn in waiting] == [False] * 10 + [True] * 10
    turns.call(10.0)
    assert all(turn.is_set() for turn in waiting)
    turns.call(10.0)  # harmless


def test_a_flood_of_handshakes_waits_behind_itself() -> None:
    turns = connector._Turns(1000)
    flood = [NetGroup(f"1.1.1.{number}", "1.1.1", limited=True) for number in range(20)]
    groups = [*flood, NetGroup("2.2.2.2", "2.2.2", limited=True)]
    waiting = [turns.wait(PendingHandshake(group, 0.0, bool)) for group in groups]
    turns.call(0.0)
    assert [turn.is_set() for turn in waiting] == [False] * 20 + [True]


async def test_idle_connections_end_and_messages_open_them_again(
    autojump_clock: trio.abc.Clock,
) -> None:
    """Before, an idle connection stayed until its process ended."""
    async with (
        victim() as (network, host),
        hosts(2, network=network) as (talker, friend),
        open_world(key=KeyPair(bytes(32))) as world,
    ):
        received: list[bytes] = []
        with talker.receiving(NEWS, lambda _, message: received.append(message)):
            host.add_addrs(talker.peer_id, talker.addrs)
            host.protect("officers", [friend.peer_id])
            await host.connect_addr(friend.addrs[0])
            friend.protect("officers", [host.peer_id])
            await stranger(network, host, world, seed=1)
            assert host.send(talker.peer_id, NEWS, b"first")
            await trio.testing.wait_all_tasks_blocked()
            assert len(host.connected) == 3
            await world.sleep(30.0 + 2 * 15.0 + 3)
            # who never used it has gone
            assert set(host.connected) == {talker.peer_id, friend.peer_id}
            await world.sleep(300.0 + 15.0 + 3)
            assert host.connected == (friend.peer_id,)
            assert host.send(talker.peer_id, NEWS, b"second")
            await trio.testing.wait_all_tasks_blocked()
            assert received == [b"first", b"second"]


async def test_protected_peers_outlive_a_flood() -> None:
    """Slots for officers, neighbours and peers with accepted work."""
    async with (
        victim() as (network, host),
        open_host(network=network, listen=(), config=SwarmConfig(keepalive=QUIET)) as officer,
        open_world(key=KeyPair(bytes(32))) as world,
    ):
        host.protect("officers", [officer.peer_id])
        await officer.connect_addr(host.addrs[0])
        for seed in range(1, 3 * SMALL.connections):
            await stranger(network, host, world, seed)
        await trio.testing.wait_all_tasks_blocked()
        assert officer.peer_id in host.connected
        assert host.budget.connections <= SMALL.connections


async def test_a_silent_socket_is_given_up_in_time(autojump_clock: trio.abc.Clock) -> None:
    async with victim() as (network, host), await network.dial(host.addrs[0]):
        await trio.testing.wait_all_tasks_blocked()
        assert host.budget.handshakes == 1
        await host.world.sleep(11.0)
        assert host.budget.handshakes == 0


async def test_handshakes_leave_a_part_of_the_core(autojump_clock: trio.abc.Clock) -> None:
    """Sixteen come at once, and 700 a second."""
    async with (
        victim(ResourceLimits()) as (network, host),
        open_world(key=KeyPair(bytes(32))) as world,
        trio.open_nursery() as nursery,
    ):
        since = world.now()
        for seed in range(1, 87):
            nursery.start_soon(stranger, network, host, world, seed)
        while len(host.connected) < 86:
            await host.news.wait()
        assert 0.09 < world.now() - since < 0.2


async def test_new_identities_of_one_host_wash_off_no_penalty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    everyone = NetGroup("one host", "one network", limited=True)
    monkeypatch.setattr(connector, "group_of", lambda _: everyone)
    async with victim() as (network, host), open_world(key=KeyPair(bytes(32))) as world:
        for seed in range(1, 10):
            await stranger(network, host, world, seed)
            while not host.connected:
                await host.news.wait()
            host.penalise(host.connected[0], 100.0, "what it did")
            while host.connected:
                await host.news.wait()
        with pytest.raises((RemoteProtocolError, trio.BrokenResourceError)):
            await stranger(network, host, world, seed=10)


async def test_a_connection_with_a_slow_answer_is_not_idle(
    autojump_clock: trio.abc.Clock,
) -> None:
    config = SwarmConfig(keepalive=QUIET)
    async with (
        victim() as (network, host),
        open_host(network=network, listen=(), config=config) as asker,
    ):

        async def slowly(peer: PeerId, data: bytes) -> bytes:
            await host.world.sleep(300.0 + 3 * 15.0)
            return data

        host.set_handler(NEWS, serve_requests(slowly))
        peer = await asker.connect_addr(host.addrs[0])
        assert await p2p.request(asker, peer, NEWS, b"question") == b"question"
