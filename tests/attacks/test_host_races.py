"""Races. What is closed, evicted, replaced or raised in the middle of
something else.

The schedules at the end are random and repeatable: five hosts connect, disconnect, dial each
other at once, fill lanes, hold streams, reset, evict, break the protocol and go away, with
limits so small that most of it happens while something else is torn down. Then every account of
every host must be empty.
"""

from __future__ import annotations

import contextlib
import gc
import random
import weakref
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import partial

import pytest
import trio
import trio.testing

from p2p.errors import PeerUnreachable, ShoalError
from p2p.host import PeerEvent, PeerState, Stream
from p2p.identity import KeyPair, PeerId, ProtocolId
from p2p.machine import open_world
from p2p.multiaddr import Multiaddr
from p2p.swarm.core.limits import ResourceLimits
from p2p.swarm.swarm import SwarmConfig, SwarmHost, open_host
from p2p.transport.connection import Connection
from p2p.transport.core.yamux import DATA, MAX_CONTROL, PING, SYN
from p2p.transport.memory import PIPE_BYTES, MemoryNetwork
from sim.kernel.determinism import deterministic
from tests.attacks.hostile_mux import Hostile, Victim, frame, hello, open_victims
from tests.support.hosts import QUIET, hosts
from tests.sweeps import swept

HELD = ProtocolId("/test/held")
NEWS = ProtocolId("/test/news")
BUG = ProtocolId("/test/bug")
NOWHERE = Multiaddr.parse("/memory/99999")


def connections_of(host: SwarmHost) -> list[Connection]:
    return [one for each in host._connector._connections.values() for one in each]


def crash(*_: object) -> None:
    raise ValueError("our bug")


# What a listener of ours raises.


async def test_a_listener_that_raises_keeps_nothing_from_the_others() -> None:
    """Gossip kept a peer that had gone in its mesh."""
    async with hosts(2, is_strict=False) as (host, other):
        heard: list[PeerState] = []
        with host.watching(crash), host.watching(lambda event: heard.append(event.state)):
            await host.connect_addr(other.addrs[0])
            await trio.testing.wait_all_tasks_blocked()
            await other.disconnect(host.peer_id)
            await trio.testing.wait_all_tasks_blocked()
            assert heard == [PeerState.CONNECTED, PeerState.DISCONNECTED]
            assert host.connected == ()


async def test_a_listener_that_raises_lets_no_violation_go_unpunished() -> None:
    """Before, what it raised at the disconnect came before the penalty, and instead of it."""
    async with hosts(2, is_strict=False) as (host, other):
        with host.watching(
            lambda event: crash() if event.state is PeerState.DISCONNECTED else None
        ):
            for turn in range(2):
                await other.connect_addr(host.addrs[0])
                await trio.testing.wait_all_tasks_blocked()
                (connection,) = connections_of(other)
                connection.mux.queue.say(9, 0, 0, turn)
                connection.flush()
                await trio.testing.wait_all_tasks_blocked()
            assert host._connector.is_refused(other.peer_id)


# Dials.


