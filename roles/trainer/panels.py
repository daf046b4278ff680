"""What a trainer shows on the dashboard."""

from __future__ import annotations

from typing import Final

from p2p.node.panels import Kind, Panel, Value

_STEP: Final = "last_step.step"
GRPO: Final = (
    Panel(
        title="Held-out reward",
        kind=Kind.CURVE,
        rows="curve",
        about="Mean reward on tasks that are never trained on. Greedy is the likeliest answer,"
        " sampled one that is drawn as in training.",
        values=(
            Value(key="greedy", label="greedy"),
            Value(key="reward", label="sampled"),
        ),
    ),
    Panel(
        title="Reward in training",
        kind=Kind.CURVE,
        at=_STEP,
        about="Mean reward of the groups that a step learnt from.",
        values=(Value(key="train_reward", label="reward"),),
    ),
    Panel(
        title="Loss",
        kind=Kind.CURVE,
        at=_STEP,
        about="Of the clipped objective. It need not fall: each step has new answers.",
        values=(Value(key="last_step.loss", label="loss"),),
    ),
    Panel(
        title="Entropy",
        kind=Kind.CURVE,
        at=_STEP,
        about="How undecided the policy is at a token. Near 0 it explores no more.",
        values=(Value(key="last_step.entropy", label="entropy", unit="nats"),),
    ),
    Panel(
        title="k3",
        kind=Kind.CURVE,
        at=_STEP,
        about="How far the samplers' policies were from the trainer's. Over 0.5 a step learns"
        " little that is true.",
        values=(Value(key="last_step.k3", label="k3", unit="nats"),),
    ),
    Panel(
        title="Gradient norm",
        kind=Kind.CURVE,
        at=_STEP,
        about="Before it is clipped.",
        values=(Value(key="last_step.gradient_norm", label="norm"),),
    ),
    Panel(
        title="Clipped and changed",
        kind=Kind.CURVE,
        at=_STEP,
        about="Share of tokens at which the clip cut the gradient, and share of the weights"
        " that a step changed.",
        values=(
            Value(key="last_step.clipped", label="clipped", unit="share"),
            Value(key="last_step.changed", label="changed", unit="share"),
        ),
    ),
    Panel(
        title="Training",
        kind=Kind.FIGURES,
        values=(
            Value(key="step", label="step", lead=True, about="Optimiser steps done."),
            Value(key="steps", label="steps of the run", about="Optimiser steps."),
            Value(key="groups_used", label="groups learnt from", counts=True),
            Value(key="pooled", label="groups waiting", about="Accepted, for a next step."),
            Value(key="groups_without_spread", label="all alike", counts=True,
                  about="Groups whose answers earned the same: nothing is learnt from them."),
            Value(key="groups_stale", label="too old", counts=True,
                  about="Groups of a policy that was too old."),
            Value(key="scorer_queue", label="places to score",
                  about="Content that waits for the trainer's scorer."),
            Value(key="scorer_oldest", label="oldest waits", unit="seconds",
                  about="How long the place that waits longest has waited."),
            Value(key="scorer_busy", label="scorer busy", unit="share",
                  about="Share of its time that the scorer works."),
            Value(key="replayed", label="verdicts repeated", counts=True,
                  about="Validators' verdicts that the trainer repeated."),
            Value(key="lies", label="lies found", counts=True),
            Value(key="policy_bytes", label="whole policy", unit="bytes"),
        ),
    ),
    Panel(
        title="Workers, by accepted work",
        kind=Kind.TABLE,
        rows="workers",
        about="Accepted tokens a second over half an hour: what a machine has proven.",
        values=(
            Value(key="tokens_per_second", label="tokens a second"),
            Value(key="is_slow", label="below the run's minimum"),
        ),
    ),
    Panel(
        title="Staleness",
        kind=Kind.COUNTS,
        rows="staleness",
        about="Groups learnt from, by how many steps older their policy was.",
    ),
    Panel(
        title="Answers to held-out questions",
        kind=Kind.SAMPLES,
        rows="samples",
        about="The likeliest answers of the last policy that was examined.",
    ),
)  # fmt: skip
"""Of a run of reinforcement learning."""

DILOCO: Final = (
    Panel(
        title="Loss on what is held out",
        kind=Kind.CURVE,
        rows="rounds",
        values=(Value(key="loss", label="loss", unit="nats"),),
        about="By outer step, nats a token.",
    ),
    Panel(
        title="Members of each round",
        kind=Kind.CURVE,
        rows="rounds",
        values=(
            Value(key="members", label="members"),
            Value(key="summed", label="updates summed"),
        ),
    ),
    Panel(
        title="Pre-training",
        kind=Kind.FIGURES,
        values=(
            Value(key="heard", label="members heard", lead=True),
            Value(key="training_loss", label="training loss", unit="nats", lead=True),
            Value(key="tokens", label="tokens", counts=True),
            Value(key="inner_steps", label="inner steps", counts=True),
            Value(key="utilised", label="time computing", unit="share"),
            Value(key="views", label="rounds begun again", counts=True),
        ),
    ),
)
"""Of a run of DiLoCo."""

PANELS: Final = (*GRPO, *DILOCO)
"""Only those appear of which the run has something."""
