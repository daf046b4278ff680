"""``shoal push``: sign what lies at a path, print a ticket, give until enough have it."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from p2p.cast.commands.line import (
    LISTEN,
    PUNCHING,
    Meter,
    add_common,
    offering,
    relay_addr,
    run_command,
)  # fmt: skip
from p2p.cast.commands.listening import listen_again
from p2p.cast.commands.source import (
    SOURCE,
    Changes,
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
from p2p.node.usage import CommandParser, expanded, whole_number
from p2p.policy import PolicyVersion
from p2p.shardcast import ShardcastConfig, ShardcastStats
from p2p.shardcast.publisher import publish_next
from p2p.swarm.core.limits import LOOPBACK, reach_of
from p2p.swarm.swarm import open_host

_MAX_WAITED: Final = 100_000
"""The most machines that a push may wait for: more than a roster names (4,096), so a larger
number is a typing mistake."""

_LOOK: Final = 0.25
"""Seconds between two looks at who has it whole. A puller that is done says so in a heartbeat,
serves for five seconds and leaves: a slower look would miss it and wait for ever."""


def push(argv: Sequence[str]) -> int:
    """See `p2p.cast.push`."""
    return run_command(lambda: _push(_options(argv)))


def _options(argv: Sequence[str]) -> argparse.Namespace:
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
    add("--relay", action="append", default=[], type=relay_addr, metavar="ADDR",
        help="node through which pullers come past a router; it ends in /p2p/ID")  # fmt: skip
    add("--data", type=Path, metavar="DIR",
        help="where its key is kept (default: one for each path)")  # fmt: skip
    return parser.parse_args(argv)


async def _push(options: argparse.Namespace) -> int:
    path = existing(options.path)
    state = state_of(path) if options.data is None else expanded(options.data)
    teller = Teller(path.name, as_json=options.json)
    changes = Changes("run push again", teller, path.name if path.is_file() else "")
    config = ShardcastConfig(keep_versions=1)
    given = Given()
    with locked_folder(state, "shoal push or serve"):
        async with AsyncExitStack() as stack:
            enter = stack.enter_async_context
            ending = await enter(until_told_to_end(is_done=options.expect is None))
            world, source = await enter(mounted(state, path))
            secret = await join_secret(world)
            host = await enter(open_host(world=world, listen=[], config=PUNCHING))
            listen = options.listen or [Multiaddr.parse(LISTEN)]
            for port in await listen_again(world, host, listen):
                words = f"port     another program has {port}, which tickets until now name:"
                teller.event("taken", f"{words} give your pullers the one below", port=port)
            for relay in options.relay:
                await host.listen(relay.through)
            node = await enter(
                open_cast(world, host, config, pusher=host.peer_id, secret=secret)
            )
            with teller.patience(world, "reading", f"reading  {path}"):
                version = await publish_next(
                    lambda version: _publish(node, version, source), node.shardcast.signed
                )
            node.announce(version)
            given.stats = node.shardcast.stats
            manifest = node.shardcast.manifest(version)
            ticket = Ticket(
                pusher=node.host.peer_id,
                addrs=tuple(addr.transport for addr in node.host.addrs[:MAX_ADDRS]),
                secret=secret, name=path.name, is_folder=source == SOURCE,
                version=version, manifest=manifest.digest,
            )  # fmt: skip
            _tell_ticket(ticket, manifest.size, teller)
            await enter(offering(node, options.http, teller, changes))
            with teller.bars():
                await _wait_given(node, version, options.expect or 0, given, teller, changes)
            ending.is_done = True
    if ending.signal:
        given.tell(teller)
    return ending.code


@dataclass(slots=True)
class Given:
    """What a push has done so far."""

    whole: set[PeerId] = field(default_factory=set)
    """Machines that have it whole, those that have left since among them."""
    stats: ShardcastStats = field(default_factory=ShardcastStats)

    @property
    def bytes(self) -> int:
        """Bytes that the pusher gave."""
        return self.stats.uploaded_as_origin

    def tell(self, teller: Teller) -> None:
        """Say so, at the end."""
        teller.event(
            "ended", f"ended    {_machines(len(self.whole))} it whole, gave"
            f" {self.bytes / 1e6:,.1f} MB; the same command line goes on",
            machines=len(self.whole), given=self.bytes,
        )  # fmt: skip


def _machines(count: int) -> str:
    return "1 machine has" if count == 1 else f"{count or 'no'} machines have"


async def _publish(node: CastNode, version: PolicyVersion, source: str) -> PolicyVersion:
    return (await node.shardcast.publish(version, source)).version


def _tell_ticket(ticket: Ticket, size: int, teller: Teller) -> None:
    lines = [
        f"version  {ticket.version}, {size / 1e6:,.1f} MB",
        *(f"address  {addr}" for addr in ticket.addrs),
    ]
    if all(reach_of(addr) == LOOPBACK for addr in ticket.addrs):
        lines.append("         (only this machine can dial that: give --listen)")
    teller.event(
        "ticket", "\n".join([*lines, "", f"shoal pull {ticket}", ""]), ticket=str(ticket),
        version=ticket.version, bytes=size, addrs=[str(addr) for addr in ticket.addrs],
    )  # fmt: skip


async def _wait_given(
    node: CastNode,
    version: PolicyVersion,
    expected: int,
    given: Given,
    teller: Teller,
    changes: Changes,
) -> None:
    """Report how many machines are done until ``expected`` are; for ever if that is 0."""
    size = node.shardcast.manifest(version).size
    meter, told = Meter(node.world), -math.inf
    while not expected or len(given.whole) < expected:
        given.whole |= node.whole(version)
        for path, what in node.shardcast.damaged.items():
            changes.tell(str(Path(path).relative_to(node.world.disk.locate(SOURCE))), what)
        now = node.world.now()
        if now >= told + teller.interval:
            told = now
            teller.state(
                CastState(
                    total=size, here=size, rate=meter.rate(given.bytes), given=given.bytes,
                    members=node.others(), whole=len(given.whole), asked=expected,
                )
            )  # fmt: skip
        await node.world.sleep_until(now + _LOOK)
    teller.event("given", f"given    {_machines(expected)} it", machines=expected)
