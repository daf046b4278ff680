"""Progress of a push or pull: bars for people, lines for pipes and programs."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from p2p.naming import printable_lines
from p2p.node.process import is_terminal
from p2p.node.usage import SOON, tell
from p2p.world import World

if TYPE_CHECKING:  # rich takes 30 ms to import: only where a person reads bars
    from rich.progress import Progress


@dataclass(slots=True)
class CastState:
    """Progress of a push or pull."""

    total: int = 0
    """Bytes of the version; 0 while unknown."""
    here: int = 0
    """Bytes that have arrived."""
    rate: float = 0.0
    """Bytes per second lately: received, or, at a pusher, given to others."""
    given: int = 0
    """Bytes given to others since the start."""
    members: int = 0
    """Other nodes in the swarm."""
    whole: int = 0
    """Machines that have the whole version."""
    asked: int = 0
    """Machines that the pusher waits for; 0 if it waits for no number."""
    machines: dict[str, float] = field(default_factory=dict)
    """Share of the version that is at each machine that lacks some of it, by name."""
    waits_for: str = ""
    """Condition for further progress; empty while bytes come."""

    def update(self, **fields: Any) -> None:
        """Set some of the fields."""
        for name, value in fields.items():
            setattr(self, name, value)


class Teller:
    """Reports progress, in one of three ways that depend on where the output goes."""

    def __init__(self, title: str, *, as_json: bool) -> None:
        self._title = title
        self._json = as_json
        self._progress: Progress | None = None
        self._cause = ""
        """What is waited for, without the figures that change."""
        self._drawn = 0
        """Number of frames drawn."""
        self.interval = 0.25 if is_terminal(sys.stdout) and not as_json else 5.0
        """Seconds between two reports: people perceive bars so quick as immediate, and five
        seconds are enough for a log."""

    def event(self, kind: str, text: str, **fields: object) -> None:
        """Report one event: ``text`` for people, ``fields`` for programs."""
        text = printable_lines(text)
        if self._json:
            tell(json.dumps({"event": kind, **fields}))
        elif self._progress is not None:
            self._progress.console.print(text, markup=False, soft_wrap=True)
        else:
            tell(text)

    @contextmanager
    def patience(self, world: World, kind: str, text: str) -> Iterator[None]:
        """Report an event if the block is not over soon, when a person begins to wonder."""
        timer = world.call_at(world.now() + SOON, lambda: self.event(kind, text))
        try:
            yield
        finally:
            timer.cancel()

    @contextmanager
    def bars(self) -> Iterator[None]:
        """Draw a bar for the length of the block, where there is a terminal."""
        if self._json or not is_terminal(sys.stdout):
            yield
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._progress = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(20),
            TextColumn("{task.fields[done]}"),
            TextColumn("{task.fields[says]}", markup=False), transient=True,
            console=Console(file=sys.stdout, highlight=False, soft_wrap=True),
        )  # fmt: skip
        try:
            with self._progress:
                self._progress.add_task(self._title, total=None, done="", says="")
                yield
        finally:
            self._progress = None

    def _tell_cause(self, text: str) -> None:
        """Print the reason for a longer wait above the bars, since it is too long for a
        column."""
        kind = "".join(sign for sign in text if not sign.isdigit())
        self._drawn = self._drawn + 1 if kind == self._cause else 0
        self._cause = kind
        if text and self._drawn == SOON / self.interval:
            self.event("waiting", text)

    def state(self, state: CastState) -> None:
        """Report the current progress."""
        if self._progress is not None:
            self._tell_cause(state.waits_for.partition(";")[0])
            task = self._progress.task_ids[0]
            total, done = _drawn(state)
            self._progress.update(
                task, total=total, completed=done, done=_done(state),
                says=re.split("[;:]", state.waits_for)[0] or f"{_rate(state)}{_swarm(state)}",
            )  # fmt: skip
            self._draw_machines(self._progress, state.machines)
            return
        self.event("progress", f"{self._title}  {_line(state)}", **asdict(state))

    @staticmethod
    def _draw_machines(progress: Progress, machines: dict[str, float]) -> None:
        """Draw a bar for each of the first machines that are not done, as many as fit on a
        screen."""
        shown = dict(list(machines.items())[:12])
        tasks = {str(task.fields["machine"]): task.id for task in progress.tasks[1:]}
        for name in tasks.keys() - shown.keys():
            progress.remove_task(tasks[name])
        for name, share in shown.items():
            if name not in tasks:
                tasks[name] = progress.add_task(name, total=1, done="", says="", machine=name)
            progress.update(tasks[name], completed=share, done=f"{share:.0%}")


def _drawn(state: CastState) -> tuple[int | None, int]:
    """Return the bar's length and how much of it is full. A pusher's bar shows the share of
    finished machines, or no end while there is none."""
    machines = state.asked or max(state.members, state.whole)
    if state.here < state.total or not state.total:
        return state.total or None, state.here
    return (state.total, state.total * state.whole // machines) if machines else (None, 0)


def _done(state: CastState) -> str:
    """Return the bar's text: bytes of a pull, machines of a push."""
    if state.here < state.total:
        return f"{state.here / 1e6:,.1f} of {state.total / 1e6:,.1f} MB"
    machines = state.asked or max(state.members, state.whole)
    return f"{state.whole} of {machines} machines" if state.total and machines else ""


def _rate(state: CastState) -> str:
    """Return the rate as text, and for a pull the remaining time."""
    left = state.total - state.here
    is_moving = left > 0 and state.rate >= left / 86_400  # over a day is no forecast
    time = f"{timedelta(seconds=round(left / state.rate))} left  " if is_moving else ""
    return f"{state.rate / 1e6:.1f} MB/s  {time}" if state.total else ""


def _swarm(state: CastState) -> str:
    if not (state.asked or state.members or state.whole):
        return "no other machine yet"
    return f"gave {state.given / 1e6:,.1f} MB"


def _line(state: CastState) -> str:
    if state.here < state.total or not state.total:
        share = f"{state.here / state.total:.0%}  " if state.total else ""
    else:
        share = ""  # a pusher has all of it
    if state.waits_for:
        return f"{share}{state.waits_for}"
    done = "" if share else _done(state)
    rest = f"{done}  " if done else ""
    return f"{share}{_rate(state) or '0.0 MB/s  '}{rest}{_swarm(state)}"
