"""The trainer's side of `/shoal/work/1.0.0`: windows in, answers out, content to the scorer.

All judgement is the gate's (`roles.trainer.core.gate`): who is in standing, what is wanted, who
scores, what follows. The desk reads and checks what peers send, the cheap checks first, has the
scorer look at content, and writes the gate's rows to the disk before any peer is answered. What
is scored for a peer is scored by a task of the desk's own: a peer that goes away stops nothing.

Deadlines count only time in which the desk served and had room: a trainer that was stopped,
that rests, or that has no room holds nothing against anybody.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import trio

from p2p.bounded import BoundedDict, RateLimit
from p2p.concurrency import Notifier
from p2p.errors import BadMessage
from p2p.host import Stream, send_frame
from p2p.identity import PeerId
from p2p.ledger import Ledger
from p2p.node.admission import Capability
from p2p.node.node import Node
from p2p.shardcast.manifest import PolicyVersion
from proofs.checks import Verdict
from roles.contract import Run, run_of
from roles.protocol.core.account import Account
from roles.protocol.core.answer import (
    MAX_REQUEST,
    AccountRequest,
    Answer,
    ContentRequest,
    ContestRequest,
    Refused,
    Reply,
    VerdictRequest,
    WindowRequest,
    Word,
    encode_reply,
)
from roles.protocol.core.conviction import Conviction, convict
from roles.protocol.core.findings import Finding, Weight
from roles.protocol.core.statements import BAN_KIND, LIE_KIND, encode_accusation
from roles.protocol.core.terms import terms_digest
from roles.protocol.core.verdict import SignedVerdict
from roles.protocol.core.window import (
    Claim,
    Commitment,
    SignedWindow,
    Submission,
    Window,
    content_digest,
    decode_submission_untrusted,
)
from roles.protocol.door import Door
from roles.protocol.reading import (
    receive_frame,
)
from roles.protocol.request import PATIENCE
from roles.protocol.scorer import (
    BY_CONTENT,
    Ruling,
    Scorer,
    Scoring,
    finding_against,
    replay_all,
)
from roles.protocol.seats import STRANGERS
from roles.protocol.standing import RoleStanding
from roles.protocol.stats import ScoringStats
from roles.shared.durable import Durable
from roles.trainer.account import SHORTEST_PAUSE
from roles.trainer.core.demand import Demand
from roles.trainer.core.gate import (
    DUE,
    Audited,
    Consequence,
    Gate,
    Situation,
    Wish,
)
from roles.trainer.core.records import Assignment
from roles.trainer.gate_files import TICK, GateFiles
from roles.trainer.intake import Intake
from roles.trainer.taken import TakenPlace

logger = logging.getLogger(__name__)

EVIDENCE: Final = "trainer/evidence"
"""Folder of the proofs of bans and convictions, each named by the digest of its commitment."""
MAX_EVIDENCE: Final = 256
"""Most proofs of bans that are kept, the newest ones. Proofs against validators are kept for
ever."""
MAX_SCORING: Final = 64
"""Most places that wait for the scorer, besides those whose content is on its way."""
NEWCOMERS_SCORING: Final = MAX_SCORING // 8
"""Most places of newcomers that may wait for the scorer once any name is in standing. While
work of names in standing waits, only one may, since all are scored in turn."""
HOLD: Final = 15.0
"""Seconds that a request for work is held open until a place is wanted."""
SAID: Final = 4096
"""Number of the trainer's own verdicts that are kept for workers whose answer was lost."""
EXPIRE_EVERY: Final = 5
"""Ticks between two checks for overdue places."""
SHOWN: Final = 64
"""Most bans that a status lists."""
QUESTIONS_AT_ONCE: Final = 8.0
RESTS: Final = Refused("the trainer rests", True)
STARTS: Final = Refused("the trainer starts", True)
FULL: Final = Refused("the trainer has no room for more content now", True)


