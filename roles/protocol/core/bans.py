"""Bans: signed, with the evidence that a bystander repeats, for a time, and by enough officers.

Theory of operation
-------------------
A ban is an entry of an officer's ledger. It cites *evidence*: verdicts that reject work of one
worker, each signed by its validator and bound to the content, which the author of the ban keeps
(`roles.shared.evidence`). Evidence convicts by the rule by which a trainer convicts validators
(`roles.protocol.core.lies`), so that an honest worker whose numerics are near a limit, or which
was late, is never banned: one finding that is beyond doubt, or `STRIKES` that are well beyond a
limit, under three policies that follow on each other.

One validator's word ends nobody's work, as it may lie. A ban *holds* if a third of the run's
validators, and at least two where there are two, have each repeated the evidence, signed a
rejection of their own and banned by it (`quorum`), or if a trainer has, on whose word the run
rests anyway. Liars that are fewer than a third ban nobody, and an honest third is enough. The
author of a ban keeps to it alone: it need not work for whom it caught. What an officer stated
that has told two stories counts for nothing, and nobody bans the run's officers, or its owner:
for those there are editions.

A ban ends by the term of the run, from when it was signed. The same evidence does not ban
twice, so that a ban cannot be prolonged without a new lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from p2p.bounded import BoundedDict
from p2p.errors import BadMessage
from p2p.identity import PeerId, Verify
from p2p.ledger.core.chain import Entry
from p2p.wire import fields_untrusted, pack, unpack_untrusted
from proofs.checks import Reason, Verdict
from roles.protocol.core.lies import STRIKES, Finding, Weight
from roles.protocol.core.messages import SignedVerdict, decode_verdict_untrusted
from roles.run.core.file import Run

BAN_KIND: Final = "ban"
MAX_CITED: Final = STRIKES
"""Verdicts of one ban: as many as it takes to convict by strikes."""
MAX_BANNED: Final = 4096
"""Workers of which bans are remembered: a new identity costs a stamp, a ban a replay. Whose was
signed longest ago is forgotten first."""
SPREAD: Final = 2
"""Versions by which the policies of strikes may differ: as many as are kept where ``lag`` is 2.
A worker fills some 150 places under three of them, among which three false strikes come once in
two million."""

_BY_REPLAY: Final = (
    Reason.EXPONENTS,
    Reason.MANTISSA_MEAN,
    Reason.MANTISSA_CHUNK,
    Reason.MANTISSA_MEDIAN,
    Reason.DRAW_DISTANCE,
    Reason.DRAW_GAP,
    Reason.DRAW_GAPS,
    Reason.DRAW_MISMATCHES,
    Reason.IMPROBABLE_END,
    Reason.SURPRISE,
)
"""What only a model that is run can find. The rest, such as a shape, a place or an age that is
wrong, an honest worker may come to by a restart, a bad line or an old version of the
program."""
_REASONS: Final = {reason.value: None for reason in _BY_REPLAY}


def weight_of(verdict: SignedVerdict) -> Weight:
    """How much a verdict says of the worker whose work it rejects."""
    if verdict.verdict is not Verdict.REJECTED or verdict.reason not in _REASONS:
        return Weight.NOTHING
    return Finding(verdict.reason, verdict.statistic, verdict.limit).weight


def convicts(verdicts: Sequence[SignedVerdict]) -> bool:
    """Whether these are evidence enough: of one worker in one run, each about other work."""
    if not verdicts or not _are_of_one(verdicts):
        return False
    weights = [weight_of(verdict) for verdict in verdicts]
    if Weight.LIE in weights:
        return True
    versions = [verdict.commitment.version for verdict in verdicts]
    strikes = sum(weight is Weight.STRIKE for weight in weights)
    return strikes >= STRIKES and max(versions) - min(versions) <= SPREAD


def _are_of_one(verdicts: Sequence[SignedVerdict]) -> bool:
    first = verdicts[0].commitment
    contents = {verdict.commitment.content for verdict in verdicts}
    return len(contents) == len(verdicts) and all(
        (one.commitment.node, one.commitment.run) == (first.node, first.run) for one in verdicts
    )


@dataclass(frozen=True, slots=True)
class Ban:
    """What an officer signs."""

    evidence: tuple[SignedVerdict, ...]
    until: int
    """Wall time, in seconds since 1970."""

    @property
    def culprit(self) -> PeerId:
        """Whose work it was."""
        return self.evidence[0].commitment.node

    @property
    def run(self) -> bytes:
        """In which run."""
        return self.evidence[0].commitment.run

    @property
    def gravest(self) -> SignedVerdict:
        """What people are shown of the evidence."""
        return max(self.evidence, key=weight_of)

    def to_bytes(self) -> bytes:
        """The ledger form."""
        return pack([[verdict.to_bytes() for verdict in self.evidence], self.until])


def decode_ban_untrusted(data: bytes, verify: Verify) -> Ban:
    """Raise `BadMessage` unless its evidence is signed by validators, whoever they are, and
    convicts."""
    bodies, until = fields_untrusted(unpack_untrusted(data), list, int, what="ban")
    if not 0 < len(bodies) <= MAX_CITED or not all(isinstance(one, bytes) for one in bodies):
        raise BadMessage(f"a ban cites 1 to {MAX_CITED} verdicts")
    verdicts = tuple(decode_verdict_untrusted(body, verify) for body in bodies)
    if not convicts(verdicts):
        raise BadMessage("the evidence of a ban does not convict")
    if not 0 <= until < 2**53:
        raise BadMessage("a ban ends at no time")
    return Ban(verdicts, until)


def quorum(validators: int) -> int:
    """How many of so many validators must have found a worker lying for all to shut it out."""
    return max(validators // 3 + 1, min(validators, 2))


@dataclass(slots=True)
class _Case:
    """What is known of one worker: its bans by their authors, and what has been cited."""

    bans: dict[PeerId, tuple[int, Ban]] = field(default_factory=dict)
    cited: dict[tuple[PeerId, bytes], None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HeldBan:
    """A ban that holds."""

    until: int
    by: tuple[PeerId, ...]
    """Who has proven it."""
    ban: Ban


class Bans:
    """All bans that one node knows of."""

    def __init__(self, verify: Verify) -> None:
        self._verify = verify
        self._cases: BoundedDict[PeerId, _Case] = BoundedDict(MAX_BANNED)

    def __iter__(self) -> Iterator[PeerId]:
        """Who has been banned by anyone; of some it does not hold, or no longer."""
        return iter(tuple(self._cases))

    def note_untrusted(self, entry: Entry, run: Run, now: float) -> Ban | None:
        """Take up an entry of an officer's ledger; the ban, if it is a new one. Raise
        `BadMessage` if it is void: of another run, by no officer, against one, or without
        evidence."""
        if entry.kind != BAN_KIND:
            return None
        ban = decode_ban_untrusted(entry.body, self._verify)
        if ban.run != run.id:
            raise BadMessage("a ban of another run")
        if entry.author not in run.officers:
            raise BadMessage(f"{entry.author} is no officer of this run, and bans nobody")
        if ban.culprit in run.officers or ban.culprit == run.owner:
            raise BadMessage("officers of a run and its owner are not banned")
        if any(one.validator not in run.terms.validators for one in ban.evidence):
            raise BadMessage("a ban cites one that is no validator of this run")
        is_trainer = entry.author in run.terms.trainers
        if not is_trainer and any(one.validator != entry.author for one in ban.evidence):
            raise BadMessage("a validator bans by verdicts of its own")
        case = self._cases.get(ban.culprit) or _Case()
        self._cases.renew(ban.culprit, case)
        keys = [(entry.author, one.commitment.content) for one in ban.evidence]
        if any(key in case.cited for key in keys):
            return None
        case.cited.update(dict.fromkeys(keys[:MAX_CITED]))
        until = min(ban.until, int(min(entry.wall, now)) + run.terms.ban_seconds)
        before, _ = case.bans.get(entry.author, (0, ban))
        if until > before:
            case.bans[entry.author] = until, ban
        return ban

    def authors(self, culprit: PeerId) -> tuple[PeerId, ...]:
        """Who has ever banned it, as far as is remembered."""
        case = self._cases.get(culprit)
        return () if case is None else tuple(case.bans)

    def signers(
        self, culprit: PeerId, run: Run, now: float, counts: Callable[[PeerId], bool]
    ) -> dict[PeerId, int]:
        """Which officers' bans of ``culprit`` have not ended, and when each ends. ``counts``
        says of an author whether its word does."""
        case = self._cases.get(culprit)
        if case is None or culprit in run.officers or not run.terms.ban_seconds:
            return {}
        return {
            author: until
            for author, (until, _) in case.bans.items()
            if until > now and author in run.officers and counts(author)
        }

    def standing(
        self,
        culprit: PeerId,
        run: Run,
        now: float,
        counts: Callable[[PeerId], bool],
        own: PeerId | None = None,
    ) -> HeldBan | None:
        """The ban of ``culprit``, if one holds now for the node ``own``."""
        signers = self.signers(culprit, run, now, counts)
        if not signers:
            return None
        ends = sorted(
            (until for who, until in signers.items() if who in run.terms.validators),
            reverse=True,
        )
        needed = quorum(len(run.terms.validators))
        alone = [until for who, until in signers.items() if who in (own, *run.terms.trainers)]
        until = max([*alone, *ends[needed - 1 : needed]], default=0)
        if until <= now:
            return None
        first = min(signers)
        return HeldBan(until, tuple(signers), self._cases[culprit].bans[first][1])
