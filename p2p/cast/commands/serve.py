"""``shoal serve``: sign what lies at a path and offer it over HTTP, without a swarm."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import trio

from p2p.cast.commands.line import run_command
from p2p.cast.commands.source import existing, join_secret, mounted, state_of
from p2p.cast.ticket import run_of
from p2p.cast.view import Teller
from p2p.node.process import locked_folder, until_told_to_end
from p2p.node.usage import CommandParser, host_port
from p2p.shardcast import ShardcastConfig
from p2p.shardcast.publisher import publish_alone


def serve(argv: Sequence[str]) -> int:
    """See `p2p.cast.serve`."""
    parser = CommandParser(
        prog="shoal serve",
        description="Offer a file or folder over HTTP: curl resumes, caches keep it, and"
        " shardcast-client takes it as v1.",
    )
    parser.add_argument("path", type=Path, help="a file or a folder; hidden names stay out")
    parser.add_argument("--http", default="0.0.0.0:8000", metavar="HOST:PORT", type=host_port,
                        help="where to listen (default: %(default)s)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    return run_command(partial(_serve, parser.parse_args(argv)))


async def _serve(options: argparse.Namespace) -> None:
    from p2p.cast.commands.edge import serving
    from p2p.shardcast.http.library import Shelf, release_of

    path = existing(options.path)
    state, teller = state_of(path), Teller(path.name, as_json=options.json)
    shelf = Shelf()
    with locked_folder(state):
        async with (
            until_told_to_end(with_parent=False),
            mounted(state, path) as (world, source),
        ):
            run = run_of(world.signer.peer_id, await join_secret(world))
            config = ShardcastConfig(keep_versions=1)
            async with publish_alone(world, config, run, source) as entry:
                shelf.add(release_of(entry.manifest, entry.index, entry.weights))
                async with serving(world, shelf, options.http, teller):
                    await trio.sleep_forever()
