"""The validator role: replay what others claim to have sampled, judge it, sign the verdict.

Theory of operation
-------------------
A submission passes cheap checks in the task of its stream (signature, run, admission); then it waits for
the one scorer, oldest policy first, so that weights are loaded seldom and nothing goes stale in the queue.
While the disk makes one verdict durable the scorer works on the next. A verdict is in the ledger before
anybody hears of it, and the ledger answers whoever asks again. Accepted submissions stay on disk until the
trainer has taken them; `roles.handover` lets a few wait for it, and when they do, judging stops:
back-pressure, not loss.

`INCONCLUSIVE` means nobody's fault (the policy is gone here, or too old to matter): no ledger entry.
"""

from __future__ import annotations

import heapq
import itertools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final, Self

import trio

from p2p.errors import BadMessage
from p2p.host import serve_requests
from p2p.identity import PeerId
from p2p.node.admission import Capability
from p2p.node.node import Node
from p2p.node.tables import read_table
from p2p.shardcast.manifest import PolicyVersion
from proofs.checks import Judgement, Reason, Shape, Verdict, check_shape, judge, judge_pool
from roles.draws import draw_order
from roles.engines.base import Engine, Group, GroupTask
from roles.engines.client import open_engine
from roles.engines.config import DeviceProfile
from roles.envs.base import Environment, Task
from roles.handover import Handover
from roles.inference import run_sampling
from roles.messages import (
    MAX_SUBMISSION,
    ROLLOUT_PROTOCOL,
    Refusal,
    SignedVerdict,
    Submission,
    decode_groups_untrusted,
    decode_submission_untrusted,
    decode_verdict_untrusted,
    encode_reply,
)
from roles.run import Ledger, Run, open_ledger, run_of
from roles.slots import Place, SlotBook

logger = logging.getLogger(__name__)

QUEUE: Final = 64
"""Submissions that wait for the scorer; each sender has four, and one scorer serves a dozen senders."""
RECORDING: Final = 8
"""Verdicts that the disk may be busy with: a synced write takes as long as scoring a submission."""
POLICY_SECONDS: Final = 20.0
"""How long to wait for a policy that a worker has and we have not: one forest's time."""
VERDICT_KIND: Final = "verdict"
"""Kind of our ledger entries; the body is `SignedVerdict.to_bytes`."""
REPLAYED: Final = "this place in the draw order was filled before"
GAP: Final = "places before it in the draw order were left out"
WRONG_GROUPS: Final = "not the groups of its place in the draw order"
STALE: Final = "the policy is older than the run uses"
NOT_HELD: Final = "the policy is not held by this validator"
OTHER_POLICY: Final = "the policy digest is not that of the version"


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidatorConfig:
    """This machine's part; everything else is in the run file."""

    threads: int = 1
    """Threads of the engine."""

    nice: int = 0
    """Niceness of the engine's process."""

    profile: DeviceProfile = field(default_factory=DeviceProfile)
    """Speeds of the fake engine; others ignore it."""


@dataclass(slots=True, eq=False)
class _Job:
    """A submission on its way through the scorer."""

    submission: Submission
    done: trio.Event = field(default_factory=trio.Event)
    verdict: SignedVerdict | None = None


