"""Deliveries of validators: each is answered once there is room for it, and taken at most once.

Theory of operation
-------------------
A validator waits for the answer and sends no more than a few at a time, so that an answer that
waits for room is the back-pressure of the whole swarm. A delivery that is taken goes to the
disk (`roles.trainer.inbox`), gets a receipt in the ledger, and goes into the buffer, in this
order: a validator that is told that it was taken can rely on it. Content that was taken is
answered as taken again, also after a restart, and not learnt from twice; each place in the draw
order is taken once, or a validator could sell one place many times.

Two deliveries of one submission may come at a time, and everything may change while the disk,
the environment or the engine works. So what is being taken is noted first (``_taking``), and
what must hold is looked at again after each wait.

A delivery that is replayed (`roles.trainer.audit`) is not taken before it is found in order.
Nothing of a validator that was convicted goes into a step: not what comes, not what waits in
the buffer, not what an earlier life took.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Sequence
from functools import partial
from typing import Final

import trio

from p2p.bounded import BoundedDict
from p2p.concurrency import Notifier
from p2p.errors import RemoteProtocolError, StorageError
from p2p.host import Stream, send_frame
from p2p.identity import PeerId
from p2p.ledger import Ledger
from p2p.node.admission import Capability
from p2p.node.node import Node
from p2p.shardcast.manifest import PolicyVersion
from p2p.wire import FrameReader
from p2p.world import dawdle, decode_off_loop
from proofs.checks import Verdict
from roles.engines.base import EngineError, TrainingGroup
from roles.envs.contained import EnvironmentFailed, Failures
from roles.protocol.core.account import Fates
from roles.protocol.core.messages import (
    HASH_RATE,
    AcceptedWork,
    Commitment,
    Receipt,
    Refusal,
    SignedVerdict,
    Submission,
    decode_delivery_untrusted,
    encode_receipt,
)
from roles.protocol.core.statements import LEARNT_KIND, RECEIPT_KIND, learnt_parts
from roles.protocol.core.work import Work, work_of
from roles.protocol.request import PATIENCE
from roles.rl.advantage import has_spread
from roles.rl.recipe import Recipe
from roles.shared.durable import Durable
from roles.shared.seats import Seats
from roles.shared.sizes import LOGPROB_BYTES
from roles.trainer.account import Accounts
from roles.trainer.audit import AuditCounts, NotBorneOut
from roles.trainer.check import DeliveryCheck
from roles.trainer.core.buffer import BufferedGroup, GroupBuffer
from roles.trainer.core.pace import Paces
from roles.trainer.demand import DemandTeller
from roles.trainer.inbox import GroupPlace, Inbox
from roles.trainer.watch import ValidatorWatch

logger = logging.getLogger(__name__)

UNLEARNT: Final = "nothing is learnt from submissions on which it fails"

DELIVERY_SECONDS: Final = 90.0
"""How long a delivery may take to arrive: the largest at 1 Mbit/s, and some."""
MAX_DISOWNED: Final = 1_024
"""Contents that are not learnt from since their workers say so: those of a thousand canaries
at a time, which each have one."""
PLACE_TAKEN: Final = "another submission was taken for this place in the draw order"

DrawPlace = tuple[PeerId, PolicyVersion, int]
"""A place in the draw order: author, policy, index."""


class Intake:
    """What the trainer has taken, and is taking."""

    def __init__(
        self,
        node: Node,
        recipe: Recipe,
        check: DeliveryCheck,
        ledger: Ledger,
        inbox: Inbox,
        buffer: GroupBuffer,
        durable: Durable,
    ) -> None:
        self.demand: DemandTeller | None = None
        """Tells the workers what is wanted; without it each makes all it can."""
        self.watch: ValidatorWatch | None = None
        """Is told which validators bring work."""
        self.buffer = buffer
        self._node = node
        self._recipe = recipe
        self._check = check
        self._ledger = ledger
        self._inbox = inbox
        self._durable = durable
        self._seats = Seats()
        self.failures = Failures()
        self._step = 0
        self._is_over = False
        self._is_turning_away = False
        self._arrived = Notifier()
        self._consumed = Notifier()
        self._taken: dict[bytes, None] = {}
        """Content digests of all submissions taken so far (their receipts are in the
        ledger)."""
        self._taking: dict[bytes, None] = {}
        """Those that are being written to disk now."""
        self._filled: dict[DrawPlace, None] = {}
        """Places in the draw order that were taken, under versions that may still be used."""
        self._givers: dict[bytes, PeerId] = {}
        """Which validator each submission in the buffer is of."""
        self._authors: dict[bytes, PeerId] = {}
        """Which node each of them is of."""
        self._disowned: BoundedDict[bytes, None] = BoundedDict(MAX_DISOWNED)
        """Contents that their workers have called lies beforehand."""
        self._learning: list[BufferedGroup] = []
        """Taken out of the buffer by the step that is under way."""
        self.accounts = Accounts()
        self.paces = Paces()
        """What each worker's machine has proven."""

    @property
    def has_room(self) -> bool:
        """Whether deliveries are taken now; else it is not the validators who are slow."""
        coming = len(self._taking) * self._recipe.submission
        return not self._is_over and self.buffer.has_room_behind(coming)

    @property
    def taken(self) -> int:
        """Submissions taken so far, in all lives."""
        return len(self._taken)

    @property
    def audits(self) -> AuditCounts:
        """What became of the looks at validators' work."""
        return self._check.auditor.counts

    @property
    def liars(self) -> dict[PeerId, str]:
        """Validators of which nothing is taken any more, and what convicted each."""
        return self._check.auditor.liars

    # What the session calls.

    async def audit_forever(self) -> None:
        """Replay what the lot falls on, until cancelled. Raises `WorkerDied`."""
        await self._check.auditor.work_forever()

    async def recall(self) -> None:
        """Read what was taken in earlier lives, what was learnt from it, and who lied."""
        await self._check.recall()
        await self._inbox.recall()
        await self.accounts.recall(self._node.world.disk)
        async for entry in self._ledger.entries(RECEIPT_KIND):
            self._taken[entry.body] = None

    async def learnt_again(self, step: int) -> AsyncGenerator[list[TrainingGroup]]:
        """The groups of each step after ``step`` that an earlier life took, as far as they are
        on disk."""
        for number, places in self._inbox.learnt_after(step).items():
            groups = await self._groups_again(places)
            if groups is None:
                logger.warning("trainer_cannot_repeat step=%d: a delivery is lost", number)
                return
            yield groups

    async def _groups_again(self, places: Sequence[GroupPlace]) -> list[TrainingGroup] | None:
        """The groups at ``places``, in this order; None unless all of them are there."""
        found: dict[GroupPlace, TrainingGroup] = {}
        for content in dict.fromkeys(content for content, _ in places):
            delivery = await self._inbox.read(content)
            if delivery is None:
                return None
            try:
                groups = await self._check.groups_again(delivery)
            except (RemoteProtocolError, EnvironmentFailed, NotBorneOut) as error:
                logger.warning("intake_unusable %s: %s", content.hex(), error)
                return None
            found |= {(content, one.number): one.group for one in groups}
        return [found[place] for place in places] if found.keys() >= set(places) else None

    async def restore(self, step: int) -> None:
        """Take up again what was received and, by ``step``, not learnt from."""
        self._step = step
        counted = dict.fromkeys(itertools.islice(self._taken, self.accounts.submissions))
        async for work, used in self._inbox.restore(step):
            commitment = work.verdict.commitment
            content = commitment.content
            self._filled[_place(commitment)] = None
            if content not in self._taken:  # killed between the file and the receipt
                self._taken[content] = None
                await self._durable.insist(partial(self._ledger.append, RECEIPT_KIND, content))
            if content not in counted:  # killed between the receipt and the next step
                self._count_taken(work)
            if not self._node.shardcast.holds(commitment.version):
                continue  # so old that no step may use it: forgotten after the next one
            if self._check.why_refused(work.verdict.validator):
                continue  # the same
            try:
                groups = await self._check.groups_kept(work)
            except (RemoteProtocolError, EnvironmentFailed, NotBorneOut) as error:
                logger.warning("intake_unusable %s: %s", content.hex(), error)
                continue
            self._put(work, [group for group in groups if group.number not in used])

    async def wait_groups(self, count: int) -> list[BufferedGroup]:
        """The ``count`` oldest groups that are fresh enough for the next step, once there are
        so many."""
        self._drop_liars()
        while (groups := self.buffer.take(count, self._step)) is None:
            self._make_room()
            if self.demand is not None:
                self.demand.wait_begins()
            await self._arrived.wait()
            self._drop_liars()
        self._learning = groups
        if self.demand is not None:
            self.demand.wait_ends()
        self._make_room()
        return groups

    async def mark_used(self, groups: list[BufferedGroup], step: int) -> None:
        """The engine has learnt from ``groups`` and is at ``step`` now: on disk when this
        returns."""
        self._step = step
        await self._durable.insist(partial(self._inbox.mark_used, groups, step))
        learnt = learnt_parts(step, self._work_by_author(groups))
        entries = [(LEARNT_KIND, part) for part in learnt]
        await self._durable.insist(partial(self._ledger.append_all, entries))
        self.accounts.learn(self._by_author(groups))
        self._learning = []
        await self.accounts.keep(self._node.world.disk)

    async def forget_used(self, covered: int) -> None:
        """Remove the submissions of which no group can be used any more, and none has gone into
        a step after ``covered``, from which the trainer may have to begin again."""
        self.buffer.drop_stale(self._step)
        oldest = self._step - self._recipe.lag
        self._filled = {place: None for place in self._filled if place[1] >= oldest}
        waiting = self.buffer.sources
        self._givers = {
            source: who for source, who in self._givers.items() if source in waiting
        }
        self._authors = {
            source: who for source, who in self._authors.items() if source in waiting
        }
        needed = waiting | self._taking | self._inbox.learnt_from_after(covered)
        await self._durable.insist(partial(self._inbox.forget_all_but, needed))
        self._make_room()

    def fates(self, node: PeerId | None) -> Fates:
        """What became of the groups of a node, or of all."""
        waiting = self._by_author([*self.buffer, *self._learning])
        if node is None:
            return self.accounts.total.fates(waiting.total(), is_over=self._is_over)
        return self.accounts.of(node).fates(waiting[node], is_over=self._is_over)

    def _by_author(self, groups: Iterable[BufferedGroup]) -> Counter[PeerId]:
        authors = (self._authors.get(one.source) for one in groups)
        return Counter(author for author in authors if author is not None)

    def _work_by_author(self, groups: Iterable[BufferedGroup]) -> dict[PeerId, Work]:
        """What a step learns from, for the ledger. A group whose author is forgotten is
        nobody's."""
        done: dict[PeerId, Work] = {}
        for one in groups:
            author = self._authors.get(one.source)
            if author is not None:
                group = one.group
                drawn = ((len(group.prompt), len(each.tokens)) for each in group.completions)
                done[author] = done.get(author, Work()) + work_of(drawn)
        return done

    def finish(self) -> None:
        """The run has all its steps: nothing more is wanted."""
        self._is_over = True
        if self.demand is not None:
            self.demand.finish()
        self._make_room()

    # What validators call.

    async def serve(self, stream: Stream) -> None:
        """A `StreamHandler`: answer the deliveries of a validator. Of other peers not a byte is
        read."""
        if not self._node.may(stream.peer, Capability.VALIDATE):
            reason = f"{stream.peer} is no validator of this run"
            await send_frame(
                stream, encode_receipt(*self._check.turn_down(stream.peer, reason))
            )
            return
        with self._seats.seat(stream.peer) as seated:
            if not seated:
                await send_frame(stream, encode_receipt(Receipt.LATER, "too many streams"))
                return
            reader = FrameReader(stream, self._check.max_delivery)
            while True:
                payload = None
                # or a validator that sends nothing keeps its seat
                with trio.move_on_after(DELIVERY_SECONDS):
                    payload = await reader.receive()
                if payload is None:
                    return
                if self._check.is_at_rest:
                    await send_frame(stream, encode_receipt(Receipt.LATER, "the trainer rests"))
                else:
                    await send_frame(
                        stream, encode_receipt(*await self.take(stream.peer, payload))
                    )

    async def take(self, peer: PeerId, payload: bytes) -> tuple[Receipt, str]:
        """Answer one delivery, and say why if it is not taken."""
        world = self._node.world
        work = await decode_off_loop(
            world, decode_delivery_untrusted, payload, world.verify, rate=HASH_RATE
        )
        verdict = work.verdict
        content = verdict.commitment.content
        refused = self._check.why_refused(peer)
        if refused:
            return Receipt.UNWANTED, refused
        reason = self._check.why_unwanted(peer, verdict)
        if reason:
            return self._check.turn_down(peer, reason)
        with trio.move_on_after(PATIENCE):
            while self._must_wait(content):
                await self._consumed.wait()
        if self._must_wait(content) or world.buggify("trainer/says later"):
            return Receipt.LATER, "the pool is full"
        if self._is_over:
            self._count_turned_down(verdict.commitment)
            return Receipt.UNWANTED, "the run has all its steps"
        world.sometimes("trainer/was given it before", content in self._taken)
        if content in self._taken:
            return Receipt.TAKEN, ""
        reason = self._why_useless(verdict.commitment)
        if reason:
            if reason != PLACE_TAKEN:
                self._count_turned_down(verdict.commitment)
            self._note_arrival(verdict.commitment, None)
            return Receipt.UNWANTED, reason
        self._taking[content] = None
        try:
            return await self._take_in(work)
        except (StorageError, EnvironmentFailed) as error:
            return self._turn_away(error)
        except NotBorneOut as error:
            self._drop_liars()
            return Receipt.UNWANTED, self._check.why_refused(peer) or str(error)
        finally:
            del self._taking[content]
            self._make_room()

    # What workers bring once a lot has fallen (`roles.trainer.lots`).

    def give_up(self, commitment: Commitment, reason: str) -> SignedVerdict:
        """What a worker is told of work that is not learnt from, and is not to blame for."""
        return self._check.sign(commitment, Verdict.INCONCLUSIVE, reason)

    async def take_from_worker(self, submission: Submission) -> SignedVerdict | Refusal:
        """As `take`, of work with which no validator's numbers come."""
        commitment = submission.commitment
        content = commitment.content
        with trio.move_on_after(PATIENCE):
            while self._must_wait(content):
                await self._consumed.wait()
        if self._must_wait(content):
            return Refusal("the pool is full", True)
        if content in self._taken:
            return self._check.sign(commitment, Verdict.ACCEPTED, "")
        if self._is_over:
            self._count_turned_down(commitment)
            return self.give_up(commitment, "the run has all its steps")
        reason = self._why_useless(commitment)
        if reason:
            if reason != PLACE_TAKEN:
                self._count_turned_down(commitment)
                self._note_arrival(commitment, None)
            return self.give_up(commitment, reason)
        self._taking[content] = None
        try:
            return await self._take_own(submission)
        except StorageError as error:
            return Refusal(self._turn_away(error)[1], True)
        except (EngineError, EnvironmentFailed) as error:
            logger.error("not_scored %s: %s", content.hex(), error)
            if isinstance(error, EnvironmentFailed):
                self.failures.tell(error, UNLEARNT)
            return self.give_up(commitment, "the trainer could not score it")
        finally:
            del self._taking[content]
            self._make_room()

    async def _take_own(self, submission: Submission) -> SignedVerdict:
        work, groups = await self._check.groups_of_worker(submission)
        commitment = submission.commitment
        if work.verdict.verdict is not Verdict.ACCEPTED:
            return work.verdict
        if _place(commitment) in self._filled:  # meanwhile
            return self.give_up(commitment, PLACE_TAKEN)
        await self._keep(work, groups)
        teaching = sum(has_spread(buffered.group.rewards) for buffered in groups)
        self._note_arrival(commitment, teaching)
        return work.verdict

    def note_unsent(self, node: PeerId, version: PolicyVersion) -> None:
        """A place of which nothing can be learnt stays with its worker."""
        if self.demand is not None:
            self.demand.arrive(node, version, 0)

    def disown(self, content: bytes) -> None:
        """Its worker says that it will be a lie: who delivers it is judged, nothing is learnt
        from it."""
        self._disowned[content] = None

    def drop_work_of(self, node: PeerId) -> None:
        """Nothing is learnt from what waits of a worker that was caught."""
        self.buffer.drop([of for of, author in self._authors.items() if author == node])

    async def _take_in(self, work: AcceptedWork) -> tuple[Receipt, str]:
        """Look at a delivery as closely as need be, and keep it."""
        verdict = work.verdict
        is_disowned = verdict.commitment.content in self._disowned
        check = self._check
        groups = await (check.groups_replayed if is_disowned else check.groups)(work)
        # All of it may have changed while environment and engine worked.
        refused = self._check.why_refused(verdict.validator)
        if refused:
            return Receipt.UNWANTED, refused
        if _place(verdict.commitment) in self._filled:
            return Receipt.UNWANTED, PLACE_TAKEN
        if is_disowned:
            self._taken[verdict.commitment.content] = None
            return Receipt.TAKEN, ""
        await self._keep(work, groups)
        if self.watch is not None:
            self.watch.note_taken(verdict)
        teaching = sum(has_spread(buffered.group.rewards) for buffered in groups)
        self._note_arrival(verdict.commitment, teaching)
        self._is_turning_away = False
        return Receipt.TAKEN, ""

    def _count_taken(self, work: AcceptedWork) -> None:
        rewards, size = work.verdict.rewards, self._recipe.group_size
        groups = [rewards[at : at + size] for at in range(0, len(rewards), size)]
        no_spread = sum(not has_spread(one) for one in groups)
        self.accounts.take(work.verdict.commitment.node, len(groups), no_spread)

    def _count_turned_down(self, commitment: Commitment) -> None:
        self.accounts.turn_down(
            commitment.node,
            commitment.content,
            self._recipe.submission,
            is_over=self._is_over,
        )

    def _note_arrival(self, commitment: Commitment, teaching: int | None) -> None:
        if self.demand is not None:
            self.demand.arrive(commitment.node, commitment.version, teaching)

    def _drop_liars(self) -> None:
        """Nothing is learnt from what waits of a validator that was convicted, or of a worker
        that was."""
        check = self._check
        liars = [of for of, giver in self._givers.items() if check.why_refused(giver)]
        liars += [of for of, author in self._authors.items() if check.why_banned(author)]
        self.buffer.drop(liars)

    def _why_useless(self, commitment: Commitment) -> str:
        """Why no step can use it, though it is the judge's; empty if one may."""
        if self._step - commitment.version > self._recipe.lag:
            return "the policy is older than the run uses"
        if not self._node.shardcast.holds(commitment.version):
            return "the policy is not held by the trainer"
        return PLACE_TAKEN if _place(commitment) in self._filled else ""

    def _turn_away(self, error: StorageError | EnvironmentFailed) -> tuple[Receipt, str]:
        """The disk refuses a delivery: the validator keeps it, and hands it over again.

        What the environment fails on is lost: it would fail on it again.
        """
        if isinstance(error, EnvironmentFailed):
            self.failures.tell(error, UNLEARNT)
            return Receipt.UNWANTED, "the run's environment failed at the trainer"
        if not self._is_turning_away:
            logger.warning("deliveries are turned away until the disk takes data: %s", error)
        self._is_turning_away = True
        return Receipt.LATER, "the disk is full"

    def _must_wait(self, content: bytes) -> bool:
        """Whether a delivery can be neither taken nor turned down now."""
        if self._is_over or content in self._taken:
            return False
        return content in self._taking or not self.has_room

    async def _keep(self, work: AcceptedWork, groups: list[BufferedGroup]) -> None:
        """Disk, ledger, buffer, in this order."""
        verdict = work.verdict
        place, content = _place(verdict.commitment), verdict.commitment.content
        self._filled[place] = None
        try:
            # else no step takes one
            if any(has_spread(buffered.group.rewards) for buffered in groups):
                await self._inbox.keep(work)
            await dawdle(self._node.world, "trainer/slow receipt")
            await self._ledger.append(RECEIPT_KIND, content)
            self._taken[content] = None
            self._count_taken(work)
            self.failures.recover()
            tokens = len(work.logprobs) // LOGPROB_BYTES
            self.paces.note(verdict.commitment.node, tokens, self._node.world.now())
            # while the disk worked, it may have been convicted
            if not self._check.why_refused(verdict.validator):
                self._put(work, groups)
        finally:
            if content not in self._taken:
                del self._filled[place]

    def _put(self, work: AcceptedWork, groups: list[BufferedGroup]) -> None:
        commitment = work.verdict.commitment
        self._givers[commitment.content] = work.verdict.validator
        self._authors[commitment.content] = commitment.node
        self.buffer.add(groups)
        self._arrived.notify_all()

    def _make_room(self) -> None:
        self._consumed.notify_all()


def _place(commitment: Commitment) -> DrawPlace:
    return commitment.node, commitment.version, commitment.index
