"""A worker that lies once, on purpose, to see which validators notice: ``--role
roles.demo.canary:Canary``.

Theory of operation
-------------------
Names are free, so a validator cannot tell a stranger that lies from one that is sent to try it.
A canary is a node like any other, with a key and an address of its own, which the people behind
a trainer (or anybody else) start elsewhere. It works as it should for a while, then hands in
one submission that an honest replay must reject, and says so to the trainer beforehand, which
learns nothing from that content. A validator that accepts it has signed a lie: the canary
confesses, and the trainer convicts by its own replay, with a proof that bystanders repeat. One
that refuses the honest work before it is appealed against, and one that gives no answer is
complained of, as by any worker.

The trainer knows no canary by name, keeps no list that could leak, and believes none: whatever
a confession says, the replay decides. A name tells one lie; then its node rests, and the next
is started with an empty folder. Nobody learns from a newcomer where lots fall, so none of that
counts as work of the run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from random import Random
from typing import ClassVar, Final, Self

import trio

from p2p.errors import ConfigError
from p2p.node.node import Node
from p2p.node.tables import read_table
from p2p.shardcast.manifest import PolicyVersion
from proofs.checks import Verdict
from roles.demo.cheats import redrawn
from roles.engines.base import Completion, Engine, Group
from roles.envs.client import ContainedEnvironment
from roles.inference.appeals import Appeals
from roles.inference.config import InferenceConfig
from roles.inference.outbox import SubmissionOutbox
from roles.inference.places import OpenPlace
from roles.inference.role import Inference
from roles.inference.session import InferenceSession
from roles.protocol.core.assignment import run_sampling
from roles.protocol.core.lies import Acceptance
from roles.protocol.core.messages import SignedVerdict, Submission
from roles.protocol.core.refusals import Forewarning
from roles.run import Run

logger = logging.getLogger(__name__)


class CanaryLie(Enum):
    """What is wrong with the one submission."""

    REDRAWN = "redrawn"
    """Drawn with other seeds."""
    GREEDY = "greedy"
    """The most probable tokens."""
    ALTERED = "altered"
    """One token is another."""
    TRUNCATED = "truncated"
    """An answer lacks its end."""
    REPLAYED = "replayed"
    """The answers to the place before it."""


LIES: Final = tuple(CanaryLie)
_DRAWN: Final = (CanaryLie.REDRAWN, CanaryLie.GREEDY)
"""Those that the engine draws; the others are made of an honest answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryConfig(InferenceConfig):
    """An inference node's configuration, and when it lies."""

    lies: tuple[str, ...] = tuple(lie.value for lie in LIES)
    """Of which kinds; one of them is chosen by chance."""

    honest: int = 40
    """Places that it works honestly at most before; how many is chosen by chance. With its
    last window they are fewer than the 64 of a probation, all of which are checked."""

    def __post_init__(self) -> None:
        known = {lie.value for lie in LIES}
        if not self.lies or not known >= set(self.lies) or self.honest < 1:
            raise ValueError(
                f"lies are some of {', '.join(sorted(known))}, and honest is at least 1"
            )


class Canary(Inference):
    """An inference node that lies once."""

    name: ClassVar[str] = "canary"

    def __init__(self, config: CanaryConfig) -> None:
        super().__init__(config)
        self._canary = config

    @classmethod
    def from_config(cls, table: Mapping[str, object]) -> Self:
        """Made from ``[role.canary]``."""
        return cls(read_table(CanaryConfig, table, "[role.canary]"))

    def make_session(
        self,
        node: Node,
        run: Run,
        environment: ContainedEnvironment,
        engine: Engine,
        outbox: SubmissionOutbox,
    ) -> InferenceSession:
        """One that lies once. Raises `ConfigError` where nobody would hear of it."""
        if not run.terms.appeals:
            raise ConfigError(
                f"run {run.name} hears no appeals, so a canary has nobody to tell what it"
                " finds: appeals = true in the run's draft"
            )
        session = CanarySession(node, run, environment, engine, outbox, self.name, self.counts)
        session.plan(self._canary, node.world.rng("canary"))
        return session


