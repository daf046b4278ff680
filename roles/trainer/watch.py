"""Validators that are of no use to the run: found, passed over, and named to its owner.

Theory of operation
-------------------
Four things are found out about a validator, by four parts:

    it signs what is false               `roles.trainer.audit`         convicted, for good
    its ledger tells two stories         `p2p.ledger`                  passed over, for good
    it rejects honest work               `roles.trainer.appeals`       convicted, for good
    it leaves work lying, or turns it    `core.punctual`               passed over for a while
      away for what nobody can repeat

This part counts what is needed for the last two, and acts on all three. Who is convicted or
away is said on gossip (`roles.protocol.away`), so that workers and the other validators go on
without it; what was found is proposed to the owner, in a file that `shoal run amend` takes.

False refusals are weighed against what a validator does besides: each delivery that is taken is
a look at it that found nothing. `STRIKES` among its last `WINDOW` looks convict, as lies do.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import trio

from p2p.bounded import BoundedDict
from p2p.identity import PeerId
from p2p.node.node import Node
from roles.protocol.away import away_of
from roles.protocol.core.away import MAX_AWAY, Away, away_topic
from roles.protocol.core.lies import STRIKES, WINDOW, Weight
from roles.protocol.core.messages import SignedVerdict
from roles.protocol.core.refusals import (
    REFUSAL_KIND,
    REFUSALS,
    Appeal,
    FalseRefusal,
    accusation,
)
from roles.run import run_of
from roles.run.core.proposal import MAX_WHY, Proposal
from roles.shared.durable import Durable
from roles.trainer.audit import Auditor
from roles.trainer.core.punctual import Punctuality

logger = logging.getLogger(__name__)

LOOK: Final = 5.0
"""Seconds between two looks at the validators."""
EVERY: Final = 20.0
"""Seconds between two statements about those that are passed over: as of the demand."""
PROPOSAL: Final = "trainer/proposal.json"
"""What is proposed for the run's next edition."""
DOUBTS: Final = 6
"""Rejections of work that a replay finds in order, among `WINDOW` looks, after which a
validator is named to the owner, though none of them convicts: honest ones are one in 10,000."""
DOUBTERS: Final = 2
"""Workers of which those must be: one could tune its work to the limits."""


@dataclass(slots=True)
class _Looks:
    """The last looks at one validator's verdicts, by content."""

    strikes: BoundedDict[bytes, FalseRefusal | None] = field(
        default_factory=lambda: BoundedDict(WINDOW)
    )
    doubted: BoundedDict[bytes, PeerId | None] = field(
        default_factory=lambda: BoundedDict(WINDOW)
    )
    """Whose work it rejected that is in order."""

    def note(self, content: bytes, strike: FalseRefusal | None, worker: PeerId | None) -> None:
        """A look; counted once, the worse one of two."""
        if self.strikes.get(content) is None:
            self.strikes[content] = strike
        if self.doubted.get(content) is None:
            self.doubted[content] = worker

    @property
    def is_doubtful(self) -> bool:
        """Whether a person should look at it."""
        workers = [worker for worker in self.doubted.values() if worker is not None]
        return len(workers) >= DOUBTS and len(set(workers)) >= DOUBTERS


