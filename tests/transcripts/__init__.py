"""Protocols as transcripts: events in, effects out, state after, as text that a stranger reads
first.

A transcript is a text file in the manner of etcd/raft's testdata. It holds comments (``#``),
steps (``> command arguments``) and, below each step, what came of it:

    # A root dies with a chunk that it has not passed on.
    > lose bob
    origin: bob is lost
      -> ann: chunk 1 of v1, stripe 0

The folder names the player, which makes real cores, gives them the events that a step stands
for, and writes down their effects and their state. `python -m tests.transcripts --write` renews
the output of every step and leaves comments and steps as they are; the difference is for a
person to read before it is committed. A test plays all of them. What is the same for several
nodes in a row stands once, with all their names.

A further protocol needs one module in `tests/transcripts/players` with a class that is
registered with `player`, and a folder of that name with texts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import groupby
from pathlib import Path
from pkgutil import iter_modules
from typing import Final, Protocol

HERE: Final = Path(__file__).parent
STEP: Final = "> "
COMMENT: Final = "#"
SENT: Final = re.compile(r"(  -> |  \w+ to |send )(\w+): (.*)")
"""A message that is sent: how the line begins, the receiver, the words."""
TOLD: Final = re.compile(r"(= |  |)(\w+): (.*)")
"""What happens at a node, or its state: how the line begins, the node, the words."""


class Player(Protocol):
    """One play of one transcript: made anew for each."""

    def play(self, command: str, args: list[str]) -> Iterator[str]:
        """Carry out a step; gives the lines to be written below it. Raise `ValueError` if
        unknown.
        """
        ...


PLAYERS: Final[dict[str, Callable[[], Player]]] = {}


def player(folder: str) -> Callable[[type], type]:
    """Register a class as the player of the transcripts in ``folder``."""

    def register(kind: type) -> type:
        PLAYERS[folder] = kind
        return kind

    return register


def load_players() -> None:
    """Import every module of `tests.transcripts.players`, which registers its player."""
    for module in iter_modules([str(HERE / "players")]):
        import_module(f"tests.transcripts.players.{module.name}")


@dataclass(frozen=True)
class Part:
    """A comment or blank line as it stands, or a step and what came of it."""

    head: str
    output: tuple[str, ...] = ()

    @property
    def step(self) -> list[str]:
        """The words of a step; none if this is no step."""
        return self.head.removeprefix(STEP).split() if self.head.startswith(STEP) else []

    def __str__(self) -> str:
        return "\n".join((self.head, *self.output))


def parse(text: str) -> list[Part]:
    """The parts of a transcript. Raise `ValueError` for output that stands below no step."""
    parts: list[Part] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line or line.startswith((STEP, COMMENT)):
            parts.append(Part(line))
        elif parts and parts[-1].step:
            parts[-1] = replace(parts[-1], output=(*parts[-1].output, line))
        else:
            raise ValueError(
                f"line {number} is no comment, no step and below no step: {line!r}"
            )
    return parts


def play(text: str, performer: Player) -> str:
    """The transcript as it comes out now."""
    parts = []
    for part in parse(text):
        if part.step:
            command, *args = part.step
            output = tuple(gathered(performer.play(command, args)))
            wrong = [line for line in output if not line or line.startswith((STEP, COMMENT))]
            if wrong:
                raise ValueError(f"{part.head}: not a line of output: {wrong[0]!r}")
            part = replace(part, output=output)
        parts.append(part)
    return "\n".join(str(part) for part in parts) + "\n"


def gathered(lines: Iterable[str]) -> Iterator[str]:
    """Give one line for all nodes of which the same is told in a row."""
    blocks: list[list[str]] = []
    for line in _of_all_receivers(lines):
        if line.startswith("  ") and blocks and not TOLD.fullmatch(line):
            blocks[-1].append(line)
        else:
            blocks.append([line])

    def told(block: list[str]) -> object:
        found = TOLD.fullmatch(block[0])
        return block if found is None else (found[1], found[3], block[1:])

    for _, same in groupby(blocks, told):
        first, *others = same
        if others:
            names = [block[0].split(":")[0].split()[-1] for block in others]
            first[0] = first[0].replace(":", f" {' '.join(names)}:", 1)
        yield from first


def _of_all_receivers(lines: Iterable[str]) -> Iterator[str]:
    """Give one line for all that a node sends in a row to receivers that get the same."""

    def way(line: str) -> str:
        found = SENT.fullmatch(line)
        return line if found is None else found[1]

    for start, run in groupby(lines, way):
        words: dict[str, list[str]] = {}
        for line in run:
            if found := SENT.fullmatch(line):
                words.setdefault(found[2], []).append(found[3])
            else:
                yield line
        receivers: dict[str, list[str]] = {}
        for name, messages in words.items():
            receivers.setdefault("; ".join(messages), []).append(name)
        for text, names in receivers.items():
            yield f"{start}{' '.join(names)}: {text}"


def changes(before: dict[str, str], after: dict[str, str]) -> Iterator[str]:
    """The lines of state that differ, for players that show what a step has changed."""
    for name in dict.fromkeys((*before, *after)):
        if before.get(name) != after.get(name):
            yield f"  {name}: {after.get(name, 'gone')}"


def transcripts() -> list[Path]:
    """Every transcript whose player is registered."""
    load_players()
    return sorted(path for folder in PLAYERS for path in (HERE / folder).glob("*.txt"))


def play_file(path: Path) -> str:
    """One file as it comes out now."""
    return play(path.read_text(encoding="utf-8"), PLAYERS[path.parent.name]())
