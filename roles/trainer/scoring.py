"""The trainer's engine as a scorer: the oldest policy first, each loaded once a pass.

The engine is the learner's (`roles.trainer.audit` says why), and deliveries under ``lag`` + 1
policies come interleaved. To change the policy costs a hash and a load of all weights, so the
desk takes all that waits under the oldest policy before it turns to the next.

A host ends what it does for a peer that goes away, and an engine must not be left in the middle
of a call: `ScoringDesk.work_forever` is a task of the trainer's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import trio

from p2p.concurrency import Notifier
from p2p.errors import StorageError
from p2p.node.node import Node
from p2p.shardcast.manifest import NO_POLICY, PolicyVersion
from roles.engines.base import Engine, EngineError, Group, GroupTask, Scored
from roles.protocol.core.assignment import run_sampling
from roles.run import run_of

_Policy = tuple[PolicyVersion, bytes]
"""A version, and the digest of its weights."""


@dataclass(slots=True, eq=False)
class _Job:
    policy: _Policy
    tasks: Sequence[GroupTask]
    groups: Sequence[Group]
    done: trio.Event = field(default_factory=trio.Event)
    scored: list[Scored] = field(default_factory=list)
    error: Exception | None = None

    def finish(self, error: Exception | None = None) -> None:
        self.error = error
        self.done.set()


class ScoringDesk:
    """Submissions that wait for the trainer's engine."""

    def __init__(self, node: Node, engine: Engine) -> None:
        self._node = node
        self._engine = engine
        self._jobs: list[_Job] = []
        self._asked = Notifier()
        self._loaded: _Policy = NO_POLICY, b""

    def __len__(self) -> int:
        return len(self._jobs)

    async def score(
        self,
        version: PolicyVersion,
        policy: bytes,
        tasks: Sequence[GroupTask],
        groups: Sequence[Group],
    ) -> list[Scored]:
        """Score one submission under the policy ``version``, whose weights have the digest
        ``policy``.

        Raises:
            EngineError: the engine fails or has stopped, or the policy is not held any more.
            StorageError: the weights cannot be read.
        """
        job = _Job((version, policy), tasks, groups)
        self._jobs.append(job)
        self._asked.notify_all()
        await job.done.wait()
        if job.error is not None:
            raise job.error
        return job.scored

    async def work_forever(self) -> None:
        """Score what is asked, until cancelled. Raises `WorkerDied`: the learner has died with
        it."""
        try:
            while True:
                while not self._jobs:
                    await self._asked.wait()
                await self._score_oldest()
        finally:
            for job in self._jobs:
                job.finish(EngineError("the trainer's engine has stopped"))
            self._jobs.clear()

    async def _score_oldest(self) -> None:
        """Score what waits now under the oldest policy. What comes meanwhile waits for the next
        pass, so that no policy keeps the others waiting."""
        policy = min(job.policy for job in self._jobs)
        for job in [job for job in self._jobs if job.policy == policy]:
            try:
                await self._score(job)
            except (EngineError, StorageError) as error:
                self._jobs.remove(job)
                job.finish(error)
            else:
                self._jobs.remove(job)
                job.finish()

    async def _score(self, job: _Job) -> None:
        version, shardcast = job.policy[0], self._node.shardcast
        if not shardcast.holds(version):
            raise EngineError("the policy is not held any more")
        with shardcast.pin(version) as weights:
            if job.policy != self._loaded:
                await shardcast.check_weights(version)
                self._loaded = NO_POLICY, b""  # the engine holds none if the load fails
                await self._engine.load(weights)
                self._loaded = job.policy
            sampling = run_sampling(run_of(self._node))
            job.scored = await self._engine.score(job.tasks, job.groups, sampling)
