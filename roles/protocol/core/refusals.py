"""What a worker says of a validator to its trainer, and the proof that a refusal was false.

Theory of operation
-------------------
A worker whose submission was rejected hands the signed verdict and the content to the trainer,
which replays it by its own engine: an *appeal*. What the validator signed is weighed as what it
accepts is (`roles.protocol.core.lies`), the other way round. Let the trainer's replay be within
all limits of the run:

- the verdict names a statistic up to `lies.MARGIN` times its limit: *no fault*. Two honest
  engines differ by that, and a worker may tune its work to it;
- up to `lies.BEYOND_DOUBT` times: a *strike*;
- more, or a proof or shape that is said to be wrong and is not: a *lie*, which convicts alone.

One that stays below a limit's margin with all that it makes up is not convicted; it is found
as one that is of no use (`roles.trainer.core.punctual`), as is one that never answers. Some
reasons cannot be repeated from one submission: places in the draw order, and a worker's
history. Of these a worker can complain, as it can of silence: a *complaint* proves nothing by
itself.

A worker that has lied and was accepted may *confess*: what it hands over convicts who accepted
it, as any replay would, and nothing of the worker's is learnt from any more. Canaries do
(`roles.demo.canary`); so may any cheat. Before it hands such work in it *forewarns* the
trainer, which then does not learn from that content, however it comes.

A `FalseRefusal` is what an entry of a trainer's ledger says: the verdict, and where the content
is kept that it is about. A bystander opens it with `open_refusal` and replays the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from p2p.errors import BadMessage
from p2p.identity import PeerId, ProtocolId, Verify, decode_peer_id_untrusted
from p2p.wire import KI, fields_untrusted, pack, unpack_untrusted
from proofs.checks import Limits, Reason, Shape, Verdict
from roles.protocol.core.lies import (
    MAX_PATH,
    Acceptance,
    Finding,
    decode_acceptance_untrusted,
    decode_judged_untrusted,
)
from roles.protocol.core.messages import (
    MAX_REASON,
    Commitment,
    SignedVerdict,
    Submission,
    decode_commitment_untrusted,
    decode_verdict_untrusted,
)

APPEAL_PROTOCOL: Final = ProtocolId("/shoal/appeal/1.0.0")
"""A worker asks, the trainer answers with a `Ruled` and a sentence."""
REFUSALS: Final = "trainer/refusals"
"""Where a trainer keeps the appeals that convict, or may."""
REFUSAL_KIND: Final = "refusal"
"""Kind of a trainer's ledger entries that convict for one; the body is
`FalseRefusal.to_bytes`."""
MAX_RULING: Final = KI
"""Bytes of that answer."""

_SHAPE: Final = frozenset(
    reason.value
    for reason in (
        Reason.GROUP_SIZE, Reason.LENGTH, Reason.TOKEN, Reason.AFTER_END, Reason.UNFINISHED,
        Reason.MALFORMED_PROOF,
    )
)  # fmt: skip
"""What has no numerics in it: who says it of work of which it is not true lies."""
_NUMERIC: Final = frozenset(
    reason.value
    for reason in (
        Reason.EXPONENTS, Reason.MANTISSA_MEAN, Reason.MANTISSA_CHUNK, Reason.MANTISSA_MEDIAN,
        Reason.DRAW_DISTANCE, Reason.DRAW_GAP, Reason.SURPRISE, Reason.IMPROBABLE_END,
    )
)  # fmt: skip
"""What one replay of one submission repeats. Sums and counts of gaps (`DRAW_GAPS`,
`DRAW_MISMATCHES`) are not among it: a validator holds a worker's history against them."""


class Ruled(Enum):
    """What came of an appeal or a complaint."""

    UPHELD = "upheld"
    """The replay says of the work what its worker does, and not what the validator signed."""
    IN_VAIN = "in vain"
    """The replay says what the validator signed: no more of this worker's appeals and
    confessions are heard."""
    UNSURE = "unsure"
    """Nothing can be said: the policy is gone, or the reason is not of one submission."""
    HEARD = "heard"
    """A complaint was counted."""
    LATER = "later"
    """Too many appeals, or the trainer is busy."""


