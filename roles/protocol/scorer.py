"""The one scorer: repeats what a worker has done to a place, for trainer and validators.

Submissions wait by version and worker. One pass goes through the versions, the oldest first,
and takes of each what waited when its turn came, so that weights are loaded once a version a
pass. Within a version workers take turns, a place a turn: of a window one place is scored
before the others. Cheap checks come first:

    terms     made under the terms that hold now, and under the policy that is held here
    shape     groups of this place; every token, length and end token
    turns     the environment says again what it said within the completions
    rewards   the environment makes the tasks once, and pays once
    replay    the model is run over the groups that the caller chooses, in one call

What cannot be checked (other terms, a policy that is gone, an engine or environment that fails)
is inconclusive and accuses nobody. The scorer signs nothing and remembers nothing but the draws
of each worker's last submissions (`roles.protocol.history`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import trio

from p2p.concurrency import Notifier
from p2p.errors import BadMessage, StorageError, WorkerDied
from p2p.identity import PeerId, Signer
from p2p.node.node import Node
from p2p.shardcast.manifest import NO_POLICY, PolicyVersion
from p2p.world import dawdle, decode_off_loop
from proofs.checks import (
    ACCEPTED,
    Evidence,
    Judgement,
    Limits,
    Verdict,
    check_shape,
    judge,
    judge_pool,
)
from roles.contract import Run, run_of
from roles.engines.base import Completion, Engine, EngineError, Group, GroupTask, Scored
from roles.envs.base import Task
from roles.envs.client import ContainedEnvironment
from roles.envs.contained import EnvironmentFailed, Failures
from roles.protocol.core.answer import Refused, Reply
from roles.protocol.core.assignment import DrawOrder, draw_order, run_sampling
from roles.protocol.core.findings import HEARS_OTHER, NO_ANSWER, Finding
from roles.protocol.core.groups import (
    DECODE_RATE,
    NOTHING,
    UNHEARD,
    decode_groups_untrusted,
    heard_digest,
)
from roles.protocol.core.terms import terms_digest
from roles.protocol.core.verdict import MAX_REASON, SignedVerdict
from roles.protocol.core.window import (
    Claim,
    Commitment,
    Submission,
    claim_of,
    content_digest,
)
from roles.protocol.core.work import Work
from roles.protocol.history import DrawHistory
from roles.protocol.replay import (
    answers_of,
    as_signed,
    count_work,
    impossible_reward,
    turns_of,
    wrong_reward,
)
from roles.protocol.request import PATIENCE

logger = logging.getLogger(__name__)

OTHER_TERMS: Final = "it was made under terms that do not hold any more"
OTHER_POLICY: Final = "its policy is not the one that is held here under this version"
NOT_HELD: Final = "its policy is not held here any more"
ENGINE_FAILED: Final = "the engine could not score it"
ENVIRONMENT_FAILED: Final = "the run's environment failed on it"
HEARS_MORE: Final = "its worker's environment failed within it, and this one did not"
NO_TASKS: Final = "the run's environment makes no tasks for it"
ASKED: Final = 60.0
"""Seconds in which an environment says all that it is asked about a place: what a worker can
cost its scorer, beside the replay, with content on which the environment is slow."""
LOST: Final = "its worker has lost it, or could not draw it"
STORAGE_FAILED: Final = "the disk of its scorer failed"
WINDOW_DROPPED: Final = "another place of its window was wrong"
BY_CONTENT: Final = (ENGINE_FAILED, ENVIRONMENT_FAILED, HEARS_OTHER, HEARS_MORE, LOST)
"""Reasons for an inconclusive result that a worker can cause by its content, so they must not
be a free way out of the dice. No worker can cause a place without tasks, since seeds are not
chosen."""


@dataclass(slots=True, eq=False)
class Scoring:
    """A place on its way through the scorer."""

    submission: Submission
    is_newcomer: bool = True
    done: trio.Event = field(default_factory=trio.Event)
    verdict: SignedVerdict | None = None

    async def wait(self) -> Reply:
        """Return the verdict, or a refusal that tells the worker to ask again."""
        with trio.move_on_after(PATIENCE):
            await self.done.wait()
        return self.verdict or Refused("it is not scored yet", True)


Choice = Callable[[Sequence[Claim]], Sequence[int]]
"""Function that chooses the groups to replay, in order, given the claims that fit each group's
rewards."""

Doubt = Callable[["Ruling"], bool]
"""Function that returns True if the scorer's ruling blames somebody who signed otherwise."""


