"""Dashboard panels of the trainer."""

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
        lead=True,
        tasks="held_out",
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
            Value(key="step", label="step", is_only_metric=True, about="Optimiser steps done."),
            Value(key="learnt_steps", of="steps", label="step", lead=True),
            Value(key="learns_by", label="algorithm", about="As learner.toml says."),
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
        title="Workers, and what became of their work",
        kind=Kind.TABLE,
        rows="work",
        names="worker",
        about="In groups of answers. Tokens a second over half an hour are what a machine has"
        " proven.",
        values=(
            Value(key="learnt", label="learnt from"),
            Value(key="no_spread", label="all alike"),
            Value(key="stale", label="too old"),
            Value(key="tokens_per_second", label="tokens a second"),
            Value(key="why", label="rejected or banned because"),
        ),
    ),
    Panel(
        title="Kinds of tasks, before and after",
        kind=Kind.TABLE,
        rows="by_kind",
        names="kind",
        about="Held-out reward of the first and of the newest policy.",
        values=(
            Value(key="before", label="greedy before", unit="reward"),
            Value(key="after", label="after", unit="reward"),
            Value(key="sampled_before", label="sampled before", unit="reward"),
            Value(key="sampled_after", label="after", unit="reward"),
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
        about="The likeliest answers of the first policy and of the newest, and their rewards.",
    ),
)  # fmt: skip
"""Panels of a run of reinforcement learning."""

DILOCO: Final = (
    Panel(
        title="Loss on what is held out",
        kind=Kind.CURVE,
        rows="rounds",
        lead=True,
        values=(Value(key="loss", label="loss", unit="nats"),),
        about="By round, nats a token: the lower, the better it foresees text.",
    ),
    Panel(
        title="Members",
        kind=Kind.CURVE,
        rows="rounds",
        values=(
            Value(key="members", label="members"),
            Value(key="summed", label="updates summed"),
        ),
        about="Of each round; a majority of the members before signs it.",
    ),
    Panel(
        title="Sites",
        kind=Kind.FIGURES,
        about="All have the same digest after the same round: their weights are equal, bit by"
        " bit.",
        values=(
            Value(key="round", of="steps", label="round", lead=True),
            Value(key="digest", label="digest of its weights"),
            Value(key="heard", label="members heard"),
            Value(key="training_loss", label="training loss", unit="nats"),
            Value(key="tokens", label="tokens", counts=True, lead=True),
            Value(key="inner_steps", label="inner steps", counts=True),
            Value(key="utilised", label="time computing", unit="share"),
            Value(key="sent", label="sent", unit="bytes", lead=True),
            Value(
                key="parallel",
                label="data parallel would send",
                unit="bytes",
                lead=True,
                about="Averaging gradients at each inner step, in a ring.",
            ),
            Value(key="views", label="rounds begun again", counts=True),
        ),
    ),
    Panel(
        title="What it writes",
        kind=Kind.SAMPLES,
        rows="written",
        about="Behind the beginning of a text that is held out; the number is the loss.",
    ),
)
"""Panels of a run of DiLoCo."""

PANELS: Final = (*GRPO, *DILOCO)
"""All panels. The dashboard shows those for which the run has data."""
