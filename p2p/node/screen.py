"""The screen that tells a person how a node is getting on.

On a terminal it is a block of lines at its end, redrawn every second; whatever else is said
goes above it. Elsewhere (a pipe, a file, a service manager's journal) it is a line a minute:
1,440 a day are read, 86,400 are not. A line also comes at once when a role has nothing left to
do, and when the node ends.

A fact that is too long goes on below, indented, and what a low terminal has no room for is
left out from the end.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import sys
import textwrap
import threading
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import trio

from p2p.naming import printable
from p2p.node.node import Node
from p2p.node.process import is_terminal
from p2p.node.role import Fact, Progress, Reporter, Role
from p2p.node.usage import tell


def facts_of(
    policy: str, peers: int, clock: str = "", roles: Sequence[Progress] = ()
) -> list[Fact]:
    """Return what the screen shows, in order: the first fact of each role, the policy with the
    number of peers, a problem of the clock, and the rest of the roles' facts."""
    told = [Fact("policy", f"{policy}; {peers:,} peer{'s' * (peers != 1)}")]
    told += [Fact("clock", clock)] if clock else []
    return [
        *(fact for one in roles for fact in one.facts[:1]),
        *told,
        *(fact for one in roles for fact in one.facts[1:]),
    ]


def block(facts: Sequence[Fact], columns: int, rows: int, encoding: str = "utf-8") -> list[str]:
    """Return the lines for a terminal of ``columns`` and ``rows``, none of which wraps."""
    # In the last column some terminals wrap, and lines of more than 80 are hard to read.
    width = max(8, min(columns - 1, 80))
    lines = [one for fact in facts for one in _wrapped(fact, width, encoding)]
    return lines[: max(1, rows - 1)]


def _wrapped(fact: Fact, width: int, encoding: str) -> Iterator[str]:
    text = _in_cells(shown(fact.text, encoding))
    # Columns below which labels stand in the text, since nine of 30 are too many.
    is_narrow = width < 40
    first = f"{fact.label}: " if is_narrow else fact.label.ljust(9)  # as when a node starts
    indent = "  " if is_narrow else " " * 9
    # Maximum lines of one fact, so that a peer's reasons cannot push other facts off the
    # screen.
    folded = textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=indent,
        max_lines=3,
        placeholder=" ...",
    )
    yield from (one[:width] for one in folded)


def _in_cells(text: str) -> str:
    """Return ``text`` with one column for each character. Characters of two columns, or of
    none, become ``?``: they would add rows that the next redraw does not remove."""
    return "".join(
        "?"
        if unicodedata.east_asian_width(sign) in "WF" or unicodedata.combining(sign)
        else sign
        for sign in unicodedata.normalize("NFC", text)
    )


def line(facts: Sequence[Fact], encoding: str = "utf-8") -> str:
    """Return the state as one line, for a pipe or a journal."""
    return shown("   ".join(f"{fact.label} {fact.text}" for fact in facts), encoding)


def shown(text: str, encoding: str) -> str:
    """Return ``text`` in the characters of ``encoding``, without any that could move the
    cursor."""
    plain = printable(text)
    try:
        plain.encode(encoding)
    except UnicodeEncodeError:
        for sign, plainer in zip("…→·–—×≤", ("...", "->", *"---x", "<="), strict=True):
            plain = plain.replace(sign, plainer)
    except LookupError:
        encoding = "ascii"
    return plain.encode(encoding, "replace").decode(encoding)


def height(lines: Sequence[str], columns: int) -> int:
    """Return the rows that ``lines`` take on a terminal that may have become narrower."""
    return sum(max(1, -(-len(one) // max(1, columns))) for one in lines)


def erase(before: int) -> str:
    """Return the text that removes a block of ``before`` lines (ECMA-48: CUU, ED)."""
    up = f"\x1b[{before - 1}A" if before > 1 else ""
    return f"\r{up}\x1b[J" if before else ""


ENDED: Final = "the same command line goes on where this node was"
"""Last line on a terminal."""


def facts_about(node: Node, roles: Sequence[Role]) -> list[Fact]:
    """Return the state of ``node`` for the screen."""
    newest, run = int(node.shardcast.newest), node.run.id
    policy = f"{newest}" if newest >= 0 else "none yet"
    coming = node.shardcast.fetching
    if coming is not None and coming.manifest.version > newest:
        policy += f", {coming.share:.0%} of {coming.manifest.version}"
    members = (member for member in node.membership.members() if member.run == run)
    ahead = max((member.policy for member in members), default=-1)
    policy += f" (the swarm has {ahead})" if ahead > newest else ""
    told = progress_of(node, roles)
    return facts_of(policy, node.membership.size, node.clocks.trouble, told)


def progress_of(node: Node, roles: Sequence[Role]) -> list[Progress]:
    """Return the progress of all roles that report it."""
    asked = (
        node.guard.ask(role, "progress", role.progress, Progress)[0]
        for role in roles
        if isinstance(role, Reporter)
    )
    return [one for one in asked if one is not None]


class Terminal:
    """Standard output with the block at its end. Warnings are written from another thread."""

    def __init__(self) -> None:
        self.is_redrawn = is_terminal(sys.stdout)
        self._lines: list[str] = []
        self._lock = threading.RLock()

    @property
    def encoding(self) -> str:
        """Encoding of the output."""
        return getattr(sys.stdout, "encoding", None) or "ascii"

    def redraw(self, facts: Sequence[Fact]) -> None:
        """Replace the block with one that shows ``facts``."""
        size = shutil.get_terminal_size()
        with self._lock:
            lines = block(facts, size.columns, size.lines, self.encoding)
            _write(erase(height(self._lines, size.columns)) + "\n".join(lines))
            self._lines = lines

    @contextlib.contextmanager
    def above(self) -> Iterator[None]:
        """Remove the block while the caller writes something else, then show it again below."""
        with self._lock:
            if self._lines:
                _write(erase(height(self._lines, shutil.get_terminal_size().columns)))
            yield
            _write("\n".join(self._lines))

    def say(self, text: str) -> None:
        """Print a line above the block."""
        with self.above():
            _write(f"{text}\n")

    def end(self) -> None:
        """Leave the block where it is, and never redraw it."""
        with self._lock:
            if self._lines:
                _write("\n")
            self._lines = []


async def report_progress(node: Node, roles: Sequence[Role], terminal: Terminal) -> None:
    """Report a node's state on standard output until cancelled, and once more at the end. A
    thread writes, so that a stopped terminal cannot stop the node."""

    async def write(function: Callable[..., None], *args: object) -> None:
        await trio.to_thread.run_sync(function, *args, abandon_on_cancel=True)

    def state() -> str:
        return line(facts_about(node, roles), terminal.encoding)

    now = node.world.now
    due, printed, is_over = now(), -math.inf, False
    try:
        while True:
            progress = progress_of(node, roles)
            is_news = not is_over and bool(progress) and all(one.over for one in progress)
            if is_news:
                is_over = True
                await write(
                    terminal.say,
                    "over     the run is over: nothing is left to do, and this node only"
                    " relays; Ctrl-C ends it",
                )
            if terminal.is_redrawn:
                await write(terminal.redraw, facts_about(node, roles))
            elif now() - printed >= 60.0 or is_news:
                printed = now()
                await write(terminal.say, state())
            # Seconds between looks at the node: a person sees that it lives, and it costs
            # 0.1 ms.
            due += 1.0
            await node.world.sleep_until(due)
    finally:
        terminal.end()
        terminal.say(f"ended    {ENDED if terminal.is_redrawn else state()}")


def _write(text: str) -> None:
    tell(text, end="")
