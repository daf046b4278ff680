"""The validator role: replay what others claim to have sampled, judge it, sign the verdict.

Theory of operation
-------------------
Of a submission the head is read first, which is small and signed. Cheap checks follow in the
task of its stream: run, admission, judge, age, place, and whether it was judged before. Only
then it gets a seat (`roles.shared.seats`) for the content; what waits for a policy to come, or
for its verdict, has none. Then it waits for the one scorer, whose turns go by node
(`roles.validator.fair_queue`). While the disk makes one verdict durable the scorer works on the
next. A verdict is in the ledger before anybody hears of it, and the ledger answers a peer that
asks again. Accepted submissions stay on disk until the trainer has taken them;
`roles.validator.delivery` lets a few wait for it, and when they do, judging stops, but for
nodes whose work was rejected of late: back-pressure, not loss.

`INCONCLUSIVE` means nobody's fault (the policy is not here or too old to matter, our engine failed): no
ledger entry. It is as final as the others, though: the place in the draw order is taken, or the worker's
next ones would be ahead of a place that never comes, and whoever asks again is told the same. After a restart
nothing tells such a place from one whose submission is on its way: it may be filled, and is no gap. A
*refusal* is no verdict at all: the worker keeps the submission and asks again.

An environment is foreign code: what it raises makes its submission `INCONCLUSIVE`, and the operator hears of
it once. A submission that is too long gets a verdict by its head: a refusal would leave a gap, and the worker
would ask again for ever.

What a peer can make this node hold is bounded: streams, seats, the queue, verdicts on work out
of place, and what is counted about nodes and reasons. One validator judges all work of a node
under one policy (`roles.protocol.assignment.validator_of`): to two of them a node could sell
one place twice, and neither sees gaps.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Final, Self

import trio

from p2p.errors import BadMessage, StorageError
from p2p.host import Stream, send_frame
from p2p.identity import PeerId
from p2p.ledger import Ledger
from p2p.limits import MAX_SERVED
from p2p.node.admission import Capability
from p2p.node.node import Node
from p2p.node.role import Progress
from p2p.node.tables import read_table
from p2p.shardcast.manifest import PolicyVersion
from p2p.world import World, dawdle, decode_off_loop
from proofs.checks import Verdict
from roles.engines.base import EngineError
from roles.engines.client import open_engine
from roles.engines.config import DeviceProfile, MachineLimits
from roles.envs.client import open_environment_of
from roles.envs.contained import EnvironmentFailed, Failures
from roles.protocol.assignment import draw_order, validator_of
from roles.protocol.messages import (
    DECODE_RATE,
    HASH_RATE,
    ROLLOUT_PROTOCOL,
    Commitment,
    Refusal,
    SignedVerdict,
    Submission,
    SubmissionHead,
    content_digest,
    decode_verdict_untrusted,
    encode_reply,
)
from roles.protocol.request import PATIENCE
from roles.run import Run, run_of
from roles.shared.durable import Durable
from roles.shared.reasons import because, tally
from roles.shared.seats import STRANGERS, Seats
from roles.shared.standing import AtRest, Standing
from roles.validator.delivery import Handover
from roles.validator.fair_queue import Turns
from roles.validator.reception import receive_content, receive_head
from roles.validator.replay import Bench
from roles.validator.sequence import Place, SlotBook
from roles.validator.stats import Records

logger = logging.getLogger(__name__)

RECORDING: Final = 8
"""Verdicts that the disk may be busy with: a synced write takes as long as scoring a submission."""
POLICY_SECONDS: Final = 20.0
"""How long to wait for a policy that a worker has and we have not, before it is to ask again: one forest's
time."""
FORTHCOMING: Final = 64
"""Submissions that may wait, unread, for policies to come; nodes without accepted work have half of it."""
FORTHCOMING_PER_PEER: Final = 4
"""Of one peer: what an honest one has under way."""
REPLY_SECONDS: Final = 10.0
"""How long a peer may take to accept an answer, which fits into its window."""
SUCCESSION: Final = 600.0
"""Seconds for which an edition with other validators is on its way to all nodes: each asks one other a
minute, so that those who have it double each minute, and ten minutes reach a thousand nodes. As long, the
first place of a node under a policy is taken for the next after those that another validator judged."""
WEARY_SECONDS: Final = 0.5
"""How soon to look again after nodes that wait because much was rejected: one more is forgiven in as long."""
KNOWN: Final = 65_536
"""Verdicts that are found again by the place that they are about, beside all under policies that are not
stale: 16 MB. Who asks about an older one is told that its policy is stale, which it knows."""
GIVEN_UP: Final = 1024
"""Submissions given up whose verdicts are remembered: four under way from each of 256 nodes."""
VERDICT_KIND: Final = "verdict"
"""Kind of our ledger entries; the body is `SignedVerdict.to_bytes`."""
REPLAYED: Final = "this place in the draw order was filled before"
GAP: Final = "places before it in the draw order were left out"
WRONG_GROUPS: Final = "not the groups of its place in the draw order"
STALE: Final = "the policy is older than the run uses"
NOT_HELD: Final = "the policy is not held by this validator"
OTHER_POLICY: Final = "the policy digest is not that of the version"
ENGINE_FAILED: Final = "the validator's engine could not score it"
ENVIRONMENT_FAILED: Final = "the run's environment failed on it"


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidatorConfig:
    """This machine's part; everything else is in the run file."""

    threads: int = 1
    """Threads of the engine."""

    nice: int = 0
    """Niceness of the engine's process."""

    machine: MachineLimits = field(default_factory=MachineLimits)
    """What a run may ask of this machine, whoever owns the run."""

    profile: DeviceProfile = field(default_factory=DeviceProfile)
    """Speeds of the fake engine; others ignore it."""


