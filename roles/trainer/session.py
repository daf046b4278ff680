"""A trainer at work: collect accepted rollouts, learn, publish.

Asynchronous GRPO, as INTELLECT-2 ran it.

Theory of operation
-------------------
Accepted places go to disk, then into the buffer (`roles.trainer.intake`). A step takes the
oldest groups that are fresh enough, and which it takes is on disk before the engine has them.
After it, in this order: whose work it learnt from in the ledger; its weights and, every
``checkpoint_every`` steps, a checkpoint on disk; the policy published; the submissions removed
that the older checkpoint covers.

A trainer that is killed anywhere goes on from its checkpoint: it takes the logged steps after
it again, from the same groups (`roles.trainer.inbox`), and so comes to where it was; on a CPU
bit for bit. It learns from every group it has taken once. The version never goes back, and a
version that was published is never published with other weights: SHARDCAST keeps the manifest,
and weights that are on disk are not written again, lest another CPU round them otherwise.
"""

from __future__ import annotations

import logging
from contextlib import aclosing
from dataclasses import asdict
from functools import partial

import trio

from p2p.errors import StorageError
from p2p.node.node import Node
from p2p.shardcast.manifest import NO_POLICY, PolicyVersion
from p2p.world import dawdle
from roles.engines.base import EngineError, Learner, StepReport
from roles.protocol.core.account import TrainerDoing
from roles.protocol.standing import RoleStanding
from roles.rl.learner import LearnerConfig
from roles.trainer.core.guards import LearningGuards
from roles.trainer.curve import LearningCurve
from roles.trainer.desk import WorkDesk
from roles.trainer.intake import ALIKE, Intake
from roles.trainer.metrics import Metrics
from roles.trainer.policies import PolicyFiles

logger = logging.getLogger(__name__)


