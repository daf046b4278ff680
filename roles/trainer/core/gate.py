"""Standing of names, their committed windows, and the validators: decides whose work may teach.

One `Gate` judges all that comes to a trainer, by the rules of docs/trust.md. It is sans-I/O:
time, the newest version and the run's terms come with each call (`Situation`), and the gate
keeps no copy of them. Dice are BLAKE3 under a secret, over a window's digest: neither a restart
nor a repetition throws twice.

A driver calls a method, then writes what `take_changed` returns, each row a file that is
replaced atomically and in the order given, and only then answers its peer. Whatever a crash
leaves unwritten, the peer repeats its request, and the outcome is the same.

A name *owes* places: ``probation`` of them when it is new or has lied, and ``1 / share`` after
a failure that is forgiven, since in the mean so many places of junk pass before the dice want
one. So keeping back what the dice want never pays, however often it is forgiven. A name is in
standing when it owes nothing. Places of newcomers count when all wanted places of their window
are settled and no audit of them is open.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, Protocol

from blake3 import blake3

from p2p.bounded import BoundedDict
from p2p.errors import BadMessage
from p2p.identity import PeerId, Verify
from p2p.shardcast.manifest import PolicyVersion
from p2p.wire import pack
from proofs.checks import Verdict
from roles.protocol.core.answer import Refused
from roles.protocol.core.conviction import Conviction, convict, weigh
from roles.protocol.core.findings import HEARS_OTHER, STRIKES, Finding, Weight
from roles.protocol.core.verdict import SignedVerdict
from roles.protocol.core.window import (
    Claim,
    Commitment,
    SignedWindow,
    Submission,
    Window,
)
from roles.trainer.core.records import (
    AUDITED,
    FORGIVEN_EVERY,
    MAX_KEPT,
    UNDECIDED,
    Assignment,
    AwaitedAudit,
    NameRecord,
    PlaceState,
    ValidatorRecord,
    WindowRecord,
    decode_name_untrusted,
    decode_validator_untrusted,
)

MAX_IN_STANDING: Final = 16_384
"""Names in standing that are remembered. If there are more, the one that ranks lowest (not
listed, fewest places that stood) waits among the newcomers."""
MAX_NEWCOMERS: Final = 4_096
"""Newcomers that are remembered; the one that did nothing for the longest makes room."""
MAX_OPEN: Final = 32
"""Most windows of a name in standing that may be unsettled: 512 places."""
MAX_OPEN_NEWCOMER: Final = 8
MAX_AHEAD: Final = 64
"""Most places that a name in standing may commit after one whose content has not come. A worker
that keeps back a wanted place has to wait until it is overdue."""
DUE: Final = 600.0
"""Served seconds within which wanted content, a verdict or audited content has to come."""
LOST: Final = 4 * DUE
"""Served seconds after which content that came and was never scored counts as lost: the trainer
was killed meanwhile, and the sender is gone. Nobody is blamed."""
BAN: Final = 24 * 3600.0
"""Duration of a ban in seconds of wall time."""
NEWCOMERS_LOAD: Final = 0.1
"""Share of its time that the trainer's scorer gives to newcomers once a name is in standing."""
AUDITS: Final = 0.05
"""Share of verdicts that the trainer repeats. Half are drawn by dice and half are contested
rejections; what contests do not use goes to the dice as well."""
CREDIT: Final = 2.0
"""Most contested rejections that the budget may save up."""
ASKS_AGAIN: Final = 150.0
"""Served seconds after which a noted contest is forgotten unless the worker asks again."""
MAX_NETWORKS: Final = 1_024
LONGEST_PASS: Final = 3_600.0
"""Longest time, in served seconds, for which a silent validator is passed over before it is
tried again."""


