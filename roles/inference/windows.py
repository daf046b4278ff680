"""Work that is committed to before anybody sees it: windows, from the first place to the last
byte.

Theory of operation
-------------------
Submissions are collected into windows of consecutive places under one policy
(`roles.protocol.core.lots`). A window is closed when it is full, when the node has nothing to
draw, when another policy is worked under, and `CLOSES` links after its first place. Then, in a
task for each window:

    commit   the witness signs it, one window after the other, in the draw order
    lot      two links later it is known which places are drawn
    judge    their content goes to the judges that the lot names, and to nobody else
    settle   the trainer gets the verdicts, and says which places it wants
    learn    those go to the trainer, drawn or not; what teaches nothing never leaves the node

Until then each submission is on disk (`roles.inference.outbox`), and they are forgotten
together. A node that is killed commits again, and its witness answers with what it has signed.

When no links come, a window that no lot has fallen on is dissolved: each submission goes whole
to the one validator that judges without lots.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Final, Protocol

import trio

from p2p.concurrency import Notifier
from p2p.errors import BadMessage
from p2p.identity import PeerId
from p2p.node.node import Node
from p2p.offence import Offence
from p2p.shardcast.manifest import PolicyVersion
from proofs.checks import Verdict
from roles.envs.client import ContainedEnvironment
from roles.envs.contained import EnvironmentFailed
from roles.inference.appeals import Appeals
from roles.inference.earned import keep_earned
from roles.inference.promise import WorkPromise
from roles.protocol.away import away_of
from roles.protocol.beacon import beacon_of
from roles.protocol.core.assignment import draw_order
from roles.protocol.core.lots import (
    COMMIT_PROTOCOL,
    MAX_WITNESSED,
    SETTLE_PROTOCOL,
    Lot,
    SignedWindow,
    Window,
    WitnessedWindow,
    decode_witness_reply_untrusted,
    encode_commit,
    lot_of,
)
from roles.protocol.core.messages import (
    Receipt,
    Refusal,
    SignedVerdict,
    Submission,
    content_digest,
    decode_groups_untrusted,
)
from roles.protocol.core.settlement import (
    MAX_REPLY,
    Settlement,
    SettlementReply,
    decode_settlement_reply_untrusted,
    verdicts_by_place,
)
from roles.protocol.replay import answers_of
from roles.protocol.request import Backoff, ask
from roles.rl.advantage import has_spread
from roles.run import Run, run_of
from roles.shared.durable import Durable
from roles.shared.reasons import printable

logger = logging.getLogger(__name__)

CLOSES: Final = 2
"""Links after its first place in which a window that is not full is closed: a slow worker's
work must not go stale over the wait for its last place."""
STREAMS: Final = 4
"""Places that are offered to one peer at a time, of the eight streams that it serves."""
UNCHECKED: Final = "unchecked"
"""What became of a place that was neither drawn nor learnt from."""

Finish = Callable[[Submission, str, str], Awaitable[None]]
"""Told what became of a submission, in a word and a sentence; it is forgotten then."""


class Asks(Protocol):
    """One attempt at an answer; None when it should be repeated."""

    async def __call__(
        self, peer: PeerId, submission: Submission, witnessed: WitnessedWindow, /
    ) -> SignedVerdict | None:
        """The peer's verdict."""
        ...


@dataclass(slots=True, eq=False)
class _Case:
    """A window whose lot has fallen."""

    witnessed: WitnessedWindow
    asked: dict[tuple[int, PeerId], None] = field(default_factory=dict)
    """By place: judges whose answers may come."""
    verdicts: list[SignedVerdict] = field(default_factory=list)
    given_up: int = 0
    changed: Notifier = field(default_factory=Notifier)

    @property
    def is_heard(self) -> bool:
        """Whether there is something to tell of each drawn place, or all is said."""
        places = {verdict.commitment.index for verdict in self.verdicts}
        return len(self.asked) <= len(self.verdicts) + self.given_up or self.drawn <= places

    drawn: frozenset[int] = frozenset()

    def note(self, verdict: SignedVerdict | None) -> None:
        """A judge has answered; None: it will not."""
        if verdict is None:
            self.given_up += 1
        else:
            self.verdicts.append(verdict)
        self.changed.notify_all()