@dataclass(slots=True, eq=False)
class _Job:
    """A submission on its way through the scorer."""

    submission: Submission
    length: int
    """Bytes of the message it came in; of one that is too long nothing but the head was read."""
    done: trio.Event = field(default_factory=trio.Event)
    verdict: SignedVerdict | None = None


class Validator:
    """Judges submissions for a run."""

    name: ClassVar[str] = "validator"

    def __init__(self, config: ValidatorConfig) -> None:
        self._config = config
        self._slots = SlotBook()
        self._turns: Turns[_Job] = Turns(lambda peer: self.records.of(peer).accepted > 0)
        self._work = trio.Event()
        self._recording = trio.Semaphore(RECORDING)
        self._known: dict[bytes, _Job | int] = {}
        """By `_key`: the job under way, or the ledger entry of the verdict."""
        self._recorded: deque[tuple[PolicyVersion, bytes]] = deque()
        """What of `_known` has a ledger entry, oldest first."""
        self._given_up: dict[bytes, SignedVerdict] = {}
        """The last `INCONCLUSIVE` verdicts, by `_key`: places that are taken, and whoever asks again must be
        told the same. Not that a policy is stale: it stays so, and 1,024 claims of old work would displace
        the others, whose authors would then be rejected for a replay."""
        self._loaded = PolicyVersion(-1)
        self._streams = Seats(in_all=MAX_SERVED)
        """Streams that are heard at all: a kilobyte each."""
        self._seats = Seats(strangers=STRANGERS)
        """Contents that are read."""
        self._forthcoming = Seats(FORTHCOMING_PER_PEER, FORTHCOMING, strangers=FORTHCOMING // 2)
        """Submissions that wait for their policy."""
        self._failures = Failures()
        self._durable: Durable | None = None
        self._standing: Standing | None = None
        self._is_over: Callable[[], bool] = bool
        """Whether nothing is left to judge in this run; False until it has begun."""
        self._succeeds_until = -math.inf
        """Until when nodes may come whose earlier places, under the same policy, another validator judged."""
        self.records = Records()
        self.inconclusive: dict[str, int] = {}
        self.refused: dict[str, int] = {}
        self.left_out = 0

    @classmethod
    def from_config(cls, table: Mapping[str, object]) -> Self:
        """Made from ``[role.validator]``."""
        return cls(read_table(ValidatorConfig, table, "[role.validator]"))

    def health(self) -> dict[str, object]:
        """Counts for people and dashboards."""
        return {
            "version": int(self._loaded),
            "accepted": self.records.accepted,
            "rejected": self.records.rejected,
            "inconclusive": dict(self.inconclusive),
            "refused": dict(self.refused),
            "queue": len(self._turns),
            "seats": len(self._seats),
            "left_out": self.left_out,
            "waits_for_disk": 0 if self._durable is None else self._durable.waiting,
            "nodes": self.records.health(),
        }

    def progress(self) -> Progress:
        """For the live line."""
        records, undecided = self.records, sum(self.inconclusive.values())
        parts = [
            f"submissions {records.accepted + records.rejected + undecided:,} judged",
            f"{records.accepted:,} accepted",
            f"{records.rejected:,} rejected{because(records.reasons)}",
            *([f"{undecided:,} undecided{because(self.inconclusive)}"] if undecided else []),
            f"{len(self._turns):,} waiting",
            *(["rests"] if self._standing is not None and self._standing.why_not else []),
        ]
        return Progress(text=", ".join(parts), over=self._is_over())

    async def run(self, node: Node) -> None:
        """Judge until cancelled."""
        run = run_of(node)
        run.check_job(node.peer_id, self.name)
        run.check_store(node.config.shardcast.keep_versions)
        config = run.engine_config(self._config.machine, threads=self._config.threads, nice=self._config.nice)
        async with (
            open_environment_of(node.world, run, self._config.machine) as environment,
            open_engine(node.world, replace(config, profile=self._config.profile), name=self.name) as engine,
            trio.open_nursery() as nursery,
        ):
            ledger = await node.ledger.opened()
            await self._recall(node, ledger)
            node.host.protect("work", self.records.workers)
            handover = await Handover.open(node, "validator/accepted", nursery, self._wake)
            durable = self._durable = Durable(node.world, self.name)
            standing = self._standing = Standing(node, "validator", self.name)
            self._is_over = partial(self._has_all, node, run)
            nursery.start_soon(standing.watch)
            nursery.start_soon(self._succeed, node, run)
            bench = Bench(node, run, environment, engine, ledger, handover, nursery, durable, standing)
            node.host.set_handler(ROLLOUT_PROTOCOL, partial(self._serve, bench))
            while True:
                await self._judge_next(bench)

    def _has_all(self, node: Node, run: Run) -> bool:
        return node.shardcast.newest >= run.terms.recipe.steps and not len(self._turns)

    async def _succeed(self, node: Node, run: Run) -> None:
        """Be lenient to work that comes from another validator's hands: after each edition that names others
        than the one before, and, as this cannot be known, at the start under a later edition than the first.
        """
        if run.epoch > 1:
            self._succeeds_until = node.world.now() + SUCCESSION
        while True:
            await node.book.wait_edition(run.epoch)
            newer = run_of(node)
            if newer.terms.validators != run.terms.validators:
                self._succeeds_until = node.world.now() + SUCCESSION
            run = newer

    async def _recall(self, node: Node, ledger: Ledger) -> None:
        """Rebuild from the ledger what was judged before."""
        async for entry in ledger.entries(VERDICT_KIND):
            verdict = decode_verdict_untrusted(entry.body, node.world.verify)
            place = verdict.commitment
            self._note(place, entry.seqno)
            if verdict.reason in (REPLAYED, GAP):
                self._slots.misplace(place.node, place.version)
            else:
                self._slots.recall(place.node, place.version, place.index, place.content)
            self.records.count(verdict)
        self._slots.settle()  # places answered `INCONCLUSIVE` are not in the ledger

    async def _serve(self, bench: Bench, stream: Stream) -> None:
        """A `StreamHandler`: one submission in, one answer out."""
        with self._streams.seat(stream.peer) as seated:
            if not seated:
                reply: SignedVerdict | Refusal | None = self._refuse("too many streams", retry=True)
            elif bench.standing.why_not:
                reply = self._rest(bench)
            elif not bench.node.may(stream.peer, Capability.GENERATE):  # not a byte of it is read
                reply = self._refuse("not admitted", f"{stream.peer} may not generate in this run")
            else:
                try:
                    reply = await self._hear(bench, stream)
                except AtRest:
                    reply = self._rest(bench)
            if reply is not None:
                with trio.move_on_after(REPLY_SECONDS):
                    await send_frame(stream, encode_reply(reply))

    async def _hear(self, bench: Bench, stream: Stream) -> SignedVerdict | Refusal | None:
        """The answer to the submission on ``stream``; None if none comes."""
        head = await receive_head(stream)
        if head is None:
            return None
        head.check_signature(bench.node.world.verify)
        place = head.commitment
        early = self._admit(bench, stream.peer, place) or await self._answer_again(bench, place)
        early = early or await self._prepare(bench, place)
        early = early or await self._answer_again(bench, place)
        if early is not None:
            return early
        if head.total > bench.max_submission:
            return await self._answer(bench, Submission(place, head.signature, b""), head.total)
        return await self._read(bench, stream, head)

    async def _read(self, bench: Bench, stream: Stream, head: SubmissionHead) -> SignedVerdict | Refusal:
        """Lend the content a seat while it is on its way, then answer."""
        world, peer = bench.node.world, stream.peer
        submission, evicted = None, True
        with trio.CancelScope() as scope:
            seat = self._seats.take(
                peer,
                world.now(),
                network=bench.node.host.network_of(peer),
                is_stranger=not self._turns.is_proven(peer, world.now()),
                evict=scope.cancel,
            )
            if seat is None:
                return self._refuse("no seat", "too many submissions are on their way", retry=True)
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
            why = "too slow while others wait for a seat" if evicted else "it took too long to arrive"
            return self._refuse("too slow", why, retry=True)
        return await self._answer(bench, submission, head.total)

    async def _answer_again(self, bench: Bench, place: Commitment) -> SignedVerdict | Refusal | None:
        """What was, or is being, answered before; None if this place was not asked about."""
        known = self._known.get(_key(place))
        bench.node.world.sometimes("validator/was asked again", known is not None)
        if _key(place) in self._given_up:
            return self._given_up[_key(place)]
        if known is None:
            return None
        if isinstance(known, int):
            try:
                entry = await bench.ledger.read(known)
            except StorageError as error:
                logger.error("ledger_unreadable seqno=%d: %s", known, error)
                return self._refuse("the disk fails", retry=True)
            return decode_verdict_untrusted(entry.body, bench.node.world.verify)
        return await self._wait_verdict(bench, known)

    async def _answer(self, bench: Bench, submission: Submission, length: int) -> SignedVerdict | Refusal:
        """Put it in the queue, unless it is there by now, and wait for the scorer."""
        place = submission.commitment
        early = await self._answer_again(bench, place)
        if early is not None:
            return early
        now = bench.node.world.now()
        job = _Job(submission, length)
        taken, gone = self._turns.push(place.node, place.version, job, now)
        if gone is not None:  # its worker is told to ask again
            del self._known[_key(gone.submission.commitment)]
            gone.done.set()
        if not taken:
            return self._refuse("queue is full", retry=True)
        self._known[_key(place)] = job
        self._work.set()
        return await self._wait_verdict(bench, job)

    async def _wait_verdict(self, bench: Bench, job: _Job) -> SignedVerdict | Refusal:
        with trio.move_on_after(0 if bench.node.world.buggify("validator/says not yet") else PATIENCE):
            await job.done.wait()
        return job.verdict or self._refuse("not judged yet", retry=True)

    def _admit(self, bench: Bench, peer: PeerId, place: Commitment) -> Refusal | None:
        """Why this peer may not ask about this place; None if it may."""
        run = bench.run
        if place.run != run.id:
            return self._refuse(
                "another run",
                f"the submission is for run {place.run.hex()[:12]}, this validator judges "
                f"{run.id.hex()[:12]}: start the node with that run",
            )
        if place.node != peer:
            return self._refuse("another node", "a submission must come from the node that signed it")
        return None

    async def _prepare(self, bench: Bench, place: Commitment) -> SignedVerdict | Refusal | None:
        """Wait for the policy. None if the scorer should look at it."""
        shardcast = bench.node.shardcast
        judge = validator_of(bench.standing.run, place.node, place.version)
        if self._is_stale(bench, place.version):
            return self._give_up(bench, place, STALE)
        if judge != bench.node.host.peer_id:
            bench.node.book.hint(place.node)  # it may know an edition that names this node its judge
            return self._refuse("another judge", f"{judge} judges this node under this policy", retry=True)
        bench.node.world.sometimes("validator/waits for a policy", shardcast.newest < place.version)
        await self._wait_policy(bench, place)
        if shardcast.newest < place.version:
            return self._refuse("policy to come", "the validator has no such policy yet", retry=True)
        if not shardcast.holds(place.version):
            self._slots.fill(place.node, place.version, place.index, place.content)
            return self._give_up(bench, place, NOT_HELD)
        if self._slots.has_strayed(place.node, place.version):
            return self._refuse("out of place", "too many submissions out of place", retry=True)
        full = not self._turns.has_room(place.node, bench.node.world.now())
        if full or bench.node.world.buggify("validator/full queue"):
            return self._refuse("queue is full", retry=True)
        return None

    async def _wait_policy(self, bench: Bench, place: Commitment) -> None:
        """Return when the policy is here, or will not be waited for any longer; nothing is read meanwhile."""
        if bench.node.shardcast.newest >= place.version:
            return
        now = bench.node.world.now()
        is_stranger = not self._turns.is_proven(place.node, now)
        with trio.move_on_after(POLICY_SECONDS) as scope:
            waiting = self._forthcoming.take(place.node, now, is_stranger=is_stranger, evict=scope.cancel)
            if waiting is not None:
                try:
                    await bench.node.shardcast.wait_policy(place.version)
                finally:
                    self._forthcoming.leave(waiting)

    def _rest(self, bench: Bench) -> Refusal:
        return self._refuse("at rest", bench.standing.why_not or "not judged yet", retry=True)

    def _refuse(self, kind: str, sentence: str = "", *, retry: bool = False) -> Refusal:
        """A refusal, counted by its kind: sentences name peers and runs, of which there is no end."""
        tally(self.refused, kind)
        logger.info("refused: %s", sentence or kind)
        return Refusal(sentence or kind, retry)

    def _give_up(self, bench: Bench, place: Commitment, reason: str) -> SignedVerdict:
        """A verdict that blames nobody."""
        bench.node.world.sometimes("validator/blames nobody", True)
        tally(self.inconclusive, reason)
        verdict = bench.sign(place, Verdict.INCONCLUSIVE, reason)
        if reason == STALE:
            return verdict
        self._given_up[_key(place)] = verdict
        if len(self._given_up) > GIVEN_UP:
            del self._given_up[next(iter(self._given_up))]
        return verdict

    def _note(self, place: Commitment, seqno: int) -> None:
        """Find the verdict on ``place`` in the ledger from now on."""
        key = _key(place)
        self._known[key] = seqno
        self._recorded.append((place.version, key))

    def _forget(self, bench: Bench) -> None:
        """Forget which entries are about places under stale policies, beyond `KNOWN`."""
        oldest = bench.node.shardcast.newest - bench.run.terms.recipe.lag
        while len(self._recorded) > KNOWN and self._recorded[0][0] < oldest:
            self._known.pop(self._recorded.popleft()[1], None)

    def _is_stale(self, bench: Bench, version: PolicyVersion) -> bool:
        """Whether no trainer can use work under ``version`` any more."""
        newest, lag = bench.node.shardcast.newest, bench.run.terms.recipe.lag
        self.left_out += self._slots.forget_below(PolicyVersion(newest - lag - 1))
        return newest - version > lag

    async def _judge_next(self, bench: Bench) -> None:
        """Take the submission whose turn it is through the scorer, the ledger, and towards the trainer."""
        world = bench.node.world
        await self._recording.acquire()
        await bench.standing.wait()
        while not self._may_judge(bench):
            self._work = trio.Event()
            await self._wait_work(world)
        began = world.now()
        job = self._turns.pop(began, of_debtors=not bench.handover.has_room())
        try:
            verdict = await self._decide(bench, job)
        except AtRest:  # its worker will be told so, and ask the judge of the newest edition
            del self._known[_key(job.submission.commitment)]
            job.done.set()
            self._recording.release()
            return
        finally:
            self._turns.charge(world.now() - began)
        if verdict.verdict is Verdict.REJECTED:
            self._turns.blame(verdict.commitment.node, world.now())
        if verdict.verdict is Verdict.INCONCLUSIVE:
            del self._known[_key(verdict.commitment)]
            job.verdict = verdict
            job.done.set()
            self._recording.release()
            return
        if verdict.verdict is Verdict.ACCEPTED:
            bench.handover.expect()
        bench.nursery.start_soon(self._record, bench, job, verdict)

    async def _wait_work(self, world: World) -> None:
        """Return when something may have come that may be judged."""
        if not self._turns.is_weary(world.now()):
            await self._work.wait()
            return
        timer = world.call_at(world.now() + WEARY_SECONDS, self._wake)
        try:
            await self._work.wait()
        finally:
            timer.cancel()

    def _may_judge(self, bench: Bench) -> bool:
        """Whether anything may be judged now: while the trainer takes nothing, what is likely to be rejected.

        Should that be accepted after all, one more delivery waits than `roles.validator.delivery` means to.
        """
        if bench.handover.has_room():
            return self._turns.has_work(bench.node.world.now())
        return bench.handover.has_room(1) and self._turns.has_debtor(bench.node.world.now())

    def _wake(self) -> None:
        self._work.set()

    async def _decide(self, bench: Bench, job: _Job) -> SignedVerdict:
        """The verdict on the submission whose turn it is; its place is taken, whatever it says."""
        submission = job.submission
        place = submission.commitment
        if self._is_stale(bench, place.version):
            return self._give_up(bench, place, STALE)
        if job.length > bench.max_submission:
            verdict = self._dismiss(bench, place, job.length)
        elif bench.node.shardcast.holds(place.version):
            verdict = await self._look(bench, submission)
        else:
            verdict = self._give_up(bench, place, NOT_HELD)
        self._slots.fill(place.node, place.version, place.index, place.content)
        return verdict

    def _dismiss(self, bench: Bench, place: Commitment, length: int) -> SignedVerdict:
        """The verdict on a submission that is too long to be read."""
        filled = self._slots.judge(place.node, place.version, place.index)
        if filled is not Place.FRESH:
            return bench.sign(place, Verdict.REJECTED, REPLAYED if filled is Place.REPLAYED else GAP)
        verdict, reason = bench.too_long(length)
        if verdict is Verdict.INCONCLUSIVE:
            return self._give_up(bench, place, reason)
        return bench.sign(place, verdict, reason)

    async def _look(self, bench: Bench, submission: Submission) -> SignedVerdict:
        """Judge under the policy, which is here; our engine's failure is not the worker's."""
        place = submission.commitment
        with bench.node.shardcast.pin(place.version) as weights:
            try:
                return await self._judge(bench, submission, weights)
            except EnvironmentFailed as error:
                self._failures.tell(error, "submissions on which it fails are judged inconclusive")
                return self._give_up(bench, place, ENVIRONMENT_FAILED)
            except (EngineError, StorageError) as error:
                # Foreign tokens went in; that they have the right shape is no promise that no sum overflows.
                logger.error(
                    "engine_failed %s v%d/%d: %s", place.node.short, place.version, place.index, error
                )
                return self._give_up(bench, place, ENGINE_FAILED)

    async def _record(self, bench: Bench, job: _Job, verdict: SignedVerdict) -> None:
        """Make a verdict durable, then known, then send what it accepts on its way."""
        place = job.submission.commitment
        if verdict.verdict is Verdict.ACCEPTED:
            # Before the ledger: whoever finds the verdict there must find the submission, too.
            await bench.durable.insist(partial(bench.handover.keep, verdict, job.submission))
        await dawdle(bench.node.world, "validator/slow record")
        entry = await bench.durable.insist(partial(bench.ledger.append, VERDICT_KIND, verdict.to_bytes()))
        self._note(place, entry.seqno)
        self._forget(bench)
        self.records.count(verdict)
        bench.node.host.protect("work", self.records.workers)
        job.verdict = verdict
        job.done.set()
        self._recording.release()
        bench.node.world.trace("verdict", verdict=verdict.verdict.value, version=int(place.version))
        if verdict.verdict is Verdict.ACCEPTED:
            bench.handover.deliver(verdict, job.submission)

    async def _judge(self, bench: Bench, submission: Submission, weights: str) -> SignedVerdict:
        """From place and shape to the model's replay; the first violation decides."""
        place = submission.commitment
        if bench.node.world.now() < self._succeeds_until:
            self._slots.succeed(place.node, place.version, place.index)
        filled = self._slots.judge(place.node, place.version, place.index)
        if filled is not Place.FRESH:
            return bench.sign(place, Verdict.REJECTED, REPLAYED if filled is Place.REPLAYED else GAP)
        order = draw_order(bench.node, bench.run, place.version, place.node)
        if place.policy != order.policy:
            return bench.sign(place, Verdict.REJECTED, OTHER_POLICY)
        try:
            groups, judgement = await decode_off_loop(
                bench.node.world, bench.open_groups_untrusted, submission.content, rate=DECODE_RATE
            )
        except BadMessage as error:
            return bench.sign(place, Verdict.REJECTED, str(error))
        tasks = await order.tasks(bench.environment, place.index)
        if [group.group for group in groups] != [task.group for _, task in tasks]:
            return bench.sign(place, Verdict.REJECTED, WRONG_GROUPS)
        if judgement.verdict is Verdict.ACCEPTED:
            if place.version != self._loaded:
                await bench.node.shardcast.check_weights(place.version)
                await bench.engine.load(weights)
                self._loaded = place.version
            judgement = await bench.replay([task for _, task in tasks], groups)
        return await bench.conclude(submission, judgement, tasks, groups)


def _key(place: Commitment) -> bytes:
    """What verdicts are remembered by: all of a commitment, so that no two nodes or places share one."""
    return content_digest(place.to_bytes())
