"""Hosts of one process on one memory network, names of peers, and two that shook hands."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

import trio

from p2p.identity import KeyPair, PeerId
from p2p.network import Network
from p2p.swarm.swarm import SwarmConfig, SwarmHost, open_host
from p2p.transport.connection import Secured, secure
from p2p.transport.core.noise import StaticKey
from p2p.transport.memory import MemoryNetwork, memory_pair
from p2p.world import World

QUIET: Final = SwarmConfig(keepalive=float("inf"))
"""Nothing is said that nobody asked for, so that tests wait for what they cause alone."""


@asynccontextmanager
async def hosts(
    count: int,
    config: SwarmConfig = QUIET,
    *,
    network: Network | None = None,
    is_strict: bool = True,
) -> AsyncIterator[list[SwarmHost]]:
    """So many hosts. A bug of ours in the first one fails the test if ``is_strict``."""
    network = network or MemoryNetwork()
    async with AsyncExitStack() as stack:
        found: list[SwarmHost] = []
        for number in range(count):
            opened = open_host(
                network=network,
                listen=("/memory/0",),
                config=config,
                strict=is_strict and not number,
            )
            found.append(await stack.enter_async_context(opened))
        yield found


def peer_at(number: int) -> PeerId:
    """A name that no key has: nobody dials it here."""
    return PeerId(KeyPair(bytes(32)).peer_id.digest[:-4] + number.to_bytes(4, "big"))


async def secure_pair(
    world: World, dialer: KeyPair, listener: KeyPair
) -> tuple[Secured, Secured]:
    """The two ends of a pipe, whose owners have shaken hands."""
    done: dict[bool, Secured] = {}

    async def shake(raw: trio.abc.HalfCloseableStream, key: KeyPair, is_dialer: bool) -> None:
        static = StaticKey.create(key, world.entropy(32))
        expected = listener.peer_id if is_dialer else None
        done[is_dialer] = await secure(
            raw, static, world.entropy, dialer=is_dialer, expected=expected
        )

    ours, theirs = memory_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(shake, ours, dialer, True)
        nursery.start_soon(shake, theirs, listener, False)
    return done[True], done[False]
