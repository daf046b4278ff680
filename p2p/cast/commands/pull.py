"""``shoal pull``: fetch what a ticket names, put it where a person wants it, give it on."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Final

import trio

from p2p.cast.commands.line import (
    LISTEN,
    Meter,
    add_common,
    duration,
    execute,
    run_command,
    ticket_of,
)
from p2p.cast.commands.unreachable import tell_unreachable
from p2p.cast.delivery import deliver
from p2p.cast.swarm import CastNode, open_cast
from p2p.cast.ticket import Ticket
from p2p.cast.view import CastState, Teller
from p2p.errors import BadMessage, ConfigError
from p2p.machine import open_world
from p2p.node.process import locked_folder, until_told_to_end
from p2p.node.usage import CommandParser
from p2p.policy import PolicyVersion
from p2p.shardcast import Manifest, Shardcast, ShardcastConfig
from p2p.shardcast.selection import Selection
from p2p.swarm.swarm import open_host
from p2p.world import World

STATE: Final = ".shoal"
"""Where a puller keeps what it needs to go on: its key, and one link to each file."""
SEED: Final = 5.0
"""Seconds for which a puller goes on serving by default: others may wait for its chunks, and
its next heartbeat, which tells the pusher that one more machine is done, takes two."""


def pull(argv: Sequence[str]) -> int:
    """See `p2p.cast.pull`."""
    parser = CommandParser(
        prog="shoal pull",
        description="Get what a ticket of shoal push names. The same line goes on after an"
        " interruption; http://HOST:PORT of a shardcast server is followed too.",
    )
    add = parser.add_argument
    add("ticket", help="as shoal push prints it, or http://HOST:PORT[,http://...]")
    add("--out", type=Path, metavar="DIR", help="where its files go (default: the name it has)")
    add("--only", metavar="GLOB", help="fetch only files that match, such as '*.json'")
    add("--follow", action="store_true", help="stay, and take each newer version")
    add("--exec", dest="command", metavar="CMD",
        help="run after each version, with SHOAL_VERSION and SHOAL_PATH set")  # fmt: skip
    add("--seed", type=duration, default=SEED, metavar="TIME",
        help="go on giving to others for so long, such as 10m (default: 5s)")  # fmt: skip
    add_common(parser)
    options = parser.parse_args(argv)
    if options.only is not None and options.follow:
        parser.error("--only goes without --follow")
    if not options.ticket.startswith(("http://", "https://")):
        return run_command(partial(_pull, options))
    if options.only is not None:
        parser.error("--only goes with a ticket: HTTP servers list whole versions")
    from p2p.cast.commands.follow import follow

    out = (options.out or Path()).absolute()
    return run_command(partial(follow, options, out, out / STATE))


async def _pull(options: argparse.Namespace) -> None:
    ticket = ticket_of(options.ticket)
    if options.only is not None and not ticket.is_folder:
        raise ConfigError(f"--only chooses files of a folder, and {ticket.name} is a file")
    selection = Selection(options.only) if options.only is not None else None
    out = (options.out or Path(ticket.name if ticket.is_folder else ".")).absolute()
    state = out / (STATE if ticket.is_folder else f"{STATE}-{ticket.name}")
    teller = Teller(ticket.name, as_json=options.json)
    config = ShardcastConfig(keep_versions=2 if options.follow else 1)
    bootstrap = [addr.with_peer(ticket.pusher) for addr in ticket.addrs]
    with locked_folder(state):
        async with AsyncExitStack() as stack:
            enter = stack.enter_async_context
            await enter(until_told_to_end(with_parent=False))
            world = await enter(open_world(state))
            host = await enter(open_host(world=world, listen=options.listen or [LISTEN]))
            node = await enter(
                open_cast(
                    world, host, config,
                    pusher=ticket.pusher, secret=ticket.secret, bootstrap=bootstrap,
                    selection=selection,
                )
            )  # fmt: skip
            if options.http is not None:
                from p2p.cast.commands.edge import serving
                from p2p.shardcast.http.library import PolicyLibrary

                await enter(serving(world, PolicyLibrary(node.shardcast), options.http, teller))
            nursery = await enter(trio.open_nursery())
            stack.callback(nursery.cancel_scope.cancel)
            nursery.start_soon(tell_unreachable, node, bootstrap, teller)
            wanted = ticket.version
            if selection is not None:
                await _pull_some(node, ticket, selection, out, teller)
            while selection is None:
                version = await _wait_whole(node, wanted, teller)
                await _hand_over(node, version, ticket, out, teller)
                if options.command:
                    await execute(options.command, version, out, teller)
                if not options.follow:
                    break
                wanted = PolicyVersion(version + 1)
            await _pass_on(world, options.seed, teller)


async def _pass_on(world: World, seconds: float, teller: Teller) -> None:
    """Serve others for a while after all is here, and say so."""
    if seconds:
        words = f"passing on for {seconds:g} s more (Ctrl-C ends it)"
        teller.event("passing_on", words, seconds=seconds)
    await world.sleep(seconds)


async def _pull_some(
    node: CastNode, ticket: Ticket, selection: Selection, out: Path, teller: Teller
) -> None:
    """Fetch the selected files of the ticket's version."""
    with teller.bars():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_tell_coming, node, teller)
            manifest, index, weights = await node.shardcast.wait_selected(ticket.version)
            nursery.cancel_scope.cancel()
    _check_content(manifest, ticket)
    if not selection.files(index):
        raise ConfigError(f"no file of {ticket.name} matches {selection.pattern!r}")
    made = await trio.to_thread.run_sync(
        deliver, Path(node.world.disk.locate(weights)), index, out, ticket.name, selection
    )
    size = sum(index.files[number].size for number in selection.files(index))
    stats = node.shardcast.stats
    teller.event(
        "whole", f"{len(made)} of {len(index.files)} files    {out}, version {ticket.version},"
        f" {size / 1e6:,.1f} MB",
        version=ticket.version, path=str(out), files=len(made), bytes=size,
        from_origin=stats.from_origin, from_peers=stats.from_peers,
    )  # fmt: skip


