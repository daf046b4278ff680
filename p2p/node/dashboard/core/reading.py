"""What panels read from a role's health: plain, bounded, and nothing else of it.

A health may hold what strangers said (a reason, an answer, a peer's name), and as much of it as
they liked. The page gets the first characters of a text and the largest rows of a table, so
what one status costs a viewer has a limit whatever the swarm does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from p2p.node.panels import Kind, Panel

MAX_TEXT: Final = 600
"""Characters of one text: a question with its answer, as people read it."""
MAX_ROWS: Final = 40
"""Rows of one table: what somebody reads; the largest come first."""
MAX_SAMPLES: Final = 10
"""Questions with their answers of one role."""

Health = Mapping[str, Any]


def find(health: Health, key: str) -> object:
    """What stands at ``key``; dots lead into tables. None if nothing does."""
    found: object = health
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def plain(value: object) -> Any:
    """A number, a truth or a bounded text; None of everything else, infinities too."""
    match value:
        case bool() | int():
            return value if abs(value) < 2**53 else None  # beyond it JavaScript rounds
        case float():
            return float(f"{value:.6g}") if math.isfinite(value) else None
        case str():
            return bounded_text(value)
    return None


def bounded_text(text: str) -> str:
    """The beginning of ``text``, without the half of a character that JSON cannot say."""
    kept = text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"
    return kept.encode("utf-8", "replace").decode("utf-8")


def read(panel: Panel, health: Health) -> Any:
    """What ``panel`` shows of ``health``: a list of values or rows; None if nothing is there.

    Of a curve it is the newest point. Its line is `core.history`'s.
    """
    match panel.kind:
        case Kind.FIGURES | Kind.CURVE:
            values = [plain(find(health, value.key)) for value in panel.values]
            return None if all(value is None for value in values) else values
        case Kind.COUNTS:
            return _counts(find(health, panel.rows))
        case Kind.TABLE:
            return _table(panel, find(health, panel.rows))
        case Kind.SAMPLES:
            return _samples(find(health, panel.rows))


def _counts(rows: object) -> list[list[Any]] | None:
    if not isinstance(rows, Mapping) or not rows:
        return None
    counts = [[bounded_text(str(name)), plain(count)] for name, count in rows.items()]
    counts = [row for row in counts if isinstance(row[1], int | float)]
    return sorted(counts, key=lambda row: (-row[1], row[0]))[:MAX_ROWS] or None


def _table(panel: Panel, rows: object) -> list[list[Any]] | None:
    if not isinstance(rows, Mapping) or not rows:
        return None
    lines = [
        [bounded_text(str(name)), *(_cell(find(row, value.key)) for value in panel.values)]
        for name, row in rows.items()
        if isinstance(row, Mapping)
    ]
    return sorted(lines, key=_size_of, reverse=True)[:MAX_ROWS] or None


def _cell(value: object) -> Any:
    """A table of counts in a cell is its most frequent entries, in words."""
    counts = _counts(value)
    if counts is None:
        return plain(value)
    return bounded_text(", ".join(f"{count:,} × {name}" for name, count in counts))


def _size_of(line: Sequence[Any]) -> tuple[float, str]:
    numbers = [cell for cell in line[1:] if isinstance(cell, int | float)]
    return float(sum(numbers)), str(line[0])


def _samples(rows: object) -> list[list[Any]] | None:
    if not isinstance(rows, Sequence) or isinstance(rows, str | bytes):
        return None
    samples = [
        [bounded_text(str(row[0])), bounded_text(str(row[1])), plain(row[2])]
        for row in rows[:MAX_SAMPLES]
        if isinstance(row, Sequence) and len(row) == 3
    ]
    return samples or None
