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
operator hears of it once.

What a head alone refutes (`Judge.refute`: out of place, too long) is answered by it: no queue,
no ledger, no disk. It is a verdict none the less, and a place taken: a refusal would leave a
gap, and the worker would ask again for ever.

After an edition with other validators, nodes come whose places, under the same policy, another
one judged. `DrawSequences.succeed` forgives what it may have judged, for `SUCCESSION` seconds.
Whether the validators are others is known from the edition before, which is on disk: a restart
is no succession.
"""

from __future__ import annotations

import logging
import math
from functools import cached_property, partial
from random import Random
from typing import Any, Final

from p2p.errors import StorageError, WorkerDied
from p2p.identity import PeerId
from p2p.node.node import Node
from p2p.shardcast.manifest import PolicyVersion
from proofs.checks import Verdict
from roles.engines.base import EngineError
from roles.envs.contained import EnvironmentFailed, Failures
from roles.protocol.away import away_of
from roles.protocol.core.assignment import validator_among
from roles.protocol.core.lots import Window
from roles.protocol.core.messages import Commitment, SignedVerdict
from roles.run import Run, run_of
from roles.shared.checked_json import DamagedFile, discard, keep, recall
from roles.shared.durable import Durable
from roles.validator.core.sequence import LOT, DrawSequences, PlaceState
from roles.validator.limits import SUCCESSION
from roles.validator.replay import Replayer
from roles.validator.stats import ValidatorStats
from roles.validator.verdicts import Job, Ruling, VerdictIndex

logger = logging.getLogger(__name__)

REPLAYED: Final = "this place in the draw order was filled before"
GAP: Final = "places before it in the draw order were left out"
STALE: Final = "the policy is older than the run uses"
NOT_HELD: Final = "the policy is not held by this validator"
SUCCEEDED: Final = "another validator judged the places before it"
OUT_OF_PLACE: Final = (REPLAYED, GAP)
"""Reasons of verdicts on work that takes no place."""
EDITION: Final = "validator/edition"
"""Where the validators are kept by which this one judged last, and until when it succeeds
others."""
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
        self._openings = 0
        """How often that was so in this life."""
        self._before: tuple[PeerId, ...] | None = None
        """The validators of the edition before; None if they cannot be known."""
        self._were_away: frozenset[PeerId] = frozenset()
        """Those of them that were passed over (`roles.protocol.away`)."""

    @property
    def loaded(self) -> PolicyVersion:
        """The policy in the engine."""
        return self._replayer.loaded

    @property
    def environment_failure(self) -> str:
        """What the environment failed at when it was asked last; empty if it did not."""
        return self._failures.latest

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
        if verdict.reason in OUT_OF_PLACE:
            self._sequences.misplace(judged.node, judged.version)
        else:
            self._sequences.recall(judged.node, judged.version, judged.index, judged.content)

    def window_state(self, window: Window) -> PlaceState:
        """What filling the places of ``window`` now, one behind the other, would be."""
        if self._may_succeed(window.node, window.version):
            self._sequences.succeed_all(
                window.node, window.version, window.places, self._openings
            )
        return self._sequences.judge_all(window.node, window.version, window.places)

    def fill_window(self, window: Window) -> None:
        """Its places are taken: their worker has committed to them."""
        for place, content in zip(window.places, window.contents, strict=True):
            self._sequences.fill(window.node, window.version, place, content)

    def recall_window(self, window: Window) -> None:
        """Take up a window that an earlier life signed; `settle` follows the last."""
        for place, content in zip(window.places, window.contents, strict=True):
            self._sequences.recall(window.node, window.version, place, content)

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

    def refute(self, commitment: Commitment, length: int) -> SignedVerdict | None:
        """The verdict on what a head of a submission of ``length`` bytes refutes by itself; its
        place is taken. None if there is more to look at."""
        self._succeed(commitment)
        verdict = self._misplaced(commitment) or self.refute_length(commitment, length)
        if verdict is None and self._place(commitment) is PlaceState.UNSEEN:
            verdict = self.give_up(commitment, SUCCEEDED)
        if verdict is not None:
            self._fill(commitment)
        return verdict

    def refute_length(self, commitment: Commitment, length: int) -> SignedVerdict | None:
        """The verdict on a submission that is longer than the run allows; None if it is not."""
        if length <= self._replayer.max_submission:
            return None
        reason = self._replayer.too_long(length)
        return self._replayer.sign(commitment, Verdict.REJECTED, reason)

    def has_worked(self, node: PeerId) -> bool:
        """Whether work of the node was ever accepted: it has something to lose."""
        return self._stats.records.of(node).accepted > 0

    async def decide(self, job: Job) -> Ruling:
        """The verdict on the submission whose turn it is; its place is taken, whatever it
        says."""
        commitment = job.submission.commitment
        if self.is_stale(commitment.version):
            return Ruling(self.give_up(commitment, STALE))
        if self.node.shardcast.holds(commitment.version):
            ruling = await self._look(job)
        else:
            ruling = Ruling(self.give_up(commitment, NOT_HELD))
        if not job.is_in_place:
            self._fill(commitment)
        if ruling.verdict.verdict is Verdict.ACCEPTED:
            self._sequences.settle_in(commitment.node, commitment.version)
        return ruling

    async def _look(self, job: Job) -> Ruling:
        """Judge under the policy, which is here; our engine's failure is not the worker's."""
        commitment = job.submission.commitment
        with self.node.shardcast.pin(commitment.version) as weights:
            try:
                ruling = await self.judge(job, weights)
                self._failures.recover()
                return ruling
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

    async def repeat(self, job: Job) -> SignedVerdict | None:
        """The verdict on work that another validator has rejected, whatever place it is of;
        None if its policy is gone. Raises as `Replayer.judge`."""
        version = job.submission.commitment.version
        if not self.node.shardcast.holds(version):
            return None
        with self.node.shardcast.pin(version) as weights:
            return (await self._replayer.judge(job, weights)).verdict

    async def judge(self, job: Job, weights: str) -> Ruling:
        """From its place to the model's replay; the first violation decides."""
        commitment = job.submission.commitment
        misplaced = None if job.is_in_place else self._misplaced(commitment)
        if misplaced is not None:
            return Ruling(misplaced)
        return await self._replayer.judge(job, weights)

    def _misplaced(self, commitment: Commitment) -> SignedVerdict | None:
        """The verdict on a submission that fills a place twice, or leaves places out; None if
        it does not."""
        state = self._place(commitment)
        if state in (PlaceState.FRESH, PlaceState.UNSEEN):
            return None
        reason = REPLAYED if state is PlaceState.REPLAYED else GAP
        return self._replayer.sign(commitment, Verdict.REJECTED, reason)

    def _place(self, commitment: Commitment) -> PlaceState:
        return self._sequences.judge(commitment.node, commitment.version, commitment.index)

    def _fill(self, commitment: Commitment) -> None:
        """The place is taken, whatever the verdict on it will be."""
        self._sequences.fill(
            commitment.node, commitment.version, commitment.index, commitment.content
        )

    @cached_property
    def _lots(self) -> Random:
        return self._world.rng("succession")

    def _succeed(self, commitment: Commitment) -> None:
        """Forgive the places that another validator judged before this edition, while it is
        new."""
        node, version = commitment.node, commitment.version
        if self._may_succeed(node, version):
            lot = self._lots.randint(1, LOT)
            self._sequences.succeed(node, version, commitment.index, self._openings, lot)

    def _may_succeed(self, node: PeerId, version: PolicyVersion) -> bool:
        """Whether this is a new edition, or other lots came here of late, and another validator
        may have judged the node under ``version`` before."""
        if self._world.now() >= self._succeeds_until:
            return False
        if self._before is None:
            return True
        judge = validator_among(self._before, self.run.id, node, version, self._were_away)
        return judge != self.node.host.peer_id

    async def take_up_edition(self, durable: Durable) -> None:
        """Before the first judgement: have the validators changed since this one judged
        last?

        One that has never judged cannot know, unless the edition is the first. Nor can one
        that missed an edition: the validators may have been others for a while.
        """
        disk, run = self._world.disk, run_of(self.node)
        known: Any = None
        try:
            known = await recall(disk, EDITION)
        except DamagedFile as error:
            await discard(disk, EDITION, error)
        if known is None:
            if run.epoch > 1:
                self._open(None, SUCCESSION)
        else:
            epoch, validators, until, before = known
            if not self._note_change(epoch, _peers(validators), run):
                left = min(until - self._world.wall(), SUCCESSION)
                self._open(None if before is None else _peers(before), left)
        await self._keep_edition(durable, run)

    async def watch_editions(self, durable: Durable) -> None:
        """Notice each edition that names other validators than the one before. Works until
        cancelled."""
        run = run_of(self.node)
        while True:
            await self.node.book.wait_edition(run.epoch)
            newer = run_of(self.node)
            self._note_change(run.epoch, run.terms.validators, newer)
            run = newer
            await self._keep_edition(durable, run)

    async def watch_absences(self) -> None:
        """Notice when the lots of other validators come here, or go back. Works until
        cancelled."""
        heard, own = away_of(self.node), self.node.host.peer_id
        while True:
            held = await heard.wait_change()
            is_back = own in held and own not in heard.validators
            self._were_away = held
            self._open(None if is_back else run_of(self.node).terms.validators, SUCCESSION)

    def _note_change(self, epoch: int, validators: tuple[PeerId, ...], newer: Run) -> bool:
        """Be lenient from now on, if the validators may have changed since ``epoch``, whose
        ``validators`` are known; returns whether."""
        if newer.epoch > epoch + 1:
            self._open(None, SUCCESSION)
            return True
        if newer.terms.validators != validators:
            self._open(validators, SUCCESSION)
            return True
        return False

    def _open(self, before: tuple[PeerId, ...] | None, seconds: float) -> None:
        """Be lenient for ``seconds`` from now on, if those are any."""
        if seconds > 0:
            self._before = before
            self._openings += 1
            self._succeeds_until = self._world.now() + seconds

    async def _keep_edition(self, durable: Durable, run: Run) -> None:
        left = max(self._succeeds_until - self._world.now(), 0.0)
        value = [
            run.epoch,
            _names(run.terms.validators),
            self._world.wall() + left,
            None if self._before is None else _names(self._before),
        ]
        await durable.insist(partial(keep, self._world.disk, EDITION, value))


def _names(peers: tuple[PeerId, ...]) -> list[str]:
    return [peer.digest.hex() for peer in peers]


def _peers(names: list[str]) -> tuple[PeerId, ...]:
    return tuple(PeerId(bytes.fromhex(name)) for name in names)
