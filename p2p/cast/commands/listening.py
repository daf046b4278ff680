"""Where a pusher listens: at the ports of its last life, which its tickets name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from p2p.errors import ConfigError
from p2p.multiaddr import Multiaddr
from p2p.swarm import SwarmHost
from p2p.world import World

_PORTS: Final = "ports"
"""Where a pusher's state says at which ports it listened: decimal, in the order of
``--listen``."""
_MAX_BYTES: Final = 256
"""Of that file: some forty ports."""


async def listen_again(world: World, host: SwarmHost, addrs: Sequence[Multiaddr]) -> None:
    """Have ``host``, which listens nowhere yet, listen at ``addrs``; where one leaves the port
    to the system, at the last one, if it is free.

    Else a push that was killed and run again would print another ticket, and its pullers would
    look for it at a port where nothing answers. Raises `ConfigError` if one of ``addrs`` cannot
    be had.
    """
    last = await _last_ports(world)
    for number, addr in enumerate(addrs):
        if number >= len(last) or not await _listen(host, addr, last[number]):
            await host.listen(addr)
    ports = [addr.host_port[1] for addr in host.addrs]
    if ports != last:
        await world.disk.replace(_PORTS, " ".join(map(str, ports)).encode())


async def _listen(host: SwarmHost, addr: Multiaddr, port: int) -> bool:
    """Whether ``host`` now listens at ``addr``, which names no port, at ``port``."""
    try:
        place, asked = addr.host_port
        if not asked:
            await host.listen(Multiaddr.tcp(place, port))
    except (ConfigError, ValueError):
        return False  # another program has it now, or ``addr`` is no TCP address
    return not asked


async def _last_ports(world: World) -> list[int]:
    """The ports of the last life; none if there was none, or the file is damaged."""
    try:
        said = (await world.disk.read(_PORTS, 0, _MAX_BYTES)).split()
    except FileNotFoundError:
        return []
    if not all(port.isdigit() and len(port) <= 5 and int(port) < 1 << 16 for port in said):
        return []
    return [int(port) for port in said]
