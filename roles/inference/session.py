"""An inference node at work: draw, prove, submit, wait for the verdict.

Theory of operation
-------------------
One loop loads the newest whole policy and keeps the engine full: it is given the next place of
the draw order whenever it has room for more rows (`roles.inference.places`). Every finished
submission is signed and put on disk, in the draw order, before anything else happens to it. A
task per submission then asks a validator for a verdict, again and again across crashes of
either side, until a signed one is here.

`UNDER_WAY` submissions may be without verdict, in the engine, and from earlier lives together:
that is the back-pressure of the whole pipeline, from the trainer's pool to this engine. When
one is stuck and the others pass it, nothing is drawn that the validator would take for a gap
(`roles.validator.core.sequence`), until it has arrived or a new policy has come.

The trainer says how many places it wants from each node under a policy
(`roles.protocol.core.demand`): one that it does not want is not begun, before it has said more
or there is a newer policy. Until it was heard, for `HEARING` seconds nothing is begun, and
after that one place at a time. The validator is offered a submission, and sends for its content
if it can judge it now.

When a new policy comes, no place is begun under the old one. What is under way is drawn to its
end if a trainer may still use it (`lag` of the recipe), and dropped if not, also when that
happens in the middle: what was dropped was at the end of the draw order, and leaves no gap.
Then the new policy is loaded.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import ClassVar, Final

import trio

from p2p.errors import BadMessage, WorkerDied
from p2p.identity import PeerId
from p2p.node.node import Node
from p2p.offence import Offence
from p2p.shardcast.manifest import NO_POLICY, PolicyVersion
from p2p.wire import frame
from p2p.world import dawdle
from proofs.checks import Verdict
from roles.engines.base import Engine, EngineError, Group
from roles.envs.client import ContainedEnvironment
from roles.envs.contained import EnvironmentFailed, Failures
from roles.inference.appeals import Appeals
from roles.inference.earned import keep_earned
from roles.inference.glance import Glance
from roles.inference.life import LifeBook
from roles.inference.outbox import SubmissionOutbox
from roles.inference.places import OpenPlace, OpenPlaces
from roles.inference.promise import WorkPromise
from roles.inference.stats import Doing, InferenceCounts
from roles.inference.windows import Windows
from roles.protocol.away import away_of
from roles.protocol.core.assignment import (
    REORDER_WINDOW,
    draw_order,
    run_sampling,
)
from roles.protocol.core.lots import LOT_PROTOCOL, WitnessedWindow
from roles.protocol.core.messages import (
    MAX_REPLY,
    NOT_JUDGED_YET,
    OFFER_PROTOCOL,
    SEND,
    TOO_LONG,
    Commitment,
    Refusal,
    SignedVerdict,
    Submission,
    content_digest,
    decode_reply_untrusted,
    encode_groups,
)
from roles.protocol.demand import HeardDemand, demand_of
from roles.protocol.request import Backoff, offer
from roles.run import Run, run_of
from roles.shared.durable import Durable
from roles.shared.reasons import printable
from roles.shared.standing import RoleStanding

logger = logging.getLogger(__name__)

STUCK: Final = 4
"""Pairs of attempts in vain, 15 s and more, after which a validator is asked for a newer run
file."""
UNDER_WAY: Final = 4
"""Submissions without a verdict, those in the engine included: enough to hide a round trip, a
queue, and the longest answers of one behind those of the next; few enough not to go stale."""
WINDOWS: Final = 3
"""Windows beside those in a run with lots: one that is drawn, one whose lot has not fallen, one
of which places are judged and learnt from."""
HEARING: Final = 30.0
"""Seconds that a node waits to hear what the trainer wants, which says it every 20 s
(`roles.trainer.demand.EVERY`): after that there may be no way for its words."""


class InferenceSession:
    """One inference node's work for one run, from its start to its end."""

    appeals_type: ClassVar[type[Appeals]] = Appeals

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
        self._name = name
        self.book: LifeBook | None = None
        """Counts of all lives; None until they are read."""
        self._standing = RoleStanding(node, "inference", name)
        self._failures = Failures()
        self.glance = Glance(node.world, environment)
        """Some of its answers, for people."""
        self.appeals = self.appeals_type(node)
        """What the trainer is told of this node's judges."""
        self._promise = WorkPromise(
            *(node.world, f"{name}/promise", self._durable),
            lambda one, later: self._demand.shares.between(one, later),
        )
        self._windows: Windows | None = None
        """Work that is committed to before it is sent; None in a run without lots."""
        under_way = UNDER_WAY
        if run.terms.has_lots:
            self._windows = Windows(
                *(node, run, environment, self._ask_in_time, self._finish, self._deliver),
                self._promise,
            )
            self._windows.appeals = self.appeals
            under_way += WINDOWS * run.terms.lots.window
        self._room = trio.Semaphore(under_way)
        self._places = OpenPlaces()
        self._has_turn = False
        """Whether room was acquired for the place to begin next."""
        self._hears_until = -math.inf
        """Until when nothing is begun because nothing has been heard of the trainer."""
        self._barren = NO_POLICY
        """Under which the environment has failed."""
        self._policy = b""
        """Digest of the weights in the engine: two trainers may sign one version, of which one
        is chosen."""

    @cached_property
    def _demand(self) -> HeardDemand:
        return demand_of(self.node)

    @property
    def loaded(self) -> PolicyVersion:
        """The policy that is worked under; 0 before the first."""
        return PolicyVersion(max(0, self.counts.version))

    @property
    def pending(self) -> int:
        """Submissions without a verdict that are kept on disk."""
        return len(self._outbox)

    @property
    def committed_bytes(self) -> int:
        """What commitments cost the network in this life."""
        return 0 if self._windows is None else self._windows.bytes_committed

    @property
    def why_not(self) -> str:
        """Why the run file does not let this node work now; empty if it does."""
        return self._standing.why_not

    @property
    def environment_failure(self) -> str:
        """Why the environment made no task when it was asked last; empty if it did."""
        return self._failures.latest

    @property
    def writes_waiting(self) -> int:
        """Submissions, and content for the engine, that the disk has refused so far."""
        return self._durable.waiting + self.engine.writes_waiting

    async def work_forever(self) -> None:
        """Submit what an earlier life left, then generate until cancelled."""
        node, outbox = self.node, self._outbox
        self.book = await LifeBook.open(node.world, f"{self._name}/life", outbox)
        await self._promise.recall()
        demand_of(node)  # from now on it hears what is wanted
        away_of(node)  # and who does not judge now
        self._hears_until = node.world.now() + HEARING
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._standing.watch)
            nursery.start_soon(self.appeals.work_forever)
            node.world.sometimes("inference/took up old submissions", len(outbox) > 0)
            if self._windows is not None:
                self._windows.open(nursery)
            for submission in outbox:
                await self._room.acquire()
                nursery.start_soon(self._deliver, submission)
            # The order of draws under a policy is on disk, so a restart must not come back to
            # an older one.
            self.counts.doing = Doing.WAITS_FOR_POLICY
            await node.shardcast.wait_policy(outbox.newest)
            while True:
                if not self._places:
                    await self._standing.wait()
                submission = await self._produce_sometime()
                if self._windows is not None and self._windows.is_live:
                    self._windows.add(submission)
                else:
                    nursery.start_soon(self._deliver, submission)

    async def _produce_sometime(self) -> Submission:
        """The next submission, under a policy that the engine can work with.

        A trainer whose learning has broken down publishes weights that are no numbers, or with
        which nothing can be computed: the policies after that may be sound again. The next is
        often here by then, since the engine draws what it has begun to the end; to wait for one
        after that would be to wait for a trainer that waits for this node's work. An engine
        that has died is a machine's trouble, and loads the same one again.
        """
        while True:
            tried = self.node.shardcast.newest
            try:
                return await self.produce()
            except EngineError as error:
                failed = self.loaded if self._policy else tried  # without one, in loading it
                logger.error("engine_failed version=%d: %s; it awaits the next", failed, error)
                self._give_up()
                self.counts.doing = Doing.WAITS_FOR_NEWER
                await self.node.shardcast.wait_policy(PolicyVersion(failed + 1))
            except WorkerDied as error:
                logger.error("engine_died version=%d: %s; it is started again", tried, error)
                self._give_up()
                self.forget_policy()

    async def produce(self) -> Submission:
        """Draw until the next place is full, and keep its submission."""
        while True:
            if self._places and self._is_too_old():
                await self._drop()
            elif (place := self._places.take_full()) is not None:
                return await self._keep(place)
            elif not await self._begin_next():
                self._note(await self.engine.advance())

    def _note(self, groups: Sequence[Group]) -> None:
        """These have ended."""
        self._places.note(groups)
        tokens = sum(len(one.tokens) for group in groups for one in group.completions)
        self.counts.drawn.note(tokens, self.node.world.now())
        if self.book is not None:
            self.book.tokens += tokens

    def groups_of(self, place: OpenPlace) -> tuple[Group, ...]:
        """What is handed in of a full place."""
        return place.groups()

    async def _keep(self, place: OpenPlace) -> Submission:
        """Sign a full place, as soon as the run file allows it, and put it on disk."""
        await self._standing.wait_run()
        node, order = self.node, place.order
        content = encode_groups(self.groups_of(place))
        commitment = Commitment(
            self.run.id, order.node, order.version, order.policy, place.index,
            content_digest(content),
        )  # fmt: skip
        submission = Submission.sign(commitment, content, node.world.signer)
        await self._durable.insist(partial(self._outbox.add, submission))
        self.counts.submitted += 1
        await self.glance.look(place)
        node.world.trace("submitted", version=int(order.version), index=place.index)
        return submission

    async def _begin_next(self) -> bool:
        """Give the engine one place more; False if it has to go on with what it has."""
        if self._places and (
            not self.engine.has_room or self._is_behind() or self._standing.is_paused
        ):
            return False
        if not self._has_turn:
            if self._places:
                try:
                    self._room.acquire_nowait()
                except trio.WouldBlock:
                    return False
            else:
                if not self._room.value:
                    self.counts.doing = Doing.WAITS_FOR_VERDICTS
                await self._room.acquire()
            self._has_turn = True
        await self._standing.wait()
        place = await self._next_place()
        if place is None:
            return False
        await dawdle(self.node.world, "inference/slow engine")
        self.counts.doing = Doing.DRAWS
        self.counts.drawn.note(0, self.node.world.now())
        await self.begin(place)
        self._places.add(place)
        self._has_turn = False
        self.node.world.sometimes("inference/drew ahead", len(self._places) > 1)
        return True

    async def _next_place(self) -> OpenPlace | None:
        """The one to begin now; None if it has to wait, and the engine can go on."""
        node, outbox = self.node, self._outbox
        while True:
            if node.shardcast.newest >= self.run.terms.recipe.steps and not self._places:
                self.counts.doing = Doing.OVER
                self.counts.idle = True  # no trainer learns from work under the last policy
                logger.info("run %s has all its steps: no more to do", self.run.name)
                await trio.sleep_forever()
            version = self.loaded if self._places else await self.load_newest()
            newer = partial(self._wait_other_policy, version)
            index = self._places.next_index if self._places else outbox.next_index(version)
            self.counts.waits = self._why_not_wanted(version, index)
            waits: list[Callable[[], Awaitable[object]]]
            if self.counts.waits:
                waits = [self._wait_demand, outbox.wait_removed, newer]
            elif self._windows is None and outbox.lead(version, index) > REORDER_WINDOW:
                waits = [outbox.wait_removed, newer]
            elif self._barren == version:
                waits = [newer]
            else:
                order = draw_order(self.run, node.peer_id, version, self._policy)
                try:
                    plain = await self._environment.tasks(order.task_seeds(index))
                except EnvironmentFailed as error:
                    self._failures.tell(
                        error, "nothing more is drawn under a policy where it fails"
                    )
                    self._barren = version
                    continue
                self._failures.recover()
                tasks = [task for _, task in order.with_draws(index, plain)]
                return OpenPlace(order, index, tasks)
            if self._places:
                return None
            self.counts.doing = Doing.WAITS_FOR_NEWER
            self._close_window()
            await _wait_any(*waits)

    async def _wait_other_policy(self, version: PolicyVersion) -> None:
        """Return when another than this is to be worked under."""
        shardcast = self.node.shardcast
        while self._choose(newest := shardcast.newest) == version:
            await shardcast.wait_policy(PolicyVersion(newest + 1))

    def _choose(self, newest: PolicyVersion) -> PolicyVersion:
        """The policy to work under: the newest, unless lots fall and another was promised."""
        if self._windows is None or not self._windows.is_live:
            return newest
        lag, holds = self.run.terms.recipe.lag, self.node.shardcast.holds
        return self._promise.choose(newest, lag, holds, self._is_short)

    def _is_short(self, version: PolicyVersion, least: int) -> bool:
        index = self._places.next_index if self._places else self._outbox.next_index(version)
        return index < least and not self._why_not_wanted(version, index)

    def _close_window(self) -> None:
        """Nothing more is drawn for now: what there is is committed to."""
        if self._windows is not None:
            self._windows.close()

    def _why_not_wanted(self, version: PolicyVersion, index: int) -> str:
        """Why this node is not to begin this place now, for people; empty if it is."""
        shares = self._demand.shares
        is_asked = shares.asks_for(self.node.peer_id, version, self._policy, index)
        if is_asked is None and shares.newest is None:
            if self.node.world.now() < self._hears_until:
                return "it has not heard yet how much the trainer wants"
            is_one = not self._places and not len(self._outbox)
            return "" if is_one else "it has not heard how much the trainer wants"
        if is_asked is False:
            return f"{shares.newest}; this node's turn comes with more, or with a newer policy"
        return ""

    async def _wait_demand(self) -> None:
        """Return when the trainer has said something else, or might have by now."""
        left = math.inf
        if self._demand.shares.newest is None:
            left = max(0.0, self._hears_until - self.node.world.now()) or math.inf
        with trio.move_on_after(left):
            await self._demand.wait_change()

    async def begin(self, place: OpenPlace) -> None:
        """Do the work, or let the engine do it: as the run prescribes."""
        await self.engine.submit(place.tasks, run_sampling(self.run))

    async def _drop(self) -> None:
        """Give up what is under way, in the engine as well."""
        self._give_up()
        await self.engine.drop()

    def _give_up(self) -> None:
        """Forget the places under way; nothing behind them was handed in."""
        for _ in range(len(self._places)):
            self._room.release()
        self._places.clear()

    def _is_behind(self) -> bool:
        """Whether another policy than the engine's is to be worked under."""
        version = self._choose(self.node.shardcast.newest)
        policy = self.node.shardcast.manifest(version).weights_digest
        return (version, policy) != (self.loaded, self._policy)

    def _is_too_old(self) -> bool:
        """Whether no trainer can use work under the engine's policy any more."""
        newest, recipe = self.node.shardcast.newest, self.run.terms.recipe
        return newest - self.loaded > recipe.lag or newest >= recipe.steps

    async def load_newest(self) -> PolicyVersion:
        """Make the engine run the newest whole policy, or the one that was promised; returns
        it."""
        node, loaded = self.node, self.counts.version
        if node.shardcast.newest == NO_POLICY:
            self.counts.doing = Doing.WAITS_FOR_POLICY
        version = self._choose(await node.shardcast.wait_policy(self.loaded))
        if (
            node.shardcast.holds(loaded)
            and not self._is_too_old()
            and node.world.buggify("inference/keeps its policy")
        ):
            return loaded
        policy = node.shardcast.manifest(version).weights_digest
        if (version, policy) != (loaded, self._policy):
            self.counts.doing = Doing.LOADS
            node.world.sometimes("inference/skipped a policy", 0 <= loaded < version - 1)
            if self._windows is not None:
                filled = self._outbox.next_index(self._outbox.newest)
                await self._promise.begin(version, filled)
            self._policy = b""  # an engine that fails in the middle holds none
            await self.engine.drop()  # what it had when it failed before
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

    async def _deliver(self, submission: Submission) -> None:
        """Ask until there is a signed verdict, then forget the submission; or until lots fall,
        and it is to be committed to first."""
        world, commitment = self.node.world, submission.commitment
        version, index = commitment.version, commitment.index
        validators = _whom_to_ask(self.node, commitment)
        backoff = Backoff(world, f"deliver/{version}/{index}")
        await dawdle(world, "inference/late submission")
        await self._wait_order(commitment)
        while (verdict := await self._ask_in_time(next(validators), submission)) is None:
            self.counts.retries += 1
            if self._windows is not None and self._windows.is_live:
                self._windows.add(submission)
                return
            if self._demand.shares.asked_for(commitment):
                await backoff.wait()
            else:  # a validator refuses it unread
                newer = PolicyVersion(self.node.shardcast.newest + 1)
                await _wait_any(
                    self._demand.wait_change, partial(self.node.shardcast.wait_policy, newer)
                )
        await self._durable.insist(partial(keep_earned, self.node, [verdict]))
        await self._finish(submission, verdict.verdict.value, verdict.reason)

    async def _wait_order(self, commitment: Commitment) -> None:
        """Return when no validator would take this place for a gap: of windows that were
        dissolved there may be many at a time."""
        while (
            self._windows is not None
            and not self._windows.is_live
            and self._outbox.lead(commitment.version, commitment.index) > UNDER_WAY
        ):
            await _wait_any(self._outbox.wait_removed, self._windows.wait_change)

    async def _finish(self, submission: Submission, kind: str, why: str) -> None:
        """Count what became of a submission, and forget it."""
        version, index = submission.commitment.version, submission.commitment.index
        self.counts.count(kind, why)
        assert self.book is not None  # `work_forever` has opened it
        await self._durable.insist(partial(self.book.settle, submission, kind))
        reason = printable(why)
        if kind == Verdict.REJECTED.value:
            logger.warning("rejected version=%d index=%d: %s", version, index, reason)
        elif reason.startswith(TOO_LONG):  # only the run's owner can change that
            logger.warning("not judged version=%d index=%d: %s", version, index, reason)
        await self._durable.insist(partial(self._outbox.remove, submission))
        self._room.release()

    async def _ask_in_time(
        self,
        validator: PeerId,
        submission: Submission,
        witnessed: WitnessedWindow | None = None,
    ) -> SignedVerdict | None:
        """One attempt, as soon as the run file allows it. A pause is for new work."""
        await self._standing.wait_run()
        if witnessed is None:
            return await self.ask(validator, submission)
        return await self.ask(validator, submission, witnessed)

    async def ask(
        self,
        validator: PeerId,
        submission: Submission,
        witnessed: WitnessedWindow | None = None,
    ) -> SignedVerdict | None:
        """One attempt; None when it should be repeated. With the window that it is a place of,
        or alone."""
        node, counts = self.node, self.counts
        self.appeals.note_offered(submission, validator)

        def is_sent_for(reply: bytes) -> bool:
            is_send = reply == SEND
            counts.uploads += is_send
            return is_send

        head, content = submission.framed()
        protocol = OFFER_PROTOCOL
        if witnessed is not None:
            protocol, head = LOT_PROTOCOL, frame(witnessed.to_bytes()) + head
        data = await offer(node, validator, protocol, (head, content), is_sent_for, MAX_REPLY)
        if data is None:
            self.appeals.note_unanswered(submission, validator)
            if self.counts.unanswered_since is None:
                self.counts.unanswered_since = node.world.wall()
            return None
        self.counts.unanswered_since = None
        try:
            reply = decode_reply_untrusted(data, node.world.verify)
        except BadMessage as error:
            node.host.penalise(validator, Offence.NONSENSE.points, str(error))
            return None
        if isinstance(reply, Refusal):
            self._note_refusal(validator, reply)
            if reply.reason == NOT_JUDGED_YET:
                self.appeals.note_unanswered(submission, validator)
            return None
        if reply.commitment != submission.commitment or reply.validator != validator:
            node.host.penalise(
                validator, Offence.NONSENSE.points, "a verdict about another submission"
            )
            return None
        self.appeals.note_verdict(submission, reply)
        return reply

    def _note_refusal(self, validator: PeerId, refusal: Refusal) -> None:
        """Tell the operator, once, what only the operator can change."""
        reason = printable(refusal.reason)
        if not refusal.retry and reason != self.counts.refusal:
            self.counts.refusal = reason
            logger.warning("validator %s refuses: %s", validator.short, reason)
        else:
            logger.info("validator %s: %s", validator.short, reason)


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
        judge = away_of(node).judge_of(run, commitment.node, commitment.version)
        others = [validator for validator in run.terms.validators if validator != judge]
        yield judge
        yield others[turn % len(others)] if others else judge
        if turn % STUCK == STUCK - 1:
            node.book.hint(judge)  # it may judge by another edition
