"""The verdict on one submission: by its age, its place in the draw order, and the model.

Theory of operation
-------------------
Cheap checks come first: a policy that no trainer can use any more, a submission that is too
long to be read, a place that was filled before or leaves others out. What is left is replayed
(`roles.validator.replay`).

`INCONCLUSIVE` blames no worker (the policy is not here or too old to matter, our engine
failed): no ledger entry. It is as final as the others, though: the place in the draw order is
taken, or the worker's next ones would be ahead of a place that never comes, and a worker that
asks again is told the same. After a restart nothing tells such a place from one whose
submission is on its way: it may be filled, and is no gap.

An environment is foreign code: what it raises makes its submission `INCONCLUSIVE`, and the
operator hears of it once. A submission that is too long gets a verdict by its head: a refusal
would leave a gap, and the worker would ask again for ever.
"""

from __future__ import annotations

import logging
import math
from typing import Final

from p2p.errors import StorageError, WorkerDied
from p2p.node.node import Node
from p2p.shardcast.manifest import PolicyVersion
from proofs.checks import Verdict
from roles.engines.base import EngineError
from roles.envs.contained import EnvironmentFailed, Failures
from roles.protocol.core.messages import Commitment, SignedVerdict
from roles.run import Run, run_of
from roles.validator.core.sequence import DrawSequences, PlaceState
from roles.validator.limits import SUCCESSION
from roles.validator.replay import Replayer
from roles.validator.stats import ValidatorStats
from roles.validator.verdicts import Job, Ruling, VerdictIndex

logger = logging.getLogger(__name__)

REPLAYED: Final = "this place in the draw order was filled before"
GAP: Final = "places before it in the draw order were left out"
STALE: Final = "the policy is older than the run uses"
NOT_HELD: Final = "the policy is not held by this validator"
ENGINE_FAILED: Final = "the validator's engine could not score it"
ENVIRONMENT_FAILED: Final = "the run's environment failed on it"


