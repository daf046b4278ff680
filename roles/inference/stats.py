"""What one inference node does, and what became of its work in this life: counts for people.

`roles.inference.status` makes words of them; `roles.inference.life` counts all lives.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from p2p.shardcast.manifest import NO_POLICY, PolicyVersion
from proofs.checks import Verdict
from roles.protocol.core.answer import Answer
from roles.shared.reasons import printable, tally

RATE_SECONDS: Final = 60.0
"""Over which a rate is taken: longer than a submission takes, shorter than a person watches."""


SHOWN: Final = (
    *("version", "submitted", "policies_loaded", "policies_skipped", "retries", "uploads"),
    *("unanswered_since", "refusal", "waits", "stood", "owed", "idle"),
)
"""Counts that a status has under their own names."""


class Doing(Enum):
    """What an inference node is at."""

    STARTS = "starts"
    WAITS_FOR_POLICY = "waits for the first policy"
    LOADS = "loads"
    DRAWS = "draws"
    WAITS_FOR_VERDICTS = "waits for verdicts"
    WAITS_FOR_NEWER = "waits for the next policy"
    OVER = "over"


@dataclass(slots=True)
class Rate:
    """How much of something came in a second, over the last `RATE_SECONDS`."""

    _came: deque[tuple[float, int]] = field(default_factory=deque)
    _began: float | None = None

    def note(self, count: int, now: float) -> None:
        """So much has come since the last time."""
        if self._began is None:
            self._began = now
            return  # what it took is not known
        self._came.append((now, count))

    def per_second(self, now: float) -> float:
        """0 before anything was noted."""
        while self._came and self._came[0][0] <= now - RATE_SECONDS:
            self._came.popleft()
        if self._began is None or now <= self._began:
            return 0.0
        return sum(count for _, count in self._came) / min(RATE_SECONDS, now - self._began)


@dataclass(slots=True)
class InferenceCounts:
    """What has become of the work of this process."""

    submitted: int = 0
    rollouts: int = 0
    """Completions in a submission: what people count in."""
    group_size: int = 0
    """Completions in a group: what a trainer counts in."""
    verdicts: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    """Submissions rejected, by the validator's reason."""
    policies_loaded: int = 0
    policies_skipped: int = 0
    retries: int = 0
    uploads: int = 0
    """Submissions that a validator has sent for, each time."""
    idle: bool = False
    """Whether the run has all its steps."""
    version: PolicyVersion = NO_POLICY
    """The policy in the engine."""
    refusal: str = ""
    """What a validator said last that will not change by asking again."""
    doing: Doing = Doing.STARTS
    drawn: Rate = field(default_factory=Rate)
    """Tokens."""
    unanswered_since: float | None = None
    """Wall time since which the trainer does not answer; None while it does."""
    bytes_committed: int = 0
    """What windows and their answers cost the network in this life."""
    stood: int = 0
    """Places that stood, as the trainer told last."""
    owed: int = 0
    """Places that have to stand before anything is learnt from; 0 in standing."""
    waits: str = ""
    """Why no work is begun now, though there is a policy; empty if it is."""

    def count(self, kind: str, reason: str) -> None:
        """This became of a submission: a verdict, as a rule."""
        self.verdicts[kind] = self.verdicts.get(kind, 0) + 1
        if kind == Verdict.REJECTED.value:
            tally(self.reasons, printable(reason))

    def note_upload(self) -> None:
        """A validator or the trainer has sent for a place."""
        self.uploads += 1

    def note_answer(self, answer: Answer) -> None:
        """Take up what the trainer says of this node's standing."""
        self.stood, self.owed = answer.stood, answer.owed

    def note_policy(self, version: PolicyVersion) -> None:
        """The engine runs ``version`` from now on."""
        if version != self.version:
            self.policies_loaded += 1
            self.policies_skipped += max(0, version - self.version - 1)
            self.version = version

    def health(self) -> dict[str, object]:
        """As plain values."""
        return {
            **{name: getattr(self, name) for name in SHOWN},
            "doing": self.doing.value,
            "committed_bytes": self.bytes_committed,
            **{verdict.value: self.verdicts.get(verdict.value, 0) for verdict in Verdict},
        }