@dataclass(frozen=True, slots=True)
class Appeal:
    """A rejection and what was rejected; anybody can judge it who has the policy."""

    verdict: SignedVerdict
    submission: Submission

    def to_bytes(self) -> bytes:
        """The wire form, and that on disk."""
        return pack([self.verdict.to_bytes(), self.submission.to_bytes()])


def is_repeatable(reason: str) -> bool:
    """Whether a replay of the submission alone can contradict a verdict for this reason."""
    return reason in _SHAPE or reason in _NUMERIC


def decode_appeal_untrusted(data: bytes, verify: Verify) -> Appeal:
    """Raise `BadMessage` unless both parts are whole, signed and belong together, and the
    verdict rejects."""
    verdict, submission = decode_judged_untrusted(data, verify, "appeal")
    if verdict.verdict is not Verdict.REJECTED:
        raise BadMessage("an appeal is against a verdict that rejects")
    return Appeal(verdict, submission)


@dataclass(frozen=True, slots=True)
class Complaint:
    """That a validator leaves a worker waiting, or rejects for what nobody can repeat."""

    validator: PeerId
    commitment: Commitment
    """Of the work that waits; the connection says that it is the worker's own."""

    def to_bytes(self) -> bytes:
        """The wire form."""
        return pack([self.validator.digest, self.commitment.to_bytes()])


def decode_complaint_untrusted(data: bytes) -> Complaint:
    """Raise `BadMessage`, and nothing else, whatever the bytes."""
    validator, commitment = fields_untrusted(
        unpack_untrusted(data), bytes, bytes, what="complaint"
    )
    return Complaint(
        decode_peer_id_untrusted(validator), decode_commitment_untrusted(commitment)
    )


@dataclass(frozen=True, slots=True)
class Forewarning:
    """That a submission, which is yet to be handed in, is a lie: it is not to be learnt
    from."""

    commitment: Commitment

    def to_bytes(self) -> bytes:
        """The wire form; the connection says that the work is the worker's own."""
        return self.commitment.to_bytes()


Asked = Appeal | Complaint | Acceptance | Forewarning
"""What a worker tells its trainer."""
_KINDS: Final[Mapping[type, str]] = {
    Appeal: "appeal",
    Complaint: "complaint",
    Acceptance: "confession",
    Forewarning: "forewarning",
}


def commitment_of(asked: Asked) -> Commitment:
    """The work that it is about."""
    if isinstance(asked, Appeal | Acceptance):
        return asked.verdict.commitment
    return asked.commitment


def encode_asked(asked: Asked) -> bytes:
    """The question on `APPEAL_PROTOCOL`."""
    return pack([_KINDS[type(asked)], asked.to_bytes()])


def decode_asked_untrusted(data: bytes, verify: Verify) -> Asked:
    """Raise `BadMessage`, and nothing else, whatever the bytes."""
    kind, body = fields_untrusted(unpack_untrusted(data), str, bytes, what="question")
    match kind:
        case "appeal":
            return decode_appeal_untrusted(body, verify)
        case "complaint":
            return decode_complaint_untrusted(body)
        case "confession":
            return decode_acceptance_untrusted(body, verify)
        case "forewarning":
            return Forewarning(decode_commitment_untrusted(body))
        case _:
            raise BadMessage(f"{kind[:20]!r} is nothing that a trainer is asked")


def encode_ruling(ruled: Ruled, sentence: str) -> bytes:
    """The answer."""
    return pack([ruled.value, sentence[:MAX_REASON]])


def decode_ruling_untrusted(data: bytes) -> tuple[Ruled, str]:
    """Raise `BadMessage`, and nothing else, whatever the bytes."""
    value, sentence = fields_untrusted(unpack_untrusted(data), str, str, what="ruling")
    try:
        return Ruled(value), sentence[:MAX_REASON]
    except ValueError:
        raise BadMessage(f"{value[:20]!r} is no ruling") from None


def finding_of(verdict: SignedVerdict) -> Finding:
    """What a verdict says that rejects work in which a replay finds nothing wrong: its weight
    says how surely it is false."""
    if verdict.reason in _SHAPE:
        return Finding(Reason.MALFORMED_PROOF.value, 1, 0)
    if verdict.reason not in _NUMERIC:
        return Finding(verdict.reason, math.nan, 1)  # weighs nothing
    return Finding(verdict.reason, verdict.statistic, verdict.limit)


