"""Judging one submission: tasks, shapes, the model's replay, and the signed verdict.

Cheap checks come first, and the first violation decides: a submission with wrong groups costs
no replay. Where a violation is likely, from a node whose work was rejected of late, one group
is replayed before the others, so that most cheats cost the scorer a group. The rewards of
accepted work are recomputed here; a worker's own figures are never looked at.
"""

from __future__ import annotations

import logging
from typing import Final

from p2p.errors import BadMessage
from p2p.identity import PeerId
from p2p.node.node import Node
from p2p.shardcast.manifest import NO_POLICY, PolicyVersion
from p2p.world import dawdle, decode_off_loop
from proofs.checks import Judgement, Verdict
from roles.engines.base import Engine, Group, GroupTask, Scored
from roles.envs.base import Task
from roles.envs.client import ContainedEnvironment
from roles.protocol.core.assignment import draw_order, run_sampling
from roles.protocol.core.judging import check_shapes, judge_all
from roles.protocol.core.messages import (
    DECODE_RATE,
    MAX_REASON,
    TOO_LONG,
    Commitment,
    SignedVerdict,
    content_digest,
    decode_groups_untrusted,
)
from roles.protocol.replay import count_work
from roles.run import Run
from roles.shared.standing import RoleStanding
from roles.protocol.history import DrawHistory
from roles.validator.verdicts import Job, Ruling

logger = logging.getLogger(__name__)

WRONG_GROUPS: Final = "not the groups of its place in the draw order"
OTHER_POLICY: Final = "the policy digest is not that of the version"


