"""``shoal doctor [--bootstrap ADDR] [--run FILE] [--data DIR] [--port N] [--json]``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from p2p.errors import BadMessage, ConfigError
from p2p.node.folders import add_folder, named_folder, node_of
from p2p.node.rundoc import PATH
from p2p.node.usage import (
    BEGINS_AGAIN,
    DATA,
    FAILED,
    WRONG_USAGE,
    CommandParser,
    bootstrap_addr,
    complain,
    expanded,
    interruptible,
    patience,
    say,
    whole_number,
)
from roles.contract import decode_run_untrusted
from roles.contract.core.file import MAX_RUN
from roles.doctor.checks import Level, examine
from roles.doctor.sighting import look


def main(argv: Sequence[str] | None = None) -> int:
    """Check this machine, and name what it lacks for a node.

    Returns 0, 1 if a check fails, or 2 if the command makes no sense.
    """
    return interruptible(partial(_main, argv), BEGINS_AGAIN)


def _main(argv: Sequence[str] | None) -> int:
    parser = CommandParser(prog="shoal doctor", description=main.__doc__)
    add = parser.add_argument
    add("--run", type=Path, metavar="FILE", help="a signed run file: what it asks of a machine")
    add_folder(parser)
    add(
        "--port",
        type=whole_number(0, 65535),
        default=0,
        metavar="N",
        help="a TCP port to listen at",
    )
    add(
        "--bootstrap", action="append", type=bootstrap_addr, metavar="ADDR",
        help="a member to ask: whether it answers, its run, its clock, where it sees us",
    )  # fmt: skip
    add("--open", action="store_true", help="fail unless others can dial this machine")
    add("--json", action="store_true", help="a JSON list, for machines")
    options = parser.parse_args(argv)
    run = document = None
    try:
        # A run file asks about a node to come, and not about another that runs.
        new = named_folder(options) or expanded(DATA)
        folder = node_of(options) if options.run is None else new
        pinned = folder / PATH
        document = options.run or (pinned if pinned.exists() else None)
        if document is not None:
            with document.open("rb") as file:
                run = decode_run_untrusted(file.read(MAX_RUN + 1))
    except ConfigError as error:
        complain(error)
        return WRONG_USAGE
    except (OSError, BadMessage) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        complain(f"the run file {document} cannot be used: {reason}")
        return WRONG_USAGE
    peers = options.bootstrap or ()
    with patience(f"looks at this machine, and asks {len(peers)} peers"):
        seen = look(
            folder,
            port=options.port,
            run=run,
            document=document,
            bootstrap=peers,
            is_open=options.open,
        )
    findings = examine(seen)
    if options.json:
        say(json.dumps([{**asdict(one), "level": one.level.value} for one in findings]))
    for one in () if options.json else findings:
        say(f"{one.level.value:<6}{one.name:<12}{one.seen}")
        if one.remedy:
            say(f"{'':<18}-> {one.remedy}")
    return FAILED if any(one.level is Level.FAIL for one in findings) else 0
