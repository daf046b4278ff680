"""``shoal push``: sign what lies at a path, print a ticket, give until enough have it."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Final

from p2p.cast.commands.line import LISTEN, Meter, add_common, run_command
from p2p.cast.commands.listening import listen_again
from p2p.cast.commands.source import (
    SOURCE,
    existing,
    join_secret,
    mounted,
    state_of,
)
from p2p.cast.swarm import CastNode, open_cast
from p2p.cast.ticket import MAX_ADDRS, Ticket
from p2p.cast.view import CastState, Teller
from p2p.identity import PeerId
from p2p.multiaddr import Multiaddr
from p2p.node.process import locked_folder, until_told_to_end
from p2p.node.usage import CommandParser, whole_number
from p2p.policy import PolicyVersion
from p2p.shardcast import ShardcastConfig
from p2p.shardcast.publisher import publish_next
from p2p.swarm.core.limits import LOOPBACK, reach_of
from p2p.swarm.swarm import open_host

_MAX_WAITED: Final = 100_000
"""Machines that a push waits for at most: more than a roster names (4,096), and a slip of the
hand is told from a number."""

_LOOK: Final = 0.25
"""Seconds between two looks at who has it whole. A puller that is done says so in a heartbeat,
gives for five seconds, and is gone: with a look each five seconds, as often as a pipe is told,
some pushes never saw their last puller, and waited for ever."""


def push(argv: Sequence[str]) -> int:
    """See `p2p.cast.push`."""
    parser = CommandParser(
        prog="shoal push",
        description="Give a file or folder to many machines. It prints a ticket; on the others,"
        " shoal pull TICKET. They pass parts on to each other while they load.",
    )
    add = parser.add_argument
    add("path", type=Path, help="a file or a folder; hidden names stay out")
    add("--expect", type=whole_number(1, _MAX_WAITED), metavar="N",
        help="end when N machines have it whole (default: on Ctrl-C)")  # fmt: skip
    add_common(parser)
    add("--data", type=Path, metavar="DIR",
        help="where its key is kept (default: one for each path)")  # fmt: skip
    return run_command(partial(_push, parser.parse_args(argv)))


async def _push(options: argparse.Namespace) -> None:
    path = existing(options.path)
    state = options.data or state_of(path)
    teller = Teller(path.name, as_json=options.json)
    config = ShardcastConfig(keep_versions=1)
    with locked_folder(state):
        async with AsyncExitStack() as stack:
            enter = stack.enter_async_context
            await enter(until_told_to_end(with_parent=False))
            world, source = await enter(mounted(state, path))
            secret = await join_secret(world)
            host = await enter(open_host(world=world, listen=[]))
            listen = options.listen or [Multiaddr.parse(LISTEN)]
            for port in await listen_again(world, host, listen):
                teller.event(
                    "taken",
                    f"port     another program has {port}, which tickets until now name:"
                    " give your pullers the one below",
                    port=port,
                )
            node = await enter(
                open_cast(world, host, config, pusher=host.peer_id, secret=secret)
            )
            version = await publish_next(
                lambda version: _publish(node, version, source), node.shardcast.signed
            )
            manifest = node.shardcast.manifest(version)
            ticket = Ticket(
                pusher=node.host.peer_id,
                addrs=tuple(addr.transport for addr in node.host.addrs[:MAX_ADDRS]),
                secret=secret, name=path.name, is_folder=source == SOURCE,
                version=version, manifest=manifest.digest,
            )  # fmt: skip
            teller.event(
                "ticket", _how_to_pull(ticket, manifest.size), ticket=str(ticket),
                version=version, bytes=manifest.size, addrs=[str(a) for a in ticket.addrs],
            )  # fmt: skip
            if options.http is not None:
                from p2p.cast.commands.edge import serving
                from p2p.shardcast.http.library import PolicyLibrary

                await enter(serving(world, PolicyLibrary(node.shardcast), options.http, teller))
            with teller.bars():
                await _wait_given(node, version, options.expect or 0, teller)


async def _publish(node: CastNode, version: PolicyVersion, source: str) -> PolicyVersion:
    return (await node.shardcast.publish(version, source)).version


def _how_to_pull(ticket: Ticket, size: int) -> str:
    lines = [
        f"version  {ticket.version}, {size / 1e6:,.1f} MB",
        *(f"address  {addr}" for addr in ticket.addrs),
    ]
    if all(reach_of(addr) == LOOPBACK for addr in ticket.addrs):
        lines.append("         (only this machine can dial that: give --listen)")
    return "\n".join([*lines, "", f"shoal pull {ticket}", ""])


async def _wait_given(
    node: CastNode, version: PolicyVersion, expected: int, teller: Teller
) -> None:
    """Tell how many have it until ``expected`` do; for ever if that is 0."""
    size = node.shardcast.manifest(version).size
    meter, told = Meter(node.world), -math.inf
    whole: set[PeerId] = set()
    while not expected or len(whole) < expected:
        whole |= node.whole(version)  # also those that have left since
        now = node.world.now()
        if now >= told + teller.interval:
            told = now
            given = node.shardcast.stats.uploaded_as_origin
            teller.state(
                CastState(
                    total=size, here=size, rate=meter.rate(given), given=given,
                    members=node.others(), whole=len(whole), asked=expected,
                )
            )  # fmt: skip
        await node.world.sleep_until(now + _LOOK)
    teller.event("given", f"given    {expected} machines have it", machines=expected)