class TrainerSession:
    """One trainer's work for one run, from its start to its end."""

    def __init__(
        self,
        node: Node,
        steps: int,
        learner: LearnerConfig,
        engine: Learner,
        intake: Intake,
        desk: WorkDesk,
        curve: LearningCurve,
        standing: RoleStanding,
        policies: PolicyFiles,
        metrics: Metrics,
    ) -> None:
        self.node = node
        self.intake = intake
        self.desk = desk
        self.curve = curve
        self.engine = engine
        self._steps = steps
        self._learner = learner
        self._note = bytes.fromhex(learner.digest)
        """Digest of the learner's settings, written into each manifest."""
        self.groups = learner.groups
        """Number of groups that a step takes."""
        self._standing = standing
        self._policies = policies
        self._metrics = metrics
        self.doing = TrainerDoing.OPENS
        self.has_books = False
        """True once the books of earlier processes have been read."""
        self.is_over = False
        """True once the run has taken all its steps."""
        self.policy_bytes = 0
        """Bytes of the newest policy as it travels."""
        self.last_step: StepReport | None = None
        self.wrong = ""
        """Problem of the last step, and the setting of learner.toml that corrects it."""
        self._guards = LearningGuards()

    @property
    def warning(self) -> str:
        """Warning about the learning for people; empty if there is none."""
        return (
            self.engine.warning
            or self.wrong
            or self.curve.unexamined
            or self._why_nothing_is_learnt
        )

    @property
    def _why_nothing_is_learnt(self) -> str:
        alike, greedy = self.intake.alike, self.curve.learnt.greedy or 0.0
        if alike < ALIKE or self.is_over:
            return ""
        remedy = "harder tasks" if greedy > 0.5 else "easier tasks, hints, or partial rewards"
        return (
            f"nothing is learnt: all answers to each of the last {alike:,} tasks earned the"
            f" same. Give {remedy}; shoal eval --show 5 prints answers"
        )

    @property
    def newest(self) -> str:
        """Path of the newest policy: a file, or in a run with a base a folder."""
        return self.node.world.disk.locate(self._policies.weights(self.curve.learnt.step))

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        return self._learner.rate_at(self.curve.learnt.step, self._steps)

    @property
    def why_not(self) -> str:
        """Reason why the run file does not let this trainer work now; empty if it does."""
        return self._standing.why_not

    def workers(self) -> dict[str, dict[str, object]]:
        """Return the rate of accepted work of each worker, and whether it meets the run's
        minimum."""
        least = self._standing.run.terms.admission.min_tokens_per_second
        return self.intake.paces.health(self.node.world.now(), least)

    @property
    def writes_waiting(self) -> int:
        """Writes that the disk has refused so far."""
        return self._policies.durable.waiting + self.engine.writes_waiting

    async def work_forever(self) -> None:
        """Learn until the run's steps are done, then serve what was learnt until cancelled."""
        async with trio.open_nursery() as nursery:
            step = await self._resume()
            nursery.start_soon(self._standing.watch)
            await self.intake.restore(step)
            self.has_books = True
            nursery.start_soon(self.desk.work_forever)
            while step < self._steps:
                step = await self._step(step)
            self.is_over, self.doing = True, TrainerDoing.OVER
            self.intake.finish()
            await trio.sleep_forever()

    async def _resume(self) -> int:
        """Continue from the checkpoint, or warm up, and publish that policy. Returns the
        step."""
        await self.intake.recall()
        if self.node.shardcast.newest == NO_POLICY:
            self.doing = TrainerDoing.WARMS_UP
        step = await self.open_learner()
        await self.curve.restore(step)
        world = self.node.world
        world.sometimes("trainer/went on from a checkpoint", step > 0)
        shardcast = self.node.shardcast
        await self._policies.keep_found(
            step,
            is_published=shardcast.newest >= step,
            is_signed=shardcast.signed >= step,
        )
        await self.publish(step)
        self.doing = TrainerDoing.EVALUATES
        await self.curve.evaluate(self.engine, step)
        return step

    async def open_learner(self) -> int:
        """Continue from the newest sound checkpoint, or from the published policy if that is
        newer."""
        published, signed = self.node.shardcast.newest, self.node.shardcast.signed
        try:
            step = await self._policies.open()
        except EngineError as error:
            if max(published, signed) <= NO_POLICY:
                raise
            logger.warning("trainer_checkpoint_damaged %s", error)
            step = int(NO_POLICY)
        else:
            step = await self._learn_again(step)
        if step < signed > published:
            logger.warning(
                "trainer_waits version=%d: its weights and its checkpoint are lost, peers have"
                " them",
                signed,
            )
            published = await self.node.shardcast.wait_policy(signed)
        if step > max(published, signed) + 1:
            # A manifest names the one before it. Published without that, this version would be
            # another than the one that is out, and the trainer convicted of equivocation: the
            # run would be over.
            raise StorageError(
                f"the checkpoint is of step {step}, but policies {published + 1} to {step - 1}"
                " are gone from store/: restore that folder from a copy, or begin a new run"
                " with a new --data"
            )
        if step < published:
            logger.warning(
                "trainer_adopts version=%d: its checkpoint is lost, so the optimiser's state"
                " begins anew",
                published,
            )
            with self.node.shardcast.pin(published):
                await self._policies.adopt(
                    await self.node.shardcast.check_weights(published), published
                )
            step = int(published)
        return step

    async def _learn_again(self, step: int) -> int:
        """Repeat the steps that an earlier process took after the checkpoint of ``step``.
        Returns the step that this leads to."""
        world, first = self.node.world, step
        async with aclosing(self.intake.learnt_again(step)) as steps:
            async for groups in steps:
                await self.engine.step(groups)
                step += 1
        if step > first:
            logger.info("trainer_repeated steps=%d to=%d", step - first, step)
        world.sometimes("trainer/took steps again", step > first)
        return step

    async def publish(self, step: int) -> None:
        """Make the weights of ``step`` the newest policy, and remove those that are no longer
        needed."""
        node, version = self.node, PolicyVersion(step)
        if node.shardcast.newest < version:
            weights = self._policies.weights(step)
            await self._policies.durable.insist(
                partial(
                    node.shardcast.publish,
                    version,
                    weights,
                    self._note,
                    self._policies.adapter(step),
                )
            )
        self.policy_bytes = node.shardcast.manifest(version).anchor.wire
        await self._policies.forget_before(step)
        node.world.trace("published", version=step)
        self.desk.note_policy()

    async def _step(self, step: int) -> int:
        """Wait for enough groups, learn, save, publish."""
        await self._standing.wait()
        self.doing = TrainerDoing.WAITS
        buffered = await self.intake.wait_groups(self.groups)
        await self._standing.wait()
        groups = [one.group for one in buffered]
        self.doing = TrainerDoing.LEARNS
        began = self.node.world.now()
        report = self.last_step = await self.engine.step(groups)
        seconds = self.node.world.now() - began
        step += 1
        reward = self.curve.note_step(step, groups, self.intake.buffer.counts.staleness_max)
        learnt = self.curve.learnt
        logger.info("step %d: reward %.3f, k3 %.4f", step, reward, report.k3)
        self.wrong = self._guards.why_wrong(report)
        if self._guards.is_news(self.wrong):
            logger.warning("%s", self.wrong)
        await self.intake.note_learnt(buffered, step)
        await dawdle(self.node.world, "trainer/slow checkpoint")
        await self._policies.keep(step, is_last=step == self._steps)
        await self.curve.keep()
        await self._standing.wait_run()  # an edition may have come while the engine worked
        await self.publish(step)
        self.node.world.sometimes("trainer/learnt from an old policy", learnt.staleness_max > 0)
        staleness = [step - 1 - one.version for one in buffered]
        numbers = asdict(report)
        del numbers["step"]
        numbers |= numbers.pop("metrics") | {
            "reward": reward,
            "rate": self._learner.rate_at(step - 1, self._steps),
            "staleness_mean": sum(staleness) / len(staleness),
            "staleness_max": max(staleness),
            "seconds": seconds,
            "replayed": self.desk.repeated,
            "lies": self.desk.lies,
        }
        await self.intake.forget_used(self._policies.covered)
        self.doing = TrainerDoing.EVALUATES
        try:
            await self.curve.evaluate(self.engine, step)
            if learnt.curve and learnt.curve[-1][0] == step:
                _, numbers["held_out_greedy"], numbers["held_out_sampled"] = learnt.curve[-1]
        finally:  # who ends the node meanwhile has the step's numbers all the same
            with trio.CancelScope(shield=True):
                await self._metrics.note(step, numbers)
        return step
