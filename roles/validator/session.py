"""A validator at work: replay what others claim to have sampled, judge it, sign the verdict.

Theory of operation
-------------------
Of a submission the head is read first, which is small and signed. Cheap checks follow in the
task of its stream: run, admission, judge, age, place, and whether it was judged before. Only
then it gets a seat (`roles.shared.seats`) for the content; what waits for a policy to come, or
for its verdict, has none. Then it waits for the one scorer, whose turns go by node
(`roles.validator.core.fair_queue`). While the disk makes one verdict durable the scorer works
on the next. A verdict is in the ledger before any peer hears of it, and the ledger answers a
peer that asks again. Accepted submissions stay on disk until the trainer has taken them;
`roles.validator.delivery` lets a few wait for it, and when they do, judging stops, but for
nodes whose work was rejected of late: back-pressure, not loss.

`INCONCLUSIVE` blames no worker (the policy is not here or too old to matter, our engine
failed): no ledger entry. It is as final as the others, though: the place in the draw order is
taken, or the worker's next ones would be ahead of a place that never comes, and a worker that
asks again is told the same. After a restart nothing tells such a place from one whose
submission is on its way: it may be filled, and is no gap. A *refusal* is no verdict at all: the
worker keeps the submission and asks again.

An environment is foreign code: what it raises makes its submission `INCONCLUSIVE`, and the
operator hears of it once. A submission that is too long gets a verdict by its head: a refusal
would leave a gap, and the worker would ask again for ever.

What a peer can make this node hold is bounded: streams, seats, the queue, verdicts on work out
of place, and what is counted about nodes and reasons. One validator judges all work of a node
under one policy (`roles.protocol.core.assignment.validator_of`): to two of them a node could
sell one place twice, and neither sees gaps.
"""

from __future__ import annotations

import logging
import math
from functools import partial
from typing import Final

import trio

from p2p.errors import StorageError
from p2p.host import Stream, send_frame
from p2p.identity import PeerId
from p2p.ledger import Ledger
from p2p.limits import MAX_SERVED
from p2p.node.admission import Capability
from p2p.node.node import Node
from p2p.shardcast.manifest import PolicyVersion
from p2p.world import dawdle, decode_off_loop
from proofs.checks import Verdict
from roles.engines.base import EngineError
from roles.envs.contained import EnvironmentFailed, Failures
from roles.protocol.core.assignment import validator_of
from roles.protocol.core.messages import (
    HASH_RATE,
    ROLLOUT_PROTOCOL,
    Commitment,
    Refusal,
    SignedVerdict,
    Submission,
    SubmissionHead,
    decode_verdict_untrusted,
    encode_reply,
)
from roles.protocol.request import PATIENCE
from roles.run import Run, run_of
from roles.shared.durable import Durable
from roles.shared.seats import STRANGERS, Seats
from roles.shared.standing import AtRest, RoleStanding
from roles.validator.core.fair_queue import FairQueue
from roles.validator.core.sequence import DrawSequences, PlaceState
from roles.validator.delivery import Deliveries
from roles.validator.limits import (
    FORTHCOMING,
    FORTHCOMING_PER_PEER,
    POLICY_SECONDS,
    RECORDING,
    REPLY_SECONDS,
    SUCCESSION,
    WEARY_SECONDS,
)
from roles.validator.reception import receive_content, receive_head
from roles.validator.replay import Replayer
from roles.validator.stats import ValidatorStats
from roles.validator.verdicts import Job, VerdictIndex

logger = logging.getLogger(__name__)

VERDICT_KIND: Final = "verdict"
"""Kind of our ledger entries; the body is `SignedVerdict.to_bytes`."""
ACCEPTED_FOLDER: Final = "validator/accepted"
"""Where accepted submissions lie until the trainer has taken them."""
REPLAYED: Final = "this place in the draw order was filled before"
GAP: Final = "places before it in the draw order were left out"
STALE: Final = "the policy is older than the run uses"
NOT_HELD: Final = "the policy is not held by this validator"
ENGINE_FAILED: Final = "the validator's engine could not score it"
ENVIRONMENT_FAILED: Final = "the run's environment failed on it"


