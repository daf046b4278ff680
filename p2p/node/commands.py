"""The command line ``shoal``: it finds a command, and imports nothing that only others need.

Most of what ``shoal pull --help`` costs is imports: a node's would make it a third more.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from typing import Final, cast

from p2p.errors import ConfigError
from p2p.node.entries import installed, load
from p2p.node.usage import WRONG_USAGE, did_you_mean, interruptible, say

COMMANDS: Final = "shoal.commands"

Command = Callable[[Sequence[str]], int]
"""Function that takes the arguments after its name and returns the exit code. The first line of
its docstring is its help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``shoal COMMAND ...``, a command of the entry point group ``shoal.commands``."""
    return interruptible(partial(_main, sys.argv[1:] if argv is None else list(argv)))


def _main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in {"-h", "--help"}:
        lines = [f"  {name:10} {summary}" for name, summary in command_summaries()]
        say("usage: shoal COMMAND ... | --version\n")
        say("Strangers train one model together, peer to peer.\n")
        say("\n".join([*lines, "", "Each explains itself: shoal COMMAND --help."]))
        return 0 if arguments else WRONG_USAGE
    if arguments[0] == "--version":
        say(f"shoal {version('shoal')}")
        return 0
    return load_command(arguments[0])(arguments[1:])


def load_command(name: str) -> Command:
    """Load the command called ``name``.

    Raises:
        ConfigError: The command is not installed or cannot be loaded.
    """
    found = installed(COMMANDS)
    if name not in found:
        is_option = name.startswith("-")
        known = ["--help", "--version"] if is_option else command_names()
        if name in {"init", "start", "report"}:
            known = [f"run {name}"]
        kind = "option" if is_option else "command"
        raise ConfigError(f"there is no {kind} {name!r}; {did_you_mean(name, known)}")
    return cast(Command, load(found[name].value, name, "command"))


def command_names() -> list[str]:
    """Return the names of all installed commands, sorted."""
    return sorted(installed(COMMANDS))


def command_summaries() -> list[tuple[str, str]]:
    """Return each command with the first line of its docstring, or with the reason why it
    cannot be loaded."""
    found = []
    for name in command_names():
        try:
            text = inspect.getdoc(load_command(name)) or ""
            summary = text.partition("\n")[0].replace("``", "")
        except ConfigError as error:
            summary = f"({error})"
        found.append((name, summary))
    return found