@dataclass(slots=True)
class NodeRecord:
    """What one node has submitted, by verdict. Rebuilt from the ledger at a restart."""

    accepted: int = 0
    rejected: int = 0
    reasons: dict[str, int] = field(default_factory=dict)


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
        """By content digest: the job under way, or the ledger entry of the verdict."""
        self._loaded = PolicyVersion(-1)
        self.records: dict[PeerId, NodeRecord] = {}
        self.inconclusive: dict[str, int] = {}
        self.refused: dict[str, int] = {}
        self.left_out = 0

    @classmethod
    def from_config(cls, table: Mapping[str, object]) -> Self:
        """Made from ``[role.validator]``."""
        return cls(read_table(ValidatorConfig, table, "[role.validator]"))

    def health(self) -> dict[str, object]:
        """Counts for people and dashboards."""
        records = self.records
        return {
            "version": int(self._loaded),
            "accepted": sum(record.accepted for record in records.values()),
            "rejected": sum(record.rejected for record in records.values()),
            "inconclusive": dict(self.inconclusive),
            "refused": dict(self.refused),
            "queue": len(self._jobs),
            "left_out": self.left_out,
            "nodes": {
                str(peer): {
                    "accepted": record.accepted,
                    "rejected": record.rejected,
                    "reasons": dict(record.reasons),
                }
                for peer, record in records.items()
            },
        }

    async def run(self, node: Node) -> None:
        """Judge until cancelled."""
        run = run_of(node)
        environment = run.open_environments()[0]
        config = run.engine_config(threads=self._config.threads, nice=self._config.nice)
        async with (
            open_ledger(node.world, "ledger") as ledger,
            open_engine(node.world, replace(config, profile=self._config.profile), name=self.name) as engine,
            trio.open_nursery() as nursery,
        ):
            await self._recall(node, ledger)
            handover = await Handover.open(node, run, "validator/accepted", nursery)
            bench = _Bench(node, run, environment, engine, ledger, handover, nursery)

            async def answer(peer: PeerId, payload: bytes) -> bytes:
                return encode_reply(await self._answer(bench, peer, payload))

            node.host.set_handler(ROLLOUT_PROTOCOL, serve_requests(answer, max_request=MAX_SUBMISSION))
            while True:
                await self._judge_next(bench)

    async def _recall(self, node: Node, ledger: Ledger) -> None:
        """Rebuild from the ledger what was judged before."""
        async for entry in ledger.entries(VERDICT_KIND):
            verdict = decode_verdict_untrusted(entry.body, node.world.verify)
            place = verdict.commitment
            self._known[place.content] = entry.seqno
            self._slots.fill(place.node, place.version, place.index, place.content)
            self._count(verdict)

    def _count(self, verdict: SignedVerdict) -> None:
        record = self.records.setdefault(verdict.commitment.node, NodeRecord())
        if verdict.verdict is Verdict.ACCEPTED:
            record.accepted += 1
        else:
            record.rejected += 1
            record.reasons[verdict.reason] = record.reasons.get(verdict.reason, 0) + 1

    async def _answer(self, bench: _Bench, peer: PeerId, payload: bytes) -> SignedVerdict | Refusal:
        """The task of one incoming stream: everything that needs no model, then wait for the scorer."""
        submission = decode_submission_untrusted(payload, bench.node.world.verify)
        place = submission.commitment
        known = self._known.get(place.content)
        if isinstance(known, int):
            entry = await bench.ledger.read(known)
            return decode_verdict_untrusted(entry.body, bench.node.world.verify)
        if known is None:
            early = await self._admit(bench, peer, submission)
            if early is not None:
                return early
            known = self._known.get(place.content) or self._enqueue(submission)
        if isinstance(known, int):
            return await self._answer(bench, peer, payload)
        await known.done.wait()
        if known.verdict is None:
            return Refusal("the validator could not judge it now", retry=True)
        return known.verdict

    async def _admit(
        self, bench: _Bench, peer: PeerId, submission: Submission
    ) -> SignedVerdict | Refusal | None:
        """None if a scorer should look at it."""
        run, place = bench.run, submission.commitment
        if place.run != run.id:
            return self._refuse(
                f"the submission is for run {place.run.hex()[:12]}, this validator judges "
                f"{run.id.hex()[:12]}: start the node with that run", retry=False,
            )  # fmt: skip
        if place.node != peer:
            return self._refuse("a submission must come from the node that signed it", retry=False)
        if not run.may(peer, Capability.GENERATE):
            return self._refuse(f"{peer} may not generate in this run", retry=False)
        if len(self._jobs) >= QUEUE:
            return self._refuse("the validator's queue is full", retry=True)
        reason = await self._find_policy(bench, place.version)
        if reason:
            self.inconclusive[reason] = self.inconclusive.get(reason, 0) + 1
            return bench.sign(submission, Verdict.INCONCLUSIVE, reason)
        return None

    def _refuse(self, reason: str, *, retry: bool) -> Refusal:
        self.refused[reason] = self.refused.get(reason, 0) + 1
        logger.info("refused: %s", reason)
        return Refusal(reason, retry)

    async def _find_policy(self, bench: _Bench, version: PolicyVersion) -> str:
        """Wait for a policy that is on its way. Empty once it is held, else why it cannot be."""
        shardcast, lag = bench.node.shardcast, bench.run.terms.recipe.lag
        with trio.move_on_after(POLICY_SECONDS):
            await shardcast.wait_policy(version)
        self.left_out += self._slots.forget_below(PolicyVersion(shardcast.newest - lag - 1))
        if shardcast.newest - version > lag:
            return STALE
        return "" if shardcast.holds(version) else NOT_HELD

    def _enqueue(self, submission: Submission) -> _Job:
        job = _Job(submission)
        self._known[submission.commitment.content] = job
        heapq.heappush(self._jobs, (submission.commitment.version, next(self._order), job))
        self._work.set()
        return job

    async def _judge_next(self, bench: _Bench) -> None:
        """Take the oldest submission through the scorer, the ledger, and towards the trainer."""
        while not self._jobs:
            self._work = trio.Event()
            await self._work.wait()
        await bench.handover.wait_room()
        await self._recording.acquire()
        job = heapq.heappop(self._jobs)[2]
        place = job.submission.commitment
        reason = await self._find_policy(bench, place.version)
        if reason:
            job.verdict = bench.sign(job.submission, Verdict.INCONCLUSIVE, reason)
            self.inconclusive[reason] = self.inconclusive.get(reason, 0) + 1
            del self._known[place.content]
            job.done.set()
            self._recording.release()
            return
        with bench.node.shardcast.pin(place.version) as weights:
            verdict = await self._judge(bench, job.submission, weights)
        self._slots.fill(place.node, place.version, place.index, place.content)
        if verdict.verdict is Verdict.ACCEPTED:
            bench.handover.expect()
        bench.nursery.start_soon(self._record, bench, job, verdict)

    async def _record(self, bench: _Bench, job: _Job, verdict: SignedVerdict) -> None:
        """Make a verdict durable, then known, then send what it accepts on its way."""
        place = job.submission.commitment
        if verdict.verdict is Verdict.ACCEPTED:
            # Before the ledger: whoever finds the verdict there must find the submission, too.
            await bench.handover.keep(verdict, job.submission)
        entry = await bench.ledger.append(VERDICT_KIND, verdict.to_bytes())
        self._known[place.content] = entry.seqno
        self._count(verdict)
        job.verdict = verdict
        job.done.set()
        self._recording.release()
        bench.node.world.trace("verdict", verdict=verdict.verdict.value, version=int(place.version))
        if verdict.verdict is Verdict.ACCEPTED:
            bench.handover.deliver(verdict, job.submission)

    async def _judge(self, bench: _Bench, submission: Submission, weights: str) -> SignedVerdict:
        """From place and shape to the model's replay; the first violation decides."""
        place = submission.commitment
        filled = self._slots.judge(place.node, place.version, place.index)
        if filled is not Place.FRESH:
            return bench.sign(submission, Verdict.REJECTED, REPLAYED if filled is Place.REPLAYED else GAP)
        order = draw_order(bench.node, bench.run, place.version, place.node)
        if place.policy != order.policy:
            return bench.sign(submission, Verdict.REJECTED, OTHER_POLICY)
        try:
            groups = decode_groups_untrusted(submission.content)
        except BadMessage as error:
            return bench.sign(submission, Verdict.REJECTED, str(error))
        tasks = order.tasks(bench.environment, place.index)
        if [group.group for group in groups] != [task.group for _, task in tasks]:
            return bench.sign(submission, Verdict.REJECTED, WRONG_GROUPS)
        judgement = bench.check_shapes(groups)
        if judgement.verdict is Verdict.ACCEPTED:
            if place.version != self._loaded:
                await bench.engine.load(weights)
                self._loaded = place.version
            judgement = await bench.replay([task for _, task in tasks], groups)
        return bench.conclude(submission, judgement, tasks, groups)


