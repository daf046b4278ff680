"""``shoal pull http://...``: take versions of servers that speak shardcast 0.3.2, or ours."""

from __future__ import annotations

import argparse
from contextlib import AsyncExitStack
from pathlib import Path

from p2p.cast.commands.edge import serving
from p2p.cast.commands.line import execute
from p2p.cast.view import Teller
from p2p.machine import open_world
from p2p.node.process import locked_folder, until_told_to_end
from p2p.policy import NO_POLICY
from p2p.shardcast.http.follow import Follower
from p2p.shardcast.http.library import Shelf
from p2p.shardcast.http.mirrors import open_mirrors


async def follow(options: argparse.Namespace, out: Path, state: Path) -> None:
    """Put each newest version into ``out``; with ``--http``, offer them as well."""
    teller = Teller("pull", as_json=options.json)
    shelf, known = Shelf(), NO_POLICY
    with locked_folder(state):
        async with AsyncExitStack() as stack:
            enter = stack.enter_async_context
            await enter(until_told_to_end(with_parent=False))
            world = await enter(open_world(state, mounts={"out": out}))
            mirrors = await enter(open_mirrors(world, options.ticket.split(",")))
            if options.http is not None:
                await enter(serving(world, shelf, options.http, teller))
            follower = Follower(world, mirrors, "out")
            while True:
                release = await follower.wait_newer(known)
                shelf.add(release)
                known = release.version
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
            await world.sleep(options.seed)
