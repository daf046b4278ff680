"""What a push or pull says while it works: bars for people, lines for pipes and programs."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

from p2p.node.process import is_terminal

if TYPE_CHECKING:  # rich takes 30 ms to import: only where a person reads bars
    from rich.console import Console
    from rich.progress import Progress

PIPED: Final = 5.0
"""Seconds between two lines where no terminal draws bars: enough for a log."""
DRAWN: Final = 0.25
"""Seconds between two updates of the bar: people perceive this as immediate."""


@dataclass(frozen=True, slots=True)
class CastState:
    """Progress of a push or pull."""

    total: int
    """Bytes of the version; 0 while nothing is known of it."""
    here: int
    """Bytes of it that are here."""
    rate: float
    """Bytes per second lately: received, or, at a pusher, given to others."""
    given: int
    """Bytes given to others since the start."""
    members: int
    """Other nodes in the swarm."""
    whole: int
    """How many of them have it whole."""
    asked: int = 0
    """How many machines the pusher waits for; 0 if it waits for no number."""


class Teller:
    """Reports progress, in one of three ways that depend on where the output goes."""

    def __init__(self, title: str, *, as_json: bool) -> None:
        self._title = title
        self._json = as_json
        self._progress: Progress | None = None
        self.interval = DRAWN if is_terminal(sys.stdout) and not as_json else PIPED

    @cached_property
    def _console(self) -> Console:
        from rich.console import Console

        return Console(file=sys.stdout, highlight=False, soft_wrap=True)

    def event(self, kind: str, text: str, **fields: object) -> None:
        """Report one event: ``text`` for people, ``fields`` for programs."""
        with contextlib.suppress(BrokenPipeError):  # who listened has gone
            if self._json:
                sys.stdout.write(json.dumps({"event": kind, **fields}) + "\n")
                sys.stdout.flush()
            else:
                self._console.print(text, markup=False)

    @contextmanager
    def bars(self) -> Iterator[None]:
        """Draw a bar for the length of the block, where there is a terminal."""
        if self._json or not is_terminal(sys.stdout):
            yield
            return
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(24), DownloadColumn(binary_units=False),
            TextColumn("{task.fields[rate]}"), TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[swarm]}"), console=self._console, transient=True,
        )  # fmt: skip
        with self._progress:
            self._progress.add_task(self._title, total=None, rate="", swarm="")
            yield
        self._progress = None

    def state(self, state: CastState) -> None:
        """Report the current progress."""
        if self._progress is not None:
            [task] = self._progress.task_ids
            total, done = _drawn(state)
            self._progress.update(
                task, total=total, completed=done,
                rate=f"{state.rate / 1e6:.1f} MB/s", swarm=_swarm(state),
            )  # fmt: skip
            return
        self.event("progress", f"{self._title}  {_line(state)}", **asdict(state))


def _drawn(state: CastState) -> tuple[int | None, int]:
    """Length of the bar and how much of it is full. A pusher has all bytes, so its bar shows
    the share of machines that are done, and has no end while there is none."""
    machines = state.asked or max(state.members, state.whole)
    if state.here < state.total or not state.total:
        return state.total or None, state.here
    return (state.total, state.total * state.whole // machines) if machines else (None, 0)


def _swarm(state: CastState) -> str:
    machines = state.asked or max(state.members, state.whole)
    if not machines:
        return "no other machine yet"
    whole = f"{state.whole} of {machines} whole"
    return f"{whole}, gave {state.given / 1e6:.1f} MB"


def _line(state: CastState) -> str:
    if state.here < state.total or not state.total:
        share = f"{state.here / state.total:.0%}  " if state.total else "waiting  "
    else:
        share = ""  # a pusher has all of it
    return f"{share}{state.rate / 1e6:.1f} MB/s  {_swarm(state)}"