class Windows:
    """The windows of one worker."""

    def __init__(
        self,
        node: Node,
        run: Run,
        environment: ContainedEnvironment,
        asks: Asks,
        finish: Finish,
        alone: Callable[[Submission], Awaitable[None]],
        promise: WorkPromise,
    ) -> None:
        """``alone`` hands a submission in whole, where no lots fall."""
        self._node = node
        self._world = node.world
        self._run = run
        self._environment = environment
        self._asks = asks
        self._finish = finish
        self._alone = alone
        self._promise = promise
        self.appeals: Appeals | None = None
        """Told of witnesses that give no answer."""
        self._beacon = beacon_of(node)
        self._collected: list[Submission] = []
        self._batch = 0
        self._turn = trio.Lock()
        """Windows are committed in the draw order."""
        self._queue: list[list[Submission]] = []
        self._refused = Backoff(self._world, "commit/refused")
        """Between windows that witnesses refuse for good: those of a banned worker come again
        as long as its places do."""
        self._lanes: dict[PeerId, trio.Semaphore] = {}
        self._note = b""
        self._nursery: trio.Nursery | None = None
        self.bytes_committed = 0
        """Sent and received for commitments, in this life: for people."""

    def open(self, nursery: trio.Nursery) -> None:
        """Windows are seen through by tasks of ``nursery``."""
        self._nursery = nursery

    @property
    def is_live(self) -> bool:
        """Whether lots fall now."""
        return self._beacon.is_live

    async def wait_change(self) -> None:
        """Return when that may be otherwise."""
        await self._beacon.wait_change(run_of(self._node).terms.lots.beacon)

    def add(self, submission: Submission) -> None:
        """Another place; it is on disk."""
        assert self._nursery is not None
        if self._collected and _key(self._collected[0]) != _key(submission):
            self.close()
        self._collected.append(submission)
        if len(self._collected) >= self._run.terms.lots.window:
            self.close()
        elif len(self._collected) == 1:
            self._nursery.start_soon(self._close_in_time, self._batch)

    def close(self) -> None:
        """No place is added to the window any more."""
        assert self._nursery is not None
        places, self._collected = sorted(self._collected, key=_place), []
        self._batch += 1
        for _, some in groupby(enumerate(places), lambda one: _place(one[1])[1] - one[0]):
            self._queue.append([submission for _, submission in some])
            self._nursery.start_soon(self._commit_next)

    async def _close_in_time(self, batch: int) -> None:
        await self._world.sleep(CLOSES * self._run.terms.lots.beacon)
        if batch == self._batch:
            self.close()

    # Commit.

    async def _commit_next(self) -> None:
        async with self._turn:
            self._queue.sort(key=_first)
            await self._commit(self._queue.pop(0))

    async def _commit(self, places: list[Submission]) -> None:
        """Have these committed to, whatever it takes; what follows is seen to elsewhere."""
        assert self._nursery is not None
        backoff = Backoff(self._world, f"commit/{_place(places[0])}")
        teaching, rewards = await self._rewards(places)
        while places:
            if self._is_too_old(places[0].commitment.version):
                return await self._give_up(places, "the policy has become too old")
            if not self.is_live:
                return self._dissolve(places)
            reply = await self._ask_witness(places, teaching, rewards)
            if isinstance(reply, WitnessedWindow):
                held = [one for one in places if reply.window.holds(one.commitment)]
                if not held:
                    return await self._give_up(places, "its witness has signed another window")
                self._nursery.start_soon(self._see_through, reply, held)
                self._refused = Backoff(self._world, "commit/refused")
                places = [one for one in places if one not in held]
                teaching, rewards = await self._rewards(places)
            elif reply is not None and not reply.retry:
                logger.info("window_refused: %s", printable(reply.reason))
                await self._refused.wait()
                self._dissolve(places[:1])  # it may have been judged in an earlier life
                places = places[1:]
                teaching, rewards = await self._rewards(places)
            else:
                await backoff.wait()
                if self._queue and min(map(_first, self._queue)) < _first(places):
                    # a witness takes places in their order: what has come meanwhile goes first
                    self._queue.append(places)
                    self._nursery.start_soon(self._commit_next)
                    return None
        return None

    async def _rewards(self, places: Sequence[Submission]) -> tuple[int, bytes]:
        """Which of them teach anything, and the digest of what all earn."""
        teaching, earned = 0, []
        for bit, submission in enumerate(places):
            commitment = submission.commitment
            groups = decode_groups_untrusted(submission.content)
            order = draw_order(
                self._run, commitment.node, commitment.version, commitment.policy
            )
            try:
                tasks = await self._environment.tasks(order.task_seeds(commitment.index))
                rewards = await self._environment.rewards(answers_of(tasks, groups))
            except EnvironmentFailed:
                continue  # it fails at the trainer as well
            earned.append(repr(rewards))
            size = self._run.terms.recipe.group_size
            parts = [rewards[at : at + size] for at in range(0, len(rewards), size)]
            teaching |= any(map(has_spread, parts)) << bit
        return teaching, content_digest("".join(earned).encode())

    async def _ask_witness(
        self, places: Sequence[Submission], teaching: int, rewards: bytes
    ) -> WitnessedWindow | Refusal | None:
        """One attempt; None when it should be repeated."""
        first = places[0].commitment
        due = await self._promise.make(first.version, self._node.shardcast.newest)
        chain, link = self._beacon.links.newest
        contents = tuple(one.commitment.content for one in places)
        window = Window(
            *(first.run, first.node, first.version, first.policy, first.index, contents),
            *(teaching, rewards, chain, link, due),
        )
        run = run_of(self._node)
        witness = away_of(self._node).judge_of(run, first.node, first.version)
        asked = encode_commit(SignedWindow.sign(window, self._world.signer), self._note)
        if self.appeals is not None:
            self.appeals.note_offered(places[0], witness)
        data = await ask(self._node, witness, COMMIT_PROTOCOL, asked, max_reply=MAX_WITNESSED)
        if data is None:
            if self.appeals is not None:
                self.appeals.note_unanswered(places[0], witness)
            return None
        self.bytes_committed += len(asked) + len(data)
        try:
            reply = decode_witness_reply_untrusted(data, self._world.verify)
            if isinstance(reply, WitnessedWindow) and (
                reply.witness != witness or reply.window.node != first.node
            ):
                raise BadMessage("a window of another witness or node")
        except BadMessage as error:
            self._node.host.penalise(witness, Offence.NONSENSE.points, str(error))
            return None
        return reply

    # After the lot.

    async def _see_through(
        self, witnessed: WitnessedWindow, places: Sequence[Submission]
    ) -> None:
        """From the lot to the last place."""
        lot = await self._wait_lot(witnessed.window)
        if lot is None:
            if self._is_too_old(witnessed.window.version):
                return await self._give_up(places, "the policy has become too old")
            return self._dissolve(places)
        drawn = lot.drawn(witnessed.share)
        self._world.trace("lot", places=len(places), drawn=len(drawn))
        reply, judged = await self._have_judged(witnessed, lot, places)
        wanted = () if reply is None else reply.wanted
        async with trio.open_nursery() as nursery:
            for one in places:
                verdicts = judged.get(one.commitment.index, [])
                nursery.start_soon(
                    self._end, witnessed, one, verdicts, one.commitment.index in wanted
                )
        return None

    async def _wait_lot(self, window: Window) -> Lot | None:
        """The lot; None if it will not come."""
        while (lot := lot_of(window, self._beacon.links)) is None:
            chain, _ = self._beacon.links.newest
            if not self.is_live or chain != window.chain or self._is_too_old(window.version):
                return None
            await self.wait_change()
        return lot

    async def _have_judged(
        self, witnessed: WitnessedWindow, lot: Lot, places: Sequence[Submission]
    ) -> tuple[SettlementReply | None, dict[int, list[SignedVerdict]]]:
        """What the trainer makes of the window, and what judges say of its drawn places."""
        drawn = frozenset(lot.drawn(witnessed.share))
        case = _Case(witnessed, drawn=drawn)
        checked = [one for one in places if one.commitment.index in drawn]
        async with trio.open_nursery() as nursery:
            self._ask_judges(case, lot, checked, nursery)
            nursery.start_soon(self._follow_absences, case, lot, checked, nursery)
            reply = await self._settle(case)
            nursery.cancel_scope.cancel()
        return reply, verdicts_by_place(case.verdicts)

    async def _follow_absences(
        self, case: _Case, lot: Lot, checked: Sequence[Submission], nursery: trio.Nursery
    ) -> None:
        """Turns of judges that are passed over from now on fall to others."""
        while True:
            await away_of(self._node).wait_change()
            self._ask_judges(case, lot, checked, nursery)

    def _ask_judges(
        self, case: _Case, lot: Lot, checked: Sequence[Submission], nursery: trio.Nursery
    ) -> None:
        """Offer drawn places to who checks them now, but for those that have been asked."""
        for one in checked:
            place = one.commitment.index
            for judge in away_of(self._node).checks(run_of(self._node), lot, place):
                if (place, judge) not in case.asked:
                    case.asked[place, judge] = None
                    nursery.start_soon(self._judge, case, one, judge)

    async def _judge(self, case: _Case, submission: Submission, judge: PeerId) -> None:
        case.note(await self._ask_until(judge, submission, case.witnessed))

    async def _ask_until(
        self, peer: PeerId, submission: Submission, witnessed: WitnessedWindow
    ) -> SignedVerdict | None:
        """The peer's verdict; None if it has become of no use."""
        commitment = submission.commitment
        backoff = Backoff(self._world, f"lot/{peer}/{commitment.version}/{commitment.index}")
        lane = self._lanes.setdefault(peer, trio.Semaphore(STREAMS))
        while True:
            async with lane:
                verdict = await self._asks(peer, submission, witnessed)
            if verdict is not None or self._is_too_old(commitment.version):
                return verdict
            await backoff.wait()

    async def _settle(self, case: _Case) -> SettlementReply | None:
        """Tell the trainer, until it has an answer for good; None if it has none."""
        backoff = Backoff(self._world, f"settle/{case.witnessed.digest.hex()}")
        while True:
            while not case.is_heard:
                await case.changed.wait()
            reply = await self._ask_trainer(Settlement(case.witnessed, tuple(case.verdicts)))
            if reply is not None and reply.receipt is not Receipt.LATER:
                self._note = reply.note
                return reply
            if self._is_too_old(case.witnessed.window.version):
                return None
            await backoff.wait()

    async def _ask_trainer(self, settlement: Settlement) -> SettlementReply | None:
        trainer, payload = run_of(self._node).terms.trainers[0], settlement.to_bytes()
        data = await ask(self._node, trainer, SETTLE_PROTOCOL, payload, max_reply=MAX_REPLY)
        if data is None:
            return None
        try:
            reply = decode_settlement_reply_untrusted(data)
        except BadMessage as error:
            self._node.host.penalise(trainer, Offence.NONSENSE.points, str(error))
            return None
        logger.info("window %s: %s", reply.receipt.value, printable(reply.reason))
        return reply

    # What becomes of each place.

    async def _end(
        self,
        witnessed: WitnessedWindow,
        submission: Submission,
        verdicts: Sequence[SignedVerdict],
        is_wanted: bool,
    ) -> None:
        if is_wanted:
            trainer = run_of(self._node).terms.trainers[0]
            verdict = await self._ask_until(trainer, submission, witnessed)
            verdicts = [*verdicts, *([verdict] if verdict is not None else [])]
        kinds = {verdict.verdict: verdict.reason for verdict in verdicts}
        if Verdict.REJECTED not in kinds:
            durable = Durable(self._world, "inference")
            await durable.insist(partial(keep_earned, self._node, verdicts))
        for kind in (Verdict.REJECTED, Verdict.ACCEPTED, Verdict.INCONCLUSIVE):
            if kind in kinds:
                return await self._finish(submission, kind.value, kinds[kind])
        return await self._finish(submission, UNCHECKED, "")

    def _dissolve(self, places: Sequence[Submission]) -> None:
        assert self._nursery is not None
        for submission in places:
            self._nursery.start_soon(self._alone, submission)

    async def _give_up(self, places: Sequence[Submission], reason: str) -> None:
        for submission in places:
            await self._finish(submission, Verdict.INCONCLUSIVE.value, reason)

    def _is_too_old(self, version: PolicyVersion) -> bool:
        return self._node.shardcast.newest - version > self._run.terms.recipe.lag


def _key(submission: Submission) -> tuple[PolicyVersion, bytes]:
    return submission.commitment.version, submission.commitment.policy


def _first(places: Sequence[Submission]) -> tuple[PolicyVersion, int]:
    return _place(places[0])


def _place(submission: Submission) -> tuple[PolicyVersion, int]:
    return submission.commitment.version, submission.commitment.index
