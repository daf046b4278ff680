"""An inference node at work: draws, proves, commits, and sends what is wanted.

One loop loads the newest whole policy and keeps the engine full: it is given the next place of
the draw order whenever it has room for more rows (`roles.inference.places`) and the trainer
wants more. Every full place is put on disk, in the draw order, with a claim about the rewards
of each of its groups, before anything else happens to it. `roles.inference.windows` commits to
places and sends those that are wanted, again and again across crashes of either side, until
each is settled.

A bounded number of places may be unsettled, in the engine and on disk together: that is the
back-pressure of the whole pipeline, from the trainer's scorer to this engine.

When a new policy comes, no place is begun under the old one. What is under way is drawn to its
end if a trainer may still use it (`lag` of the recipe), and dropped if not, also when that
happens in the middle: what was dropped was at the end of the draw order, and leaves no gap.
Then the new policy is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import trio

from p2p.concurrency import open_bare_nursery
from p2p.errors import WorkerDied
from p2p.naming import printable
from p2p.node.node import Node
from p2p.shardcast.manifest import NO_POLICY, PolicyVersion
from p2p.world import dawdle
from proofs.checks import Verdict
from roles.contract import Run
from roles.engines.base import Engine, EngineError, Group, Row
from roles.envs.client import ContainedEnvironment
from roles.envs.contained import EnvironmentFailed, Failures
from roles.inference.glance import Glance
from roles.inference.life import LifeBook
from roles.inference.outbox import FullPlace, Outbox
from roles.inference.places import OpenPlace, OpenPlaces
from roles.inference.status import Doing, InferenceCounts
from roles.inference.windows import Windows
from roles.protocol.core.assignment import draw_order, run_sampling
from roles.protocol.core.groups import NOTHING, encode_groups
from roles.protocol.core.statements import EARNED_KIND
from roles.protocol.core.terms import terms_digest
from roles.protocol.core.verdict import SignedVerdict
from roles.protocol.core.window import Claim, SignedWindow, claim_of, content_digest
from roles.protocol.replay import answers_of, with_heard
from roles.protocol.standing import RoleStanding
from roles.shared.backoff import Backoff
from roles.shared.durable import Durable

logger = logging.getLogger(__name__)

LONGEST_FAILURE: Final = 60.0
"""Most seconds of pause between places if the environment makes no tasks at all."""
WINDOWS: Final = 3
"""Windows of places that may be unsettled: one that is drawn, one that is answered, one that is
scored."""


class InferenceSession:
    """One inference node's work for one run, from its start to its end."""

    def __init__(
        self,
        node: Node,
        run: Run,
        environment: ContainedEnvironment,
        engine: Engine,
        outbox: Outbox,
        name: str,
        counts: InferenceCounts,
    ) -> None:
        """Make a session; ``name`` is the role's name in logs and heartbeats."""
        self.node = node
        self.counts = counts
        self.run = run
        self.engine = engine
        self._environment = environment
        self._outbox = outbox
        self._durable = Durable(node.world, name)
        self._name = name
        self.book: LifeBook | None = None
        """Counts over all processes; None until they are read."""
        self._standing = RoleStanding(node, run, "inference", name)
        self._failures = Failures()
        self.glance = Glance(node.world, environment)
        """Sample of this node's answers, for people."""
        self.windows = Windows(
            node, outbox, self._standing, counts, self._durable, self._finish
        )
        self._room = trio.Semaphore(WINDOWS * run.terms.trust.window)
        self._places = OpenPlaces()
        self._has_turn = False
        """True if room was acquired for the place to begin next."""
        self._failed_tasks: Backoff | None = None
        """Pauses between places for which the environment makes no tasks."""
        self._policy = b""
        """Digest of the weights in the engine, since two trainers may sign one version, of
        which one is chosen."""

    @property
    def loaded(self) -> PolicyVersion:
        """Version of the policy under which work is done; 0 before the first."""
        return PolicyVersion(max(0, self.counts.version))

    @property
    def pending(self) -> int:
        """Number of unsettled places that are kept on disk."""
        return len(self._outbox)

    @property
    def why_not(self) -> str:
        """Reason why the run file does not let this node work now; empty if it does."""
        return self._standing.why_not

    @property
    def environment_failure(self) -> str:
        """Reason why the environment's last call made no task; empty if it made one."""
        return self._failures.latest

    @property
    def writes_waiting(self) -> int:
        """Number of refused writes of places and of content for the engine so far."""
        return self._durable.waiting + self.engine.writes_waiting

    async def work_forever(self) -> None:
        """Send the work that an earlier process left, then generate until cancelled."""
        node, outbox = self.node, self._outbox
        self.book = await LifeBook.open(node.world, f"{self._name}/life", outbox)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._standing.watch)
            node.world.sometimes("inference/took up old places", len(outbox) > 0)
            nursery.start_soon(self.windows.work_forever)
            for _ in outbox:
                await self._room.acquire()
            # The order of draws under a policy is on disk, so a restart must not come back to
            # an older one.
            self.counts.doing = Doing.WAITS_FOR_POLICY
            await node.shardcast.wait_policy(outbox.newest)
            while True:
                if not self._places:
                    await self._standing.wait()
                self.windows.add(await self._produce_sometime())

    async def _produce_sometime(self) -> FullPlace:
        """Return the next full place, under a policy that the engine can work with.

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

    async def produce(self) -> FullPlace:
        """Draw until the next place is full, put it on disk, and return it."""
        while True:
            if self._places and self._is_too_old():
                await self._drop()
            elif (place := self._places.take_full()) is not None:
                return await self._keep(place)
            elif not await self._begin_next():
                self._note(await self._decode())

    async def _decode(self) -> list[Group]:
        """Decode for a moment, while the environment answers waiting completions."""
        waiting = list(self.engine.waiting)
        if not waiting:
            return await self.engine.advance()
        answers = list[Row]()

        async def answer() -> None:
            answers.extend(await self._hear(waiting))

        async with open_bare_nursery() as nursery:
            nursery.start_soon(answer)
            groups = await self.engine.advance()
        await self.engine.hear(answers)
        return groups

    async def _hear(self, waiting: Sequence[Row]) -> list[Row]:
        """Return the environment's answers to completions whose turn has ended."""
        places = [self._places.of(row.group) for row in waiting]
        asked = [
            (place.asked[row.group - place.tasks[0].group], [row.tokens])
            for place, row in zip(places, waiting, strict=True)
        ]
        try:
            heard = await self._environment.hear(asked)
        except EnvironmentFailed as error:
            alone = [row for row, place in zip(waiting, places, strict=True)
                     if place is places[0]]  # fmt: skip
            if len(alone) < len(waiting):  # a place that harms it costs no other
                rest = [row for row in waiting if row not in alone]
                return [*await self._hear(alone), *await self._hear(rest)]
            self._failures.tell(error, "completions that it does not answer prove nothing")
            heard = [(None,)] * len(waiting)
        for place, row, said in zip(places, waiting, heard, strict=True):
            if None in said:
                place.unheard.add((row.group, row.slot))
        return [
            replace(row, tokens=(said and said[-1]) or ())
            for row, said in zip(waiting, heard, strict=True)
        ]

    def _note(self, groups: Sequence[Group]) -> None:
        """Add groups that have ended to their places, and count their tokens."""
        self._places.note(groups)
        tokens = sum(len(one.tokens) for group in groups for one in group.completions)
        self.counts.drawn.note(tokens, self.node.world.now())
        if self.book is not None:
            self.book.tokens += tokens

    def groups_of(self, place: OpenPlace) -> tuple[Group, ...]:
        """Return the groups of a full place that are submitted."""
        return place.groups()

    async def _keep(self, place: OpenPlace) -> FullPlace:
        """Put a full place on disk, as soon as the run file allows it."""
        await self._standing.wait_run()
        node, order = self.node, place.order
        groups = self.groups_of(place) if place.tasks else ()
        groups = tuple(with_heard(group, self.run) for group in groups)
        content = encode_groups(groups) if groups else NOTHING
        kept = FullPlace(
            *(self.run.id, terms_digest(self._standing.run), order.version, order.policy),
            *(place.index, content_digest(content), await self.claims(place, groups)),
        )
        await self._durable.insist(partial(self._outbox.add, kept, content))
        self.counts.submitted += 1
        if groups:
            await self.glance.look(place)
        node.world.trace("submitted", version=int(order.version), index=place.index)
        return kept

    async def claims(self, place: OpenPlace, groups: Sequence[Group]) -> bytes:
        """Return this node's claims about each group's rewards, by its own environment."""
        order, size = place.order, place.order.group_size
        if not groups:
            return bytes([Claim.UNKNOWN] * self.run.terms.sampling.submission)
        try:
            tasks = await self._environment.tasks(order.task_seeds(place.index))
            paid = await self._environment.pay(answers_of(tasks, groups))
        except EnvironmentFailed as error:
            self._failures.tell(error, "nothing is claimed of the rewards of such places")
            return bytes([Claim.UNKNOWN] * len(groups))
        return bytes(
            claim_of(
                paid.rewards[at : at + size], is_certain=not any(paid.failed[at : at + size])
            )
            for at in range(0, len(paid.rewards), size)
        )

    async def _begin_next(self) -> bool:
        """Give the engine one more place. Return False if it has to go on with the places it
        has."""
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
                    self.windows.close()
                await self._room.acquire()
            self._has_turn = True
        await self._standing.wait()
        place = await self._next_place()
        if place is None:
            return False
        await dawdle(self.node.world, "inference/slow engine")
        self.counts.doing = Doing.DRAWS
        self.counts.drawn.note(0, self.node.world.now())
        if place.tasks:
            await self.begin(place)
        self._places.add(place)
        self._has_turn = False
        self.node.world.sometimes("inference/drew ahead", len(self._places) > 1)
        return True

    async def _next_place(self) -> OpenPlace | None:
        """Return the place to begin now; None if none may begin yet and the engine has other
        work."""
        node, outbox = self.node, self._outbox
        while True:
            if node.shardcast.newest >= self.run.terms.sampling.steps and not self._places:
                self.counts.doing = Doing.OVER
                self.counts.idle = True  # no trainer learns from work under the last policy
                logger.info("run %s has all its steps: no more to do", self.run.name)
                self.windows.close()
                await trio.sleep_forever()
            version = self.loaded if self._places else await self.load_newest()
            newer = partial(node.shardcast.wait_policy, PolicyVersion(version + 1))
            index = self._places.next_index if self._places else outbox.next_index(version)
            self.counts.waits = self.windows.why_not_wanted(version, index)
            waits: list[Callable[[], Awaitable[object]]]
            if self.counts.waits:
                waits = [self.windows.wait_change, outbox.wait_removed, newer]
            else:
                order = draw_order(self.run, node.peer_id, version, self._policy)
                try:
                    plain = await self._environment.tasks(order.task_seeds(index))
                except EnvironmentFailed as error:
                    self._failures.tell(error, "places without tasks are handed in empty")
                    if self._failed_tasks is None:
                        self._failed_tasks = Backoff(
                            node.world, "inference/no tasks", longest=LONGEST_FAILURE
                        )
                    await self._failed_tasks.wait()
                    return OpenPlace(order, index, ())
                self._failures.recover()
                self._failed_tasks = None
                tasks = [task for _, task in order.with_draws(index, plain)]
                return OpenPlace(order, index, tasks, plain)
            if self._places:
                return None
            self.counts.doing = Doing.WAITS_FOR_NEWER
            self.windows.close()
            await _wait_any(*waits)

    async def begin(self, place: OpenPlace) -> None:
        """Give the engine the tasks of a place, with the run's sampling."""
        await self.engine.submit(place.tasks, run_sampling(self.run))

    async def _drop(self) -> None:
        """Drop the places under way, in the engine as well."""
        self._give_up()
        await self.engine.drop()

    def _give_up(self) -> None:
        """Forget the places under way. No later place was submitted, so no gap arises."""
        for _ in range(len(self._places)):
            self._room.release()
        self._places.clear()

    def _is_behind(self) -> bool:
        """Return True if the node should work under another policy than the engine's."""
        version = self.node.shardcast.newest
        policy = self.node.shardcast.manifest(version).weights_digest
        return (version, policy) != (self.loaded, self._policy)

    def _is_too_old(self) -> bool:
        """Return True if no trainer can use work under the engine's policy any more."""
        newest, recipe = self.node.shardcast.newest, self.run.terms.sampling
        return newest - self.loaded > recipe.lag or newest >= recipe.steps

    async def load_newest(self) -> PolicyVersion:
        """Load the newest complete policy into the engine, and return its version."""
        node, loaded = self.node, self.counts.version
        if node.shardcast.newest == NO_POLICY:
            self.counts.doing = Doing.WAITS_FOR_POLICY
        version = await node.shardcast.wait_policy(self.loaded)
        if (
            node.shardcast.holds(loaded)
            and not self._is_too_old()
            and node.world.buggify("inference/keeps its policy")
        ):
            return loaded
        policy = node.shardcast.manifest(version).weights_digest
        if (version, policy) != (loaded, self._policy):
            self.windows.close()
            self.counts.doing = Doing.LOADS
            node.world.sometimes("inference/skipped a policy", 0 <= loaded < version - 1)
            self._policy = b""  # an engine that fails in the middle holds none
            await self.engine.drop()  # what it had when it failed before
            with node.shardcast.pin(version):
                await self.engine.load(await node.shardcast.check_weights(version))
            self.claim(version, policy)
        return version

    def forget_policy(self) -> None:
        """Note that the engine was replaced and holds no policy."""
        self._policy = b""

    def claim(self, version: PolicyVersion, policy: bytes) -> None:
        """Declare that work is done under this version from now on; ``policy`` is the digest of
        its weights."""
        self._policy = policy
        self.counts.note_policy(version)
        self.windows.note_version(version)

    async def _finish(
        self,
        signed: SignedWindow,
        index: int,
        kind: str,
        why: str,
        said: SignedVerdict | None,
    ) -> None:
        """Count the result of a place, and remove the place."""
        version = signed.window.version
        if (version, index) not in self._outbox:
            return
        if said is not None and said.verdict is Verdict.ACCEPTED:
            # what receipts are made of; what a kill brings twice counts once in them
            ledger = await self.node.ledger.opened()
            await self._durable.insist(partial(ledger.append, EARNED_KIND, said.to_bytes()))
        self.counts.count(kind, why)
        assert self.book is not None  # `work_forever` has opened it
        await self._durable.insist(partial(self.book.settle, (int(version), index), kind))
        if kind == Verdict.REJECTED.value:
            logger.warning("rejected version=%d index=%d: %s", version, index, printable(why))
        elif kind == Verdict.INCONCLUSIVE.value:
            logger.info("given up version=%d index=%d: %s", version, index, printable(why))
        await self._durable.insist(partial(self._outbox.settle, signed, index))
        self._room.release()


async def _wait_any(*waits: Callable[[], Awaitable[object]]) -> None:
    """Return when the first of ``waits`` returns."""

    async def run(wait: Callable[[], Awaitable[object]]) -> None:
        await wait()
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for wait in waits:
            nursery.start_soon(run, wait)
