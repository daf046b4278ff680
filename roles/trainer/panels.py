"""What a trainer shows on the dashboard."""

from __future__ import annotations

from typing import Final

from p2p.node.panels import Kind, Panel, Value


def _by_step(title: str, key: str, label: str, about: str, unit: str = "") -> Panel:
    value = Value(key=key, label=label, unit=unit)
    return Panel(
        title=title, kind=Kind.CURVE, at="last_step.step", about=about, values=(value,)
    )


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
    _by_step("Reward in training", "train_reward", "reward",
             "Mean reward of the groups that a step learnt from."),
    _by_step("Loss", "last_step.loss", "loss",
             "Of the clipped objective. It need not fall: each step has new answers."),
    _by_step("Entropy", "last_step.entropy", "entropy",
             "How undecided the policy is at a token. Near 0 it explores no more.", "nats"),
    _by_step("k3", "last_step.k3", "k3",
             "How far the samplers' policies were from the trainer's. Over 0.5 a step learns"
             " little that is true.", "nats"),
    _by_step("Gradient norm", "last_step.gradient_norm", "norm", "Before it is clipped."),
    Panel(
        title="Clipped and changed",
        kind=Kind.CURVE,
        at="last_step.step",
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
            Value(key="algorithm", label="algorithm", about="As learner.toml says."),
            Value(key="rate", label="learning rate", about="Of the next step."),
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
