"""Two hosts that met through a relay go on without it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from p2p import SwarmConfig, SwarmHost, open_host
from p2p.circuit.messages import DCUTR_ID, HolePunch, PunchType
from p2p.host import request, serve_requests
from p2p.multiaddr import Multiaddr
from tests.unit.test_circuit import ECHO, KEYS, echo, open_relay, run, until

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


def test_a_circuit_becomes_a_direct_connection_and_is_closed() -> None:
    async def main() -> None:
        async with three(PUNCHING) as (_, home, guest):
            await guest.connect_addr(home.addrs[-1])
            assert not guest.is_direct(home.peer_id)
            await until(guest, lambda: guest.is_direct(home.peer_id))
            await until(home, lambda: home.is_direct(guest.peer_id))
            assert await request(guest, home.peer_id, ECHO, b"direct") == b"direct"
            await until(guest, lambda: guest.budget.connections == 2)  # to relay and home
            assert guest.is_direct(home.peer_id)

    run(main)


def test_hosts_that_do_not_punch_stay_with_the_relay() -> None:
    async def main() -> None:
        async with three(SwarmConfig()) as (_, home, guest):
            await guest.connect_addr(home.addrs[-1])
            await until(guest, lambda: guest.info(home.peer_id) is not None)
            assert not guest.is_direct(home.peer_id)
            assert await request(guest, home.peer_id, ECHO, b"relayed") == b"relayed"

    run(main)


def test_only_a_peer_that_we_dialled_through_a_relay_may_make_us_punch() -> None:
    """Otherwise any peer could have us send packets to a victim that it names."""

    async def main() -> None:
        async with (
            open_host(key=KEYS[1], strict=True, config=PUNCHING) as host,
            open_host(key=KEYS[2], strict=True) as stranger,
            open_host(key=KEYS[3], strict=True) as victim,
        ):
            await stranger.connect_addr(host.addrs[0])
            place = Multiaddr.tcp(*victim.addrs[0].host_port)
            punch = HolePunch(PunchType.CONNECT, (place,)).encode()
            with pytest.raises(trio.BrokenResourceError):
                await request(stranger, host.peer_id, DCUTR_ID, punch)
            assert victim.connected == ()

    run(main)


def test_a_punch_proves_who_answers() -> None:
    """A peer that names another's address gets no connection there in that peer's name."""

    async def main() -> None:
        async with (
            open_host(key=KEYS[1], strict=True, config=PUNCHING) as host,
            open_host(key=KEYS[3], strict=True) as other,
        ):
            place = Multiaddr.tcp(*other.addrs[0].host_port)
            assert not await host.punch(KEYS[2].peer_id, [place], is_client=True)
            assert host.connected == ()

    run(main)
