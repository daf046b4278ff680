"""Deliveries are replayed before they are learnt from, and validators that lie are refused.

Theory of operation
-------------------
One validator judges a submission, and nothing but a replay shows that a model was run for it.
So the trainer replays every delivery before it takes it: with the policy that it names, by the
trainer's own engine (`roles.trainer.scoring`), within the limits of the run. A lie that one
submission shows therefore reaches no gradient, whoever signed it. How sure it is that the
validator has lied is weighed in `roles.protocol.core.lies`; what is not borne out is not learnt
from, even if no validator is at fault.

The engine is the learner's. A process of its own would hold a second copy of its libraries, and
on a device a second context; in the learner's there is one more copy of the weights: 2 or 4
bytes a parameter beside its 18, from the first replay on. Calls take turns: a step waits for
one submission at most, and a replay for a step. An engine that dies at a replay takes the
learner with it: the error goes to the role, which goes on from its disk, and no validator is
accused.

A host ends what it does for a peer that goes away, or breaks a protocol. So looks are a task of
the trainer's own: a validator that withdraws what is slow to be answered, since that is what
is replayed, is judged by it all the same.

Who is convicted is refused for ever, by name, and across restarts: the lie is an entry of the
ledger, of kind `LIE_KIND`, and the delivery a file below `LIES`, for a bystander to repeat it
(`roles.protocol.core.lies.open_lie`). After an edition of the run file that changes the limits
no validator is accused by them for a while: what comes was judged by those before.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import trio

from p2p.errors import ShoalError, StorageError
from p2p.identity import PeerId
from p2p.ledger import Ledger
from p2p.node.node import Node
from roles.engines.base import EngineError, Group, GroupTask
from roles.protocol.core.lies import (
    Finding,
    Lie,
    Strikes,
    Weight,
    decode_lie_untrusted,
    worst,
)
from roles.protocol.core.messages import LIED, AcceptedWork, content_digest
from roles.protocol.core.statements import LIE_KIND
from roles.protocol.replay import contradictions, impossible_reward, wrong_reward
from roles.run import Run
from roles.shared.checked_json import DamagedFile, discard, keep, recall
from roles.shared.durable import Durable
from roles.shared.standing import RoleStanding
from roles.trainer.scoring import ScoringDesk

logger = logging.getLogger(__name__)

LIES: Final = "trainer/lies"
"""Where the deliveries lie that convict, or may: two for each validator at most, and those of
the convicted."""
LIMITS: Final = "trainer/limits"
"""Where it is kept by which limits validators were accused last, and from when on."""
SETTLING: Final = 600.0
"""Seconds after other limits came in which no validator is accused: what it had under way
was judged by those before. As long as `roles.validator.limits.SUCCESSION`."""
MOST_WAITING: Final = 16
"""Deliveries of one validator that wait to be looked at: an honest one has four under way. More
has who goes away before it is answered."""
REPLAY: Final = "replay"
PAY: Final = "rewards"
"""The two kinds of looks at a validator's work (`Strikes`)."""


class NotBorneOut(ShoalError):
    """The trainer's own engine or environment does not bear a verdict out, or could not say."""


@dataclass(slots=True)
class AuditCounts:
    """What became of the looks at validators' work, in this life."""

    replayed: int = 0
    """Deliveries."""
    unsure: int = 0
    """Replays that the engine could not do, or of which the result accuses no validator."""
    lies: int = 0
    """Deliveries of which the verdict is no honest one: lies, and strikes."""


@dataclass(slots=True, eq=False)
class _Case:
    """A delivery that is looked at."""

    work: AcceptedWork
    kind: str
    found: Finding | None = None
    """What is wrong with its rewards."""
    replayed: _Replay | None = None
    """What the engine is asked; None of one that is only compared with the environment."""
    done: trio.Event = field(default_factory=trio.Event)
    refusal: str = "the trainer could not replay it"
    """Once it is ``done``: why it is not taken; empty if it is borne out."""

    @property
    def key(self) -> bytes:
        """Of what was signed: two verdicts on one submission are two cases."""
        return content_digest(self.kind.encode() + self.work.verdict.to_bytes())


