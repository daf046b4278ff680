"""Sentences of peers, counted apart and made fit for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from p2p.naming import printable

MAX_REASONS: Final = 32
"""Reasons counted apart, twice as many as there are checks. Some quote what was sent, and so
have no end."""
SHOWN: Final = 4
"""Reasons that a line for people names, the most frequent: more would not be read."""
OTHER: Final = "other"
"""Name under which further reasons are counted."""


def tally(counts: dict[str, int], reason: str) -> None:
    """Count a reason, as `OTHER` once there are `MAX_REASONS` different ones."""
    key = reason if reason in counts or len(counts) < MAX_REASONS else OTHER
    counts[key] = counts.get(key, 0) + 1


def because(counts: Mapping[str, int]) -> str:
    """Return the reasons in brackets, most frequent first, fit for a terminal; empty if there
    are none.
    """
    often = sorted(counts, key=lambda reason: (-counts[reason], reason))
    shown = [printable(reason) for reason in often[:SHOWN]] + (
        ["..."] if len(often) > SHOWN else []
    )
    return f" ({', '.join(shown)})" if shown else ""


def but_not_from(counts: Iterable[tuple[int, str]]) -> str:
    """Return the end of a sentence about work, such as ``; not from 12 too old``."""
    others = ", ".join(f"{count:,} {words}" for count, words in counts if count)
    return f"; not from {others}" if others else ""
