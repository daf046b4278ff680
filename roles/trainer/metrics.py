"""One line of JSON for each optimiser step, for people and their plots.

Nothing reads it but they: a disk that refuses a line stops no learning, and a step that is
taken again after a crash has its line already, or none. Lines go through the node's disk, with
no thread and no library of their own; ``pandas.read_json(path, lines=True)`` reads them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from p2p.errors import StorageError
from p2p.world import Disk
from roles.engines.base import StepReport

logger = logging.getLogger(__name__)

METRICS: Final = "trainer/metrics.jsonl"
OLDER: Final = "trainer/metrics.1.jsonl"
"""Where the lines before those of `METRICS` are."""
METRICS_BYTES: Final = 8 * 1024 * 1024
"""Size at which `METRICS` becomes `OLDER`, in place of what was there. A line is about 280
bytes: each file holds 30,000 steps, both together at most 16 MiB."""
_DIGITS: Final = 6
"""Significant digits of a number: more is noise, and a third of the file."""


class Metrics:
    """What every step looked like."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._size: int | None = None
        """Of `METRICS`; None before the first line of this life."""

    async def note(
        self,
        report: StepReport,
        reward: float,
        staleness: Sequence[int],
        seconds: float,
        replayed: int,
        lies: int,
    ) -> None:
        """Add a line, if the disk takes it.

        ``reward`` is the mean of the step's groups, ``staleness`` says of each how many steps
        old its policy was, ``seconds`` is what the engine took; ``replayed`` verdicts of
        validators were repeated since the trainer was started, and ``lies`` found among them.
        """
        numbers = asdict(report)
        numbers |= numbers.pop("metrics") | {
            "replayed": replayed,
            "lies": lies,
            "reward": reward,
            "staleness_mean": sum(staleness) / len(staleness),
            "staleness_max": max(staleness),
            "seconds": seconds,
        }
        rounded = {
            name: float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
            for name, value in numbers.items()
        }
        try:
            await self._append(json.dumps(rounded, separators=(",", ":")).encode() + b"\n")
        except StorageError as error:
            self._size = None
            logger.info("metrics_not_kept step=%d: %s", report.step, error)

    async def _append(self, line: bytes) -> None:
        if self._size is None:
            self._size = await self._disk.size(METRICS) or 0
            # A line that a crash has cut off must not spoil this one.
            if self._size and await self._disk.read(METRICS, self._size - 1, 1) != b"\n":
                line = b"\n" + line
        if self._size + len(line) > METRICS_BYTES and self._size:
            await self._disk.rename(METRICS, OLDER)
            self._size = 0
        await self._disk.append(METRICS, line)
        self._size += len(line)
