"""Places that the trainer has accepted: each counts once and is on disk before its worker is
told.

A place that is taken goes to the disk (`roles.trainer.inbox`), gets a receipt in the ledger and
goes into the buffer, in this order. Everything is keyed by the digest of its commitment, so a
place that was taken is never learnt from twice, also after a restart, and equal content of two
workers is two places.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Iterable, Sequence
from functools import partial
from typing import Final

from p2p.concurrency import Notifier
from p2p.errors import BadMessage
from p2p.identity import PeerId
from p2p.ledger import Ledger
from p2p.node.node import Node
from p2p.world import dawdle
from roles.contract.core.sampling import SamplingTerms
from roles.engines.base import TrainingGroup
from roles.protocol.core.account import Fates
from roles.protocol.core.statements import (
    LEARNT_KIND,
    RECEIPT_KIND,
    decode_learnt_untrusted,
    learnt_parts,
)
from roles.protocol.core.window import Commitment
from roles.protocol.core.work import Work, work_of
from roles.rl.algorithms.base import has_spread
from roles.shared.durable import Durable
from roles.trainer.account import Accounts
from roles.trainer.core.buffer import BufferedGroup, GroupBuffer
from roles.trainer.core.pace import Paces
from roles.trainer.inbox import NEVER, GroupPlace, Inbox
from roles.trainer.taken import TakenPlace, learnable_groups

logger = logging.getLogger(__name__)


ALIKE: Final = 100
"""Number of consecutive groups without spread that cannot be chance. If one group in ten has
spread, such a sequence has a probability of 1 in 40,000."""


class Intake:
    """The accepted places, and the groups in them that wait for a step."""

    def __init__(
        self,
        node: Node,
        sampling: SamplingTerms,
        ledger: Ledger,
        inbox: Inbox,
        buffer: GroupBuffer,
        durable: Durable,
    ) -> None:
        self.buffer = buffer
        self.accounts = Accounts()
        self.paces = Paces()
        """Measured speed of each worker."""
        self._node = node
        self._sampling = sampling
        self._ledger = ledger
        self._inbox = inbox
        self._durable = durable
        self._step = 0
        self.is_over = False
        """True once the run has taken all its steps."""
        self._arrived = Notifier()
        self._consumed = Notifier()
        self._taken: dict[bytes, None] = {}
        """Digests of the commitments of all places taken so far; their receipts are in the
        ledger."""
        self._taking: dict[bytes, None] = {}
        """Digests of the commitments of places that are being written to disk now."""
        self._authors: dict[bytes, PeerId] = {}
        """Maps each place in the buffer to the node that made it."""
        self.alike = 0
        """Groups without spread since the last group with spread. The engine learns nothing
        from them."""
        self._learning: list[BufferedGroup] = []
        """Groups that the current step has taken out of the buffer."""
        self._planned: list[BufferedGroup] = []
        """Groups that an earlier process planned for the next step but did not finish."""
        self._noted = 0
        """The newest step that the ledger records."""

    @property
    def taken(self) -> int:
        """Number of places accepted so far, including earlier processes."""
        return len(self._taken)

    def has_taken(self, commitment: Commitment) -> bool:
        """Return True if this place was accepted by this process or an earlier one."""
        return commitment.digest in self._taken

    async def wait_change(self) -> None:
        """Wait until groups leave the buffer, or until the run is over."""
        await self._consumed.wait()

    async def recall(self) -> None:
        """Read which places earlier processes accepted and which groups they learnt from."""
        await self._inbox.recall()
        await self.accounts.recall(self._node.world.disk)
        async for entry in self._ledger.entries(RECEIPT_KIND):
            self._taken[entry.body] = None
        async for entry in self._ledger.entries(LEARNT_KIND):
            self._noted = max(self._noted, decode_learnt_untrusted(entry.body).step)

    async def learnt_again(self, step: int) -> AsyncGenerator[list[TrainingGroup]]:
        """Yield the groups of each step after `step` that an earlier process finished, as far
        as they are on disk. The last step of the log may have been planned only; `wait_groups`
        then returns its groups."""
        steps = self._inbox.learnt_after(step)
        for number, places in steps.items():
            if number > self._noted and number == max(steps):
                return
            groups = await self._groups_again(places)
            if groups is None:
                logger.warning("trainer_cannot_repeat step=%d: a place is lost", number)
                return
            yield [one.group for one in groups]

    async def _groups_again(self, places: Sequence[GroupPlace]) -> list[BufferedGroup] | None:
        """Return the groups at `places` in this order; None unless all of them are there."""
        found: dict[GroupPlace, BufferedGroup] = {}
        for key in dict.fromkeys(key for key, _ in places):
            place = await self._inbox.read(key)
            groups = None if place is None else self._groups_of(place)
            if place is None or groups is None:
                return None
            found |= {(key, one.number): one for one in groups}
            self._authors[key] = place.verdict.commitment.node
        return [found[place] for place in places] if found.keys() >= set(places) else None

    def _groups_of(self, place: TakenPlace) -> list[BufferedGroup] | None:
        try:
            return learnable_groups(place, self._sampling.group_size)
        except BadMessage as error:
            logger.warning("intake_unusable %s: %s", place.key.hex(), error)
            return None

    async def restore(self, step: int) -> None:
        """Restore the places that were accepted and, as of `step`, not yet learnt from."""
        self._step = step
        counted = dict.fromkeys(itertools.islice(self._taken, self.accounts.submissions))
        planned = self._inbox.learnt_after(step).get(step + 1, [])
        self._planned = self._learning = await self._groups_again(planned) or []
        async for place, used in self._inbox.restore(step + bool(self._planned)):
            if place.key not in self._taken:  # killed between the file and the receipt
                self._taken[place.key] = None
                append = partial(self._ledger.append, RECEIPT_KIND, place.key)
                await self._durable.insist(append)
            if place.key not in counted:  # killed between the receipt and the next step
                self._count_taken(place)
            groups = self._groups_of(place)
            if groups is not None:
                self._put(place, [group for group in groups if group.number not in used])

    async def take(self, place: TakenPlace) -> None:
        """Put a place on the disk, into the ledger and into the buffer.

        Raises:
            StorageError: The disk refuses it; nothing is taken then.
        """
        if place.key in self._taken:
            return
        groups = self._groups_of(place)
        assert groups is not None  # the scorer has just made it
        self._taking[place.key] = None
        try:
            if any(has_spread(one.group.rewards) for one in groups):
                await self._inbox.keep(place)
            await dawdle(self._node.world, "trainer/slow receipt")
            await self._ledger.append(RECEIPT_KIND, place.key)
        finally:
            del self._taking[place.key]
        self._taken[place.key] = None
        self._count_taken(place)
        commitment, now = place.verdict.commitment, self._node.world.now()
        work = place.verdict.work
        self.paces.note(commitment.node, 0 if work is None else work.tokens, now)
        self._put(place, groups)

    def _count_taken(self, place: TakenPlace) -> None:
        rewards, size = place.verdict.rewards, self._sampling.group_size
        groups = [rewards[at : at + size] for at in range(0, len(rewards), size)]
        no_spread = sum(not has_spread(one) for one in groups)
        self.accounts.take(place.verdict.commitment.node, len(groups), no_spread)
        self._note_alike(no_spread, has_spread=no_spread < len(groups))

    def _put(self, place: TakenPlace, groups: list[BufferedGroup]) -> None:
        self._authors[place.key] = place.verdict.commitment.node
        self.buffer.add(groups)
        self._arrived.notify_all()

    def note_unsent(self, node: PeerId, places: int) -> None:
        """Count places that were not requested because their claims say that no group has
        spread."""
        groups = places * self._sampling.submission
        self.accounts.note_unsent(node, groups)
        self._note_alike(groups, has_spread=False)

    def _note_alike(self, groups: int, *, has_spread: bool) -> None:
        before, self.alike = self.alike, 0 if has_spread else self.alike + groups
        if before < ALIKE <= self.alike:
            logger.warning(
                "nothing_to_learn groups=%d: in each of them all answers earned the same",
                self.alike,
            )

    def turn_down(self, commitment: Commitment) -> None:
        """Count a place that came too late for any step."""
        groups = self._sampling.submission
        node, key = commitment.node, commitment.digest
        self.accounts.turn_down(node, key, groups, is_over=self.is_over)

    async def drop(self, commitments: Collection[Commitment]) -> None:
        """Never learn from these places again. The decision is on disk when this returns, so it
        also holds after a restart."""
        keys = {one.digest for one in commitments}
        dropped = [group for group in self.buffer if group.source in keys]
        if not dropped:
            return
        self.buffer.drop(keys)
        await self._durable.insist(partial(self._inbox.mark_used, dropped, NEVER))
        self._consumed.notify_all()

    async def wait_groups(self, count: int) -> list[BufferedGroup]:
        """Return the groups of the next step: those that an earlier process planned for it, or
        else the `count` oldest groups that are fresh enough, once there are that many. That
        they belong to the step is on disk before the engine gets them, so no other step takes
        them, even after a crash."""
        groups = self._planned
        while not groups:
            groups = self.buffer.take(count, self._step) or []
            if not groups:
                self._consumed.notify_all()
                await self._arrived.wait()
        self._planned, self._learning = [], groups
        self._consumed.notify_all()
        await self._durable.insist(partial(self._inbox.mark_used, groups, self._step + 1))
        return groups

    async def note_learnt(self, groups: list[BufferedGroup], step: int) -> None:
        """Note that the engine has learnt from `groups` and is at `step`: on disk when this
        returns."""
        self._step = step
        learnt = learnt_parts(step, self._work_by_author(groups))
        entries = [(LEARNT_KIND, part) for part in learnt]
        await self._durable.insist(partial(self._ledger.append_all, entries))
        self._noted = step
        self.accounts.learn(self._by_author(groups))
        self._learning = []
        await self.accounts.keep(self._node.world.disk)

    async def forget_used(self, covered: int) -> None:
        """Remove the places whose groups can no longer be used, unless a step after `covered`
        used one of them: the trainer may have to repeat those steps."""
        self.buffer.drop_stale(self._step)
        waiting = self.buffer.sources
        self._authors = {key: who for key, who in self._authors.items() if key in waiting}
        needed = waiting | self._taking | self._inbox.learnt_from_after(covered)
        await self._durable.insist(partial(self._inbox.forget_all_but, needed))
        self._consumed.notify_all()

    def fates(self, node: PeerId | None) -> Fates:
        """Return where the groups of a node, or of all nodes, are now."""
        waiting = self._by_author([*self.buffer, *self._learning])
        if node is None:
            return self.accounts.total.fates(waiting.total(), is_over=self.is_over)
        return self.accounts.of(node).fates(waiting[node], is_over=self.is_over)

    def finish(self) -> None:
        """Note that the run has taken all its steps, so no more work is wanted."""
        self.is_over = True
        self._consumed.notify_all()

    def _by_author(self, groups: Iterable[BufferedGroup]) -> Counter[PeerId]:
        authors = (self._authors.get(one.source) for one in groups)
        return Counter(author for author in authors if author is not None)

    def _work_by_author(self, groups: Iterable[BufferedGroup]) -> dict[PeerId, Work]:
        """Return the work that a step learns from, by author, for the ledger. Groups whose
        author is no longer known are left out."""
        done: dict[PeerId, Work] = {}
        for one in groups:
            author = self._authors.get(one.source)
            if author is not None:
                group = one.group
                drawn = ((len(group.prompt), len(each.tokens)) for each in group.completions)
                done[author] = done.get(author, Work()) + work_of(drawn)
        return done
