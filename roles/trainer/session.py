"""The trainer role: collect accepted rollouts, learn, publish. Asynchronous GRPO, as INTELLECT-2 ran it.

Theory of operation
-------------------
Deliveries of validators go to disk, then into the pool; a delivery is answered once there is room, which
is the back-pressure of the whole swarm. A step takes the oldest groups that are fresh enough. After it,
in this order: used groups, checkpoint and weights on disk, policy published, used submissions removed. A
trainer that is killed anywhere goes on from its checkpoint, and learns from every group it has taken once
(`roles.trainer.inbox`); the version never goes back, and a version that was published is never published with
other weights (SHARDCAST keeps the manifest).
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import ClassVar, Final, Self

import trio

from p2p.errors import RemoteProtocolError, StorageError
from p2p.host import Stream, send_frame
from p2p.identity import PeerId
from p2p.ledger import Ledger
from p2p.node.admission import Capability
from p2p.node.node import Node
from p2p.node.role import Progress
from p2p.node.tables import read_table
from p2p.shardcast.manifest import NO_POLICY, PolicyVersion
from p2p.wire import FrameReader
from p2p.world import dawdle, decode_off_loop
from proofs.checks import Verdict, check_shape
from roles.engines.base import Engine, EngineError, Group, StepReport, TrainingGroup
from roles.engines.client import open_engine
from roles.engines.config import DeviceProfile, MachineLimits
from roles.envs.client import ContainedEnvironment, open_environment_of
from roles.envs.contained import EnvironmentFailed, Failures
from roles.protocol.assignment import draw_order, validator_of
from roles.protocol.messages import (
    DECODE_RATE,
    HASH_RATE,
    MAX_DELIVERY,
    VERDICT_PROTOCOL,
    Receipt,
    SignedVerdict,
    Submission,
    decode_delivery_untrusted,
    decode_groups_untrusted,
    encode_receipt,
)
from roles.protocol.request import PATIENCE
from roles.rl.advantage import has_spread
from roles.run import Run, run_of
from roles.shared.checked_json import DamagedFile, keep, recall
from roles.shared.durable import Durable
from roles.shared.seats import Seats
from roles.shared.standing import Standing
from roles.trainer.buffer import GroupPool, PooledGroup
from roles.trainer.inbox import Intake

logger = logging.getLogger(__name__)

CHECKPOINT: Final = "trainer/checkpoint"
WEIGHTS: Final = "trainer/weights"
"""Folder of one safetensors file per version: SHARDCAST serves from it and wants it unchanged."""
KEPT_WEIGHTS: Final = 8
"""Versions whose files are kept: more than SHARDCAST keeps, and than may be pinned at a time."""
PROGRESS: Final = "trainer/progress.json"
INTAKE: Final = "trainer/intake"
DELIVERY_SECONDS: Final = 90.0
"""How long a delivery may take to arrive: the largest at 1 Mbit/s, and some."""
RECEIPT_KIND: Final = "receipt"
"""Kind of our ledger entries; the body is the content digest of the submission that was taken."""


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

    machine: MachineLimits = field(default_factory=MachineLimits)
    """What a run may ask of this machine, whoever owns the run."""

    profile: DeviceProfile = field(default_factory=DeviceProfile)
    """Speeds of the fake engine; others ignore it."""

    def __post_init__(self) -> None:
        if self.pool_steps < 1 or self.evaluate_every < 0:
            raise ValueError(
                "pool_steps is at least 1, or no step ever has enough, and evaluate_every at least 0"
            )


@dataclass(slots=True)
class Learnt:
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
        self._progress = Learnt()
        self._steps = 0
        self._done = False
        self._arrived = trio.Event()
        self._consumed = trio.Event()
        self._last: StepReport | None = None
        self._policy_bytes = 0
        self._pool: GroupPool | None = None
        self._taken: dict[bytes, None] = {}
        """Content digests of all submissions taken so far (their receipts are in the ledger)."""
        self._seats = Seats()
        self._failures = Failures()
        self._durable: Durable | None = None
        self._standing: Standing | None = None
        self._is_turning_away = False
        self._taking: dict[bytes, None] = {}
        """Those that are being written to disk now."""
        self._filled: dict[tuple[PeerId, PolicyVersion, int], None] = {}
        """Places in the draw order that were taken, under versions that may still be used: one submission
        each, or a validator could sell one place many times."""

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
            "staleness": {} if pool is None else dict(pool.counts.staleness),
            "groups_stale": 0 if pool is None else pool.counts.stale,
            "groups_without_spread": 0 if pool is None else pool.counts.without_spread,
            "submissions_taken": len(self._taken),
            "waits_for_disk": 0 if self._durable is None else self._durable.waiting,
            "last_step": None if self._last is None else asdict(self._last),
        }

    def progress(self) -> Progress:
        """For the live line."""
        learnt, pool = self._progress, self._pool
        parts = [f"step {learnt.step:,} of {self._steps:,}" if self._steps else "warming up"]
        if pool is not None:
            came = pool.counts.used + pool.counts.stale + pool.counts.without_spread + len(pool)
            share = f" ({pool.counts.used / came:.0%} of what came)" if came else ""
            parts += [f"{learnt.groups_used:,} groups learnt from{share}", f"{len(pool):,} waiting"]
        if learnt.greedy is not None and learnt.greedy_start is not None:
            parts.append(f"held-out tasks solved {learnt.greedy_start:.0%} -> {learnt.greedy:.0%}")
        if self._standing is not None and self._standing.why_not:
            parts.append("rests")
        return Progress(text=", ".join(parts), over=self._done)

    async def run(self, node: Node) -> None:
        """Learn until the run's steps are done, then serve what was learnt until cancelled."""
        run = run_of(node)
        recipe = run.terms.recipe
        self._steps = recipe.steps
        run.check_job(node.peer_id, self.name)
        run.check_store(node.config.shardcast.keep_versions)
        self._pool = GroupPool(max(1, round(self._config.pool_steps * recipe.groups)), recipe.lag)
        config = replace(
            run.engine_config(self._config.machine, threads=self._config.threads, nice=self._config.nice),
            profile=self._config.profile,
        )
        async with (
            open_environment_of(node.world, run, self._config.machine) as environment,
            open_engine(node.world, config, name=self.name) as engine,
            trio.open_nursery() as nursery,
        ):
            ledger = await node.ledger.opened()
            step = await self._resume(node, engine, ledger)
            standing = self._standing = Standing(node, "trainer", self.name)
            intake, durable = Intake(node.world, INTAKE), self._durable_of(node)
            desk = _Desk(node, run, environment, ledger, intake, durable, standing)
            nursery.start_soon(standing.watch)
            await self._restore_intake(desk, step)
            node.host.set_handler(VERDICT_PROTOCOL, partial(self._serve, desk))
            while step < recipe.steps:
                step = await self._step(desk, engine, step)
            self._done = True
            self._make_room()
            await trio.sleep_forever()

    async def _resume(self, node: Node, engine: Engine, ledger: Ledger) -> int:
        """Continue where the checkpoint is, or warm up; publish what it holds. Returns the step."""
        async for entry in ledger.entries(RECEIPT_KIND):
            self._taken[entry.body] = None
        step = await self._open_learner(node, engine)
        try:
            self._progress = Learnt(**(await recall(node.world.disk, PROGRESS) or {}))
        except DamagedFile as error:
            logger.warning("%s; the curve begins anew, the policy is not touched", error)
        self._progress.step = step
        node.world.sometimes("trainer/went on from a checkpoint", step > 0)
        if node.shardcast.newest < step:  # what was published is never written again
            await self._durable_of(node).insist(partial(engine.save, CHECKPOINT, _weights(step)))
        await self._publish(node, step)
        await self._evaluate(node, engine, step)
        return step

    async def _open_learner(self, node: Node, engine: Engine) -> int:
        """Continue from the newest sound checkpoint, or from the published policy if that is newer."""
        published = node.shardcast.newest
        try:
            step = await engine.open(CHECKPOINT)
        except EngineError as error:
            if published <= NO_POLICY:
                raise
            logger.warning("trainer_checkpoint_damaged %s", error)
            step = int(NO_POLICY)
        if step > published + 1:
            # A manifest names the one before it. Published without that, this version would be another than
            # the one that is out, and the trainer convicted of equivocation: the run would be over.
            raise StorageError(
                f"the checkpoint is of step {step}, but policies {published + 1} to {step - 1} are gone from "
                "store/: restore that folder from a copy, or begin a new run with a new --data"
            )
        if step < published:
            logger.warning(
                "trainer_adopts version=%d: its checkpoint is lost, so the optimiser's state begins anew",
                published,
            )
            with node.shardcast.pin(published):
                await engine.adopt(await node.shardcast.check_weights(published), published)
            step = int(published)
        return step

    def _durable_of(self, node: Node) -> Durable:
        if self._durable is None:
            self._durable = Durable(node.world, self.name)
        return self._durable

    async def _publish(self, node: Node, step: int) -> None:
        version = PolicyVersion(step)
        durable = self._durable_of(node)
        if node.shardcast.newest < version:
            await durable.insist(partial(node.shardcast.publish, version, _weights(step)))
        self._policy_bytes = node.shardcast.manifest(version).anchor.wire
        if step >= KEPT_WEIGHTS:
            await durable.insist(partial(node.world.disk.remove, _weights(step - KEPT_WEIGHTS)))
        node.world.trace("published", version=step)

    async def _evaluate(self, node: Node, engine: Engine, step: int) -> None:
        progress, every = self._progress, self._config.evaluate_every
        known = bool(progress.curve) and progress.curve[-1][0] == step
        if known or (0 < step < self._steps and (every == 0 or step % every)):
            return
        try:
            result = await engine.evaluate()
        except EngineError as error:  # for people: what it fails on need not stop the learning
            logger.error("evaluation_failed step=%d: %s", step, error)
            return
        progress.curve.append((step, result.greedy, result.sampled))
        progress.greedy, progress.reward = result.greedy, result.sampled
        if progress.greedy_start is None:
            progress.greedy_start, progress.reward_start = result.greedy, result.sampled
        await self._keep_progress(node)

    async def _keep_progress(self, node: Node) -> None:
        """For people: a disk that refuses it stops nothing."""
        try:
            await keep(node.world.disk, PROGRESS, asdict(self._progress))
        except StorageError as error:
            logger.info("progress_not_kept step=%d: %s", self._progress.step, error)

    async def _step(self, desk: _Desk, engine: Engine, step: int) -> int:
        """Wait for enough groups, learn, save, publish."""
        await desk.standing.wait()
        pooled = await self._wait_groups(desk.run.terms.recipe.groups, step)
        await desk.standing.wait()
        groups = [item.group for item in pooled]
        report = await engine.step(groups)
        step += 1
        self._note(groups, report, step)
        await desk.durable.insist(partial(desk.intake.mark_used, pooled, step))
        await dawdle(desk.node.world, "trainer/slow checkpoint")
        await desk.durable.insist(partial(engine.save, CHECKPOINT, _weights(step)))
        await self._keep_progress(desk.node)
        await desk.standing.wait()  # an edition may have come while the engine worked
        await self._publish(desk.node, step)
        desk.node.world.sometimes("trainer/learnt from an old policy", self._progress.staleness_max > 0)
        await self._forget_used(desk, step)
        await self._evaluate(desk.node, engine, step)
        return step

    async def _forget_used(self, desk: _Desk, step: int) -> None:
        """Remove the submissions of which no group can be used any more."""
        assert self._pool is not None
        self._pool.drop_stale(step)
        oldest = step - desk.run.terms.recipe.lag
        self._filled = {place: None for place in self._filled if place[1] >= oldest}
        needed = self._pool.sources | self._taking
        await desk.durable.insist(partial(desk.intake.forget_all_but, needed))
        self._make_room()

    async def _wait_groups(self, count: int, step: int) -> list[PooledGroup]:
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

    async def _serve(self, desk: _Desk, stream: Stream) -> None:
        """A `StreamHandler`: answer the deliveries of a validator. Nobody else is even read."""
        if not desk.node.may(stream.peer, Capability.VALIDATE):
            reason = f"{stream.peer} is no validator of this run"
            await send_frame(stream, encode_receipt(*desk.turn_down(stream.peer, reason)))
            return
        with self._seats.seat(stream.peer) as seated:
            if not seated:
                await send_frame(stream, encode_receipt(Receipt.LATER, "too many streams"))
                return
            reader = FrameReader(stream, MAX_DELIVERY)
            while True:
                payload = None
                with trio.move_on_after(DELIVERY_SECONDS):  # or a validator that sends nothing keeps its seat
                    payload = await reader.receive()
                if payload is None:
                    return
                if desk.standing.why_not:
                    await send_frame(stream, encode_receipt(Receipt.LATER, "the trainer rests"))
                else:
                    await send_frame(stream, encode_receipt(*await self._take(desk, stream.peer, payload)))

    async def _take(self, desk: _Desk, peer: PeerId, payload: bytes) -> tuple[Receipt, str]:
        """Answer one delivery, and say why if it is not taken."""
        world = desk.node.world
        verdict, submission = await decode_off_loop(
            world, decode_delivery_untrusted, payload, world.verify, rate=HASH_RATE
        )
        place = verdict.commitment
        reason = desk.why_unwanted(peer, verdict)
        if reason:
            return desk.turn_down(peer, reason)
        with trio.move_on_after(PATIENCE):
            while self._must_wait(desk, place.content):
                await self._consumed.wait()
        if self._must_wait(desk, place.content) or desk.node.world.buggify("trainer/says later"):
            return Receipt.LATER, "the pool is full"
        if self._done:
            return Receipt.UNWANTED, "the run has all its steps"
        desk.node.world.sometimes("trainer/was given it before", place.content in self._taken)
        if place.content in self._taken:
            return Receipt.TAKEN, ""
        if self._progress.step - place.version > desk.run.terms.recipe.lag:
            return Receipt.UNWANTED, "the policy is older than the run uses"
        if not desk.node.shardcast.holds(place.version):
            return Receipt.UNWANTED, "the policy is not held by the trainer"
        if (place.node, place.version, place.index) in self._filled:
            return Receipt.UNWANTED, "another submission was taken for this place in the draw order"
        try:
            groups = await desk.pooled(verdict, submission)
            # All of it may have changed while the environment worked.
            if place.content in self._taken or self._must_wait(desk, place.content):
                return Receipt.LATER, "it was handed over twice at a time"
            if (place.node, place.version, place.index) in self._filled:
                return Receipt.UNWANTED, "another submission was taken for this place in the draw order"
            await self._keep(desk, verdict, submission, groups)
        except (StorageError, EnvironmentFailed) as error:
            return self._turn_away(error)
        self._is_turning_away = False
        return Receipt.TAKEN, ""

    def _turn_away(self, error: StorageError | EnvironmentFailed) -> tuple[Receipt, str]:
        """The disk refuses a delivery: the validator keeps it, and hands it over again.

        What the environment fails on is lost: it would fail on it again.
        """
        if isinstance(error, EnvironmentFailed):
            self._failures.tell(error, "nothing is learnt from submissions on which it fails")
            return Receipt.UNWANTED, "the run's environment failed at the trainer"
        if not self._is_turning_away:
            logger.warning("deliveries are turned away until the disk takes data: %s", error)
        self._is_turning_away = True
        return Receipt.LATER, "the disk is full"

    def _must_wait(self, desk: _Desk, content: bytes) -> bool:
        """Whether a delivery can be neither taken nor turned down now."""
        if self._done or content in self._taken:
            return False
        assert self._pool is not None
        coming = len(self._taking) * desk.run.terms.recipe.submission
        return content in self._taking or not self._pool.has_room_behind(coming)

    async def _keep(
        self, desk: _Desk, verdict: SignedVerdict, submission: Submission, groups: list[PooledGroup]
    ) -> None:
        """Disk, ledger, pool, in this order: whoever is told that it was taken can rely on it."""
        place = verdict.commitment
        content = place.content
        self._taking[content] = None
        self._filled[(place.node, place.version, place.index)] = None
        try:
            if any(has_spread(pooled.group.rewards) for pooled in groups):  # else no step ever takes one
                await desk.intake.keep(verdict, submission)
            await dawdle(desk.node.world, "trainer/slow receipt")
            await desk.ledger.append(RECEIPT_KIND, content)
            self._taken[content] = None
            self._pool_in(groups)
        finally:
            del self._taking[content]
            if content not in self._taken:
                del self._filled[(place.node, place.version, place.index)]
            self._make_room()

    def _pool_in(self, groups: list[PooledGroup]) -> None:
        assert self._pool is not None
        self._pool.add(groups)
        self._arrived.set()

    async def _restore_intake(self, desk: _Desk, step: int) -> None:
        """Take up again what was received and not yet learnt from."""
        async for verdict, submission, used in desk.intake.restore(step):
            place = verdict.commitment
            content = place.content
            self._filled[(place.node, place.version, place.index)] = None
            if content not in self._taken:  # killed between the file and the receipt
                self._taken[content] = None
                await desk.durable.insist(partial(desk.ledger.append, RECEIPT_KIND, content))
            if not desk.node.shardcast.holds(verdict.commitment.version):
                continue  # so old that no step may use it: forgotten after the next one
            try:
                groups = await desk.pooled(verdict, submission)
            except (RemoteProtocolError, EnvironmentFailed) as error:
                logger.warning("intake_unusable %s: %s", content.hex(), error)
                continue
            self._pool_in([group for group in groups if group.number not in used])


