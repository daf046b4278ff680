"""A run of one's own: ``shoal run init DIR`` and ``shoal run start DIR``.

Read `init` first: it makes the folder of a run, with a key for each node, a draft whose recipe
fits the model, and the signed run file. `drafts` writes that draft, or completes one that is
given; `layout` names what lies where. `play` starts every node of the folder on this machine,
shows how they get on, and ends them; started again they go on where they were.

`roles.run` reads the command line and calls in here; what the two commands need is imported
when one of them is called.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from p2p.node.usage import whole_number

MAX_NODES: Final = 64
"""Inference nodes that init makes: more than one machine plays, and others join by address."""


def add_arguments(commands: Any) -> None:
    """The two commands, and their options, among those of ``shoal run``."""
    init = commands.add_parser("init", help="make a run of your own: keys, draft, all nodes")
    init.add_argument("folder", type=Path, metavar="DIR", help="a new folder")
    init.add_argument(
        "--model",
        metavar="MODEL",
        help="smollm2, or a folder in Hugging Face's layout (default: a network that sorts)",
    )
    init.add_argument(
        "--env",
        action="append",
        metavar="NAME",
        help="where tasks come from, or NAME=FILE with questions; several are mixed",
    )
    init.add_argument(
        "--draft",
        type=Path,
        metavar="FILE",
        help="take this draft, and fill in the ids (instead of --model and --env)",
    )
    init.add_argument(
        "--nodes",
        type=whole_number(1, MAX_NODES),
        default=2,
        metavar="N",
        help="inference nodes (default 2)",
    )
    start = commands.add_parser("start", help="play all nodes of such a folder here")
    start.add_argument("folder", type=Path, metavar="DIR", help="what init made")


def _init(options: argparse.Namespace) -> int:
    from roles.own import init

    return init.main(options)


def _start(options: argparse.Namespace) -> int:
    from roles.own import play

    return play.main(options)


COMMANDS: Final[Mapping[str, Callable[[argparse.Namespace], int]]] = {
    "init": _init,
    "start": _start,
}
"""By name; each returns the exit code."""
