"""Outer steps without a leader: a member's part in agreeing on each.

Theory of operation
-------------------
The state of a run after outer step t is the *record* of t: who its members are, and the digest
of weights and momentum, signed by a majority of the members of the record before. Record 0
follows from the run file. A step is four things said to all:

1. `Ready`: a member's inner steps are over, its contribution can be fetched.
2. `Propose`: the member whose turn it is in this *view* says whose contributions are summed and
   who is a member afterwards. It waits for all members that it hears, and for late ones only
   for a while once a majority is ready.
3. The members exchange pieces, and each computes the next state. It is not in force.
4. `Vote`: each signs the outcome. A majority of votes of one view is the record; then the state
   is in force.

When a proposer is silent, a contributor dies or time is over, on the clock of the one that
waits, a member moves to the next view with a `Promise` (`election`), and the next proposer's
turn comes: the contributions are kept, and are summed again without those that died, divided by
what is left. No member puts in force what has no record; so whatever happens to whom, replicas
differ by whole steps only, and the one that is behind fetches what it lacks.

Those that want to join send `Beat`s like members, which say whose state they hold. A proposer
adds them when they hold the newest; members that are not heard, want to leave or were convicted
it leaves out. So members change at borders of steps alone. A member agrees only to changes that
most members see as well (`hearing`), and to a mean of a majority's contributions: a proposer
that leaves out whom it likes, or adds who is not there, loses its turn.

Messages may be lost. Every member sends each other a `Beat` about once a second, with bits for
what it has, and gets what it lacks; of a member that it does not hear, from the others.
Liveness is judged by these, on the receivers' clocks.

A member signs one statement of a kind for a step and view. What it has signed is durable before
it is sent (`Keep`), so a restarted member does not contradict itself. Two statements convict
(`Doubled`), as do pieces that are none (`BadPart`, `Unreadable`) and sums that are not
(`BadSum`): evidence travels to all, each judges it, and no honest member agrees to a plan with
the convict in it.

With too few members for a majority nothing can be decided. The rest stop and say so
(`Stalled`), and go on when enough are back, or when the run's next edition begins anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

from p2p.errors import BadMessage
from p2p.identity import PeerId, Signer, Verify
from p2p.own_time import OwnTime
from roles.contract.core.diloco import RoundConfig
from roles.diloco.core import events as ev
from roles.diloco.core.election import choose, is_majority
from roles.diloco.core.hearing import Report, Tally
from roles.diloco.core.messages import (
    MAX_CHAIN,
    MAX_JOINERS,
    MAX_MEMBERS,
    NO_DIGEST,
    BadPart,
    BadSum,
    Beat,
    Chain,
    Doubled,
    Fault,
    Outcome,
    Plan,
    Promise,
    Propose,
    Ready,
    Record,
    RoundMessage,
    Statement,
    Sum,
    Unreadable,
    Vote,
    fits,
)
from roles.diloco.core.pieces import (
    PieceGrid,
    check_part,
    digest_of,
    owners,
    shares,
    sum_piece,
    total_norm,
)

Said = TypeVar("Said", bound=Statement)

MOST_DOUBLINGS: Final = 5
"""The patience of a view is twice that of the one before, up to this often: 32 times, in which
what a line can carry at all gets through."""
FORGET: Final = 10.0
"""Times the silence of the dead after which a peer that is no member is not told of the run any
more."""
MAX_STATEMENTS: Final = 64
"""Statements of one member that are kept of a round, and of the one before: a view has four,
and a peer could invent views."""
MOST_AHEAD: Final = 64
"""Views that a promise may be ahead of ours: honest members follow each other, and two liars of
five could else name the last view that there is."""
MOST_UNPROVEN: Final = 16
"""Pieces of evidence that prove nothing which one peer may bring in a round: to judge one costs
up to 64 signatures, and an honest member brings only what convinced it."""


def genesis(run: bytes, founders: Sequence[PeerId]) -> Record:
    """Record 0, without signatures: it follows from the run."""
    return Record(
        0, Outcome(Plan(0, run, (), tuple(sorted(founders))), NO_DIGEST, NO_DIGEST), ()
    )


def check_record(
    record: Record, before: Record, run: bytes, verify: Verify, anchor: PeerId | None
) -> None:
    """Check that ``record`` follows ``before`` and that a majority has signed it.

    Raises:
        BadMessage: It does not.
    """
    if record.step != before.step + 1 or record.outcome.plan.previous != before.digest:
        raise BadMessage(f"a record of step {record.step} does not follow {before.step}")
    voters = [
        vote.author
        for vote in record.votes()
        if vote.author in before.members and vote.is_genuine(run, verify)
    ]
    if not is_majority(voters, before.members, anchor):
        raise BadMessage(f"the record of step {record.step} has no majority's signatures")


class Round:
    """All that this member knows about the step that is under way."""

    def __init__(self, now: float) -> None:
        self.view = 0
        self.is_promised = False
        """True if this view began with a promise of ours."""
        self.proposed = -1
        self.began = now
        """The time at which this view, or the wait for its proposal, began."""
        self.majority_ready = math.inf
        """The time since which a majority is ready; infinity if it is not."""
        self.readys: dict[PeerId, Ready] = {}
        self.ready_at: dict[PeerId, float] = {}
        """Maps each peer to the time at which its `Ready` came."""
        self.votes: dict[PeerId, Vote] = {}
        """The newest of each member."""
        self.promises: dict[PeerId, Promise] = {}
        """The newest of each member."""
        self.proposal: Propose | None = None
        """The proposal of this view, once it is accepted."""
        self.early: dict[int, Propose] = {}
        """Maps later views, which we may yet enter, to their proposals."""
        self.accepted = b""
        """The plan that was accepted in this view, also in an earlier life, by its id."""
        self.refused_since = math.inf
        """The time since which this view has a proposal that we cannot agree to, or not yet."""
        self.unproven: dict[PeerId, int] = {}
        """Evidence that proved nothing, by who brought it."""
        self.reducing = -1
        """The view whose plan is being computed."""
        self.outcome: Outcome | None = None
        """The outcome that we computed last."""
        self.suspects: tuple[PeerId, ...] = ()
        self.vote: Vote | None = None
        self.ready: Ready | None = None
        self.said: dict[tuple[int, int, int, PeerId], Statement] = {}
        """Maps each slot to its first statement, to compare a second one with."""
        self.counts: dict[PeerId, int] = {}


class RoundCore:
    """One node's part in the rounds, as a state machine: `handle`, `next_deadline`."""

    def __init__(  # noqa: PLR0913 - what a life begins with
        self,
        signer: Signer,
        config: RoundConfig,
        grid: PieceGrid,
        *,
        run: bytes,
        records: Sequence[Record],
        held: int,
        kept: ev.Keep | None,
        verify: Verify,
        may_join: Callable[[PeerId], bool],
        anchor: PeerId | None,
        now: float,
    ) -> None:
        """Begin a life of this node.

        Args:
            records: The records on disk, from record 0 on.
            held: The step whose state is on disk; -1 for none.
            kept: The `Keep` that was last made durable.
        """
        self.me = signer.peer_id
        self.records = list(records)
        self.held = held
        self.convicted: dict[PeerId, Fault] = {}
        self.is_stalled = False
        self._answered: dict[PeerId, float] = {}  # when each was last given what it lacks
        self._shown = 0  # turns of evidence
        self._ever = {peer for one in self.records for peer in one.members}
        """All present and former members: evidence may be about these."""
        self._signer, self._config, self._grid, self._run = signer, config, grid, run
        self._verify, self._may_join, self._anchor = verify, may_join, anchor
        self._heard: dict[PeerId, tuple[float, Beat]] = {}
        self._reports: dict[PeerId, Report] = {}
        """The newest of each peer that is heard."""
        self._tallied: tuple[list[tuple[PeerId, Report]], Tally] = [], Tally()
        """The last count of them, and what it was of."""
        self._tallied_at = math.nan
        """The time of the last count."""
        self._leaving = False
        self._next_beat = now
        self._began = now
        self._own_time = OwnTime(self._on_resume)
        self._out: list[ev.Effect] = []
        self.round = Round(now)
        self.past: Round | None = None
        """The step before: what comes of it late may contradict what its author said."""
        self._is_new = kept is None
        """True if this life knows of nothing that it has signed."""
        self.sits_out = -1
        """The last step of which nothing is signed: an earlier life may have signed, and
        forgotten it.
        """
        if kept is not None and kept.step == self.record.step + 1:
            self._remember(kept)
        elif kept is not None and kept.step > self.record.step:  # records are lost
            self.sits_out = kept.step
        elif self._is_new and self.record.step:
            self._sit_out()

    def _sit_out(self) -> None:
        """Sign nothing of this step if this member has lost its memory of what it signed.

        Its disk was wiped or damaged. A member at record 0 has signed nothing yet.
        """
        if self.me in self.members:
            self.sits_out = self.record.step + 1
        self._is_new = False

    def _remember(self, kept: ev.Keep) -> None:
        """Restore the statements that an earlier life has signed. It may have proposed in its
        view, so this member leaves that view at the first chance."""
        this = self.round
        this.view, this.proposed, this.vote, this.ready, this.accepted = (
            kept.view, kept.proposed, kept.vote, kept.ready, kept.accepted,
        )  # fmt: skip
        this.is_promised = kept.view > 0
        if kept.ready is not None:
            this.readys[self.me] = kept.ready
        if kept.vote is not None:
            this.votes[self.me] = kept.vote

    # What others look at.

    @property
    def record(self) -> Record:
        """The newest record."""
        return self.records[-1]

    @property
    def members(self) -> tuple[PeerId, ...]:
        """Members after the newest record."""
        return self.record.members

    @property
    def is_member(self) -> bool:
        """True if this node is a member and holds the state to train from."""
        return self.me in self.members and self.held == self.record.step

    @property
    def next_deadline(self) -> float:
        """The time at which to deliver the next `Tick`."""
        return self._own_time.deadline(self._next_beat)

    def live(self, now: float) -> list[PeerId]:
        """Members that most members hear, including this one."""
        return self._live(self._own_time.at(now, self._next_beat))

    def joiners(self, now: float) -> list[PeerId]:
        """Peers that hold the newest state by most members' reports, and may become members."""
        return self._joiners(self._own_time.at(now, self._next_beat))

    def holders(self, step: int, now: float) -> list[PeerId]:
        """Return the peers that this one hears and that hold the state of ``step``, or a later
        one.
        """
        now = self._own_time.at(now, self._next_beat)
        return [
            peer
            for peer, (_, beat) in self._heard.items()
            if beat.held >= step and self._hears(peer, now)
        ]

    def _live(self, now: float) -> list[PeerId]:
        tally = self._tally(now)
        return [
            peer
            for peer in self.members
            if peer == self.me or (tally.is_heard(peer) and peer not in self.convicted)
        ]

    def _joiners(self, now: float) -> list[PeerId]:
        tally = self._tally(now)
        return [
            peer
            for peer in tally.joiners
            if tally.wants_to_join(peer) and self._may_be_taken_in(peer)
        ]

    # Events.

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        """Advance by one event and return what to do about it.

        Raises:
            BadMessage: A peer's message is invalid. Nothing has changed.
        """
        now = self._own_time.at(now, self._next_beat)
        self._out = []
        self._tallied_at = math.nan
        match event:
            case ev.Received(peer, message):
                self._receive(peer, message, now)
            case ev.Trained(ready):
                self._trained(ready)
            case ev.Reduced(view, outcome):
                self._reduced(view, outcome)
            case ev.ReduceFailed(view, suspects):
                if view == self.round.view and self.round.reducing == view:
                    self.round.suspects = suspects
                    self._next_view(self.round.view + 1, now)
            case ev.Held(step):
                self.held = max(self.held, step)
                self._beat(now)
            case ev.Found(fault):
                self._convict(fault)
            case ev.Leave() | ev.Stay():
                self._leaving = isinstance(event, ev.Leave)
                self._beat(now)
            case ev.Tick():
                if now >= self._next_beat:
                    self._beat(now)
        self._advance(now)
        return self._out

    def _on_resume(self, now: float) -> None:
        """Send a beat at once, since this process was stopped for a while."""
        self._next_beat = now

    @property
    def unfinished(self) -> list[ev.Effect]:
        """Effects that the last `handle` asked for before it failed: they belong to what it has
        changed."""
        return self._out

    def _receive(self, peer: PeerId, message: RoundMessage, now: float) -> None:
        match message:
            case Beat():
                self._on_beat(peer, message, now)
            case Chain(records):
                self._on_chain(records, now)
            case Record():
                self._on_chain((message,), now)
            case Statement():
                self._on_statement(peer, message, now)
            case _:
                self._on_fault(peer, message)

    def _on_statement(self, peer: PeerId, said: Statement, now: float) -> None:
        """Judge the signature once; then look for a second statement in its slot."""
        if said.step == self.record.step and self.past is not None:
            self._compare(self.past, said)
            return
        this, newest = self.round, self.record
        if said.step != newest.step + 1 or said.author not in self.members:
            return
        known = this.said.get(said.slot)
        is_one_too_many = known is None and this.counts.get(said.author, 0) >= MAX_STATEMENTS
        is_known = known is not None and known.digest == said.digest
        if is_one_too_many or is_known or not self._is_of_grid(said):
            return
        if isinstance(said, Promise) and not self._is_newer(said):
            return  # before its signatures: it may be said a thousand times
        if not said.is_genuine(self._run, self._verify):
            raise BadMessage("a statement is not signed by its author")
        if isinstance(said, Promise):
            if self._is_promise(said):
                self.round.promises[said.author] = said
            else:
                this.counts[said.author] = this.counts.get(said.author, 0) + 1
            return
        if known is not None:
            self._convict(Doubled(known, said))
            return
        this.said[said.slot] = said
        this.counts[said.author] = this.counts.get(said.author, 0) + 1
        match said:
            case Ready():
                tokens = said.tokens
                if said.previous == newest.digest and 0 < tokens <= self._config.max_tokens:
                    this.readys[said.author] = said
                    this.ready_at[said.author] = now
            case Propose():
                if self._is_acceptable(said):
                    this.early[said.view] = said
            case Vote():
                self._on_vote(peer, said, now)

    def _is_of_grid(self, said: Statement) -> bool:
        """Return True unless a statement names pieces that vectors of this run have not."""
        match said:
            case Ready():
                return len(said.digests) == self._grid.pieces
            case Sum():
                return said.first + len(said.digests) <= self._grid.pieces
        return True

    def _compare(self, past: Round, said: Statement) -> None:
        """Compare late statements of the previous step with those that their author sent
        before."""
        known = past.said.get(said.slot)
        is_member = said.author in self.records[-2].members
        if isinstance(said, Promise) or not is_member or not self._is_of_grid(said):
            return
        count = past.counts.get(said.author, 0)
        if known is None and count >= MAX_STATEMENTS:
            return
        if known is not None and known.digest == said.digest:
            return
        if not said.is_genuine(self._run, self._verify):
            raise BadMessage("a statement is not signed by its author")
        past.said.setdefault(said.slot, said)
        past.counts[said.author] = count + 1
        if known is not None:
            self._convict(Doubled(known, said))
        elif isinstance(said, Vote) and _contradicts(said, self.record):
            self._tell(said)

    def _on_vote(self, peer: PeerId, vote: Vote, now: float) -> None:
        this = self.round
        old = this.votes.get(vote.author)
        is_of_step = vote.outcome.plan.previous == self.record.digest
        if is_of_step and (old is None or old.view < vote.view):
            this.votes[vote.author] = vote
        mine = this.vote
        if (
            mine is not None
            and mine.view == vote.view
            and mine.outcome.plan == vote.outcome.plan
            and mine.outcome != vote.outcome
        ):  # an owner has told two stories: who has both has the proof
            sums = [said for said in this.said.values() if isinstance(said, Sum)]
            self._out += [ev.Send(vote.author, said) for said in sums]
        self._count(vote, now)

    def _count(self, vote: Vote, now: float) -> None:
        """Make the record if this vote completes a majority."""
        same = [
            other
            for other in self.round.votes.values()
            if other.view == vote.view
            and other.outcome == vote.outcome
            and other.author not in self.convicted
        ]
        if is_majority([other.author for other in same], self.members, self._anchor):
            signatures = tuple(sorted((other.author, other.signature) for other in same))
            record = Record(vote.view, vote.outcome, signatures)
            told = {*self.members, *record.members} - {self.me}
            self._adopt((record,), now)
            self._out += [ev.Send(peer, record) for peer in sorted(told)]

    def _is_promise(self, promise: Promise) -> bool:
        """Return True if a promise is of this round and the vote in it is genuine."""
        vote = promise.vote
        return promise.previous == self.record.digest and (
            vote is None
            or (
                vote.view < promise.view
                and vote.outcome.plan.previous == self.record.digest
                and vote.is_genuine(self._run, self._verify)
            )
        )

    def _is_newer(self, promise: Promise) -> bool:
        """Return True if the statement is its author's newest, for a view near ours."""
        old = self.round.promises.get(promise.author)
        is_near = promise.view <= self.round.view + MOST_AHEAD
        return is_near and (old is None or old.view < promise.view)

    def _on_chain(self, records: Sequence[Record], now: float) -> None:
        """Check the records that follow ours and append them; skip records that are old or too
        new.
        """
        found = list[Record]()
        last = self.record
        for record in records:
            if record.step == last.step + 1:
                check_record(record, last, self._run, self._verify, self._anchor)
                found.append(record)
                last = record
        if found:
            self._adopt(found, now)

    def _adopt(self, records: Sequence[Record], now: float) -> None:
        odd = [vote for vote in self.round.votes.values() if _contradicts(vote, records[0])]
        self.past = self.round if len(records) == 1 else None
        self.records += records
        self._tallied_at = math.nan
        self._ever.update(peer for one in records for peer in one.members)
        self.round = Round(now)
        if self._is_new:
            self._sit_out()
        for vote in odd:
            self._tell(vote)
        self._out.append(ev.Commit(tuple(records)))

    def _on_fault(self, peer: PeerId, fault: Fault) -> None:
        """Judge evidence from a member about a present or former member. Evidence about others
        is ignored, since their faults harm nobody."""
        unproven = self.round.unproven
        if peer not in self.members or fault.culprit not in self._ever:
            return
        if fault.culprit in self.convicted or unproven.get(peer, 0) >= MOST_UNPROVEN:
            return
        if self._is_proof(fault):
            self._convict(fault)
        else:
            unproven[peer] = unproven.get(peer, 0) + 1

    def _convict(self, fault: Fault) -> None:
        """End a membership, and tell all."""
        culprit = fault.culprit
        if culprit in self.convicted or culprit == self.me:
            return
        self.convicted[culprit] = fault
        self._tallied_at = math.nan
        self.round.readys.pop(culprit, None)
        self._out.append(ev.Convict(fault))
        if fits(fault):
            self._out += [ev.Send(peer, fault) for peer in self._others() if peer != culprit]

    def _is_proof(self, fault: Fault) -> bool:
        """Return True if a peer's evidence proves its claim.

        False evidence proves nothing about the peer that brought it: it may have it from
        another.
        """
        run, verify = self._run, self._verify
        match fault:
            case Doubled(one, other):
                return one.is_genuine(run, verify) and other.is_genuine(run, verify)
            case BadPart(ready, index, piece):
                return (
                    digest_of(piece) == ready.digests[index]
                    and ready.is_genuine(run, verify)
                    and len(ready.digests) == self._grid.pieces
                    and not _passes(check_part, self._grid, index, piece, ready.norms[index])
                )
            case Unreadable(told, index, piece):
                return (
                    digest_of(piece) == told.digests[index - told.first]
                    and told.is_genuine(run, verify)
                    and is_unreadable(self._grid, index, piece)
                )
            case BadSum():
                signed = (fault.told, *fault.readys)
                return all(one.is_genuine(run, verify) for one in signed) and is_bad_sum(
                    self._grid, fault
                )

    # Beats, and what peers lack.

    def _beat(self, now: float) -> None:
        self._next_beat = now + self._config.beat
        gone = now - FORGET * self._config.silence
        self._heard = {
            peer: heard
            for peer, heard in self._heard.items()
            if heard[0] > gone or peer in self.members
        }
        for known in (self._answered, self._reports):
            for peer in [peer for peer in known if peer not in self._heard]:
                del known[peer]
        beat = self._own_beat(now)
        self._out += [ev.Send(peer, beat) for peer in self._others()]

    def _own_beat(self, now: float) -> Beat:
        this, members = self.round, self.members
        own = self._own_report(now)
        joiners = sorted(own.joiners or ())
        if len(joiners) > MAX_JOINERS:  # all members choose the same, and others next time
            joiners.sort(key=lambda peer: digest_of(self.record.digest + peer.digest))
        return Beat(
            self.record.step,
            self.record.digest,
            self.held,
            this.view,
            _mask(members, this.readys),
            _mask(members, _in_view(this.promises, this.view)),
            _mask(members, _in_view(this.votes, this.view)),
            this.proposal is not None,
            self._leaving,
            len(self.convicted),
            _mask(members, dict.fromkeys(own.heard)),
            _mask(members, dict.fromkeys(own.leaving)),
            tuple(joiners[:MAX_JOINERS]),
        )

    def _others(self) -> Iterator[PeerId]:
        """Yield the members, the first members, and all peers that were heard, without this
        node.
        """
        peers = dict.fromkeys((*self.members, *self.records[0].members, *self._heard))
        yield from (peer for peer in peers if peer != self.me)

    def _on_beat(self, peer: PeerId, beat: Beat, now: float) -> None:
        if peer not in self.members and not self._may_join(peer):
            return
        if beat.step <= self.record.step and self.records[beat.step].digest != beat.digest:
            return  # of another run, or of a history that is not ours
        is_known = peer in self.members or peer in self._heard
        if not is_known and len(self._heard) >= 2 * MAX_MEMBERS:
            return
        self._heard[peer] = now, beat
        self._note_report(peer, beat)
        if now < self._answered.get(peer, -math.inf) + self._config.beat / 2:
            return  # an answer may be four hundred times as long as a beat
        self._answered[peer] = now
        if beat.step < self.record.step:
            records = self.records[beat.step + 1 :][:MAX_CHAIN]
            self._out.append(ev.Send(peer, Chain(tuple(records))))
        elif beat.step == self.record.step and self.me in self.members:
            self._out += [ev.Send(peer, said) for said in self._lacking(peer, beat, now)]
        known = [fault for fault in self.convicted.values() if fault.culprit != peer]
        is_behind = beat.faults < len(self.convicted)
        known = [fault for fault in known if fits(fault)] if is_behind else []
        if known:  # a mebibyte each: one at a time
            self._shown += 1
            self._out.append(ev.Send(peer, known[self._shown % len(known)]))

    def _lacking(self, peer: PeerId, beat: Beat, now: float) -> Iterator[RoundMessage]:
        """Yield our messages of this round that ``peer`` lacks.

        While this node's proposal stands, it also passes on the `Ready` of other members.
        """
        this, place = self.round, self.members.index(self.me)
        if peer not in self.members:
            return
        if this.ready is not None and not beat.readys >> place & 1:
            yield this.ready
        mine = this.said.get((Propose.KIND, self.record.step + 1, this.view, self.me))
        has_promise = beat.view == this.view and beat.promises >> place & 1
        if beat.view <= this.view and self.me in this.promises and not has_promise:
            yield this.promises[self.me]
        if beat.view <= this.view and mine is not None:
            if not beat.is_planned:
                yield mine
            for author, ready in this.readys.items():
                if author != self.me and not beat.readys >> self.members.index(author) & 1:
                    yield ready
        if this.vote is not None and not (
            beat.view == this.vote.view and beat.votes >> place & 1
        ):
            yield this.vote
        yield from self._lacking_of_others(peer, beat, now)

    def _lacking_of_others(
        self, peer: PeerId, beat: Beat, now: float
    ) -> Iterator[RoundMessage]:
        """Yield statements of other members that ``peer`` lacks and may not get from their
        authors.

        A peer may not hear a member. A member may also tell the proposer less than it told this
        node; all others would then wait for it. Half of the members pass statements on at a
        time, by turns.
        """
        this, members = self.round, self.members
        turn = members.index(self.me) + int(now / self._config.beat)
        is_proposer = self._proposer(this.view) == peer
        for place, author in enumerate(members):
            if beat.heard is None or author in (peer, self.me):
                continue
            is_heard = beat.heard >> place & 1
            is_late = now >= this.ready_at.get(author, now) + 2 * self._config.beat
            is_turn = (
                is_late and is_proposer and (turn + place) % len(members) <= len(members) // 2
            )
            lacks_ready = author in this.readys and not beat.readys >> place & 1
            if lacks_ready and (is_turn or not is_heard):
                yield this.readys[author]
            if is_heard or beat.view != this.view:
                continue
            proposal, promise = this.proposal, this.promises.get(author)
            if promise is not None and not beat.promises >> place & 1:
                yield promise
            if proposal is not None and proposal.author == author and not beat.is_planned:
                yield proposal
            vote = this.votes.get(author)
            if vote is not None and vote.view == beat.view and not beat.votes >> place & 1:
                yield vote

    def _note_report(self, peer: PeerId, beat: Beat) -> None:
        """Record whom a member hears. Reports of members that are ahead are ignored, since they
        are about members that are not known here."""
        if beat.heard is None or beat.step > self.record.step:
            self._reports.pop(peer, None)
            return
        members = self.records[beat.step].members
        joiners = frozenset(beat.joiners) if beat.step == self.record.step else None
        report = Report(
            members, _masked(members, beat.heard), _masked(members, beat.leaving), joiners
        )
        if report != self._reports.get(peer):
            self._reports[peer] = report

    def _own_report(self, now: float) -> Report:
        heard = frozenset(one for one in self.members if self._hears(one, now))
        leaving = frozenset(
            one for one in self.members if one in self._heard and self._heard[one][1].is_leaving
        )
        joiners = frozenset(
            peer
            for peer, (_, beat) in self._heard.items()
            if beat.held == self.record.step
            and not beat.is_leaving
            and self._hears(peer, now)
            and self._may_be_taken_in(peer)
        )
        return Report(self.members, heard, leaving, joiners)

    def _tally(self, now: float) -> Tally:
        """Return the tally of the reports of this node and all members that it hears.

        They are looked up once an event, and counted anew only if a report has changed.
        """
        if self._tallied_at == now:
            return self._tallied[1]
        self._tallied_at = now
        own = self._own_report(now)
        reports = [(self.me, own)]
        reports += [
            (peer, self._reports[peer])
            for peer in self.members
            if peer in own.heard and peer in self._reports and peer != self.me
        ]
        if self._tallied[0] != reports:
            is_member = self.me in self.members
            counted = reports if is_member or len(reports) == 1 else reports[1:]
            self._tallied = reports, Tally.of(counted)
        return self._tallied[1]

    def _may_be_taken_in(self, peer: PeerId) -> bool:
        is_free = peer not in self.members and peer not in self.convicted
        return is_free and self._may_join(peer)

    def _hears(self, peer: PeerId, now: float) -> bool:
        """Return True if this node itself has heard ``peer`` lately."""
        if peer == self.me:
            return True
        heard = self._heard.get(peer)
        if heard is None:  # no peer can have been heard in the first seconds of a life
            is_new = now - self._began < self._config.silence
            return is_new and peer in self.members and peer not in self.convicted
        return now - heard[0] < self._config.silence and peer not in self.convicted

    # The round.

    def _trained(self, ready: Ready) -> None:
        this = self.round
        is_current = ready.step == self.record.step + 1 and ready.previous == self.record.digest
        if is_current and this.ready is None and self.is_member and self._may_sign:
            this.ready = this.readys[self.me] = ready.signed(self._run, self._signer)
            self._keep()
            self._tell(this.ready)

    def _advance(self, now: float) -> None:
        """Do everything that the state allows: propose, accept, vote, give up a view."""
        self._look_for_majority(now)
        if self.me not in self.members or not self._may_sign:
            return
        self._join_view(now)
        self._propose(now)
        self._accept(now)
        self._watch(now)

    def _look_for_majority(self, now: float) -> None:
        heard = self._live(now)
        enough = is_majority(heard, self.members, self._anchor)
        if self.is_stalled == enough:
            self.is_stalled = not enough
            self.round.began = now
            self._out.append(
                ev.Resumed() if enough else ev.Stalled(len(heard), len(self.members))
            )
        this = self.round
        if is_majority(this.readys, self.members, self._anchor):
            this.majority_ready = min(this.majority_ready, now)

    def _join_view(self, now: float) -> None:
        """Move to a later view once so many members have moved that the rest cannot decide any
        more. A majority that can still decide must not be dragged along."""
        ahead = {
            peer: one.view
            for peer, one in self.round.promises.items()
            if one.view > self.round.view and peer not in self.convicted
        }
        for view in sorted(ahead.values(), reverse=True):
            left = [peer for peer in self.members if ahead.get(peer, -1) < view]
            if not is_majority(left, self.members, self._anchor):
                self._next_view(view, now)
                return

    def _proposer(self, view: int) -> PeerId:
        """Return the member whose turn it is to propose in ``view``.

        Members that have just joined have no turn yet: as a rule they sit their first step out,
        and the others would wait for them.
        """
        before = self.records[-2].members if self.record.step else self.members
        peers = [peer for peer in self.members if peer in before] or self.members
        return peers[(self.record.step + view) % len(peers)]

    def _propose(self, now: float) -> None:
        this = self.round
        if (
            self._proposer(this.view) != self.me
            or this.proposed >= this.view
            or not self.is_member
            or self.is_stalled
        ):
            return
        promises = tuple(_in_view(this.promises, this.view).values())
        carried: Outcome | None = None
        if this.is_promised:
            if not is_majority([one.author for one in promises], self.members, self._anchor):
                return
            missing = [peer for peer in self._live(now) if peer not in this.promises]
            if missing and now < this.began + 2 * self._config.beat:
                return  # the more have promised, the less may have been decided
            found = choose(promises, self.members, self._anchor)
            if len(found) > 1:
                return
            carried = found[0] if found else None
        if carried is None and not self._is_time(now):
            return
        plan = self._plan(promises, now) if carried is None else carried.plan
        if plan is None:
            return
        proposal = Propose(
            self.record.step + 1, this.view, plan, carried, promises, author=self.me
        ).signed(self._run, self._signer)
        this.proposed = this.view
        this.said[proposal.slot] = proposal
        this.early[this.view] = proposal
        self._keep()
        self._tell(proposal)

    def _is_time(self, now: float) -> bool:
        """Return True if all heard members are ready, or the late ones were waited for long
        enough.
        """
        this, live = self.round, self._live(now)
        late = [peer for peer in live if peer not in this.readys]
        if not is_majority({*live} - {*late}, self.members, self._anchor):
            return False
        return not late or now >= this.majority_ready + self._config.grace

    def _plan(self, promises: Sequence[Promise], now: float) -> Plan | None:
        this, live = self.round, self._live(now)
        accused = [peer for one in promises for peer in one.suspects]
        ready = [peer for peer in live if peer in this.readys]
        summed = [p for p in ready if 3 * accused.count(p) <= len(self.members)]
        if not is_majority(summed, self.members, self._anchor):
            summed = ready  # if all accuse all, the fault is not theirs
        tally = self._tally(now)
        stay = [
            peer
            for peer in live
            if not (self._leaving if peer == self.me else tally.leaves(peer))
        ]
        members = sorted([*stay, *self._joiners(now)][:MAX_MEMBERS])
        if not summed or not members:
            return None
        contributors = tuple((peer, this.readys[peer].digest) for peer in sorted(summed))
        return Plan(self.record.step + 1, self.record.digest, contributors, tuple(members))

    def _accept(self, now: float) -> None:
        """Take the proposal of our view, or of a later view that its promises open."""
        this = self.round
        for view in sorted(this.early):
            proposal = this.early[view]
            if view < this.view:
                del this.early[view]
            elif view > this.view:
                this.promises |= {
                    one.author: one for one in proposal.promises if self._is_newer(one)
                }
                self._next_view(view, now)
        current = this.early.get(this.view) if this.proposal is None else this.proposal
        if current is None:
            return
        if this.proposal is None:
            is_another = this.accepted not in (b"", current.plan.id)
            if is_another or not self._can_agree(current, now):
                this.refused_since = min(this.refused_since, now)
                return
            this.proposal, this.accepted = current, current.plan.id
            this.began = now
            self._keep()
        if this.reducing < this.view and self.held == self.record.step:
            self._begin(current)

    def _is_acceptable(self, proposal: Propose) -> bool:
        """Return True if the proposal comes from the right member and honours what it
        carries.
        """
        plan, view = proposal.plan, proposal.view
        if self._proposer(view) != proposal.author or plan.previous != self.record.digest:
            return False
        if {*plan.summed} - {*self.members}:
            return False
        if not is_majority(plan.summed, self.members, self._anchor):
            return False
        strangers = [peer for peer in plan.members if peer not in self.members]
        if not all(map(self._may_join, strangers)):
            return False
        if not view:
            return proposal.carried is None
        promises = proposal.promises
        authors = {one.author for one in promises}
        if len(authors) < len(promises) or not is_majority(authors, self.members, self._anchor):
            return False
        if not all(
            self._is_promise(one) and one.is_genuine(self._run, self._verify)
            for one in promises
        ):
            return False
        found = choose(promises, self.members, self._anchor)
        return found == ([] if proposal.carried is None else [proposal.carried])

    def _can_agree(self, proposal: Propose, now: float) -> bool:
        """Return True if most members see the reasons for the plan's changes.

        No convicted member is in it, joiners hold the state, and members that are left out are
        gone, leave or lied. A plan that may have been decided already is always agreed to.
        """
        plan, members = proposal.plan, self.members
        if proposal.carried is not None:
            return True
        if any(peer in self.convicted for peer in (*plan.summed, *plan.members)):
            return False
        tally = self._tally(now)
        joined = {*plan.members} - {*members}
        if not all(tally.wants_to_join(peer) for peer in joined):
            return False
        left_out = {*members} - {*plan.members} - {*self.convicted}
        if self.me in left_out:
            return self._leaving
        return all(
            tally.leaves(peer) or not (tally.is_heard(peer) and self._hears(peer, now))
            for peer in left_out
        )

    def _begin(self, proposal: Propose) -> None:
        """Compute the proposed outcome, once all contributions' heads are there."""
        this, carried = self.round, proposal.carried
        if carried is not None and this.outcome == carried:
            this.reducing = this.view
            self._reduced(this.view, carried)
            return
        readys = [this.readys.get(peer) for peer in proposal.plan.summed]
        found = tuple(
            one
            for one, (_, digest) in zip(readys, proposal.plan.contributors, strict=True)
            if one is not None and one.digest == digest
        )
        if len(found) < len(readys) and carried is None:
            return
        voters = [vote.author for vote in this.votes.values() if vote.outcome == carried]
        voters += [
            one.author
            for one in proposal.promises
            if one.vote is not None and one.vote.outcome == carried
        ]
        this.reducing = this.view
        holders = tuple(dict.fromkeys(voters))
        self._out.append(ev.Reduce(this.view, proposal.plan, found, carried, holders))

    def _reduced(self, view: int, outcome: Outcome) -> None:
        """Vote for the computed outcome, if it is still the proposed one."""
        this = self.round
        if outcome.plan.previous != self.record.digest:
            return
        this.outcome = outcome
        proposal = this.proposal
        if (
            view != this.view
            or proposal is None
            or proposal.plan != outcome.plan
            or (proposal.carried is not None and proposal.carried != outcome)
            or (this.vote is not None and this.vote.view >= view)
        ):
            return
        vote = Vote(outcome.plan.step, view, outcome, author=self.me).signed(
            self._run, self._signer
        )
        this.vote = this.votes[self.me] = vote
        this.said[vote.slot] = vote
        self._keep()
        self._tell(vote)
        self._count(vote, this.began)

    def _watch(self, now: float) -> None:
        """Leave a view that does not come to an end."""
        this = self.round
        if self.is_stalled or self.me not in self.members:
            return
        dead = self._is_in_vain(now)
        patience = self._config.patience * 2.0 ** min(this.view, MOST_DOUBLINGS)
        if this.proposal is None and not this.is_promised:
            # The first proposal may come when a majority is ready and the late were waited for.
            start = this.majority_ready + self._config.grace
            dead = dead and this.majority_ready < math.inf
            over = now >= start + patience
        else:
            over = now >= this.began + patience
        if dead or over:
            self._next_view(this.view + 1, now)

    def _is_in_vain(self, now: float) -> bool:
        """Return True if this view waits for members that are gone."""
        this = self.round
        if this.proposal is None:
            if now >= this.refused_since + self._config.silence:
                return True
            proposer = self._proposer(this.view)
            is_ours = proposer == self.me and this.proposed >= this.view
            return is_ours or self._is_gone(proposer, now)
        if this.vote is not None and this.vote.view == this.view:
            return False  # what we computed may be decided; only time tells that it is not
        plan = this.proposal.plan
        if this.proposal.carried is not None:
            return False
        return any(self._is_gone(peer, now) for peer in plan.summed)

    def _is_gone(self, peer: PeerId, now: float) -> bool:
        if peer == self.me:
            return False
        is_heard = self._hears(peer, now) or self._tally(now).is_heard(peer)
        return peer in self.convicted or not is_heard

    def _next_view(self, view: int, now: float) -> None:
        this = self.round
        this.view, this.is_promised, this.began = view, True, now
        this.proposal, this.accepted, this.refused_since = None, b"", math.inf
        newest, told = self.record, (this.vote, this.suspects)
        promise = Promise(newest.step + 1, view, newest.digest, *told, author=self.me)
        promise = promise.signed(self._run, self._signer)
        this.promises[self.me] = promise
        self._keep()
        self._tell(promise)

    @property
    def _may_sign(self) -> bool:
        return self.sits_out <= self.record.step

    def _keep(self) -> None:
        this = self.round
        self._is_new = False
        step = self.record.step + 1
        self._out.append(
            ev.Keep(step, this.view, this.proposed, this.ready, this.vote, this.accepted)
        )

    def _tell(self, message: RoundMessage) -> None:
        self._out += [ev.Send(peer, message) for peer in self.members if peer != self.me]


