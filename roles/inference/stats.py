"""What became of one inference node's work: counts for people."""

from __future__ import annotations

from dataclasses import dataclass, field

from p2p.shardcast.manifest import NO_POLICY, PolicyVersion
from proofs.checks import Verdict
from roles.protocol.core.messages import SignedVerdict
from roles.shared.reasons import because, printable, tally


@dataclass(slots=True)
class InferenceCounts:
    """What has become of the work of this process."""

    submitted: int = 0
    rollouts: int = 0
    """Completions in a submission: what people count in."""
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
    waits: str = ""
    """Why no work is begun now, though there is a policy; empty if it is."""

    def count(self, verdict: SignedVerdict) -> None:
        """A verdict came."""
        kind = verdict.verdict.value
        self.verdicts[kind] = self.verdicts.get(kind, 0) + 1
        if verdict.verdict is Verdict.REJECTED:
            tally(self.reasons, printable(verdict.reason))

    def note_policy(self, version: PolicyVersion) -> None:
        """The engine runs ``version`` from now on."""
        if version != self.version:
            self.policies_loaded += 1
            self.policies_skipped += max(0, version - self.version - 1)
            self.version = version

    def health(self) -> dict[str, object]:
        """As plain values."""
        return {
            "version": int(self.version),
            "submitted": self.submitted,
            "policies_loaded": self.policies_loaded,
            "policies_skipped": self.policies_skipped,
            "retries": self.retries,
            "uploads": self.uploads,
            "refusal": self.refusal,
            "waits": self.waits,
            "idle": self.idle,
            **{verdict.value: self.verdicts.get(verdict.value, 0) for verdict in Verdict},
        }

    def describe(self) -> str:
        """In rollouts, for people: how many were made, and what became of them."""
        made, each = self.submitted, self.rollouts
        parts = [f"rollouts {made * each:,} made"]
        parts.append(f"{self.verdicts.get(Verdict.ACCEPTED.value, 0) * each:,} accepted")
        rejected = self.verdicts.get(Verdict.REJECTED.value, 0)
        parts.append(f"{rejected * each:,} rejected{because(self.reasons)}")
        parts += [f"refused: {self.refusal}"] if self.refusal else []
        parts += [f"waits: {self.waits}"] if self.waits else []
        return ", ".join(parts)
