"""``shoal --print-completion bash|zsh``: what a shell offers behind ``shoal``, as a script.

Every command is asked for its parser, so a package's commands are completed as ours are if they
use `p2p.node.usage.CommandParser`. The script is data in a few ``case``s and a loop that finds
the command; zsh runs it by its own emulation of bash's completion.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from p2p.errors import ConfigError
from p2p.node.usage import ParserShown, showing_parsers

Command = Callable[[Sequence[str]], int]
"""As `p2p.node.commands` finds them."""
SHELLS: Final = ("bash", "zsh")
_SCRIPT: Final = """\
# Completion of shoal for bash and zsh, as shoal --print-completion makes it.
_shoal() {{
  local at="" next word offered="" current=${{COMP_WORDS[COMP_CWORD]}}
  local before=${{COMP_WORDS[COMP_CWORD-1]}}
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    next="${{at:+$at }}$word"
    case "$next" in
      {places}) at=$next ;;
    esac
  done
  case "$at $before" in
{values}
  esac
  case "$offered$current" in
    -*) case "$at" in
{options}
      esac ;;
    "$current") case "$at" in
{below}
      esac ;;
  esac
  COMPREPLY=($(compgen -W "$offered" -- "$current"))
}}
complete -o default -F _shoal shoal
"""
"""Where nothing is offered, the shell offers files."""


@dataclass(slots=True)
class Place:
    """A command, or the command line itself."""

    options: list[str] = field(default_factory=list)
    values: dict[str, list[str]] = field(default_factory=dict)
    """Of an option: what may follow it, if that is a list."""
    below: list[str] = field(default_factory=list)
    """Commands of it."""


def places(commands: Iterable[tuple[str, Command]]) -> dict[str, Place]:
    """What is completed where: by the words in front, such as ``run create``."""
    root = Place(["--help", "--print-completion", "--version"])
    root.values["--print-completion"] = list(SHELLS)
    found = {"": root}
    for name, command in commands:
        root.below.append(name)
        found[name] = Place(["--help"])
        parser = parser_of(command)
        if parser is not None:
            _note(parser, name, found)
    return found


def parser_of(command: Command) -> argparse.ArgumentParser | None:
    """The parser of a command; None if it uses another kind, which then prints its help."""
    with showing_parsers(), contextlib.redirect_stdout(io.StringIO()):
        try:
            command(["--help"])
        except ParserShown as shown:
            return shown.parser
        except (SystemExit, ConfigError):
            pass
    return None


def _note(parser: argparse.ArgumentParser, name: str, found: dict[str, Place]) -> None:
    place = found[name] = Place()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, below in action.choices.items():
                place.below.append(word)
                _note(below, f"{name} {word}", found)
        elif action.help != argparse.SUPPRESS:
            options = [one for one in action.option_strings if one.startswith("--")]
            place.options += options
            if action.choices:
                place.values |= {one: list(map(str, action.choices)) for one in options}


def script(shell: str, found: dict[str, Place]) -> str:
    """The completion of everything that was `found`."""
    text = _SCRIPT.format(
        places="|".join(shlex.quote(at) for at in found if at),
        values="\n".join(
            _case(f"{at} {option}", values)
            for at, place in found.items()
            for option, values in place.values.items()
        ),
        options="\n".join(_case(at, place.options) for at, place in found.items()),
        below="\n".join(_case(at, place.below) for at, place in found.items() if place.below),
    )
    emulation = "autoload -U +X bashcompinit && bashcompinit\n"
    return (emulation if shell == "zsh" else "") + text


def _case(at: str, offered: list[str]) -> str:
    return f"    {shlex.quote(at)}) offered={shlex.quote(' '.join(offered))} ;;"
