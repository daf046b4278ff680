"""A validator as the witness of windows: it signs what a worker commits to, in time.

Theory of operation
-------------------
The witness of a worker under a policy is the validator that would judge all of its work if
there were no lots (`validator_of`), so it sees every place once, and none left out. It signs a
window only while the link that decides it is not out by its own clock; a late one is refused,
and the worker names a newer link. What it has signed it answers again, whatever link the
worker names by then: nobody draws a lot twice.

A worker in standing shows the trainer's note of it (`StandingNote`); then the window is in the
ledger before it is answered, and the trainer is told of it. A newcomer's places are all
checked, and nothing of them is learnt from: its windows are remembered for a while, and leave
no entry, as names are free.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Final

import trio

from p2p.bounded import BoundedDict
from p2p.errors import BadMessage
from p2p.identity import PeerId
from p2p.ledger import Ledger
from p2p.node.node import Node
from p2p.offence import Offence
from p2p.shardcast.manifest import PolicyVersion
from roles.protocol.away import away_of
from roles.protocol.beacon import beacon_of
from roles.protocol.core.demand import NOT_WANTED
from roles.protocol.core.lots import (
    SETTLE_PROTOCOL,
    UNIT,
    Lot,
    SignedWindow,
    Window,
    WitnessedWindow,
    decode_note_untrusted,
    decode_witnessed_untrusted,
    is_early,
    is_late,
    lot_of,
)
from roles.protocol.core.messages import Commitment, Receipt, Refusal, SignedVerdict
from roles.protocol.core.settlement import (
    MAX_REPLY,
    Settlement,
    decode_settlement_reply_untrusted,
)
from roles.protocol.demand import demand_of
from roles.protocol.request import Backoff, ask
from roles.run import run_of
from roles.shared.durable import Durable
from roles.validator.core.sequence import PlaceState
from roles.validator.judge import NOT_HELD, STALE, Judge

logger = logging.getLogger(__name__)

WINDOW_KIND: Final = "window"
"""Kind of our ledger entries; the body is `WitnessedWindow.to_bytes`."""
KNOWN: Final = 16_384
"""Windows of workers in standing that are answered again, 2 KiB each: those of 1,000 workers
under the policies in use. Later ones are stale."""
PASSING: Final = 1_024
"""The same of newcomers."""
LATE: Final = "its lot may have fallen by now: name a newer link"
FILLED: Final = "places of this window were judged, or committed to, before"
REPORTS: Final = 20
"""Times that the trainer is told of a window, over a minute and more: it is away for as long
when it is started again, and a worker that settles tells of the window itself."""

_Key = tuple[PeerId, PolicyVersion]


class Witness:
    """What windows this validator has signed."""

    def __init__(self, node: Node, judge: Judge, ledger: Ledger, durable: Durable) -> None:
        self._node = node
        self._world = node.world
        self._judge = judge
        self._ledger = ledger
        self._durable = durable
        self._beacon = beacon_of(node)
        self._known: BoundedDict[_Key, list[WitnessedWindow]] = BoundedDict(KNOWN)
        self._passing: BoundedDict[_Key, list[WitnessedWindow]] = BoundedDict(PASSING)
        self._signing: dict[_Key, None] = {}
        """Whose window is on its way to the disk."""
        self._nursery: trio.Nursery | None = None
        self.signed = 0
        """Places that were committed to, in this life."""

    @property
    def is_live(self) -> bool:
        """Whether work is committed to before it is sent."""
        return self._beacon.is_live

    async def recall(self) -> None:
        """Take up what earlier lives have signed."""
        async for entry in self._ledger.entries(WINDOW_KIND):
            witnessed = decode_witnessed_untrusted(entry.body, self._world.verify)
            window = witnessed.window
            self._remember(witnessed)
            self._judge.recall_window(window)

    def open(self, nursery: trio.Nursery) -> None:
        """From now on the trainer is told; first of what an earlier life may not have said."""
        self._nursery = nursery
        for windows in list(self._known.values()):
            for witnessed in windows:
                if not self._judge.is_stale(witnessed.window.version):
                    nursery.start_soon(self._report, Settlement(witnessed))

    def report(self, witnessed: WitnessedWindow, verdict: SignedVerdict) -> None:
        """Tell the trainer that a drawn place was rejected."""
        if self._nursery is not None:
            self._nursery.start_soon(self._report, Settlement(witnessed, (verdict,)))

    async def _report(self, settlement: Settlement) -> None:
        trainer, payload = run_of(self._node).terms.trainers[0], settlement.to_bytes()
        backoff = Backoff(self._world, f"report/{settlement.witnessed.digest.hex()}")
        for _ in range(REPORTS):
            data = await ask(self._node, trainer, SETTLE_PROTOCOL, payload, max_reply=MAX_REPLY)
            if data is not None and not self._is_later(trainer, data):
                return
            await backoff.wait()

    def _is_later(self, trainer: PeerId, data: bytes) -> bool:
        """Whether the trainer answers that it is to be told again."""
        try:
            return decode_settlement_reply_untrusted(data).receipt is Receipt.LATER
        except BadMessage as error:
            self._node.host.penalise(trainer, Offence.NONSENSE.points, str(error))
            return True

    async def witness(
        self, peer: PeerId, signed: SignedWindow, note: bytes
    ) -> WitnessedWindow | Refusal:
        """The window with this validator's signature, or why not."""
        window = signed.window
        if window.node != peer or window.run != self._judge.run.id:
            raise BadMessage("a window of another node or run")
        before = self._find(window)
        if before is not None:
            return before
        refusal = self._why_not(window)
        if refusal is not None:
            return refusal
        share = self._share(window, note)
        if len(window.contents) > run_of(self._node).terms.lots.window:
            return Refusal("the window has too many places", False)
        witnessed = WitnessedWindow.sign(signed, share / UNIT, self._world.signer)
        key = (window.node, window.version)
        self._signing[key] = None
        try:
            if share < UNIT:
                body = witnessed.to_bytes()
                await self._durable.insist(partial(self._ledger.append, WINDOW_KIND, body))
        finally:
            del self._signing[key]
        self._judge.fill_window(window)
        self._remember(witnessed)
        self.signed += len(window.contents)
        if share < UNIT and self._nursery is not None:
            self._nursery.start_soon(self._report, Settlement(witnessed))
        return witnessed

    def _share(self, window: Window, note: bytes) -> int:
        """Of the worker's places that are checked: all, without the trainer's note."""
        if not note:
            return UNIT
        trainer = run_of(self._node).terms.trainers[0]
        said = decode_note_untrusted(note, trainer, self._world.verify)
        return said.share_at(window)

    def _why_not(self, window: Window) -> Refusal | None:
        node, links, now = self._node, self._beacon.links, self._world.now()
        judge = away_of(node).judge_of(run_of(node), window.node, window.version)
        if self._judge.is_stale(window.version):
            return Refusal(STALE, False)
        if judge != node.peer_id:
            return Refusal(f"{judge} is the witness of this node under this policy", True)
        if not self.is_live:
            return Refusal("no lots fall now", True)
        if is_late(window, links, now) or is_early(window, links):
            return Refusal(LATE, True)
        if node.shardcast.newest < window.version:
            return Refusal("the validator has no such policy yet", True)
        if not node.shardcast.holds(window.version):
            return Refusal(NOT_HELD, False)
        if node.shardcast.manifest(window.version).weights_digest != window.policy:
            return Refusal("the policy digest is not that of the version", False)
        state = self._judge.window_state(window)
        if state is PlaceState.REPLAYED:
            return Refusal(FILLED, False)
        if state is PlaceState.GAP or (window.node, window.version) in self._signing:
            return Refusal("an earlier window is on its way", True)
        if not all(demand_of(node).shares.asked_for(one) for one in _commitments(window)):
            return Refusal(f"{NOT_WANTED}: {demand_of(node).shares.newest}", True)
        return None

    def lot(self, witnessed: WitnessedWindow) -> Lot | None:
        """The lot of a window; None while it is not out here."""
        return lot_of(witnessed.window, self._beacon.links)

    def may_judge_alone(self, commitment: Commitment) -> bool:
        """Whether a place is one of a window that this validator signed, and no lots fall any
        more: then it is judged as all work was before there were any."""
        return not self.is_live and any(
            one.window.holds(commitment)
            for one in self._of(commitment.node, commitment.version)
        )

    def _find(self, window: Window) -> WitnessedWindow | None:
        """What was signed before and has the window's first place."""
        for one in self._of(window.node, window.version):
            if window.first in one.window.places:
                return one
        return None

    def _of(self, node: PeerId, version: PolicyVersion) -> Sequence[WitnessedWindow]:
        key = (node, version)
        return [*self._known.get(key, ()), *self._passing.get(key, ())]

    def _remember(self, witnessed: WitnessedWindow) -> None:
        window = witnessed.window
        known = self._known if witnessed.share < UNIT else self._passing
        key = (window.node, window.version)
        known.renew(key, [*known.get(key, ()), witnessed])


def _commitments(window: Window) -> list[Commitment]:
    return [
        Commitment(window.run, window.node, window.version, window.policy, place, content)
        for place, content in zip(window.places, window.contents, strict=True)
    ]
