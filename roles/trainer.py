"""The trainer role: collect accepted rollouts, learn, publish. Asynchronous GRPO, as INTELLECT-2 ran it.

Theory of operation
-------------------
Deliveries of validators go to disk, then into the pool; a delivery is answered once there is room, which
is the back-pressure of the whole swarm. A step takes the oldest groups that are fresh enough. After it,
in this order: checkpoint and weights on disk, policy published, used submissions removed. A trainer that
is killed anywhere goes on from its checkpoint; the version never goes back, and a version that was
published is never published with other weights (SHARDCAST keeps the manifest).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import ClassVar, Final, Self

import trio

from p2p.errors import BadMessage, RemoteProtocolError
from p2p.host import serve_requests
from p2p.identity import PeerId
from p2p.node.admission import Capability
from p2p.node.node import Node
from p2p.node.tables import read_table
from p2p.shardcast.manifest import PolicyVersion
from p2p.wire import pack
from proofs.checks import Verdict
from roles.draws import draw_order
from roles.engines.base import Engine, StepReport, TrainingGroup
from roles.engines.client import open_engine
from roles.engines.config import DeviceProfile
from roles.envs.base import Environment
from roles.messages import (
    MAX_SUBMISSION,
    VERDICT_PROTOCOL,
    SignedVerdict,
    Submission,
    decode_delivery_untrusted,
    decode_groups_untrusted,
    encode_delivery,
)
from roles.pool import GroupPool, PooledGroup
from roles.run import Ledger, Run, open_ledger, run_of

logger = logging.getLogger(__name__)

CHECKPOINT: Final = "trainer/checkpoint"
WEIGHTS: Final = "trainer/weights"
"""Folder of one safetensors file per version: SHARDCAST serves from it and wants it unchanged."""
KEPT_WEIGHTS: Final = 8
"""Versions whose files are kept: more than SHARDCAST keeps, and than may be pinned at a time."""
PROGRESS: Final = "trainer/progress.json"
INTAKE: Final = "trainer/intake"
RECEIPT_KIND: Final = "receipt"
"""Kind of our ledger entries; the body is the verdict that was taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """This machine's part; everything else is in the run file."""

    threads: int = 1
    """Threads of the engine."""

    nice: int = 0
    """Niceness of the engine's process."""

    pool_steps: float = 1.5
    """Optimiser steps' worth of groups that may wait: more grows stale, less leaves the engine idle."""

    evaluate_every: int = 10
    """Steps between evaluations on the held-out tasks (0: only at the start and the end)."""

    profile: DeviceProfile = field(default_factory=DeviceProfile)
    """Speeds of the fake engine; others ignore it."""


@dataclass(slots=True)
class Progress:
    """What people want to know of a run, kept beside the checkpoint."""

    step: int = 0
    greedy_start: float | None = None
    reward_start: float | None = None
    greedy: float | None = None
    reward: float | None = None
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    """(step, greedy, sampled) at each evaluation."""
    staleness_max: int = 0
    groups_used: int = 0
    train_reward: float = 0.0
    """Mean reward of the last step's groups, which are those with spread."""


