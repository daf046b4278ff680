"""Dashboard panels of an inference node."""

from __future__ import annotations

from typing import Final

from p2p.node.panels import Kind, Panel, Value

PANELS: Final = (
    Panel(
        title="Held-out reward",
        kind=Kind.CURVE,
        rows="run_curve",
        lead=True,
        about="As the trainer tells: mean reward on tasks that are never trained on.",
        values=(Value(key="reward", label="greedy"),),
    ),
    Panel(
        title="Work",
        kind=Kind.FIGURES,
        values=(
            Value(key="step", of="steps", label="step", lead=True),
            Value(key="life.share", label="your share of the work", unit="share", lead=True,
                  about="Of all accepted work of the run."),
            Value(key="life.made", label="rollouts made"),
            Value(key="life.accepted", label="rollouts accepted", lead=True),
            Value(key="life.rejected", label="rollouts rejected"),
            Value(key="life.learnt", label="learnt from", lead=True),
            Value(key="tokens_per_second", label="tokens a second", lead=True),
            Value(key="submitted", label="submissions", counts=True, is_only_metric=True,
                  about="Since the node was started; each has several rollouts."),
            Value(key="accepted", label="submissions accepted", counts=True,
                  is_only_metric=True),
            Value(key="rejected", label="submissions rejected", counts=True,
                  is_only_metric=True),
            Value(key="owed", label="places owed",
                  about="Places that have to stand before any is learnt from; 0: in standing."),
            Value(key="version", label="policy in the engine", is_only_metric=True),
            Value(key="policies_skipped", label="policies skipped", counts=True,
                  about="Policies that came while the engine was at work."),
            Value(key="retries", label="asked again", counts=True, is_only_metric=True,
                  about="Times that the trainer or a scorer was asked again."),
        ),
    ),
    Panel(
        title="Tokens a second",
        kind=Kind.CURVE,
        at="version",
        about="Over the last minute, by the policy that drew them.",
        values=(Value(key="tokens_per_second", label="tokens a second"),),
    ),
    Panel(
        title="Answers drawn lately",
        kind=Kind.SAMPLES,
        rows="samples",
        about="Some of a worker's, and what they earn.",
    ),
)  # fmt: skip
