"""The validator as a node opens it: configuration and health.

Its work is a `ValidatorSession`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

import trio

from p2p.node.node import Node
from p2p.node.role import Progress
from p2p.node.tables import read_table
from roles.contract import Run, run_of
from roles.engines.installed import check_engine_installed
from roles.protocol.machine import SamplerConfig, open_sampler
from roles.protocol.scorer import Scorer
from roles.protocol.standing import RoleStanding
from roles.protocol.stats import ScoringStats
from roles.protocol.trainer_watch import TrainerWatch
from roles.validator.session import ValidatorSession
from roles.validator.status import facts_of, now_of


class Validator:
    """Judges submissions for a run."""

    name: ClassVar[str] = "validator"
    session_type: ClassVar[type[ValidatorSession]] = ValidatorSession
    """What does the work; a test's validator that lies has another."""

    def __init__(self, config: SamplerConfig) -> None:
        self._config = config
        self.stats = ScoringStats()
        self._watch: TrainerWatch | None = None
        self.session: ValidatorSession | None = None
        """The work of this role; None until engine and environment are open."""

    @classmethod
    def from_config(cls, table: Mapping[str, object]) -> Self:
        """Made from ``[role.validator]``."""
        config = read_table(SamplerConfig, table, "[role.validator]")
        check_engine_installed(config.engine, cls.name)
        return cls(config)

    def health(self) -> dict[str, object]:
        """Counts for people and dashboards."""
        session, watch = self.session, self._watch
        told = {**self.stats.health(), "now": now_of(session, watch), "version": -1}
        if session is None or watch is None:
            return told
        return {
            **told,
            **watch.health(),
            "version": int(session.loaded),
            "queue": session.waiting,
            "undelivered": session.undelivered,
            "scorer_oldest": round(session.scorer.oldest, 1),
            "scorer_busy": round(session.scorer.busy_share, 3),
            "seats": session.reading,
            "waits_for_disk": session.writes_waiting,
        }

    def progress(self) -> Progress:
        """For the live line."""
        session, now = self.session, now_of(self.session, self._watch)
        waiting = (0, 0) if session is None else (session.waiting, session.undelivered)
        facts = tuple(facts_of(now, *waiting, self.stats))
        return Progress(facts=facts, over=session is not None and session.is_over)

    async def run(self, node: Node) -> None:
        """Judge until cancelled."""
        run = run_of(node)
        run.check_job(node.peer_id, self.name)
        kept = node.config.shardcast
        run.check_store(kept.keep_versions, kept.keep_bytes)
        self._watch = TrainerWatch(node)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch.watch)
            await self._work(node, run)

    async def _work(self, node: Node, run: Run) -> None:
        async with open_sampler(node, run, self._config, self.name) as (environment, engine):
            ledger = await node.ledger.opened()
            standing = RoleStanding(node, "validator", self.name)
            scorer = Scorer(node, engine, environment, survives_engine=True)
            session = self.session_type(node, run, scorer, ledger, standing, self.stats)
            self.session = session
            await session.work_forever()
