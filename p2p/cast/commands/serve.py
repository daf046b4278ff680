"""``shoal serve``: sign what lies at a path and offer it over HTTP, without a swarm."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import trio

from p2p.cast.commands.line import host_port, run_command
from p2p.cast.commands.source import existing, join_secret, mounted, publish_next, state_of
from p2p.cast.ticket import run_of
from p2p.cast.view import Teller
from p2p.node.process import locked_folder, until_told_to_end
from p2p.policy import PolicyVersion
from p2p.shardcast import NO_POLICY, ShardcastConfig
from p2p.shardcast.core.statements import Statements
from p2p.shardcast.publisher import PolicyPublisher
from p2p.shardcast.store import PolicyStore
from p2p.shardcast.stored import StoredPolicy
from p2p.world import World


def serve(argv: Sequence[str]) -> int:
    """See `p2p.cast.serve`."""
    parser = argparse.ArgumentParser(
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
            store = PolicyStore(world, ShardcastConfig(keep_versions=1), run)
            with store.holding():
                entry = await _signed(world, store, run, source)
                shelf.add(release_of(entry.manifest, entry.index, entry.weights))
                async with serving(world, shelf, options.http, teller):
                    await trio.sleep_forever()


async def _signed(world: World, store: PolicyStore, run: bytes, source: str) -> StoredPolicy:
    """What lies at ``source``, as the version that a push of it has, or would have."""
    await store.load()
    statements = Statements(run, world.signer.peer_id.__eq__, world.verify)
    publisher = PolicyPublisher(
        world, ShardcastConfig(keep_versions=1), run, statements, store, tuple, tuple
    )

    async def publish(version: PolicyVersion) -> PolicyVersion:
        await publisher.prepare(version, source, lambda: store.newest_own)
        return version

    last = store.newest_own
    version = await publish_next(publish, last.version if last is not None else NO_POLICY)
    await store.prune()
    entry = store.stored(version)
    assert entry is not None, "it was just published"
    return entry