def accusation(verdict: SignedVerdict, limits: Limits, shape: Shape) -> Finding:
    """`finding_of` for a trainer that has looked by the ``limits`` and the ``shape`` of now,
    while the verdict may be of an edition before.

    The statistic is held against the looser of the two limits, the one that the verdict names
    and that of now: work that an edition has made acceptable was rejected rightly before it.
    Where the shape was another one, nothing is said.
    """
    finding, reason = finding_of(verdict), verdict.reason
    if reason in _SHAPED_BY:
        return finding if verdict.limit == _SHAPED_BY[reason](shape) else _SAYS_NOTHING
    if reason not in _LIMITED_BY:
        return finding
    looser = min if reason == Reason.IMPROBABLE_END.value else max
    limit = looser(verdict.limit, _LIMITED_BY[reason](limits))
    return Finding(reason, verdict.statistic, limit)


_SAYS_NOTHING: Final = Finding("judged by another edition", math.nan, 1)
_SHAPED_BY: Final[Mapping[str, Callable[[Shape], float]]] = {
    Reason.GROUP_SIZE.value: lambda shape: shape.group_size,
    Reason.LENGTH.value: lambda shape: shape.max_new_tokens,
    Reason.UNFINISHED.value: lambda shape: shape.max_new_tokens,
    Reason.TOKEN.value: lambda shape: shape.vocabulary,
}
"""The limit that a verdict on a shape names (`proofs.checks.check_shape`)."""
_LIMITED_BY: Final[Mapping[str, Callable[[Limits], float]]] = {
    Reason.EXPONENTS.value: lambda limits: limits.exponent_mismatches,
    Reason.MANTISSA_MEAN.value: lambda limits: limits.mantissa_limit(1.0),
    Reason.MANTISSA_CHUNK.value: lambda limits: limits.mantissa_limit(1.0),
    Reason.MANTISSA_MEDIAN.value: lambda limits: limits.mantissa_median,
    Reason.DRAW_DISTANCE.value: lambda limits: limits.draw_distance,
    Reason.DRAW_GAP.value: lambda limits: limits.gap_max,
    Reason.SURPRISE.value: lambda limits: limits.surprise,
    Reason.IMPROBABLE_END.value: lambda limits: limits.end_probability,
}
"""What a statistic is held against at most (`proofs.checks.judge`)."""


@dataclass(frozen=True, slots=True)
class FalseRefusal:
    """A signed rejection that a replay contradicts."""

    verdict: SignedVerdict
    path: str
    """Where the trainer keeps the appeal, in its folder."""

    @property
    def finding(self) -> Finding:
        """How surely it is false."""
        return finding_of(self.verdict)

    def __str__(self) -> str:
        return f"it rejected honest work as {self.verdict.reason!r}"

    def to_bytes(self) -> bytes:
        """The ledger form."""
        return pack([self.verdict.to_bytes(), self.path])


def decode_refusal_untrusted(data: bytes, verify: Verify) -> FalseRefusal:
    """Raise `BadMessage` unless it is whole, and the verdict in it one that rejects, signed by
    its validator."""
    verdict, path = fields_untrusted(unpack_untrusted(data), bytes, str, what="refusal")
    if len(path) > MAX_PATH:
        raise BadMessage("a refusal's path is too long")
    signed = decode_verdict_untrusted(verdict, verify)
    if signed.verdict is not Verdict.REJECTED:
        raise BadMessage("only a verdict that rejects is a refusal")
    return FalseRefusal(signed, path)


def open_refusal(entry: bytes, kept: bytes, verify: Verify) -> Appeal:
    """The appeal of which an entry of a trainer's ledger says that its verdict is false.

    For bystanders: ``kept`` is the file that `FalseRefusal.path` names. Whether the work can
    have been drawn say `open_refused` and `violated` in `roles.protocol.replay`. Raises
    `BadMessage`.
    """
    refusal = decode_refusal_untrusted(entry, verify)
    appeal = decode_appeal_untrusted(kept, verify)
    if appeal.verdict != refusal.verdict:
        raise BadMessage("what is kept is not what the verdict is about")
    return appeal
