"""The inference role as a node opens it: configuration and health.

Its work is an `InferenceSession`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import ClassVar, Self

import trio

from p2p.node.node import Node
from p2p.node.role import Progress
from p2p.node.tables import read_table
from roles.contract import Run, run_of
from roles.engines.installed import check_engine_installed
from roles.inference.outbox import Outbox
from roles.inference.session import InferenceSession
from roles.inference.status import InferenceCounts, Life, facts_of, life_of, now_of
from roles.inference.work_stamp import keep_stamped
from roles.protocol.machine import SamplerConfig, open_sampler
from roles.protocol.trainer_watch import TrainerWatch


class Inference:
    """The role that generates rollouts for a run."""

    name: ClassVar[str] = "inference"
    session_type: ClassVar[type[InferenceSession]] = InferenceSession
    """Class of the session that does the work; other roles set another."""

    def __init__(self, config: SamplerConfig) -> None:
        self._config = config
        self._session: InferenceSession | None = None
        self._watch: TrainerWatch | None = None
        self.counts = InferenceCounts()

    @classmethod
    def from_config(cls, table: Mapping[str, object]) -> Self:
        """Return the role that the table ``[role.inference]`` describes."""
        config = read_table(SamplerConfig, table, f"[role.{cls.name}]")
        check_engine_installed(config.engine, cls.name)
        return cls(config)

    def health(self) -> dict[str, object]:
        """Return counts for people and dashboards."""
        session, watch = self._session, self._watch
        return {
            **self.counts.health(),
            **({} if watch is None else watch.health()),
            "now": self._now(),
            "tokens_per_second": self._speed,
            "waits_for_disk": 0 if session is None else session.writes_waiting,
            "life": asdict(self._life),
            "samples": [] if session is None else session.glance.samples,
        }

    def progress(self) -> Progress:
        """Return the progress that the live line shows."""
        facts = facts_of(self._now(), self._speed, self._life, self.counts)
        return Progress(facts=tuple(facts), over=self.counts.idle)

    def _now(self) -> str:
        session = self._session
        if session is None:
            return now_of(self.counts, self._watch)
        return now_of(
            self.counts,
            self._watch,
            rests=session.why_not,
            waits_for_disk=session.writes_waiting,
            environment_failure=session.environment_failure,
            pending=session.pending,
            wall=session.node.world.wall(),
        )

    @property
    def _speed(self) -> float:
        session = self._session
        now = 0.0 if session is None else session.node.world.now()
        return round(self.counts.drawn.per_second(now), 1)

    @property
    def _life(self) -> Life:
        book = None if self._session is None else self._session.book
        return life_of(self.counts, book, None if self._watch is None else self._watch.account)

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
        outbox = await Outbox.open(node.world, f"{self.name}/outbox")
        async with open_sampler(node, run, self._config, self.name) as (environment, engine):
            self._session = self.session_type(
                node, run, environment, engine, outbox, self.name, self.counts
            )
            await self._session.work_forever()
