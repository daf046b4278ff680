"""The trainer's engine as a scorer: one policy at a time, callers by turns.

The engine is the learner's (`roles.trainer.audit` says why). A host ends what it does for a
peer that goes away, and an engine must not be left in the middle of a call: so what is scored
for a peer is scored by a task of the trainer's own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio

from p2p.concurrency import Notifier
from p2p.errors import StorageError
from p2p.node.node import Node
from p2p.shardcast.manifest import NO_POLICY, PolicyVersion
from roles.engines.base import Engine, EngineError, Group, GroupTask, Scored
from roles.protocol.core.assignment import run_sampling
from roles.run import run_of


class PolicyScorer:
    """Who may use the engine, and which policy it scores by."""

    def __init__(self, node: Node, engine: Engine) -> None:
        self._node = node
        self._engine = engine
        self._turn = trio.Lock()
        self._loaded = NO_POLICY, b""

    @asynccontextmanager
    async def holding(self, version: PolicyVersion, policy: bytes) -> AsyncIterator[Engine]:
        """The engine with this policy, for the length of the block. Raises `EngineError`, also
        of a policy that is not held any more once it is the caller's turn, and `StorageError`.
        """
        async with self._turn:
            if not self._node.shardcast.holds(version):
                raise EngineError("the policy is not held any more")
            with self._node.shardcast.pin(version) as weights:
                if (version, policy) != self._loaded:
                    await self._node.shardcast.check_weights(version)
                    self._loaded = NO_POLICY, b""  # should it fail in the middle
                    await self._engine.load(weights)
                    self._loaded = version, policy
                yield self._engine


@dataclass(slots=True, eq=False)
class _Job:
    version: PolicyVersion
    policy: bytes
    tasks: Sequence[GroupTask]
    groups: Sequence[Group]
    done: trio.Event = field(default_factory=trio.Event)
    scored: list[Scored] = field(default_factory=list)
    error: Exception | None = None


class ScoringDesk:
    """What workers hand in, scored in the order in which it came."""

    def __init__(self, node: Node, scorer: PolicyScorer) -> None:
        self._node = node
        self._scorer = scorer
        self._jobs: deque[_Job] = deque()
        self._asked = Notifier()
        self.groups = 0
        """Scored so far."""

    async def score(
        self,
        version: PolicyVersion,
        policy: bytes,
        tasks: Sequence[GroupTask],
        groups: Sequence[Group],
    ) -> list[Scored]:
        """As `roles.engines.base.Scorer.score`, under a policy that is held here. Raises
        `EngineError` and `StorageError`."""
        job = _Job(version, policy, tasks, groups)
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
                await self._do(self._jobs[0])
                self._jobs.popleft().done.set()
        finally:
            for job in self._jobs:
                job.error = EngineError("the trainer's engine has stopped")
                job.done.set()
            self._jobs.clear()

    async def _do(self, job: _Job) -> None:
        sampling = run_sampling(run_of(self._node))
        try:
            async with self._scorer.holding(job.version, job.policy) as engine:
                for task, group in zip(job.tasks, job.groups, strict=True):
                    # one at a time: a step waits for one group at most
                    job.scored += await engine.score([task], [group], sampling)
                    self.groups += 1
        except (EngineError, StorageError) as error:
            job.error = error