class ValidatorWatch:
    """What the trainer knows of its validators' use, and what it does about it."""

    def __init__(self, node: Node, auditor: Auditor, durable: Durable) -> None:
        self._node = node
        self._auditor = auditor
        self._durable = durable
        self._heard = away_of(node)
        self._punctual = Punctuality()
        self._looks: dict[PeerId, _Looks] = {}
        self._told_at = -EVERY
        self._proposed: tuple[int, tuple[PeerId, ...]] = (0, ())
        """The edition, and whom the last proposal names."""

    def note_taken(self, verdict: SignedVerdict) -> None:
        """A delivery was taken that a step can use."""
        now = self._node.world.now()
        self._punctual.note_served(verdict.validator, verdict.commitment.node, now)
        self._looks_at(verdict.validator).note(verdict.commitment.content, None, None)

    def note_spoken(self, validator: PeerId, worker: PeerId) -> None:
        """It has judged a drawn place of ``worker``."""
        self._punctual.note_served(validator, worker, self._node.world.now())

    def complain(self, validator: PeerId, worker: PeerId) -> None:
        """A worker, whose word counts, was left waiting, or turned away without proof."""
        self._punctual.note_complaint(validator, worker, self._node.world.now())

    async def uphold(self, appeal: Appeal) -> None:
        """A replay finds nothing wrong with what a validator rejected."""
        verdict = appeal.verdict
        validator, content = verdict.validator, verdict.commitment.content
        self.complain(validator, verdict.commitment.node)
        refusal = FalseRefusal(verdict, f"{REFUSALS}/{content.hex()}")
        run = run_of(self._node)
        finding = accusation(verdict, run.terms.limits, run.shape())
        weight = finding.weight if self._auditor.may_accuse() else Weight.BORDERLINE
        looks = self._looks_at(validator)
        strike = refusal if weight is Weight.STRIKE else None
        looks.note(content, strike, verdict.commitment.node)
        found = [one for one in looks.strikes.values() if one is not None]
        logger.warning("validator %s: %s", validator, refusal)
        if weight < Weight.STRIKE or validator in self._auditor.liars:
            return
        disk = self._node.world.disk
        await self._durable.insist(partial(disk.replace, refusal.path, appeal.to_bytes()))
        convicting = [refusal] if weight is Weight.LIE else found
        if weight is Weight.LIE or len(found) >= STRIKES:
            entries = [(REFUSAL_KIND, one.to_bytes()) for one in convicting]
            await self._auditor.convict(validator, str(refusal), entries)

    async def watch_forever(self) -> None:
        """Look, tell and propose until cancelled."""
        while True:
            await self._look()
            with trio.move_on_after(LOOK):
                await self._heard.wait_change()

    async def _look(self) -> None:
        run, now = run_of(self._node), self._node.world.now()
        validators = run.terms.validators
        for gone in [one for one in self._looks if one not in validators]:
            del self._looks[gone]
        found = self._punctual.look(validators, now)
        liars = {who: why for who, why in self._auditor.liars.items() if who in validators}
        forked = [who for who in validators if self._node.ledgers.is_forked(who)]
        liars = {**dict.fromkeys(forked, "its ledger tells two stories"), **liars}
        away = tuple(dict.fromkeys((*liars, *found)))[:MAX_AWAY]
        is_news = frozenset(away) != self._heard.validators
        if is_news or (away and now - self._told_at >= EVERY):
            self._tell(away, is_news=is_news)
        doubtful = {who for who, looks in self._looks.items() if looks.is_doubtful}
        doubts = dict.fromkeys(doubtful, "it rejected work that a replay finds in order")
        await self._propose(run.epoch, {**doubts, **found, **liars})

    def _tell(self, away: tuple[PeerId, ...], *, is_news: bool) -> None:
        node = self._node
        number = max(int(node.world.wall() * 1000), self._heard.number + 1)
        said = Away(number, away)
        self._told_at = node.world.now()
        self._heard.hear(node.peer_id, said)
        node.gossip.publish(away_topic(node.run.id), said.to_bytes())
        if is_news:
            names = ", ".join(map(str, away)) or "none"
            logger.warning("validators passed over from now on: %s", names)
            node.world.trace("validators.away", count=len(away))

    async def _propose(self, epoch: int, found: dict[PeerId, str]) -> None:
        """Write down who should not be named any more, once more of them are known."""
        if self._proposed[0] != epoch:
            self._proposed = epoch, ()
        named = self._proposed[1]
        if not found.keys() - set(named):
            return
        self._proposed = epoch, (*named, *(one for one in found if one not in named))
        drop = tuple((who, why[:MAX_WHY]) for who, why in found.items())
        proposal = Proposal(self._node.run.id, epoch, drop)
        disk = self._node.world.disk
        await self._durable.insist(partial(disk.replace, PROPOSAL, proposal.to_bytes()))
        logger.warning(
            "%d validators should not be in the run's next edition; its owner signs one with:"
            " shoal run amend RUN --proposal %s --key OWNER_KEY --out NEXT",
            len(drop),
            disk.locate(PROPOSAL),
        )

    def _looks_at(self, validator: PeerId) -> _Looks:
        return self._looks.setdefault(validator, _Looks())
