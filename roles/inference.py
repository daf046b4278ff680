"""The inference role: draw derived tasks under the newest policy, prove, submit, keep until receipted.

Theory of operation
-------------------
One loop loads the newest whole policy and generates; every finished submission is signed and put on disk
before anything else happens to it. A task per submission then asks a validator for a verdict, again and
again across crashes of either side, until a signed one is here. `UNDER_WAY` submissions may be without
verdict: that is the back-pressure of the whole pipeline, from the trainer's pool to this engine.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final, Self

import trio

from p2p.errors import BadMessage, PeerUnreachable, ProtocolNotSupported
from p2p.host import request
from p2p.identity import PeerId
from p2p.node.node import Node
from p2p.node.tables import read_table
from p2p.shardcast.manifest import PolicyVersion
from proofs.checks import Verdict
from roles.draws import draw_order
from roles.engines.base import Engine, Sampling
from roles.engines.client import open_engine
from roles.engines.config import DeviceProfile
from roles.envs.base import Environment
from roles.messages import (
    ROLLOUT_PROTOCOL,
    Commitment,
    Refusal,
    SignedVerdict,
    Submission,
    content_digest,
    decode_reply_untrusted,
    encode_groups,
)
from roles.outbox import Outbox
from roles.retry import Backoff
from roles.run import Run, run_of

logger = logging.getLogger(__name__)

UNDER_WAY: Final = 4
"""Submissions without a verdict: enough to hide a round trip and a queue, few enough not to go stale."""
VERDICT_SECONDS: Final = 120.0
"""How long a validator may take before it is asked again (it answers from its ledger then)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceConfig:
    """This machine's part; everything else is in the run file."""

    threads: int = 1
    """Threads of the engine."""

    nice: int = 0
    """Niceness of the engine's process."""

    profile: DeviceProfile = field(default_factory=DeviceProfile)
    """Speeds of the fake engine; others ignore it."""


@dataclass(slots=True)
class InferenceCounts:
    """What has become of the work of this process."""

    submitted: int = 0
    verdicts: dict[str, int] = field(default_factory=dict)
    policies_loaded: int = 0
    policies_skipped: int = 0
    retries: int = 0


class Inference:
    """Generates rollouts for a run."""

    name: ClassVar[str] = "inference"

    def __init__(self, config: InferenceConfig) -> None:
        self._config = config
        self._loaded = PolicyVersion(-1)
        self.counts = InferenceCounts()

    @classmethod
    def from_config(cls, table: Mapping[str, object]) -> Self:
        """Made from ``[role.inference]``."""
        return cls(read_table(InferenceConfig, table, f"[role.{cls.name}]"))

    def health(self) -> dict[str, object]:
        """Counts for people and dashboards."""
        counts = self.counts
        return {
            "version": int(self._loaded),
            "submitted": counts.submitted,
            "policies_loaded": counts.policies_loaded,
            "policies_skipped": counts.policies_skipped,
            "retries": counts.retries,
            **{verdict.value: counts.verdicts.get(verdict.value, 0) for verdict in Verdict},
        }

    async def run(self, node: Node) -> None:
        """Generate until cancelled."""
        run = run_of(node)
        environment = run.open_environments()[0]
        config = run.engine_config(threads=self._config.threads, nice=self._config.nice)
        outbox = await Outbox.open(node.world, f"{self.name}/outbox")
        room = trio.Semaphore(UNDER_WAY)
        async with (
            open_engine(node.world, replace(config, profile=self._config.profile), name=self.name) as engine,
            trio.open_nursery() as nursery,
        ):
            for submission in outbox:
                nursery.start_soon(self._deliver, node, run, outbox, submission, None)
            while True:
                await room.acquire()
                submission = await self._produce(node, run, environment, engine, outbox)
                nursery.start_soon(self._deliver, node, run, outbox, submission, room)

    async def _produce(
        self, node: Node, run: Run, environment: Environment, engine: Engine, outbox: Outbox
    ) -> Submission:
        """Draw the next submission under the newest policy and keep it."""
        version = await self.load_newest(node, engine)
        order = draw_order(node, run, version)
        index = outbox.next_index(version)
        tasks = [task for _, task in order.tasks(environment, index)]
        groups = await engine.generate(tasks, self.sampling(run))
        content = encode_groups(tuple(groups))
        commitment = Commitment(run.id, order.node, version, order.policy, index, content_digest(content))
        submission = Submission.sign(commitment, content, node.world.signer)
        await outbox.add(submission)
        self.counts.submitted += 1
        node.world.trace("submitted", version=int(version), index=index)
        return submission

    def sampling(self, run: Run) -> Sampling:
        """How completions are drawn: as the run says."""
        return run_sampling(run)

    @property
    def loaded(self) -> PolicyVersion:
        """The policy that is worked under; 0 before the first."""
        return PolicyVersion(max(0, self._loaded))

    async def load_newest(self, node: Node, engine: Engine) -> PolicyVersion:
        """Make the engine run the newest whole policy; returns it."""
        version = await node.shardcast.wait_policy(self.loaded)
        if version != self._loaded:
            with node.shardcast.pin(version) as weights:
                await engine.load(weights)
            self.note_policy(version)
        return version

    def note_policy(self, version: PolicyVersion) -> None:
        """Count a change of policy."""
        if version != self._loaded:
            self.counts.policies_loaded += 1
            self.counts.policies_skipped += max(0, version - self._loaded - 1)
            self._loaded = version

    async def _deliver(
        self, node: Node, run: Run, outbox: Outbox, submission: Submission, room: trio.Semaphore | None
    ) -> None:
        """Ask until there is a signed verdict, then forget the submission."""
        place = submission.commitment
        first = place.index % len(run.terms.validators)
        validators = itertools.cycle(run.terms.validators[first:] + run.terms.validators[:first])
        backoff = Backoff(node.world, f"deliver/{place.version}/{place.index}")
        while (verdict := await self._ask(node, next(validators), submission)) is None:
            self.counts.retries += 1
            await backoff.wait()
        kind = verdict.verdict.value
        self.counts.verdicts[kind] = self.counts.verdicts.get(kind, 0) + 1
        if verdict.verdict is Verdict.REJECTED:
            logger.warning("rejected version=%d index=%d: %s", place.version, place.index, verdict.reason)
        await outbox.remove(submission)
        if room is not None:
            room.release()

    async def _ask(self, node: Node, validator: PeerId, submission: Submission) -> SignedVerdict | None:
        """One attempt; None when it should be repeated."""
        try:
            with trio.fail_after(VERDICT_SECONDS):
                await node.locate(validator)
                data = await request(node.host, validator, ROLLOUT_PROTOCOL, submission.to_bytes())
            reply = decode_reply_untrusted(data, node.world.verify)
        except BadMessage as error:
            node.host.penalise(validator, 10.0, str(error))
            return None
        except (PeerUnreachable, ProtocolNotSupported, trio.BrokenResourceError, trio.TooSlowError) as error:
            logger.debug("validator %s did not answer: %r", validator.short, error)
            return None
        if isinstance(reply, Refusal):
            logger.info("validator %s: %s", validator.short, reply.reason)
            return None
        if reply.commitment != submission.commitment or reply.validator != validator:
            node.host.penalise(validator, 10.0, "a verdict about another submission")
            return None
        return reply


def run_sampling(run: Run) -> Sampling:
    """Temperature, length and group size that the run prescribes."""
    recipe = run.terms.recipe
    return Sampling(recipe.temperature, recipe.max_new_tokens, recipe.group_size)