class Trainer:
    """Owns the policy of a run."""

    name: ClassVar[str] = "trainer"

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        self._progress = Progress()
        self._steps = 0
        self._done = False
        self._arrived = trio.Event()
        self._consumed = trio.Event()
        self._last: StepReport | None = None
        self._policy_bytes = 0
        self._pool: GroupPool | None = None
        self._taken: dict[bytes, None] = {}
        """Content digests of all submissions taken so far (their receipts are in the ledger)."""
        self._on_disk: dict[bytes, None] = {}
        """Those of which a group is still to be learnt from."""

    @classmethod
    def from_config(cls, table: Mapping[str, object]) -> Self:
        """Made from ``[role.trainer]``."""
        return cls(read_table(TrainerConfig, table, "[role.trainer]"))

    def health(self) -> dict[str, object]:
        """Counts for people and dashboards."""
        pool = self._pool
        return {
            **asdict(self._progress),
            "steps": self._steps,
            "done": self._done,
            "policy_bytes": self._policy_bytes,
            "pooled": 0 if pool is None else len(pool),
            "groups_stale": 0 if pool is None else pool.counts.stale,
            "groups_without_spread": 0 if pool is None else pool.counts.without_spread,
            "submissions_taken": len(self._taken),
            "last_step": None if self._last is None else asdict(self._last),
        }

    async def run(self, node: Node) -> None:
        """Learn until the run's steps are done, then serve what was learnt until cancelled."""
        run = run_of(node)
        recipe = run.terms.recipe
        self._steps = recipe.steps
        self._pool = GroupPool(max(1, round(self._config.pool_steps * recipe.groups)), recipe.lag)
        environment = run.open_environments()[0]
        config = replace(
            run.engine_config(threads=self._config.threads, nice=self._config.nice),
            profile=self._config.profile,
        )
        async with (
            open_ledger(node.world, "ledger") as ledger,
            open_engine(node.world, config, name=self.name) as engine,
        ):
            step = await self._resume(node, engine, ledger)
            desk = _Desk(node, run, environment, ledger)
            await self._restore_intake(desk)

            async def answer(peer: PeerId, payload: bytes) -> bytes:
                taken, reason = await self._take(desk, peer, payload)
                return pack([taken, reason])

            node.host.set_handler(VERDICT_PROTOCOL, serve_requests(answer, max_request=MAX_SUBMISSION))
            while step < recipe.steps:
                step = await self._step(desk, engine, step)
            self._done = True
            await trio.sleep_forever()

    async def _resume(self, node: Node, engine: Engine, ledger: Ledger) -> int:
        """Continue where the checkpoint is, or warm up; publish what it holds. Returns the step."""
        async for entry in ledger.entries(RECEIPT_KIND):
            self._taken[entry.body] = None
        step = await engine.open(CHECKPOINT)
        if await node.world.disk.size(PROGRESS) is not None:
            values = json.loads(await node.world.disk.read(PROGRESS))
            self._progress = Progress(**values)
        self._progress.step = step
        await engine.save(CHECKPOINT, _weights(step))
        await self._publish(node, step)
        await self._evaluate(node, engine, step)
        return step

    async def _publish(self, node: Node, step: int) -> None:
        version = PolicyVersion(step)
        if node.shardcast.newest < version:
            await node.shardcast.publish(version, _weights(step))
        self._policy_bytes = node.shardcast.manifest(version).anchor.wire
        if step >= KEPT_WEIGHTS:
            await node.world.disk.remove(_weights(step - KEPT_WEIGHTS))
        node.world.trace("published", version=step)

    async def _evaluate(self, node: Node, engine: Engine, step: int) -> None:
        progress, every = self._progress, self._config.evaluate_every
        known = bool(progress.curve) and progress.curve[-1][0] == step
        if known or (0 < step < self._steps and (every == 0 or step % every)):
            return
        result = await engine.evaluate()
        progress.curve.append((step, result.greedy, result.sampled))
        progress.greedy, progress.reward = result.greedy, result.sampled
        if progress.greedy_start is None:
            progress.greedy_start, progress.reward_start = result.greedy, result.sampled
        await node.world.disk.replace(PROGRESS, json.dumps(asdict(progress)).encode())

    async def _step(self, desk: _Desk, engine: Engine, step: int) -> int:
        """Wait for enough groups, learn, save, publish."""
        groups = await self._wait_groups(desk.run.terms.recipe.groups, step)
        report = await engine.step(groups)
        step += 1
        self._note(groups, report, step)
        await engine.save(CHECKPOINT, _weights(step))
        await desk.node.world.disk.replace(PROGRESS, json.dumps(asdict(self._progress)).encode())
        await self._publish(desk.node, step)
        await self._forget_used(desk, step)
        await self._evaluate(desk.node, engine, step)
        return step

    async def _forget_used(self, desk: _Desk, step: int) -> None:
        """Remove the submissions of which no group can be used any more."""
        assert self._pool is not None
        self._pool.drop_stale(step)
        left = self._pool.sources
        for digest in [digest for digest in self._on_disk if digest not in left]:
            del self._on_disk[digest]
            await desk.node.world.disk.remove(f"{INTAKE}/{digest.hex()}")
        self._make_room()

    async def _wait_groups(self, count: int, step: int) -> list[TrainingGroup]:
        assert self._pool is not None
        while (groups := self._pool.take(count, step)) is None:
            self._make_room()
            self._arrived = trio.Event()
            await self._arrived.wait()
        self._make_room()
        return groups

    def _make_room(self) -> None:
        self._consumed.set()
        self._consumed = trio.Event()

    def _note(self, groups: list[TrainingGroup], report: StepReport, step: int) -> None:
        assert self._pool is not None
        progress = self._progress
        rewards = [reward for group in groups for reward in group.rewards]
        progress.step = step
        progress.train_reward = sum(rewards) / len(rewards)
        progress.groups_used += len(groups)
        progress.staleness_max = max(progress.staleness_max, self._pool.counts.staleness_max)
        self._last = report
        logger.info("step %d: reward %.3f, k3 %.4f", step, progress.train_reward, report.k3)

    async def _take(self, desk: _Desk, peer: PeerId, payload: bytes) -> tuple[bool, str]:
        """Answer one delivery: (taken, why not)."""
        world = desk.node.world
        verdict, submission = decode_delivery_untrusted(payload, world.verify)
        place = verdict.commitment
        if verdict.validator != peer or not desk.run.may(peer, Capability.VALIDATE):
            return False, f"{peer} is no validator of this run"
        if place.run != desk.run.id or verdict.verdict is not Verdict.ACCEPTED:
            return False, "only accepted submissions of this run are taken"
        while not self._done and place.content not in self._taken and not self._has_room():
            await self._consumed.wait()
        if self._done:
            return False, "the run has all its steps"
        if place.content in self._taken:
            return True, ""
        if self._progress.step - place.version > desk.run.terms.recipe.lag:
            return False, "the policy is older than the run uses"
        groups = desk.pooled(verdict, submission)
        self._taken[place.content] = None
        await world.disk.replace(f"{INTAKE}/{place.content.hex()}", encode_delivery(verdict, submission))
        self._on_disk[place.content] = None
        self._pool_in(groups)
        await desk.ledger.append(RECEIPT_KIND, place.content)
        return True, ""

    def _has_room(self) -> bool:
        return self._pool is not None and self._pool.has_room

    def _pool_in(self, groups: list[PooledGroup]) -> None:
        assert self._pool is not None
        self._pool.add(groups)
        self._arrived.set()

    async def _restore_intake(self, desk: _Desk) -> None:
        """Take up again what was received and not yet learnt from."""
        disk = desk.node.world.disk
        for name in await disk.list(INTAKE):
            data = await disk.read(f"{INTAKE}/{name}")
            try:
                verdict, submission = decode_delivery_untrusted(data, desk.node.world.verify)
                self._pool_in(desk.pooled(verdict, submission))
                self._on_disk[verdict.commitment.content] = None
            except (BadMessage, KeyError) as error:
                logger.warning("intake_unreadable %s: %s", name, error)


def _weights(step: int) -> str:
    return f"{WEIGHTS}/{step:08d}.safetensors"


@dataclass(frozen=True, slots=True)
class _Desk:
    """What taking deliveries needs: opened once, the same for all."""

    node: Node
    run: Run
    environment: Environment
    ledger: Ledger

    def pooled(self, verdict: SignedVerdict, submission: Submission) -> list[PooledGroup]:
        """The groups of an accepted submission, with the validator's rewards.

        Raises `RemoteProtocolError` if the rewards do not fit: a validator's own fault.
        """
        place = verdict.commitment
        groups = decode_groups_untrusted(submission.content)
        size = self.run.terms.recipe.group_size
        if len(verdict.rewards) != size * len(groups):
            raise RemoteProtocolError("a verdict's rewards do not fit its submission")
        order = draw_order(self.node, self.run, place.version, place.node)
        tasks = order.tasks(self.environment, place.index)
        pooled = []
        for number, (group, (_, task)) in enumerate(zip(groups, tasks, strict=True)):
            rewards = verdict.rewards[number * size : (number + 1) * size]
            training = TrainingGroup(task.prompt, group.completions, rewards)
            pooled.append(PooledGroup(place.version, place.content, training))
        return pooled
