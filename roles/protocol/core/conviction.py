"""Proof that a validator or a worker lied, which a bystander repeats.

A verdict is weighed by what a replay of the same place finds (`weigh`). Where the two
contradict each other, the proof accuses the validator; where both reject, the worker. `convict`
is the only constructor: it checks commitment, terms, verdict, submission and finding against
each other, and what does not fit accuses nobody. A bystander opens the kept bytes with
`open_conviction_untrusted` and replays the content: numerics are all that is left to repeat.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from p2p.errors import BadMessage
from p2p.identity import PeerId, Verify
from p2p.wire import fields_untrusted, pack, unpack_untrusted
from proofs.checks import Reason, Verdict
from roles.protocol.core.findings import NO_ANSWER, NO_REWARD, Finding, Weight
from roles.protocol.core.verdict import MAX_REASON, SignedVerdict, decode_verdict_untrusted
from roles.protocol.core.window import (
    Commitment,
    Submission,
    bind_untrusted,
    decode_submission_untrusted,
)

_WITHOUT_NUMERICS: Final = frozenset(
    (
        *(NO_ANSWER, NO_REWARD),
        *(Reason.GROUP_SIZE.value, Reason.LENGTH.value, Reason.TOKEN.value),
        *(Reason.AFTER_END.value, Reason.UNFINISHED.value, Reason.MALFORMED_PROOF.value),
    )
)
"""Reasons that no honest scorer gives by mistake."""
_NUMERIC: Final = frozenset(reason.value for reason in Reason) - _WITHOUT_NUMERICS


def weigh(verdict: SignedVerdict, finding: Finding | None) -> Weight:
    """Return how strongly a replay speaks against the validator that signed ``verdict``.

    ``finding`` is the worst that the replay found, None if all is within limits. A rejection
    that the replay does not repeat weighs as much as what it alleges: two honest engines differ
    near a limit, and never far beyond it.
    """
    if verdict.verdict is Verdict.ACCEPTED:
        return Weight.NOTHING if finding is None else finding.weight
    if verdict.verdict is not Verdict.REJECTED or finding is not None:
        return Weight.NOTHING
    if verdict.reason in _WITHOUT_NUMERICS:
        return Weight.LIE
    if verdict.reason in _NUMERIC:
        return alleged(verdict).weight
    return Weight.STRIKE  # a claim, a reward, or a reason that nobody knows


def alleged(verdict: SignedVerdict) -> Finding:
    """Return the finding that a rejecting verdict alleges against the worker."""
    return Finding(verdict.reason, verdict.statistic, verdict.limit)


@dataclass(frozen=True, slots=True)
class Conviction:
    """A verdict, its place, and the finding of a replay. Make it with `convict`."""

    verdict: SignedVerdict
    submission: Submission
    finding: Finding | None

    @property
    def accused(self) -> PeerId:
        """Peer that lied: the worker if verdict and replay both reject, else the validator."""
        if self.verdict.verdict is Verdict.REJECTED and self.finding is not None:
            return self.verdict.commitment.node
        return self.verdict.validator

    @property
    def weight(self) -> Weight:
        """Weight of the proof. A lie convicts alone; three strikes convict together."""
        if self.accused == self.verdict.validator:
            return weigh(self.verdict, self.finding)
        return Weight.NOTHING if self.finding is None else self.finding.weight

    def to_bytes(self) -> bytes:
        """Return the form on disk."""
        found = self.finding
        row = [found.reason, float(found.statistic), float(found.limit)] if found else None
        return pack([self.verdict.to_bytes(), self.submission.to_bytes(), row])


def convict(
    commitment: Commitment,
    terms: bytes,
    verdict: SignedVerdict,
    submission: Submission,
    finding: Finding | None,
    verify: Verify,
) -> Conviction:
    """Return the proof that these five items make together.

    Args:
        commitment: The place that was replayed.
        terms: Digest of the terms that the replay judged by.
        verdict: Verdict that the validator signed.
        submission: Submission that was replayed.
        finding: Worst finding of the replay; None if everything is within limits.
        verify: Checks the signatures of verdict and window.

    Raises:
        BadMessage: The items do not fit each other, or prove nothing. Nobody is accused then.
    """
    if verdict.commitment != commitment or submission.commitment != commitment:
        raise BadMessage("verdict, content and replay are not about the same place")
    if commitment.terms != terms:
        raise BadMessage("the work was made under other terms than it was judged by")
    bind_untrusted(submission.signed, submission.index, submission.content)
    if not verdict.has_valid_signature(verify):
        raise BadMessage("the verdict's signature is not its scorer's")
    if not submission.signed.has_valid_signature(verify):
        raise BadMessage("the window's signature is not its worker's")
    conviction = Conviction(verdict, submission, finding)
    least = Weight.STRIKE if conviction.accused == verdict.validator else Weight.LIE
    if conviction.weight < least:
        raise BadMessage("what the replay found accuses nobody")
    return conviction


def open_conviction_untrusted(
    data: bytes, terms: Collection[bytes], verify: Verify
) -> Conviction:
    """Open a kept proof, for bystanders.

    Args:
        data: Result of `Conviction.to_bytes`.
        terms: Digests of the terms of the run's editions that the bystander knows.
        verify: Checks signatures.

    Raises:
        BadMessage: The data is no proof, and convicts nobody.
    """
    raw_verdict, raw_submission, row = fields_untrusted(
        unpack_untrusted(data), bytes, bytes, (list, type(None)), what="conviction"
    )
    verdict = decode_verdict_untrusted(raw_verdict, None)
    submission = decode_submission_untrusted(raw_submission, verify)
    judged_by = verdict.commitment.terms
    if judged_by not in terms:
        raise BadMessage("the work was made under terms that are not the run's")
    finding = None
    if row is not None:
        reason, statistic, limit = fields_untrusted(row, str, float, float, what="finding")
        if len(reason) > MAX_REASON:
            raise BadMessage(f"a finding's reason has at most {MAX_REASON} characters")
        finding = Finding(reason, statistic, limit)
    return convict(verdict.commitment, judged_by, verdict, submission, finding, verify)
