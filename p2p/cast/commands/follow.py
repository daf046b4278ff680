"""``shoal pull http://...``: take versions of servers that speak shardcast 0.3.2, or ours."""

from __future__ import annotations

import argparse
from contextlib import AsyncExitStack
from pathlib import Path

import trio

from p2p.cast.commands.edge import serving
from p2p.cast.commands.line import execute, pass_on
from p2p.cast.commands.source import Changes
from p2p.cast.view import Teller
from p2p.machine import open_world
from p2p.node.process import locked_folder, until_told_to_end
from p2p.node.usage import SOON
from p2p.policy import NO_POLICY
from p2p.shardcast.http.follow import Follower
from p2p.shardcast.http.library import Shelf
from p2p.shardcast.http.mirrors import open_mirrors
from p2p.world import World


async def follow(options: argparse.Namespace, out: Path, state: Path) -> int:
    """Put each newest version into ``out``; with ``--http``, offer them as well."""
    teller = Teller("pull", as_json=options.json)
    changes = Changes("run pull again", teller)
    shelf, known = Shelf(), NO_POLICY
    with locked_folder(state, "shoal pull", "give this one its own --out"):
        async with AsyncExitStack() as stack:
            enter = stack.enter_async_context
            ending = await enter(until_told_to_end(is_done=False))
            world = await enter(open_world(state, mounts={"out": out}))
            mirrors = await enter(open_mirrors(world, options.ticket.split(",")))
            if options.http is not None:
                await enter(serving(world, shelf, options.http, teller, changes.tell))
            follower = Follower(world, mirrors, "out")
            while True:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_tell, world, follower, teller)
                    release = await follower.wait_newer(known)
                    nursery.cancel_scope.cancel()
                shelf.add(release)
                known, ending.is_done = release.version, True
                [(name, size)] = release.files
                teller.event(
                    "whole", f"whole    {out / name}, version {known}, {size / 1e6:,.1f} MB"
                    " (no trainer signed it)",
                    version=known, path=str(out / name), bytes=size,
                )  # fmt: skip
                if options.command:
                    await execute(options.command, known, out / name, teller)
                if not options.follow:
                    break
            if options.http is not None:
                await pass_on(world, options.seed, teller)
    if ending.signal:
        said = f"version {known} is here" if known != NO_POLICY else "nothing is here yet"
        teller.event("ended", f"ended    {said}; the same command line begins with the newest")
    return ending.code


async def _tell(world: World, follower: Follower, teller: Teller) -> None:
    """Say how it gets on, and what it waits for, whenever that has changed or bytes come."""
    said, due = "", world.now()
    while True:
        due += SOON
        await world.sleep_until(due)
        if follower.says != said:
            said = follower.says
            teller.event("progress", said, waits_for=said)
