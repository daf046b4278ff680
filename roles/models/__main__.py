"""``shoal models fetch NAME`` and ``... inspect DIR``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from p2p.errors import ConfigError, ShoalError
from p2p.node.usage import (
    BEGINS_AGAIN,
    FAILED,
    WRONG_USAGE,
    CommandParser,
    complain,
    interruptible,
)
from roles.models import fetch, inspect


def main(argv: Sequence[str] | None = None) -> int:
    """Fetch a base model, or describe a model's folder.

    Returns 0, or with one sentence on standard error 1, or 2 if the command makes no sense.
    """
    return interruptible(partial(_main, argv), BEGINS_AGAIN)


def _main(argv: Sequence[str] | None) -> int:
    parser = CommandParser(prog="shoal models", description=main.__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module, purpose in (
        (fetch, "make the folder of a small base model (93 MB to download)"),
        (inspect, "look through a model's folder, and list its digests"),
    ):
        name = module.__name__.rpartition(".")[2]
        one = commands.add_parser(name, help=purpose, description=module.__doc__)
        module.add_arguments(one)
        one.set_defaults(run=module.run)
    options = parser.parse_args(argv)
    try:
        options.run(options)
    except ConfigError as error:
        complain(error)
        return WRONG_USAGE
    except ShoalError as error:
        complain(error)
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
