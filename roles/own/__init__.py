"""A run of one's own: ``shoal run init DIR``, ``start DIR`` and ``report DIR``.

Read `init` first: it makes the folder of a run, with a key for each node, a draft whose recipe
fits the model, and the signed run file. `drafts` writes that draft, or completes one that is
given; `trial` sends a task the whole way of a node's work before anything is signed; `layout`
names what lies where. `play` starts every node of the folder on this machine; started again
they go on where they were. `nodes` are their processes, `status` sums up what these say, `view`
draws that, and `stage` shows it in a terminal and on a page, and ends all in order. Of a run
that pre-trains, `pretraining` writes the draft and `rounds` is what people see. `report`
writes the page of a run as one file, `export` its model as a folder and `rollouts` its answers
as a file. `tables` reads other people's files of questions, chats and text, and `sft` teaches a
model by such a file before a run. `envs` is ``shoal envs check``: what an environment pays,
tried before a run is made of it; `filter` keeps the tasks that a model solves sometimes.
`pending` says what is edited and not yet in force.

``shoal run create`` signs a draft, which `draft` reads; `people` changes who is in a run, and
`editions` sees to it that no key signs two texts of one epoch.

What the commands need is imported when one of them is called.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from p2p.node.folders import add_folder
from p2p.node.usage import host_port, whole_number

MAX_NODES: Final = 64
"""Inference nodes that init makes: more than one machine plays, and others join by address."""


def add_arguments(commands: Any) -> None:
    """Add the commands and their options to those of ``shoal run``."""
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
        metavar="N",
        help="inference nodes (default 2); with --diloco trainers (default 3)",
    )
    init.add_argument(
        "--diloco",
        action="store_true",
        help="pre-train on text instead: several trainers average their updates now and then",
    )
    init.add_argument(
        "--corpus",
        action="append",
        metavar="PATH",
        help="text for --diloco, or NAME=PATH: a file or a folder of .txt, .md, .rst, .py,"
        " .jsonl or .parquet; several are mixed (default: the library of this Python)",
    )
    start = commands.add_parser("start", help="play all nodes of such a folder here")
    start.add_argument("folder", type=Path, metavar="DIR", help="what init made")
    add_dashboard(start)
    report = commands.add_parser("report", help="write the page of a run as one file")
    add_folder(report, "of a node, or of several")
    report.add_argument(
        "-o", dest="out", type=Path, metavar="FILE", help="(report.html in the folder)"
    )
    export = commands.add_parser(
        "export", help="write a run's model as a folder, or its answers as a file"
    )
    export.add_argument("folder", type=Path, metavar="DIR", help="of a run or node")
    export.add_argument("--policy", type=whole_number(0, 2**53), metavar="N",
                        help="(the newest)")  # fmt: skip
    export.add_argument(
        "--adapter",
        action="store_true",
        help="what [lora] has learnt, as a folder that PEFT opens",
    )
    export.add_argument("-o", dest="out", type=Path, metavar="FOLDER", required=True,
                        help="a new folder; or answers.parquet, traces.jsonl")  # fmt: skip


def add_dashboard(command: argparse.ArgumentParser) -> None:
    """Add the option that shows a run's page."""
    command.add_argument(
        "--dashboard",
        type=host_port,
        metavar="HOST:PORT",
        default=("127.0.0.1", 0),
        help="show the run's page there (default 127.0.0.1, at a free port)",
    )


def _init(options: argparse.Namespace) -> int:
    from roles.own import init

    return init.main(options)


def _start(options: argparse.Namespace) -> int:
    from roles.own import play

    return play.main(options)


def _report(options: argparse.Namespace) -> int:
    from roles.own import report

    return report.main(options)


def _export(options: argparse.Namespace) -> int:
    from roles.own import export

    return export.main(options)


COMMANDS: Final[Mapping[str, Callable[[argparse.Namespace], int]]] = {
    "init": _init,
    "start": _start,
    "report": _report,
    "export": _export,
}
"""Maps each command to its function, which returns the exit code."""
