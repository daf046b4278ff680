"""The trainer as a node opens it: configuration and health.

Its work is a `TrainerSession`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import ClassVar, Final, Self

from p2p.concurrency import leaves
from p2p.errors import ConfigError, WorkerDied
from p2p.host import Stream, send_frame
from p2p.identity import PeerId
from p2p.node.node import Node
from p2p.node.role import Fact, Progress
from p2p.node.tables import read_table
from p2p.shardcast.manifest import NO_POLICY
from roles.contract import Run, run_of
from roles.contract.core.diloco import Algorithm
from roles.engines.base import Learner
from roles.engines.client import open_engine
from roles.engines.config import GIB, engine_of
from roles.engines.external import ExternalLearner
from roles.engines.installed import check_engine_installed
from roles.envs.client import open_environment_of
from roles.protocol.core.account import Account, Fates, TrainerDoing, thinned
from roles.protocol.core.answer import (
    MAX_REQUEST,
    WORK_PROTOCOL,
    AccountRequest,
    Refused,
    decode_request_untrusted,
    encode_reply,
)
from roles.protocol.model_files import check_base, keep_model_files
from roles.protocol.reading import receive_frame
from roles.protocol.scorer import Scorer
from roles.protocol.standing import RoleStanding
from roles.rl.learner import EXTERNAL, FILE, KEYS
from roles.rl.recipes import read_own_learner
from roles.shared.durable import Durable
from roles.trainer.account import SHORTEST_PAUSE
from roles.trainer.config import TrainerConfig
from roles.trainer.core.buffer import GroupBuffer
from roles.trainer.curve import LearningCurve
from roles.trainer.desk import WorkDesk
from roles.trainer.diloco import DilocoMember
from roles.trainer.gate_files import GateFiles
from roles.trainer.inbox import Inbox
from roles.trainer.intake import Intake
from roles.trainer.metrics import open_sinks
from roles.trainer.policies import PolicyFiles
from roles.trainer.session import TrainerSession
from roles.trainer.status import doing_of, facts_of, now_of, tables_of, work_of

logger = logging.getLogger(__name__)

INBOX: Final = "trainer/intake"
ROLLOUTS: Final = "trainer/rollouts"
"""Folder of accepted places that were not learnt from yet."""


class Trainer:
    """The role that owns the policy of a run."""

    name: ClassVar[str] = "trainer"

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        self._steps = 0
        self._learner = {"learner": "", "algorithm": ""}
        self.session: TrainerSession | None = None
        """The work of this role; None until engine and environment are open."""
        self._member: DilocoMember | None = None
        """The member of a run whose algorithm is DiLoCo; None in other runs."""

    @classmethod
    def from_config(cls, table: Mapping[str, object]) -> Self:
        """Return the role that the table ``[role.trainer]`` describes."""
        for key in table.keys() & KEYS:
            raise ConfigError(f"[role.trainer]: {key} belongs in {FILE}, in the data folder")
        config = read_table(TrainerConfig, table, "[role.trainer]")
        check_engine_installed("torch", cls.name)
        return cls(config)

    def health(self) -> dict[str, object]:
        """Return counts for people and dashboards. Until the engine is open and the folder is
        read, there are few."""
        if self._member is not None:
            return self._member.health()
        session = self.session
        told = {
            "doing": doing_of(session).value,
            "now": now_of(session, self._steps),
            "groups": asdict(Fates() if session is None else session.intake.fates(None)),
            "steps": self._steps,
            "learns_by": self._learner["algorithm"],
            **self._learner,
        }
        if session is None or session.doing is TrainerDoing.OPENS:
            warning = "" if session is None else session.warning
            return {**told, "done": False, "warning": warning}
        counts, last = session.intake.buffer.counts, session.last_step
        return {
            **asdict(session.curve.learnt),
            **tables_of(session.curve.learnt),
            "learnt_steps": session.curve.learnt.step,
            **told,
            "done": session.is_over,
            "rate": session.rate,
            "policy_bytes": session.policy_bytes,
            "pooled": len(session.intake.buffer),
            "staleness": dict(counts.staleness),
            "groups_stale": counts.stale,
            "groups_without_spread": counts.without_spread,
            "groups_discredited": counts.discredited,
            "submissions_taken": session.intake.taken,
            **session.desk.health(),
            "workers": session.workers(),
            "work": work_of(session),
            "waits_for_disk": session.writes_waiting,
            "warning": session.warning,
            "last_step": None if last is None else asdict(last),
        }

    def progress(self) -> Progress:
        """Return the progress that the screen shows."""
        if self._member is not None:
            return self._member.progress()
        session = self.session
        if session is None:
            return Progress(facts=(Fact("now", now_of(session, self._steps)),))
        return Progress(facts=tuple(facts_of(session, self._steps)), over=session.is_over)

    def account_of(self, peer: PeerId, with_curve: bool) -> Account:
        """Return the account of its own work that a peer asks for."""
        session = self.session
        if session is None:
            return Account(doing=TrainerDoing.OPENS, steps=self._steps, pause=SHORTEST_PAUSE)
        known = session.has_books
        return Account(
            doing=session.doing,
            step=session.curve.learnt.step,
            steps=self._steps,
            pause=session.intake.accounts.pause,
            own=session.intake.fates(peer) if known else None,
            total=session.intake.fates(None) if known else None,
            curve=thinned(session.curve.learnt.curve) if with_curve else (),
        )

    async def run(self, node: Node) -> None:
        """Learn until the run's steps are done, then serve what was learnt until cancelled."""
        run = run_of(node)
        if run.terms.algorithm is Algorithm.DILOCO:
            self._member = DilocoMember(self._config)
            await self._member.run(node)
            return
        self._steps = run.terms.sampling.steps
        with node.host.serving(WORK_PROTOCOL, self._serve):
            await self._learn(node, run)

    async def _serve(self, stream: Stream) -> None:
        """Let the desk handle a request. Refuse it while the state of earlier processes is
        still being read."""
        session = self.session
        if session is not None and session.desk.is_open:
            await session.desk.serve(stream)
            return
        begun = await receive_frame(stream, MAX_REQUEST)
        if begun is not None:
            request = decode_request_untrusted(begun[0])
            starts = Refused("the trainer starts", True)
            reply = (
                self.account_of(stream.peer, request.with_curve)
                if isinstance(request, AccountRequest)
                else starts
            )
            await send_frame(stream, encode_reply(reply))

    async def _learn(self, node: Node, run: Run) -> None:
        limits, config, sampling = self._config.machine, self._config, run.terms.sampling
        run.check_job(node.peer_id, self.name)
        kept = node.config.shardcast
        run.check_store(kept.keep_versions, kept.keep_bytes)
        learner = await read_own_learner(node.world.disk, run)
        self._learner = {"learner": learner.digest, "algorithm": learner.algorithm}
        logger.info(
            "learner_in_force algorithm=%s rate=%g options=%r digest=%s",
            *(learner.algorithm, learner.rate, dict(learner.options), learner.digest),
        )
        engine_config = engine_of(
            run, limits, threads=config.threads, nice=config.nice, learner=learner
        )
        if run.terms.model.base and node.shardcast.newest == NO_POLICY:
            await check_base(node.world, run)
        folder = await keep_model_files(node, run)
        async with (
            open_sinks(learner.sinks, run.name, node.world.disk.locate(self.name)) as metrics,
            open_environment_of(
                node.world,
                run,
                limits,
                folder,
                trusted=node.config.trust_environments,
                takes_capsules=node.config.accept_capsules,
            ) as environment,
            open_engine(
                node.world,
                replace(
                    engine_config,
                    device=config.device,
                    profile=config.profile,
                    autocast=config.autocast,
                    gpus=config.gpus,
                ),
                name=self.name,
            ) as engine,
        ):
            ledger = await node.ledger.opened()
            # One for all sessions: an edition is held against the one that the engine is of.
            standing = RoleStanding(node, run, "trainer", self.name)
            learning: Learner = engine
            if learner.kind == EXTERNAL:
                learning = ExternalLearner(engine, node.world, engine_config, run)
            while True:
                durable = Durable(node.world, self.name)
                capacity = max(1, round(config.pool_steps * learner.groups))
                buffer = GroupBuffer(sampling.lag)
                most = int(config.keep_rollouts * GIB)
                inbox = Inbox(node.world, INBOX, ROLLOUTS, most)
                intake = Intake(node, sampling, ledger, inbox, buffer, durable)
                records = GateFiles(node.world, durable)
                desk = WorkDesk(
                    node,
                    await records.open(node.peer_id),
                    records,
                    intake,
                    Scorer(node, engine, environment, survives_engine=False),
                    standing,
                    ledger,
                    durable,
                    self.account_of,
                    capacity,
                )
                curve = LearningCurve(node.world.disk, sampling, learner, environment)
                policies = PolicyFiles(
                    learning,
                    node.world.disk,
                    durable,
                    base=folder or "",
                    checkpoint_every=config.checkpoint_every,
                    adapters=run.terms.delivery.adapters,
                )
                self.session = TrainerSession(
                    *(node, sampling.steps, learner, learning, intake),
                    *(desk, curve, standing, policies, metrics),
                )
                try:
                    await self.session.work_forever()
                except* WorkerDied as died:
                    # What it had learnt since its checkpoint went with the process: all is
                    # taken from the disk, as after a restart of the node.
                    logger.error(
                        "engine_died %s; the trainer goes on from its disk", next(leaves(died))
                    )
