"""Sampling of answers: the numbers on which workers, validators and the trainer must agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from roles.contract.core.bounds import Bounds, check_bounds

MAX_SUBMISSION_GROUPS: Final = 256
"""Most groups of a submission: the limit of `roles.protocol.core.groups`."""
MAX_COMPLETIONS: Final = 8192
"""Most completions of a submission: a verdict has 4 bytes of reward for each, and is one
ledger entry of at most 64 KiB."""

_BOUNDS: Final[Bounds] = {
    "steps": (0, 10**9),
    "group_size": (2, MAX_COMPLETIONS),  # an advantage is relative to the group
    "submission": (1, MAX_SUBMISSION_GROUPS),
    "temperature": (0.0, 100.0),  # 0 is greedy
    "max_new_tokens": (1, 1 << 20),
    "lag": (0, 1024),
    "turns": (1, 64),
    "heard": (0, 1 << 20),
    "proof_values": (8, 1024),  # fewer say nothing; proofs.toploc.MAX_TOP_K
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingTerms:
    """Terms of the run's ``[sampling]``."""

    steps: int
    """Number of training steps, each of which makes a policy. The run ends with the last."""

    group_size: int
    """Completions per task. INTELLECT-2 had 16: if one answer in ten is right, four groups of
    five have something to learn from (1 - 0.9^16 = 0.81)."""

    max_new_tokens: int
    """Most tokens of a completion; longer ones are cut."""

    submission: int = 8
    """Groups that a node draws, proves and submits together. With few, lag stays low; many fill
    an engine."""

    temperature: float = 1.0
    """Temperature of sampling and of log-probs in the loss."""

    lag: int = 2
    """Oldest usable policy, in steps behind the trainer's. It is rate times lag that
    destabilises: sorting, with eight updates at 4e-4, ends at 0.84 and 0.94 with lag 4 and at
    0.86 and 0.96 with lag 2."""

    proof_values: int = 62
    """Values in an activation proof of 32 tokens. 62 take 3.94 bytes a token. The package
    toploc has 128; docs/protocols/toploc.md says what fewer cost."""

    turns: int = 1
    """Turns of the model in one completion, at most. The environment answers between them; all
    count for ``max_new_tokens``."""

    heard: int = 0
    """Tokens that the environment may insert in one completion, all its answers together."""

    def __post_init__(self) -> None:
        check_bounds(self, _BOUNDS)
        if (self.turns > 1) != (self.heard > 0):
            raise ValueError(
                "turns and heard in [sampling] are set together: how often the model speaks,"
                f" and how many tokens it hears in between, not {self.turns} and {self.heard}"
            )
        if (
            self.submission > MAX_SUBMISSION_GROUPS
            or self.submission * self.group_size > MAX_COMPLETIONS
        ):
            raise ValueError(
                f"a submission has at most {MAX_SUBMISSION_GROUPS} groups and {MAX_COMPLETIONS}"
                f" completions, not {self.submission} and {self.submission * self.group_size}"
            )


NO_SAMPLING: Final = SamplingTerms(steps=0, group_size=2, max_new_tokens=1)
"""Sampling of a run that draws no answers: DiLoCo on text."""