class WorkDesk:
    """The trainer's service for workers and validators."""

    def __init__(
        self,
        node: Node,
        gate: Gate,
        records: GateFiles,
        intake: Intake,
        scorer: Scorer,
        standing: RoleStanding,
        ledger: Ledger,
        durable: Durable,
        account_of: Callable[[PeerId, bool], Account],
        capacity: int,
    ) -> None:
        self.gate = gate
        self.scorer = scorer
        self._node = node
        self._world = node.world
        self._records = records
        self._intake = intake
        self._standing = standing
        self._ledger = ledger
        self._durable = durable
        self._account_of = account_of
        trust, recipe = standing.run.terms.trust, standing.run.terms.sampling
        self._demand = Demand(capacity, recipe.submission, trust.window)
        self.stats = ScoringStats()
        """Counts of the results of the trainer's own scorer."""
        self._door = Door(node, self.stats, strangers=STRANGERS)
        self._asking: BoundedDict[PeerId, RateLimit] = BoundedDict(1024)
        self._scoring: dict[bytes, Scoring] = {}
        self._newcomers: dict[bytes, None] = {}
        """Places of newcomers whose content is on its way or with the scorer."""
        self._coming: dict[bytes, tuple[int, float]] = {}
        """Maps the commitment of each wanted place that is not yet scored to the number of its
        groups that teach and the time at which it was asked for."""
        self._audits: dict[bytes, trio.Event] = {}
        """Audits under way: each event is set when the verdict has been repeated."""
        self._said: BoundedDict[bytes, SignedVerdict] = BoundedDict(SAID)
        self._answered: BoundedDict[bytes, None] = BoundedDict(SAID)
        """Digests of the windows that were counted."""
        self._newcomers_busy = 0.0
        """Seconds that the scorer spent on newcomers, decaying with time."""
        self._nursery: trio.Nursery | None = None
        self._bans: dict[str, None] = {}
        """Paths of the proofs of bans, oldest first."""
        self._freed = Notifier()
        self.banned: BoundedDict[str, dict[str, object]] = BoundedDict(SHOWN)
        """The names banned most recently by this process: how often, until when, and why."""
        self.windows = 0
        """Windows answered by this process."""
        self.repeated = 0
        """Number of validators' verdicts that were repeated."""
        self.lies = 0
        """Number of repeated verdicts that the replay contradicts."""

    # What the session calls.

    async def work_forever(self) -> None:
        """Score incoming content and enforce deadlines until cancelled.

        Raises:
            WorkerDied: The learner's engine has died.
        """
        for name in await self._world.disk.list(EVIDENCE):
            if name.startswith(BAN_KIND):
                self._bans[f"{EVIDENCE}/{name}"] = None
        for commitment in self.gate.undecided():
            if self._intake.has_taken(commitment):  # killed before the gate's row was written
                self.gate.stood(commitment, self.situation())
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self.scorer.work_forever)
                nursery.start_soon(self._tick_forever)
                nursery.start_soon(self._tell_consumed)
                await trio.sleep_forever()
        finally:
            self._nursery = None

    @property
    def is_open(self) -> bool:
        """True while the desk accepts work."""
        return self._nursery is not None

    async def _tell_consumed(self) -> None:
        """Wake workers that wait for more demand whenever a step has taken groups."""
        while True:
            await self._intake.wait_change()
            self._freed.notify_all()

    async def _tick_forever(self) -> None:
        ticks, before = 0, self._world.now()
        while True:
            await self._world.sleep(TICK)
            now = self._world.now()
            if not self._standing.why_not and self.has_room:
                await self._records.note_served(now - before, ticks)
            before, ticks = now, ticks + 1
            self._newcomers_busy *= 0.99
            old = now - DUE
            self._coming = {key: one for key, one in self._coming.items() if one[1] > old}
            if ticks % EXPIRE_EVERY == 0:
                self._node.host.protect("work", self.stats.records.workers)
                for found in self.gate.expire(self.situation()):
                    if isinstance(found, Audited):
                        await self._follow_audit(found)
                    else:
                        await self._follow(found)
                await self._records.write(self.gate)
                self._freed.notify_all()

    @property
    def has_room(self) -> bool:
        """True if content is accepted now. While it is False, workers are not blamed for
        delays."""
        return not self._intake.is_over and len(self._scoring) < MAX_SCORING

    @property
    def liars(self) -> dict[PeerId, str]:
        """Maps each validator that may not score, for good or for now, to the reason."""
        return self.gate.passed_over(self.situation())

    def health(self) -> dict[str, object]:
        """Return counts for people and dashboards."""
        scorer = self.scorer
        return {
            "windows": self.windows,
            **self.stats.health(),
            "replayed": self.repeated,
            "lies": self.lies,
            "liars": {str(who): why for who, why in self.liars.items()},
            "groups_scored": scorer.groups,
            "scorer_queue": scorer.waiting,
            "scorer_oldest": round(scorer.oldest, 1),
            "scorer_busy": round(scorer.busy_share, 3),
            "bans": dict(self.banned),
        }

    def note_policy(self) -> None:
        """Wake the workers that wait for demand, because a new version is out."""
        self._freed.notify_all()

    def situation(self) -> Situation:
        """Return the situation that the gate decides by, from the newest edition."""
        run, is_forked = self._run, self._node.ledgers.is_forked
        busy = self._newcomers_busy / 100  # of the last 100 s, by the fading
        return Situation(
            served=self._records.served,
            wall=self._world.wall(),
            newest=self._node.shardcast.newest,
            terms=terms_digest(run),
            validators=tuple(one for one in run.terms.validators if not is_forked(one)),
            trust=run.terms.trust,
            lag=run.terms.sampling.lag,
            newcomers_load=busy,
        )

    @property
    def _run(self) -> Run:
        return run_of(self._node)

    def is_listed(self, peer: PeerId) -> bool:
        """Return True if the run file names this worker, or it holds the owner's invite."""
        run, guests = self._run, self._node.book.guests
        return peer in run.terms.admission.allowed or guests.may(run, peer, Capability.GENERATE)

    # Requests.

    async def serve(self, stream: Stream) -> None:
        """Handle one request with one reply; a `StreamHandler`."""
        await self._door.serve(stream, self._answer, is_known=self._is_known(stream.peer))

    def _is_known(self, peer: PeerId) -> bool:
        if peer in self._run.terms.validators:
            return True
        return self.gate.standing(
            peer, self.situation(), is_listed=self.is_listed(peer)
        ).is_in_standing

    async def _answer(self, stream: Stream, request: object, begun: bytes) -> Reply | None:
        match request:
            case AccountRequest():
                return self._account(stream.peer, request.with_curve)
            case _ if not self.is_open:
                return STARTS
            case WindowRequest(signed, _):
                return await self._take_window(stream.peer, signed)
            case ContentRequest():
                return await self._take_content(stream, request, begun)
            case VerdictRequest(verdict):
                return await self._take_verdict(stream, verdict, begun)
            case ContestRequest(verdict, _):
                return await self._take_contest(stream, verdict, begun)
        raise BadMessage("no request for a trainer")

    def _account(self, peer: PeerId, with_curve: bool) -> Reply | None:
        limit = self._asking.get(peer) or RateLimit(1 / SHORTEST_PAUSE, QUESTIONS_AT_ONCE)
        self._asking.renew(peer, limit)
        return (
            self._account_of(peer, with_curve) if limit.allows(1.0, self._world.now()) else None
        )

    # Windows.

    async def _take_window(self, peer: PeerId, signed: SignedWindow) -> Reply:
        window = signed.window
        refused = self._refuse_window(peer, window)
        if refused is not None:
            return refused
        if not signed.has_valid_signature(self._world.verify):
            raise BadMessage("a window's signature is not its worker's")
        now, is_listed = self.situation(), self.is_listed(peer)
        said = self.gate.commit(signed, now, is_listed=is_listed)
        if isinstance(said, Refused):
            return said
        await self._records.write(self.gate)
        if window.contents:
            self._note_window(window, said)
        return await self._answer_window(window, said)

    def _refuse_window(self, peer: PeerId, window: Window) -> Refused | None:
        """Return why a window is refused, by the checks that need no signature; None if it
        passes."""
        run, node, refuse = self._run, self._node, self._door.refuse
        if window.node != peer:
            return refuse("another node", "a window comes from the node that signed it")
        if window.run != run.id:
            return refuse(
                "another run",
                f"the window is of run {window.run.hex()[:12]}, this trainer's is"
                f" {run.id.hex()[:12]}: start the node with that run",
            )
        if self._standing.why_not:
            return RESTS
        if not node.may(peer, Capability.GENERATE):
            return refuse("not admitted", node.book.why_not(peer, Capability.GENERATE))
        if node.lacks_work(peer):
            return refuse("no work stamp", run.lacks_stamp, retry=True)
        if self._intake.is_over and window.contents:
            return refuse("over", "the run has all its steps")
        newest = node.shardcast.newest
        if window.version > newest:
            return refuse("policy to come", f"the newest policy is {newest}", retry=True)
        if window.terms != terms_digest(run):
            return refuse(
                "other terms",
                "it was made under terms that do not hold any more: an edition of the run file"
                " has changed them",
                retry=node.book.hint(peer) and not window.contents,
            )
        return self._refuse_places(window, newest) if window.contents else None

    def _refuse_places(self, window: Window, newest: PolicyVersion) -> Refused | None:
        run, shardcast, refuse = self._run, self._node.shardcast, self._door.refuse
        if newest - window.version > run.terms.sampling.lag:
            return refuse("too old", "its policy has become too old")
        if not shardcast.holds(window.version):
            return refuse("not held", "its policy is not held by the trainer")
        if window.policy != shardcast.manifest(window.version).weights_digest:
            return refuse("another policy", "it is of another policy than this trainer's")
        groups = len(window.claims) // len(window.contents)
        if groups != run.terms.sampling.submission:
            return refuse(
                "another shape",
                f"a place has {run.terms.sampling.submission} groups, not {groups}",
            )
        if len(window.contents) > run.terms.trust.window:
            return refuse("too long", f"a window has {run.terms.trust.window} places at most")
        return None

    def _note_window(self, window: Window, said: Assignment) -> None:
        if window.digest in self._answered:
            return
        self._answered[window.digest] = None
        self.windows += 1
        now = self._world.now()
        if said.is_newcomer:
            return
        self._demand.note_committed(window.node, len(window.contents), now)
        for index in window.places:
            teaching = sum(claim is not Claim.ALIKE for claim in window.claims_of(index))
            self._demand.note_place(teaching)
            commitment = window.commitment(index)
            if index in said.wanted and not self._is_settled(commitment):
                self._coming[commitment.digest] = teaching, now
        unwanted = len(window.contents) - len(said.wanted)
        self._intake.note_unsent(window.node, unwanted)

    def _is_settled(self, commitment: Commitment) -> bool:
        return commitment.digest in self._said or self._intake.has_taken(commitment)

    async def _answer_window(self, window: Window, said: Assignment) -> Answer:
        wanted_next = self._wanted_next(window.node, said)
        if not window.contents:
            with trio.move_on_after(HOLD):
                while not wanted_next and not self._intake.is_over:
                    await self._freed.wait()
                    wanted_next = self._wanted_next(window.node, said)
        return Answer(
            trainer=self._node.peer_id,
            window=window.digest,
            wanted=said.wanted,
            scorer=said.scorer,
            due=round(DUE),
            version=self._node.shardcast.newest,
            wanted_next=wanted_next,
            is_newcomer=said.is_newcomer,
            stood=said.stood,
            owed=said.owed,
            account=self._account_of(window.node, False),
        ).signed(self._world.signer)

    def _wanted_next(self, worker: PeerId, said: Assignment) -> int:
        run = self._run
        if self._intake.is_over or self._standing.why_not:
            return 0
        if said.is_newcomer:
            return min(run.terms.trust.window, said.owed)
        return self._demand.ask(worker, self._stock, self._world.now())

    @property
    def _stock(self) -> int:
        """Return the number of groups that wait for a step or are on their way."""
        recent = self._world.now() - PATIENCE
        coming = (
            teaching
            for key, (teaching, since) in self._coming.items()
            if since > recent or key in self._scoring
        )
        return len(self._intake.buffer) + sum(coming)

    # Content.

    async def _take_content(
        self, stream: Stream, request: ContentRequest, begun: bytes
    ) -> Reply:
        window = request.signed.window
        commitment = window.commitment(request.index)
        if window.node != stream.peer:
            return Refused("content must come from the node that drew it", False)
        if self._standing.why_not:
            return RESTS
        known = self._known_verdict(commitment)
        if known is not None:
            return known
        if (scoring := self._scoring.get(commitment.digest)) is not None:
            return await scoring.wait()
        expected = self.gate.expects(commitment, self.situation())
        if isinstance(expected, Refused):
            return expected
        if expected.window != window:
            return Refused("this place was committed to in another window", False)
        if request.length > self._run.terms.work_size.max_submission:
            return Refused(f"content of {request.length} bytes is longer than the run's", False)
        is_newcomer = not self._is_known(stream.peer)
        if not await self._wait_room(is_newcomer=is_newcomer):
            return FULL
        if is_newcomer:
            self._newcomers[commitment.digest] = None
        try:
            return await self._score_content(stream, request, begun, expected, is_newcomer)
        finally:
            if commitment.digest not in self._scoring:
                self._newcomers.pop(commitment.digest, None)

    async def _score_content(
        self,
        stream: Stream,
        request: ContentRequest,
        begun: bytes,
        expected: SignedWindow,
        is_newcomer: bool,
    ) -> Reply:
        """Read wanted content and have it scored."""
        commitment = expected.window.commitment(request.index)
        submission = await self._door.receive(
            *(stream, expected, request.index, request.length, begun),
            is_stranger=not self._is_known(stream.peer),
        )
        if isinstance(submission, Refused):
            return submission
        if self._nursery is None:
            return STARTS
        if (known := self._known_verdict(commitment)) is not None:
            return known
        if (scoring := self._scoring.get(commitment.digest)) is None:
            if isinstance(self.gate.expects(commitment, self.situation()), Refused):
                return Refused("it is not wanted any more", False)
            scoring = self._scoring[commitment.digest] = Scoring(submission, is_newcomer)
            self.gate.came(commitment)
            self._nursery.start_soon(self._score, scoring)
        return await scoring.wait()

    def _known_verdict(self, commitment: Commitment) -> SignedVerdict | None:
        said = self._said.get(commitment.digest)
        if said is not None:
            return said
        # in an earlier life
        if self._intake.has_taken(commitment) or self.gate.has_stood(commitment):
            return Ruling(verdict=Verdict.ACCEPTED, reason="").sign(
                commitment, self._world.signer
            )
        return None

    async def _wait_room(self, *, is_newcomer: bool) -> bool:
        def has_room() -> bool:
            return self.has_room and not (is_newcomer and self._spares_newcomers)

        with trio.move_on_after(PATIENCE):
            while not has_room():
                await self._freed.wait()
        return has_room()

    @property
    def _spares_newcomers(self) -> bool:
        """Return True if newcomers have used up the scorer time or places that are open to
        them."""
        now = self.situation()
        if not self.gate.has_standing:
            return False
        is_alone = all(key in self._newcomers for key in self._scoring)
        most = NEWCOMERS_SCORING if is_alone else 1
        return len(self._newcomers) >= most or self.gate.spares_newcomers(now)

    async def _score(self, scoring: Scoring) -> None:
        submission = scoring.submission
        commitment = submission.commitment
        try:
            choose, blames = partial(self._choose, submission), partial(_blames, submission)
            ruling = await self.scorer.score(submission, choose, blames)
            if scoring.is_newcomer:
                self._newcomers_busy += ruling.seconds
            scoring.verdict = verdict = await self._conclude(submission, ruling)
            self.stats.records.count(verdict)
            if verdict.verdict is Verdict.INCONCLUSIVE:
                self.stats.give_up(verdict.reason)
            self._said[commitment.digest] = scoring.verdict
        finally:
            self._coming.pop(commitment.digest, None)
            self._scoring.pop(commitment.digest, None)
            self._newcomers.pop(commitment.digest, None)
            scoring.done.set()
            self._freed.notify_all()

    def _choose(self, submission: Submission, found: Sequence[Claim]) -> Sequence[int]:
        spreads = [claim is not Claim.ALIKE for claim in found]
        window, now = submission.signed.window, self.situation()
        return self.gate.groups_to_replay(window, submission.index, spreads, now)

    async def _conclude(self, submission: Submission, ruling: Ruling) -> SignedVerdict:
        """Tell the gate what the scorer found, carry out the consequence, and sign the
        verdict."""
        commitment, now = submission.commitment, self.situation()
        consequence: Consequence | None = None
        if ruling.verdict is Verdict.ACCEPTED and _blames(submission, ruling):
            ruling = Ruling(
                verdict=Verdict.REJECTED, reason="a claim about its rewards is wrong"
            )
            consequence = self.gate.wrong_claim(commitment, now)
        elif ruling.verdict is Verdict.REJECTED:
            finding = ruling.finding
            assert finding is not None
            consequence = self.gate.lied(commitment, finding.weight, now)
        elif ruling.verdict is Verdict.INCONCLUSIVE:
            is_by_content = ruling.reason in BY_CONTENT
            find = self.gate.inconclusive if is_by_content else self.gate.excuse
            consequence = find(commitment, now)
        verdict = ruling.sign(commitment, self._world.signer)
        if consequence is not None:
            await self._follow(consequence, verdict, submission, ruling)
        elif self.gate.stood(commitment, now):
            await self._take(verdict, submission, ruling)
        await self._records.write(self.gate)
        return verdict

    async def _take(
        self, verdict: SignedVerdict, submission: Submission, ruling: Ruling
    ) -> None:
        newest, lag = self._node.shardcast.newest, self._run.terms.sampling.lag
        if newest - verdict.commitment.version > lag:
            self._intake.turn_down(verdict.commitment)
            return
        prompts = tuple(tuple(ruling.tasks[number].prompt) for number in ruling.replayed)
        turns = tuple(
            tuple(one.turns for one in ruling.groups[number].completions)
            for number in ruling.replayed
        )
        has_turns = self._run.terms.sampling.turns > 1
        place = TakenPlace(
            *(verdict, submission, ruling.replayed, prompts, ruling.logprobs),
            turns if has_turns else (),
        )
        await self._durable.insist(partial(self._intake.take, place))

    async def _follow(
        self,
        consequence: Consequence,
        verdict: SignedVerdict | None = None,
        submission: Submission | None = None,
        ruling: Ruling | None = None,
    ) -> None:
        """Carry out what the gate decided about a worker."""
        await self._intake.drop(consequence.drop)
        for commitment in consequence.drop:
            self._coming.pop(commitment.digest, None)
        if consequence.is_newcomer_again and submission is not None:
            self.scorer.drop_window(submission.signed.window.digest)
        if consequence.is_newcomer_again or consequence.banned_until is not None:
            until = consequence.banned_until
            logger.warning(
                "worker %s is %s: %s",
                consequence.node,
                "a newcomer again" if until is None else f"banned until {until:.0f}",
                consequence.reason,
            )
        if consequence.banned_until is not None:
            name, until = str(consequence.node), int(consequence.banned_until)
            before = self.banned.get(name, {"times": 0})
            if before.get("until") != until:  # else it is another lie from before that ban
                times = int(str(before["times"])) + 1
                reason = consequence.reason
                self.banned[name] = {"times": times, "until": until, "reason": reason}
                self._world.trace("worker.banned", worker=name)
            if verdict is not None and submission is not None and ruling is not None:
                await self._prove(verdict, submission, ruling.finding)

    async def _prove(
        self, verdict: SignedVerdict, submission: Submission, finding: Finding | None
    ) -> None:
        """Keep the proof of a ban that follows from the trainer's own verdict."""
        try:
            proof = convict(
                *(submission.commitment, terms_digest(self._run), verdict, submission, finding),
                self._world.verify,
            )
        except BadMessage as error:
            logger.error("no_proof %s: %s", submission.commitment.digest.hex(), error)
            return
        await self._keep_proof(proof)

    async def _keep_proof(self, proof: Conviction) -> None:
        """Save a proof that can be opened, and record it in the ledger."""
        commitment, disk = proof.submission.commitment, self._world.disk
        kind = BAN_KIND if proof.accused == commitment.node else LIE_KIND
        path = f"{EVIDENCE}/{kind}-{commitment.digest.hex()}"
        data = proof.to_bytes()
        await self._durable.insist(partial(disk.replace, path, data))
        if kind == BAN_KIND:
            self._bans[path] = None
            if len(self._bans) > MAX_EVIDENCE:
                oldest = next(iter(self._bans))
                await self._durable.insist(partial(disk.remove, oldest))
                del self._bans[oldest]
        statement = encode_accusation(proof.accused, content_digest(data))
        await self._durable.insist(partial(self._ledger.append, kind, statement))

    # Validators.

    async def _take_verdict(
        self, stream: Stream, verdict: SignedVerdict, begun: bytes
    ) -> Reply:
        if verdict.validator != stream.peer or not self._node.may(
            stream.peer, Capability.VALIDATE
        ):
            return Refused("a verdict comes from the validator that signed it", False)
        if self._standing.why_not:
            return RESTS
        if not self.gate.judges(verdict.commitment, verdict.validator):
            return Word.TAKEN  # it changes nothing
        if not verdict.has_valid_signature(self._world.verify):
            raise BadMessage("a verdict's signature is not its validator's")
        if not self._node.shardcast.holds(verdict.commitment.version):
            # it cannot be repeated: else who lies would wait for that
            self.gate.excuse(verdict.commitment, self.situation())
            await self._records.write(self.gate)
            return Word.TAKEN
        network = self._node.host.network_of(verdict.commitment.node)
        wish = self.gate.verdict(verdict, self.situation(), network=network)
        await self._records.write(self.gate)
        return await self._hear(stream, wish, verdict, begun)

    async def _take_contest(
        self, stream: Stream, verdict: SignedVerdict, begun: bytes
    ) -> Reply:
        if verdict.commitment.node != stream.peer:
            return Refused("a worker contests verdicts on its own work", False)
        if self._standing.why_not:
            return RESTS
        if not self.gate.judges(verdict.commitment, verdict.validator):
            return Refused("nobody has drawn this validator for this place", False)
        if not verdict.has_valid_signature(self._world.verify):
            raise BadMessage("a verdict's signature is not its validator's")
        network = self._node.host.network_of(stream.peer)
        wish = self.gate.contest(verdict, self.situation(), network=network)
        await self._records.write(self.gate)
        if wish is Wish.TAKE:
            return Word.NOTED
        return await self._hear(stream, wish, verdict, begun)

    async def _hear(
        self, stream: Stream, wish: Wish, verdict: SignedVerdict, begun: bytes
    ) -> Reply:
        """Request and receive the content that an audit needs. The sender keeps it until the
        audit is done, so a trainer that is killed meanwhile asks again."""
        if wish is not Wish.SEND:
            return Word.TAKEN
        key = verdict.commitment.digest
        if (audit := self._audits.get(key)) is not None:
            return await self._wait_audit(audit)
        await send_frame(stream, encode_reply(Word.SEND))
        most = self._run.terms.work_size.max_submission + MAX_REQUEST
        seat = self._door.contents.take(
            stream.peer,
            self._world.now(),
            network=self._node.host.network_of(stream.peer),
            is_stranger=not self._is_known(stream.peer),
        )
        if seat is None:
            return Refused("too much content is on its way", True)
        try:
            followed = await receive_frame(stream, most, begun=begun, seconds=PATIENCE)
        finally:
            self._door.contents.leave(seat)
        if followed is None:
            return Refused("it took too long to arrive", True)
        submission = decode_submission_untrusted(followed[0], self._world.verify)
        if submission.commitment != verdict.commitment:
            raise BadMessage("the content is not what the verdict is about")
        if self._nursery is None:
            return STARTS
        if (audit := self._audits.get(key)) is None:
            self.gate.came(verdict.commitment)
            audit = self._audits[key] = trio.Event()
            self._nursery.start_soon(self._audit_once, key, verdict, submission)
        return await self._wait_audit(audit)

    async def _wait_audit(self, audit: trio.Event) -> Reply:
        with trio.move_on_after(PATIENCE):
            await audit.wait()
            return Word.TAKEN
        return Refused("it is not repeated yet", True)

    async def _audit_once(
        self, key: bytes, verdict: SignedVerdict, submission: Submission
    ) -> None:
        try:
            await self._audit(verdict, submission)
        finally:
            self._audits.pop(key).set()

    async def _audit(self, verdict: SignedVerdict, submission: Submission) -> None:
        """Repeat a validator's verdict and report the result to the gate."""
        commitment = submission.commitment

        def blames(ruling: Ruling) -> bool:
            return finding_against(verdict, ruling) is not None

        ruling = await self.scorer.score(submission, replay_all, blames)
        self.repeated += 1
        now, finding = self.situation(), finding_against(verdict, ruling)
        if ruling.verdict is Verdict.INCONCLUSIVE and finding is None:
            self.gate.audit_inconclusive(commitment, now)
        else:
            audited = self.gate.audited(verdict, submission, finding, now, self._world.verify)
            if audited.proof is not None:
                await self._keep_proof(audited.proof)
            if audited.weight >= Weight.STRIKE:
                self.lies += 1
                logger.warning(
                    "validator %s signed what the trainer's replay does not bear out: %s",
                    verdict.validator,
                    finding or "a rejection of work that is in order",
                )
            await self._follow_audit(audited)
        await self._records.write(self.gate)

    async def _follow_audit(self, audited: Audited) -> None:
        if audited.worker is not None:
            await self._follow(audited.worker)
        if audited.is_convicted:
            convicted = self.liars
            self._world.trace("validator.convicted", validator=", ".join(map(str, convicted)))
            logger.warning(
                "a validator lies and scores nobody any more (now passed over: %s). The proof"
                " is in %s; ask the run's owner for an edition that does not name it",
                ", ".join(f"{who}: {why}" for who, why in convicted.items()),
                self._world.disk.locate(EVIDENCE),
            )


def _blames(submission: Submission, ruling: Ruling) -> bool:
    """Return True if a claim is wrong and no limit was touched on either side."""
    claims = submission.signed.window.claims_of(submission.index)
    return any(
        claimed is not seen and Claim.UNKNOWN not in (claimed, seen)
        for claimed, seen in zip(claims, ruling.found, strict=True)
    )
