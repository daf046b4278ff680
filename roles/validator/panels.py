"""Dashboard panels of the validator."""

from __future__ import annotations

from typing import Final

from p2p.node.panels import Kind, Panel, Value

PANELS: Final = (
    Panel(
        title="Judging",
        kind=Kind.FIGURES,
        values=(
            Value(key="accepted", label="submissions accepted", counts=True),
            Value(key="rejected", label="submissions rejected", counts=True, lead=True),
            Value(key="queue", label="waiting", about="Submissions that wait for the scorer."),
            Value(key="scorer_oldest", label="oldest waits", unit="seconds",
                  about="How long the place that waits longest has waited."),
            Value(key="scorer_busy", label="busy", unit="share",
                  about="Share of its time that the scorer works."),
        ),
    ),
    Panel(
        title="Rejected, by reason",
        kind=Kind.COUNTS,
        rows="reasons",
        about="The first check that failed. An honest node sees none of these.",
    ),
    Panel(
        title="Refused or undecided",
        kind=Kind.COUNTS,
        rows="refused",
        about="Workers that were told to ask again, or that they may not ask.",
    ),
    Panel(
        title="Verdicts, by worker",
        kind=Kind.TABLE,
        rows="nodes",
        names="worker",
        values=(
            Value(key="accepted", label="accepted"),
            Value(key="rejected", label="rejected"),
            Value(key="reasons", label="because"),
        ),
    ),
)  # fmt: skip