class TrustNumbers(Protocol):
    """The settings of the run's ``[trust]`` that the gate reads."""

    @property
    def share(self) -> float:
        """Chance that a place which teaches nothing is wanted all the same."""

    @property
    def probation(self) -> int:
        """Number of places that have to stand before a name is in standing."""

    @property
    def window(self) -> int:
        """Most places of a window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """The facts that hold at the moment of a call."""

    served: float
    """Seconds in which the desk served and had room, including earlier processes. Deadlines
    count only these."""
    wall: float
    """Seconds since the epoch. Bans are measured by it."""
    newest: PolicyVersion
    terms: bytes
    """Digest of the newest edition's terms (`roles.protocol.core.terms`)."""
    validators: tuple[PeerId, ...]
    """Validators of the newest edition."""
    trust: TrustNumbers
    lag: int
    newcomers_load: float = 0.0
    """Share of the last minutes' served time that the trainer's own scorer spent on
    newcomers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The gate's knowledge about a name, for answers, pages and the driver's own checks."""

    stood: int = 0
    owed: int = 0
    is_in_standing: bool = False
    banned_until: float = 0.0
    """Wall time until which the name is banned; 0 if it is not banned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Consequence:
    """The consequence of a decision for a worker."""

    node: PeerId
    reason: str
    drop: tuple[Commitment, ...] = ()
    """Commitments to places that may not be learnt from any more."""
    is_newcomer_again: bool = False
    is_forgiven: bool = False
    banned_until: float | None = None
    """Wall time until which the worker is banned; None if it is not banned."""


class Wish(Enum):
    """The trainer's reaction to a verdict or a contest."""

    IGNORE = "ignore"
    """The message changes nothing: wrong scorer, not wanted, or too late. The sender may forget
    it."""
    TAKE = "take"
    """The message counts, or counted before."""
    SEND = "send"
    """The message counts and the trainer repeats the verdict: the sender has to send window and
    content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audited:
    """The result of an audit."""

    validator: PeerId
    worker: Consequence | None
    weight: Weight
    """Weight of the audit against the validator."""
    is_convicted: bool = False
    """True if this audit has convicted the validator."""
    proof: Conviction | None = None
    """Proof to keep: against the validator, or of the worker's ban if it accuses the worker."""
    strikes: tuple[bytes, ...] = ()
    """Digests of the commitments whose audits convict together, oldest first; a single one if
    it is a lie beyond doubt. Strikes for silence are among them and have no evidence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The record of one name or validator, to be written or deleted."""

    kind: str
    """``name`` or ``validator``."""
    peer: PeerId
    data: bytes | None
    """Content of the file; None deletes it."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A wanted place, its window and its worker."""

    name: NameRecord
    one: WindowRecord
    commitment: Commitment

    @property
    def state(self) -> PlaceState:
        return self.one.states[self.commitment.index]

    @property
    def audit(self) -> AwaitedAudit | None:
        return self.one.audits.get(self.commitment.index)

    @property
    def scorer(self) -> PeerId:
        return self.one.assignment.scorer


