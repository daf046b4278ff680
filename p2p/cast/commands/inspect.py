"""``shoal inspect``: say what a ticket names, or what a push of a path would send."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from p2p.cast.commands.line import run_command, ticket_of
from p2p.cast.commands.source import existing, mounted
from p2p.cast.ticket import PREFIX
from p2p.node.usage import CommandParser, say
from p2p.shardcast import ShardcastConfig
from p2p.shardcast.publisher import Digester
from p2p.shardcast.store import Cores


def inspect(argv: Sequence[str]) -> int:
    """See `p2p.cast.inspect`."""
    return run_command(lambda: _inspect(_options(argv)))


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(
        prog="shoal inspect", description="Say what a ticket, a file or a folder holds."
    )
    parser.add_argument("thing", help="a ticket, or a path")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    return parser.parse_args(argv)


async def _inspect(options: argparse.Namespace) -> int:
    if options.thing.startswith(PREFIX):
        said = _named(options.thing)
    else:
        said = await _contents(existing(Path(options.thing)))
    if options.json:
        say(json.dumps(said))
        return 0
    for name, value in said.items():
        lines = value if isinstance(value, list) else [value]
        for line in lines:
            say(f"{name:10} {line}")
    return 0


def _named(text: str) -> dict[str, Any]:
    """Describe what a ticket names."""
    ticket = ticket_of(text)
    return {
        "pusher": str(ticket.pusher),
        "addresses": [str(addr) for addr in ticket.addrs],
        "name": ticket.name + ("/" if ticket.is_folder else ""),
        "version": ticket.version,
        "manifest": ticket.manifest.hex(),
        "run": ticket.run.hex(),
    }


async def _contents(path: Path) -> dict[str, Any]:
    """Describe what a push of ``path`` would send."""
    with tempfile.TemporaryDirectory(prefix="shoal-") as state:
        async with mounted(Path(state), path) as (world, source):
            index = (
                await Digester(world, ShardcastConfig(), Cores(world)).digest(source)
            ).index
    return {
        "files": [f"{file.size:>14,}  {file.path or path.name}" for file in index.files],
        "bytes": index.size,
        "spans": len(index),
        "digest": index.digest.hex(),
    }
