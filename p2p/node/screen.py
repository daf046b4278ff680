"""What a person sees of a node that runs: facts in, lines out.

Pure: `p2p.node.live` writes the lines. On a terminal they are a block that is redrawn; a fact
that is too long goes on below, indented, and what a low terminal has no room for is left out
from the end. Elsewhere they are one line, which is read in a journal.
"""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from p2p.node.role import Fact, Progress

WIDEST: Final = 80
"""Columns of the block, however wide the terminal is: longer lines are hard to read."""
LABEL: Final = 9
"""Columns of a label and the gap behind it, as in what a node prints when it starts."""
NARROW: Final = 40
"""Columns below which labels stand in the text, since nine of 30 are too many."""
LONGEST: Final = 3
"""Lines of one fact: a peer's reasons must not push the others off the screen."""
ASCII: Final = str.maketrans(
    {"…": "...", "→": "->", "·": "-", "–": "-", "—": "-", "×": "x", "≤": "<="}
)
"""What stands for a sign where the terminal has no more than ASCII."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What there is to tell of one node."""

    policy: str
    """The newest that is whole here, and what is known of newer ones."""
    peers: int
    clock: str = ""
    """What is wrong with this machine's clock; empty if nothing is known to be."""
    roles: tuple[Progress, ...] = ()

    @property
    def facts(self) -> Iterator[Fact]:
        """What the roles do now, the policy, what they did."""
        head, rest = [], []
        for progress in self.roles:
            head += list(progress.facts[:1])
            rest += list(progress.facts[1:])
        peers = "1 peer" if self.peers == 1 else f"{self.peers:,} peers"
        yield from head
        yield Fact("policy", f"{self.policy}; {peers}")
        if self.clock:
            yield Fact("clock", self.clock)
        yield from rest


def block(scene: Scene, columns: int, rows: int, encoding: str = "utf-8") -> list[str]:
    """The lines for a terminal of ``columns`` and ``rows``, none of which wraps."""
    width = max(8, min(columns - 1, WIDEST))  # in the last column some terminals wrap
    lines = [one for fact in scene.facts for one in _wrapped(fact, width, encoding)]
    return lines[: max(1, rows - 1)]


def _wrapped(fact: Fact, width: int, encoding: str) -> Iterator[str]:
    text = _in_cells(shown(fact.text, encoding))
    is_narrow = width < NARROW
    first = f"{fact.label}: " if is_narrow else fact.label.ljust(LABEL)
    indent = "  " if is_narrow else " " * LABEL
    folded = textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=indent,
        max_lines=LONGEST,
        placeholder=" ...",
    )
    yield from (one[:width] for one in folded)


def _in_cells(text: str) -> str:
    """``text`` with one sign in each column. A sign of two columns, or of none, would make more
    rows of a line than are taken away before the next; our own words have none."""
    return "".join(
        "?"
        if unicodedata.east_asian_width(sign) in "WF" or unicodedata.combining(sign)
        else sign
        for sign in unicodedata.normalize("NFC", text)
    )


def line(scene: Scene, encoding: str = "utf-8") -> str:
    """All of it in one line, for a pipe or a journal."""
    return shown("   ".join(f"{fact.label} {fact.text}" for fact in scene.facts), encoding)


def shown(text: str, encoding: str) -> str:
    """``text`` in what ``encoding`` has, and nothing in it that moves a cursor."""
    plain = "".join(sign if sign.isprintable() else "?" for sign in text)
    try:
        plain.encode(encoding)
    except UnicodeEncodeError:
        plain = plain.translate(ASCII)
    except LookupError:
        encoding = "ascii"
    return plain.encode(encoding, "replace").decode(encoding)


def height(lines: Sequence[str], columns: int) -> int:
    """Rows that these take on a terminal which may have become narrower since."""
    return sum(max(1, -(-len(one) // max(1, columns))) for one in lines)


def redraw(lines: Sequence[str], before: int) -> str:
    """What replaces a block of ``before`` lines by this one; the cursor stays at its end."""
    return erase(before) + "\n".join(lines)


def erase(before: int) -> str:
    """What takes a block of ``before`` lines away (ECMA-48: CUU, ED)."""
    up = f"\x1b[{before - 1}A" if before > 1 else ""
    return f"\r{up}\x1b[J" if before else ""
