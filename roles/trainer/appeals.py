"""Appeals of workers against verdicts, and complaints of validators that give none.

Theory of operation
-------------------
A worker that is refused, or left waiting, tells the trainer (`roles.protocol.core.refusals`).
An appeal costs the trainer a pass of its model over one submission, so it is rationed: a few an
hour for each identity, one at a time for all, and none any more for who has appealed in vain.
Names without accepted work cost nothing, so theirs are tried last, and one a minute.
What the trainer's engine finds in order was rejected wrongly; what that says of the validator,
`roles.trainer.watch` weighs. Work that is a little beyond a limit here, too, is nobody's fault.

A confession is an appeal the other way round: its worker lied, and a validator accepted it. It
is tried and rationed as appeals are, and one whose work is in order is in vain. What follows
for the validator, `roles.trainer.crosscheck` knows. What was forewarned of is not learnt from.

A complaint costs nothing, proves nothing, and counts only of a worker whose work was accepted
before (of any, while nobody's was: all may have the same judge; where lots fall, by one judge
of two), against a judge of its work, and while the trainer has room: where it has none, all
validators wait for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import trio

from p2p.bounded import BoundedDict, RateLimit
from p2p.concurrency import Notifier
from p2p.errors import BadMessage, StorageError
from p2p.host import Stream, send_frame
from p2p.identity import PeerId
from p2p.node.admission import Capability
from p2p.node.node import Node
from p2p.wire import FrameReader, Holds
from p2p.world import decode_off_loop
from roles.engines.base import EngineError
from roles.envs.client import ContainedEnvironment
from roles.envs.contained import EnvironmentFailed
from roles.protocol.away import away_of
from roles.protocol.core.lies import NO_ANSWER, Acceptance, Finding, Weight, worst
from roles.protocol.core.messages import HASH_RATE, Commitment, Submission
from roles.protocol.core.refusals import (
    Appeal,
    Complaint,
    Forewarning,
    Ruled,
    commitment_of,
    decode_asked_untrusted,
    encode_ruling,
    is_repeatable,
)
from roles.protocol.replay import open_refused, violated
from roles.protocol.request import PATIENCE
from roles.run import Run
from roles.shared.seats import STRANGERS, Seat, Seats
from roles.shared.sizes import MAX_VERDICT
from roles.shared.standing import RoleStanding
from roles.trainer.audit import Auditor
from roles.trainer.crosscheck import CrossCheck
from roles.trainer.watch import ValidatorWatch

logger = logging.getLogger(__name__)

ASK_SECONDS: Final = 90.0
"""How long a question may take to arrive: the largest submission at 1 Mbit/s, and some."""
HOUR: Final = 3_600.0
"""Seconds in which an identity has `APPEALS` and `COMPLAINTS`."""
APPEALS: Final = 4.0
"""Appeals of one identity an hour: a forward pass each. Three convict a validator."""
COMPLAINTS: Final = 60.0
"""Complaints of one identity an hour: one a minute is more than a validator takes to answer."""
MAX_WAITING: Final = 16
"""Appeals that wait for the engine. A step waits for one group of them at most."""
NEWCOMERS_WAITING: Final = MAX_WAITING // 2
"""Of workers without accepted work, whose names cost nothing: they are tried when no other
waits."""
NEWCOMERS: Final = 1 / 60
"""Of them that are tried a second, as of their bans (`roles.validator.prosecution`): each is a
forward pass of the engine that learns."""
NEWCOMERS_AT_ONCE: Final = 32.0
"""Of them after a pause: a validator that rejects every newcomer is convicted by one."""
MAX_WORKERS: Final = 4_096
"""Identities whose appeals are counted, or heard no more."""
MAX_RULED: Final = 1_024
"""Appeals remembered with what came of them: who asks again is told the same."""


@dataclass(slots=True, eq=False)
class _Case:
    appeal: Appeal | Acceptance
    is_newcomers: bool
    done: trio.Event = field(default_factory=trio.Event)
    ruling: tuple[Ruled, str] = (Ruled.LATER, "it waits for the trainer's engine")


@dataclass(frozen=True, slots=True)
class _Counting:
    """A stream whose bytes count for the seat in which it is read."""

    stream: Stream
    seat: Seat

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        data = await self.stream.receive_some(max_bytes)
        self.seat.received += len(data)
        return data

    def keep(self, size: int) -> None:
        if isinstance(self.stream, Holds):
            self.stream.keep(size)


_BUSY: Final = (Ruled.LATER, "the trainer is busy")


class AppealDesk:
    """Where a run's workers go with what its validators do to them."""

    def __init__(
        self,
        node: Node,
        environment: ContainedEnvironment,
        standing: RoleStanding,
        auditor: Auditor,
        watch: ValidatorWatch,
        has_worked: Callable[[PeerId], bool],
        has_room: Callable[[], bool],
    ) -> None:
        self._node = node
        self._environment = environment
        self._standing = standing
        self._auditor = auditor
        self._watch = watch
        self.crosscheck = CrossCheck(auditor)
        """Where what the engine finds is held against what judges have signed."""
        self.on_upheld: Callable[[Commitment], object] = lambda _: None
        """Told of work that was rejected and is in order."""
        self.on_confessed: Callable[[PeerId], object] = lambda _: None
        """Told of a worker that has lied."""
        self.disown: Callable[[bytes], object] = lambda _: None
        """Told of content that is not to be learnt from."""
        self._has_worked = has_worked
        self._has_room = has_room
        self._seats = Seats(strangers=STRANGERS)
        self._newcomers = RateLimit(NEWCOMERS, NEWCOMERS_AT_ONCE)
        self._appeals: BoundedDict[PeerId, RateLimit] = BoundedDict(MAX_WORKERS)
        self._complaints: BoundedDict[PeerId, RateLimit] = BoundedDict(MAX_WORKERS)
        self._barred: BoundedDict[PeerId, None] = BoundedDict(MAX_WORKERS)
        """Who has appealed in vain."""
        self._ruled: BoundedDict[bytes, tuple[Ruled, str]] = BoundedDict(MAX_RULED)
        self._waiting: dict[bytes, _Case] = {}
        self._asked = Notifier()

    @property
    def _run(self) -> Run:
        return self._standing.run

    async def serve(self, stream: Stream) -> None:
        """A `StreamHandler`: one question in, one ruling out."""
        ruling = self._why_unheard(stream.peer)
        if ruling is None:
            payload = await self._read(stream)
            ruling = _BUSY if payload is None else await self.hear(stream.peer, payload)
        await send_frame(stream, encode_ruling(*ruling))

    def _why_unheard(self, peer: PeerId) -> tuple[Ruled, str] | None:
        """What a peer is told of which not a byte is read; None if it is heard. Who is banned
        is: this may be how it says that it should not be."""
        if not self._node.may(peer, Capability.GENERATE) or self._standing.why_not:
            return Ruled.LATER, "the trainer rests, or you may not generate in this run"
        if self._node.lacks_work(peer):
            return Ruled.LATER, self._run.lacks_stamp
        if peer in self._barred:
            return Ruled.IN_VAIN, "you have appealed in vain before"
        return None

    async def _read(self, stream: Stream) -> bytes | None:
        """The question on ``stream``; None if there is no seat for it, or it is too slow."""
        peer, most = stream.peer, self._run.terms.work_size.max_submission + 2 * MAX_VERDICT
        with trio.move_on_after(ASK_SECONDS) as scope:
            seat = self._seats.take(
                peer,
                self._node.world.now(),
                network=self._node.host.network_of(peer),
                is_stranger=not self._has_worked(peer),
                evict=scope.cancel,
            )
            if seat is None:
                return None
            try:
                return await FrameReader(_Counting(stream, seat), most).receive()
            finally:
                self._seats.leave(seat)
        return None

    async def hear(self, peer: PeerId, payload: bytes) -> tuple[Ruled, str]:
        """What comes of a question of ``peer``. Raises `BadMessage` if it is none, or not
        its own."""
        world = self._node.world
        asked = await decode_off_loop(
            world, decode_asked_untrusted, payload, world.verify, rate=HASH_RATE
        )
        commitment = commitment_of(asked)
        if commitment.node != peer:
            raise BadMessage("a worker speaks of its own work only")
        if commitment.run != self._run.id:
            return Ruled.UNSURE, "it is work for another run"
        if isinstance(asked, Complaint):
            return self._complain(asked.validator, peer, asked)
        if isinstance(asked, Forewarning):
            if not _meter(self._complaints, peer, COMPLAINTS).allows(1.0, world.now()):
                return Ruled.LATER, "too much is said"
            self.disown(commitment.content)
            return Ruled.HEARD, ""
        if asked.verdict.validator not in self._run.terms.validators:
            return Ruled.UNSURE, "the validator is none of this run any more"
        if isinstance(asked, Appeal) and not is_repeatable(asked.verdict.reason):
            complaint = Complaint(asked.verdict.validator, commitment)
            return self._complain(asked.verdict.validator, peer, complaint)
        return await self._appeal(peer, asked)

    def _complain(
        self, validator: PeerId, worker: PeerId, complaint: Complaint
    ) -> tuple[Ruled, str]:
        now, commitment = self._node.world.now(), complaint.commitment
        judges = away_of(self._node).judges_of(self._run, worker, commitment.version)
        age = self._node.shardcast.newest - commitment.version
        # a worker could name the version whose judge is the one that it likes
        is_of_now = 0 <= age <= self._run.terms.recipe.lag
        # where lots fall, each validator is the judge of some of its places
        is_its_judge = self._run.terms.has_lots or validator in judges
        if not is_of_now or not is_its_judge:
            return Ruled.UNSURE, "it is not the judge of work that can be used"
        if not self._has_worked(worker) or not self._has_room():
            return Ruled.UNSURE, "it does not count"
        if not _meter(self._complaints, worker, COMPLAINTS).allows(1.0, now):
            return Ruled.LATER, "too many complaints"
        self._watch.complain(validator, worker)
        return Ruled.HEARD, ""

    async def _appeal(self, worker: PeerId, appeal: Appeal | Acceptance) -> tuple[Ruled, str]:
        key = appeal.verdict.signature
        if key in self._ruled:
            return self._ruled[key]
        case = self._waiting.get(key)
        if case is None:
            why_not = self._why_not_tried(worker)
            if why_not:
                return Ruled.LATER, why_not
            case = self._waiting[key] = _Case(appeal, not self._has_worked(worker))
            self._asked.notify_all()
        with trio.move_on_after(PATIENCE):
            await case.done.wait()
        return case.ruling

    def _why_not_tried(self, worker: PeerId) -> str:
        """Why another appeal of a worker does not wait for the engine; empty if it does."""
        now, is_newcomer = self._node.world.now(), not self._has_worked(worker)
        waiting = [one.is_newcomers for one in self._waiting.values()]
        if len(waiting) >= MAX_WAITING or (is_newcomer and sum(waiting) >= NEWCOMERS_WAITING):
            return "too many appeals wait"
        if not _meter(self._appeals, worker, APPEALS).allows(1.0, now):
            return f"at most {APPEALS:g} appeals an hour"
        if is_newcomer and not self._newcomers.allows(1.0, now):
            return "too many appeals of nodes without accepted work"
        return ""

    async def work_forever(self) -> None:
        """Try what waits, one appeal after the other, until cancelled. Raises `WorkerDied`."""
        while True:
            while not self._waiting:
                await self._asked.wait()
            key, case = min(self._waiting.items(), key=lambda one: one[1].is_newcomers)
            case.ruling = await self._try(case.appeal)
            self._ruled.renew(key, case.ruling)
            del self._waiting[key]
            case.done.set()

    async def _try(self, asked: Appeal | Acceptance) -> tuple[Ruled, str]:
        """What the trainer's own engine says of the work, and what follows from it."""
        commitment, shardcast = asked.verdict.commitment, self._node.shardcast
        version = commitment.version
        if not shardcast.holds(version):
            return Ruled.UNSURE, "the policy is not held here any more"
        if shardcast.manifest(version).weights_digest != commitment.policy:
            return Ruled.UNSURE, "it was drawn under another policy of that version"
        try:
            found = await self._replay(asked.submission)
        except (EnvironmentFailed, EngineError, StorageError) as error:
            logger.warning("appeal_failed %s: %s", commitment.content.hex(), error)
            return Ruled.UNSURE, "the trainer could not replay it"
        if isinstance(asked, Acceptance):
            await self.crosscheck.note_verdict(asked.verdict)
        await self.crosscheck.note_found(asked.submission, found)
        if found is not None and found.weight < Weight.STRIKE:
            return Ruled.UNSURE, f"it is a little beyond a limit here: {found}"
        if isinstance(asked, Appeal):
            return await self._rule(asked, found)
        if found is None:
            return self._bar(commitment.node, "the trainer finds nothing wrong with it")
        self.on_confessed(commitment.node)
        return Ruled.UPHELD, f"the trainer finds it wrong, too: {found}"

    async def _replay(self, submission: Submission) -> Finding | None:
        """The worst that is wrong with it. Raises `EnvironmentFailed`, `EngineError`,
        `StorageError`."""
        try:
            tasks, groups = await open_refused(self._run, self._environment, submission)
            async with self._auditor.holding(submission.commitment) as engine:
                return worst(await violated(self._run, engine, tasks, groups))
        except BadMessage as error:
            logger.info("no_answer %s: %s", submission.commitment.node.short, error)
            return Finding(NO_ANSWER, 1, 0)

    async def _rule(self, appeal: Appeal, found: Finding | None) -> tuple[Ruled, str]:
        commitment = appeal.verdict.commitment
        if found is not None:
            return self._bar(commitment.node, f"the trainer finds it wrong, too: {found}")
        await self._watch.uphold(appeal)
        self.on_upheld(commitment)
        return Ruled.UPHELD, "the trainer finds nothing wrong with it"

    def _bar(self, worker: PeerId, why: str) -> tuple[Ruled, str]:
        self._barred.renew(worker, None)
        logger.info("appeal_in_vain worker=%s: %s", worker.short, why)
        return Ruled.IN_VAIN, why


def _meter(meters: BoundedDict[PeerId, RateLimit], worker: PeerId, count: float) -> RateLimit:
    meter = meters.get(worker) or RateLimit(count / HOUR, count)
    meters.renew(worker, meter)
    return meter
