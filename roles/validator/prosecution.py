"""From a rejection to a ban: this validator's own, and those of others that it repeats.

A rejection that is beyond doubt, or one strike too many, is signed as a ban, and what was
rejected is kept for whoever wants to repeat it. Of another officer's ban this validator
believes nothing: it fetches the content, runs the model on it as on any work, and signs a ban
of its own if that convicts too (`roles.protocol.core.bans` says how many must). A policy that
is gone from here, or content that does not come, convicts nobody, and refutes nothing.

Content is fetched in tasks of their own, which no source can hold up for long
(`roles.validator.core.docket`): only the replay, of what is here, takes a turn of the scorer's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import trio

from p2p.bounded import BoundedDict, RateLimit
from p2p.errors import StorageError, WorkerDied
from p2p.identity import PeerId
from p2p.node.node import Node
from roles.engines.base import EngineError
from roles.envs.contained import EnvironmentFailed
from roles.protocol.beacon import beacon_of
from roles.protocol.core.bans import MAX_CITED, SPREAD, convicts, weight_of
from roles.protocol.core.beacon import decode_two_pledges_untrusted
from roles.protocol.core.lies import Weight
from roles.protocol.core.messages import SignedVerdict, Submission
from roles.protocol.core.statements import PLEDGES_KIND
from roles.shared.bans import BanBook, bans_of
from roles.shared.durable import Durable
from roles.shared.evidence import EVIDENCE_SECONDS, EvidenceStore, fetch_evidence
from roles.shared.standing import AtRest
from roles.validator.core.docket import Case, Docket
from roles.validator.judge import Judge
from roles.validator.verdicts import Job

logger = logging.getLogger(__name__)

NEWCOMERS: Final = 1 / 60
"""Bans a second of workers that never had work accepted: they have nothing to lose, and who
mints names would fill the disk with the evidence. The rest of theirs is rejected, as ever."""
NEWCOMERS_AT_ONCE: Final = 32.0
"""Of them after a pause: a wave of names, each of which costs a stamp and a replay."""
MAX_SUSPECTS: Final = 1024
"""Workers whose strikes are remembered."""
FETCHERS: Final = 2
"""Bans whose content is fetched, or waits for a replay, at a time: three submissions each."""
FETCH_SECONDS: Final = 20.0
"""For one submission at the first try, twice as long at each further one: 8 MiB at 3 Mbit/s."""


@dataclass(slots=True)
class _Fetched:
    """A ban whose content is here."""

    case: Case
    submissions: list[Submission]
    is_done: trio.Event = field(default_factory=trio.Event)


class Prosecution:
    """What one validator makes of rejections."""

    def __init__(
        self, node: Node, judge: Judge, durable: Durable, wake: Callable[[], None]
    ) -> None:
        """``wake`` is called when there is something to `examine`."""
        self._node = node
        self._judge = judge
        self._durable = durable
        self._strikes: BoundedDict[PeerId, list[tuple[SignedVerdict, Submission]]] = (
            BoundedDict(MAX_SUSPECTS)
        )
        self._newcomers = RateLimit(NEWCOMERS, NEWCOMERS_AT_ONCE)
        self.evidence = EvidenceStore(node, durable)
        self._wake = wake
        self._docket = Docket()
        self._fetched: list[_Fetched] = []

    @property
    def _bans(self) -> BanBook:
        return bans_of(self._node)

    async def recall(self) -> None:
        """Take up the bans of earlier lives, and what was kept for them."""
        await self.evidence.recall()
        await self._bans.recall()

    async def consider(self, verdict: SignedVerdict, submission: Submission) -> None:
        """A rejection of this validator: ban its worker if that is enough."""
        if not self._bans.is_on or weight_of(verdict) < Weight.STRIKE:
            return
        worker, now = verdict.commitment.node, self._node.world.now()
        before = self._strikes.get(worker) or []
        newest = verdict.commitment.version
        recent = [
            (said, work) for said, work in before if said.commitment.version >= newest - SPREAD
        ]
        cases = [*recent[1 - MAX_CITED :], (verdict, submission)]
        self._strikes.renew(worker, cases)
        if weight_of(verdict) is Weight.LIE:
            cases = cases[-1:]
        if not convicts([said for said, _ in cases]) or self._has_banned(worker):
            return
        if not self._judge.has_worked(worker) and not self._newcomers.allows(1.0, now):
            return
        await self._ban(cases)

    async def accuse_trainer(self) -> None:
        """State that the run's trainer has pledged two chains, if it has, for those who have
        heard of one; once."""
        proof = await beacon_of(self._node).wait_forked()
        ledger = await self._node.ledger.opened()
        bodies = [entry.body async for entry in ledger.entries(PLEDGES_KIND)]
        stated = (
            decode_two_pledges_untrusted(body, self._node.world.verify) for body in bodies
        )
        if any(one.is_of(proof) for one in stated):
            return
        await self._durable.insist(lambda: ledger.append(PLEDGES_KIND, proof.to_bytes()))

    def _has_banned(self, worker: PeerId) -> bool:
        """Whether this validator shuts it out already: what was in the queue is no new ban."""
        held = self._bans.standing(worker)
        return held is not None and self._node.peer_id in held.by

    async def _ban(self, cases: list[tuple[SignedVerdict, Submission]]) -> None:
        worker = cases[0][0].commitment.node
        if worker in self._node.run.officers or worker == self._node.run.owner:
            return
        for _, submission in cases:
            await self.evidence.keep(submission)
        await self._durable.insist(lambda: self._bans.sign([said for said, _ in cases]))
        self._strikes.pop(worker, None)

    async def fetch_forever(self) -> None:
        """Get what others ban by, until cancelled."""
        async with trio.open_nursery() as nursery:
            for _ in range(FETCHERS):
                nursery.start_soon(self._fetch_one_by_one)

    async def _fetch_one_by_one(self) -> None:
        world = self._node.world
        while True:
            case = await self._wait_case()
            submissions = await self._fetch(case)
            if submissions is None:
                self._docket.put_back(case, world.now(), world.wall())
                logger.info(
                    "evidence_missing worker=%s author=%s tries=%d",
                    case.ban.culprit.short,
                    case.author.short,
                    case.tries,
                )
                continue
            fetched = _Fetched(case, submissions)
            self._fetched.append(fetched)
            self._wake()
            await fetched.is_done.wait()

    async def _fetch(self, case: Case) -> list[Submission] | None:
        """All that a ban is about; None if some of it does not come in time."""
        seconds = min(FETCH_SECONDS * 2.0**case.tries, EVIDENCE_SECONDS)
        submissions = []
        for verdict in case.ban.evidence:
            found = None
            with trio.move_on_after(seconds):
                found = await fetch_evidence(self._node, case.author, verdict)
            if found is None:
                return None
            submissions.append(found)
        return submissions

    async def _wait_case(self) -> Case:
        """The next ban to repeat; what is settled meanwhile is none."""
        world, bans = self._node.world, self._bans
        while True:
            for author, ban in bans.take_unexamined():
                self._docket.add(author, ban)
            case = self._docket.take(world.now())
            if case is None:
                with trio.move_on_after(self._docket.next_due() - world.now()):
                    await bans.wait_news()
            elif bans.is_open(case.author, case.ban):
                return case

    async def examine(self) -> None:
        """Repeat one ban of another officer, if its content is here, and sign one of our own if
        it is borne out."""
        if not self._fetched:
            return
        fetched = self._fetched.pop(0)
        case, cases = fetched.case, []
        for submission in fetched.submissions:
            ours = await self._repeat(submission)
            if ours is not None:
                cases.append((ours, submission))
        fetched.is_done.set()
        if convicts([said for said, _ in cases]):
            await self._ban(cases)
        elif len(cases) == len(fetched.submissions):
            self._docket.doubt(case.author, self._node.world.now())
            logger.warning(
                "the ban of %s by %s is not borne out here",
                case.ban.culprit.short,
                case.author.short,
            )

    async def _repeat(self, submission: Submission) -> SignedVerdict | None:
        """Our own verdict on it; None if there can be none."""
        try:
            return await self._judge.repeat(Job(submission))
        except (EnvironmentFailed, EngineError, StorageError, WorkerDied, AtRest) as error:
            logger.info("ban_not_repeated %s: %s", submission.commitment.node.short, error)
            return None
