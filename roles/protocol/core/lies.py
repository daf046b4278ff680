"""How sure it is that a validator lies, and the proof that is kept of it.

Theory of operation
-------------------
A validator signs that a submission was drawn by the policy, what it pays, and with which
log-probs. A trainer or bystander that repeats it with another engine finds numbers that differ
a little, as numerics do, and limits that honest work exceeds now and then. So a `Finding` is
weighed by how far it lies beyond its limit:

- up to `MARGIN` times: *no fault*. A worker that tunes its work to just below a limit
  finds validators that accept what another machine rejects: they must not be convicted by it;
- up to `BEYOND_DOUBT` times: a *strike*; `STRIKES` of the last `WINDOW` looks convict;
- further, or a proof that is no proof, or a reward that no environment pays: a *lie*, which
  convicts alone. In float32 every cheat is far beyond: made-up tokens are 500 times, an older
  policy 20 times. In bfloat16 made-up tokens are 14 times, int8 weights and other temperatures
  strikes.

A `Lie` is what an entry of a trainer's ledger says: the signed verdict, and where the delivery
is kept that it came with. With both, a bystander needs no trust in the trainer: `open_lie`
checks all signatures and digests, `roles.protocol.replay.examine` repeats the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from p2p.bounded import BoundedDict
from p2p.errors import BadMessage
from p2p.identity import PeerId, Verify
from p2p.wire import fields_untrusted, pack, unpack_untrusted
from proofs.checks import Reason, Verdict
from roles.protocol.core.messages import (
    MAX_REASON,
    AcceptedWork,
    SignedVerdict,
    decode_delivery_untrusted,
    decode_verdict_untrusted,
)

MARGIN: Final = 1.5
"""Up to so many times a limit no validator is accused: two honest engines that measure one
statistic near a limit differ by less."""
BEYOND_DOUBT: Final = 10.0
"""More times a limit than any honest numerics: in bfloat16 a token 9 nats below its draw, where
one in a million is 1 below."""
STRIKES: Final = 3
"""Findings between the two that convict together. A false one in 10,000 replays makes three in
one window of 100 once in six million windows."""
WINDOW: Final = 100
"""Looks at one validator's work among which strikes are counted."""
LOGPROBS_LIMIT: Final = 0.3
"""Nats by which log-probs may differ from ours in the mean over a submission's tokens. In
bfloat16 single tokens of honest work differ by up to 0.6, in the mean by a hundredth."""
MOST_NATS: Final = 20.0
"""More than that between two log-probs of one token counts as that much."""
REWARDS_LIMIT: Final = 1e-3
"""By which a reward may differ from ours: environments are the same code on the same data, and
differ by a rounding at most."""
MAX_PATH: Final = 200
"""Characters of the path of a kept delivery."""

LOGPROBS: Final = "log-probs differ from a replay's"
REWARDS: Final = "rewards differ from the environment's"
NO_REWARD: Final = "a reward that no environment pays"
NO_ANSWER: Final = "content that is no answer to the tasks of its place"

_CERTAIN: Final = (Reason.MALFORMED_PROOF.value, NO_REWARD, NO_ANSWER)
"""Reasons that have no numerics in them."""
_WHATEVER_THE_RUN: Final = (*_CERTAIN, REWARDS, LOGPROBS)
"""Reasons that no limits of the run have a part in."""
_NEVER_ALONE: Final = (Reason.SURPRISE.value, Reason.IMPROBABLE_END.value, REWARDS)
"""Heavy tails, and the code of others, which may depend on the machine after all."""


class Weight(IntEnum):
    """What a finding says of the validator that signed otherwise."""

    NOTHING = 0
    BORDERLINE = 1
    """Not what was signed, and no validator's fault."""
    STRIKE = 2
    LIE = 3


