"""What a delivery must be for the trainer to learn from it, computed anew rather than believed.

A validator is believed in one thing, that the model was run and the draws are the seeds'; the
trainer could find that out by a replay only. Judge, author, tasks, places, shapes and rewards
it knows itself.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace

from p2p.errors import RemoteProtocolError
from p2p.identity import PeerId
from p2p.node.admission import Capability
from p2p.node.node import Node
from p2p.world import decode_off_loop
from proofs.checks import Verdict, check_shape
from roles.engines.base import Group, TrainingGroup
from roles.envs.client import ContainedEnvironment
from roles.protocol.core.assignment import draw_order, validator_of
from roles.protocol.core.messages import (
    DECODE_RATE,
    AcceptedWork,
    Receipt,
    SignedVerdict,
    decode_groups_untrusted,
    decode_logprobs_untrusted,
)
from roles.run import Run
from roles.shared.standing import RoleStanding
from roles.trainer.core.buffer import BufferedGroup


class DeliveryCheck:
    """Whether a run's trainer may take a delivery, and the groups that it learns from."""

    def __init__(
        self, node: Node, run: Run, environment: ContainedEnvironment, standing: RoleStanding
    ) -> None:
        self._node = node
        self._run = run
        self._environment = environment
        self._standing = standing

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
        judge = validator_of(self._standing.run, commitment.node, commitment.version)
        return "" if peer == judge else f"{judge} judges this node under this policy"

    async def groups(self, work: AcceptedWork) -> list[BufferedGroup]:
        """The groups of an accepted submission, with rewards computed here and the validator's
        log-probs.

        Raises `RemoteProtocolError` if they are not what this run learns from: a validator's
        own fault; and `EnvironmentFailed`, which is neither's.
        """
        policy = self._node.shardcast.manifest(work.verdict.commitment.version).weights_digest
        return await self._groups(work, policy)

    async def groups_again(self, work: AcceptedWork) -> list[BufferedGroup]:
        """As `groups`, of a submission that was taken before: the policy that it names, which
        may be forgotten by now, was looked at then."""
        return await self._groups(work, work.verdict.commitment.policy)

    async def _groups(self, work: AcceptedWork, policy: bytes) -> list[BufferedGroup]:
        verdict = work.verdict
        commitment = verdict.commitment
        groups = await decode_off_loop(
            self._node.world,
            _open_groups_untrusted,
            work.submission.content,
            work.logprobs,
            rate=DECODE_RATE,
        )
        order = draw_order(self._run, commitment.node, commitment.version, policy)
        seeds = order.task_seeds(commitment.index)
        tasks = order.with_draws(commitment.index, await self._environment.tasks(seeds))
        size = self._run.terms.recipe.group_size
        numbers = [task.group for _, task in tasks]
        if commitment.policy != order.policy or [group.group for group in groups] != numbers:
            raise RemoteProtocolError("an accepted submission is of another policy or place")
        if len(verdict.rewards) != size * len(groups):
            raise RemoteProtocolError("a verdict's rewards do not fit its submission")
        self._check_shapes(groups)
        answers = [
            (task, [completion.tokens for completion in group.completions])
            for (task, _), group in zip(tasks, groups, strict=True)
        ]
        rewards = tuple(map(_as_float32, await self._environment.rewards(answers)))
        if rewards != verdict.rewards:
            raise RemoteProtocolError("a verdict's rewards are not those of its submission")
        checked = []
        for number, (group, (task, _)) in enumerate(zip(groups, tasks, strict=True)):
            paid = rewards[number * size : (number + 1) * size]
            learnt = tuple(replace(one, proof=b"") for one in group.completions)
            training = TrainingGroup(tuple(task.prompt), learnt, paid)
            checked.append(
                BufferedGroup(commitment.version, commitment.content, number, training)
            )
        return checked

    def _check_shapes(self, groups: Sequence[Group]) -> None:
        """Raise `RemoteProtocolError` if one is not shaped as all of this run are."""
        shape = self._run.shape()
        for group in groups:
            tokens = [completion.tokens for completion in group.completions]
            if check_shape(tokens, shape).verdict is not Verdict.ACCEPTED:
                raise RemoteProtocolError("an accepted submission has the wrong shape")


def _open_groups_untrusted(content: bytes, logprobs: bytes) -> tuple[Group, ...]:
    """The groups of a submission, with a validator's log-probs. Raise `BadMessage`."""
    return decode_logprobs_untrusted(logprobs, decode_groups_untrusted(content))


def _as_float32(reward: float) -> float:
    """As a verdict carries it."""
    value: float = struct.unpack("<f", struct.pack("<f", reward))[0]
    return value
