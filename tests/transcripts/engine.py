"""The format of transcripts: steps of a command, a line of four dashes, and what came out.

    # Comments and blank lines stand between steps and are kept.
    connect bob
    ----
    send bob: subscribe news

A step's command is one or more lines, each given to the player in turn. The expected output ends at the
first blank line. A command that has no effect prints ``(nothing)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

HERE = Path(__file__).parent
DASHES = "----"
NOTHING = "(nothing)"


class Player(Protocol):
    """One core that is given a transcript's commands."""

    def do(self, line: str) -> list[str]:
        """Carry out one command; returns the effects and what changed, a line each."""
        ...


@dataclass
class Step:
    """One command and its output. ``head``: the comments and blank lines before it."""

    head: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    output: list[str] = field(default_factory=list)


def parse(text: str) -> Iterator[Step]:
    """The steps of a transcript; comments after the last one are a step without commands."""
    step = Step()
    lines = iter(text.splitlines())
    for line in lines:
        if line == DASHES:
            for out in lines:
                if not out:
                    break
                step.output.append(out)
            yield step
            step = Step()
        elif step.commands or (line and not line.startswith("#")):
            step.commands.append(line)
        else:
            step.head.append(line)
    if step.commands:
        raise ValueError(f"no {DASHES} after {step.commands}")
    yield step


def play(text: str, player: Player) -> str:
    """The transcript with the output that ``player`` gives."""
    lines: list[str] = []
    for step in parse(text):
        lines += step.head + step.commands
        if step.commands:
            output = [out for command in step.commands for out in player.do(command)]
            lines += [DASHES, *(output or [NOTHING]), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def transcripts() -> list[Path]:
    """All transcript files."""
    return sorted(HERE.glob("*/*.txt"))


def player_of(path: Path, players: dict[str, Callable[[], Player]]) -> Player:
    """A new player for the protocol whose folder ``path`` is in."""
    return players[path.parent.name]()


def changes(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """The lines of state that differ, for players that show what an event has changed."""
    return [
        f"  {name}: {after.get(name, 'gone')}"
        for name in dict.fromkeys((*before, *after))
        if before.get(name) != after.get(name)
    ]
