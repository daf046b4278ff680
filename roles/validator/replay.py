"""What judging one submission takes: shapes, the model's replay, and a signed verdict at the end."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import trio

from p2p.ledger import Ledger
from p2p.node.node import Node
from p2p.world import dawdle
from proofs.checks import Judgement, Reason, Verdict, check_shape, judge, judge_pool
from roles.engines.base import Engine, Group, GroupTask
from roles.envs.base import Task
from roles.envs.client import ContainedEnvironment
from roles.protocol.assignment import run_sampling
from roles.protocol.messages import (
    MAX_REASON,
    MAX_SUBMISSION,
    TOO_LONG,
    Commitment,
    SignedVerdict,
    Submission,
    decode_groups_untrusted,
    max_submission,
)
from roles.run import Run
from roles.shared.durable import Durable
from roles.shared.standing import Standing
from roles.validator.delivery import Handover

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Bench:
    """What judging needs: opened once, the same for all submissions."""

    node: Node
    run: Run
    environment: ContainedEnvironment
    engine: Engine
    ledger: Ledger
    handover: Handover
    nursery: trio.Nursery
    durable: Durable
    standing: Standing

    @property
    def max_submission(self) -> int:
        """Bytes of the longest submission there can be in this run."""
        recipe = self.run.terms.recipe
        return max_submission(recipe.submission, recipe.group_size, recipe.max_new_tokens)

    def too_long(self, length: int) -> tuple[Verdict, str]:
        """What is said of a submission of ``length`` bytes, of which only the beginning was read.

        Its place is taken either way: a gap would lock the worker out. Where the recipe allows no submission
        this long, nobody honest sent it. Where only our own limit is lower than what the recipe allows, the
        run's owner is to blame, who must lower ``submission`` in the recipe.
        """
        reason = f"{TOO_LONG}: {length} bytes, over the limit of {self.max_submission}"
        is_recipes = self.max_submission < MAX_SUBMISSION
        return (Verdict.REJECTED if is_recipes else Verdict.INCONCLUSIVE), reason

    def open_groups_untrusted(self, content: bytes) -> tuple[tuple[Group, ...], Judgement]:
        """The groups of a submission, and what their shapes alone say. Raise `BadMessage`."""
        groups = decode_groups_untrusted(content)
        return groups, self._check_shapes(groups)

    def _check_shapes(self, groups: tuple[Group, ...]) -> Judgement:
        """The first group that is not even shaped right, or acceptance."""
        shape = self.run.shape(self.environment.end_token)
        judgement = Judgement(Verdict.ACCEPTED, Reason.WITHIN_LIMITS)
        for group in groups:
            tokens = [completion.tokens for completion in group.completions]
            judgement = check_shape(tokens, [completion.logprobs for completion in group.completions], shape)
            if judgement.verdict is not Verdict.ACCEPTED:
                break
        return judgement

    async def replay(self, tasks: list[GroupTask], groups: tuple[Group, ...]) -> Judgement:
        """Run the model over the groups and hold what it says against the limits."""
        limits = self.standing.run.terms.limits
        await dawdle(self.node.world, "judging/slow replay")
        pool = await self.engine.score(tasks, groups, run_sampling(self.run))
        for evidence in pool:
            judgement = judge(evidence, limits)
            if judgement.verdict is not Verdict.ACCEPTED:
                return judgement
        return judge_pool(pool, limits)

    async def conclude(
        self,
        submission: Submission,
        judgement: Judgement,
        tasks: list[tuple[Task, GroupTask]],
        groups: tuple[Group, ...],
    ) -> SignedVerdict:
        """The signed verdict, with rewards recomputed if it is acceptance.

        Raises `EnvironmentFailed`, `AtRest`.
        """
        rewards: tuple[float, ...] = ()
        if judgement.verdict is Verdict.ACCEPTED:
            answers = [
                (task, [completion.tokens for completion in group.completions])
                for (task, _), group in zip(tasks, groups, strict=True)
            ]
            rewards = tuple(await self.environment.rewards(answers))
        else:
            place = submission.commitment
            logger.info("rejected %s v%d/%d: %s", place.node.short, place.version, place.index, judgement)
        verdict = SignedVerdict(
            self.node.host.peer_id, submission.commitment, judgement.verdict, judgement.reason.value,
            float(judgement.statistic), float(judgement.limit), rewards,
        )  # fmt: skip
        return self._signed(verdict)

    def sign(self, place: Commitment, verdict: Verdict, reason: str) -> SignedVerdict:
        """A verdict that no model was asked for. Raises `AtRest`."""
        unsigned = SignedVerdict(self.node.host.peer_id, place, verdict, reason[:MAX_REASON], 0.0, 0.0, ())
        return self._signed(unsigned)

    def _signed(self, verdict: SignedVerdict) -> SignedVerdict:
        self.standing.check()  # an edition may have come since the submission was taken up
        return verdict.signed(self.node.world.signer)
