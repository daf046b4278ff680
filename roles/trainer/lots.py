"""Where workers bring what the lot has left: settlements of windows, and content to learn from.

Theory of operation
-------------------
A witness tells of each window of a worker in standing, so that no worker can keep quiet about
one (`roles.trainer.core.windows`). When the judges of its drawn places have spoken, the worker
brings their verdicts: the window is settled, its places count for the worker's standing, and
the answer says which of them may be learnt from. Those that nothing can be learnt from are
never sent. The others are offered one by one, drawn or not. The trainer makes tasks, rewards
and log-probs itself, with the policy that drew them, so neither worker nor judge writes a
number that it learns from. The forward pass that gives the log-probs is a replay, too, and is
judged as one: a third of what the step itself costs (a step is three passes).

What the trainer answers, it first has on disk: windows below `WINDOWS`, standing at `STANDING`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

import trio

from p2p.bounded import BoundedDict
from p2p.errors import BadMessage, StorageError
from p2p.host import Stream, send_frame
from p2p.identity import PeerId
from p2p.node.admission import Capability
from p2p.node.node import Node
from p2p.shardcast.manifest import NO_POLICY, PolicyVersion
from p2p.wire import FrameReader
from p2p.world import decode_off_loop
from proofs.checks import Verdict
from roles.protocol.away import away_of
from roles.protocol.beacon import beacon_of
from roles.protocol.core.demand import KEPT
from roles.protocol.core.lots import (
    LOT_PROTOCOL,
    MAX_WITNESSED,
    SETTLE_PROTOCOL,
    UNIT,
    StandingNote,
    WitnessedWindow,
    decode_witnessed_untrusted,
    parts_of,
)
from roles.protocol.core.messages import (
    HASH_RATE,
    SEND,
    Commitment,
    Receipt,
    Refusal,
    SignedVerdict,
    SubmissionHead,
    encode_reply,
)
from roles.protocol.core.settlement import (
    Settlement,
    SettlementReply,
    decode_settlement_untrusted,
    max_settlement,
)
from roles.protocol.core.standing import MISSES_APART, Standings
from roles.protocol.demand import demand_of
from roles.protocol.reading import CONTENT_SECONDS, receive_content, receive_frame, receive_head
from roles.run import Run, run_of
from roles.shared.bans import bans_of
from roles.shared.checked_json import DamagedFile, discard, keep, recall
from roles.shared.durable import Durable
from roles.shared.seats import Seats
from roles.trainer.beacon import BeaconTeller
from roles.trainer.core.promises import WorkPromises
from roles.trainer.core.windows import Bench, Ending, WindowBook, WindowRecord, WindowState
from roles.trainer.intake import Intake
from roles.trainer.scoring import ScoringDesk

logger = logging.getLogger(__name__)

WINDOWS: Final = "trainer/windows"
"""Where windows lie that are not forgotten yet, 2 KiB each."""
STANDING: Final = "trainer/standing"
KEEP_EVERY: Final = 20.0
"""Seconds in which standing goes to disk, if it has changed. What a crash forgets of it are
acceptances: a rejection is kept at once."""
MAX_WORKERS: Final = 16_384
"""Workers that left a place out, as many as may be in standing."""
NOTE_LINKS: Final = 30
"""Links for which a note of standing holds: a worker commits several windows meanwhile, and one
that is caught gets no other."""
STALE: Final = "the policy is older than the run uses"


class LotDesk:
    """The trainer's part in lots: windows, standing, and content that workers bring."""

    def __init__(
        self, node: Node, intake: Intake, scoring: ScoringDesk, durable: Durable
    ) -> None:
        self._node = node
        self._world = node.world
        self._intake = intake
        self._durable = durable
        self._scoring = scoring
        self._beacon = beacon_of(node)
        self._teller = BeaconTeller(node, durable)
        self._seats = Seats()
        self._contents = Seats()
        self.book = WindowBook()
        self.standings = Standings(run_of(node).terms.lots)
        self._promises = WorkPromises(self.standings, run_of(node).terms.recipe.lag)
        self._left_out: BoundedDict[PeerId, int] = BoundedDict(MAX_WORKERS)
        """By worker that has left a place out: windows that it settled since."""
        self.why_refused: Callable[[PeerId], str] = lambda _: ""
        """Why the word of a validator counts no more; empty if it does."""
        self.on_verdict: Callable[[SignedVerdict], Awaitable[None]] = _nothing
        """Told of each verdict that a judge gave on a drawn place."""
        self._accepted: BoundedDict[PeerId, int] = BoundedDict(MAX_WORKERS)
        """By worker: drawn places that a judge has accepted, since one was rejected."""
        self._fallen: BoundedDict[PeerId, tuple[bytes, float]] = BoundedDict(MAX_WORKERS)
        """By worker: the content that ended its standing last, and what it had earned."""
        self._is_dirty = False
        self._kept_at = node.world.now()
        self.voided = 0
        """Windows of which a place was rejected, or did not come."""
        self._policies: BoundedDict[PolicyVersion, bytes] = BoundedDict(KEPT)
        """Digests of those that workers promise to work under."""
        self.missed = 0
        """Policies under which a worker handed in less than it had promised."""
        self.settled = 0

    @property
    def groups_scored(self) -> int:
        """By the trainer's own engine, of what workers brought."""
        return self._scoring.groups

    @property
    def _run(self) -> Run:
        return run_of(self._node)

    # What the session calls.

    async def open(self, nursery: trio.Nursery, served: ExitStack) -> None:
        """Take up what earlier lives left, then reveal links, and serve workers, until
        cancelled."""
        await self.recall()
        nursery.start_soon(self._teller.tell_forever)
        nursery.start_soon(self.watch_forever)
        nursery.start_soon(self._scoring.work_forever)
        host = self._node.host
        served.enter_context(host.serving(SETTLE_PROTOCOL, self.serve_settlements))
        served.enter_context(host.serving(LOT_PROTOCOL, self.serve_content))

    async def recall(self) -> None:
        """Take up windows and standing of earlier lives."""
        disk = self._world.disk
        try:
            self.standings.restore(await recall(disk, STANDING) or [])
        except (DamagedFile, BadMessage) as error:
            await discard(disk, STANDING, error)
        self._look()
        for name in await disk.list(WINDOWS):
            try:
                record = self._read(await recall(disk, f"{WINDOWS}/{name}"))
            except (DamagedFile, BadMessage) as error:
                await discard(disk, f"{WINDOWS}/{name}", error)
            else:
                self.book.add(record)
                self._promises.note(record.witnessed.window)

    async def watch_forever(self) -> None:
        """Let lots fall with each link, and end what is overdue, until cancelled."""
        period = self._run.terms.lots.beacon
        while True:
            self._look()
            await self._end_overdue()
            await self._note_missed()
            if self._is_dirty and self._world.now() >= self._kept_at + KEEP_EVERY:
                await self._keep_standing()
            await self._beacon.wait_change(period)

    def _look(self) -> None:
        """Which policy is out, who is there, and which lots have fallen."""
        now = self._world.now()
        self.note_policy()
        self.book.note_here(self._here(), now)
        self.book.fall(self._beacon.links, now)

    def note_policy(self) -> None:
        """Another policy may be out."""
        shardcast, links = self._node.shardcast, self._beacon.links
        newest = shardcast.newest
        if newest not in self._policies and newest > NO_POLICY:
            self._policies[newest] = shardcast.manifest(newest).weights_digest
        self._promises.publish(newest, links.newest, self._world.now())

    @property
    def _bench(self) -> Bench:
        terms = self._run.terms
        passed = away_of(self._node).validators
        return Bench(terms.validators, terms.lots.validators, passed)

    def _away(self) -> frozenset[PeerId]:
        """The validators of which no word is waited for."""
        validators = self._bench.validators
        liars = [one for one in validators if self.why_refused(one)]
        return frozenset(away_of(self._node).absent(validators)).union(liars)

    def _here(self) -> list[PeerId]:
        """The validators that a worker could have shown its places to."""
        members = {member.peer for member in self._node.membership.find("validator")}
        away = self._away()
        return [one for one in self._bench.validators if one in members and one not in away]

    async def _end_overdue(self) -> None:
        newest, lag = self._node.shardcast.newest, self._run.terms.recipe.lag
        overdue = self.book.take_overdue(newest, lag, self._bench, self._world.now())
        for record, ending in overdue:
            if ending is Ending.SILENT or self._is_selecting(record.node, ending):
                await self._void(record, ending.value)
            path = self._path(record.witnessed)
            await self._durable.insist(partial(self._world.disk.remove, path))

    def _is_selecting(self, node: PeerId, ending: Ending) -> bool:
        """Whether a worker has left places out again, too soon after the last time."""
        if ending is not Ending.LEFT_OUT:
            return False
        before = self._left_out.get(node)
        self._left_out.renew(node, 0)
        return before is not None and before < MISSES_APART

    async def _note_missed(self) -> None:
        """Tell the standings who kept its promise under the policies that are over."""
        world, away = self._world, self._away()

        def has_witness(node: PeerId, version: PolicyVersion) -> bool:
            return away_of(self._node).judge_of(self._run, node, version) not in away

        misses = self._promises.close(world.wall(), world.now(), has_witness, self._is_asked)
        for miss in misses:
            logger.info("window_missed %s: policy %d", miss.node, miss.version)
            self.missed += 1
            self._is_dirty = True
            if miss.has_ended:
                await self._tell_end(miss.node, "it leaves out what it promised, again")

    def _is_asked(self, node: PeerId, version: PolicyVersion, place: int) -> bool:
        """Whether a worker was to fill this place, by what was said of the policy last."""
        policy = self._policies.get(version)
        if policy is None:
            return False
        shares = demand_of(self._node).shares
        return shares.asks_for(node, version, policy, place) is not False

    def end_standing(self, node: PeerId) -> None:
        """Its work is acceptable each time, and leans all together: it is checked whole."""
        logger.warning("standing_ends %s: its work leans to one side", node)
        self.standings.note_rejected(node)
        self._is_dirty = True

    def has_worked(self, node: PeerId) -> bool:
        """Whether work of a node was taken, or a window's worth of its places accepted by one
        judge at least: where the other never answers, no newcomer's window is settled."""
        accepted = self._accepted.get(node, 0)
        is_window = accepted >= self._run.terms.lots.window
        return is_window or self._intake.accounts.has_worked(node)

    def note_confessed(self, node: PeerId) -> None:
        """It has lied, whoever accepted it: nothing of it is learnt from."""
        self._fallen.pop(node, None)
        self._accepted.pop(node, None)
        self._intake.drop_work_of(node)
        self.standings.note_rejected(node)
        self._is_dirty = True

    # Settlements.

    async def serve_settlements(self, stream: Stream) -> None:
        """A `StreamHandler`: one window, one answer."""
        with self._seats.seat(stream.peer) as seated:
            banned = bans_of(self._node).why_banned(stream.peer)
            if banned:
                reply = SettlementReply(Receipt.UNWANTED, banned)
            elif not seated or not self._node.may(stream.peer, Capability.GENERATE):
                reply = SettlementReply(Receipt.LATER, "not now")
            else:
                terms = self._run.terms
                rewards = terms.recipe.submission * terms.recipe.group_size
                most = max_settlement(rewards, terms.lots.validators)
                payload = None
                with trio.move_on_after(CONTENT_SECONDS):
                    payload = await FrameReader(stream, most).receive()
                if payload is None:
                    return
                reply = await self.settle(stream.peer, payload)
            await send_frame(stream, reply.to_bytes())

    async def settle(self, peer: PeerId, payload: bytes) -> SettlementReply:
        """What becomes of a window that ``peer`` tells of."""
        settlement = await decode_off_loop(
            self._world, decode_settlement_untrusted, payload, self._world.verify,
            rate=HASH_RATE,
        )  # fmt: skip
        window = settlement.witnessed.window
        witnesses = list(away_of(self._node).judges_of(self._run, window.node, window.version))
        if window.run != self._run.id or settlement.witnessed.witness not in witnesses:
            why_not = f"{witnesses[0]} is the witness of this window"
            return SettlementReply(Receipt.UNWANTED, why_not)
        self.note_policy()
        self._promises.note(window)  # though it may be stale by now
        if self._is_stale(window.version):
            return SettlementReply(Receipt.UNWANTED, STALE, (), self._note(window.node))
        record = await self._register(settlement.witnessed)
        if isinstance(record, SettlementReply):
            return record
        await self._take_verdicts(record, settlement)
        if peer != window.node:
            return SettlementReply(Receipt.TAKEN, "noted")
        return await self._answer(record)

    async def _register(self, witnessed: WitnessedWindow) -> WindowRecord | SettlementReply:
        """What is known of a window from now on, or why nothing is."""
        record = self.book.find(witnessed.digest)
        if record is not None:
            return record
        world, node = self._world, witnessed.window.node
        is_proven = self.standings.is_proven(node, world.wall())
        if witnessed.share < UNIT and not is_proven:
            return SettlementReply(Receipt.UNWANTED, "its worker is not in standing")
        if not self.book.has_room(node, is_proven=is_proven):
            return SettlementReply(Receipt.LATER, "too many windows are open")
        record = WindowRecord(witnessed, is_proven, world.now())
        self.book.add(record)
        self.book.fall(self._beacon.links, world.now())
        await self._durable.insist(partial(self._keep, record))
        return record

    async def _take_verdicts(self, record: WindowRecord, settlement: Settlement) -> None:
        """What judges of drawn places have said; of others it is passed over."""
        drawn, heard, lot = record.drawn, away_of(self._node), record.lot
        for verdict in settlement.verdicts:
            place, judge = verdict.commitment.index, verdict.validator
            if lot is None or place not in drawn or self.why_refused(judge):
                continue
            if not heard.may_check(self._run, lot, place, judge):
                continue
            await self.on_verdict(verdict)
            is_new = all(known != place for known, _ in record.verdicts)
            if is_new and verdict.verdict is Verdict.ACCEPTED:
                self._accepted.renew(record.node, self._accepted.get(record.node, 0) + 1)
            record.verdicts[place, verdict.validator] = verdict.verdict
            if verdict.verdict is Verdict.REJECTED and record.state is not WindowState.VOID:
                content = verdict.commitment.content
                await self._void(record, verdict.reason, content)

    async def _answer(self, record: WindowRecord) -> SettlementReply:
        """What the worker of a window is told."""
        if record.state is WindowState.OPEN:
            why_not = self._why_open(record)
            if why_not:
                return SettlementReply(Receipt.LATER, why_not)
            await self._settle(record)
        note = self._note(record.node)
        if record.state is WindowState.VOID:
            return SettlementReply(Receipt.UNWANTED, "a place of it was rejected", (), note)
        return SettlementReply(Receipt.TAKEN, "", tuple(self._wanted(record)), note)

    def _why_open(self, record: WindowRecord) -> str:
        bench, now = self._bench, self._world.now()
        why_not = record.why_unsettled(
            bench.validators, bench.count, self._away(), bench.passed
        )
        return why_not or (
            "an earlier window is open" if self.book.is_blocked(record, bench, now) else ""
        )

    async def _settle(self, record: WindowRecord) -> None:
        places, node, wall = record.witnessed.window.places, record.node, self._world.wall()
        record.state = WindowState.SETTLED
        if record.doubtful:
            record.state = WindowState.VOID
            self.standings.note_doubt(node)
        else:
            self.standings.note_accepted(node, self._stood(record), wall)
        record.settled_at = self._world.now()
        if record.state is WindowState.SETTLED:
            record.owed = dict.fromkeys(self._wanted(record))
        if node in self._left_out:
            self._left_out[node] += 1
        self.settled += 1
        self._is_dirty = True
        await self._durable.insist(partial(self._keep, record))
        self._world.trace("window", node=node.short, places=len(places))
        if record.was_proven:
            for place in places:  # what teaches nothing never comes
                if not record.witnessed.window.teaches(place):
                    self._intake.note_unsent(node, record.version)

    def _stood(self, record: WindowRecord) -> int:
        """How many of its places count: all that could have been drawn. Where the witness wrote
        a smaller share than the trainer asks for, those are the drawn ones."""
        asked = parts_of(self.standings.share_of(record.node, self._world.wall()))
        is_less = record.witnessed.share < asked
        return len(record.drawn if is_less else record.witnessed.window.places)

    def _wanted(self, record: WindowRecord) -> list[int]:
        """The places that are learnt from, by the worker's word; none of one that was not in
        standing both when it committed and now, or has named a later policy for its work."""
        window = record.witnessed.window
        is_learnt = (
            record.was_proven
            and self.standings.is_proven(record.node, self._world.wall())
            and self._promises.is_promised(record.node, record.version)
        )
        return [place for place in window.places if is_learnt and window.teaches(place)]

    def restore(self, commitment: Commitment) -> None:
        """A rejection was false: what its worker had earned before it counts again, unless
        something else has ended its standing since. The window stays void."""
        content, had = self._fallen.pop(commitment.node, (b"", 0.0))
        if content == commitment.content and had:
            self.standings.note_accepted(commitment.node, round(had), self._world.wall())
            self._is_dirty = True
            logger.info("standing_restored %s", commitment.node)

    async def _void(self, record: WindowRecord, reason: str, content: bytes = b"") -> None:
        """Nothing more is learnt from the window, nor from what waits of its worker, which is a
        newcomer again. One that had earned nothing leaves no line and no file. ``content`` is
        what was rejected, if a validator says so."""
        node, had = record.node, self.standings.earned(record.node, self._world.wall())
        self._fallen.pop(node, None)
        self._accepted.pop(node, None)
        if content and had:
            self._fallen[node] = content, had
        record.state = WindowState.VOID
        self.voided += 1
        self.standings.note_rejected(node)
        self._intake.drop_work_of(node)
        await self._durable.insist(partial(self._keep, record))
        if had:
            await self._tell_end(node, reason)

    async def _tell_end(self, node: PeerId, reason: str) -> None:
        """A worker that had earned something is a newcomer again."""
        self._intake.drop_work_of(node)  # what came since as well
        logger.warning("standing_ends %s: %s", node, reason)
        self._world.trace("standing.ends", node=str(node))
        await self._keep_standing()

    def _note(self, node: PeerId) -> bytes:
        share = self.standings.share_of(node, self._world.wall())
        chain, link = self._beacon.links.newest
        if share >= 1 or chain < 0:
            return b""
        note = StandingNote(self._run.id, node, parts_of(share), chain, link + NOTE_LINKS)
        return note.signed(self._world.signer).to_bytes()

    def _is_stale(self, version: PolicyVersion) -> bool:
        return self._node.shardcast.newest - version > self._run.terms.recipe.lag

    # Content.

    async def serve_content(self, stream: Stream) -> None:
        """A `StreamHandler`: one place of a settled window, one answer."""
        peer, world = stream.peer, self._world
        with self._seats.seat(peer) as seated:
            banned = bans_of(self._node).why_banned(peer)
            if banned or not seated or not self._node.may(peer, Capability.GENERATE):
                refusal = Refusal(banned or "not now", not banned)
                await send_frame(stream, encode_reply(refusal))
                return
            begun = await receive_frame(stream, MAX_WITNESSED)
            head = None if begun is None else await receive_head(stream, begun[1])
            if begun is None or head is None:
                return
            witnessed = decode_witnessed_untrusted(begun[0], world.verify)
            early = self._why_not(peer, witnessed, head)
            if early is not None:
                await send_frame(stream, encode_reply(early))
                return
            head.check_signature(world.verify)
            content = await self._receive(stream, head)
            if content is None:
                return
            submission = head.with_content_untrusted(content)
            record = self.book.find(witnessed.digest)
            if record is not None:
                record.owed.pop(submission.commitment.index, None)
            reply = await self._intake.take_from_worker(submission)
            is_rejected = isinstance(reply, SignedVerdict) and reply.verdict is Verdict.REJECTED
            if is_rejected and record is not None and record.state is not WindowState.VOID:
                await self._void(record, reply.reason)
            await send_frame(stream, encode_reply(reply))

    async def _receive(self, stream: Stream, head: SubmissionHead) -> bytes | None:
        with trio.CancelScope() as scope:
            seat = self._contents.take(stream.peer, self._world.now(), evict=scope.cancel)
            if seat is None:
                return None
            try:
                await send_frame(stream, SEND)
                return await receive_content(stream, head, seat)
            finally:
                self._contents.leave(seat)
        return None

    def _why_not(
        self, peer: PeerId, witnessed: WitnessedWindow, head: SubmissionHead
    ) -> SignedVerdict | Refusal | None:
        """What the head says by itself; None if the content is wanted."""
        commitment = head.commitment
        if commitment.node != peer or not witnessed.window.holds(commitment):
            raise BadMessage("a place is offered that is not of its worker's window")
        if self._is_stale(commitment.version):
            return self._give_up(commitment, STALE)
        record = self.book.find(witnessed.digest)
        if record is None or record.state is WindowState.OPEN:
            return Refusal("the window is not settled", True)
        if record.state is WindowState.VOID or commitment.index not in self._wanted(record):
            return self._give_up(commitment, "nothing is learnt from it")
        share = self.standings.share_of(peer, self._world.wall())
        if parts_of(share) > witnessed.share and commitment.index not in record.drawn:
            return self._give_up(commitment, "its worker is in doubt since it committed")
        if head.total > self._run.terms.work_size.max_submission:
            return self._give_up(commitment, "the submission is too long")
        return None

    def _give_up(self, commitment: Commitment, reason: str) -> SignedVerdict:
        return self._intake.give_up(commitment, reason)

    # The disk.

    def _path(self, witnessed: WitnessedWindow) -> str:
        return f"{WINDOWS}/{witnessed.digest.hex()}"

    async def _keep(self, record: WindowRecord) -> None:
        if not record.was_proven:
            return  # nothing is learnt from it, and names are free: it leaves no file
        value = [record.witnessed.to_bytes().hex(), record.was_proven, record.state.value]
        await keep(self._world.disk, self._path(record.witnessed), value)

    def _read(self, value: Any) -> WindowRecord:
        raw, was_proven, state = value
        witnessed = decode_witnessed_untrusted(bytes.fromhex(raw), self._world.verify)
        record = WindowRecord(witnessed, was_proven, self._world.now())
        record.state = WindowState(state)
        return record

    async def _keep_standing(self) -> None:
        self._is_dirty, self._kept_at = False, self._world.now()
        rows: Any = self.standings.to_list()
        try:
            await keep(self._world.disk, STANDING, rows)
        except StorageError as error:
            self._is_dirty = True
            logger.info("standing_not_kept: %s", error)


async def _nothing(*_: object) -> None: ...