async def _wait_whole(node: CastNode, wanted: PolicyVersion, teller: Teller) -> PolicyVersion:
    """Return the version that is whole here once it is ``wanted`` or newer."""
    with teller.bars():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_tell_coming, node, teller)
            version = await node.shardcast.wait_policy(wanted)
            nursery.cancel_scope.cancel()
    return version


async def _tell_coming(node: CastNode, teller: Teller) -> None:
    meter, due = Meter(node.world), node.world.now()
    while True:
        stats = node.shardcast.stats
        came = stats.from_origin + stats.from_peers
        version, total, here = _coming(node.shardcast)
        teller.state(
            CastState(
                total=total, here=here, rate=meter.rate(came), given=stats.uploaded_as_relay,
                members=node.others(), whole=len(node.whole(version)),
            )
        )  # fmt: skip
        due += teller.interval
        await node.world.sleep_until(due)


def _coming(shardcast: Shardcast) -> tuple[PolicyVersion, int, int]:
    """The version being fetched, its size in bytes, and how many of them are here."""
    fetching = shardcast.fetching
    if fetching is None:
        return PolicyVersion(0), 0, 0
    version, share = fetching
    size = shardcast.fetching_bytes
    return version, size, int(size * share)


def _check_content(manifest: Manifest, ticket: Ticket) -> None:
    """Raise `BadMessage` if the ticket's version is not what the ticket names."""
    if manifest.version == ticket.version and manifest.digest != ticket.manifest:
        raise BadMessage(
            "the pusher has signed another content under the ticket's version: ask for a new"
            " ticket"
        )


async def _hand_over(
    node: CastNode, version: PolicyVersion, ticket: Ticket, out: Path, teller: Teller
) -> None:
    manifest = node.shardcast.manifest(version)
    _check_content(manifest, ticket)
    with node.shardcast.pin(version) as weights:
        made = await trio.to_thread.run_sync(
            deliver, Path(node.world.disk.locate(weights)), node.shardcast.index(version), out,
            ticket.name,
        )  # fmt: skip
    where = out if ticket.is_folder else out / ticket.name
    stats = node.shardcast.stats
    teller.event(
        "whole", f"whole    {where}, version {version}, {manifest.size / 1e6:,.1f} MB",
        version=version, path=str(where), files=len(made), bytes=manifest.size,
        from_origin=stats.from_origin, from_peers=stats.from_peers,
    )  # fmt: skip
