"""A member at work: inner steps, exchanges, records, recovery.

Theory of operation
-------------------
`RoundCore` decides; this carries out what it asks. Events wait in a queue, and one task feeds
them to the core and carries its effects out in order, so that what was signed is durable before
it is sent. Three things take long and have tasks of their own: the inner steps, an exchange
(one at a time: a later view ends the earlier one's), and putting a record in force.

A record whose state was computed here is in force at once. One that was decided without us is
caught up with by its mean, or by the state itself, fetched from all members that are heard and
judged by the record's digests. A joiner does the same: it needs nothing but the records.

A member whose owner pauses it finishes its round, says that it leaves, and is out at the next
border (`DilocoSession.rest`). It goes on following the records, so that it is back at the first
border after it was resumed.

A state is on disk before it is in force. If the disk refuses it, the run goes on from memory,
as others hold it too; the older state stays whole, and the next step tries again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Final

import trio

from p2p.concurrency import AutoResetEvent, Notifier, leaves
from p2p.errors import BadMessage, StorageError, WorkerDied
from p2p.host import Host
from p2p.identity import PeerId
from p2p.meter import StrangerMeter
from p2p.naming import printable
from p2p.node.admission import Capability
from p2p.node.node import Node
from p2p.offence import Offence
from p2p.patience import move_on_after_own
from p2p.wire import KI, MIB
from p2p.world import World
from roles.contract.core.diloco import DilocoTerms, Goal, Joining
from roles.diloco.config import DilocoConfig
from roles.diloco.core import events as ev
from roles.diloco.core.messages import (
    PIECES_PROTOCOL,
    ROUNDS_PROTOCOL,
    Outcome,
    Ready,
    Record,
    Sum,
    decode_message_untrusted,
    encode_message,
)
from roles.diloco.core.outer import Arithmetic, BadPiece
from roles.diloco.core.pieces import MAX_RATE
from roles.diloco.core.round import MOST_DOUBLINGS, RoundCore, genesis
from roles.diloco.core.windows import dealt, part_of
from roles.diloco.exchange import Blob, PieceClient, PieceFile, PieceServer, PiecesUnavailable
from roles.diloco.inner import FOLDER, InnerEngine
from roles.diloco.reduction import Reduction, ReductionFailed
from roles.diloco.store import MemberStore
from roles.engines.base import EngineError
from roles.shared.backoff import Backoff
from roles.shared.durable import Durable

logger = logging.getLogger(__name__)

ENOUGH: Final = 0.9
"""Share of a view's patience after which a member says from whom pieces are missing."""
RECENT: Final = 4
"""Newest records whose states are looked for on disk, where there are two as a rule."""
FETCHED: Final = "fetched"
"""Stands for the view in the name of a file that was fetched from other members."""
EXPORT: Final = f"{FOLDER}/export"
"""Folder of the exported model."""
MOST_WAITING: Final = 64 * MIB
"""Bytes of messages that wait for the core, while a full disk holds it up: a message of each
member. What does not fit is lost, as on a line, and said again."""
WRITTEN: Final = 6  # samples that are shown
ROUNDS_SHOWN: Final = 200
"""Newest rounds of which figures are kept for people."""


@dataclass(slots=True)
class RoundFigures:
    """Figures of a round, for people."""

    step: int
    digest: str
    """First digits of the state's digest."""
    members: int
    summed: int
    loss: float | None = None
    """Held-out loss in nats a token."""
    sample: str = ""
    """Text that the model writes after `MemberFigures.prompt`, in some rounds."""


@dataclass(slots=True)
class InnerProgress:
    """Inner steps of a round so far."""

    step: int = -1
    """Step of the record that these inner steps begin from."""
    steps: int = 0
    tokens: int = 0


@dataclass(slots=True)
class MemberFigures:
    """Figures of one member, for people."""

    tokens: int = 0
    inner_steps: int = 0
    training_loss: float | None = None
    computed: float = 0.0
    """Seconds spent on inner steps."""
    present: float = 0.0
    """Seconds from the start of the first inner step to the end of the newest."""
    views: int = 0
    """Rounds that were begun again."""
    recovered_from: int = 0
    """Peers that the last state was fetched from."""
    prompt: str = ""
    """The beginning of a text that is held out, for samples."""
    rounds: list[RoundFigures] = field(default_factory=list)

    @property
    def utilised(self) -> float:
        """Share of the time in which inner steps were computed."""
        return self.computed / self.present if self.present else 0.0


