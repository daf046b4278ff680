"""The role ``trainer`` as a member of a DiLoCo run."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Final

import trio

from p2p.errors import ConfigError
from p2p.node.node import Node
from p2p.node.role import Fact, Progress
from roles.contract import Run, run_of
from roles.contract.core.diloco import Goal
from roles.diloco.inner import open_inner
from roles.diloco.session import DilocoSession, RunMembers
from roles.engines.config import engine_of
from roles.envs.base import EVALUATES_NOTHING, check_pins, evaluates_nothing
from roles.envs.client import setup_of
from roles.envs.mix import EnvironmentSetup
from roles.protocol.model_files import check_base, keep_model_files
from roles.rl.recipes import read_own_learner
from roles.trainer.config import TrainerConfig

logger = logging.getLogger(__name__)

JOB: Final = "trainer"
"""Name of the role that acts as a member."""


class DilocoMember:
    """One node's part in a DiLoCo run."""

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        self.session: DilocoSession | None = None
        """The member's session; None until the engine is open."""

    def health(self) -> dict[str, object]:
        """Return counts for people and dashboards."""
        if self.session is None:
            return {"algorithm": "diloco", "step": -1, "done": False, "rounds": []}
        return self.session.health()

    def progress(self) -> Progress:
        """Return the progress that the live line shows."""
        if self.session is None or self.session.step < 0:
            return Progress(facts=(Fact("now", "reading the corpus"),))
        health = self.session.health()
        members = health.get("members")
        loss = health.get("training_loss")
        parts = [
            f"round {health['step']} of {health['steps']}",
            f"{len(members) if isinstance(members, list) else 0} members",
            f"training loss {loss:.3f}" if isinstance(loss, float) else "no loss yet",
        ]
        facts = [Fact("now", self.session.now), Fact("work", ", ".join(parts))]
        facts += [Fact("newest", self.session.exported)] if self.session.exported else []
        return Progress(facts=tuple(facts), over=self.session.is_over)

    async def run(self, node: Node) -> None:
        """Take part until cancelled."""
        run, config = run_of(node), self._config
        terms = run.terms.diloco
        run.check_job(node.peer_id, JOB)
        is_of_rewards = terms.goal is Goal.REWARD
        engine_config = engine_of(
            run,
            config.machine,
            threads=config.threads,
            nice=config.nice,
            learner=await read_own_learner(node.world.disk, run) if is_of_rewards else None,
        )
        if run.terms.model.base:
            await check_base(node.world, run)
        folder = await keep_model_files(node, run)
        environments = self._environments(node, run, folder)
        members = RunMembers(node, terms.joining)
        async with open_inner(
            node.world,
            replace(
                engine_config,
                device=config.device,
                profile=config.profile,
                autocast=config.autocast,
                gpus=config.gpus,
            ),
            terms,
            config.corpora,
            folder,
            environments,
        ) as engine:
            self.session = DilocoSession(
                node.world,
                node.host,
                run.id,
                terms,
                config.diloco,
                engine,
                run.terms.trainers,
                members.may_train,
                meter=node.meter,
            )
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._heed, node, self.session, members)
                await self.session.work_forever()

    async def _heed(self, node: Node, session: DilocoSession, members: RunMembers) -> None:
        """Leave the run while the machine's owner pauses the node or outside its hours, and
        report that, or a refused admission, in a log line and a heartbeat. Works until
        cancelled."""
        me, said, told = node.membership.me, "", ""
        while True:
            unwanted = members.why_not(node.peer_id)
            if unwanted and unwanted != told:
                logger.warning("no member takes this node in: %s", unwanted)
            told = unwanted
            why_not = node.rest.why_not
            session.rest(bool(why_not))
            if why_not != said:
                others = tuple(role for role in me.profile.roles if role != JOB)
                me.update(roles=others if why_not else (*others, JOB))
                if why_not:
                    logger.warning("the trainer leaves after this round: %s", why_not)
                else:
                    logger.warning("the trainer joins again at the next round's end")
                said = why_not
            await node.book.wait_change()

    def _environments(
        self, node: Node, run: Run, folder: str | None
    ) -> EnvironmentSetup | None:
        """Return the environments that a run of rewards learns from, which work within the
        process of the inner steps. Raises `ConfigError` for an environment that evaluates what
        a model writes, since that needs a process of its own."""
        if run.terms.diloco.goal is not Goal.REWARD:
            return None
        check_pins(run)  # before any of it is imported
        for pin in run.terms.environments:
            if not evaluates_nothing(pin.name):
                able = ", ".join(sorted(EVALUATES_NOTHING))
                raise ConfigError(
                    f"run {run.name!r} learns from the environment {pin.name!r} in the process"
                    f" of its weights: that may be one of {able}"
                )
        place = folder and node.world.disk.locate(folder)
        return setup_of(run, self._config.machine, place)
