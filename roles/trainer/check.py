"""What a delivery must be for the trainer to learn from it, computed anew rather than believed.

Theory of operation
-------------------
A delivery is a stranger's text, and the environment that turns tokens into text and pays for
them is code that text may fool. So each check stands before all that cost more, or trust more:

    who      verdict and submission are signed, and whole     `decode_delivery_untrusted`
      |      accepted, by its judge, for an author of the run   `why_refused`, `why_unwanted`
      |      no reward that no environment pays
      v
    place    room, freshness, not taken before                  `roles.trainer.intake`
      |      policy, and then the numbers of the groups
      v
    shape    every token, length and end token; a log-prob for each token, a reward for each
      |      completion
      v
    tasks    the environment makes them, of seeds that no peer chose
      |
      v
    replay   of one delivery in twenty: the model is run        `roles.trainer.audit`
      |
      v
    pay      only now the environment sees a token of it, and must pay what was signed

A validator is believed in one thing, that the model was run and the draws are the seeds'; the
replay finds out which validators must not be. Judge, author, tasks, places, shapes and rewards
the trainer knows itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from p2p.errors import RemoteProtocolError
from p2p.identity import PeerId
from p2p.node.admission import Capability
from p2p.node.node import Node
from p2p.world import decode_off_loop
from proofs.checks import Verdict
from roles.engines.base import Group, GroupTask, TrainingGroup
from roles.envs.base import Task
from roles.envs.client import ContainedEnvironment
from roles.protocol.away import away_of
from roles.protocol.core.assignment import DrawOrder, draw_order
from roles.protocol.core.judging import check_shapes, judge_all
from roles.protocol.core.lies import NO_ANSWER, Finding, worst
from roles.protocol.core.messages import (
    DECODE_RATE,
    LIED,
    MAX_REASON,
    AcceptedWork,
    Commitment,
    Receipt,
    SignedVerdict,
    Submission,
    content_digest,
    decode_groups_untrusted,
    decode_logprobs_untrusted,
)
from roles.protocol.core.pooled import PooledSignals, Signals
from roles.protocol.replay import (
    answers_of,
    as_signed,
    count_work,
    exceeded,
    wrong_reward,
)
from roles.run import Run
from roles.shared.bans import bans_of
from roles.shared.standing import RoleStanding
from roles.trainer.audit import Auditor
from roles.trainer.core.buffer import BufferedGroup
from roles.trainer.scoring import ScoringDesk


@dataclass(frozen=True, slots=True)
class Claim:
    """What a delivery says, opened: of the right place and shape, and not yet paid."""

    work: AcceptedWork
    claimed: tuple[Group, ...]
    """As the worker signed them."""
    groups: tuple[Group, ...]
    """With the validator's log-probs."""
    tasks: tuple[tuple[Task, GroupTask], ...]


