"""Why a puller waits: what its ticket's addresses answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import trio

from p2p.cast.swarm import CastNode
from p2p.cast.view import Teller
from p2p.host import Host
from p2p.multiaddr import Multiaddr
from p2p.node.trouble import PEER_TROUBLE, likely_cause
from p2p.swarm.core.limits import LOOPBACK, reach_of

ROUND: Final = 15.0
"""Seconds between two looks. Membership dials the same addresses by itself; this is for the
person, who by then wonders."""
TIMEOUT: Final = 10.0
"""Seconds for one address: a firewall that swallows packets gives no answer at all."""


async def tell_unreachable(
    node: CastNode,
    addrs: Sequence[Multiaddr],
    teller: Teller,
    causes: dict[Multiaddr, str] | None = None,
) -> None:
    """Until this node has a neighbour, say of each address why nothing comes from there, and
    keep that in ``causes``.

    Of each a person reads one line, and another only when what is wrong has changed.
    """
    said = {} if causes is None else causes

    async def look(addr: Multiaddr) -> None:
        cause = await _cause(node.host, addr)
        if cause and cause != said.get(addr):
            said[addr] = cause
            teller.event(
                "unreachable", f"no way to {addr.transport}: {cause}",
                addr=str(addr.transport), cause=cause,
            )  # fmt: skip

    while not node.membership.neighbours:
        # All at the same time: the last of eight silent ones was named after 80 seconds.
        async with trio.open_nursery() as nursery:
            for addr in addrs:
                nursery.start_soon(look, addr)
        with trio.move_on_after(ROUND):
            await node.membership.wait_neighbour()
    said.clear()


async def _cause(host: Host, addr: Multiaddr) -> str:
    """Why ``addr`` cannot be dialled, or nothing if it can."""
    try:
        with trio.fail_after(TIMEOUT):
            await host.connect_addr(addr)
    except PEER_TROUBLE as error:
        if reach_of(addr) == LOOPBACK:
            return "that is the pusher's own machine: on another, it takes --listen of the push"
        return likely_cause(error)
    return ""