async def test_a_dial_that_fails_while_the_peer_dials_us_is_no_failure(
    autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`connect` raised, and listeners heard UNREACHABLE of a peer that was connected."""
    async with hosts(2) as (host, other):
        received: list[bytes] = []
        states: list[PeerState] = []
        with (
            host.watching(lambda event: states.append(event.state)),
            other.receiving(NEWS, lambda _, message: received.append(message)),
        ):
            host.add_addrs(other.peer_id, [NOWHERE])
            network = host.network
            dial = network.dial

            async def slow(addr: Multiaddr) -> trio.abc.HalfCloseableStream:
                if addr == NOWHERE:
                    await host.world.sleep(3)
                    raise PeerUnreachable("nobody is there")
                return await dial(addr)

            monkeypatch.setattr(network, "dial", slow)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(host.connect, other.peer_id)
                assert host.send(other.peer_id, NEWS, b"hello")
                await host.world.sleep(1)
                await other.connect_addr(host.addrs[0])
            await trio.testing.wait_all_tasks_blocked()
            assert states == [PeerState.CONNECTED]
            assert received == [b"hello"]


# One identity, again and again.


async def test_an_identity_that_comes_without_end_is_closed_before_anything_is_begun_for_it(
    mock_clock: trio.testing.MockClock,
) -> None:
    """Each of 300 connections a second was registered, identified and torn down again."""
    network, key = MemoryNetwork(), KeyPair(b"\x09" * 32)
    async with (
        open_host(network=network, listen=("/memory/0",), config=QUIET, strict=True) as host,
        open_world(key=key) as world,
    ):
        kept = []
        mock_clock.rate = 1.0  # handshakes have a rate

        async def come() -> None:
            kept.append(await Hostile.dial(world, network, host.addrs[0], key))
            await trio.testing.wait_all_tasks_blocked()

        for _ in range(4 + 2 * 16):
            await come()
        before = connections_of(host)
        for _ in range(20):
            await come()
        assert connections_of(host) == before  # the last four that were let in
        mock_clock.jump(60.0)
        await come()
        assert connections_of(host) != before


# Bytes that no account counted.


async def choke(victim: Victim, filler: int) -> None:
    """Pings whose answers are not taken, then bytes of no stream, read in the same go."""
    pings = frame(PING, SYN, 0, 1) * (2 * (PIPE_BYTES + 4 * 65_536) // 12)
    with trio.move_on_after(0.5):
        await victim.hostile.send(frame(DATA, 0, 999, bytes(4_000_000)))
        await victim.hostile.send(pings)
        await victim.hostile.send(frame(DATA, 0, 999, bytes(filler)))


async def test_records_that_wait_for_a_choked_peer_are_counted(
    autojump_clock: trio.abc.Clock,
) -> None:
    """Before, up to 512 KiB a connection were in no account: 300 MiB for 768 connections."""
    async with open_victims(7) as (victim,):
        budget = victim.connection.budget
        await choke(victim, 1_000_000)
        await trio.testing.wait_all_tasks_blocked()
        assert victim.connection.mux.is_choked
        assert len(victim.connection.mux.queue.control) < MAX_CONTROL + 8 * 1024
        assert budget.held > 32_000
        assert 0 < budget.outgoing < 64_000  # what is sealed, and not sent
        victim.connection.abort()
        await victim.connection.wait_closed()
        assert budget.held == budget.outgoing == 0


async def test_sealed_bytes_that_the_network_does_not_take_hold_others_back() -> None:
    """256 KiB a connection beside what it had queued: 192 MiB for 768."""
    async with open_victims(7) as (victim,), trio.open_nursery() as nursery:
        await victim.hostile.send(b"".join(hello(2 * number + 1) for number in range(8)))
        await trio.testing.wait_all_tasks_blocked()

        async def answer(stream: Stream) -> None:
            with contextlib.suppress(trio.BrokenResourceError):
                await stream.send_all(bytes(256 * 1024))

        for stream in victim.accepted:
            nursery.start_soon(answer, stream)
        await trio.testing.wait_all_tasks_blocked()
        queued = victim.connection.mux.queue._queued
        assert victim.connection.budget.outgoing > queued + 200_000
        nursery.cancel_scope.cancel()


async def test_a_connection_that_is_over_is_freed_at_once() -> None:
    """A cycle kept each dead connection for the collector."""
    async with hosts(2) as (host, other):
        await host.connect_addr(other.addrs[0])
        await trio.testing.wait_all_tasks_blocked()
        dead = [weakref.ref(one) for one in (*connections_of(host), *connections_of(other))]
        gc.collect()
        gc.disable()
        try:
            await host.disconnect(other.peer_id)
            await trio.testing.wait_all_tasks_blocked()
            for _ in range(3):
                await trio.lowlevel.checkpoint()
            assert [ref() for ref in dead] == [None, None]
        finally:
            gc.enable()


# Everything at once.


def accounts(host: SwarmHost) -> dict[str, object]:
    """Whatever of a host's accounts is not empty."""
    connector, budget, unread, outbox = host._connector, host.budget, host.memory, host._outbox
    counted = budget.connections, budget._of_peer, budget._inbound, connector._connections
    table = {
        "connections": counted,
        "places": (budget._hosts, budget._networks, connector._targets._open),
        "handshakes": (budget.handshakes, connector._turns.waiting),
        "served": (budget.served, budget._served),
        "peers": (connector._usage, host._infos),
        "dials": (connector._dials, connector._dial_slots.borrowed_tokens),
        "unread": (unread.held, unread._holders),
        "queued": (unread.outgoing, unread.lingering),
        "windows": (unread._grants,),
        "turns": (connector.turns._waiting, connector.turns._taken),
        "lanes": (outbox._lanes, outbox._bytes, outbox._total),
    }
    return {name: values for name, values in table.items() if any(values)}


class Chaos:
    """Five hosts, and what is done to them."""

    def __init__(self, seed: int, hosts: list[SwarmHost], *, buggy: bool) -> None:
        self.rng = random.Random(seed)
        self.hosts = hosts
        self.buggy = buggy
        self.events: dict[PeerId, list[PeerEvent]] = {host.peer_id: [] for host in hosts}
        self.blocks = ExitStack()

    def set_up(self) -> None:
        """Handlers, listeners, addresses."""
        for host in self.hosts:
            host.set_handler(HELD, partial(self.hold, host))
            host.set_handler(BUG, partial(self.stumble, host))
            self.blocks.enter_context(host.receiving(NEWS, self.hear))
            if self.buggy:
                self.blocks.enter_context(host.watching(lambda event: self.maybe_crash(0.1)))
            self.blocks.enter_context(host.watching(partial(self.note, host)))
            for other in self.hosts:
                if other is not host:
                    host.add_addrs(other.peer_id, other.addrs)

    def note(self, host: SwarmHost, event: PeerEvent) -> None:
        self.events[host.peer_id].append(event)
        if event.state is PeerState.UNREACHABLE:
            assert host._connector.live(event.peer) is None

    def maybe_crash(self, chance: float) -> None:
        if self.buggy and self.rng.random() < chance:
            raise self.rng.choice([ValueError, KeyError, OSError])("our bug")

    def hear(self, peer: PeerId, message: bytes) -> None:
        self.maybe_crash(0.02)

    async def stumble(self, host: SwarmHost, stream: Stream) -> None:
        await host.world.sleep(self.rng.random())
        self.maybe_crash(1.0)

    async def hold(self, host: SwarmHost, stream: Stream) -> None:
        while data := await stream.receive_some(self.rng.choice([None, 10, 5000])):
            if self.rng.random() < 0.1:
                await host.world.sleep(10 * self.rng.random())
            if self.rng.random() < 0.5:
                await stream.send_all(data)
            self.maybe_crash(0.05)

    async def talk(self, host: SwarmHost, other: SwarmHost) -> None:
        async with await host.open_stream(
            other.peer_id, self.rng.choice([HELD, HELD, BUG])
        ) as stream:
            for _ in range(self.rng.randrange(20)):
                match self.rng.randrange(8):
                    case 0:
                        await stream.send_eof()
                    case 1 | 2:
                        with trio.move_on_after(self.rng.random()):
                            await stream.receive_some(self.rng.choice([None, 100]))
                    case 3:
                        await host.world.sleep(3 * self.rng.random())
                    case _:
                        await stream.send_all(bytes(self.rng.choice([1, 100, 70_000, 300_000])))

    async def attempt(
        self, patience: float, work: Callable[..., Awaitable[object]], *args: object
    ) -> None:
        with trio.move_on_after(patience):
            try:
                await work(*args)
            except* (ShoalError, trio.BrokenResourceError, trio.ClosedResourceError):
                pass

    async def strike(self, host: SwarmHost) -> None:
        """Something that happens to one of its connections."""
        found = connections_of(host)
        if not found:
            return
        connection = self.rng.choice(found)
        match self.rng.randrange(6):
            case 0:
                connection.close()
            case 1:
                connection.abort()
            case 2:
                connection.mux.go_away()
            case 3:
                await connection._raw.aclose()
            case 4:
                for stream in list(connection.streams.values()):
                    stream.evict()
            case _:
                connection.mux.queue.say(9, 0, 0, 0)
        connection.flush()

    async def step(self, nursery: trio.Nursery) -> None:
        host, other = self.rng.sample(self.hosts, 2)
        patience = self.rng.choice([60.0, 0.0, 0.5, 2.0])
        match self.rng.randrange(14):
            case 0 | 1:
                nursery.start_soon(self.attempt, patience, host.connect, other.peer_id)
            case 2:  # both at once
                nursery.start_soon(self.attempt, 60.0, host.connect, other.peer_id)
                nursery.start_soon(self.attempt, 60.0, other.connect, host.peer_id)
            case 3:
                nursery.start_soon(self.attempt, 60.0, host.disconnect, other.peer_id)
            case 4 | 5:
                nursery.start_soon(self.attempt, patience, self.talk, host, other)
            case 6 | 7:
                for _ in range(self.rng.randrange(6)):
                    host.send(
                        other.peer_id, NEWS, bytes(self.rng.choice([0, 10, 3000, 500_000]))
                    )
            case 8:
                friends = self.rng.sample(self.hosts, self.rng.randrange(4))
                host.protect(self.rng.choice("xy"), [friend.peer_id for friend in friends])
            case 9 | 10:
                await self.strike(host)
            case 11:
                host.penalise(other.peer_id, self.rng.choice([10.0, 60.0]), "chaos")
            case 12:
                await host.world.sleep(self.rng.choice([0.0, 0.001, 0.1, 1.0, 5.0]))
            case _:
                for _ in range(self.rng.randrange(20)):
                    await trio.lowlevel.checkpoint()

    async def end(self) -> None:
        """All part; then nothing is left."""
        world = self.hosts[0].world
        for _ in range(3):
            for host in self.hosts:
                host.protect("x", [])
                host.protect("y", [])
                for peer in host.connected:
                    await host.disconnect(peer)
            await world.sleep(60)
        await trio.testing.wait_all_tasks_blocked()

    def check(self) -> None:
        for host in self.hosts:
            assert accounts(host) == {}
            connected: set[PeerId] = set()
            for event in self.events[host.peer_id]:
                if event.state is PeerState.CONNECTED:
                    assert event.peer not in connected
                    connected.add(event.peer)
                elif event.state is PeerState.DISCONNECTED:
                    connected.remove(event.peer)
            assert not connected


async def _chaos(seed: int, steps: int, *, buggy: bool) -> None:
    network, rng = MemoryNetwork(), random.Random(seed)
    async with contextlib.AsyncExitStack() as stack:
        hosts = []
        for number in range(5):
            limits = ResourceLimits(
                connections=rng.choice([4, 6, 20]), handshakes=rng.choice([2, 4, 16])
            )
            host = open_host(
                network=network,
                listen=("/memory/0",),
                key=KeyPair(bytes([number + 1]) * 32),
                strict=not buggy,
                config=SwarmConfig(limits=limits, keepalive=20.0),
            )
            hosts.append(await stack.enter_async_context(host))
        chaos = Chaos(seed, hosts, buggy=buggy)
        chaos.set_up()
        async with trio.open_nursery() as nursery:
            for _ in range(steps):
                await chaos.step(nursery)
            await hosts[0].world.sleep(1)
            nursery.cancel_scope.cancel()
        await chaos.end()
        chaos.check()


@pytest.mark.parametrize("buggy", [False, True], ids=["strict", "buggy"])
@pytest.mark.parametrize("seed", swept(range(4), 1))
def test_whatever_the_order_all_accounts_end_at_zero(seed: int, buggy: bool) -> None:
    with deterministic(seed):
        clock = trio.testing.MockClock(autojump_threshold=0)
        trio.run(partial(_chaos, seed, 100, buggy=buggy), clock=clock)