class DeliveryCheck:
    """Whether a run's trainer may take a delivery, and the groups that it learns from."""

    def __init__(
        self,
        node: Node,
        run: Run,
        environment: ContainedEnvironment,
        standing: RoleStanding,
        auditor: Auditor,
    ) -> None:
        self._node = node
        self._run = run
        self._environment = environment
        self._standing = standing
        self.auditor = auditor
        self.scoring: ScoringDesk | None = None
        """Scores what workers bring; None in a run without lots."""
        self.on_leaning: Callable[[PeerId], object] = lambda _: None
        """Told of a worker whose work is acceptable each time, and not all together."""
        self.on_found: Callable[[Submission, Finding | None], Awaitable[None]] = _nothing
        """Told what the trainer's engine finds in what a worker brings."""
        self._pooled = PooledSignals(
            node.world.rng("check/pooled signals"), run.terms.lots.margin
        )

    @property
    def is_at_rest(self) -> bool:
        """Whether the run file does not let this trainer work now."""
        return bool(self._standing.why_not)

    @property
    def max_delivery(self) -> int:
        """Bytes of the longest delivery that there can be in this run."""
        return self._run.terms.work_size.max_delivery

    def turn_down(self, peer: PeerId, reason: str) -> tuple[Receipt, str]:
        """What a peer is told that is not the judge. An edition that says it is may be on its
        way here."""
        if self.is_at_rest:
            return Receipt.LATER, "the trainer rests"
        if self._node.book.hint(peer):
            return (
                Receipt.LATER,
                f"{reason}, or it has a newer run file: the trainer asks for it",
            )
        return Receipt.UNWANTED, reason

    async def recall(self) -> None:
        """Take up who was convicted in earlier lives."""
        await self.auditor.recall()

    def why_refused(self, validator: PeerId) -> str:
        """Why nothing of ``validator`` is taken any more; empty if it is not known to lie."""
        if self._node.ledgers.is_forked(validator):
            return f"{LIED}: its ledger tells two stories"
        return self.auditor.why_refused(validator)

    def why_banned(self, node: PeerId) -> str:
        """Why nothing of a worker is learnt from now; empty if something is."""
        return bans_of(self._node).why_banned(node)

    def why_unwanted(self, peer: PeerId, verdict: SignedVerdict) -> str:
        """Why a delivery of ``peer`` is no use, however much room there is; empty if it may
        be."""
        commitment = verdict.commitment
        if verdict.validator != peer:
            return "a verdict comes from the validator that signed it"
        if commitment.run != self._run.id or verdict.verdict is not Verdict.ACCEPTED:
            return "only accepted submissions of this run are taken"
        if not self._node.may(commitment.node, Capability.GENERATE):
            return f"{commitment.node} may not generate in this run"
        banned = self.why_banned(commitment.node)
        if banned:
            return banned
        run, heard = self._standing.run, away_of(self._node)
        judges = list(heard.judges_of(run, commitment.node, commitment.version))
        return "" if peer in judges else f"{judges[0]} judges this node under this policy"

    async def groups(self, work: AcceptedWork) -> list[BufferedGroup]:
        """The groups of a delivery, with rewards computed here and the validator's log-probs.

        Raises `RemoteProtocolError` if they are not what this run learns from: a validator's
        own fault; `NotBorneOut` if they are not what it signed, or might not be; and
        `EnvironmentFailed`, which is no peer's fault.
        """
        # where lots fall, one validator's word is the exception, and is never taken alone
        return await self._looked_at(work, always=self.scoring is not None)

    async def groups_replayed(self, work: AcceptedWork) -> list[BufferedGroup]:
        """The same of a delivery that is replayed, whether the lot falls on it or not."""
        return await self._looked_at(work, always=True)

    async def _looked_at(self, work: AcceptedWork, *, always: bool) -> list[BufferedGroup]:
        await self.auditor.check_possible(work)
        claim = await self._open(work, self._policy_of(work))
        drawn = [task for _, task in claim.tasks]
        await self.auditor.audit(work, drawn, claim.claimed, always=always)
        ours = await self._pay(claim)
        await self.auditor.check_rewards(work, ours)
        return self._buffered(claim, ours)

    async def groups_of_worker(
        self, submission: Submission
    ) -> tuple[AcceptedWork, list[BufferedGroup]]:
        """Work of which the trainer finds everything itself, its verdict, and the groups, if
        it accepts: rewards of its environment, log-probs and evidence of its engine.

        Raises `EnvironmentFailed`, `EngineError` and `StorageError`: nothing is known then.
        """
        assert self.scoring is not None
        commitment = submission.commitment
        policy = self._node.shardcast.manifest(commitment.version).weights_digest
        try:
            order, claimed = await self._open_claim(commitment, policy, submission.content)
        except RemoteProtocolError as error:
            verdict = self.sign(commitment, Verdict.REJECTED, str(error))
            if commitment.policy == policy:
                await self.on_found(submission, Finding(NO_ANSWER, 1, 0))
            return AcceptedWork(verdict, submission, b""), []
        made = await self._environment.tasks(order.task_seeds(commitment.index))
        tasks = order.with_draws(commitment.index, made)
        scored = await self.scoring.score(
            commitment.version, policy, [task for _, task in tasks], claimed
        )
        evidence = [one.evidence for one in scored]
        await self.on_found(submission, worst(exceeded(self._run, scored)))
        judgement = judge_all(evidence, self._run.terms.limits)
        if judgement.verdict is not Verdict.ACCEPTED:
            verdict = self.sign(commitment, judgement.verdict, judgement.reason.value)
            return AcceptedWork(verdict, submission, b""), []
        if self._pooled.note(commitment.node, commitment.version, Signals.of(evidence)):
            self.on_leaning(commitment.node)
        logprobs = b"".join(one.logprobs for one in scored)
        groups = decode_logprobs_untrusted(logprobs, claimed)
        answers = answers_of([task for task, _ in tasks], groups)
        ours = [as_signed(reward) for reward in await self._environment.rewards(answers)]
        verdict = self.sign(commitment, Verdict.ACCEPTED, "", ours, content_digest(logprobs))
        work = AcceptedWork(verdict, submission, logprobs)
        return work, self._buffered(Claim(work, claimed, groups, tuple(tasks)), ours)

    async def _open_claim(
        self, commitment: Commitment, policy: bytes, content: bytes
    ) -> tuple[DrawOrder, tuple[Group, ...]]:
        """Place and shape. Raises `RemoteProtocolError`."""
        order = draw_order(self._run, commitment.node, commitment.version, policy)
        if commitment.policy != order.policy:
            raise RemoteProtocolError("it is of another policy")
        claimed = await decode_off_loop(
            self._node.world, decode_groups_untrusted, content, rate=DECODE_RATE
        )
        if [group.group for group in claimed] != list(order.numbers(commitment.index)):
            raise RemoteProtocolError("it is of another place")
        if check_shapes(claimed, self._run.shape()).verdict is not Verdict.ACCEPTED:
            raise RemoteProtocolError("it has the wrong shape")
        return order, claimed

    def sign(
        self,
        commitment: Commitment,
        verdict: Verdict,
        reason: str,
        rewards: Sequence[float] = (),
        logprobs: bytes = b"",
    ) -> SignedVerdict:
        """A verdict of the trainer's own."""
        me, why = self._node.peer_id, reason[:MAX_REASON]
        signed = SignedVerdict(me, commitment, verdict, why, 0.0, 0.0, tuple(rewards), logprobs)
        return signed.signed(self._node.world.signer)

    async def groups_kept(self, work: AcceptedWork) -> list[BufferedGroup]:
        """As `groups`, of a submission that an earlier life has taken."""
        return await self._taken_before(work, self._policy_of(work))

    async def groups_again(self, work: AcceptedWork) -> list[BufferedGroup]:
        """As `groups`, of a submission that was learnt from before: the policy that it names,
        which may be forgotten by now, was looked at then."""
        return await self._taken_before(work, work.verdict.commitment.policy)

    def _policy_of(self, work: AcceptedWork) -> bytes:
        """Digest of the policy that it must be of."""
        return self._node.shardcast.manifest(work.verdict.commitment.version).weights_digest

    async def _taken_before(self, work: AcceptedWork, policy: bytes) -> list[BufferedGroup]:
        """Raises `RemoteProtocolError` if the disk gives back something else."""
        claim = await self._open(work, policy)
        ours = await self._pay(claim)
        if tuple(map(as_signed, ours)) != work.verdict.rewards:
            raise RemoteProtocolError("a verdict's rewards are not those of its submission")
        return self._buffered(claim, ours)

    async def _open(self, work: AcceptedWork, policy: bytes) -> Claim:
        """Place, shape and tasks. The environment has seen none of its tokens."""
        commitment = work.verdict.commitment
        order = draw_order(self._run, commitment.node, commitment.version, policy)
        if commitment.policy != order.policy:
            raise RemoteProtocolError("an accepted submission is of another policy")
        claimed, groups = await decode_off_loop(
            self._node.world,
            _open_groups_untrusted,
            work.submission.content,
            work.logprobs,
            rate=DECODE_RATE,
        )
        self._check_place(order, work, claimed)
        if check_shapes(claimed, self._run.shape()).verdict is not Verdict.ACCEPTED:
            raise RemoteProtocolError("an accepted submission has the wrong shape")
        made = await self._environment.tasks(order.task_seeds(commitment.index))
        tasks = tuple(order.with_draws(commitment.index, made))
        if work.verdict.work not in (None, count_work(tasks, claimed)):
            raise RemoteProtocolError("a verdict counts other tokens than its submission has")
        return Claim(work, claimed, groups, tasks)

    def _check_place(
        self, order: DrawOrder, work: AcceptedWork, groups: Sequence[Group]
    ) -> None:
        """Raise `RemoteProtocolError` unless these are the groups of its place, with a reward
        for each completion."""
        numbers = list(order.numbers(work.verdict.commitment.index))
        if [group.group for group in groups] != numbers:
            raise RemoteProtocolError("an accepted submission is of another place")
        if len(work.verdict.rewards) != order.group_size * len(numbers):
            raise RemoteProtocolError("a verdict's rewards do not fit its submission")

    async def _pay(self, claim: Claim) -> list[float]:
        """What the environment pays, completion after completion.

        Where that is not what was signed, the environment is asked again: if it does not repeat
        itself, its author is to blame and no validator. Raises `EnvironmentFailed`.
        """
        answers = answers_of([task for task, _ in claim.tasks], claim.groups)
        ours = await self._environment.rewards(answers)
        if wrong_reward(claim.work.verdict.rewards, ours) is not None:
            await self._environment.confirm(answers, ours)
        return ours

    def _buffered(self, claim: Claim, rewards: Sequence[float]) -> list[BufferedGroup]:
        commitment, size = claim.work.verdict.commitment, self._run.terms.recipe.group_size
        paid = tuple(map(as_signed, rewards))
        buffered = []
        for number, (group, (task, _)) in enumerate(
            zip(claim.groups, claim.tasks, strict=True)
        ):
            earned = paid[number * size : (number + 1) * size]
            learnt = tuple(replace(one, proof=b"") for one in group.completions)
            training = TrainingGroup(tuple(task.prompt), learnt, earned)
            buffered.append(
                BufferedGroup(commitment.version, commitment.content, number, training)
            )
        return buffered


async def _nothing(*_: object) -> None: ...


def _open_groups_untrusted(
    content: bytes, logprobs: bytes
) -> tuple[tuple[Group, ...], tuple[Group, ...]]:
    """The groups of a submission, as they came and with a validator's log-probs. Raise
    `BadMessage`."""
    groups = decode_groups_untrusted(content)
    return groups, decode_logprobs_untrusted(logprobs, groups)
