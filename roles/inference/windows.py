"""Windows of full places: sent to the trainer, and their content to the scorer that it names.

Full places gather in an open window, which closes when it is full, when its version is
replaced, when nothing more is wanted, or after a twentieth of `lag` usual steps. Windows are
signed, put on disk and sent to the trainer one after the other, since it takes places in their
order. Its answer names the places it wants and who scores them: their content is sent, the
others are settled as not wanted. It also says how many places it wants next; a worker that has
no answer under a version draws one window and waits.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import trio

from p2p.bounded import BoundedDict
from p2p.concurrency import Notifier
from p2p.errors import BadMessage, StorageError
from p2p.identity import PeerId
from p2p.naming import printable
from p2p.node.node import Node
from p2p.shardcast.manifest import PolicyVersion
from p2p.wire import KI
from p2p.world import Timer
from proofs.checks import Verdict
from roles.contract import run_of
from roles.inference.outbox import FullPlace, Outbox
from roles.inference.status import InferenceCounts
from roles.protocol.core.answer import (
    MAX_ANSWER,
    Answer,
    ContentRequest,
    ContestRequest,
    Refused,
    Reply,
    WindowRequest,
    encode_reply,
    encode_request,
)
from roles.protocol.core.terms import terms_digest
from roles.protocol.core.verdict import SignedVerdict
from roles.protocol.core.window import SignedWindow, Submission, Window
from roles.protocol.request import ask
from roles.protocol.standing import RoleStanding
from roles.shared.backoff import Backoff
from roles.shared.durable import Durable

logger = logging.getLogger(__name__)

NOT_WANTED: Final = "unchecked"
"""Result of a place that the trainer did not ask for."""
TOO_OLD: Final = "its policy has become too old"
SILENT: Final = "its validator is silent, and nobody is blamed"
STREAMS: Final = 4
"""Most contents on their way to one scorer at a time."""
FIRST_REST: Final = 5.0
"""Seconds until a trainer that refused for good is asked again. The pause doubles each time."""
LONGEST_REST: Final = 300.0
FIRST_PATIENCE: Final = 5.0
"""Seconds until a window closes while the length of a step is unknown."""
CONTESTS: Final = 3
"""Most attempts to tell the trainer of a validator's rejection."""
KEPT: Final = 8
"""Number of versions for which the number of wanted places is remembered."""

Finish = Callable[[SignedWindow, int, str, str, SignedVerdict | None], Awaitable[None]]
"""Function that settles a place of a window, given its index, the kind of result, the reason,
and the verdict if there is one."""