def _as_float32(reward: float) -> float:
    value: float = struct.unpack("<f", struct.pack("<f", reward))[0]
    return value


def _weights(step: int) -> str:
    return f"{WEIGHTS}/{step:08d}.safetensors"


@dataclass(frozen=True, slots=True)
class _Desk:
    """What taking deliveries needs: opened once, the same for all."""

    node: Node
    run: Run
    environment: ContainedEnvironment
    ledger: Ledger
    intake: Intake
    durable: Durable
    standing: Standing

    def turn_down(self, peer: PeerId, reason: str) -> tuple[Receipt, str]:
        """What a peer is told that is not the judge. An edition that says it is may be on its way here."""
        if self.standing.why_not:
            return Receipt.LATER, "the trainer rests"
        if self.node.book.hint(peer):
            return Receipt.LATER, f"{reason}, or it has a newer run file: the trainer asks for it"
        return Receipt.UNWANTED, reason

    def why_unwanted(self, peer: PeerId, verdict: SignedVerdict) -> str:
        """Why a delivery of ``peer`` is no use whatever the pool holds; empty if it may be."""
        place = verdict.commitment
        if verdict.validator != peer:
            return "a verdict comes from the validator that signed it"
        if place.run != self.run.id or verdict.verdict is not Verdict.ACCEPTED:
            return "only accepted submissions of this run are taken"
        if not self.node.may(place.node, Capability.GENERATE):
            return f"{place.node} may not generate in this run"
        judge = validator_of(self.standing.run, place.node, place.version)
        return "" if peer == judge else f"{judge} judges this node under this policy"

    async def open_groups(self, submission: Submission) -> tuple[Group, ...]:
        """Its groups, decoded in a thread if they are long. Raises `BadMessage`."""
        return await decode_off_loop(
            self.node.world, decode_groups_untrusted, submission.content, rate=DECODE_RATE
        )

    async def pooled(self, verdict: SignedVerdict, submission: Submission) -> list[PooledGroup]:
        """The groups of an accepted submission, with rewards computed here.

        The validator is believed in one thing, that the model was run and the draws are the seeds'; the
        trainer could find that out by a replay only. Tasks, places, shapes and rewards it knows itself.
        Raises `RemoteProtocolError` if they are not what this run learns from: a validator's own fault; and
        `EnvironmentFailed`, which is neither's.
        """
        place = verdict.commitment
        groups = await self.open_groups(submission)
        order = draw_order(self.node, self.run, place.version, place.node)
        tasks = await order.tasks(self.environment, place.index)
        size = self.run.terms.recipe.group_size
        if place.policy != order.policy or [g.group for g in groups] != [task.group for _, task in tasks]:
            raise RemoteProtocolError("an accepted submission is of another policy or place")
        if len(verdict.rewards) != size * len(groups):
            raise RemoteProtocolError("a verdict's rewards do not fit its submission")
        self._check_shapes(groups)
        # A verdict carries rewards as float32.
        answers = [
            (task, [completion.tokens for completion in group.completions])
            for (task, _), group in zip(tasks, groups, strict=True)
        ]
        rewards = tuple(map(_as_float32, await self.environment.rewards(answers)))
        if rewards != verdict.rewards:
            raise RemoteProtocolError("a verdict's rewards are not those of its submission")
        pooled = []
        for number, (group, (task, _)) in enumerate(zip(groups, tasks, strict=True)):
            paid = rewards[number * size : (number + 1) * size]
            training = TrainingGroup(tuple(task.prompt), group.completions, paid)
            pooled.append(PooledGroup(place.version, place.content, number, training))
        return pooled

    def _check_shapes(self, groups: Sequence[Group]) -> None:
        """Raise `RemoteProtocolError` if one is not shaped as all of this run are."""
        shape = self.run.shape(self.environment.end_token)
        for group in groups:
            claims = [completion.logprobs for completion in group.completions]
            tokens = [completion.tokens for completion in group.completions]
            if check_shape(tokens, claims, shape).verdict is not Verdict.ACCEPTED:
                raise RemoteProtocolError("an accepted submission has the wrong shape")