@dataclass(frozen=True, slots=True)
class Finding:
    """One number that is not what an accepting verdict says it is."""

    reason: str
    statistic: float
    limit: float

    @property
    def weight(self) -> Weight:
        """How much it says."""
        if self.reason in _CERTAIN:
            return Weight.LIE
        excess = self._excess
        if not excess > MARGIN:  # also what is no number: our engine's trouble
            return Weight.BORDERLINE
        if excess <= BEYOND_DOUBT or self.reason in _NEVER_ALONE:
            return Weight.STRIKE
        return Weight.LIE

    @property
    def is_of_the_run(self) -> bool:
        """Whether it is one of the run's limits that is exceeded."""
        return self.reason not in _WHATEVER_THE_RUN

    @property
    def _excess(self) -> float:
        """By which factor the limit is exceeded, or, of a least value, fallen short of. Of a
        limit of zero, which counts have, by how many."""
        if self.reason == Reason.IMPROBABLE_END.value:
            return self.limit / self.statistic if self.statistic > 0 else math.inf
        return self.statistic / (self.limit or 1.0)

    def __str__(self) -> str:
        return f"{self.reason} ({self.statistic:g}, limit {self.limit:g})"


def worst(findings: Iterable[Finding]) -> Finding | None:
    """The one that weighs most, the first of equals; None of none."""
    return max(findings, key=lambda finding: finding.weight, default=None)


@dataclass(frozen=True, slots=True)
class Lie:
    """A signed verdict that a replay, or the environment, contradicts."""

    verdict: SignedVerdict
    finding: Finding
    path: str
    """Where the trainer keeps the delivery, in its folder."""

    def to_bytes(self) -> bytes:
        """The ledger form."""
        found = self.finding
        return pack(
            [
                self.verdict.to_bytes(),
                found.reason,
                float(found.statistic),
                float(found.limit),
                self.path,
            ]
        )


def decode_lie_untrusted(data: bytes, verify: Verify) -> Lie:
    """Raise `BadMessage` unless it is whole, and the verdict in it one that accepts, signed by
    its validator."""
    verdict, reason, statistic, limit, path = fields_untrusted(
        unpack_untrusted(data), bytes, str, float, float, str, what="lie"
    )
    if len(reason) > MAX_REASON or len(path) > MAX_PATH:
        raise BadMessage("a lie's reason or path is too long")
    signed = decode_verdict_untrusted(verdict, verify)
    if signed.verdict is not Verdict.ACCEPTED:
        raise BadMessage("only a verdict that accepts is a lie")
    return Lie(signed, Finding(reason, statistic, limit), path)


def open_lie(entry: bytes, kept: bytes, verify: Verify) -> AcceptedWork:
    """The work of which an entry of a trainer's ledger says that its verdict is a lie.

    For bystanders: ``kept`` is the file that `Lie.path` names. What comes out was signed by the
    validator as accepted, by the worker as its own, and is whole; whether it can have been
    drawn says `roles.protocol.replay.examine`. Raises `BadMessage`.
    """
    lie = decode_lie_untrusted(entry, verify)
    work = decode_delivery_untrusted(kept, verify)
    if work.verdict != lie.verdict:
        raise BadMessage("what is kept is not what the verdict is about")
    return work


class Strikes:
    """The last looks at each validator's work, and what of them was found."""

    def __init__(self) -> None:
        self._looks: dict[tuple[PeerId, str], BoundedDict[bytes, Lie | None]] = {}

    @property
    def pending(self) -> dict[str, None]:
        """Where the strikes are kept that still count."""
        looks = (lie for looks in self._looks.values() for lie in looks.values())
        return {lie.path: None for lie in looks if lie is not None}

    def note(self, verdict: SignedVerdict, kind: str, found: Lie | None) -> tuple[Lie, ...]:
        """Count a look of ``kind`` at what ``verdict`` is about; the lies that convict its
        validator now, if any do.

        Looks of two kinds are counted apart: replays, and rewards. A
        submission is counted once, however often it is handed over: one that is not taken would
        be several strikes, or push strikes out of the window.
        """
        weight = Weight.NOTHING if found is None else found.finding.weight
        if found is not None and weight is Weight.LIE:
            return (found,)
        empty: BoundedDict[bytes, Lie | None] = BoundedDict(WINDOW)
        looks = self._looks.setdefault((verdict.validator, kind), empty)
        content = verdict.commitment.content
        if looks.get(content) is None:
            looks[content] = found if weight is Weight.STRIKE else None
        strikes = tuple(lie for lie in looks.values() if lie is not None)
        return strikes if len(strikes) >= STRIKES else ()
