"""Hosts of one process on one memory network."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

from p2p.network import Network
from p2p.swarm.swarm import SwarmConfig, SwarmHost, open_host
from p2p.transport.memory import MemoryNetwork

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