class ValidatorSession:
    """One validator's work for one run, from its start to its end."""

    def __init__(
        self,
        node: Node,
        run: Run,
        replayer: Replayer,
        ledger: Ledger,
        standing: RoleStanding,
        stats: ValidatorStats,
    ) -> None:
        self.node = node
        self.run = run
        self._replayer = replayer
        self._ledger = ledger
        self._standing = standing
        self._stats = stats
        self._world = node.world
        self._durable = Durable(node.world, "validator")
        self._sequences = DrawSequences()
        self._verdicts = VerdictIndex()
        self._queue: FairQueue[Job] = FairQueue(
            lambda peer: stats.records.of(peer).accepted > 0
        )
        self._work = trio.Event()
        self._recording = trio.Semaphore(RECORDING)
        self._streams = Seats(in_all=MAX_SERVED)
        """Streams that are heard at all: a kilobyte each."""
        self._seats = Seats(strangers=STRANGERS)
        """Contents that are read."""
        self._forthcoming = Seats(FORTHCOMING_PER_PEER, FORTHCOMING, strangers=FORTHCOMING // 2)
        """Submissions that wait for their policy."""
        self._failures = Failures()
        self._succeeds_until = -math.inf
        """Until when nodes may come whose earlier places, under the same policy, another
        validator judged."""

    @property
    def loaded(self) -> PolicyVersion:
        """The policy in the engine."""
        return self._replayer.loaded

    @property
    def waiting(self) -> int:
        """Submissions that wait for the scorer."""
        return len(self._queue)

    @property
    def reading(self) -> int:
        """Contents that are on their way."""
        return len(self._seats)

    @property
    def writes_waiting(self) -> int:
        """Verdicts and submissions that the disk has refused so far."""
        return self._durable.waiting

    @property
    def is_at_rest(self) -> bool:
        """Whether the run file does not let this validator work now."""
        return bool(self._standing.why_not)

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to judge in this run."""
        return self.node.shardcast.newest >= self.run.terms.recipe.steps and not len(
            self._queue
        )

    async def work_forever(self) -> None:
        """Take up what an earlier life left, then judge until cancelled."""
        async with trio.open_nursery() as nursery:
            await self.recall()
            self.node.host.protect("work", self._stats.records.workers)
            deliveries = Deliveries(self.node, ACCEPTED_FOLDER, nursery, self._wake)
            await deliveries.resume()
            nursery.start_soon(self._standing.watch)
            nursery.start_soon(self._watch_succession)
            with self.node.host.serving(ROLLOUT_PROTOCOL, self.serve):
                while True:
                    await self._judge_next(deliveries, nursery)

    async def _watch_succession(self) -> None:
        """Be lenient to work that comes from another validator's hands: after each edition that
        names others than the one before, and, as this cannot be known, at the start under a
        later edition than the first.
        """
        run = self.run
        if run.epoch > 1:
            self._succeeds_until = self._world.now() + SUCCESSION
        while True:
            await self.node.book.wait_edition(run.epoch)
            newer = run_of(self.node)
            if newer.terms.validators != run.terms.validators:
                self._succeeds_until = self._world.now() + SUCCESSION
            run = newer

    async def recall(self) -> None:
        """Rebuild from the ledger what was judged before."""
        async for entry in self._ledger.entries(VERDICT_KIND):
            verdict = decode_verdict_untrusted(entry.body, self._world.verify)
            judged = verdict.commitment
            self._verdicts.record(judged, entry.seqno)
            if verdict.reason in (REPLAYED, GAP):
                self._sequences.misplace(judged.node, judged.version)
            else:
                self._sequences.recall(
                    judged.node, judged.version, judged.index, judged.content
                )
            self._stats.records.count(verdict)
        self._sequences.settle()  # places answered `INCONCLUSIVE` are not in the ledger

    # Streams: one submission in, one answer out.

    async def serve(self, stream: Stream) -> None:
        """A `StreamHandler`: one submission in, one answer out."""
        with self._streams.seat(stream.peer) as seated:
            if not seated:
                reply: SignedVerdict | Refusal | None = self._refuse(
                    "too many streams", retry=True
                )
            elif self.is_at_rest:
                reply = self._rest()
            elif not self.node.may(
                stream.peer, Capability.GENERATE
            ):  # not a byte of it is read
                reply = self._refuse(
                    "not admitted", f"{stream.peer} may not generate in this run"
                )
            else:
                try:
                    reply = await self._hear(stream)
                except AtRest:
                    reply = self._rest()
            if reply is not None:
                with trio.move_on_after(REPLY_SECONDS):
                    await send_frame(stream, encode_reply(reply))

    async def _hear(self, stream: Stream) -> SignedVerdict | Refusal | None:
        """The answer to the submission on ``stream``; None if none comes."""
        head = await receive_head(stream)
        if head is None:
            return None
        head.check_signature(self._world.verify)
        commitment = head.commitment
        early = self._admit(stream.peer, commitment) or await self._answer_again(commitment)
        early = early or await self._prepare(commitment)
        early = early or await self._answer_again(commitment)
        if early is not None:
            return early
        if head.total > self._replayer.max_submission:
            return await self._answer(Submission(commitment, head.signature, b""), head.total)
        return await self._read(stream, head)

    async def _read(self, stream: Stream, head: SubmissionHead) -> SignedVerdict | Refusal:
        """Lend the content a seat while it is on its way, then answer."""
        world, peer = self._world, stream.peer
        submission, evicted = None, True
        with trio.CancelScope() as scope:
            seat = self._seats.take(
                peer,
                world.now(),
                network=self.node.host.network_of(peer),
                is_stranger=not self._queue.is_proven(peer, world.now()),
                evict=scope.cancel,
            )
            if seat is None:
                return self._refuse(
                    "no seat", "too many submissions are on their way", retry=True
                )
            try:
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
        return await self._answer(submission, head.total)

    async def _answer_again(self, commitment: Commitment) -> SignedVerdict | Refusal | None:
        """What was, or is being, answered before; None if this place was not asked about."""
        found = self._verdicts.find(commitment)
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

    async def _answer(self, submission: Submission, length: int) -> SignedVerdict | Refusal:
        """Put it in the queue, unless it is there by now, and wait for the scorer."""
        commitment = submission.commitment
        early = await self._answer_again(commitment)
        if early is not None:
            return early
        job = Job(submission, length)
        taken, gone = self._queue.push(
            commitment.node, commitment.version, job, self._world.now()
        )
        if gone is not None:  # its worker is told to ask again
            self._verdicts.drop(gone)
            gone.finish()
        if not taken:
            return self._refuse("queue is full", retry=True)
        self._verdicts.begin(job)
        self._work.set()
        return await self._wait_verdict(job)

    async def _wait_verdict(self, job: Job) -> SignedVerdict | Refusal:
        with trio.move_on_after(
            0 if self._world.buggify("validator/says not yet") else PATIENCE
        ):
            await job.done.wait()
        return job.verdict or self._refuse("not judged yet", retry=True)

    def _admit(self, peer: PeerId, commitment: Commitment) -> Refusal | None:
        """Why this peer may not ask about this place; None if it may."""
        run = self.run
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

    async def _prepare(self, commitment: Commitment) -> SignedVerdict | Refusal | None:
        """Wait for the policy. None if the scorer should look at it."""
        world, shardcast = self._world, self.node.shardcast
        author, version = commitment.node, commitment.version
        judge = validator_of(self._standing.run, author, version)
        if self._is_stale(version):
            return self._give_up(commitment, STALE)
        if judge != self.node.host.peer_id:
            self.node.book.hint(author)  # it may know an edition that names this node its judge
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
            self._fill(commitment)
            return self._give_up(commitment, NOT_HELD)
        if self._sequences.has_strayed(author, version):
            return self._refuse("out of place", "too many submissions out of place", retry=True)
        if not self._queue.has_room(author, world.now()) or world.buggify(
            "validator/full queue"
        ):
            return self._refuse("queue is full", retry=True)
        return None

    async def _wait_policy(self, commitment: Commitment) -> None:
        """Return when the policy is here, or will not be waited for any longer; nothing is read
        meanwhile."""
        if self.node.shardcast.newest >= commitment.version:
            return
        author, now = commitment.node, self._world.now()
        is_stranger = not self._queue.is_proven(author, now)
        with trio.move_on_after(POLICY_SECONDS) as scope:
            waiting = self._forthcoming.take(
                author, now, is_stranger=is_stranger, evict=scope.cancel
            )
            if waiting is not None:
                try:
                    await self.node.shardcast.wait_policy(commitment.version)
                finally:
                    self._forthcoming.leave(waiting)

    def _rest(self) -> Refusal:
        return self._refuse("at rest", self._standing.why_not or "not judged yet", retry=True)

    def _refuse(self, kind: str, sentence: str = "", *, retry: bool = False) -> Refusal:
        """A refusal, counted by its kind: sentences name peers and runs, of which there is no
        end."""
        self._stats.refuse(kind)
        logger.info("refused: %s", sentence or kind)
        return Refusal(sentence or kind, retry)

    def _give_up(self, commitment: Commitment, reason: str) -> SignedVerdict:
        """A verdict that blames no worker."""
        self._world.sometimes("validator/blames no worker", True)
        self._stats.give_up(reason)
        verdict = self._replayer.sign(commitment, Verdict.INCONCLUSIVE, reason)
        if reason != STALE:
            self._verdicts.give_up(verdict)
        return verdict

    def _fill(self, commitment: Commitment) -> None:
        """The place is taken, whatever the verdict on it will be."""
        self._sequences.fill(
            commitment.node, commitment.version, commitment.index, commitment.content
        )

    def _is_stale(self, version: PolicyVersion) -> bool:
        """Whether no trainer can use work under ``version`` any more."""
        newest, lag = self.node.shardcast.newest, self.run.terms.recipe.lag
        self._stats.leave_out(self._sequences.forget_below(PolicyVersion(newest - lag - 1)))
        return newest - version > lag

    # The scorer: one submission at a time, in the queue's order.

    async def _judge_next(self, deliveries: Deliveries, nursery: trio.Nursery) -> None:
        """Take the submission whose turn it is through the scorer, the ledger, and towards the
        trainer."""
        world = self._world
        await self._recording.acquire()
        await self._standing.wait()
        while not self._may_judge(deliveries):
            self._work = trio.Event()
            await self._wait_work()
        began = world.now()
        job = self._queue.pop(began, of_debtors=not deliveries.has_room())
        try:
            verdict = await self._decide(job)
        except AtRest:  # its worker will be told so, and ask the judge of the newest edition
            self._end_without_entry(job, None)
            return
        finally:
            self._queue.charge(world.now() - began)
        if verdict.verdict is Verdict.REJECTED:
            self._queue.blame(verdict.commitment.node, world.now())
        if verdict.verdict is Verdict.INCONCLUSIVE:
            self._end_without_entry(job, verdict)
            return
        if verdict.verdict is Verdict.ACCEPTED:
            deliveries.expect()
        nursery.start_soon(self._record, job, verdict, deliveries)

    def _end_without_entry(self, job: Job, verdict: SignedVerdict | None) -> None:
        self._verdicts.drop(job)
        job.finish(verdict)
        self._recording.release()

    async def _wait_work(self) -> None:
        """Return when something may have come that may be judged."""
        now = self._world.now()
        if not self._queue.is_weary(now):
            await self._work.wait()
            return
        timer = self._world.call_at(now + WEARY_SECONDS, self._wake)
        try:
            await self._work.wait()
        finally:
            timer.cancel()

    def _may_judge(self, deliveries: Deliveries) -> bool:
        """Whether anything may be judged now: while the trainer takes nothing, what is likely
        to be rejected.

        Should that be accepted after all, one more delivery waits than `Deliveries` means to.
        """
        now = self._world.now()
        if deliveries.has_room():
            return self._queue.has_work(now)
        return deliveries.has_room(1) and self._queue.has_debtor(now)

    def _wake(self) -> None:
        self._work.set()

    async def _decide(self, job: Job) -> SignedVerdict:
        """The verdict on the submission whose turn it is; its place is taken, whatever it
        says."""
        commitment = job.submission.commitment
        if self._is_stale(commitment.version):
            return self._give_up(commitment, STALE)
        if job.length > self._replayer.max_submission:
            verdict = self._dismiss(commitment, job.length)
        elif self.node.shardcast.holds(commitment.version):
            verdict = await self._look(job.submission)
        else:
            verdict = self._give_up(commitment, NOT_HELD)
        self._fill(commitment)
        return verdict

    def _dismiss(self, commitment: Commitment, length: int) -> SignedVerdict:
        """The verdict on a submission that is too long to be read."""
        misplaced = self._misplaced(commitment)
        if misplaced is not None:
            return misplaced
        verdict, reason = self._replayer.too_long(length)
        if verdict is Verdict.INCONCLUSIVE:
            return self._give_up(commitment, reason)
        return self._replayer.sign(commitment, verdict, reason)

    async def _look(self, submission: Submission) -> SignedVerdict:
        """Judge under the policy, which is here; our engine's failure is not the worker's."""
        commitment = submission.commitment
        with self.node.shardcast.pin(commitment.version) as weights:
            try:
                return await self.judge(submission, weights)
            except EnvironmentFailed as error:
                self._failures.tell(
                    error, "submissions on which it fails are judged inconclusive"
                )
                return self._give_up(commitment, ENVIRONMENT_FAILED)
            except (EngineError, StorageError) as error:
                # Foreign tokens went in; that they have the right shape is no promise that no
                # sum overflows.
                author, version, index = (
                    commitment.node.short,
                    commitment.version,
                    commitment.index,
                )
                logger.error("engine_failed %s v%d/%d: %s", author, version, index, error)
                return self._give_up(commitment, ENGINE_FAILED)

    async def judge(self, submission: Submission, weights: str) -> SignedVerdict:
        """From its place to the model's replay; the first violation decides."""
        commitment = submission.commitment
        if self._world.now() < self._succeeds_until:
            self._sequences.succeed(commitment.node, commitment.version, commitment.index)
        return self._misplaced(commitment) or await self._replayer.judge(submission, weights)

    def _misplaced(self, commitment: Commitment) -> SignedVerdict | None:
        """The verdict on a submission that fills a place twice, or leaves places out; None if
        it does not."""
        state = self._sequences.judge(commitment.node, commitment.version, commitment.index)
        if state is PlaceState.FRESH:
            return None
        reason = REPLAYED if state is PlaceState.REPLAYED else GAP
        return self._replayer.sign(commitment, Verdict.REJECTED, reason)

    async def _record(self, job: Job, verdict: SignedVerdict, deliveries: Deliveries) -> None:
        """Make a verdict durable, then known, then send what it accepts on its way."""
        commitment, durable = job.submission.commitment, self._durable
        if verdict.verdict is Verdict.ACCEPTED:
            # Before the ledger: a worker that finds the verdict there must find the submission,
            # too.
            await durable.insist(partial(deliveries.keep, verdict, job.submission))
        await dawdle(self._world, "validator/slow record")
        entry = await durable.insist(
            partial(self._ledger.append, VERDICT_KIND, verdict.to_bytes())
        )
        self._verdicts.record(commitment, entry.seqno)
        self._verdicts.forget_below(
            PolicyVersion(self.node.shardcast.newest - self.run.terms.recipe.lag)
        )
        self._stats.records.count(verdict)
        self.node.host.protect("work", self._stats.records.workers)
        job.finish(verdict)
        self._recording.release()
        self._world.trace(
            "verdict", verdict=verdict.verdict.value, version=int(commitment.version)
        )
        if verdict.verdict is Verdict.ACCEPTED:
            deliveries.deliver(verdict, job.submission)