class Gate:
    """Standing, windows, dice and validators of a run, as its trainer sees them."""

    def __init__(
        self,
        me: PeerId,
        secret: bytes,
        *,
        most_in_standing: int = MAX_IN_STANDING,
        most_newcomers: int = MAX_NEWCOMERS,
    ) -> None:
        """Make a gate that knows nobody.

        Args:
            me: The trainer.
            secret: 32 bytes from the trainer's disk that key all dice.
            most_in_standing: Names in standing that are remembered.
            most_newcomers: Newcomers that are remembered.
        """
        self._me = me
        self._secret = secret
        self._most_in_standing = most_in_standing
        self._most_newcomers = most_newcomers
        self._in_standing: dict[PeerId, NameRecord] = {}
        self._newcomers: dict[PeerId, NameRecord] = {}
        self._validators: dict[PeerId, ValidatorRecord] = {}
        self._credit = CREDIT
        self._contests: BoundedDict[str, float] = BoundedDict(MAX_NETWORKS)
        """Maps each network to the time at which it last asked for a contested rejection to be
        repeated."""
        self._contested: BoundedDict[str, float] = BoundedDict(MAX_NETWORKS)
        """Maps each network to the time at which one of its contested rejections was
        repeated."""
        self._repeated: BoundedDict[str, float] = BoundedDict(MAX_NETWORKS)
        """Maps each network to the time at which a first rejection beyond doubt was
        repeated."""
        self._changed: dict[tuple[str, PeerId], None] = {}

    # -- records ---------------------------------------------------------------------------

    def take_changed(self) -> list[Row]:
        """Return the rows that changed since the last call, in the order in which they must be
        written: validators first, so that no strike is lost."""
        rows = []
        for kind, peer in sorted(self._changed, key=lambda one: one[0], reverse=True):
            known = self._find(peer) if kind == "name" else self._validators.get(peer)
            rows.append(Row(kind=kind, peer=peer, data=known.to_bytes() if known else None))
        self._changed.clear()
        return rows

    def put_back(self, rows: Iterable[Row]) -> None:
        """Mark rows as changed again that could not be written."""
        for row in rows:
            self._touch(row.peer, row.kind)

    def restore_untrusted(self, kind: str, peer: PeerId, data: bytes) -> None:
        """Restore a row that an earlier process wrote.

        Raises:
            BadMessage: The data is no row of this kind.
        """
        if kind == "validator":
            self._validators[peer] = decode_validator_untrusted(data)
        elif kind == "name":
            name = decode_name_untrusted(peer, data)
            self._newcomers[peer] = name
            self._place(peer, name)
        else:
            raise BadMessage(f"a gate has no row of kind {kind!r:.20}")

    def standing(self, name: PeerId, now: Situation, *, is_listed: bool) -> Standing:
        """Return the standing of ``name``."""
        known = self._find(name)
        if known is None:
            owed = 0 if is_listed else now.trust.probation
            return Standing(owed=owed, is_in_standing=is_listed)
        has_earned_it = not known.owed and name in self._in_standing
        is_in_standing = has_earned_it or (is_listed and not known.has_fallen)
        return Standing(
            stood=known.stood,
            owed=0 if is_in_standing else known.owed,
            is_in_standing=is_in_standing,
            banned_until=known.banned_until,
        )

    # -- windows ---------------------------------------------------------------------------

    def commit(
        self, signed: SignedWindow, now: Situation, *, is_listed: bool
    ) -> Assignment | Refused:
        """Assign the places of a window whose signature, run and policy digest the driver has
        checked.

        A window without places changes nothing; it asks how many places are wanted. A refusal
        for lack of room has ``retry`` set and blames nobody. ``is_listed``: the run file names
        the worker, or the worker holds the owner's invite.
        """
        window = signed.window
        name = self._find(window.node)
        if (refused := self._refuse(window, name, now)) is not None:
            return refused
        if name is not None and (known := name.windows.get(window.digest)) is not None:
            return known.assignment
        if name is not None:
            self._place(window.node, name)
        standing = self.standing(window.node, now, is_listed=is_listed)
        is_newcomer = not standing.is_in_standing
        if not window.contents:
            return self._assign(window, (), self._me, standing)
        if (refused := self._refuse_places(window, name, now, is_newcomer)) is not None:
            return refused
        scorer = self._draw_scorer(window, now) if is_newcomer else self._me
        if is_newcomer and scorer == self._me and self.spares_newcomers(now):
            reason = "the trainer has no time to score newcomers now: ask again in a minute"
            return Refused(reason, retry=True)
        name = name or self._add(window.node, now)
        name.is_listed = is_listed
        name.owed = min(name.owed, now.trust.probation)
        name.active = now.served
        name.unforgiven += len(window.contents)
        fresh = now.newest - now.lag
        name.next = {one: index for one, index in name.next.items() if one >= fresh}
        name.next[window.version] = window.places.stop
        self._place(window.node, name)
        wanted = tuple(
            index for index in window.places if is_newcomer or self._wants(window, index, now)
        )
        given = self._assign(window, wanted, scorer, standing)
        states = dict.fromkeys(wanted, PlaceState.PENDING)
        name.windows[given.window] = WindowRecord(signed, given, now.served, states)
        if scorer != self._me:
            validator = self._validator(scorer)
            validator.waits_since = min(validator.waits_since, now.served)
        self._touch(window.node)
        return given

    @property
    def has_standing(self) -> bool:
        """True if any name is in standing."""
        return bool(self._in_standing)

    def spares_newcomers(self, now: Situation) -> bool:
        """Return True if the trainer's own scorer has no more time for newcomers now."""
        return bool(self._in_standing) and now.newcomers_load > NEWCOMERS_LOAD

    def expects(self, commitment: Commitment, now: Situation) -> SignedWindow | Refused:
        """Return the committed window if the trainer's own scorer waits for this content. The
        caller must use this window, since a window that a peer sends with the content may
        differ.

        Content that has arrived is still expected: a caller that has it does not ask, and after
        a restart it has to be sent again.
        """
        place = self._look_up(commitment)
        if place is None:
            return Refused("no window that the trainer knows has this place", retry=False)
        if place.name.banned_until > now.wall:
            return _banned(place.name, now)
        if place.scorer != self._me:
            return Refused("the answer to its window names another scorer", retry=False)
        if place.state not in UNDECIDED:
            return Refused("this place is not waited for any more", retry=False)
        return place.one.signed

    def has_stood(self, commitment: Commitment) -> bool:
        """Return True if the trainer's own scorer has accepted a place."""
        place = self._look_up(commitment)
        return (
            place is not None and place.scorer == self._me and place.state is PlaceState.STOOD
        )

    def judges(self, commitment: Commitment, validator: PeerId) -> bool:
        """Return True if ``validator`` was assigned to a known place. Checked first, since it
        costs less than a signature."""
        place = self._look_up(commitment)
        return place is not None and place.scorer == validator

    def undecided(self) -> list[Commitment]:
        """Return the places that the trainer's own scorer has to decide."""
        return [
            one.window.commitment(index)
            for name in (*self._in_standing.values(), *self._newcomers.values())
            for one in name.windows.values()
            if one.assignment.scorer == self._me
            for index, state in one.states.items()
            if state in UNDECIDED
        ]

    def came(self, commitment: Commitment) -> None:
        """Note that wanted or audited content has arrived. It is not overdue any more, even if
        the trainer is killed and has to ask for it again."""
        place = self._look_up(commitment)
        if place is None:
            return
        if place.state is PlaceState.PENDING and place.scorer == self._me:
            self._decide(place, PlaceState.CAME)
        elif place.audit is not None:
            place.audit.asked = math.inf
            self._touch(commitment.node)

    def groups_to_replay(
        self, window: Window, index: int, spreads: Sequence[bool], now: Situation
    ) -> tuple[int, ...]:
        """Return the groups of a wanted place that the trainer's scorer replays.

        ``spreads`` tells for each group if the rewards that the scorer computed have spread.
        Groups with spread are replayed, and each other group with chance ``share``. Places of
        newcomers, and places that only the dice want (all claims are ``alike``), are replayed
        completely. Otherwise false claims there would be found with a fraction of ``share``.
        """
        name = self._find(window.node)
        known = None if name is None else name.windows.get(window.digest)
        is_newcomer = known is None or known.assignment.is_newcomer
        if is_newcomer or not _may_teach(window, index):
            return tuple(range(len(spreads)))
        return tuple(
            number
            for number, has_spread in enumerate(spreads)
            if has_spread
            or self._chance("group", window.digest, index, number) < now.trust.share
        )

    # -- what the trainer's own scorer finds -----------------------------------------------

    def stood(self, commitment: Commitment, now: Situation) -> bool:
        """Note that a place was found to be what it claims to be. Return True if it may be
        learnt from."""
        place = self._look_up(commitment)
        if place is None or place.scorer != self._me or commitment.terms != now.terms:
            return False
        if place.state in UNDECIDED:
            self._decide(place, PlaceState.STOOD)
        is_good = place.state is PlaceState.STOOD and not place.one.is_void
        return is_good and not place.one.assignment.is_newcomer

    def lied(self, commitment: Commitment, weight: Weight, now: Situation) -> Consequence:
        """Note that the trainer's replay rejects a place; `Weight.LIE` bans the name."""
        if commitment.terms != now.terms:
            return self.excuse(commitment, now)
        node = commitment.node
        place, name = self._look_up(commitment), self._find(node)
        if name is None and weight is Weight.LIE:
            name = self._add(node, now)
        if name is None:
            reason = "a lie of a name that the trainer does not remember"
            return Consequence(node=node, reason=reason, drop=(commitment,))
        is_told = place is not None and place.state is PlaceState.FAILED
        if not is_told or (weight is Weight.LIE and not name.banned_until):
            if place is not None:
                self._decide(place, PlaceState.FAILED)
                place.one.excuse(*UNDECIDED)
            self._fall(node, name, now.trust.probation)
            if weight is Weight.LIE:
                name.banned_until, name.was_repeated = now.wall + BAN, False
                for one in name.windows.values():
                    one.excuse(*UNDECIDED)
        is_banned = name.banned_until > now.wall
        voided = [place.one] if place is not None else []
        if is_banned:
            voided = [*name.windows.values()]
        return Consequence(
            node=node,
            reason="a replay of its work shows a lie",
            drop=tuple(each for one in voided for each in one.commitments) or (commitment,),
            is_newcomer_again=True,
            banned_until=name.banned_until if is_banned else None,
        )

    def wrong_claim(self, commitment: Commitment, now: Situation) -> Consequence:
        """Note that a claim about a group is wrong, and no limit was touched on either side."""
        found = self.lied(commitment, Weight.STRIKE, now)
        return replace(found, reason="a claim about the rewards of a group is wrong")

    def inconclusive(self, commitment: Commitment, now: Situation) -> Consequence:
        """Note that the scorer cannot tell, that content came too late to be scored, or that
        its worker says that it is lost. One such failure is forgiven in 32 windows. Failures of
        the trainer's own are noted by `excuse`."""
        place = self._look_up(commitment)
        if commitment.terms != now.terms or place is None:
            return self.excuse(commitment, now)
        if place.state not in UNDECIDED:
            return Consequence(node=commitment.node, reason="decided before")
        self._decide(place, PlaceState.EXCUSED)
        return self._blame(place, "a place could not be decided", now)

    def excuse(self, commitment: Commitment, now: Situation) -> Consequence:
        """Note that a place cannot be judged and its worker is not at fault: the trainer's
        engine failed, or the terms changed. The place does not count; nobody is blamed."""
        place = self._look_up(commitment)
        if place is not None and place.state in UNDECIDED:
            self._decide(place, PlaceState.EXCUSED)
        reason = "nothing can be said of this place, and nobody is blamed"
        return Consequence(node=commitment.node, reason=reason, drop=(commitment,))

    def expire(self, now: Situation) -> list[Consequence | Audited]:
        """Close overdue places; call this every few seconds.

        Wanted places that did not come to the trainer within ``lag`` versions and `DUE` served
        seconds are blamed on their worker. Windows of other terms, and windows whose validator
        is silent, convicted or no longer in the run, blame nobody. Audited content that its
        validator did not send within `DUE` served seconds is a strike.
        """
        found: list[Consequence | Audited] = []
        passed = self.passed_over(now)
        for node, name in [*self._in_standing.items(), *self._newcomers.items()]:
            for digest, one in list(name.windows.items()):
                if not one.is_settled:
                    found += self._close(name, one, passed, now)
                if one.is_settled and _is_stale(one, now):
                    del name.windows[digest]
                    self._touch(node)
        return found

    # -- validators ------------------------------------------------------------------------

    def verdict(self, verdict: SignedVerdict, now: Situation, *, network: str) -> Wish:
        """Process a validator's verdict, whose signature the driver has checked.

        ``network`` is that of the worker, as far as it is known. `Wish.SEND` opens an audit:
        the content follows, and the result of the trainer's replay goes to `audited`. Until
        then the same verdict gets the same answer, and afterwards `Wish.TAKE`: a driver that
        has the content does not ask again, and after a restart the content has to be sent
        again.
        """
        place = self._look_up(verdict.commitment)
        validator = self._validators.get(verdict.validator)
        if place is None or validator is None or validator.is_convicted:
            return Wish.IGNORE
        if place.scorer != verdict.validator or verdict.commitment.terms != now.terms:
            return Wish.IGNORE
        is_decided = verdict.verdict is not Verdict.INCONCLUSIVE
        is_rejected = verdict.verdict is Verdict.REJECTED
        if is_decided and place.state in (PlaceState.PENDING, PlaceState.EXCUSED):
            self._hear(verdict.validator, validator)
        if place.audit is not None:
            if not is_decided or is_rejected != (place.state is PlaceState.REJECTED_AUDIT):
                return Wish.IGNORE
            return Wish.SEND
        if place.state is not PlaceState.PENDING:
            return Wish.IGNORE if place.state is PlaceState.EXCUSED else Wish.TAKE
        place.name.active = now.served
        if not is_decided:
            self._decide(place, PlaceState.EXCUSED)
            return Wish.TAKE
        validator.verdicts += 1
        is_first = is_rejected and self._is_first(place.name, verdict, now, network)
        if self._throw_audit(place) or is_first:
            self._open_audit(place, now, is_rejected=is_rejected, is_validators=True)
            return Wish.SEND
        self._decide(place, PlaceState.REJECTED if is_rejected else PlaceState.STOOD)
        return Wish.TAKE

    def contest(self, verdict: SignedVerdict, now: Situation, *, network: str) -> Wish:
        """Process a worker's claim that a validator's signed rejection is wrong.

        `Wish.SEND`: the budget allows an audit, and the content follows. `Wish.TAKE`: the
        contest is noted, and the worker may ask again in a minute. Among the networks that ask,
        the one that was served longest ago is next. The budget grows with verdicts, never with
        contests.
        """
        if verdict.verdict is not Verdict.REJECTED:
            return Wish.IGNORE
        self.verdict(verdict, now, network=network)  # if the validator has kept it to itself
        place = self._look_up(verdict.commitment)
        if place is None or place.scorer != verdict.validator:
            return Wish.IGNORE
        if place.state is PlaceState.REJECTED_AUDIT:
            return Wish.SEND
        if place.state is not PlaceState.REJECTED or verdict.commitment.terms != now.terms:
            return Wish.IGNORE
        self._contests[network] = now.served
        self._contests.keep(lambda asked: now.served - asked <= ASKS_AGAIN)
        waits = min(self._contests, key=lambda each: self._contested.get(each, -math.inf))
        if self._credit < 1 or waits != network:
            return Wish.TAKE
        self._credit -= 1
        self._contested.renew(network, now.served)
        del self._contests[network]
        self._open_audit(place, now, is_rejected=True, is_validators=False)
        return Wish.SEND

    def audited(
        self,
        verdict: SignedVerdict,
        submission: Submission,
        finding: Finding | None,
        now: Situation,
        verify: Verify,
    ) -> Audited:
        """Process the result of the trainer's replay of an audited place. A repeated call has
        no effect.

        ``finding`` is the worst of the replay, None if everything is within limits. Nobody is
        accused unless the result makes a proof that can be opened
        (`roles.protocol.core.conviction`).
        """
        commitment = verdict.commitment
        place = self._look_up(commitment)
        nothing = Audited(validator=verdict.validator, worker=None, weight=Weight.NOTHING)
        is_rejected = verdict.verdict is Verdict.REJECTED
        expected = PlaceState.REJECTED_AUDIT if is_rejected else PlaceState.ACCEPTED_AUDIT
        if place is None or place.scorer != verdict.validator or place.state is not expected:
            return nothing
        weight, proof = weigh(verdict, finding), None
        is_ban = is_rejected and finding is not None and finding.weight is Weight.LIE
        try:
            if weight >= Weight.STRIKE or is_ban:
                proof = convict(commitment, now.terms, verdict, submission, finding, verify)
        except BadMessage:
            self.audit_inconclusive(commitment, now)
            return nothing
        judged = replace(self._strike(verdict.validator, commitment, weight), proof=proof)
        if finding is not None and finding.reason == HEARS_OTHER:
            self.audit_inconclusive(commitment, now)
            return judged
        if finding is not None:
            return replace(judged, worker=self.lied(commitment, finding.weight, now))
        self._decide(place, PlaceState.STOOD)
        return judged

    def audit_inconclusive(self, commitment: Commitment, now: Situation) -> None:
        """Note that the trainer could not repeat an audited place. The audit does not count,
        and nobody is blamed."""
        place = self._look_up(commitment)
        if place is not None and place.state in AUDITED:
            is_rejected = place.state is PlaceState.REJECTED_AUDIT
            self._decide(place, PlaceState.REJECTED if is_rejected else PlaceState.EXCUSED)

    def passed_over(self, now: Situation) -> dict[PeerId, str]:
        """Return the validators of the run that get no assignments now, with the reasons.

        A validator is *silent* if it was assigned a window and has sent no decided verdict for
        `DUE` served seconds. It is passed over for that long, twice as long the next time, and
        then tried again. Any verdict from it ends that at once.
        """
        passed = {}
        for peer in now.validators:
            one = self._validators.get(peer)
            if one is None:
                continue
            if now.served - one.waits_since > DUE:
                one.passed_until = now.served + min(DUE * 2**one.passed, LONGEST_PASS)
                one.passed += 1
                one.waits_since = math.inf
                self._touch(peer, "validator")
            if one.is_convicted:
                passed[peer] = "it signed what a replay shows to be false"
            elif now.served < one.passed_until:
                passed[peer] = f"it is silent, for the {one.passed}. time"
        return passed

    # -- inside ----------------------------------------------------------------------------

    def _find(self, name: PeerId) -> NameRecord | None:
        return self._in_standing.get(name) or self._newcomers.get(name)

    def _look_up(self, commitment: Commitment) -> _Place | None:
        name = self._find(commitment.node)
        one = None if name is None else name.find(commitment)
        return None if name is None or one is None else _Place(name, one, commitment)

    def _validator(self, peer: PeerId) -> ValidatorRecord:
        self._touch(peer, "validator")
        return self._validators.setdefault(peer, ValidatorRecord())

    def _touch(self, peer: PeerId, kind: str = "name") -> None:
        self._changed[kind, peer] = None

    def _refuse(
        self, window: Window, name: NameRecord | None, now: Situation
    ) -> Refused | None:
        """Return why a window is refused, by the cheapest checks, which apply to repeated
        windows too; None if it passes."""
        if window.terms != now.terms:
            return Refused("the run's terms are others now: fetch its newest edition", False)
        if window.version > now.newest:
            return Refused(f"version {window.version} is not out yet", retry=False)
        if name is not None and name.banned_until > now.wall:
            return _banned(name, now)
        return None

    def _refuse_places(
        self, window: Window, name: NameRecord | None, now: Situation, is_newcomer: bool
    ) -> Refused | None:
        if now.newest - window.version > now.lag:
            reason = f"version {window.version} is stale: the newest is {now.newest}"
            return Refused(reason, retry=False)
        if len(window.contents) > now.trust.window:
            reason = f"a window of this run has at most {now.trust.window} places"
            return Refused(reason, retry=False)
        due = 0 if name is None else name.next.get(window.version, 0)
        if window.first != due:
            is_known = "is committed already" if window.first < due else "is not the next"
            reason = f"place {window.first} {is_known}: the next is {due}"
            return Refused(reason, retry=False, next=due)
        if name is not None:
            unsettled = sum(not one.is_settled for one in name.windows.values())
            if unsettled >= (MAX_OPEN_NEWCOMER if is_newcomer else MAX_OPEN):
                reason = (
                    f"{unsettled} windows of this name are not settled yet: ask again later"
                )
                return Refused(reason, retry=True)
            missing = self._oldest_missing(name, window.version)
            if not is_newcomer and window.first - missing >= MAX_AHEAD:
                reason = f"the content of place {missing} has to come first"
                return Refused(reason, retry=True)
            if len(name.windows) >= MAX_KEPT:
                settled = (digest for digest, one in name.windows.items() if one.is_settled)
                del name.windows[next(settled)]
        return None

    def _oldest_missing(self, name: NameRecord, version: PolicyVersion) -> int:
        """Return the index of the first place under ``version`` whose content the trainer's
        scorer lacks."""
        return min(
            (
                index
                for one in name.windows.values()
                if one.window.version == version and one.assignment.scorer == self._me
                for index, state in one.states.items()
                if state is PlaceState.PENDING
            ),
            default=name.next.get(version, 0),
        )

    def _assign(
        self, window: Window, wanted: tuple[int, ...], scorer: PeerId, standing: Standing
    ) -> Assignment:
        return Assignment(
            window=window.digest,
            wanted=wanted,
            scorer=scorer,
            is_newcomer=not standing.is_in_standing,
            stood=standing.stood,
            owed=standing.owed,
        )

    def _chance(self, purpose: str, digest: bytes, *numbers: int) -> float:
        """Return the dice for a purpose: a number in [0, 1) that is the same for the same
        arguments."""
        thrown = blake3(pack([purpose, digest, *numbers]), key=self._secret).digest(length=6)
        return float(int.from_bytes(thrown, "big") / 2**48)

    def _wants(self, window: Window, index: int, now: Situation) -> bool:
        chance = self._chance("place", window.digest, index)
        return _may_teach(window, index) or chance < now.trust.share

    def _draw_scorer(self, window: Window, now: Situation) -> PeerId:
        passed = self.passed_over(now)
        drawn = [one for one in now.validators if one not in passed and one != window.node]
        if not drawn:
            return self._me
        return drawn[int(self._chance("scorer", window.digest) * len(drawn))]

    # -- standing --

    def _add(self, node: PeerId, now: Situation) -> NameRecord:
        name = NameRecord(owed=now.trust.probation, active=now.served)
        self._newcomers[node] = name
        self._make_room_for(node)
        self._touch(node)
        return name

    def _make_room_for(self, node: PeerId) -> None:
        if len(self._newcomers) > self._most_newcomers:
            others = (one for one in self._newcomers if one != node)
            gone = min(others, key=lambda one: self._newcomers[one].active)
            del self._newcomers[gone]
            self._touch(gone)

    def _place(self, node: PeerId, name: NameRecord) -> None:
        """Put ``name`` into the table where it belongs. A name for which the table of names in
        standing has no room waits among the newcomers."""
        if node in self._in_standing:
            if not name.is_entitled:
                self._newcomers[node] = self._in_standing.pop(node)
        elif name.is_entitled:
            self._in_standing[node] = name
            self._newcomers.pop(node, None)
            if len(self._in_standing) > self._most_in_standing:
                least = min(
                    reversed(self._in_standing), key=lambda one: self._in_standing[one].rank
                )
                self._newcomers[least] = self._in_standing.pop(least)
        self._make_room_for(node)

    def _fall(self, node: PeerId, name: NameRecord, owed: int) -> None:
        name.owed = max(name.owed, owed)
        name.has_fallen = True
        self._place(node, name)
        self._touch(node)

    def _blame(self, place: _Place, reason: str, now: Situation) -> Consequence:
        """Blame a worker, at most once per window, for wanted places that did not come or could
        not be decided."""
        node, name, drop = place.commitment.node, place.name, (place.commitment,)
        if place.one.is_blamed:
            return Consequence(node=node, reason=reason, drop=drop)
        place.one.is_blamed = True
        is_forgiven = name.unforgiven >= FORGIVEN_EVERY * now.trust.window
        if is_forgiven:
            name.unforgiven = 0
        most = now.trust.probation
        self._fall(
            node, name, min(math.ceil(1 / now.trust.share), most) if is_forgiven else most
        )
        return Consequence(
            node=node,
            reason=reason,
            drop=drop,
            is_newcomer_again=not is_forgiven,
            is_forgiven=is_forgiven,
        )

    def _decide(self, place: _Place, state: PlaceState) -> None:
        index = place.commitment.index
        place.one.states[index] = state
        if state not in AUDITED:
            place.one.audits.pop(index, None)
        self._count(place.commitment.node, place.name, place.one)

    def _count(self, node: PeerId, name: NameRecord, one: WindowRecord) -> None:
        """Count the places of a settled window once."""
        self._touch(node)
        validator = self._validators.get(one.assignment.scorer)
        is_doubtful = validator is not None and validator.is_convicted
        if one.is_counted or not one.is_settled or one.is_void or is_doubtful:
            return
        one.is_counted = True
        stood = sum(state is PlaceState.STOOD for state in one.states.values())
        name.stood += stood
        if one.assignment.is_newcomer:
            name.owed = max(name.owed - stood, 0)
            name.has_fallen = name.has_fallen and name.owed > 0
        self._place(node, name)

    # -- deadlines --

    def _close(
        self, name: NameRecord, one: WindowRecord, passed: dict[PeerId, str], now: Situation
    ) -> Iterator[Consequence | Audited]:
        """Close the overdue places of an unsettled window."""
        before, scorer = dict(one.states), one.assignment.scorer
        is_lost = _is_stale(one, now) and now.served - one.since > LOST
        places = [_Place(name, one, each) for each in one.commitments]
        if one.window.terms != now.terms:
            drop = tuple(each.commitment for each in places if each.state in UNDECIDED)
            one.excuse(*UNDECIDED, *AUDITED)
            reason = "it was made under terms that are not the run's any more"
            yield Consequence(node=one.window.node, reason=reason, drop=drop)
        elif scorer != self._me and (scorer in passed or scorer not in now.validators):
            one.excuse(PlaceState.PENDING)
        elif _is_stale(one, now) and now.served - one.since > DUE:
            missing = [each for each in places if each.state is PlaceState.PENDING]
            one.excuse(PlaceState.PENDING, *((PlaceState.CAME,) if is_lost else ()))
            for place in missing if scorer == self._me else ():
                yield self._blame(place, "a place never came", now)
        for place in places:
            if place.audit is None:
                continue
            if place.audit.asked == math.inf:
                if is_lost:
                    self.audit_inconclusive(place.commitment, now)
            elif now.served - place.audit.asked <= DUE:
                continue
            elif place.audit.is_validators:
                yield self._strike(scorer, place.commitment, Weight.STRIKE)
                self.audit_inconclusive(place.commitment, now)
            else:
                self._decide(place, PlaceState.FAILED)
        if one.states != before:
            self._count(one.window.node, name, one)

    # -- validators --

    def _hear(self, peer: PeerId, validator: ValidatorRecord) -> None:
        validator.waits_since, validator.passed_until, validator.passed = math.inf, 0.0, 0
        self._touch(peer, "validator")

    def _throw_audit(self, place: _Place) -> bool:
        """Add to the budget of audits, and return True if the dice choose this verdict."""
        each = AUDITS / 2
        is_full = self._credit >= CREDIT
        self._credit = min(self._credit + each, CREDIT)
        chance = self._chance("audit", place.one.assignment.window, place.commitment.index)
        return chance < (AUDITS if is_full else each)

    def _open_audit(
        self, place: _Place, now: Situation, *, is_rejected: bool, is_validators: bool
    ) -> None:
        audit = AwaitedAudit(now.served, is_validators=is_validators)
        place.one.audits[place.commitment.index] = audit
        state = PlaceState.REJECTED_AUDIT if is_rejected else PlaceState.ACCEPTED_AUDIT
        self._decide(place, state)

    def _is_first(
        self, name: NameRecord, verdict: SignedVerdict, now: Situation, network: str
    ) -> bool:
        """Return True if this is a newcomer's first rejection beyond doubt, and none of its
        network was repeated lately."""
        if name.was_repeated or weigh(verdict, None) is not Weight.LIE:
            return False
        if now.served - self._repeated.get(network, -math.inf) < DUE:
            return False
        self._repeated.renew(network, now.served)
        name.was_repeated = True
        return True

    def _strike(self, peer: PeerId, commitment: Commitment, weight: Weight) -> Audited:
        """Record an audit's result against a validator, and return what follows."""
        validator = self._validator(peer)
        validator.looks[commitment.digest] = weight
        lies = [digest for digest, one in validator.looks.items() if one is Weight.LIE]
        strikes = [digest for digest, one in validator.looks.items() if one is Weight.STRIKE]
        is_convicted = bool(lies) or len(strikes) >= STRIKES
        is_news = is_convicted and not validator.is_convicted
        validator.is_convicted |= is_convicted
        return Audited(
            validator=peer,
            worker=None,
            weight=weight,
            is_convicted=is_news,
            strikes=tuple(lies[:1] or strikes) if is_convicted else (),
        )


def _may_teach(window: Window, index: int) -> bool:
    return any(claim is not Claim.ALIKE for claim in window.claims_of(index))


def _is_stale(one: WindowRecord, now: Situation) -> bool:
    return now.newest - one.window.version > now.lag


def _banned(name: NameRecord, now: Situation) -> Refused:
    hours = (name.banned_until - now.wall) / 3600
    return Refused(f"this name is banned for a lie, for another {hours:.1f} hours", retry=False)
