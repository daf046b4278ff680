"""One submission in, one answer out: what a peer is told, and when.

Theory of operation
-------------------
The head of a submission is small and signed, the content is neither. The head says whose work
it is, what place it has and how long it is, so everything that can be known without the content
is known before memory is lent for it: run, admission, judge, age, place, and whether it was
judged before. Only then it gets a seat (`roles.shared.seats`) for the content; what waits for a
policy to come, or for its verdict, has none. Both parts are one frame on the wire.

A *refusal* is no verdict at all: the worker keeps the submission and asks again. The ledger
answers a peer that asks again about what was judged.

Nodes without accepted work wait at the door until it is their turn to be heard
(`roles.validator.core.turnstile`), the others go past them. What a head alone refutes is
answered by it, by the peer's word that is the connection's: the signature, which costs more
than all of that, is looked at when something is to be kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import trio

from p2p.bounded import BoundedDict, RateLimit
from p2p.errors import StorageError
from p2p.host import Stream, send_frame
from p2p.identity import PeerId
from p2p.ledger import Ledger
from p2p.node.admission import Capability
from p2p.node.node import Node
from p2p.offence import Offence
from p2p.shardcast.manifest import PolicyVersion
from p2p.swarm.core.limits import MAX_SERVED
from p2p.world import decode_off_loop
from proofs.checks import Verdict
from roles.protocol.core.assignment import validator_of
from roles.protocol.core.demand import NOT_WANTED
from roles.protocol.core.messages import (
    HASH_RATE,
    NOT_JUDGED_YET,
    SEND,
    Commitment,
    Refusal,
    SignedVerdict,
    Submission,
    SubmissionHead,
    decode_verdict_untrusted,
    encode_reply,
)
from roles.protocol.demand import HeardDemand, demand_of
from roles.protocol.reading import receive_content, receive_head
from roles.protocol.request import PATIENCE
from roles.shared.seats import STRANGERS, Seats
from roles.shared.standing import AtRest, RoleStanding
from roles.validator.core.fair_queue import FairQueue
from roles.validator.core.turnstile import Turnstile
from roles.validator.judge import STALE, Judge
from roles.validator.limits import (
    AHEAD,
    AT_DOOR,
    AT_DOOR_PER_NETWORK,
    DOOR_SECONDS,
    FORTHCOMING,
    FORTHCOMING_PER_PEER,
    HEADS,
    HEADS_AT_ONCE,
    OWN_HEADS,
    POLICY_SECONDS,
    REPLY_SECONDS,
)
from roles.validator.stats import ValidatorStats
from roles.validator.verdicts import Job

logger = logging.getLogger(__name__)

_METERED: Final = 1024
"""Nodes with accepted work whose heads are counted: as many as are connected."""


@dataclass(slots=True, eq=False)
class _Turn:
    """A stream that waits at the door."""

    is_over: trio.Event = field(default_factory=trio.Event)
    is_heard: bool = False
    """Else it had to go, for one of a peer with fewer."""


class Reception:
    """The streams of workers: what is read of them, and what they are answered."""

    def __init__(
        self,
        node: Node,
        judge: Judge,
        queue: FairQueue[Job],
        ledger: Ledger,
        standing: RoleStanding,
        stats: ValidatorStats,
        on_work: Callable[[], None],
    ) -> None:
        """``on_work`` is called when something was put in the ``queue``."""
        self._node = node
        self._judge = judge
        self._queue = queue
        self._ledger = ledger
        self._standing = standing
        self._stats = stats
        self._on_work = on_work
        self._world = node.world
        self._streams = Seats(in_all=MAX_SERVED)
        """Streams that are heard at all: a kilobyte each."""
        self._door: Turnstile[_Turn] = Turnstile(
            HEADS,
            HEADS_AT_ONCE,
            in_all=AT_DOOR,
            per_network=AT_DOOR_PER_NETWORK,
            evict=lambda turn: turn.is_over.set(),
        )
        """Streams of strangers that wait to be heard."""
        self._turn_due = False
        """Whether a timer runs for the next of them."""
        self._heads: BoundedDict[PeerId, RateLimit] = BoundedDict(_METERED)
        """Of nodes that do not wait there."""
        self._seats = Seats(strangers=STRANGERS)
        """Contents that are read."""
        self._forthcoming = Seats(FORTHCOMING_PER_PEER, FORTHCOMING, strangers=FORTHCOMING // 2)
        """Submissions that wait for their policy."""

    @cached_property
    def _demand(self) -> HeardDemand:
        return demand_of(self._node)

    @property
    def reading(self) -> int:
        """Contents that are on their way."""
        return len(self._seats)

    async def serve(self, stream: Stream) -> None:
        """A `StreamHandler`: one submission in, whose content is sent for, one answer out."""
        with self._streams.seat(stream.peer) as seated:
            if not seated:
                reply: SignedVerdict | Refusal | None = self._turn_away(stream.peer)
            elif self._standing.why_not:
                reply = self._rest()
            elif not self._node.may(
                stream.peer, Capability.GENERATE
            ):  # not a byte of it is read
                why_not = self._node.book.why_not(stream.peer, Capability.GENERATE)
                reply = self._refuse("not admitted", why_not)
            elif self._node.lacks_work(stream.peer):
                reply = self._refuse("no work stamp", self._judge.run.lacks_stamp, retry=True)
            elif not await self._pass_door(stream.peer):
                reply = self._refuse("busy", "too many newcomers at the door", retry=True)
            else:
                try:
                    reply = await self._hear(stream)
                except AtRest:
                    reply = self._rest()
            if reply is not None:
                with trio.move_on_after(REPLY_SECONDS):
                    await send_frame(stream, encode_reply(reply))

    def _turn_away(self, peer: PeerId) -> Refusal:
        """Refuse more streams than a peer may have; one without accepted work pays for it."""
        if not self._judge.has_worked(peer):
            self._node.host.penalise(
                peer, Offence.CROWDING.points, "too many submissions at a time"
            )
        return self._refuse("too many streams", retry=True)

    async def _pass_door(self, peer: PeerId) -> bool:
        """Return True when it is the peer's turn to be heard; False if it was not in time."""
        world = self._world
        if self._queue.is_proven(peer, world.now()) and self._meter(peer):
            return True
        network, turn = self._node.host.network_of(peer), _Turn()
        if not self._door.add(peer, network, turn, world.now()):
            return False
        self._let_in()
        with trio.move_on_after(DOOR_SECONDS):
            try:
                await turn.is_over.wait()
            finally:
                self._door.remove(peer, network, turn)
        return turn.is_heard

    def _meter(self, peer: PeerId) -> bool:
        """Whether a node that has worked hands in no more than a node can."""
        meter = self._heads.get(peer) or RateLimit(OWN_HEADS, OWN_HEADS)
        self._heads.renew(peer, meter)
        return meter.allows(1.0, self._world.now())

    def _let_in(self) -> None:
        """Whose turn it is; a timer does it again while others wait."""
        now = self._world.now()
        while (turn := self._door.next(now)) is not None:
            turn.is_heard = True
            turn.is_over.set()
        if len(self._door) and not self._turn_due:
            self._turn_due = True
            self._world.call_at(now + self._door.seconds_left(now), self._on_turn)

    def _on_turn(self) -> None:
        self._turn_due = False
        self._let_in()

    async def _hear(self, stream: Stream) -> SignedVerdict | Refusal | None:
        """The answer to the submission on ``stream``; None if none comes."""
        head = await receive_head(stream)
        if head is None:
            return None
        commitment = head.commitment
        early = (
            self._admit(stream.peer, commitment)
            or self._refuse_version(commitment.version)
            or await self._answer_again(commitment)
            or await self._prepare(head)
            or await self._answer_again(commitment)
        )
        if early is not None:
            return early
        head.check_signature(self._world.verify)
        return await self._read(stream, head)

    async def _read(self, stream: Stream, head: SubmissionHead) -> SignedVerdict | Refusal:
        """Lend the content a seat while it is on its way, then answer."""
        world, peer = self._world, stream.peer
        submission, evicted = None, True
        with trio.CancelScope() as scope:
            seat = self._seats.take(
                peer,
                world.now(),
                network=self._node.host.network_of(peer),
                is_stranger=not self._queue.is_proven(peer, world.now()),
                evict=scope.cancel,
            )
            if seat is None:
                return self._refuse(
                    "no seat", "too many submissions are on their way", retry=True
                )
            try:
                await send_frame(stream, SEND)
                content = await receive_content(stream, head, seat)
                if content is not None:
                    submission = await decode_off_loop(
                        world, head.with_content_untrusted, content, rate=HASH_RATE
                    )
            finally:
                self._seats.leave(seat)
            evicted = seat.evicted
        if submission is None:
            why = (
                "too slow while others wait for a seat"
                if evicted
                else "it took too long to arrive"
            )
            return self._refuse("too slow", why, retry=True)
        return await self._answer(submission)

    async def _answer_again(self, commitment: Commitment) -> SignedVerdict | Refusal | None:
        """What was, or is being, answered before; None if this place was not asked about."""
        found = self._judge.verdicts.find(commitment)
        self._world.sometimes("validator/was asked again", found is not None)
        if isinstance(found, Job):
            return await self._wait_verdict(found)
        if isinstance(found, int):
            try:
                entry = await self._ledger.read(found)
            except StorageError as error:
                logger.error("ledger_unreadable seqno=%d: %s", found, error)
                return self._refuse("the disk fails", retry=True)
            return decode_verdict_untrusted(entry.body, self._world.verify)
        return found

    async def _answer(self, submission: Submission) -> SignedVerdict | Refusal:
        """Put it in the queue, unless it is there by now, and wait for the scorer."""
        commitment = submission.commitment
        early = await self._answer_again(commitment)
        if early is not None:
            return early
        job = Job(submission)
        taken, gone = self._queue.push(
            commitment.node, commitment.version, job, self._world.now()
        )
        if gone is not None:  # its worker is told to ask again
            self._judge.verdicts.drop(gone)
            gone.finish()
        if not taken:
            return self._refuse("queue is full", retry=True)
        self._judge.verdicts.begin(job)
        self._on_work()
        return await self._wait_verdict(job)

    async def _wait_verdict(self, job: Job) -> SignedVerdict | Refusal:
        with trio.move_on_after(
            0 if self._world.buggify("validator/says not yet") else PATIENCE
        ):
            await job.done.wait()
        return job.verdict or self._refuse(NOT_JUDGED_YET, retry=True)

    def _admit(self, peer: PeerId, commitment: Commitment) -> Refusal | None:
        """Why this peer may not ask about this place; None if it may."""
        run = self._judge.run
        if commitment.run != run.id:
            return self._refuse(
                "another run",
                f"the submission is for run {commitment.run.hex()[:12]}, this validator judges "
                f"{run.id.hex()[:12]}: start the node with that run",
            )
        if commitment.node != peer:
            return self._refuse(
                "another node", "a submission must come from the node that signed it"
            )
        return None

    def _refuse_version(self, version: PolicyVersion) -> Refusal | None:
        """Why there can be no work under this version; None if there can."""
        steps = self._judge.run.terms.recipe.steps
        if version > steps:
            sentence = f"the run has no policy {version}: it ends with {steps}"
            return self._refuse("no such policy", sentence)
        if version > self._node.shardcast.newest + AHEAD:
            return self._refuse(
                "policy to come", "the validator has no such policy yet", retry=True
            )
        return None

    async def _prepare(self, head: SubmissionHead) -> SignedVerdict | Refusal | None:
        """Say what a head says by itself, and wait for its policy. None if the scorer should
        look at the content."""
        world, shardcast, commitment = self._world, self._node.shardcast, head.commitment
        author, version = commitment.node, commitment.version
        judge = validator_of(self._standing.run, author, version, self._node.ledgers.forks)
        if self._judge.is_stale(version):
            return self._judge.give_up(commitment, STALE)
        if judge != self._node.host.peer_id:
            self._node.book.hint(
                author
            )  # it may know an edition that names this node its judge
            return self._refuse(
                "another judge", f"{judge} judges this node under this policy", retry=True
            )
        world.sometimes("validator/waits for a policy", shardcast.newest < version)
        await self._wait_policy(commitment)
        if shardcast.newest < version:
            return self._refuse(
                "policy to come", "the validator has no such policy yet", retry=True
            )
        if not shardcast.holds(version):
            return self._judge.forgo(commitment)
        if self._judge.has_strayed(commitment):
            return self._refuse("out of place", "too many submissions out of place", retry=True)
        refuted = self._judge.refute(commitment, head.total)
        if refuted is not None:
            return self._dismiss(refuted)
        if not self._demand.shares.asked_for(commitment):
            return self._refuse(NOT_WANTED, _why_not_wanted(self._demand), retry=True)
        if not self._queue.has_room(author, world.now()) or world.buggify(
            "validator/full queue"
        ):
            return self._refuse("queue is full", retry=True)
        return None

    def _dismiss(self, verdict: SignedVerdict) -> SignedVerdict:
        """A head was enough: what the verdict leaves of its node is a debt, for a while."""
        if verdict.verdict is Verdict.REJECTED:
            self._queue.blame(verdict.commitment.node, self._world.now(), by_head=True)
            self._stats.records.count(verdict)
            self._judge.verdicts.let_pass(verdict)
        return verdict

    async def _wait_policy(self, commitment: Commitment) -> None:
        """Return when the policy is here, or will not be waited for any longer; nothing is read
        meanwhile."""
        if self._node.shardcast.newest >= commitment.version:
            return
        author, now = commitment.node, self._world.now()
        is_stranger = not self._queue.is_proven(author, now)
        with trio.move_on_after(POLICY_SECONDS) as scope:
            waiting = self._forthcoming.take(
                author, now, is_stranger=is_stranger, evict=scope.cancel
            )
            if waiting is not None:
                try:
                    await self._node.shardcast.wait_policy(commitment.version)
                finally:
                    self._forthcoming.leave(waiting)

    def _rest(self) -> Refusal:
        return self._refuse("at rest", self._standing.why_not or NOT_JUDGED_YET, retry=True)

    def _refuse(self, kind: str, sentence: str = "", *, retry: bool = False) -> Refusal:
        """A refusal, counted by its kind: sentences name peers and runs, of which there is no
        end."""
        self._stats.refuse(kind)
        logger.debug("refused: %s", sentence or kind)
        return Refusal(sentence or kind, retry)


def _why_not_wanted(demand: HeardDemand) -> str:
    return f"{NOT_WANTED}: {demand.shares.newest}"