class RunMembers:
    """The peers that may be members by the run's newest edition: its trainers, or all
    admitted.
    """

    def __init__(self, node: Node, joining: Joining) -> None:
        self._node = node
        self._capability = Capability.PUBLISH if joining is Joining.NAMED else Capability.TRAIN

    def may_train(self, peer: PeerId) -> bool:
        """Return True if ``peer`` may be a member."""
        return self._node.may(peer, self._capability)

    def why_not(self, peer: PeerId) -> str:
        """Return the reason why ``peer`` may not be a member, with the remedy; empty if it
        may.
        """
        return self._node.book.why_not(peer, self._capability)


class DilocoSession:
    """One member's part in one run."""

    def __init__(
        self,
        world: World,
        host: Host,
        run: bytes,
        terms: DilocoTerms,
        config: DilocoConfig,
        engine: InnerEngine,
        founders: Sequence[PeerId],
        may_train: Callable[[PeerId], bool],
        meter: StrangerMeter | None = None,
    ) -> None:
        """``meter`` bounds the answers to peers that are no members of the run; None: no
        bound."""
        self._world, self._host, self._run, self._terms = world, host, run, terms
        self._config, self._engine, self._may_train = config, engine, may_train
        self._beginning = genesis(run, founders)
        self.history = self._beginning.digest
        """Digest that binds signatures to this history. An edition that begins anew with other
        founders has steps of the same numbers. Without the digest, statements of one history
        would convict their signers in the other.
        """
        self._arithmetic = Arithmetic(terms, engine.size)
        self._store = MemberStore(world, self.history, self._arithmetic, engine)
        self._durable = Durable(world, "trainer")
        self._meter = meter
        self.server = PieceServer(world, may_train, self._may_have)
        self.client = PieceClient(world, host)
        self.figures = MemberFigures()
        self.trouble = ""
        """Why the last inner steps came to nothing; empty if they did not."""
        self.is_over = False
        """True if the run has all its steps."""
        self._rests = False
        """True if the owner wants this member to begin no more rounds."""
        self.sample = ""
        """Text that the newest exported model writes."""
        self.exported = ""
        """Path of the newest exported model; empty before the first export."""
        self._is_finished = False
        """True if the final model was measured and exported."""
        self.core: RoundCore
        self._state: Blob
        self._events: deque[tuple[ev.Event, int]] = deque()
        self._waiting = 0
        """Bytes of messages among the events, each of which has its own beside it."""
        self._awake, self._news = AutoResetEvent(), Notifier()
        self._tentative: dict[bytes, Blob] = {}
        """States that were computed and have no record, by their outcome's digest."""
        self._means: dict[int, bytes] = {}  # roots of the newest means, by step
        self._states: dict[int, bytes] = {}  # and of the states that are served
        self._update_root = b""
        self._exchange: trio.CancelScope | None = None
        self.past_exchange: ev.Reduce | None = None
        """The last reduction that was computed from all contributions."""
        self._first_step_at: float | None = None
        self._ahead = InnerProgress()
        """Inner steps of the next round that were taken during an exchange."""
        self._continues = -1
        """The step whose round the engine's weights may go on with, where it changed none."""

    # For people.

    @property
    def step(self) -> int:
        """Step of the state that is in force here; -1 before the session is open."""
        return self.core.held if hasattr(self, "core") else -1

    def health(self) -> dict[str, object]:
        """Return figures for the health page, as plain values."""
        if not hasattr(self, "core"):
            return {"algorithm": "diloco", "step": -1, "steps": self._terms.outer_steps}
        core, now = self.core, self._world.now()
        return {
            "algorithm": "diloco",
            "step": core.held,
            "round": core.held,
            "steps": self._terms.outer_steps,
            "done": self.is_over,
            "finished": self._is_finished,
            "is_member": core.is_member,
            "is_stalled": core.is_stalled,
            "rests": self._rests,
            "now": self.now,
            "members": [str(peer) for peer in core.members],
            "heard": len(core.live(now)),
            "convicted": [str(peer) for peer in core.convicted],
            "digest": core.record.outcome.state_root.hex()[:16],
            "sent": self.server.sent,
            "received": self.client.received,
            "utilised": round(self.figures.utilised, 4),
            "waits_for_disk": self._durable.waiting,
            "weights": self._engine.size,
            "sample": self.sample,
            "parallel": self._parallel(),
            "written": [
                [f"round {one.step}: {self.figures.prompt}", one.sample, one.loss or 0.0]
                for one in self.figures.rounds
                if one.sample
            ][-WRITTEN:],
            **asdict(self.figures),
        }

    def _parallel(self) -> int:
        """Return the bytes that averaging gradients in a ring would have sent: 2 (n - 1) / n
        values of 4 bytes a weight and step."""
        members = max(1, *(one.members for one in self.figures.rounds), len(self.core.members))
        steps = self.figures.inner_steps
        return round(8 * (members - 1) / members * self._engine.size * steps)

    @property
    def now(self) -> str:
        """Return this member's current activity in words."""
        if not hasattr(self, "core"):
            return "opening"
        if self._rests:
            return "leaving after this round" if self.core.is_member else "resting"
        if self.core.is_stalled:
            return "waiting: too few members are heard for a majority"
        if self.trouble:
            return f"learning nothing: {self.trouble}"
        return "the run has all its rounds" if self.is_over else "learning"

    # Life.

    async def work_forever(self) -> None:
        """Take part until the run has its steps, then serve what was learnt until cancelled."""
        await self._open()
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            with (
                self._host.serving(PIECES_PROTOCOL, self.server.serve),
                self._host.receiving(ROUNDS_PROTOCOL, self._on_message),
            ):
                nursery.start_soon(self._ring)
                nursery.start_soon(self._train_forever)
                if self.core.record.step > self.core.held:
                    nursery.start_soon(self._put_in_force, self.core.record)
                await self._pump()

    async def _open(self) -> None:
        """Open the state that an earlier life left, or begin at record 0."""
        world, terms, store = self._world, self._terms, self._store
        records = await store.records(self._beginning, world.verify, terms.anchor)
        held, kept = -1, await store.kept()
        found = await store.state(records[1:][-RECENT:])
        if found is None and len(records) == 1:
            file = store.state_file(0, 0)
            digests = await self._durable.insist(partial(self._engine.begin, file.path))
            found = 0, Blob(tuple(digests), file)
        if found is not None:
            held, self._state = found
            self.is_over = held >= terms.outer_steps
        await self._engine.restore(held)
        self.core = RoundCore(
            world.signer,
            terms.rounds(),
            self._arithmetic.grid,
            run=self.history,
            records=records,
            held=held,
            kept=kept,
            verify=world.verify,
            may_join=self._may_train,
            anchor=terms.anchor,
            now=world.now(),
        )
        if self._rests:
            self._feed(ev.Leave())
        if held >= 0:
            self._serve_state(held, self._state)
        ready = self.core.round.ready
        if ready is not None:
            await self._take_up(ready)
        for step in (self.core.record.step, self.core.record.step + 1):
            for mean in await store.found("mean", step):
                self.server.offer(mean)
        vote = self.core.round.vote
        if vote is not None:
            for state in await store.found("state", vote.step):
                if state.root == vote.outcome.state_root:
                    self._tentative[vote.outcome.digest] = state
        world.sometimes("diloco/went on from a checkpoint", held > 0)
        logger.info("diloco_opened step=%d held=%d", self.core.record.step, held)

    async def _take_up(self, ready: Ready) -> None:
        """Serve the update that an earlier life has signed. Without it this member skips the
        step."""
        for update in await self._store.found("update", ready.step):
            if update.digests == ready.digests:
                self._update_root = self.server.offer(update)
                return
        logger.warning("diloco_update_lost step=%d: this step is sat out", ready.step)

    def rest(self, rests: bool) -> None:
        """Leave at the next border, or take part again."""
        if rests is not self._rests:
            self._rests = rests
            if hasattr(self, "core"):
                self._feed(ev.Leave() if rests else ev.Stay())

    # Events and effects.

    def _on_message(self, peer: PeerId, data: bytes) -> None:
        if not self._may_train(peer):
            return  # it may have a newer edition of the run than we
        message, size = decode_message_untrusted(data), len(data) + KI  # as an object has
        if self._waiting + size > MOST_WAITING:
            return
        self._waiting += size
        self._feed(ev.Received(peer, message), size)

    def _may_have(self, peer: PeerId, size: int) -> bool:
        """Return True if ``peer`` is a member of the DiLoCo run, or the meter has room for it.
        Admission is no criterion, since an admitted peer may make any number of keys."""
        meter = self._meter
        return meter is None or peer in self.core.members or meter.allows(peer, size)

    def _feed(self, event: ev.Event, size: int = 0) -> None:
        self._events.append((event, size))
        self._awake.set()

    async def _ring(self) -> None:
        while True:
            await self._world.sleep_until(self.core.next_deadline)
            self._feed(ev.Tick())
            await self._news.wait()

    async def _pump(self) -> None:
        """Feed events to the core, and carry out its effects in order."""
        while True:
            while self._events:
                event, size = self._events.popleft()
                self._waiting -= size
                try:
                    effects = self.core.handle(event, self._world.now())
                except Exception as error:
                    if not isinstance(event, ev.Received):
                        raise
                    effects = self._blame(event, error)
                for effect in effects:
                    await self._carry_out(effect)
                self._news.notify_all()
            await self._awake.wait()

    def _blame(self, event: ev.Received, error: Exception) -> list[ev.Effect]:
        """Return the effects that remain after a peer's message raised an error; penalise the
        peer.

        A bug of ours would otherwise end every member that the message reaches.
        """
        if isinstance(error, BadMessage):
            self._host.penalise(event.peer, Offence.FORGED.points, str(error))
            return []
        kind = type(event.message).__name__
        logger.error("diloco_crashed by=%s kind=%s", event.peer, kind, exc_info=error)
        self._host.penalise(event.peer, Offence.MALFORMED.points, f"a {kind} that crashes")
        return self.core.unfinished

    async def _carry_out(self, effect: ev.Effect) -> None:
        match effect:
            case ev.Send(peer, message):
                data = encode_message(message)
                if self._may_have(peer, len(data)):
                    self._host.send(peer, ROUNDS_PROTOCOL, data)
            case ev.Keep():
                self.figures.views += effect.view > 0 and effect.vote is None
                await self._durable.insist(partial(self._store.keep, effect))
            case ev.Reduce():
                self._end_exchange()
                self._nursery.start_soon(self._reduce, effect)
            case ev.Commit(records):
                await self._durable.insist(partial(self._store.add, records))
                record = records[-1]
                self._end_exchange()
                self.server.forget_before(record.step + 1, 0)
                self._nursery.start_soon(self._put_in_force, record)
            case ev.Convict(fault):
                logger.warning(
                    "diloco_convicted peer=%s for=%s", fault.culprit, type(fault).__name__
                )
                self._host.penalise(fault.culprit, 100.0, type(fault).__name__)
            case ev.Stalled(heard, members):
                logger.error(
                    "diloco_stalled: %d of %d members are heard, no majority. This node waits"
                    " for them, or for an edition of the run",
                    heard,
                    members,
                )
            case ev.Resumed():
                logger.info("diloco_resumed: a majority is heard again")

    # The exchange.

    def _end_exchange(self) -> None:
        if self._exchange is not None:
            self._exchange.cancel()

    async def _reduce(self, request: ev.Reduce) -> None:
        def heard(said: Sum) -> None:
            self._feed(ev.Received(said.author, said))

        reduction = Reduction(
            self._world, self._world.signer, self._world.verify, self.history, self._engine,
            self.server, self.client, request,
            self._store.mean_file(request.plan.step, request.view),
            lambda fault: self._feed(ev.Found(fault)), heard,
        )  # fmt: skip
        vote = self.core.round.vote
        voted = None if vote is None else self._tentative.get(vote.outcome.digest)
        self._tentative = {vote.outcome.digest: voted} if vote and voted else {}
        with suppress(StorageError):
            await self._store.forget_views(request.plan.step, request.view, voted)
        doublings = min(request.view, MOST_DOUBLINGS)
        suspects: list[PeerId] = []
        enough = ENOUGH * self._terms.patience * 2.0**doublings
        with move_on_after_own(self._world, enough) as scope:
            self._exchange = scope
            try:
                await self._compute(reduction, request)
            except* ReductionFailed as failed:
                for one in leaves(failed):
                    assert isinstance(one, ReductionFailed)
                    suspects += one.suspects
            except* (StorageError, EngineError) as failed:
                self._not_saved(request.plan.step, next(leaves(failed)))
            else:
                return
        if self._exchange is scope:
            self._world.sometimes("diloco/an exchange failed", True)
            found = tuple(dict.fromkeys(suspects)) or reduction.suspects
            self._feed(ev.ReduceFailed(request.view, found))

    async def _compute(self, reduction: Reduction, request: ev.Reduce) -> None:
        carried, step = request.carried, request.plan.step
        if carried is None:
            digests = await reduction.mean()
            self.past_exchange = request
        else:
            digests = await reduction.carried(carried)
        mean, file = reduction.file, self._store.state_file(step, request.view)
        try:
            state = await self._advanced(mean, file, step)
        except BadPiece as bad:
            raise await reduction.unreadable(bad.index) from bad
        # whatever is decided is on the disks of a majority
        await self._world.disk.fsync(mean.path)
        root = self.server.offer(Blob(digests, mean))
        outcome = Outcome(request.plan, root, state.root)
        self._tentative[outcome.digest] = state
        self._feed(ev.Reduced(request.view, outcome))

    async def _advanced(self, mean: PieceFile, file: PieceFile, step: int) -> Blob:
        """Take the outer step against a mean and return the new state.

        Raises:
            BadPiece: The mean cannot be decoded.
            StorageError: The disk failed.
        """
        before = self._state.file.path
        digests = await self._engine.advance(before, mean.path, file.path, step)
        return Blob(tuple(digests), file)

    def _not_saved(self, step: int, error: BaseException) -> None:
        logger.warning("diloco_not_saved step=%d: %s; it is tried again", step, error)

    # Records come into force.

    async def _put_in_force(self, record: Record) -> None:
        """Compute, catch up or recover. Repeat until it succeeds or a later record is there."""
        backoff = Backoff(self._world, "diloco/catch up")
        while self.core.record is record and self.core.held < record.step:
            state = self._tentative.get(record.digest)
            if state is None:
                try:
                    state = await self._fetch_state(record)
                except PiecesUnavailable as error:
                    logger.info("diloco_behind step=%d: %s", record.step, error)
                except (StorageError, EngineError) as error:
                    self._not_saved(record.step, error)
            if state is not None and self.core.record is record:
                await self._begin(record, state)
                return
            await backoff.wait()

    async def _fetch_state(self, record: Record) -> Blob:
        """Return the state of a record: from disk, from the mean, or fetched whole.

        Raises:
            PiecesUnavailable: No peer gave it.
            StorageError: The disk failed.
        """
        found = await self._store.state([record])
        if found is not None:
            return found[1]
        sources = self.core.holders(record.step, self._world.now())
        self.figures.recovered_from = len(sources)
        state = await self._caught_up(record, sources)
        if state is None:
            file, root = self._store.state_file(record.step, FETCHED), record.outcome.state_root
            fetch = partial(self.client.blob, root, sources, file.grid.pieces)
            state = Blob(await self._store.fetched(file, fetch), file)
            self._world.sometimes("diloco/fetched a whole state", True)
        return state

    async def _caught_up(self, record: Record, sources: Sequence[PeerId]) -> Blob | None:
        """Return the state computed from the step's mean, which is an eighth of it or less.

        None if the mean is not enough.
        """
        if self.core.held != record.step - 1 or not record.step:
            return None
        mean = self._store.mean_file(record.step, FETCHED)
        file = self._store.state_file(record.step, f"after-{FETCHED}")
        fetch = partial(self.client.blob, record.outcome.sum_root, sources, mean.grid.pieces)
        try:
            digests = await self._store.fetched(mean, fetch)
            state = await self._advanced(mean, file, record.step)
        except (PiecesUnavailable, BadPiece):
            return None
        if state.root != record.outcome.state_root:
            return None
        self.server.offer(Blob(digests, mean))
        self._world.sometimes("diloco/caught up by a mean", True)
        return state

    async def _begin(self, record: Record, found: Blob) -> None:
        """Put a state in force: serve it, and forget older states."""
        self._state = found
        self._tentative.clear()
        self._means[record.step] = record.outcome.sum_root
        self._serve_state(record.step, found)
        self._feed(ev.Held(record.step))
        self._world.trace("diloco_step", step=record.step, state=record.outcome.state_root)
        self._note(record)
        if record.step >= self._terms.outer_steps:
            self.is_over = True
        with suppress(StorageError):  # what stays is removed at the next step
            await self._store.tidy(record.step, found, self._config.means_kept)

    def _serve_state(self, step: int, found: Blob) -> None:
        kept = self._config.means_kept
        self._states[step] = self.server.offer(found)
        self._states = {one: root for one, root in self._states.items() if one > step - 2}
        self._means = {one: root for one, root in self._means.items() if one > step - kept}
        roots = [*self._states.values(), *self._means.values(), self._update_root]
        self.server.keep_only(roots)

    def _note(self, record: Record) -> None:
        plan = record.outcome.plan
        digest = record.outcome.state_root.hex()[:16]
        figures = RoundFigures(record.step, digest, len(plan.members), len(plan.summed))
        self.figures.rounds = [*self.figures.rounds[1 - ROUNDS_SHOWN :], figures]

    # Inner steps.

    async def _train_forever(self) -> None:
        backoff = Backoff(self._world, "diloco/diverged")
        while True:
            while not self._may_begin():
                await self._news.wait()
            record = self.core.record
            try:
                await self._phase(record)
                self.trouble = ""
            except WorkerDied as error:
                logger.error("engine_died %s; the round is begun again", error)
                self._ahead, self._continues = InnerProgress(), -1
                await self._engine.restore(record.step)
            except EngineError as error:
                logger.error("diloco_diverged step=%d: %s", record.step, error)
                self.trouble = printable(str(error))
                await backoff.wait()
            except StorageError as error:
                logger.error("diloco_waits_for_disk step=%d: %s", record.step, error)
                await backoff.wait()

    def _may_begin(self) -> bool:
        core = self.core
        if self.is_over and not self._is_finished:
            return core.held == core.record.step
        is_free = core.round.ready is None and not self._rests
        return core.is_member and is_free and not self.is_over

    def _is_current(self, record: Record) -> bool:
        return self.core.record is record

    async def _phase(self, record: Record) -> None:
        """Take the inner steps of a round and encode its update; give up when the round is
        over.
        """
        ahead, span = self._ahead, slice(0, self._engine.size)
        if self._continues == record.step and not self.is_over:
            span = self._arithmetic.fragments.span(record.step)
        self._ahead, self._continues = InnerProgress(), -1
        is_ahead = bool(ahead.steps) and ahead.step == record.step and not self.is_over
        if not is_ahead:
            ahead = InnerProgress(record.step)
        await self._engine.load(self._state.file.path, span, is_ahead=is_ahead)
        await self._measure(record)
        every = self._config.export_every
        if self.is_over or (every and record.step and record.step % every == 0):
            await self._export(record)
            self.figures.prompt, self.sample = await self._engine.write(160)
            for figures in self.figures.rounds:
                if figures.step == record.step:
                    figures.sample = self.sample
        if self.is_over:
            self._is_finished = True
            return
        window = part_of(
            record,
            self._world.signer.peer_id,
            dealt(self.core.records, self._terms.phase_windows),
            self._terms.phase_windows,
        )
        await self._inner_steps(record, ahead, window)
        if not ahead.tokens or not self._is_current(record):
            return
        ready = await self._encode(record, ahead.tokens)
        if not self._is_current(record):
            return
        self._continues = record.step + 1
        self._feed(ev.Trained(ready))
        while self._is_current(record) and self.core.round.ready is None:
            await self._news.wait()
        has_next = record.step + 1 < self._terms.outer_steps and not self._rests
        if self._terms.overlap and has_next:
            # The next record is not there yet: these windows are this member's if all stay.
            self._ahead = InnerProgress(record.step + 1)
            behind = window + len(record.members) * self._terms.phase_windows
            await self._inner_steps(record, self._ahead, behind)

    async def _export(self, record: Record) -> None:
        """The model as a folder in Hugging Face's layout, with a card; a disk that refuses it
        costs the export alone."""
        card = model_card(self._run, record, self.figures, self._terms)
        try:
            await self._engine.export(EXPORT)
            await self._world.disk.replace(f"{EXPORT}/README.md", card.encode())
            self.exported = self._world.disk.locate(EXPORT)
        except StorageError as error:
            logger.warning("diloco_not_exported step=%d: %s", record.step, error)

    async def _measure(self, record: Record) -> None:
        every = self._config.evaluate_every
        if not every or (record.step % every and not self.is_over):
            return
        loss = await self._engine.loss()
        for figures in self.figures.rounds:
            if figures.step == record.step:
                figures.loss = loss
        self._world.trace("diloco_loss", step=record.step, loss=loss)

    async def _inner_steps(self, record: Record, done: InnerProgress, window: int) -> None:
        """Take the remaining steps of a round, in turns of about a second, while ``record`` is
        the newest."""
        terms, figures, turn = self._terms, self.figures, 1
        began = self._world.now()
        self._first_step_at = began if self._first_step_at is None else self._first_step_at
        while done.steps < terms.inner_steps and self._is_current(record):
            if terms.round_seconds and self._world.now() - began >= terms.round_seconds:
                break
            count = min(turn, terms.inner_steps - done.steps)
            at = self._world.now()
            phase = await self._engine.train(
                done.step * terms.inner_steps + done.steps,
                count,
                window + done.steps * terms.sequences,
            )
            seconds = self._world.now() - at
            figures.computed += seconds
            figures.present = self._world.now() - self._first_step_at
            figures.training_loss = phase.loss
            figures.inner_steps += phase.steps
            figures.tokens += phase.tokens
            done.steps, done.tokens = done.steps + phase.steps, done.tokens + phase.tokens
            turn = max(1, round(count * self._config.turn_seconds / max(seconds, 1e-3)))

    async def _encode(self, record: Record, tokens: int) -> Ready:
        """Encode the update, offer it to peers, and return its `Ready`. The update and the
        optimiser's state are on disk before the `Ready` is signed."""
        file = self._store.update_file(record.step + 1)
        encode = partial(self._engine.encode, file.path, record.step + 1)
        digests, norms = await self._durable.insist(encode)
        self._update_root = self.server.offer(Blob(tuple(digests), file))
        return Ready(
            record.step + 1,
            0,
            record.digest,
            tokens,
            min(self.server.rate, MAX_RATE),
            tuple(norms),
            tuple(digests),
            author=self._world.signer.peer_id,
        )


def model_card(run: bytes, record: Record, figures: MemberFigures, terms: DilocoTerms) -> str:
    """Return the model card of the exported folder, with the run and its losses."""
    curve = "\n".join(
        f"| {one.step} | {one.members} | {one.summed} | {one.loss:.4f} |"
        for one in figures.rounds
        if one.loss is not None
    )
    most, is_text = record.step * terms.phase_tokens, terms.goal is Goal.TEXT
    source = ", ".join(terms.corpora) if is_text else "rewards"
    return (
        f"# Round {record.step} of run {run.hex()}\n\n"
        f"Trained by DiLoCo on {source}: {terms.outer_steps} rounds of up to"
        f" {terms.inner_steps} inner steps ({terms.inner.value}), updates in"
        f" {terms.codec.value}. At most {most:,} tokens a member; {figures.tokens:,} by the one"
        " that wrote this.\n\n"
        f"State: `{record.outcome.state_root.hex()}`, signed by {len(record.signatures)}"
        " members.\n\n"
        + "".join(f"- {peer}\n" for peer in record.members)
        + f"\n| round | members | updates | held-out loss |\n|---|---|---|---|\n{curve}\n"
    )