class CanaryAppeals(Appeals):
    """Confesses where others would be glad."""

    lie: bytes = b""
    """The content that is one, once it is made."""

    def note_verdict(self, submission: Submission, verdict: SignedVerdict) -> None:
        """Of the lie an acceptance is told; that it is rejected is as it should be."""
        if submission.commitment.content != self.lie:
            super().note_verdict(submission, verdict)
            return
        logger.info("canary_answered %s: %s", verdict.validator.short, verdict.verdict.value)
        if verdict.verdict is Verdict.ACCEPTED:
            self.tell(verdict.signature, Acceptance(verdict, submission))


class CanarySession(InferenceSession):
    """Works honestly up to one place."""

    appeals_type: ClassVar[type[Appeals]] = CanaryAppeals
    kind = CanaryLie.ALTERED
    turn = 1
    """From which of the places on that it makes it may lie, from 1."""
    begun = 0
    made = 0
    before: tuple[Group, ...] = ()
    """The groups of the place before."""
    has_lied = False

    def plan(self, config: CanaryConfig, rng: Random) -> None:
        """Choose the lie."""
        self.kind = CanaryLie(rng.choice(config.lies))
        self.turn = 1 + rng.randint(1, config.honest)
        self._drawn_wrong: set[tuple[PolicyVersion, int]] = set()

    async def begin(self, place: OpenPlace) -> None:
        """Draw it; from the turn on, with what is to be wrong. Of those the first that is full
        is handed in, and no other."""
        self.begun += 1
        sampling, tasks = run_sampling(self.run), place.tasks
        if self.begun >= self.turn and self.kind in _DRAWN:
            self._drawn_wrong.add((place.order.version, place.index))
            if self.kind is CanaryLie.GREEDY:
                sampling = replace(sampling, temperature=0.0)
            else:
                tasks = redrawn(tasks)
        await self.engine.submit(tasks, sampling)

    def groups_of(self, place: OpenPlace) -> tuple[Group, ...]:
        """What is handed in of it."""
        self.made += 1
        groups, before = super().groups_of(place), self.before
        self.before = groups
        if self.kind in _DRAWN:
            self.has_lied = (place.order.version, place.index) in self._drawn_wrong
            return groups
        self.has_lied = self.made >= self.turn
        if not self.has_lied:
            return groups
        if self.kind is CanaryLie.REPLAYED and before:
            both = zip(before, groups, strict=True)
            return tuple(replace(old, group=new.group) for old, new in both)
        is_cut = self.kind is CanaryLie.TRUNCATED
        return _changed(groups, _shortened if is_cut else _altered)

    async def produce(self) -> Submission:
        """The next place; the trainer hears of the lie before anybody sees it. It is the
        last."""
        if self.has_lied:
            logger.info("canary_rests: its lie is told; the next one needs an empty --data")
            await trio.sleep_forever()
        submission = await super().produce()
        if self.has_lied:
            appeals = self.appeals
            assert isinstance(appeals, CanaryAppeals)
            appeals.lie = submission.commitment.content
            while await appeals.ask(Forewarning(submission.commitment)) is None:
                logger.info("canary_waits: the trainer does not answer")
        return submission


def _changed(
    groups: tuple[Group, ...], change: Callable[[Completion], Completion]
) -> tuple[Group, ...]:
    """With another first answer."""
    first, *others = groups
    answer, *answers = first.completions
    return (replace(first, completions=(change(answer), *answers)), *others)


def _altered(one: Completion) -> Completion:
    return replace(one, tokens=(one.tokens[0] ^ 1, *one.tokens[1:]))


def _shortened(one: Completion) -> Completion:
    return replace(one, tokens=one.tokens[:-1], logprobs=one.logprobs[:-1])