class Judge:
    """What is said of places in the draw order, and which of them are filled."""

    def __init__(self, node: Node, run: Run, replayer: Replayer, stats: ValidatorStats) -> None:
        self.node = node
        self.run = run
        self.verdicts = VerdictIndex()
        self._replayer = replayer
        self._stats = stats
        self._world = node.world
        self._sequences = DrawSequences()
        self._failures = Failures()
        self._succeeds_until = -math.inf
        """Until when nodes may come whose earlier places, under the same policy, another
        validator judged."""

    @property
    def loaded(self) -> PolicyVersion:
        """The policy in the engine."""
        return self._replayer.loaded

    @property
    def writes_waiting(self) -> int:
        """Content for the engine that the disk has refused so far."""
        return self._replayer.writes_waiting

    @property
    def max_submission(self) -> int:
        """Bytes of the longest submission that is read."""
        return self._replayer.max_submission

    def recall(self, verdict: SignedVerdict, seqno: int) -> None:
        """Take up a verdict of an earlier life, from the ledger's entry ``seqno``; `settle`
        follows the last."""
        judged = verdict.commitment
        self.verdicts.record(judged, seqno)
        if verdict.reason in (REPLAYED, GAP):
            self._sequences.misplace(judged.node, judged.version)
        else:
            self._sequences.recall(judged.node, judged.version, judged.index, judged.content)

    def settle(self) -> None:
        """All verdicts of earlier lives are taken up. Places answered `INCONCLUSIVE` are not in
        the ledger, and leave no gap."""
        self._sequences.settle()

    def has_strayed(self, commitment: Commitment) -> bool:
        """Whether the node has had all the verdicts that it gets on work out of place."""
        return self._sequences.has_strayed(commitment.node, commitment.version)

    def is_stale(self, version: PolicyVersion) -> bool:
        """Whether no trainer can use work under ``version`` any more."""
        newest, lag = self.node.shardcast.newest, self.run.terms.recipe.lag
        self._stats.leave_out(self._sequences.forget_below(PolicyVersion(newest - lag - 1)))
        return newest - version > lag

    def give_up(self, commitment: Commitment, reason: str) -> SignedVerdict:
        """A verdict that blames no worker."""
        self._world.sometimes("validator/blames no worker", True)
        self._stats.give_up(reason)
        verdict = self._replayer.sign(commitment, Verdict.INCONCLUSIVE, reason)
        if reason != STALE:
            self.verdicts.give_up(verdict)
        return verdict

    def forgo(self, commitment: Commitment) -> SignedVerdict:
        """The verdict under a policy that is gone from here; the place is taken."""
        self._fill(commitment)
        return self.give_up(commitment, NOT_HELD)

    async def decide(self, job: Job) -> Ruling:
        """The verdict on the submission whose turn it is; its place is taken, whatever it
        says."""
        commitment = job.submission.commitment
        if self.is_stale(commitment.version):
            return Ruling(self.give_up(commitment, STALE))
        if job.length > self._replayer.max_submission:
            ruling = Ruling(self._dismiss(commitment, job.length))
        elif self.node.shardcast.holds(commitment.version):
            ruling = await self._look(job)
        else:
            ruling = Ruling(self.give_up(commitment, NOT_HELD))
        self._fill(commitment)
        return ruling

    def _dismiss(self, commitment: Commitment, length: int) -> SignedVerdict:
        """The verdict on a submission that is too long to be read."""
        reason = self._replayer.too_long(length)
        return self._misplaced(commitment) or self._replayer.sign(
            commitment, Verdict.REJECTED, reason
        )

    async def _look(self, job: Job) -> Ruling:
        """Judge under the policy, which is here; our engine's failure is not the worker's."""
        commitment = job.submission.commitment
        with self.node.shardcast.pin(commitment.version) as weights:
            try:
                return await self.judge(job, weights)
            except EnvironmentFailed as error:
                self._failures.tell(
                    error, "submissions on which it fails are judged inconclusive"
                )
                return Ruling(self.give_up(commitment, ENVIRONMENT_FAILED))
            except (EngineError, StorageError, WorkerDied) as error:
                # Foreign tokens went in; that they have the right shape is no promise that no
                # sum overflows.
                author, version, index = (
                    commitment.node.short,
                    commitment.version,
                    commitment.index,
                )
                logger.error("engine_failed %s v%d/%d: %s", author, version, index, error)
                if isinstance(error, WorkerDied):
                    self._replayer.forget_policy()
                return Ruling(self.give_up(commitment, ENGINE_FAILED))

    async def judge(self, job: Job, weights: str) -> Ruling:
        """From its place to the model's replay; the first violation decides."""
        commitment = job.submission.commitment
        if self._world.now() < self._succeeds_until:
            self._sequences.succeed(commitment.node, commitment.version, commitment.index)
        misplaced = self._misplaced(commitment)
        if misplaced is not None:
            return Ruling(misplaced)
        return await self._replayer.judge(job, weights)

    def _misplaced(self, commitment: Commitment) -> SignedVerdict | None:
        """The verdict on a submission that fills a place twice, or leaves places out; None if
        it does not."""
        state = self._sequences.judge(commitment.node, commitment.version, commitment.index)
        if state is PlaceState.FRESH:
            return None
        reason = REPLAYED if state is PlaceState.REPLAYED else GAP
        return self._replayer.sign(commitment, Verdict.REJECTED, reason)

    def _fill(self, commitment: Commitment) -> None:
        """The place is taken, whatever the verdict on it will be."""
        self._sequences.fill(
            commitment.node, commitment.version, commitment.index, commitment.content
        )

    async def watch_succession(self) -> None:
        """Be lenient to work that comes from another validator's hands: after each edition that
        names others than the one before, and, as this cannot be known, at the start under a
        later edition than the first.
        """
        run = self.run
        if run.epoch > 1:
            self._succeeds_until = self._world.now() + SUCCESSION
        while True:
            await self.node.book.wait_edition(run.epoch)
            newer = run_of(self.node)
            if newer.terms.validators != run.terms.validators:
                self._succeeds_until = self._world.now() + SUCCESSION
            run = newer
