"""``shoal serve``: sign what lies at a path and offer it over HTTP, without a swarm."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import trio

from p2p.cast.commands.line import run_command
from p2p.cast.commands.source import (
    Changes,
    existing,
    join_secret,
    mounted,
    state_of,
)
from p2p.cast.ticket import run_of
from p2p.cast.view import Teller
from p2p.node.process import locked_folder, until_told_to_end
from p2p.node.usage import CommandParser, host_port
from p2p.shardcast import ShardcastConfig
from p2p.shardcast.publisher import publish_alone


def serve(argv: Sequence[str]) -> int:
    """See `p2p.cast.serve`."""
    return run_command(lambda: _serve(_options(argv)))


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(
        prog="shoal serve",
        description="Offer a file or folder over HTTP: curl resumes, caches keep it, and"
        " shardcast-client takes it as v1.",
    )
    parser.add_argument("path", type=Path, help="a file or a folder; hidden names stay out")
    parser.add_argument("--http", default="0.0.0.0:8000", metavar="HOST:PORT", type=host_port,
                        help="where to listen (default: %(default)s)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    return parser.parse_args(argv)


async def _serve(options: argparse.Namespace) -> int:
    from p2p.cast.commands.edge import serving
    from p2p.shardcast.http.library import Shelf, release_of

    path = existing(options.path)
    state, teller = state_of(path), Teller(path.name, as_json=options.json)
    changes = Changes("run serve again", teller, path.name if path.is_file() else "")
    shelf = Shelf()
    with locked_folder(state, "shoal push or serve", "end that one: push --http does both"):
        async with (
            until_told_to_end() as ending,
            mounted(state, path) as (world, source),
        ):
            run = run_of(world.signer.peer_id, await join_secret(world))
            config = ShardcastConfig(keep_versions=1)
            async with AsyncExitStack() as stack:
                with teller.patience(world, "reading", f"reading  {path}"):
                    entry = await stack.enter_async_context(
                        publish_alone(world, config, run, source)
                    )
                shelf.add(release_of(entry.manifest, entry.index, entry.weights))
                async with serving(world, shelf, options.http, teller, changes.tell):
                    await trio.sleep_forever()
    teller.event("ended", "ended    the same command line goes on")
    return ending.code
