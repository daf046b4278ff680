"""An inference node at work: draw, prove, submit, wait for the verdict.

Theory of operation
-------------------
One loop loads the newest whole policy and generates; every finished submission is signed and
put on disk before anything else happens to it. A task per submission then asks a validator for
a verdict, again and again across crashes of either side, until a signed one is here.
`UNDER_WAY` submissions may be without verdict, those of earlier lives included: that is the
back-pressure of the whole pipeline, from the trainer's pool to this engine. When one is stuck
and the others pass it, nothing is drawn that the validator would take for a gap
(`roles.validator.core.sequence`), until it has arrived or a new policy has come.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Final

import trio

from p2p.errors import BadMessage, WorkerDied
from p2p.identity import PeerId
from p2p.node.node import Node
from p2p.shardcast.manifest import PolicyVersion
from p2p.world import dawdle
from proofs.checks import Verdict
from roles.engines.base import Engine, EngineError, Group, GroupTask
from roles.envs.client import ContainedEnvironment
from roles.envs.contained import EnvironmentFailed, Failures
from roles.inference.outbox import SubmissionOutbox
from roles.inference.stats import InferenceCounts
from roles.protocol.core.assignment import (
    REORDER_WINDOW,
    draw_order,
    run_sampling,
    validator_of,
)
from roles.protocol.core.messages import (
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
from roles.shared.reasons import printable
from roles.shared.standing import RoleStanding

logger = logging.getLogger(__name__)

STUCK: Final = 4
"""Pairs of attempts in vain, 15 s and more, after which a validator is asked for a newer run
file."""
UNDER_WAY: Final = 4
"""Submissions without a verdict: enough to hide a round trip and a queue, few enough not to go
stale."""


class InferenceSession:
    """One inference node's work for one run, from its start to its end."""

    def __init__(
        self,
        node: Node,
        run: Run,
        environment: ContainedEnvironment,
        engine: Engine,
        outbox: SubmissionOutbox,
        name: str,
        counts: InferenceCounts,
    ) -> None:
        """``name`` is the role's, by which logs and heartbeats call it."""
        self.node = node
        self.counts = counts
        self.run = run
        self.engine = engine
        self._environment = environment
        self._outbox = outbox
        self._durable = Durable(node.world, name)
        self._standing = RoleStanding(node, "inference", name)
        self._failures = Failures()
        self._policy = b""
        """Digest of the weights in the engine: two trainers may sign one version, of which one
        is chosen."""

    @property
    def loaded(self) -> PolicyVersion:
        """The policy that is worked under; 0 before the first."""
        return PolicyVersion(max(0, self.counts.version))

    @property
    def writes_waiting(self) -> int:
        """Submissions, and content for the engine, that the disk has refused so far."""
        return self._durable.waiting + self.engine.writes_waiting

    async def work_forever(self) -> None:
        """Submit what an earlier life left, then generate until cancelled."""
        node, outbox, room = self.node, self._outbox, trio.Semaphore(UNDER_WAY)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._standing.watch)
            node.world.sometimes("inference/took up old submissions", len(outbox) > 0)
            for submission in outbox:
                await room.acquire()
                nursery.start_soon(self._deliver, submission, room)
            # The order of draws under a policy is on disk, so a restart must not come back to
            # an older one.
            await node.shardcast.wait_policy(outbox.newest)
            while True:
                await room.acquire()
                await self._standing.wait()
                if node.shardcast.newest >= self.run.terms.recipe.steps:
                    self.counts.idle = True  # no trainer learns from work under the last policy
                    logger.info("run %s has all its steps: no more to do", self.run.name)
                    await trio.sleep_forever()
                submission = await self._produce_sometime()
                nursery.start_soon(self._deliver, submission, room)

    async def _produce_sometime(self) -> Submission:
        """The next submission, under a policy that the engine can work with.

        A trainer whose learning has broken down publishes weights that are no numbers, or with
        which nothing can be computed: the policies after that may be sound again. An engine
        that has died is a machine's trouble, and loads the same one again.
        """
        while True:
            tried = self.node.shardcast.newest
            try:
                return await self.produce()
            except EngineError as error:
                logger.error("engine_failed version=%d: %s; it awaits the next", tried, error)
                await self.node.shardcast.wait_policy(PolicyVersion(tried + 1))
            except WorkerDied as error:
                logger.error("engine_died version=%d: %s; it is started again", tried, error)
                self.forget_policy()

    async def produce(self) -> Submission:
        """Draw the next submission under the newest policy and keep it."""
        node, outbox = self.node, self._outbox
        tasks = None
        while tasks is None:
            version = await self.load_newest()
            while outbox.lead(version) > REORDER_WINDOW:
                newer = partial(node.shardcast.wait_policy, PolicyVersion(version + 1))
                await _wait_any(outbox.wait_removed, newer)
                version = await self.load_newest()
            policy = self._policy
            order = draw_order(self.run, node.peer_id, version, policy)
            index = outbox.next_index(version)
            try:
                plain = await self._environment.tasks(order.task_seeds(index))
                tasks = [task for _, task in order.with_draws(index, plain)]
            except EnvironmentFailed as error:
                self._failures.tell(
                    error, "nothing more is drawn under a policy where it fails"
                )
                await node.shardcast.wait_policy(PolicyVersion(version + 1))
        await dawdle(node.world, "inference/slow engine")
        content = encode_groups(tuple(await self.draw(tasks)))
        digest = content_digest(content)
        commitment = Commitment(self.run.id, order.node, version, order.policy, index, digest)
        submission = Submission.sign(commitment, content, node.world.signer)
        await self._durable.insist(partial(outbox.add, submission))
        self.counts.submitted += 1
        node.world.trace("submitted", version=int(version), index=index)
        return submission

    async def draw(self, tasks: Sequence[GroupTask]) -> list[Group]:
        """Do the work: as the run prescribes."""
        return await self.engine.generate(tasks, run_sampling(self.run))

    async def load_newest(self) -> PolicyVersion:
        """Make the engine run the newest whole policy; returns it."""
        node, loaded = self.node, self.counts.version
        version = await node.shardcast.wait_policy(self.loaded)
        if node.shardcast.holds(loaded) and node.world.buggify("inference/keeps its policy"):
            return loaded
        policy = node.shardcast.manifest(version).weights_digest
        if (version, policy) != (loaded, self._policy):
            node.world.sometimes("inference/skipped a policy", 0 <= loaded < version - 1)
            self._policy = b""  # an engine that fails in the middle holds none
            with node.shardcast.pin(version):
                await self.engine.load(await node.shardcast.check_weights(version))
            self.claim(version, policy)
        return version

    def forget_policy(self) -> None:
        """The engine is another, which holds none."""
        self._policy = b""

    def claim(self, version: PolicyVersion, policy: bytes) -> None:
        """Say, from now on, that work is done under this version, whose weights have this
        digest."""
        self._policy = policy
        self.counts.note_policy(version)

    async def _deliver(self, submission: Submission, room: trio.Semaphore) -> None:
        """Ask until there is a signed verdict, then forget the submission."""
        world, commitment = self.node.world, submission.commitment
        version, index = commitment.version, commitment.index
        validators = _whom_to_ask(self.node, commitment)
        backoff = Backoff(world, f"deliver/{version}/{index}")
        await dawdle(world, "inference/late submission")
        while (verdict := await self._ask_in_time(next(validators), submission)) is None:
            self.counts.retries += 1
            await backoff.wait()
        self.counts.count(verdict)
        if verdict.verdict is Verdict.REJECTED:
            logger.warning("rejected version=%d index=%d: %s", version, index, verdict.reason)
        elif verdict.reason.startswith(TOO_LONG):  # only the run's owner can change that
            logger.warning("not judged version=%d index=%d: %s", version, index, verdict.reason)
        await self._durable.insist(partial(self._outbox.remove, submission))
        room.release()

    async def _ask_in_time(
        self, validator: PeerId, submission: Submission
    ) -> SignedVerdict | None:
        """One attempt, as soon as the run file allows it."""
        await self._standing.wait()
        return await self.ask(validator, submission)

    async def ask(self, validator: PeerId, submission: Submission) -> SignedVerdict | None:
        """One attempt; None when it should be repeated."""
        node = self.node
        data = await ask(
            node, validator, ROLLOUT_PROTOCOL, submission.to_bytes(), max_reply=MAX_REPLY
        )
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


def _whom_to_ask(node: Node, commitment: Commitment) -> Iterator[PeerId]:
    """The judge of this work, and between times the others: they say when it is too old to be
    judged.

    Each is one of the newest edition of the run file, whatever came since the one before was
    asked.
    """
    for turn in itertools.count():
        run = run_of(node)
        judge = validator_of(run, commitment.node, commitment.version)
        others = [validator for validator in run.terms.validators if validator != judge]
        yield judge
        yield others[turn % len(others)] if others else judge
        if turn % STUCK == STUCK - 1:
            node.book.hint(judge)  # it may judge by another edition
