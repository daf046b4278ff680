"""Two hosts that met through a relay go on without it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio
import trio.testing

from p2p import SwarmConfig, SwarmHost, open_host
from p2p.circuit.core.book import RelayConfig
from p2p.circuit.messages import DCUTR_ID, HolePunch, PunchType
from p2p.circuit.relay import relaying
from p2p.errors import PeerUnreachable, WrongPeer
from p2p.host import request, serve_requests
from p2p.identity import PeerId
from p2p.multiaddr import Multiaddr
from p2p.transport.connection import secure
from p2p.transport.core.noise import StaticKey
from p2p.transport.memory import MemoryNetwork
from tests.unit.test_circuit import ECHO, KEYS, OPEN, echo, open_relay, run, until

PUNCHING = SwarmConfig(punch=True)


@asynccontextmanager
async def three(config: SwarmConfig) -> AsyncIterator[tuple[SwarmHost, SwarmHost, SwarmHost]]:
    """A relay, a home, and a guest that knows only the home's place behind the relay."""
    async with (
        open_relay() as relay,
        open_host(key=KEYS[1], strict=True, config=config) as home,
        open_host(key=KEYS[2], strict=True, config=config) as guest,
    ):
        await home.listen(relay.addrs[0].through)
        await guest.connect_addr(relay.addrs[0])
        await until(guest, lambda: guest.info(relay.peer_id) is not None)
        await until(home, lambda: home.info(relay.peer_id) is not None)
        with home.serving(ECHO, serve_requests(echo)):
            yield relay, home, guest


async def test_a_circuit_becomes_a_direct_connection_and_is_closed() -> None:
    async with three(PUNCHING) as (_, home, guest):
        await guest.connect_addr(home.addrs[-1])
        assert not guest.is_direct(home.peer_id)
        await until(guest, lambda: guest.is_direct(home.peer_id))
        await until(home, lambda: home.is_direct(guest.peer_id))
        assert await request(guest, home.peer_id, ECHO, b"direct") == b"direct"
        await until(guest, lambda: guest.budget.connections == 2)  # to relay and home
        assert guest.is_direct(home.peer_id)


async def test_only_a_peer_that_we_dialled_through_a_relay_may_make_us_punch() -> None:
    """Otherwise any peer could have us send packets to a victim that it names."""
    async with (
        open_host(key=KEYS[1], strict=True, config=PUNCHING) as host,
        open_host(key=KEYS[2], strict=True) as stranger,
        open_host(key=KEYS[3], strict=True) as victim,
    ):
        await stranger.connect_addr(host.addrs[0])
        place = Multiaddr.tcp(*victim.addrs[0].host_port)
        punch = HolePunch(PunchType.CONNECT, (place,)).encode()
        with pytest.raises((trio.BrokenResourceError, PeerUnreachable)):
            await request(stranger, host.peer_id, DCUTR_ID, punch)
        assert victim.connected == ()


async def test_a_punch_proves_who_answers() -> None:
    """A peer that names another's address gets no connection there in that peer's name."""
    async with (
        open_host(key=KEYS[1], strict=True, config=PUNCHING) as host,
        open_host(key=KEYS[3], strict=True) as other,
    ):
        place = Multiaddr.tcp(*other.addrs[0].host_port)
        assert not await host.punch(KEYS[2].peer_id, [place], is_client=True)
        assert host.connected == ()


@asynccontextmanager
async def three_in_memory(
    network: MemoryNetwork, guest_listens: bool, config: RelayConfig = OPEN
) -> AsyncIterator[tuple[SwarmHost, SwarmHost, SwarmHost]]:
    """A relay, a home that others reach through it only, and a guest with a circuit to it."""
    places = ["/memory/0"] if guest_listens else []
    async with (
        open_host(network=network, listen=["/memory/0"], key=KEYS[0], strict=True) as relay,
        open_host(
            network=network, listen=[], key=KEYS[1], strict=True, config=PUNCHING
        ) as home,
        open_host(
            network=network, listen=places, key=KEYS[2], strict=True, config=PUNCHING
        ) as guest,
    ):
        with relaying(relay.world, relay, KEYS[0], config):
            await home.listen(relay.addrs[0].through)
            await guest.connect_addr(home.addrs[0])
            yield relay, home, guest


async def test_a_guest_with_an_open_port_is_dialled_plainly() -> None:
    """Only the guest can be dialled, and a memory network cannot punch."""
    async with three_in_memory(MemoryNetwork(), guest_listens=True) as (_, home, guest):
        await until(guest, lambda: guest.is_direct(home.peer_id))
        assert home.has_dialled(guest.peer_id)


def test_no_message_is_lost_or_overtaken_when_a_direct_connection_replaces_a_circuit() -> None:
    """The circuit is so slow that most messages wait when the direct connection comes."""
    protocol, count = "/test/news/1.0.0", 400
    slow = RelayConfig(strangers=True, rate=256 * 1024)

    async def main() -> None:
        async with three_in_memory(MemoryNetwork(), True, slow) as (_, home, guest):
            got: list[int] = []
            came = trio.Event()

            def take(_: PeerId, message: bytes) -> None:
                got.append(int(message[:8]))
                if len(got) == count:
                    came.set()

            with home.receiving(protocol, take):
                for number in range(count):
                    assert guest.send(home.peer_id, protocol, b"%08d" % number + bytes(4096))
                    if number == count // 2:
                        assert not guest.is_direct(home.peer_id)
                        await until(guest, lambda: guest.is_direct(home.peer_id))
                        assert len(got) < number
                await came.wait()
            assert got == list(range(count))
            assert guest._outbox.dropped == 0

    run(main)


async def test_a_punch_takes_only_the_expected_peer() -> None:
    """Another peer of the same host is turned away, and does not end the punch."""
    async with (
        open_host(key=KEYS[1], strict=True, config=PUNCHING) as host,
        open_host(key=KEYS[3]) as stranger,
        trio.open_nursery() as nursery,
    ):
        expected = KEYS[2]
        static = StaticKey.create(expected, bytes(32))
        silent = await trio.open_tcp_listeners(0, host="127.0.0.1")
        place = Multiaddr.tcp(*silent[0].socket.getsockname())
        nursery.start_soon(partial(host.punch, expected.peer_id, [place], is_client=True))
        await trio.testing.wait_all_tasks_blocked(0.05)
        with pytest.raises((PeerUnreachable, WrongPeer)):
            await stranger.connect_addr(host.addrs[0])
        assert stranger.peer_id not in host.connected
        raw = await trio.open_tcp_stream(*host.addrs[0].host_port)
        secured = await secure(raw, static, host.world.entropy, dialer=False)
        assert secured.peer == host.peer_id
        await until(host, lambda: host.is_direct(expected.peer_id))
        await raw.aclose()
        await silent[0].aclose()
