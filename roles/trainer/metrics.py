"""Metrics of each optimiser step, for people, sent to the sinks that the learner names.

A sink is an entry point of the group ``shoal.sinks``: a small class (`Sink`), ours or a
package's. Only people read what a sink writes, so a sink that cannot be opened, raises or hangs
is dropped with one sentence in the log, and learning goes on. A step that is repeated after a
crash writes no second set of numbers.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Protocol, cast

import trio

from p2p.errors import MissingDependency
from p2p.naming import printable
from p2p.node.entries import installed, load
from roles.rl.learner import SINKS

logger = logging.getLogger(__name__)

METRICS: Final = "trainer/metrics.jsonl"
OLDER: Final = "trainer/metrics.1.jsonl"
"""File with the lines that are older than those in `METRICS`."""
METRICS_BYTES: Final = 8 * 1024 * 1024
"""Size at which `METRICS` is renamed to `OLDER`, which is overwritten. A line is about 280
bytes: each file holds 30,000 steps, both together at most 16 MiB."""
PATIENCE: Final = 60.0
"""Seconds that a sink may take to open or to take a step. The trainer waits for it; a sink that
signs in to a service needs a few seconds."""

Values = Mapping[str, float]
"""The numbers of a step by name."""


class Sink(Protocol):
    """Destination of metrics. Every method may block: each is called in a thread, one at a
    time."""

    def __init__(self, run: str, folder: Path) -> None:
        """Open the sink for the run of this name; ``folder`` belongs to the trainer and
        exists."""

    def note(self, step: int, values: Values) -> None:
        """Take the numbers of a step."""

    def close(self) -> None:
        """Flush and close the sink."""


class JsonLines:
    """Writes one line per step to ``metrics.jsonl``."""

    def __init__(self, run: str, folder: Path) -> None:
        self._path = folder / Path(METRICS).name
        self._older = folder / Path(OLDER).name

    def note(self, step: int, values: Values) -> None:
        """Append a line. If the disk refuses it, the line is lost and the next step tries
        again."""
        rounded = {
            name: float(f"{value:.6g}") if isinstance(value, float) else value
            for name, value in values.items()
        }
        line = json.dumps({"step": step, **rounded}, separators=(",", ":")).encode() + b"\n"
        try:
            if self._path.exists() and self._path.stat().st_size + len(line) > METRICS_BYTES:
                self._path.replace(self._older)
            with self._path.open("a+b") as file:
                if file.tell():
                    file.seek(-1, os.SEEK_END)
                    # A line that a crash has cut off must not spoil this one.
                    line = line if file.read() == b"\n" else b"\n" + line
                file.write(line)
        except OSError as error:
            logger.info("metrics_not_kept step=%d: %s", step, error.strerror)

    def close(self) -> None:
        """Do nothing, since each line is written at once."""


class TensorBoard:
    """Writes event files to ``tensorboard``, which TensorBoard reads while the trainer
    works."""

    def __init__(self, run: str, folder: Path) -> None:
        # tensorboardX imports torch where it is installed, and a number needs none of it: it
        # is hidden, since it takes 300 MB of a node's process.
        hides = "torch" not in sys.modules
        if hides:
            sys.modules["torch"] = None  # type: ignore[assignment]
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise MissingDependency(
                "it needs tensorboardX: pip install -e '.[tensorboard]'"
            ) from None
        finally:
            if hides:
                del sys.modules["torch"]
        self._writer = SummaryWriter(str(folder / "tensorboard"), flush_secs=10)

    def note(self, step: int, values: Values) -> None:
        """Add a point to each curve."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class Metrics:
    """The working sinks of one trainer."""

    def __init__(self, sinks: Mapping[str, Sink]) -> None:
        self._sinks = dict(sinks)

    async def note(self, step: int, values: Values) -> None:
        """Pass the numbers of a step to every sink."""
        for name, sink in list(self._sinks.items()):
            if not await _survives(name, sink.note, step, dict(values)):
                del self._sinks[name]

    async def close(self) -> None:
        for name, sink in self._sinks.items():
            await _survives(name, sink.close)


async def _survives(name: str, function: Callable[..., object], *args: object) -> bool:
    """Call a sink's method in a thread. Return False, and log a sentence, if it fails."""
    try:
        with trio.fail_after(PATIENCE):
            error = await trio.to_thread.run_sync(
                _failure, function, *args, abandon_on_cancel=True
            )
    except trio.TooSlowError:
        logger.warning("sink_dropped name=%s: it took over %g s", name, PATIENCE)
        return False
    if isinstance(error, MissingDependency):
        logger.info("sink_dropped name=%s: %s", name, error)
    elif error is not None:
        why = printable(traceback.format_exception_only(error)[-1].strip())
        logger.warning("sink_dropped name=%s: %s", name, why)
    return error is None


def _failure(function: Callable[..., object], *args: object) -> BaseException | None:
    try:
        function(*args)
    except BaseException as error:  # noqa: BLE001 - a package's program: it may also exit
        return error
    return None


@asynccontextmanager
async def open_sinks(names: Sequence[str], run: str, place: str) -> AsyncIterator[Metrics]:
    """Open the sinks of these names for the length of the block; ``place`` is their folder.

    In a simulation, whose disk is no folder of this machine, nothing is opened.
    """
    points, folder = installed(SINKS), Path(place)
    opened: dict[str, Sink] = {}

    def open_one(name: str) -> None:
        folder.mkdir(exist_ok=True)
        kind = cast(type[Sink], load(points[name].value, name, "sink"))
        opened[name] = kind(run, folder)

    if folder.parent.is_dir():
        for name in dict.fromkeys(names):
            await _survives(name, open_one, name)
    metrics = Metrics(opened)
    try:
        yield metrics
    finally:
        with trio.CancelScope(shield=True):
            await metrics.close()
