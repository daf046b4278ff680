"""The inference role: draw derived tasks under the newest policy, prove, submit, keep until receipted.

Theory of operation
-------------------
One loop loads the newest whole policy and generates; every finished submission is signed and put on disk
before anything else happens to it. A task per submission then asks a validator for a verdict, again and
again across crashes of either side, until a signed one is here. `UNDER_WAY` submissions may be without
verdict, those of earlier lives included: that is the back-pressure of the whole pipeline, from the trainer's
pool to this engine. When one is stuck and the others pass it, nothing is drawn that the validator would take
for a gap (`roles.validator.sequence`), until it has arrived or a new policy has come.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Final, Self

import trio

from p2p.errors import BadMessage
from p2p.identity import PeerId
from p2p.node.node import Node
from p2p.node.role import Progress
from p2p.node.tables import read_table
from p2p.shardcast.manifest import PolicyVersion
from p2p.world import dawdle
from proofs.checks import Verdict
from roles.engines.base import Engine, Group, GroupTask
from roles.engines.client import open_engine
from roles.engines.config import DeviceProfile, MachineLimits
from roles.envs.client import ContainedEnvironment, open_environment_of
from roles.envs.contained import EnvironmentFailed, Failures
from roles.inference.outbox import Outbox
from roles.protocol.assignment import REORDER_WINDOW, draw_order, run_sampling, validator_of
from roles.protocol.messages import (
    MAX_REPLY,
    ROLLOUT_PROTOCOL,
    TOO_LONG,
    Commitment,
    Refusal,
    SignedVerdict,
    Submission,
    content_digest,
    decode_reply_untrusted,
    encode_groups,
)
from roles.protocol.request import NONSENSE, Backoff, ask
from roles.run import Run, run_of
from roles.shared.durable import Durable
from roles.shared.reasons import because, printable
from roles.shared.standing import Standing

logger = logging.getLogger(__name__)

STUCK: Final = 4
"""Pairs of attempts in vain, 15 s and more, after which a validator is asked for a newer run file."""
UNDER_WAY: Final = 4
"""Submissions without a verdict: enough to hide a round trip and a queue, few enough not to go stale."""
MAX_REASONS: Final = 16
"""Different reasons for rejection that are counted, a validator's words; `proofs.checks.Reason` has 17 and a
node that is rejected for more than a few has another problem. Those beyond count as `OTHER`."""
OTHER: Final = "other reasons"


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceConfig:
    """This machine's part; everything else is in the run file."""

    threads: int = 1
    """Threads of the engine."""

    nice: int = 0
    """Niceness of the engine's process."""

    machine: MachineLimits = field(default_factory=MachineLimits)
    """What a run may ask of this machine, whoever owns the run."""

    profile: DeviceProfile = field(default_factory=DeviceProfile)
    """Speeds of the fake engine; others ignore it."""


@dataclass(slots=True)
class InferenceCounts:
    """What has become of the work of this process."""

    submitted: int = 0
    rollouts: int = 0
    """Completions in a submission: what people count in."""
    verdicts: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    """Submissions rejected, by the validator's reason."""
    policies_loaded: int = 0
    policies_skipped: int = 0
    retries: int = 0
    idle: bool = False
    """Whether the run has all its steps."""
    refusal: str = ""
    """What a validator said last that will not change by asking again."""

    def count(self, verdict: SignedVerdict) -> None:
        """A verdict came."""
        kind = verdict.verdict.value
        self.verdicts[kind] = self.verdicts.get(kind, 0) + 1
        if verdict.verdict is Verdict.REJECTED:
            reason = printable(verdict.reason)
            known = reason if reason in self.reasons or len(self.reasons) < MAX_REASONS else OTHER
            self.reasons[known] = self.reasons.get(known, 0) + 1

    def describe(self) -> str:
        """In rollouts, for people: how many were made, and what became of them."""
        made, each = self.submitted, self.rollouts
        parts = [f"rollouts {made * each:,} made"]
        parts.append(f"{self.verdicts.get(Verdict.ACCEPTED.value, 0) * each:,} accepted")
        rejected = self.verdicts.get(Verdict.REJECTED.value, 0)
        parts.append(f"{rejected * each:,} rejected{because(self.reasons)}")
        parts += [f"refused: {self.refusal}"] if self.refusal else []
        return ", ".join(parts)


