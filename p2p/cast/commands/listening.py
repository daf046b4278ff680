"""Where a pusher listens: at the ports of its last life, which its tickets name."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Final

from p2p.errors import ConfigError
from p2p.multiaddr import Multiaddr
from p2p.swarm.swarm import SwarmHost
from p2p.world import World

_PORTS: Final = "ports"
"""File in a pusher's state with the ports it listened at: decimal, in the order of
``--listen``."""
_MAX_BYTES: Final = 256
"""Largest size of that file in bytes: some forty ports."""


async def listen_again(world: World, host: SwarmHost, addrs: Sequence[Multiaddr]) -> list[int]:
    """Let ``host``, which listens nowhere yet, listen at ``addrs``. Where an address leaves the
    port to the system, the last life's port is taken if it is free.

    Else a push that was killed and run again would print another ticket, and its pullers would
    look for it at a port where nothing answers. Returns the last ports that another program has
    now. Raises `ConfigError` if one of ``addrs`` cannot be had.
    """
    last = await _last_ports(world)
    taken = []
    for addr, port in zip_longest(addrs, last[: len(addrs)]):
        place, (kind, asked) = addr.transport.parts[:-1], addr.transport.parts[-1]
        if port is not None and kind == "tcp" and int(asked) == 0:
            try:
                await host.listen(Multiaddr((*place, (kind, str(port)))))
            except ConfigError:
                taken.append(port)
            else:
                continue
        await host.listen(addr)
    ports = [addr.host_port[1] for addr in host.addrs]
    if ports != last:
        await world.disk.replace(_PORTS, " ".join(map(str, ports)).encode())
    return taken


async def _last_ports(world: World) -> list[int]:
    """The ports of the last life; empty if there was none or the file is damaged."""
    try:
        said = (await world.disk.read(_PORTS, 0, _MAX_BYTES)).split()
    except FileNotFoundError:
        return []
    if not all(port.isdigit() and len(port) <= 5 and int(port) < 1 << 16 for port in said):
        return []
    return [int(port) for port in said]