@dataclass(frozen=True, slots=True)
class _Replay:
    run: Run
    tasks: Sequence[GroupTask]
    groups: Sequence[Group]


class Auditor:
    """What the trainer knows of its validators' honesty."""

    def __init__(
        self,
        node: Node,
        desk: ScoringDesk,
        standing: RoleStanding,
        ledger: Ledger,
        durable: Durable,
    ) -> None:
        self._node = node
        self._desk = desk
        self._standing = standing
        self._ledger = ledger
        self._durable = durable
        self._strikes = Strikes()
        self._waiting: dict[bytes, _Case] = {}
        """What is, or will be, looked at, whether who asked waits for it or not."""
        self._nursery: trio.Nursery | None = None
        """Where looks are tasks; None while `work_forever` does not run."""
        self._limits = standing.run.terms.limits
        self._accuses_from = -math.inf
        self._kept: dict[str, None] = {}
        """Files below `LIES` of strikes, which may come to nothing."""
        self.liars: dict[PeerId, str] = {}
        """Who is refused, and what convicted it."""
        self.counts = AuditCounts()

    async def recall(self) -> None:
        """Take up who was convicted in earlier lives. What was kept of strikes is removed:
        those are forgotten."""
        await self._recall_limits()
        needed: set[str] = set()
        async for entry in self._ledger.entries(LIE_KIND):
            lie = decode_lie_untrusted(entry.body, self._node.world.verify)
            self.liars[lie.verdict.validator] = str(lie.finding)
            needed.add(lie.path)
        disk = self._node.world.disk
        for path in [f"{LIES}/{name}" for name in await disk.list(LIES)]:
            if path not in needed:
                await self._durable.insist(partial(disk.remove, path))

    async def _recall_limits(self) -> None:
        """Other limits than those of the life before may have come while this node was down. A
        restart under the same ones is no pardon."""
        disk, world = self._node.world.disk, self._node.world
        known: Any = None
        try:
            known = await recall(disk, LIMITS)
        except DamagedFile as error:
            await discard(disk, LIMITS, error)
        digest = content_digest(repr(self._limits).encode()).hex()
        left = SETTLING if self._standing.run.epoch > 1 else 0.0
        if known is not None:
            before, until = known
            left = min(until - world.wall(), SETTLING) if before == digest else SETTLING
        if left > 0:
            self._accuses_from = world.now() + left
        value = [digest, world.wall() + max(left, 0.0)]
        await self._durable.insist(partial(keep, disk, LIMITS, value))

    def why_refused(self, validator: PeerId) -> str:
        """Why nothing of ``validator`` is taken; empty if it is not known to lie."""
        lie = self.liars.get(validator)
        return "" if lie is None else f"{LIED}: {lie}"

    async def audit(
        self, work: AcceptedWork, tasks: Sequence[GroupTask], groups: Sequence[Group]
    ) -> None:
        """Replay a delivery. Raises `NotBorneOut`.

        ``tasks`` and ``groups`` are those of its place, and have the right shape.
        """
        replayed = _Replay(self._standing.run, tasks, groups)
        await self._decide(_Case(work, REPLAY, replayed=replayed))

    async def check_rewards(self, work: AcceptedWork, ours: Sequence[float]) -> None:
        """Compare the rewards of a verdict with the environment's. Raises `NotBorneOut`."""
        found = wrong_reward(work.verdict.rewards, ours)
        if found is None:
            self._strikes.note(work.verdict, PAY, None)
        else:
            await self._decide(_Case(work, PAY, found))

    async def check_possible(self, work: AcceptedWork) -> None:
        """Look at rewards before the environment is asked. Raises `NotBorneOut`."""
        found = impossible_reward(work.verdict.rewards)
        if found is not None:
            await self._decide(_Case(work, PAY, found))

    async def _decide(self, asked: _Case) -> None:
        """Raise `NotBorneOut` unless it is borne out. A validator that goes away meanwhile is
        judged none the less."""
        validator = asked.work.verdict.validator
        case = self._waiting.get(asked.key)
        if case is None:
            ahead = (one.work.verdict.validator for one in self._waiting.values())
            if sum(one == validator for one in ahead) >= MOST_WAITING:
                raise NotBorneOut("too much of this validator waits to be looked at")
            case = self._waiting[asked.key] = asked
            if self._nursery is not None:
                self._nursery.start_soon(self._settle, case)
        await case.done.wait()
        if case.refusal:
            raise NotBorneOut(case.refusal)

    async def work_forever(self) -> None:
        """Look at what waits, until cancelled. Raises `WorkerDied`: the learner has died with
        it."""
        try:
            async with trio.open_nursery() as self._nursery:
                for case in list(self._waiting.values()):
                    self._nursery.start_soon(self._settle, case)
                await self._desk.work_forever()
        finally:
            self._nursery = None
            for case in self._waiting.values():
                case.done.set()
            self._waiting.clear()

    async def _settle(self, case: _Case) -> None:
        case.refusal = await self._look(case)
        del self._waiting[case.key]
        case.done.set()

    async def _replay(self, work: AcceptedWork, asked: _Replay) -> list[Finding] | None:
        """What is found; None if nothing can be said."""
        commitment = work.verdict.commitment
        version, policy = commitment.version, commitment.policy
        try:
            scored = await self._desk.score(version, policy, asked.tasks, asked.groups)
        except (EngineError, StorageError) as error:
            logger.error("replay_failed %s: %s", commitment.content.hex(), error)
            return None
        return contradictions(asked.run, scored, work.logprobs)

    async def _look(self, case: _Case) -> str:
        """Count a look at a validator's work; why it is not taken, or nothing."""
        work, found = case.work, case.found
        if case.replayed is not None:
            replayed = await self._replay(work, case.replayed)
            if replayed is None:
                self.counts.unsure += 1
                return case.refusal
            self.counts.replayed += 1
            found = worst(replayed)
        verdict = work.verdict
        if found is None:
            self._strikes.note(verdict, case.kind, None)
            return ""
        lie = Lie(verdict, found, f"{LIES}/{verdict.commitment.content.hex()}")
        may_accuse = self.may_accuse() or not found.is_of_the_run
        if found.weight < Weight.STRIKE or not may_accuse:
            self.counts.unsure += 1
            self._strikes.note(verdict, case.kind, None)
        else:
            self.counts.lies += 1
            await self._suspect(case.kind, lie, work.to_bytes())
        return f"the trainer finds otherwise: {found}"

    async def _forget_old(self) -> None:
        """Remove what was kept of strikes that count no more."""
        pending = self._strikes.pending
        for path in [path for path in self._kept if path not in pending]:
            await self._durable.insist(partial(self._node.world.disk.remove, path))
            self._kept.pop(path, None)

    def may_accuse(self) -> bool:
        """Whether what is delivered now was judged by the limits of now."""
        limits, now = self._standing.run.terms.limits, self._node.world.now()
        if limits != self._limits:
            self._limits, self._accuses_from = limits, now + SETTLING
        return now >= self._accuses_from

    async def _suspect(self, kind: str, lie: Lie, kept: bytes) -> None:
        """Keep a lie or a strike, and convict its validator if it is enough."""
        validator, world = lie.verdict.validator, self._node.world
        logger.warning(
            "validator %s signed what a trainer's look does not bear out: %s",
            validator,
            lie.finding,
        )
        convicting = self._strikes.note(lie.verdict, kind, lie)
        is_news = bool(convicting) and validator not in self.liars
        if is_news:  # before anything is awaited: no more of it is taken
            self.liars[validator] = str(lie.finding)
        await self._durable.insist(partial(world.disk.replace, lie.path, kept))
        self._kept[lie.path] = None
        if not is_news:
            await self._forget_old()
            return
        for one in convicting:
            self._kept.pop(one.path, None)
        entries = [(LIE_KIND, one.to_bytes()) for one in convicting]
        await self._durable.insist(partial(self._ledger.append_all, entries))
        world.trace("validator.convicted", validator=str(validator))
        logger.warning(
            "validator %s lies: nothing more of it is taken. The proof is in this node's ledger"
            " and in %s; ask the run's owner for an edition that does not name it",
            validator,
            world.disk.locate(LIES),
        )
