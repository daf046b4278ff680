"""What this node tells the trainer of its judges: rejections that are false, and silence.

An honest node knows that its work is in order, so it appeals against every rejection that a
replay can contradict, as often as the trainer hears it; of what nobody can repeat, and of a
judge that gives no verdict in time, it complains (`roles.protocol.core.refusals`). Nothing
waits for the outcome, and a restart forgets it: what was rejected stays rejected. In a run
without appeals nothing is told.
"""

from __future__ import annotations

import logging
from typing import Final

from p2p.bounded import BoundedDict
from p2p.concurrency import Notifier
from p2p.errors import BadMessage
from p2p.identity import PeerId
from p2p.node.node import Node
from proofs.checks import Verdict
from roles.protocol.core.messages import SignedVerdict, Submission
from roles.protocol.core.refusals import (
    APPEAL_PROTOCOL,
    MAX_RULING,
    Appeal,
    Asked,
    Complaint,
    Forewarning,
    Ruled,
    decode_ruling_untrusted,
    encode_asked,
    is_repeatable,
)
from roles.protocol.request import Backoff, ask
from roles.run import run_of
from roles.shared.reasons import printable

logger = logging.getLogger(__name__)

IN_TIME: Final = 120.0
"""Seconds within which a validator should have judged what it was offered: more than one answer
of one that is busy takes (`roles.protocol.request.PATIENCE`)."""
AGAIN: Final = 60.0
"""Seconds between two complaints of the same validator."""
OFFERED: Final = 256
"""First attempts that are remembered: of the 52 submissions under way with lots, by four
validators each."""
KEPT: Final = 64
"""Validators of whom was complained."""
WAITING: Final = 4
"""Appeals and complaints that wait to be told; each may hold a submission."""
ATTEMPTS: Final = 5
"""How often one is told to a trainer that does not answer, or says "later"."""


class Appeals:
    """What waits to be told, and what was."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._is_on = run_of(node).terms.appeals
        self._offered: BoundedDict[tuple[bytes, PeerId], float] = BoundedDict(OFFERED)
        """When each submission was offered first to each of its judges, by content."""
        self._complained: BoundedDict[PeerId, float] = BoundedDict(KEPT)
        self._waiting: BoundedDict[bytes, Asked] = BoundedDict(WAITING)
        self._came = Notifier()
        self._is_barred = False
        """Whether an appeal was in vain: no other is heard."""
        self.ruled: dict[str, int] = {}
        """What came of them, for people."""

    def note_verdict(self, submission: Submission, verdict: SignedVerdict) -> None:
        """A signed verdict has come."""
        self._offered.pop((submission.commitment.content, verdict.validator), None)
        if verdict.verdict is not Verdict.REJECTED:
            return
        if not is_repeatable(verdict.reason):
            self._complain(verdict.validator, submission)
        elif not self._is_barred:
            self.tell(verdict.signature, Appeal(verdict, submission))

    def note_offered(self, submission: Submission, validator: PeerId) -> None:
        """A validator is asked."""
        offered = submission.commitment.content, validator
        if offered not in self._offered:
            self._offered[offered] = self._node.world.now()

    def note_unanswered(self, submission: Submission, validator: PeerId) -> None:
        """A validator gave no verdict when it was asked."""
        now = self._node.world.now()
        offered = submission.commitment.content, validator
        if now - self._offered.get(offered, now) >= IN_TIME:
            self._complain(validator, submission)

    def _complain(self, validator: PeerId, submission: Submission) -> None:
        now = self._node.world.now()
        if now - self._complained.get(validator, -AGAIN) >= AGAIN:
            self._complained.renew(validator, now)
            self.tell(validator.digest, Complaint(validator, submission.commitment))

    def tell(self, key: bytes, asked: Asked) -> None:
        """The trainer is to hear of it, once."""
        if self._is_on:
            self._waiting[key] = asked
        self._came.notify_all()

    async def work_forever(self) -> None:
        """Tell the trainer, one after the other, until cancelled."""
        while True:
            while not self._waiting:
                await self._came.wait()
            key, asked = next(iter(self._waiting.items()))
            del self._waiting[key]
            await self.ask(asked)

    async def ask(self, asked: Asked) -> Ruled | None:
        """Tell the trainer now, and return what it says; None if it has said nothing."""
        backoff = Backoff(self._node.world, "appeal")
        for _ in range(ATTEMPTS):
            trainer = run_of(self._node).terms.trainers[0]
            data = await ask(
                self._node, trainer, APPEAL_PROTOCOL, encode_asked(asked), max_reply=MAX_RULING
            )
            if data is not None:
                try:
                    ruled, sentence = decode_ruling_untrusted(data)
                except BadMessage as error:
                    logger.info("appeal_nonsense: %s", error)
                    return None
                if ruled is not Ruled.LATER:
                    self._note_ruling(asked, ruled, printable(sentence))
                    return ruled
            await backoff.wait()
        return None

    def _note_ruling(self, asked: Asked, ruled: Ruled, sentence: str) -> None:
        self.ruled[ruled.value] = self.ruled.get(ruled.value, 0) + 1
        if isinstance(asked, Complaint | Forewarning):
            return
        self._is_barred = self._is_barred or ruled is Ruled.IN_VAIN
        log = logger.warning if ruled in (Ruled.UPHELD, Ruled.IN_VAIN) else logger.info
        log("appeal against validator %s %s: %s", asked.verdict.validator.short, ruled.value,
            sentence)  # fmt: skip
