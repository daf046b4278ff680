"""The validator as a node opens it: configuration and health.

Its work is a `ValidatorSession`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Self

import trio

from p2p.node.node import Node
from p2p.node.role import Fact, Progress
from p2p.node.tables import read_table
from p2p.shardcast.manifest import NO_POLICY
from roles.contract import Run, run_of
from roles.engines.installed import check_engine_installed
from roles.protocol.machine import SamplerConfig, open_sampler
from roles.protocol.scorer import Scorer
from roles.protocol.standing import RoleStanding
from roles.protocol.stats import ScoringStats
from roles.protocol.trainer_watch import TrainerWatch
from roles.shared.reasons import because
from roles.validator.session import ValidatorSession


class Validator:
    """The role that judges submissions of a run."""

    name: ClassVar[str] = "validator"
    session_type: ClassVar[type[ValidatorSession]] = ValidatorSession
    """Class of the session that does the work; tests set one that lies."""

    def __init__(self, config: SamplerConfig) -> None:
        self._config = config
        self.stats = ScoringStats()
        self._watch: TrainerWatch | None = None
        self.session: ValidatorSession | None = None
        """The work of this role; None until engine and environment are open."""

    @classmethod
    def from_config(cls, table: Mapping[str, object]) -> Self:
        """Return the role that the table ``[role.validator]`` describes."""
        config = read_table(SamplerConfig, table, "[role.validator]")
        check_engine_installed(config.engine, cls.name)
        return cls(config)

    def health(self) -> dict[str, object]:
        """Return counts for people and dashboards."""
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
        """Return the progress that the live line shows."""
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
            standing = RoleStanding(node, run, "validator", self.name)
            scorer = Scorer(node, engine, environment, survives_engine=True)
            session = self.session_type(node, run, scorer, ledger, standing, self.stats)
            self.session = session
            await session.work_forever()


def now_of(session: ValidatorSession | None, watch: TrainerWatch | None) -> str:
    """Return the validator's current activity in a sentence for people."""
    if session is None or watch is None:
        return "starting the engine"
    kept = session.undelivered
    what = f"{kept} verdicts are kept for it" if kept else "nothing is lost"
    away = watch.why_idle(what)
    if session.why_not:
        return f"rests: {session.why_not}"
    if session.writes_waiting:
        return "waiting for room on the disk; nothing is lost"
    if session.is_over:
        return "the run has all its steps: nothing is left to score"
    if session.environment_failure:
        failure = session.environment_failure
        return f"undecided on the last place, because the environment fails: {failure}"
    if session.is_judging:
        return f"scoring under policy {session.loaded}{away and f'; {away}'}"
    if away:
        return away
    if session.node.shardcast.newest == NO_POLICY:
        return watch.why_no_policy()
    if session.is_held_up:
        return f"waiting for the trainer to take {kept} verdicts"
    return "waiting for newcomers' work"


def facts_of(now: str, queue: int, undelivered: int, stats: ScoringStats) -> Iterator[Fact]:
    """Yield the lines of the screen, the most important first."""
    records, undecided = stats.records, sum(stats.inconclusive.values())
    parts = [
        f"{records.accepted + records.rejected + undecided:,} submissions judged",
        f"{records.accepted:,} accepted",
        f"{records.rejected:,} rejected{because(records.reasons)}",
        *([f"{undecided:,} undecided{because(stats.inconclusive)}"] if undecided else []),
    ]
    yield Fact("now", now)
    yield Fact("work", ", ".join(parts))
    yield Fact(
        "queue",
        f"{queue:,} to be scored, {undelivered:,} verdicts for the trainer",
    )
