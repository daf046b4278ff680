"""A validator at work: takes content of newcomers and gives signed verdicts.

A worker brings the trainer's signed answer, which names this validator as the scorer of a
window: nobody else is heard. A verdict and its content lie on the disk before anybody hears of
the verdict, and stay there until the trainer has its receipt: of one verdict in twenty it asks
for the content. Verdicts are entries of the ledger, so a worker that asks again is told the
same. A validator has no power beyond that: the trainer counts, repeats and bans.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Final

import trio

from p2p.bounded import BoundedDict
from p2p.errors import BadMessage, StorageError
from p2p.host import Stream
from p2p.identity import PeerId
from p2p.ledger import Ledger
from p2p.node.admission import Capability
from p2p.node.node import Node
from p2p.shardcast.manifest import PolicyVersion
from p2p.wire import fields_untrusted, pack, unpack_untrusted
from p2p.world import dawdle
from proofs.checks import Verdict
from roles.contract import Run, run_of
from roles.protocol.core.answer import (
    WORK_PROTOCOL,
    ContentRequest,
    Refused,
    Reply,
    VerdictRequest,
    Word,
    encode_reply,
)
from roles.protocol.core.statements import VERDICT_KIND
from roles.protocol.core.terms import terms_digest
from roles.protocol.core.verdict import (
    SignedVerdict,
    decode_verdict_untrusted,
)
from roles.protocol.core.window import (
    Commitment,
    Submission,
    decode_submission_untrusted,
)
from roles.protocol.door import Door
from roles.protocol.request import ask
from roles.protocol.scorer import Ruling, Scorer, Scoring
from roles.protocol.standing import AtRest, RoleStanding
from roles.protocol.stats import Records, ScoringStats
from roles.shared.backoff import Backoff
from roles.shared.checked_json import discard
from roles.shared.durable import Durable

logger = logging.getLogger(__name__)

KEPT: Final = "validator/kept"
"""Folder of verdicts and their content until the trainer has them, named by the commitment."""
MAX_WAITING: Final = 64
"""Most places that wait for the scorer."""
MAX_UNDELIVERED: Final = 256
"""Most verdicts that the trainer has not taken. With more, nothing is scored."""
KNOWN: Final = 65_536
"""Most verdicts that can be found by their commitment: 16 MB."""
AHEAD: Final = 8
"""Most versions beyond the newest here that a worker may name and wait for."""
POLICY_SECONDS: Final = 20.0
"""Seconds to wait for a version that is not here yet: the time in which SHARDCAST
delivers one."""
DELIVERIES: Final = 4
"""Most verdicts on their way to the trainer at a time."""
_SEND: Final = encode_reply(Word.SEND)
RESTS: Final = Refused("the validator rests", True)


class ValidatorSession:
    """One validator's work for one run, from its start to its end."""

    def __init__(
        self,
        node: Node,
        run: Run,
        scorer: Scorer,
        ledger: Ledger,
        standing: RoleStanding,
        stats: ScoringStats,
    ) -> None:
        self.node = node
        self.run = run
        self.scorer = scorer
        self._ledger = ledger
        self._standing = standing
        self._stats = stats
        self._world = node.world
        self._durable = Durable(node.world, "validator")
        self._door = Door(node, stats)
        self._jobs: dict[bytes, Scoring] = {}
        self._known: BoundedDict[bytes, int] = BoundedDict(KNOWN)
        """Maps the digest of a commitment to the ledger entry with its verdict."""
        self._undelivered: dict[bytes, None] = {}
        self._lane = trio.Semaphore(DELIVERIES)
        self._nursery: trio.Nursery | None = None

    @property
    def loaded(self) -> PolicyVersion:
        """Version of the policy in the engine."""
        return self.scorer.loaded

    @property
    def waiting(self) -> int:
        """Number of places that wait for the scorer."""
        return self.scorer.waiting

    @property
    def reading(self) -> int:
        """Number of contents that are on their way."""
        return len(self._door.contents)

    @property
    def writes_waiting(self) -> int:
        """Number of writes that the disk has refused so far."""
        return self._durable.waiting

    @property
    def why_not(self) -> str:
        """Reason why the run file does not let this validator work now; empty if it does."""
        return self._standing.why_not

    @property
    def undelivered(self) -> int:
        """Number of verdicts that the trainer has not taken yet."""
        return len(self._undelivered)

    @property
    def is_judging(self) -> bool:
        """True while the scorer has a place."""
        return bool(self._jobs)

    @property
    def is_held_up(self) -> bool:
        """True if nothing is scored because the trainer takes no verdicts."""
        return len(self._undelivered) >= MAX_UNDELIVERED

    @property
    def environment_failure(self) -> str:
        """Failure of the environment at its last call; empty if it did not fail."""
        return self.scorer.failures.latest

    @property
    def is_over(self) -> bool:
        """True if nothing is left to score in this run."""
        return self.node.shardcast.newest >= self.run.terms.sampling.steps and not self._jobs

    async def work_forever(self) -> None:
        """Resume the work that an earlier process left, then score until cancelled."""
        records = Records()
        async for entry in self._ledger.entries(VERDICT_KIND):
            verdict = decode_verdict_untrusted(entry.body, self._world.verify)
            self._known[verdict.commitment.digest] = entry.seqno
            records.count(verdict)
        self._stats.records = records  # whole: status lines show no half of it
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            await self._resume(nursery)
            nursery.start_soon(self._standing.watch)
            nursery.start_soon(self.scorer.work_forever)
            with self.node.host.serving(WORK_PROTOCOL, self.serve):
                await trio.sleep_forever()

    async def _resume(self, nursery: trio.Nursery) -> None:
        disk = self._world.disk
        for name in await disk.list(KEPT):
            path = f"{KEPT}/{name}"
            try:
                parts = fields_untrusted(
                    unpack_untrusted(await disk.read(path)), bytes, bytes, what="kept verdict"
                )
                verdict = decode_verdict_untrusted(parts[0], self._world.verify)
                submission = decode_submission_untrusted(parts[1], self._world.verify)
            except BadMessage as error:
                await discard(disk, path, error)
                continue
            if verdict.commitment.digest not in self._known:  # killed before the ledger had it
                await self._enter(verdict)
            self._undelivered[verdict.commitment.digest] = None
            nursery.start_soon(self._deliver, verdict, submission)

    # Workers.

    async def serve(self, stream: Stream) -> None:
        """Handle one place with one verdict or refusal; a `StreamHandler`."""
        refused, peer = None, stream.peer
        if self._standing.why_not:
            refused = RESTS
        elif not self.node.may(peer, Capability.GENERATE):
            why_not = self.node.book.why_not(peer, Capability.GENERATE)
            refused = self._door.refuse("not admitted", why_not)
        await self._door.serve(stream, self._answer, refused=refused)

    async def _answer(self, stream: Stream, request: object, begun: bytes) -> Reply:
        if not isinstance(request, ContentRequest):
            return self._door.refuse("not content", "a validator scores content only")
        return await self._take(stream, request, begun)

    async def _take(self, stream: Stream, request: ContentRequest, begun: bytes) -> Reply:
        window = request.signed.window
        commitment = window.commitment(request.index)
        refused = self._refuse_request(stream.peer, request, commitment)
        if refused is not None:
            return refused
        known = await self._known_verdict(commitment)
        if known is not None:
            return known
        verify = self._world.verify
        if not request.answer.has_valid_signature(verify):
            raise BadMessage("an answer's signature is not its trainer's")
        if not request.signed.has_valid_signature(verify):
            raise BadMessage("a window's signature is not its worker's")
        if not await self._has_policy(commitment.version):
            return self._door.refuse("policy to come", "its policy is not here yet", retry=True)
        if self.scorer.waiting + len(self._door.contents) >= MAX_WAITING:
            return self._door.refuse("queue is full", retry=True)
        submission = await self._door.receive(
            *(stream, request.signed, request.index, request.length, begun)
        )
        if isinstance(submission, Refused):
            return submission
        job = self._jobs.get(commitment.digest)
        if job is None and commitment.digest not in self._known:
            job = self._jobs[commitment.digest] = Scoring(submission)
            assert self._nursery is not None
            self._nursery.start_soon(self._score, job)
        if job is not None:
            return await job.wait()
        return await self._known_verdict(commitment) or Refused("it is not scored yet", True)

    def _refuse_request(
        self, peer: PeerId, request: ContentRequest, commitment: Commitment
    ) -> Refused | None:
        """Return why a request is refused, by the checks that need no signature; None if it
        passes."""
        run, newest = run_of(self.node), self.node.shardcast.newest
        if commitment.node != peer:
            return self._door.refuse("another node", "content comes from the node that drew it")
        if commitment.run != run.id:
            return self._door.refuse("another run", "this validator serves another run")
        if request.answer.trainer not in run.terms.trainers:
            return self._door.refuse("no trainer", "the answer is of no trainer of this run")
        if request.answer.scorer != self.node.peer_id:
            return self._door.refuse("another scorer", "the answer names another scorer")
        if commitment.terms != terms_digest(run):
            return self._door.refuse(
                "other terms", "it was made under terms that do not hold any more"
            )
        if newest - commitment.version > run.terms.sampling.lag + 1:
            return self._door.refuse("too old", "its policy has become too old")
        if commitment.version > min(newest + AHEAD, run.terms.sampling.steps):
            return self._door.refuse("policy to come", "its policy is not here yet", retry=True)
        if request.length > run.terms.work_size.max_submission:
            return self._door.refuse("too long", "content that is longer than the run's")
        if self.is_held_up:
            return self._door.refuse("held up", "the trainer takes no verdicts now", retry=True)
        return None

    async def _known_verdict(self, commitment: Commitment) -> Reply | None:
        """Return the verdict on this place, waiting if it is in work; None if the place is
        new."""
        key = commitment.digest
        if key in self._jobs:
            return await self._jobs[key].wait()
        seqno = self._known.get(key)
        if seqno is None:
            return None
        try:
            entry = await self._ledger.read(seqno)
        except StorageError as error:
            logger.error("ledger_unreadable seqno=%d: %s", seqno, error)
            return self._door.refuse("the disk fails", retry=True)
        return decode_verdict_untrusted(entry.body, self._world.verify)

    async def _has_policy(self, version: PolicyVersion) -> bool:
        with trio.move_on_after(POLICY_SECONDS):
            await self.node.shardcast.wait_policy(version)
        return self.node.shardcast.newest >= version

    # The scorer, the disk, the trainer.

    async def judge(self, submission: Submission) -> Ruling:
        """Return the ruling on a place. Tests override this for a validator that lies."""
        return await self.scorer.score(submission)

    async def _score(self, job: Scoring) -> None:
        commitment = job.submission.commitment
        try:
            ruling = await self.judge(job.submission)
            await self._standing.wait_run()
            self._standing.check()
            verdict = ruling.sign(commitment, self._world.signer)
            await self._record(verdict, job.submission)
            job.verdict = verdict
        except AtRest:  # its worker asks again
            return
        finally:
            self._jobs.pop(commitment.digest, None)
            job.done.set()
        self._stats.records.count(verdict)
        if verdict.verdict is Verdict.INCONCLUSIVE:
            self._stats.give_up(verdict.reason)
        version = int(commitment.version)
        self._world.trace("verdict", verdict=verdict.verdict.value, version=version)
        await self._deliver(verdict, job.submission)

    async def _record(self, verdict: SignedVerdict, submission: Submission) -> None:
        """Put verdict and content on disk, then the verdict into the ledger."""
        key = verdict.commitment.digest
        self._undelivered[key] = None
        kept = pack([verdict.to_bytes(), submission.to_bytes()])
        await self._durable.insist(
            partial(self._world.disk.replace, f"{KEPT}/{key.hex()}", kept)
        )
        await dawdle(self._world, "validator/slow record")
        await self._enter(verdict)

    async def _enter(self, verdict: SignedVerdict) -> None:
        append = partial(self._ledger.append, VERDICT_KIND, verdict.to_bytes())
        entry = await self._durable.insist(append)
        self._known[verdict.commitment.digest] = entry.seqno

    async def _deliver(self, verdict: SignedVerdict, submission: Submission) -> None:
        """Bring a verdict to the trainer until it has taken it."""
        key = verdict.commitment.digest
        backoff = Backoff(self._world, f"verdict/{key.hex()}")

        def is_final(reply: Reply) -> bool:
            if isinstance(reply, Refused):
                logger.info("the trainer refuses a verdict: %s", reply.reason)
                return not reply.retry
            return reply is Word.TAKEN

        while True:
            trainer = run_of(self.node).terms.trainers[0]
            request, content = VerdictRequest(verdict), submission.to_bytes()
            async with self._lane:
                if await ask(self.node, trainer, request, is_final, content=content):
                    break
            await backoff.wait()
        await self._durable.insist(partial(self._world.disk.remove, f"{KEPT}/{key.hex()}"))
        self._undelivered.pop(key, None)