@dataclass(frozen=True, slots=True)
class _Bench:
    """What judging needs: opened once, the same for all submissions."""

    node: Node
    run: Run
    environment: Environment
    engine: Engine
    ledger: Ledger
    handover: Handover
    nursery: trio.Nursery

    def check_shapes(self, groups: tuple[Group, ...]) -> Judgement:
        """The first group that is not even shaped right, or acceptance."""
        terms = self.run.terms
        shape = Shape(
            group_size=terms.recipe.group_size,
            max_new_tokens=terms.recipe.max_new_tokens,
            vocabulary=terms.model.shape.vocabulary,
            end_token=self.environment.end_token,
        )
        judgement = Judgement(Verdict.ACCEPTED, Reason.WITHIN_LIMITS)
        for group in groups:
            tokens = [completion.tokens for completion in group.completions]
            judgement = check_shape(tokens, [completion.logprobs for completion in group.completions], shape)
            if judgement.verdict is not Verdict.ACCEPTED:
                break
        return judgement

    async def replay(self, tasks: list[GroupTask], groups: tuple[Group, ...]) -> Judgement:
        """Run the model over the groups and hold what it says against the limits."""
        limits = self.run.terms.limits
        pool = await self.engine.score(tasks, groups, run_sampling(self.run))
        for evidence in pool:
            judgement = judge(evidence, limits)
            if judgement.verdict is not Verdict.ACCEPTED:
                return judgement
        return judge_pool(pool, limits)

    def conclude(
        self,
        submission: Submission,
        judgement: Judgement,
        tasks: list[tuple[Task, GroupTask]],
        groups: tuple[Group, ...],
    ) -> SignedVerdict:
        """The signed verdict, with rewards recomputed if it is acceptance."""
        rewards: tuple[float, ...] = ()
        if judgement.verdict is Verdict.ACCEPTED:
            rewards = tuple(
                self.environment.reward(task, completion.tokens)
                for (task, _), group in zip(tasks, groups, strict=True)
                for completion in group.completions
            )
        else:
            place = submission.commitment
            logger.info("rejected %s v%d/%d: %s", place.node.short, place.version, place.index, judgement)
        verdict = SignedVerdict(
            self.node.host.peer_id, submission.commitment, judgement.verdict, judgement.reason.value,
            float(judgement.statistic), float(judgement.limit), rewards,
        )  # fmt: skip
        return verdict.signed(self.node.world.signer)

    def sign(self, submission: Submission, verdict: Verdict, reason: str) -> SignedVerdict:
        """A verdict that no model was asked for."""
        unsigned = SignedVerdict(
            self.node.host.peer_id, submission.commitment, verdict, reason[:200], 0.0, 0.0, ()
        )
        return unsigned.signed(self.node.world.signer)