class Inference:
    """Generates rollouts for a run."""

    name: ClassVar[str] = "inference"

    def __init__(self, config: InferenceConfig) -> None:
        self._config = config
        self._loaded = PolicyVersion(-1)
        self._durable: Durable | None = None
        self._failures = Failures()
        self._standing: Standing | None = None
        self.counts = InferenceCounts()

    @classmethod
    def from_config(cls, table: Mapping[str, object]) -> Self:
        """Made from ``[role.inference]``."""
        return cls(read_table(InferenceConfig, table, f"[role.{cls.name}]"))

    def health(self) -> dict[str, object]:
        """Counts for people and dashboards."""
        counts = self.counts
        return {
            "version": int(self._loaded),
            "submitted": counts.submitted,
            "policies_loaded": counts.policies_loaded,
            "policies_skipped": counts.policies_skipped,
            "retries": counts.retries,
            "refusal": counts.refusal,
            "idle": counts.idle,
            "waits_for_disk": 0 if self._durable is None else self._durable.waiting,
            **{verdict.value: counts.verdicts.get(verdict.value, 0) for verdict in Verdict},
        }

    def progress(self) -> Progress:
        """For the live line."""
        return Progress(text=self.counts.describe(), over=self.counts.idle)

    async def run(self, node: Node) -> None:
        """Generate until cancelled."""
        run = run_of(node)
        self.counts.rollouts = run.terms.recipe.submission * run.terms.recipe.group_size
        run.check_job(node.peer_id, "inference")
        config = run.engine_config(self._config.machine, threads=self._config.threads, nice=self._config.nice)
        outbox = await Outbox.open(node.world, f"{self.name}/outbox")
        self._durable = Durable(node.world, self.name)
        room = trio.Semaphore(UNDER_WAY)
        async with (
            open_environment_of(node.world, run, self._config.machine) as environment,
            open_engine(node.world, replace(config, profile=self._config.profile), name=self.name) as engine,
            trio.open_nursery() as nursery,
        ):
            self._standing = Standing(node, "inference", self.name)
            nursery.start_soon(self._standing.watch)
            node.world.sometimes("inference/took up old submissions", len(outbox) > 0)
            for submission in outbox:
                await room.acquire()
                nursery.start_soon(self._deliver, node, run, outbox, submission, room)
            # The order of draws under a policy is on disk, so a restart must not come back to an older one.
            await node.shardcast.wait_policy(outbox.newest)
            while True:
                await room.acquire()
                await self._standing.wait()
                if node.shardcast.newest >= run.terms.recipe.steps:
                    self.counts.idle = True  # nobody learns from work under the last policy
                    logger.info("run %s has all its steps: no more to do", run.name)
                    await trio.sleep_forever()
                submission = await self._produce(node, run, environment, engine, outbox)
                nursery.start_soon(self._deliver, node, run, outbox, submission, room)

    async def _produce(
        self, node: Node, run: Run, environment: ContainedEnvironment, engine: Engine, outbox: Outbox
    ) -> Submission:
        """Draw the next submission under the newest policy and keep it."""
        tasks = None
        while tasks is None:
            version = await self.load_newest(node, engine)
            while outbox.lead(version) > REORDER_WINDOW:
                await _wait_any(
                    outbox.wait_removed, partial(node.shardcast.wait_policy, PolicyVersion(version + 1))
                )
                version = await self.load_newest(node, engine)
            order = draw_order(node, run, version)
            index = outbox.next_index(version)
            try:
                tasks = [task for _, task in await order.tasks(environment, index)]
            except EnvironmentFailed as error:
                self._failures.tell(error, "nothing more is drawn under a policy where it fails")
                await node.shardcast.wait_policy(PolicyVersion(version + 1))
        await dawdle(node.world, "inference/slow engine")
        groups = await self.draw(node, run, engine, tasks)
        content = encode_groups(tuple(groups))
        commitment = Commitment(run.id, order.node, version, order.policy, index, content_digest(content))
        submission = Submission.sign(commitment, content, node.world.signer)
        await self._insist(partial(outbox.add, submission))
        self.counts.submitted += 1
        node.world.trace("submitted", version=int(version), index=index)
        return submission

    async def _insist(self, write: Callable[[], Awaitable[None]]) -> None:
        assert self._durable is not None  # made before anything is drawn
        await self._durable.insist(write)

    async def draw(self, node: Node, run: Run, engine: Engine, tasks: Sequence[GroupTask]) -> list[Group]:
        """Do the work: as the run prescribes."""
        return await engine.generate(tasks, run_sampling(run))

    @property
    def loaded(self) -> PolicyVersion:
        """The policy that is worked under; 0 before the first."""
        return PolicyVersion(max(0, self._loaded))

    async def load_newest(self, node: Node, engine: Engine) -> PolicyVersion:
        """Make the engine run the newest whole policy; returns it."""
        version = await node.shardcast.wait_policy(self.loaded)
        if node.shardcast.holds(self._loaded) and node.world.buggify("inference/keeps its policy"):
            return self._loaded
        if version != self._loaded:
            node.world.sometimes("inference/skipped a policy", 0 <= self._loaded < version - 1)
            with node.shardcast.pin(version):
                await engine.load(await node.shardcast.check_weights(version))
            self.note_policy(version)
        return version

    def note_policy(self, version: PolicyVersion) -> None:
        """Count a change of policy."""
        if version != self._loaded:
            self.counts.policies_loaded += 1
            self.counts.policies_skipped += max(0, version - self._loaded - 1)
            self._loaded = version

    async def _deliver(
        self, node: Node, run: Run, outbox: Outbox, submission: Submission, room: trio.Semaphore
    ) -> None:
        """Ask until there is a signed verdict, then forget the submission."""
        place = submission.commitment
        validators = _whom_to_ask(node, place)
        backoff = Backoff(node.world, f"deliver/{place.version}/{place.index}")
        await dawdle(node.world, "inference/late submission")
        while (verdict := await self._ask_in_time(node, next(validators), submission)) is None:
            self.counts.retries += 1
            await backoff.wait()
        self.counts.count(verdict)
        if verdict.verdict is Verdict.REJECTED:
            logger.warning("rejected version=%d index=%d: %s", place.version, place.index, verdict.reason)
        elif verdict.reason.startswith(TOO_LONG):  # only the run's owner can change that
            logger.warning("not judged version=%d index=%d: %s", place.version, place.index, verdict.reason)
        await self._insist(partial(outbox.remove, submission))
        room.release()

    async def _ask_in_time(
        self, node: Node, validator: PeerId, submission: Submission
    ) -> SignedVerdict | None:
        """One attempt, as soon as the run file allows it."""
        if self._standing is not None:
            await self._standing.wait()
        return await self._ask(node, validator, submission)

    async def _ask(self, node: Node, validator: PeerId, submission: Submission) -> SignedVerdict | None:
        """One attempt; None when it should be repeated."""
        data = await ask(node, validator, ROLLOUT_PROTOCOL, submission.to_bytes(), max_reply=MAX_REPLY)
        if data is None:
            return None
        try:
            reply = decode_reply_untrusted(data, node.world.verify)
        except BadMessage as error:
            node.host.penalise(validator, NONSENSE, str(error))
            return None
        if isinstance(reply, Refusal):
            self._note_refusal(validator, reply)
            return None
        if reply.commitment != submission.commitment or reply.validator != validator:
            node.host.penalise(validator, NONSENSE, "a verdict about another submission")
            return None
        return reply

    def _note_refusal(self, validator: PeerId, refusal: Refusal) -> None:
        """Tell the operator, once, what only the operator can change."""
        if not refusal.retry and printable(refusal.reason) != self.counts.refusal:
            self.counts.refusal = printable(refusal.reason)
            logger.warning("validator %s refuses: %s", validator.short, refusal.reason)
        else:
            logger.info("validator %s: %s", validator.short, refusal.reason)


async def _wait_any(*waits: Callable[[], Awaitable[object]]) -> None:
    """Return when the first of them does."""

    async def run(wait: Callable[[], Awaitable[object]]) -> None:
        await wait()
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for wait in waits:
            nursery.start_soon(run, wait)


def _whom_to_ask(node: Node, place: Commitment) -> Iterator[PeerId]:
    """The place's judge, and between times the others: they say when it is too old for anybody to judge.

    Each is one of the newest edition of the run file, whatever came since the one before was asked.
    """
    for turn in itertools.count():
        run = run_of(node)
        judge = validator_of(run, place.node, place.version)
        others = [validator for validator in run.terms.validators if validator != judge]
        yield judge
        yield others[turn % len(others)] if others else judge
        if turn % STUCK == STUCK - 1:
            node.book.hint(judge)  # it may judge by another edition
