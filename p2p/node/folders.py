"""The node that a command is about: that of the named folder, or one that runs here."""

from __future__ import annotations

import argparse
import datetime
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from p2p.errors import ConfigError
from p2p.machine import KEY
from p2p.node.usage import DATA, expanded, remark

SOCKET: Final = "api.sock"
"""File in a node's folder that is the socket for its owner."""
STARTED: Final = "started"
"""File in a node's folder with the command that last started it."""
_SOCKETS: Final = Path("/proc/net/unix")
"""Linux's list of sockets, in which the path is the last word of a line."""


def add_folder(parser: argparse.ArgumentParser, what: str = "a node's folder") -> None:
    """Add ``DIR`` and ``--data DIR``, which have the same meaning, to a command line."""
    parser.add_argument(
        "folder", nargs="?", type=Path, metavar="DIR",
        help=f"{what} (default: of the node that you run, or ~/.shoal)",
    )  # fmt: skip
    parser.add_argument("--data", type=Path, metavar="DIR", help="the same")


def named_folder(options: argparse.Namespace) -> Path | None:
    """Return the folder that a command line names, or None.

    Raises:
        ConfigError: It names two folders.
    """
    named = {expanded(one) for one in (options.folder, options.data) if one is not None}
    if len(named) > 1:
        raise ConfigError("DIR and --data DIR mean the same: name one")
    return next(iter(named), None)


def nodes_of(options: argparse.Namespace) -> list[Path]:
    """Return the folders of the nodes that a command applies to, a trainer's first. These are
    the nodes in the folder that the command line names, or else those that run.

    Raises:
        ConfigError: The command line names two folders.
    """
    named = named_folder(options)
    if named is None:
        return list(running()) or [expanded(DATA)]
    inside = [] if (named / KEY).exists() else [key.parent for key in named.glob(f"*/{KEY}")]
    answering = [place for place in inside if (place / SOCKET).exists()]
    return sorted(answering or inside, key=_order) or [named]


def node_of(options: argparse.Namespace) -> Path:
    """Return the folder of the one node that a command applies to. If there are several, return
    the first and print a note.

    Raises:
        ConfigError: The command line names two folders.
    """
    first, *others = nodes_of(options)
    if others:
        remark(f"this is {first}; there are {listed(others)} too")
    return first


def listed(folders: Sequence[Path]) -> str:
    """Return the first folders, as many as a person reads, and how many more there are."""
    rest = [f"{len(folders) - 4} more"] if len(folders) > 4 else []
    return ", ".join([*map(str, folders[:4]), *rest])


def _order(place: Path) -> tuple[bool, int, str]:
    return not place.name.startswith("trainer"), len(place.name), str(place)


def running() -> Iterator[Path]:
    """Yield the folders of this user's running nodes. Only Linux lists them."""
    with suppress(OSError):
        lines = _SOCKETS.read_text(errors="surrogateescape").splitlines()
        found = {Path(line.rpartition(" ")[2]) for line in lines if line.endswith(f"/{SOCKET}")}
        for path in sorted(found, key=lambda one: _order(one.parent)):
            with suppress(OSError):
                if path.is_absolute() and path.stat().st_uid == os.getuid():
                    yield path.parent


def why_silent(folder: Path) -> str:
    """Return a sentence that explains why no node answers in ``folder``, with the remedy."""
    if not folder.is_dir():
        return f"there is no folder {folder}: name that of a node"
    if not (folder / KEY).exists():
        return f"{folder} is no node's folder, and no node of yours runs: name its folder"
    try:
        wrote = (folder / "log").stat().st_mtime
        command = (folder / STARTED).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        is_made = (folder.parent / "run.shoal").exists()  # in the folder of a run's nodes
        start = f"shoal run start {folder.parent}" if is_made else f"shoal node --data {folder}"
        return f"the node of {folder} does not run: {start}"
    end = datetime.datetime.fromtimestamp(wrote, datetime.UTC).astimezone()
    return (
        f"the node of {folder} does not run (its log ends on {end:%d %b at %H:%M}); this starts"
        f" it: {command}"
    )
