"""The validator role: replay what others claim to have sampled, judge it, sign the verdict.

Theory of operation
-------------------
A submission passes cheap checks in the task of its stream (signature, run, admission); then it waits for
the one scorer, oldest policy first, so that weights are loaded seldom and nothing goes stale in the queue.
While the disk makes one verdict durable the scorer works on the next. A verdict is in the ledger before
anybody hears of it, and the ledger answers whoever asks again. Accepted submissions stay on disk until the
trainer has taken them; `roles.handover` lets a few wait for it, and when they do, judging stops:
back-pressure, not loss.

`INCONCLUSIVE` means nobody's fault (the policy is not here or too old to matter, our engine failed): no
ledger entry. It is as final as the others, though: the place in the draw order is taken, or the worker's
next ones would be ahead of a place that never comes, and whoever asks again is told the same. After a restart
nothing tells such a place from one whose submission is on its way: it may be filled, and is no gap. A
*refusal* is no verdict at all: the worker keeps the submission and asks again.

What a peer can make this node hold is bounded: streams, the queue, verdicts on work out of place, and what
is counted about nodes and reasons. One validator judges all work of a node under one policy
(`roles.draws.validator_of`): to two of them a node could sell one place twice, and neither sees gaps.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Final, Self

import trio

from p2p.errors import BadMessage, StorageError
from p2p.host import Stream, send_frame
from p2p.identity import PeerId
from p2p.node.admission import Capability
from p2p.node.node import Node
from p2p.node.tables import read_table
from p2p.shardcast.manifest import PolicyVersion
from p2p.wire import FrameReader
from p2p.world import dawdle, decode_off_loop
from proofs.checks import Verdict
from roles.draws import draw_order, validator_of
from roles.durable import Durable
from roles.engines.base import EngineError
from roles.engines.client import open_engine
from roles.engines.config import DeviceProfile, MachineLimits
from roles.handover import Handover
from roles.judging import Bench
from roles.messages import (
    DECODE_RATE,
    HASH_RATE,
    ROLLOUT_PROTOCOL,
    Commitment,
    Refusal,
    SignedVerdict,
    Submission,
    content_digest,
    decode_submission_untrusted,
    decode_verdict_untrusted,
    encode_reply,
)
from roles.records import Records, tally
from roles.retry import PATIENCE
from roles.run import Ledger, Run, open_ledger, run_of
from roles.seats import Seats
from roles.slots import Place, SlotBook
from roles.standing import AtRest, Standing

logger = logging.getLogger(__name__)

QUEUE: Final = 64
"""Submissions that wait for the scorer; each sender has four, and one scorer serves a dozen senders."""
RECORDING: Final = 8
"""Verdicts that the disk may be busy with: a synced write takes as long as scoring a submission."""
POLICY_SECONDS: Final = 20.0
"""How long to wait for a policy that a worker has and we have not, before it is to ask again: one forest's
time."""
REQUEST_SECONDS: Final = 60.0
"""How long a submission may take to arrive: the largest at 1 Mbit/s."""
SUCCESSION: Final = 600.0
"""Seconds for which an edition with other validators is on its way to all nodes: each asks one other a
minute, so that those who have it double each minute, and ten minutes reach a thousand nodes. As long, the
first place of a node under a policy is taken for the next after those that another validator judged."""
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
    done: trio.Event = field(default_factory=trio.Event)
    verdict: SignedVerdict | None = None


class Validator:
    """Judges submissions for a run."""

    name: ClassVar[str] = "validator"

    def __init__(self, config: ValidatorConfig) -> None:
        self._config = config
        self._slots = SlotBook()
        self._jobs: list[tuple[PolicyVersion, int, _Job]] = []
        self._order = itertools.count()
        self._work = trio.Event()
        self._recording = trio.Semaphore(RECORDING)
        self._known: dict[bytes, _Job | int] = {}
        """By `_key`: the job under way, or the ledger entry of the verdict."""
        self._given_up: dict[bytes, SignedVerdict] = {}
        """The last `INCONCLUSIVE` verdicts, by `_key`."""
        self._loaded = PolicyVersion(-1)
        self._seats = Seats()
        self._durable: Durable | None = None
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
            "queue": len(self._jobs),
            "left_out": self.left_out,
            "waits_for_disk": 0 if self._durable is None else self._durable.waiting,
            "nodes": self.records.health(),
        }

    async def run(self, node: Node) -> None:
        """Judge until cancelled."""
        run = run_of(node)
        run.check_job(node.peer_id, self.name)
        run.check_store(node.config.shardcast.keep_versions)
        environment = run.open_environments()[0]
        config = run.engine_config(self._config.machine, threads=self._config.threads, nice=self._config.nice)
        async with (
            open_ledger(node.world, "ledger") as ledger,
            open_engine(node.world, replace(config, profile=self._config.profile), name=self.name) as engine,
            trio.open_nursery() as nursery,
        ):
            await self._recall(node, ledger)
            handover = await Handover.open(node, "validator/accepted", nursery)
            durable = self._durable = Durable(node.world, self.name)
            standing = Standing(node, "validator", self.name)
            nursery.start_soon(standing.watch)
            nursery.start_soon(self._succeed, node, run)
            bench = Bench(node, run, environment, engine, ledger, handover, nursery, durable, standing)
            node.host.set_handler(ROLLOUT_PROTOCOL, partial(self._serve, bench))
            while True:
                await self._judge_next(bench)

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
            self._known[_key(place)] = entry.seqno
            if verdict.reason in (REPLAYED, GAP):
                self._slots.misplace(place.node, place.version)
            else:
                self._slots.recall(place.node, place.version, place.index, place.content)
            self.records.count(verdict)
        self._slots.settle()  # places answered `INCONCLUSIVE` are not in the ledger

    async def _serve(self, bench: Bench, stream: Stream) -> None:
        """A `StreamHandler`: one submission in, one answer out."""
        with self._seats.seat(stream.peer) as seated:
            if not seated:
                reply: SignedVerdict | Refusal = self._refuse("too many streams", retry=True)
            elif bench.standing.why_not:
                reply = self._rest(bench)
            elif not bench.node.may(stream.peer, Capability.GENERATE):  # not a byte of it is read
                reply = self._refuse("not admitted", f"{stream.peer} may not generate in this run")
            else:
                payload = None
                with trio.move_on_after(REQUEST_SECONDS):
                    payload = await FrameReader(stream, bench.max_submission).receive()
                if payload is None:
                    return
                try:
                    reply = await self._answer(bench, stream.peer, payload)
                except AtRest:
                    reply = self._rest(bench)
            await send_frame(stream, encode_reply(reply))

    async def _answer(self, bench: Bench, peer: PeerId, payload: bytes) -> SignedVerdict | Refusal:
        """Everything that needs no model, then wait for the scorer."""
        world = bench.node.world
        submission = await decode_off_loop(
            world, decode_submission_untrusted, payload, world.verify, rate=HASH_RATE
        )
        place = submission.commitment
        refusal = self._admit(bench, peer, place)
        if refusal is not None:
            return refusal
        known = self._known.get(_key(place))
        bench.node.world.sometimes("validator/was asked again", known is not None)
        if _key(place) in self._given_up:
            return self._given_up[_key(place)]
        if known is None:
            early = await self._prepare(bench, submission)
            if early is not None:
                return early
            known = self._known.get(_key(place))
        if known is None:
            known = self._enqueue(submission)
        if isinstance(known, int):
            try:
                entry = await bench.ledger.read(known)
            except StorageError as error:
                logger.error("ledger_unreadable seqno=%d: %s", known, error)
                return self._refuse("the disk fails", retry=True)
            return decode_verdict_untrusted(entry.body, bench.node.world.verify)
        with trio.move_on_after(0 if bench.node.world.buggify("validator/says not yet") else PATIENCE):
            await known.done.wait()
        return known.verdict or self._refuse("not judged yet", retry=True)

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

    async def _prepare(self, bench: Bench, submission: Submission) -> SignedVerdict | Refusal | None:
        """Wait for the policy. None if the scorer should look at it."""
        shardcast, place = bench.node.shardcast, submission.commitment
        judge = validator_of(bench.standing.run, place.node, place.version)
        if self._is_stale(bench, place.version):
            return self._give_up(bench, submission, STALE)
        if judge != bench.node.host.peer_id:
            bench.node.book.hint(place.node)  # it may know an edition that names this node its judge
            return self._refuse("another judge", f"{judge} judges this node under this policy", retry=True)
        bench.node.world.sometimes("validator/waits for a policy", shardcast.newest < place.version)
        with trio.move_on_after(POLICY_SECONDS):
            await shardcast.wait_policy(place.version)
        if shardcast.newest < place.version:
            return self._refuse("policy to come", "the validator has no such policy yet", retry=True)
        if not shardcast.holds(place.version):
            self._slots.fill(place.node, place.version, place.index, place.content)
            return self._give_up(bench, submission, NOT_HELD)
        if self._slots.has_strayed(place.node, place.version):
            return self._refuse("out of place", "too many submissions out of place", retry=True)
        if len(self._jobs) >= QUEUE or bench.node.world.buggify("validator/full queue"):
            return self._refuse("queue is full", retry=True)
        return None

    def _rest(self, bench: Bench) -> Refusal:
        return self._refuse("at rest", bench.standing.why_not or "not judged yet", retry=True)

    def _refuse(self, kind: str, sentence: str = "", *, retry: bool = False) -> Refusal:
        """A refusal, counted by its kind: sentences name peers and runs, of which there is no end."""
        tally(self.refused, kind)
        logger.info("refused: %s", sentence or kind)
        return Refusal(sentence or kind, retry)

    def _give_up(self, bench: Bench, submission: Submission, reason: str) -> SignedVerdict:
        """A verdict that blames nobody."""
        bench.node.world.sometimes("validator/blames nobody", True)
        tally(self.inconclusive, reason)
        verdict = bench.sign(submission, Verdict.INCONCLUSIVE, reason)
        self._given_up[_key(verdict.commitment)] = verdict
        if len(self._given_up) > GIVEN_UP:
            del self._given_up[next(iter(self._given_up))]
        return verdict

    def _is_stale(self, bench: Bench, version: PolicyVersion) -> bool:
        """Whether no trainer can use work under ``version`` any more."""
        newest, lag = bench.node.shardcast.newest, bench.run.terms.recipe.lag
        self.left_out += self._slots.forget_below(PolicyVersion(newest - lag - 1))
        return newest - version > lag

    def _enqueue(self, submission: Submission) -> _Job:
        job = _Job(submission)
        self._known[_key(submission.commitment)] = job
        heapq.heappush(self._jobs, (submission.commitment.version, next(self._order), job))
        self._work.set()
        return job

    async def _judge_next(self, bench: Bench) -> None:
        """Take the oldest submission through the scorer, the ledger, and towards the trainer."""
        while not self._jobs:
            self._work = trio.Event()
            await self._work.wait()
        await bench.handover.wait_room()
        await self._recording.acquire()
        await bench.standing.wait()
        job = heapq.heappop(self._jobs)[2]
        try:
            verdict = await self._decide(bench, job.submission)
        except AtRest:  # its worker will be told so, and ask the judge of the newest edition
            del self._known[_key(job.submission.commitment)]
            job.done.set()
            self._recording.release()
            return
        if verdict.verdict is Verdict.INCONCLUSIVE:
            del self._known[_key(verdict.commitment)]
            job.verdict = verdict
            job.done.set()
            self._recording.release()
            return
        if verdict.verdict is Verdict.ACCEPTED:
            bench.handover.expect()
        bench.nursery.start_soon(self._record, bench, job, verdict)

    async def _decide(self, bench: Bench, submission: Submission) -> SignedVerdict:
        """The verdict on the submission whose turn it is; its place is taken, whatever it says."""
        place = submission.commitment
        if self._is_stale(bench, place.version):
            return self._give_up(bench, submission, STALE)
        if bench.node.shardcast.holds(place.version):
            verdict = await self._look(bench, submission)
        else:
            verdict = self._give_up(bench, submission, NOT_HELD)
        self._slots.fill(place.node, place.version, place.index, place.content)
        return verdict

    async def _look(self, bench: Bench, submission: Submission) -> SignedVerdict:
        """Judge under the policy, which is here; our engine's failure is not the worker's."""
        place = submission.commitment
        with bench.node.shardcast.pin(place.version) as weights:
            try:
                return await self._judge(bench, submission, weights)
            except (EngineError, StorageError) as error:
                # Foreign tokens went in; that they have the right shape is no promise that no sum overflows.
                logger.error(
                    "engine_failed %s v%d/%d: %s", place.node.short, place.version, place.index, error
                )
                return self._give_up(bench, submission, ENGINE_FAILED)

    async def _record(self, bench: Bench, job: _Job, verdict: SignedVerdict) -> None:
        """Make a verdict durable, then known, then send what it accepts on its way."""
        place = job.submission.commitment
        if verdict.verdict is Verdict.ACCEPTED:
            # Before the ledger: whoever finds the verdict there must find the submission, too.
            await bench.durable.insist(partial(bench.handover.keep, verdict, job.submission))
        await dawdle(bench.node.world, "validator/slow record")
        entry = await bench.durable.insist(partial(bench.ledger.append, VERDICT_KIND, verdict.to_bytes()))
        self._known[_key(place)] = entry.seqno
        self.records.count(verdict)
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
            return bench.sign(submission, Verdict.REJECTED, REPLAYED if filled is Place.REPLAYED else GAP)
        order = draw_order(bench.node, bench.run, place.version, place.node)
        if place.policy != order.policy:
            return bench.sign(submission, Verdict.REJECTED, OTHER_POLICY)
        try:
            groups, judgement = await decode_off_loop(
                bench.node.world, bench.open_groups_untrusted, submission.content, rate=DECODE_RATE
            )
        except BadMessage as error:
            return bench.sign(submission, Verdict.REJECTED, str(error))
        tasks = order.tasks(bench.environment, place.index)
        if [group.group for group in groups] != [task.group for _, task in tasks]:
            return bench.sign(submission, Verdict.REJECTED, WRONG_GROUPS)
        if judgement.verdict is Verdict.ACCEPTED:
            if place.version != self._loaded:
                await bench.engine.load(weights)
                self._loaded = place.version
            judgement = await bench.replay([task for _, task in tasks], groups)
        return bench.conclude(submission, judgement, tasks, groups)


def _key(place: Commitment) -> bytes:
    """What verdicts are remembered by: all of a commitment, so that no two nodes or places share one."""
    return content_digest(place.to_bytes())
