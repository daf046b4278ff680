"""A validator at work: from the queue through the scorer to a durable verdict.

Theory of operation ------------------- `roles.validator.reception` hears peers, in a task for
each stream, and puts what is worth a replay into the queue. One scorer takes it from there,
whose turns go by node (`roles.validator.core.fair_queue`); `roles.validator.judge` says what
becomes of it. While the disk makes one verdict durable (`ValidatorSession._record`) the scorer
works on the next. A verdict is in the ledger before any peer hears of it, unless it rejects a
node that never had work accepted: that is remembered for a while, and no more. Accepted
submissions stay on disk until the trainer has taken them; `roles.validator.delivery` lets a few
wait for it, and when they do, judging stops, but for nodes whose work was rejected of late:
back-pressure, not loss.

What a peer can make this node hold is bounded: streams, seats, the queue, verdicts on work out
of place, and what is counted about nodes and reasons. One validator judges all work of a node
under one policy (`roles.protocol.core.assignment.validator_of`): to two of them a node could
sell one place twice, and neither sees gaps.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Final

import trio

from p2p.concurrency import Notifier
from p2p.host import StreamHandler
from p2p.identity import ProtocolId
from p2p.ledger import Ledger
from p2p.node.node import Node
from p2p.shardcast.manifest import PolicyVersion
from p2p.world import dawdle
from proofs.checks import Verdict
from roles.protocol.core.lots import COMMIT_PROTOCOL, LOT_PROTOCOL
from roles.protocol.core.messages import (
    OFFER_PROTOCOL,
    ROLLOUT_PROTOCOL,
    AcceptedWork,
    SignedVerdict,
    decode_verdict_untrusted,
)
from roles.protocol.core.statements import VERDICT_KIND
from roles.protocol.demand import demand_of
from roles.run import Run
from roles.shared.durable import Durable
from roles.shared.evidence import EVIDENCE_PROTOCOL
from roles.shared.standing import AtRest, RoleStanding
from roles.validator.core.fair_queue import FairQueue
from roles.validator.delivery import Deliveries
from roles.validator.judge import Judge
from roles.validator.limits import (
    RECORDING,
    WEARY_SECONDS,
)
from roles.validator.prosecution import Prosecution
from roles.validator.reception import Reception
from roles.validator.stats import ValidatorStats
from roles.validator.verdicts import Job, Ruling
from roles.validator.witness import Witness

ACCEPTED_FOLDER: Final = "validator/accepted"
"""Where accepted submissions lie until the trainer has taken them."""


class ValidatorSession:
    """One validator's work for one run, from its start to its end."""

    def __init__(
        self,
        node: Node,
        run: Run,
        judge: Judge,
        ledger: Ledger,
        standing: RoleStanding,
        stats: ValidatorStats,
    ) -> None:
        self.node = node
        self.run = run
        self._judge = judge
        self._ledger = ledger
        self._standing = standing
        self._stats = stats
        self._world = node.world
        self._durable = Durable(node.world, "validator")
        self._queue: FairQueue[Job] = FairQueue(judge.has_worked)
        self._work = Notifier()
        self._recording = trio.Semaphore(RECORDING)
        self._deliveries: Deliveries | None = None
        self.is_judging = False
        self._prosecution = Prosecution(node, judge, self._durable, self._wake)
        self._reception = Reception(
            node, judge, self._queue, ledger, standing, stats, self._wake
        )

    def follow_lots(self) -> None:
        """Be a witness as well, before the work begins: the run has lots."""
        self._reception.witness = Witness(self.node, self._judge, self._ledger, self._durable)

    @property
    def witness(self) -> Witness | None:
        """Signs what workers commit to; None in a run without lots."""
        return self._reception.witness

    @property
    def loaded(self) -> PolicyVersion:
        """The policy in the engine."""
        return self._judge.loaded

    @property
    def waiting(self) -> int:
        """Submissions that wait for the scorer."""
        return len(self._queue)

    @property
    def reading(self) -> int:
        """Contents that are on their way."""
        return self._reception.reading

    @property
    def environment_failure(self) -> str:
        """See `roles.validator.judge.Judge`."""
        return self._judge.environment_failure

    @property
    def writes_waiting(self) -> int:
        """Verdicts, submissions and content for the engine that the disk has refused so far."""
        return self._durable.waiting + self._judge.writes_waiting

    @property
    def why_not(self) -> str:
        """Why the run file does not let this validator work now; empty if it does."""
        return self._standing.why_not

    @property
    def undelivered(self) -> int:
        """Accepted submissions that the trainer has not taken yet."""
        return 0 if self._deliveries is None else self._deliveries.under_way

    @property
    def is_held_up(self) -> bool:
        """Whether nothing is judged because the trainer takes nothing."""
        return self._deliveries is not None and not self._deliveries.has_room()

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to judge in this run."""
        return self.node.shardcast.newest >= self.run.terms.recipe.steps and not len(
            self._queue
        )

    async def work_forever(self) -> None:
        """Take up what an earlier life left, then judge until cancelled."""
        demand_of(self.node)  # from now on it hears what is wanted
        async with trio.open_nursery() as nursery:
            await self.recall()
            self.node.host.protect("work", self._stats.records.workers)
            deliveries = Deliveries(self.node, ACCEPTED_FOLDER, nursery, self._wake)
            self._deliveries = deliveries
            await deliveries.resume()
            await self._prosecution.recall()
            nursery.start_soon(self._prosecution.fetch_forever)
            nursery.start_soon(self._standing.watch)
            await self._judge.take_up_edition(self._durable)
            nursery.start_soon(self._judge.watch_editions, self._durable)
            nursery.start_soon(self._judge.watch_absences)
            with ExitStack() as served:
                for protocol, serve in self._services().items():
                    served.enter_context(self.node.host.serving(protocol, serve))
                if self.witness is not None:
                    self.witness.open(nursery)
                    nursery.start_soon(self._prosecution.accuse_trainer)
                while True:
                    await self._judge_next(deliveries, nursery)

    def _services(self) -> dict[ProtocolId, StreamHandler]:
        reception = self._reception
        services: dict[ProtocolId, StreamHandler] = {
            ROLLOUT_PROTOCOL: reception.serve,
            OFFER_PROTOCOL: reception.serve_offer,
            EVIDENCE_PROTOCOL: self._prosecution.evidence.serve,
        }
        if self.witness is not None:
            services[COMMIT_PROTOCOL] = reception.serve_commitments
            services[LOT_PROTOCOL] = reception.serve_drawn
        return services

    async def recall(self) -> None:
        """Rebuild from the ledger what was judged before."""
        if self.witness is not None:
            await self.witness.recall()
        async for entry in self._ledger.entries(VERDICT_KIND):
            verdict = decode_verdict_untrusted(entry.body, self._world.verify)
            self._judge.recall(verdict, entry.seqno)
            self._stats.records.count(verdict)
            if verdict.verdict is Verdict.ACCEPTED:
                self._queue.praise(verdict.commitment.node)
            else:
                self._queue.pardon(verdict.commitment.node)
        self._judge.settle()

    # The scorer: one submission at a time, in the queue's order.

    async def _judge_next(self, deliveries: Deliveries, nursery: trio.Nursery) -> None:
        """Take the submission whose turn it is through the scorer, the ledger, and towards the
        trainer."""
        world = self._world
        await self._recording.acquire()
        await self._standing.wait()
        began = await self._wait_turn(deliveries)
        of_debtors = not deliveries.has_room()
        job = self._queue.pop(began, of_debtors=of_debtors)
        job.is_suspect = self._queue.is_in_debt(job.submission.commitment.node, began)
        self.is_judging = True
        try:
            ruling = await self._judge.decide(job)
        except AtRest:  # its worker will be told so, and ask the judge of the newest edition
            self._end_without_entry(job, None)
            return
        finally:
            self.is_judging = False
            self._queue.charge(world.now() - began)
        verdict = ruling.verdict
        if verdict.verdict is Verdict.INCONCLUSIVE:
            self._end_without_entry(job, verdict)
            return
        if verdict.verdict is Verdict.REJECTED and not await self._blame(job, verdict):
            return
        if verdict.verdict is Verdict.ACCEPTED:
            self._queue.praise(verdict.commitment.node)
            self._queue.note_accepted(of_debtors=of_debtors)
            if job.witnessed is None:
                deliveries.expect()
        nursery.start_soon(self._record, job, ruling, deliveries)

    async def _blame(self, job: Job, verdict: SignedVerdict) -> bool:
        """What a rejection leaves; whether it belongs in the ledger, too."""
        node = verdict.commitment.node
        self._queue.blame(node, self._world.now())
        has_worked = self._judge.has_worked(node)
        await self._prosecution.consider(verdict, job.submission)
        if job.witnessed is not None and self.witness is not None:
            self.witness.report(job.witnessed, verdict)
        if not has_worked:
            self._judge.verdicts.let_pass(verdict)
            self._stats.records.count(verdict)
            self._end_without_entry(job, verdict)
            self._trace(verdict)
        return has_worked

    async def _wait_turn(self, deliveries: Deliveries) -> float:
        """Return when there is something to judge, and as of when; before it, and meanwhile,
        repeat a ban of another's whose content is here."""
        await self._prosecution.examine()
        # One reading of the clock: between two of them a debt may be forgiven, and the queue
        # would be asked for the work of a debtor where there is none.
        while not self._may_judge(deliveries, began := self._world.now()):
            await self._wait_work()
            await self._prosecution.examine()
        return began

    def _end_without_entry(self, job: Job, verdict: SignedVerdict | None) -> None:
        self._judge.verdicts.drop(job)
        job.finish(verdict)
        self._recording.release()

    async def _wait_work(self) -> None:
        """Return when something may have come that may be judged."""
        now = self._world.now()
        if not self._queue.is_weary(now):
            await self._work.wait()
            return
        timer = self._world.call_at(now + WEARY_SECONDS, self._wake)
        try:
            await self._work.wait()
        finally:
            timer.cancel()

    def _may_judge(self, deliveries: Deliveries, now: float) -> bool:
        """Whether anything may be judged now: while the trainer takes nothing, what is likely
        to be rejected.

        Should that be accepted after all, one more delivery waits than `Deliveries` means to.
        """
        if deliveries.has_room():
            return self._queue.has_work(now)
        return deliveries.has_room(1) and self._queue.has_debtor(now)

    def _wake(self) -> None:
        self._work.notify_all()

    def _trace(self, verdict: SignedVerdict) -> None:
        version = int(verdict.commitment.version)
        self._world.trace("verdict", verdict=verdict.verdict.value, version=version)

    async def _record(self, job: Job, ruling: Ruling, deliveries: Deliveries) -> None:
        """Make a verdict durable, then known, then send what it accepts on its way."""
        commitment, durable = job.submission.commitment, self._durable
        verdict = ruling.verdict
        work = AcceptedWork(verdict, job.submission, ruling.logprobs)
        is_delivered = verdict.verdict is Verdict.ACCEPTED and job.witnessed is None
        if is_delivered:
            # Before the ledger: a worker that finds the verdict there must find the submission,
            # too.
            await durable.insist(partial(deliveries.keep, work))
        await dawdle(self._world, "validator/slow record")
        entry = await durable.insist(
            partial(self._ledger.append, VERDICT_KIND, verdict.to_bytes())
        )
        self._judge.verdicts.record(commitment, entry.seqno)
        self._judge.verdicts.forget_below(
            PolicyVersion(self.node.shardcast.newest - self.run.terms.recipe.lag)
        )
        self._stats.records.count(verdict)
        self.node.host.protect("work", self._stats.records.workers)
        job.finish(verdict)
        self._recording.release()
        self._trace(verdict)
        if is_delivered:
            deliveries.deliver(work)