class Replayer:
    """The validator's engine and environment, and what they say of a submission."""

    def __init__(
        self,
        node: Node,
        run: Run,
        environment: ContainedEnvironment,
        engine: Engine,
        standing: RoleStanding,
    ) -> None:
        self._node = node
        self._run = run
        self._environment = environment
        self._engine = engine
        self._standing = standing
        self._rng = node.world.rng("replay/first group")
        self.loaded = NO_POLICY
        """The policy in the engine."""
        self._policy = b""
        """Digest of what is loaded."""
        self._history = DrawHistory()

    @property
    def writes_waiting(self) -> int:
        """Content for the engine that the disk has refused so far."""
        return self._engine.writes_waiting

    @property
    def max_submission(self) -> int:
        """Bytes of the longest submission there can be in this run."""
        return self._run.terms.work_size.max_submission

    def too_long(self, length: int) -> str:
        """What is said of a submission of ``length`` bytes, of which only the beginning was
        read.

        Its place is taken: a gap would lock the worker out. The recipe allows no submission
        this long, and none is signed whose submissions are too long for a message
        (`roles.shared.sizes`), so it is no honest worker's.
        """
        return f"{TOO_LONG}: {length} bytes, over the limit of {self.max_submission}"

    async def judge(self, job: Job, weights: str) -> Ruling:
        """The verdict under the policy whose file is ``weights``.

        Raises `EnvironmentFailed`, `EngineError`, `WorkerDied`, `StorageError` and `AtRest`: no
        verdict then.
        """
        submission = job.submission
        commitment = submission.commitment
        policy = self._node.shardcast.manifest(commitment.version).weights_digest
        order = draw_order(self._run, commitment.node, commitment.version, policy)
        if commitment.policy != order.policy:
            # Of two trainers' same version one is chosen; who had the other was honest.
            was_signed = self._node.shardcast.was_signed(commitment.version, commitment.policy)
            verdict = Verdict.INCONCLUSIVE if was_signed else Verdict.REJECTED
            return Ruling(self.sign(commitment, verdict, OTHER_POLICY))
        try:
            groups, judgement = await decode_off_loop(
                self._node.world,
                self._open_groups_untrusted,
                submission.content,
                rate=DECODE_RATE,
            )
        except BadMessage as error:
            return Ruling(self.sign(commitment, Verdict.REJECTED, str(error)))
        seeds = order.task_seeds(commitment.index)
        tasks = order.with_draws(commitment.index, await self._environment.tasks(seeds))
        if [group.group for group in groups] != [task.group for _, task in tasks]:
            return Ruling(self.sign(commitment, Verdict.REJECTED, WRONG_GROUPS))
        logprobs = b""
        if judgement.verdict is Verdict.ACCEPTED:
            await self._load(commitment.version, policy, weights)
            replayed = [task for _, task in tasks]
            judgement, logprobs = await self._replay(
                replayed, groups, commitment.node, is_suspect=job.is_suspect
            )
        return await self._conclude(commitment, judgement, logprobs, tasks, groups)

    async def _load(self, version: PolicyVersion, policy: bytes, weights: str) -> None:
        if (version, policy) != (self.loaded, self._policy):
            await self._node.shardcast.check_weights(version)
            # Should the engine fail in the middle, it holds none, and not the one before:
            # honest work under that would be inconclusive for as long as no other is loaded.
            self.forget_policy()
            await self._engine.load(weights)
            self.loaded, self._policy = version, policy

    def forget_policy(self) -> None:
        """The engine holds none: the next submission's is loaded."""
        self.loaded, self._policy = NO_POLICY, b""

    def _open_groups_untrusted(self, content: bytes) -> tuple[tuple[Group, ...], Judgement]:
        """The groups of a submission, and what their shapes alone say. Raise `BadMessage`."""
        groups = decode_groups_untrusted(content)
        return groups, check_shapes(groups, self._run.shape())

    async def _replay(
        self,
        tasks: list[GroupTask],
        groups: tuple[Group, ...],
        worker: PeerId,
        *,
        is_suspect: bool,
    ) -> tuple[Judgement, bytes]:
        """Run the model over the groups and hold what it says against the limits; its log-probs
        of all tokens.

        Of a suspect one group goes first, and the others only if it is found in order. It is
        chosen by chance: a worker that could foresee it would do that one as it should.
        """
        limits = self._standing.run.terms.limits
        sampling = run_sampling(self._standing.run)
        await dawdle(self._node.world, "replay/slow replay")
        parts = [list(range(len(groups)))]
        if is_suspect:
            first = self._rng.randrange(len(groups))
            parts = [[first], [place for place in parts[0] if place != first]]
        scored: dict[int, Scored] = {}
        for places in filter(None, parts):
            some = await self._engine.score(
                [tasks[place] for place in places],
                [groups[place] for place in places],
                sampling,
            )
            scored.update(zip(places, some, strict=True))
            judgement = judge_all([scored[place].evidence for place in sorted(scored)], limits)
            if judgement.verdict is not Verdict.ACCEPTED:
                return judgement, b""
        whole = [scored[place] for place in sorted(scored)]
        judgement = self._history.judge(worker, [one.evidence for one in whole], limits)
        if judgement.verdict is not Verdict.ACCEPTED:
            return judgement, b""
        return judgement, b"".join(one.logprobs for one in whole)

    async def _conclude(
        self,
        commitment: Commitment,
        judgement: Judgement,
        logprobs: bytes,
        tasks: list[tuple[Task, GroupTask]],
        groups: tuple[Group, ...],
    ) -> Ruling:
        """The signed verdict, with rewards recomputed if it is acceptance."""
        rewards: tuple[float, ...] = ()
        bound, work = b"", None
        if judgement.verdict is Verdict.ACCEPTED:
            answers = [
                (task, [completion.tokens for completion in group.completions])
                for (task, _), group in zip(tasks, groups, strict=True)
            ]
            rewards = tuple(await self._environment.rewards(answers))
            bound, work = content_digest(logprobs), count_work(tasks, groups)
        else:
            author, version, index = commitment.node.short, commitment.version, commitment.index
            logger.info("rejected %s v%d/%d: %s", author, version, index, judgement)
        verdict = SignedVerdict(
            self._node.host.peer_id, commitment, judgement.verdict, judgement.reason.value,
            float(judgement.statistic), float(judgement.limit), rewards, bound,
            work=work,
        )  # fmt: skip
        return Ruling(self._signed(verdict), logprobs)

    def sign(self, commitment: Commitment, verdict: Verdict, reason: str) -> SignedVerdict:
        """A verdict that no model was asked for. Raises `AtRest`."""
        me, reason = self._node.host.peer_id, reason[:MAX_REASON]
        return self._signed(SignedVerdict(me, commitment, verdict, reason, 0.0, 0.0, ()))

    def _signed(self, verdict: SignedVerdict) -> SignedVerdict:
        self._standing.check()  # an edition may have come since the submission was taken up
        return verdict.signed(self._node.world.signer)
