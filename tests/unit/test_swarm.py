"""The production host: limits, scores, identify, ping, and what not every host can be asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
import trio
import trio.testing

from p2p.circuit.messages import STOP_ID
from p2p.errors import (
    ConfigError,
    LimitExceeded,
    PeerUnreachable,
    WrongPeer,
)
from p2p.host import Stream, request, serve_requests
from p2p.identity import KeyPair, PeerId, ProtocolId
from p2p.multiaddr import Multiaddr
from p2p.swarm import identify
from p2p.swarm.core.gater import (
    MAX_ADDRS,
    PENALTY_HALF_LIFE,
    PENALTY_LIMIT,
    REFUSAL,
    Scores,
)
from p2p.swarm.swarm import SwarmConfig, SwarmHost, open_host
from p2p.transport.memory import MemoryNetwork

ECHO = ProtocolId("/test/echo")
NEWS = ProtocolId("/test/news")
QUIET = SwarmConfig(keepalive=float("inf"))


async def echo(peer: PeerId, data: bytes) -> bytes:
    return data


@asynccontextmanager
async def two_hosts(
    *, strict: bool = True, config: SwarmConfig = QUIET
) -> AsyncIterator[tuple[SwarmHost, SwarmHost]]:
    network = MemoryNetwork()
    async with (
        open_host(network=network, listen=("/memory/0",), strict=strict, config=config) as one,
        open_host(
            network=network, listen=("/memory/0",), strict=strict, config=config
        ) as other,
    ):
        one.add_addrs(other.peer_id, other.addrs)
        yield one, other


# Opening and closing.


async def test_a_host_needs_no_arguments() -> None:
    async with open_host() as host:
        (addr,) = host.addrs
        assert addr.peer_id == host.peer_id
        assert addr.host_port[0] == "127.0.0.1"
        assert addr.host_port[1] != 0
        assert repr(host) == f"SwarmHost({host.peer_id!r}, 0 peers)"


@pytest.mark.parametrize(
    "addr", ["nonsense", "/memory/1", "/ip4/127.0.0.1/tcp/1/p2p", "/ip4/203.0.113.1/tcp/1"]
)
async def test_an_address_that_cannot_be_had_is_an_error_of_the_configuration(
    addr: str,
) -> None:
    with pytest.raises(ConfigError):
        async with open_host(listen=(addr,)):
            pass


async def test_nothing_outlives_the_block() -> None:
    async with trio.open_nursery() as nursery:
        before = trio.lowlevel.current_statistics().tasks_living
        async with two_hosts() as (one, other):
            other.set_handler(ECHO, serve_requests(echo))
            assert await request(one, other.peer_id, ECHO, b"x") == b"x"
            await one.open_stream(other.peer_id, ECHO)
            one.send(other.peer_id, NEWS, b"x")
        assert trio.lowlevel.current_statistics().tasks_living == before
        assert not nursery.child_tasks


async def test_what_was_sent_before_closing_arrives() -> None:
    network = MemoryNetwork()
    received = bytearray()
    done = trio.Event()

    async def read(stream: Stream) -> None:
        while data := await stream.receive_some():
            received.extend(data)
        done.set()

    async with open_host(network=network, listen=("/memory/0",), strict=True) as other:
        other.set_handler(ECHO, read)
        async with open_host(network=network, listen=()) as one:
            one.add_addrs(other.peer_id, other.addrs)
            async with await one.open_stream(other.peer_id, ECHO) as stream:
                await stream.send_all(bytes(500_000))
        await done.wait()
    assert len(received) == 500_000


async def test_announced_addresses_replace_our_own() -> None:
    public = Multiaddr.parse("/dns4/example.org/tcp/4001")
    async with open_host(config=SwarmConfig(announce=(public,))) as host:
        assert host.addrs == (public.with_peer(host.peer_id),)


async def test_a_bootstrap_address_must_name_who_answers() -> None:
    async with open_host(listen=()) as host:
        with pytest.raises(ConfigError, match="/p2p/"):
            await host.connect_addr(Multiaddr.parse("/ip4/127.0.0.1/tcp/1"))
        with pytest.raises(PeerUnreachable, match="ourselves"):
            await host.connect(host.peer_id)


# Handlers that go wrong.


async def test_a_crash_ends_a_strict_host() -> None:
    async def crash(stream: Stream) -> None:
        raise KeyError("our bug")

    async def ask() -> None:
        async with two_hosts() as (one, other):
            other.set_handler(ECHO, crash)
            await one.open_stream(other.peer_id, ECHO)
            await trio.sleep_forever()

    with pytest.raises(BaseExceptionGroup) as caught:
        await ask()
    assert caught.group_contains(KeyError, match="our bug")


# Peers that lie.


async def test_observed_and_listen_addresses_are_learnt() -> None:
    async with open_host(strict=True) as one, open_host(strict=True) as other:
        other.set_handler(ECHO, serve_requests(echo))
        await one.connect_addr(other.addrs[0])
        while one.info(other.peer_id) is None or other.info(one.peer_id) is None:
            await trio.testing.wait_all_tasks_blocked(0.01)
        info = one.info(other.peer_id)
        assert info is not None
        assert info.agent == "shoal/0.1"
        assert set(info.protocols) == {
            identify.PROTOCOL_ID,
            identify.PING_ID,
            identify.PUSH_ID,
            STOP_ID,
            ECHO,
        }
        assert info.observed_addr is not None
        assert info.observed_addr.host_port[0] == "127.0.0.1"
        assert other.addrs_of(one.peer_id)[0] == one.addrs[0]
        await one.disconnect(other.peer_id)
        assert one.info(other.peer_id) is None


async def test_more_questions_at_once_than_a_connection_has_streams_are_refused() -> None:
    """As docs/embedding.md says: 256 streams of each side, those of services among them."""
    gate, refused, answered = trio.Event(), list[str](), list[bytes]()

    async def wait(_: PeerId, data: bytes) -> bytes:
        await gate.wait()
        return data

    async with two_hosts() as (one, other):
        other.set_handler(ECHO, serve_requests(wait))

        async def ask(number: int) -> None:
            try:
                answered.append(await request(one, other.peer_id, ECHO, b"%d" % number))
            except LimitExceeded as error:
                refused.append(str(error))

        async with trio.open_nursery() as nursery:
            for number in range(300):
                nursery.start_soon(ask, number)
            await trio.testing.wait_all_tasks_blocked()
            gate.set()
    assert set(refused) == {"256 streams are open on this connection"}
    assert 250 <= len(answered) <= 256


class CountingNetwork(MemoryNetwork):
    """A network that counts the dials of each address."""

    def __init__(self) -> None:
        super().__init__()
        self.dials: Counter[str] = Counter()

    async def dial(self, addr: Multiaddr) -> trio.abc.HalfCloseableStream:
        self.dials[str(addr.transport)] += 1
        return await super().dial(addr)


async def test_dead_addresses_are_left_alone_and_an_error_names_two(autojump_clock) -> None:
    """A peer of eight addresses was dialled at all of them at each try, and each failure was a
    line of 700 characters."""
    network, peer = CountingNetwork(), KeyPair(b"d" * 32).peer_id
    places = [f"/memory/{1000 + number}" for number in range(MAX_ADDRS)]
    async with open_host(network=network, listen=["/memory/0"], config=QUIET) as host:
        host.add_addrs(peer, [Multiaddr.parse(place) for place in places])
        for _ in range(60):
            with pytest.raises(PeerUnreachable) as caught:
                await host.connect(peer)
            assert len(str(caught.value)) < 400
            assert str(caught.value).count("/memory/") <= 2
            await host.world.sleep(10.0)
        assert sum(network.dials.values()) < 60 + 10 * MAX_ADDRS
        assert min(network.dials[place] for place in places) >= 2
        async with open_host(
            network=network, listen=[places[3]], key=KeyPair(b"d" * 32), config=QUIET
        ):
            with trio.fail_after(900):
                while peer not in host.connected:
                    with suppress(PeerUnreachable):
                        await host.connect(peer)
                    await host.world.sleep(10.0)
            before = sum(network.dials.values())
            for _ in range(20):
                await host.disconnect(peer)
                await host.connect(peer)
            assert sum(network.dials.values()) == before + 20


async def test_a_peer_at_whose_address_another_answers_is_looked_for() -> None:
    network, asked = MemoryNetwork(), []
    async with (
        open_host(network=network, listen=()) as host,
        open_host(network=network, listen=("/memory/0",)) as other,
    ):

        async def find(peer: PeerId) -> None:
            asked.append(peer)

        moved = KeyPair(bytes(32)).peer_id
        host.add_addrs(moved, [other.addrs[0].transport])
        with host.finding(find):
            with pytest.raises(WrongPeer):
                await host.connect(moved)
            with pytest.raises(PeerUnreachable):
                await host.connect(moved)
        assert asked == [moved]


async def test_a_lane_that_was_reset_is_opened_again() -> None:
    received = []
    async with two_hosts() as (one, other):
        one.send(other.peer_id, NEWS, b"nobody listens yet")
        await trio.testing.wait_all_tasks_blocked()
        with other.receiving(NEWS, lambda peer, message: received.append(message)):
            one.send(other.peer_id, NEWS, b"now")
            await trio.testing.wait_all_tasks_blocked()
    assert received == [b"now"]


# What is remembered.


def test_points_fade_and_refusals_end_but_bans_do_not() -> None:
    peer, other = (KeyPair(bytes([seed]) * 32).peer_id for seed in (1, 2))
    scores = Scores()
    assert not scores.penalise(peer, PENALTY_LIMIT - 1, now=0)
    assert scores.points.count(peer, PENALTY_HALF_LIFE) == pytest.approx(
        (PENALTY_LIMIT - 1) / 2
    )
    assert not scores.penalise(peer, PENALTY_LIMIT / 2, now=PENALTY_HALF_LIFE)
    assert scores.penalise(peer, PENALTY_LIMIT, now=PENALTY_HALF_LIFE)
    assert scores.is_refused(peer, PENALTY_HALF_LIFE + REFUSAL - 1)
    assert not scores.is_refused(peer, PENALTY_HALF_LIFE + REFUSAL)
    scores.ban(other)
    assert scores.is_refused(other, 1e9)