def _contradicts(vote: Vote, record: Record) -> bool:
    """Return True if a vote is for another outcome than its view decided.

    Its author may have told others what was decided. Then the two votes are proof where both
    are known.
    """
    return (vote.step, vote.view) == (record.step, record.view) and (
        vote.outcome != record.outcome
    )


def is_unreadable(grid: PieceGrid, index: int, piece: bytes) -> bool:
    """Return True if a piece of the grid cannot be decoded."""
    return index < grid.pieces and not _passes(grid.decode_untrusted, index, piece)


def _passes(check: Callable[..., object], *arguments: object) -> bool:
    try:
        check(*arguments)
    except BadMessage:
        return False
    return True


def is_bad_sum(grid: PieceGrid, fault: BadSum) -> bool:
    """Return True if an owner's piece differs from the sum of the contributions in evidence."""
    plan, readys, index = fault.plan, fault.readys, fault.index
    named = tuple((one.author, one.digest) for one in readys)
    if plan.id != fault.told.plan or plan.contributors != named:
        return False
    if any(len(one.digests) != grid.pieces for one in readys) or index >= grid.pieces:
        return False
    if any(
        digest_of(part) != one.digests[index]
        for part, one in zip(fault.parts, readys, strict=True)
    ):
        return False
    try:
        values = [
            check_part(grid, index, part, one.norms[index])
            for part, one in zip(fault.parts, readys, strict=True)
        ]
    except BadMessage:
        return False  # then a contributor is at fault
    right = sum_piece(grid, index, values, shares_of(readys).values())
    told = fault.told.digests[index - fault.told.first]
    return digest_of(right) != told and owners_of(grid, readys)[index] == fault.culprit


def owners_of(grid: PieceGrid, readys: Sequence[Ready]) -> list[PeerId]:
    """Return the owner of each piece of a plan with these contributions."""
    return owners(grid.pieces, {one.author: one.rate for one in readys})


def shares_of(readys: Sequence[Ready]) -> dict[PeerId, float]:
    """Return the weight of each contribution, in the order of ids."""
    return shares(
        {one.author: one.tokens for one in readys},
        {one.author: total_norm(one.norms) for one in readys},
    )


def _mask(members: Sequence[PeerId], those: Mapping[PeerId, object]) -> int:
    return sum(1 << place for place, peer in enumerate(members) if peer in those)


def _masked(members: Sequence[PeerId], mask: int) -> frozenset[PeerId]:
    return frozenset(peer for place, peer in enumerate(members) if mask >> place & 1)


def _in_view(said: Mapping[PeerId, Said], view: int) -> dict[PeerId, Said]:
    return {peer: one for peer, one in said.items() if one.view == view}