def replay_all(found: Sequence[Claim]) -> range:
    """Choose every group."""
    return range(len(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """The scorer's result for one place."""

    verdict: Verdict
    reason: str
    statistic: float = 0.0
    limit: float = 0.0
    tasks: tuple[Task, ...] = ()
    groups: tuple[Group, ...] = ()
    """Groups as the worker drew them; empty if nothing was scored."""
    rewards: tuple[float, ...] = ()
    """Rewards of all completions, as a verdict carries them (float32)."""
    found: tuple[Claim, ...] = ()
    """Correct claim about each group."""
    replayed: tuple[int, ...] = ()
    """Indices of the groups that were replayed."""
    logprobs: bytes = b""
    """Log-probs of every token of the replayed groups, in order, in little-endian float16."""
    evidence: tuple[Evidence, ...] = ()
    """Evidence of the replayed groups, in order."""
    work: Work | None = None
    seconds: float = 0.0
    """Seconds that the scorer spent on the place."""

    def sign(self, commitment: Commitment, signer: Signer) -> SignedVerdict:
        """Return the signed verdict on a place that follows from this ruling."""
        is_accepted = self.verdict is Verdict.ACCEPTED
        return SignedVerdict(
            *(signer.peer_id, commitment, self.verdict, self.reason[:MAX_REASON]),
            *(self.statistic, self.limit, self.rewards if is_accepted else ()),
            content_digest(self.logprobs) if is_accepted else b"",
            self.work if is_accepted else None,
        ).signed(signer)

    @property
    def finding(self) -> Finding | None:
        """Reason for a rejection; None unless the place is rejected."""
        if self.verdict is not Verdict.REJECTED:
            return None
        return Finding(self.reason, self.statistic, self.limit)


def finding_against(verdict: SignedVerdict, ruling: Ruling) -> Finding | None:
    """Return a repetition's finding against a place or, in an accepted place, against the
    rewards that its scorer has signed."""
    if verdict.verdict is not Verdict.ACCEPTED or ruling.verdict is Verdict.REJECTED:
        return ruling.finding
    if ruling.verdict is Verdict.INCONCLUSIVE:
        return Finding(HEARS_OTHER, 1.0, 0.0) if ruling.reason == HEARS_OTHER else None
    signed = verdict.rewards
    return impossible_reward(signed) or wrong_reward(signed, ruling.rewards)


class NoTasks(EnvironmentFailed):
    """Raised if the environment fails on the seeds of a place, before any content is
    looked at."""


def inconclusive(reason: str) -> Ruling:
    """Return an inconclusive ruling, which accuses nobody."""
    return Ruling(verdict=Verdict.INCONCLUSIVE, reason=reason)


@dataclass(slots=True, eq=False)
class _Job:
    submission: Submission
    choose: Choice
    blames: Doubt | None
    since: float
    done: trio.Event = field(default_factory=trio.Event)
    ruling: Ruling | None = None


class Scorer:
    """A queue in front of one engine and one environment."""

    def __init__(
        self,
        node: Node,
        engine: Engine,
        environment: ContainedEnvironment,
        *,
        survives_engine: bool,
    ) -> None:
        """Make a scorer; `work_forever` does the work.

        Args:
            node: Holds the policies.
            engine: Scores; its weights are replaced.
            environment: Makes the tasks and pays the rewards.
            survives_engine: True if a dead engine is replaced. If False, as for a learner's
                engine, `work_forever` raises.
        """
        self._node = node
        self._engine = engine
        self._environment = environment
        self._survives_engine = survives_engine
        self._queues: dict[PolicyVersion, dict[PeerId, deque[_Job]]] = {}
        self._arrived = Notifier()
        self._left = 0
        """Number of places of the current version that are left in this pass."""
        self._version = NO_POLICY
        """Version whose places are scored now."""
        self._loaded = NO_POLICY, b""
        self._history = DrawHistory()
        self.failures = Failures()
        """Failures of the environment."""
        self._began = node.world.now()
        self.busy = 0.0
        """Seconds spent on places."""
        self.groups = 0
        """Number of groups that were replayed."""
        self.loads = 0
        """Number of times that weights were loaded."""

    @property
    def loaded(self) -> PolicyVersion:
        """Version of the policy in the engine."""
        return self._loaded[0]

    @property
    def waiting(self) -> int:
        """Number of places in the queue."""
        return sum(len(jobs) for own in self._queues.values() for jobs in own.values())

    @property
    def oldest(self) -> float:
        """Seconds for which the oldest place in the queue has waited; 0 if none waits."""
        since = [
            jobs[0].since for own in self._queues.values() for jobs in own.values() if jobs
        ]
        return self._node.world.now() - min(since) if since else 0.0

    @property
    def busy_share(self) -> float:
        """Share of its lifetime that the scorer spent on places."""
        return self.busy / max(self._node.world.now() - self._began, 1e-9)

    async def score(
        self,
        submission: Submission,
        choose: Choice = replay_all,
        blames: Doubt | None = None,
    ) -> Ruling:
        """Wait for a place's turn and return the scorer's result.

        Whoever calls this for a peer does so in a task of its own: a peer that goes away must
        not leave an engine in the middle of a call.

        Args:
            submission: Signed and bound; its groups are still encoded.
            choose: Chooses the groups to replay with the model.
            blames: See `check_place`.
        """
        job = _Job(submission, choose, blames, self._node.world.now())
        commitment = submission.commitment
        own = self._queues.setdefault(commitment.version, {})
        own.setdefault(commitment.node, deque()).append(job)
        self._arrived.notify_all()
        await job.done.wait()
        assert job.ruling is not None
        return job.ruling

    def drop_window(self, digest: bytes) -> None:
        """Remove a window's places from the queue, so that they are not scored."""
        for version, own in list(self._queues.items()):
            for worker, jobs in list(own.items()):
                for job in [
                    one for one in jobs if one.submission.signed.window.digest == digest
                ]:
                    jobs.remove(job)
                    self._end(job, inconclusive(WINDOW_DROPPED))
                self._tidy(version, worker)

    def forget_policy(self) -> None:
        """Load weights again before the next place, since the engine is a new one."""
        self._loaded = NO_POLICY, b""

    async def work_forever(self) -> None:
        """Score places from the queue until cancelled.

        Raises:
            WorkerDied: The engine has died, and nobody starts another.
        """
        try:
            while True:
                job = self._next()
                if job is None:
                    await self._arrived.wait()
                    continue
                began = self._node.world.now()
                ruling = inconclusive(ENGINE_FAILED)
                try:
                    ruling = await self._score(job)
                finally:
                    seconds = self._node.world.now() - began
                    self.busy += seconds
                    self._end(job, replace(ruling, seconds=seconds))
        finally:
            for own in self._queues.values():
                for jobs in own.values():
                    for job in jobs:
                        self._end(job, inconclusive(ENGINE_FAILED))
            self._queues.clear()

    def _end(self, job: _Job, ruling: Ruling) -> None:
        job.ruling = ruling
        job.done.set()

    def _next(self) -> _Job | None:
        if self._version not in self._queues or not self._left:
            if not self._queues:
                return None
            later = [version for version in self._queues if version > self._version]
            self._version = min(later or self._queues)
            self._left = sum(map(len, self._queues[self._version].values()))
        self._left -= 1
        own = self._queues[self._version]
        worker, jobs = next(iter(own.items()))
        job = jobs.popleft()
        own[worker] = own.pop(worker)  # behind the others
        self._tidy(self._version, worker)
        return job

    def _tidy(self, version: PolicyVersion, worker: PeerId) -> None:
        own = self._queues.get(version, {})
        if not own.get(worker, True):
            del own[worker]
        if version in self._queues and not own:
            del self._queues[version]

    async def _score(self, job: _Job) -> Ruling:
        commitment = job.submission.commitment
        run, shardcast = run_of(self._node), self._node.shardcast
        if commitment.terms != terms_digest(run):
            return inconclusive(OTHER_TERMS)
        if not shardcast.holds(commitment.version):
            return inconclusive(NOT_HELD)
        if commitment.policy != shardcast.manifest(commitment.version).weights_digest:
            return inconclusive(OTHER_POLICY)
        try:
            # for all of it: tasks and rewards take their time, and the next policy may come
            with shardcast.pin(commitment.version):
                ruling = await self._check(job, run)
            self.failures.recover()
            return ruling
        except EnvironmentFailed as error:
            self.failures.tell(error, "places on which it fails are inconclusive")
            is_without = isinstance(error, NoTasks)
            return inconclusive(NO_TASKS if is_without else ENVIRONMENT_FAILED)
        except (EngineError, StorageError) as error:
            place = f"{commitment.node.short} v{commitment.version}/{commitment.index}"
            logger.error("engine_failed %s: %s", place, error)
            is_disk = isinstance(error, StorageError)
            return inconclusive(STORAGE_FAILED if is_disk else ENGINE_FAILED)
        except WorkerDied as error:
            self.forget_policy()
            if not self._survives_engine:
                raise
            logger.error("engine_died: %s; it is started again", error)
            return inconclusive(ENGINE_FAILED)

    async def _check(self, job: _Job, run: Run) -> Ruling:
        async def score(tasks: Sequence[GroupTask], groups: Sequence[Group]) -> list[Scored]:
            commitment = job.submission.commitment
            await dawdle(self._node.world, "scorer/slow replay")
            with self._node.shardcast.pin(commitment.version) as weights:
                await self._load(commitment.version, commitment.policy, weights)
                scored = await self._engine.score(tasks, groups, run_sampling(run))
            self.groups += len(groups)
            return scored

        decode = partial(
            decode_off_loop, self._node.world, decode_groups_untrusted, rate=DECODE_RATE
        )
        ruling = await check_place(
            *(run, self._environment, score, job.submission, job.choose),
            blames=job.blames,
            decode=decode,
        )
        if ruling.verdict is Verdict.ACCEPTED and ruling.evidence:
            limits, node = run_of(self._node).terms.limits, job.submission.commitment.node
            judgement = self._history.judge(node, ruling.evidence, limits)
            if judgement.verdict is not Verdict.ACCEPTED:
                return _rejected(judgement, ruling)
        return ruling

    async def _load(self, version: PolicyVersion, policy: bytes, weights: str) -> None:
        if (version, policy) == self._loaded:
            return
        await self._node.shardcast.check_weights(version)
        self.forget_policy()  # an engine that fails in the middle holds none
        await self._engine.load(weights)
        self._loaded = version, policy
        self.loads += 1


Decode = Callable[[bytes], Awaitable[tuple[Group, ...]]]
Score = Callable[[Sequence[GroupTask], Sequence[Group]], Awaitable[list[Scored]]]
"""Function that runs the model of the place's policy over groups."""


async def check_place(
    run: Run,
    environment: ContainedEnvironment,
    score: Score,
    submission: Submission,
    choose: Choice,
    *,
    blames: Doubt | None = None,
    decode: Decode | None = None,
) -> Ruling:
    """Check the shape, rewards and draws of a place, in this order.

    Args:
        run: Run whose terms apply.
        environment: Environment that makes the tasks and pays.
        score: Runs the model.
        submission: Submission to check.
        choose: Chooses the groups to replay with the model.
        blames: True if somebody is blamed for different rewards. Then the environment is asked
            again first, and is at fault itself if it does not repeat its rewards.
        decode: Decodes the content off the loop; None: here.

    Raises:
        EnvironmentFailed, EngineError, StorageError, WorkerDied: Nothing is known.
        NoTasks: The same, by no fault of its worker.
    """
    commitment = submission.commitment
    order = draw_order(run, commitment.node, commitment.version, commitment.policy)
    if submission.content == NOTHING:
        await _make_tasks(environment, order, commitment.index)
        return inconclusive(LOST)
    groups = await _read_groups(run, order, submission, decode)
    if isinstance(groups, Ruling):
        return groups
    with _in_time():
        made = await _make_tasks(environment, order, commitment.index)
        pairs = order.with_draws(commitment.index, made)
        tasks = tuple(task for task, _ in pairs)
        groups = await _hear_again(run, environment, tasks, groups)
        if isinstance(groups, Ruling):
            return groups
        answers = answers_of(tasks, groups)
        paid = await environment.pay(answers)
    rewards = tuple(map(as_signed, paid.rewards))
    size = run.terms.sampling.group_size
    found = tuple(
        claim_of(rewards[at : at + size], is_certain=not any(paid.failed[at : at + size]))
        for at in range(0, len(rewards), size)
    )
    chosen = tuple(choose(found))
    scored = (
        await score([pairs[place][1] for place in chosen], [groups[place] for place in chosen])
        if chosen
        else []
    )
    evidence = tuple(one.evidence for one in scored)
    ruling = Ruling(
        verdict=Verdict.ACCEPTED,
        reason="",
        tasks=tasks,
        groups=groups,
        rewards=rewards,
        found=found,
        replayed=chosen,
        evidence=evidence,
        logprobs=b"".join(one.logprobs for one in scored),
        work=count_work(pairs, groups),
    )
    judgement = _judge_all(evidence, run.terms.limits) if evidence else ACCEPTED
    if judgement.verdict is not Verdict.ACCEPTED:
        return _rejected(judgement, ruling)
    if blames is not None and blames(ruling):
        with _in_time():
            await environment.confirm(answers, paid.rewards)
    return ruling


@contextmanager
def _in_time() -> Iterator[None]:
    """Limit what an environment is asked to `ASKED`.

    Raises:
        EnvironmentFailed: It takes longer.
    """
    try:
        with trio.fail_after(ASKED):
            yield
    except trio.TooSlowError:
        raise EnvironmentFailed(
            f"all that the environment is asked about a place takes over {ASKED:g} s"
        ) from None


def _judge_all(pool: Sequence[Evidence], limits: Limits) -> Judgement:
    """Judge each group by itself, then all of them together; the first violation decides."""
    said = [*(judge(evidence, limits) for evidence in pool), judge_pool(pool, limits)]
    return next((one for one in said if one.verdict is not Verdict.ACCEPTED), ACCEPTED)


async def _read_groups(
    run: Run, order: DrawOrder, submission: Submission, decode: Decode | None
) -> tuple[Group, ...] | Ruling:
    """Return the groups of a place, or the ruling that its content is invalid."""
    content, index = submission.content, submission.commitment.index
    try:
        groups = decode_groups_untrusted(content) if decode is None else await decode(content)
    except BadMessage as error:
        return _no_answer(str(error))
    if [group.group for group in groups] != list(order.numbers(index)):
        return _no_answer("not the groups of its place in the draw order")
    for group in groups:
        shaped = check_shape([one.tokens for one in group.completions], run.shape())
        if shaped.verdict is not Verdict.ACCEPTED:
            return _no_answer(shaped.reason.value)
    return groups


async def _hear_again(
    run: Run,
    environment: ContainedEnvironment,
    tasks: Sequence[Task],
    groups: tuple[Group, ...],
) -> tuple[Group, ...] | Ruling:
    """Return the groups with the environment's insertions, or a ruling that the groups are
    impossible or that the worker's environment inserted something else."""
    is_silent = run.terms.sampling.turns == 1
    answers = answers_of(tasks, groups)
    all_told = [] if is_silent else await environment.hear(answers)
    told = iter(all_told)
    ends, heard = run.shape().end_tokens, list[Group]()
    try:
        for group in groups:
            completions = list[Completion]()
            for one in group.completions:
                said = () if is_silent else next(told)
                if one.heard != heard_digest(said):
                    if is_silent:
                        return _no_answer("a completion of one turn hears nothing")
                    if await environment.hear(answers) != all_told:
                        raise EnvironmentFailed("it says other words when it is asked again")
                    if None in said:
                        return inconclusive(ENVIRONMENT_FAILED)
                    return inconclusive(HEARS_MORE if one.heard == UNHEARD else HEARS_OTHER)
                turns = turns_of(one.tokens, said, ends)
                completions.append(replace(one, turns=turns, heard=b""))
            heard.append(replace(group, completions=tuple(completions)))
    except BadMessage as error:
        return _no_answer(str(error))
    return tuple(heard)


async def _make_tasks(
    environment: ContainedEnvironment, order: DrawOrder, index: int
) -> Sequence[Task]:
    try:
        return await environment.tasks(order.task_seeds(index))
    except EnvironmentFailed as error:
        raise NoTasks(str(error)) from error


def _rejected(judgement: Judgement, ruling: Ruling) -> Ruling:
    return replace(
        ruling,
        verdict=judgement.verdict,
        reason=judgement.reason.value,
        statistic=float(judgement.statistic),
        limit=float(judgement.limit),
    )


def _no_answer(detail: str) -> Ruling:
    """Return the rejection of content that is no answer to the tasks of its place."""
    logger.info("no_answer: %s", detail)
    return Ruling(verdict=Verdict.REJECTED, reason=NO_ANSWER, statistic=1.0)