class Windows:
    """The windows of one worker."""

    def __init__(
        self,
        node: Node,
        outbox: Outbox,
        standing: RoleStanding,
        counts: InferenceCounts,
        durable: Durable,
        finish: Finish,
    ) -> None:
        self._node = node
        self._outbox = outbox
        self._standing = standing
        self._counts = counts
        self._durable = durable
        self._finish = finish
        self._open: list[FullPlace] = []
        self._timer: Timer | None = None
        # before anything is drawn: what is drawn comes by itself
        self._closed = deque(outbox.loose(run_of(node).terms.trust.window))
        self._to_send = Notifier()
        self._changed = Notifier()
        self._wanted_until: BoundedDict[PolicyVersion, int] = BoundedDict(KEPT)
        """Maps each version to the index below which its places are wanted."""
        self._last_grant: int | None = None
        """Number of places that were wanted under the previous version; None before the first
        answer."""
        self._is_hungry = False
        """True if the trainer has to be asked for more."""
        self._is_committing = False
        self._refusal = ""
        """Reason why the trainer takes no work of this node; empty if it does."""
        self._lanes: dict[PeerId, trio.Semaphore] = {}
        self._version_came: tuple[PolicyVersion, float] | None = None
        self._step_seconds: float | None = None

    # What the drawing loop asks.

    def why_not_wanted(self, version: PolicyVersion, index: int) -> str:
        """Return why this place is not to be drawn now, for people; empty if it is."""
        if self._refusal:
            return f"the trainer refuses this node's work: {self._refusal}"
        until = self._wanted_until.get(version)
        if until is None:
            window = run_of(self._node).terms.trust.window
            first = self._outbox_first(version)
            until = first + min(
                window, window if self._last_grant is None else self._last_grant
            )
            if index < until:
                return ""
            return "waiting for the trainer's answer: how much it wants"
        return "" if index < until else "the trainer wants nothing more for now"

    def _outbox_first(self, version: PolicyVersion) -> int:
        """Return the index of the first place under `version` that no answer has covered."""
        pending = [place.index for place in self._outbox if place.version == version]
        return min(pending, default=0)

    async def wait_change(self) -> None:
        """Wait until the trainer's answer changes. It is asked meanwhile."""
        self._is_hungry = True
        self._to_send.notify_all()
        try:
            await self._changed.wait()
        finally:
            self._is_hungry = False

    def note_version(self, version: PolicyVersion) -> None:
        """Update the usual length of a step by the time since the previous version."""
        now = self._node.world.now()
        before = self._version_came
        if before is not None and version > before[0]:
            self._step_seconds = (now - before[1]) / (version - before[0])
        if before is None or version > before[0]:
            self._version_came = version, now
            self._last_grant = self._wanted_until.get(before[0]) if before else None

    def add(self, place: FullPlace) -> None:
        """Put a full place, which is on disk, into the open window."""
        if self._open and not place.fits_behind(self._open[-1]):
            self.close()
        self._open.append(place)
        terms = run_of(self._node).terms
        if len(self._open) >= terms.trust.window:
            self.close()
        elif len(self._open) == 1:
            patience = FIRST_PATIENCE
            if self._step_seconds is not None:
                patience = terms.sampling.lag * self._step_seconds / 20
            world = self._node.world
            self._timer = world.call_at(world.now() + patience, self.close)

    def close(self) -> None:
        """Close the open window and send it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._open:
            self._closed.append(self._open)
            self._open = []
            self._to_send.notify_all()

    # Windows to the trainer.

    async def work_forever(self) -> None:
        """Send windows and the content that is wanted of them, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._ask_when_hungry)
            for signed in self._outbox.windows:
                await self._commit(signed, nursery)
            while True:
                while not self._closed:
                    await self._to_send.wait()
                places = self._closed.popleft()
                signed = await self._durable.insist(partial(self._outbox.sign, places))
                await self._commit(signed, nursery)

    async def _ask_when_hungry(self) -> None:
        while True:
            while not self._is_hungry:
                await self._to_send.wait()
            world = self._node.world
            backoff = Backoff(world, "windows/hungry")
            rest = Backoff(world, "windows/refused", first=FIRST_REST, longest=LONGEST_REST)
            while self._is_hungry and not await self._ask_for_more():
                if self._refusal:
                    await self._wait_edition(rest)
                else:
                    await backoff.wait()

    async def _wait_edition(self, rest: Backoff) -> None:
        """Wait for a pause, or until an edition of the run file comes."""

        async def end_early() -> None:
            await self._node.book.wait_change()
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(end_early)
            await rest.wait()
            nursery.cancel_scope.cancel()

    async def _ask_for_more(self) -> bool:
        """Ask the trainer how many places it wants; it answers when it wants some, or after a
        while. Return True if it wants places of the version that is here."""
        if self._is_committing or self._closed:
            return False  # those answers say it
        node, run = self._node, run_of(self._node)
        version = node.shardcast.newest
        policy = node.shardcast.manifest(version).weights_digest
        first = self._outbox.next_index(version)
        window = Window(
            run.id, terms_digest(run), node.peer_id, version, policy, first, (), b""
        )
        reply = await self._ask(SignedWindow.sign(window, node.world.signer))
        if isinstance(reply, Answer):
            self._note_answer(window, reply)
        elif isinstance(reply, Refused) and not reply.retry:
            self._refusal = printable(reply.reason)
        self._changed.notify_all()
        if not isinstance(reply, Answer):
            return False
        return reply.version == version and reply.wanted_next > 0

    async def _commit(self, signed: SignedWindow, nursery: trio.Nursery) -> None:
        """Send a window until there is a final answer, and deliver or settle its places."""
        self._is_committing = True
        try:
            await self._commit_window(signed, nursery)
        finally:
            self._is_committing = False

    async def _commit_window(self, signed: SignedWindow, nursery: trio.Nursery) -> None:
        window = signed.window
        backoff = Backoff(self._node.world, f"window/{window.version}/{window.first}")
        while True:
            if self._is_too_old(window.version):
                return await self._give_up(signed, TOO_OLD)
            await self._standing.wait_run()
            reply = await self._ask(signed)
            if isinstance(reply, Answer):
                break
            self._counts.retries += 1
            if isinstance(reply, Refused) and not reply.retry:
                # nothing more is drawn before the trainer has said that it wants something
                self._wanted_until[window.version] = 0
                if reply.next >= 0:
                    self._outbox.go_on_at(window.version, reply.next)
                return await self._give_up(signed, reply.reason)
            await backoff.wait()
        self._note_answer(window, reply)
        self._node.world.trace("window", places=len(window.contents), wanted=len(reply.wanted))
        for index in list(self._outbox.unsettled(signed)):
            if index in reply.wanted:
                nursery.start_soon(self._deliver, signed, reply, index)
            else:
                await self._finish(signed, index, NOT_WANTED, "", None)
        return None

    def _note_answer(self, window: Window, answer: Answer) -> None:
        first = window.places.stop if answer.version == window.version else 0
        self._wanted_until[answer.version] = first + answer.wanted_next
        self._refusal = self._counts.refusal = ""
        self._counts.note_answer(answer)
        self._changed.notify_all()

    async def _ask(self, signed: SignedWindow) -> Answer | Refused | None:
        """Make one attempt to commit to a window. Return None if it should be repeated."""
        node, trainer = self._node, run_of(self._node).terms.trainers[0]

        def accept(reply: Reply) -> Answer | Refused:
            if isinstance(reply, Refused):
                self._note_refusal(trainer, reply)
            elif not isinstance(reply, Answer):
                raise BadMessage("no answer to a window")
            elif reply.trainer != trainer or reply.window != signed.window.digest:
                raise BadMessage("an answer to another window, or of another trainer")
            return reply

        request = WindowRequest(signed)
        reply = await ask(node, trainer, request, accept, max_reply=MAX_ANSWER + KI)
        self._note_reached(trainer, reply is not None)
        if reply is not None:
            sizes = len(encode_request(request)), len(encode_reply(reply))
            self._counts.bytes_committed += sum(sizes)
        return reply

    def _note_reached(self, peer: PeerId, is_reached: bool) -> None:
        counts, trainer = self._counts, run_of(self._node).terms.trainers[0]
        if peer == trainer:
            if is_reached:
                counts.unanswered_since = None
            elif counts.unanswered_since is None:
                counts.unanswered_since = self._node.world.wall()

    # Content to the scorer.

    async def _deliver(self, signed: SignedWindow, answer: Answer, index: int) -> None:
        """Send a wanted place to its scorer until there is a verdict, and settle it."""
        window, scorer = signed.window, answer.scorer
        backoff = Backoff(self._node.world, f"deliver/{window.version}/{index}")
        lane = self._lanes.setdefault(scorer, trio.Semaphore(STREAMS))
        since = self._node.world.now()
        while True:
            if self._is_too_old(window.version):
                return await self._settle(signed, index, Verdict.INCONCLUSIVE, TOO_OLD)
            if scorer != answer.trainer and self._node.world.now() - since > answer.due:
                # the trainer has passed the validator over, and waits for another window
                return await self._settle(signed, index, Verdict.INCONCLUSIVE, SILENT)
            try:
                submission = await self._outbox.submission(signed, index)
            except (BadMessage, StorageError) as error:
                return await self._settle(signed, index, Verdict.INCONCLUSIVE, str(error))
            await self._standing.wait_run()
            async with lane:
                reply = await self.send(scorer, answer, submission)
            if isinstance(reply, SignedVerdict):
                break
            self._counts.retries += 1
            if isinstance(reply, Refused) and not reply.retry:
                return await self._settle(signed, index, Verdict.INCONCLUSIVE, reply.reason)
            await backoff.wait()
        if reply.verdict is Verdict.REJECTED and scorer != answer.trainer:
            await self._contest(answer.trainer, submission, reply)
        return await self._settle(signed, index, reply.verdict, reply.reason, reply)

    async def send(
        self, scorer: PeerId, answer: Answer, submission: Submission
    ) -> SignedVerdict | Refused | None:
        """Make one attempt to have a place scored. Return None if it should be repeated."""

        def accept(reply: Reply) -> SignedVerdict | Refused:
            if isinstance(reply, Refused):
                self._note_refusal(scorer, reply)
            elif not isinstance(reply, SignedVerdict):
                raise BadMessage("no verdict on content")
            elif reply.commitment != submission.commitment or reply.validator != scorer:
                raise BadMessage("a verdict about another place, or of another scorer")
            return reply

        content = submission.content
        request = ContentRequest(submission.signed, answer, submission.index, len(content))
        return await ask(
            *(self._node, scorer, request, accept),
            content=content,
            note_upload=self._counts.note_upload,
        )

    async def _contest(
        self, trainer: PeerId, submission: Submission, verdict: SignedVerdict
    ) -> None:
        """Contest a validator's rejection at the trainer, and send the place if the trainer
        requests it."""
        backoff = Backoff(self._node.world, "contest")
        request = ContestRequest(verdict, submission.signed)
        content = submission.to_bytes()
        for _ in range(CONTESTS):
            if await ask(self._node, trainer, request, lambda _: True, content=content):
                return
            await backoff.wait()

    async def _give_up(self, signed: SignedWindow, reason: str) -> None:
        for index in list(self._outbox.unsettled(signed)):
            await self._settle(signed, index, Verdict.INCONCLUSIVE, reason)

    async def _settle(
        self,
        signed: SignedWindow,
        index: int,
        verdict: Verdict,
        reason: str,
        said: SignedVerdict | None = None,
    ) -> None:
        await self._finish(signed, index, verdict.value, reason, said)
        self._changed.notify_all()

    def _is_too_old(self, version: PolicyVersion) -> bool:
        run = run_of(self._node)
        return self._node.shardcast.newest - version > run.terms.sampling.lag

    def _note_refusal(self, peer: PeerId, refusal: Refused) -> None:
        """Tell the operator, once, of a refusal that only the operator can resolve."""
        reason = printable(refusal.reason)
        if not refusal.retry and reason != self._counts.refusal:
            self._counts.refusal = reason
            logger.warning("%s refuses: %s", peer.short, reason)
        else:
            logger.info("%s: %s", peer.short, reason)
