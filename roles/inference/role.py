"""The inference role as a node opens it: configuration and health.

Its work is an `InferenceSession`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import ClassVar, Self

import trio

from p2p.node.node import Node
from p2p.node.role import Progress
from p2p.node.tables import read_table
from roles.contract import Run, run_of
from roles.engines.client import open_engine
from roles.engines.config import engine_of
from roles.engines.installed import check_engine_installed
from roles.envs.client import open_environment_of
from roles.inference.config import InferenceConfig
from roles.inference.outbox import Outbox
from roles.inference.session import InferenceSession
from roles.inference.stats import InferenceCounts
from roles.inference.status import InferenceStatus, facts_of, life_of, now_of
from roles.inference.work_stamp import keep_stamped
from roles.protocol.model_files import keep_model_files
from roles.protocol.trainer_watch import TrainerWatch


class Inference:
    """Generates rollouts for a run."""

    name: ClassVar[str] = "inference"
    session_type: ClassVar[type[InferenceSession]] = InferenceSession
    """What does the work; a role that works otherwise has another."""

    def __init__(self, config: InferenceConfig) -> None:
        self._config = config
        self._session: InferenceSession | None = None
        self._watch: TrainerWatch | None = None
        self.counts = InferenceCounts()

    @classmethod
    def from_config(cls, table: Mapping[str, object]) -> Self:
        """Made from ``[role.inference]``."""
        config = read_table(InferenceConfig, table, f"[role.{cls.name}]")
        check_engine_installed(config.engine, cls.name)
        return cls(config)

    def health(self) -> dict[str, object]:
        """Counts for people and dashboards."""
        return {
            **self.counts.health(),
            **asdict(self.status()),
            "samples": [] if self._session is None else self._session.glance.samples,
        }

    def progress(self) -> Progress:
        """For the live line."""
        return Progress(
            facts=tuple(facts_of(self.status(), self.counts)), over=self.counts.idle
        )

    def status(self) -> InferenceStatus:
        """What it does now, and what became of its work in all lives."""
        session, counts, watch = self._session, self.counts, self._watch
        if watch is None or session is None:
            return InferenceStatus(doing=counts.doing.value, now=now_of(counts, watch))
        account, world = watch.account, session.node.world
        waits = session.writes_waiting
        return InferenceStatus(
            doing=counts.doing.value,
            now=now_of(
                counts,
                watch,
                rests=session.why_not,
                waits_for_disk=waits,
                environment_failure=session.environment_failure,
                pending=session.pending,
                wall=world.wall(),
            ),
            tokens_per_second=round(counts.drawn.per_second(world.now()), 1),
            waits_for_disk=waits,
            unanswered_since=counts.unanswered_since,
            trainer="" if account is None else account.doing.value,
            trainer_away_since=watch.away_since,
            step=0 if account is None else account.step,
            steps=0 if account is None else account.steps,
            life=life_of(counts, session.book, account),
        )

    async def run(self, node: Node) -> None:
        """Generate until cancelled."""
        run = run_of(node)
        recipe = run.terms.sampling
        self.counts.rollouts = recipe.submission * recipe.group_size
        self.counts.group_size = recipe.group_size
        run.check_job(node.peer_id, "inference")
        self._watch = TrainerWatch(node)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch.watch)
            nursery.start_soon(keep_stamped, node)
            await self._work(node, run)

    async def _work(self, node: Node, run: Run) -> None:
        limits, config = self._config.machine, self._config
        engine_config = replace(
            engine_of(run, limits, threads=config.threads, nice=config.nice),
            device=config.device,
            profile=config.profile,
            vllm=config.vllm,
        ).computed_with(config.engine)
        outbox = await Outbox.open(node.world, f"{self.name}/outbox")
        folder = await keep_model_files(node, run)
        async with (
            open_environment_of(
                node.world, run, limits, folder, trusted=node.config.trust_environments
            ) as environment,
            open_engine(node.world, engine_config, name=self.name, learns=False) as engine,
        ):
            self._session = self.session_type(
                node, run, environment, engine, outbox, self.name, self.counts
            )
            await self._session.work_forever()
