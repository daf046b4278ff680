"""What to make of silence: ask the silent, ask everybody, and in the end give up.

The stages and their times are in `member_state`. An accusation carries the last signed words of
the accused, so that it can be judged by those who never heard of the peer, and cannot be
repeated at will. Whoever hears the accused directly stops it; whoever has newer words answers
with them; the accused speaks up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from p2p.identity import PeerId
from p2p.membership.core.active_view import Overlay
from p2p.membership.core.dissemination import Rumours
from p2p.membership.core.effects import Outbox
from p2p.membership.core.events import Change
from p2p.membership.core.flood_quotas import Floods
from p2p.membership.core.local_heartbeat import Voice
from p2p.membership.core.member_list import View
from p2p.membership.core.member_state import Entry, Stage
from p2p.membership.core.verifier import OBSOLETE_POINTS, Judge
from p2p.membership.heartbeat import SignedHeartbeat
from p2p.membership.messages import Accuse, Give

SUSPICION: Final = 1.0
"""Intervals between two accusations of one peer that are passed on without a doubt, and between
two of its good-byes. Honest accusers wait for two intervals of silence, and two of them that
heard it last at different times are an interval apart; a liar has the words for the next lie
when the last is refuted."""
DOUBT: Final = 0.5
"""Intervals within which the accused must answer us when we doubt its accuser: 2.5 s at 5 s, a
dial and two ways. It is added to the time until a death is known, at each node that doubts."""
MAX_WITNESSED: Final = 64
"""Accused peers of whose next words we tell the accusers: our neighbours, and those that were
lately."""
MAX_ASKERS: Final = 8
"""Accusers told, as many as there are neighbours."""
OBSOLETE: Final = 3.0
"""Intervals for which we know newer words than an accusation: no honest accuser lacks them so
long."""


@dataclass(slots=True)
class Doubt:
    """An accusation that waits for an answer of the accused."""

    signed: SignedHeartbeat
    source: PeerId
    until: float


class Silence:
    """Accusations, in and out; and deaths."""

    __slots__ = (
        "_askers", "_doubts", "_floods", "_judge", "_outbox", "_overlay", "_rumours", "_view", "_voice",
        "_witnessed", "doubts_end",
    )  # fmt: skip

    def __init__(
        self,
        outbox: Outbox,
        view: View,
        overlay: Overlay,
        rumours: Rumours,
        judge: Judge,
        voice: Voice,
        floods: Floods,
    ) -> None:
        self.doubts_end = math.inf
        """When to call `believe`."""
        self._doubts: dict[PeerId, Doubt] = {}
        """By the accused. The quotas of `Floods` bound them."""
        self._askers: dict[PeerId, dict[PeerId, None]] = {}
        """Who accuses a peer that we hear ourselves, and is to know what it says next."""
        self._witnessed: dict[PeerId, float] = {}
        """When we asked a peer that we hear because it was accused, longest ago first."""
        self._floods = floods
        self._outbox = outbox
        self._view = view
        self._overlay = overlay
        self._rumours = rumours
        self._judge = judge
        self._voice = voice

    def accused(self, signed: SignedHeartbeat, source: PeerId, now: float) -> None:
        """``source`` says that nothing came after ``signed``."""
        peer = signed.peer
        if peer == self._voice.peer:
            self._answer(signed, source, now)
            return
        entry = self._view.get(peer)
        if entry is not None and entry.seqno > signed.seqno:
            if entry.seen < now - OBSOLETE * entry.interval:
                self._judge.refuse("obsolete accusation", source, OBSOLETE_POINTS)
            self._outbox.send(source, Give((entry.signed,)))
            return
        if self._rumours.is_old(peer, signed.seqno, accused=True, source=source):
            return
        if entry is None and self._view.newest(peer) >= signed.seqno:
            return
        if entry is not None and entry.seqno == signed.seqno:
            signed = entry.signed  # its signature was verified, that of a look-alike was not
        elif not self._judge.is_genuine(signed, source):
            return
        if entry is None and source in self._overlay.active:
            self._accused_stranger(signed, source, now)
        elif entry is None or source not in self._overlay.active:
            self._judge.counters["accuser unknown"] += 1  # honest accusations come from neighbours
        elif entry.is_heard(now):
            self._witness(entry, source, now)
        else:
            self._suspect(entry, signed, source, now)

    def _accused_stranger(self, signed: SignedHeartbeat, source: PeerId, now: float) -> None:
        if self._floods.may_pass_unchecked(source, now):
            self._rumours.spread(signed, accused=True, source=source, now=now)
        else:
            self._judge.counters["strangers accused"] += 1

    def _witness(self, entry: Entry, source: PeerId, now: float) -> None:
        """A peer is accused that we hear ourselves: ask it, once an interval, and tell the
        accuser."""
        askers = self._askers.get(entry.peer)
        if askers is None:
            if len(self._askers) >= MAX_WITNESSED:
                del self._askers[next(iter(self._askers))]
            askers = self._askers[entry.peer] = {}
        if len(askers) < MAX_ASKERS:
            askers[source] = None
        while self._witnessed and self._witnessed[next(iter(self._witnessed))] <= now - entry.interval:
            del self._witnessed[next(iter(self._witnessed))]
        if entry.peer not in self._witnessed and len(self._witnessed) < MAX_WITNESSED:
            self._witnessed[entry.peer] = now
            self.probe(entry)

    def _suspect(self, entry: Entry, signed: SignedHeartbeat, source: PeerId, now: float) -> None:
        """A member that we do not hear ourselves is accused: pass it on, or ask it first, or
        let it be."""
        was_suspected = self._rumours.was_suspected(entry.peer, now - SUSPICION * entry.interval)
        if self._floods.is_calm(now) and not was_suspected:
            self._view.hear(entry, signed, entry.seen)
            self._accuse(entry, source, now)
        elif entry.peer not in self._doubts and self._floods.may_doubt(source, now):
            self._view.hear(entry, signed, entry.seen)
            self._doubt(entry, source, now)
        else:
            self._judge.counters["accuser doubted"] += 1

    def _doubt(self, entry: Entry, source: PeerId, now: float) -> None:
        """Ask the accused ourselves, and go on from there when no answer has come."""
        until = now + DOUBT * entry.interval
        self._doubts[entry.peer] = Doubt(entry.signed, source, until)
        self.doubts_end = min(self.doubts_end, until)
        self._outbox.send(entry.peer, Accuse((entry.signed,)))

    def speaks(self, signed: SignedHeartbeat, now: float) -> None:
        """A peer that was accused, perhaps, has said something newer: tell those that asked us
        for it."""
        if not self._askers and not self._doubts:
            return  # nearly always
        askers = self._askers.pop(signed.peer, {})
        doubt = self._doubts.pop(signed.peer, None)
        if doubt is not None:
            self._floods.refuted(now)
            askers = {**askers, doubt.source: None}
        self._outbox.send_all([peer for peer in askers if peer != self._voice.peer], Give((signed,)))

    def believe(self, now: float) -> None:
        """Go on with the accusations that we doubted and that were not refuted."""
        due = [peer for peer, doubt in self._doubts.items() if doubt.until <= now]
        for peer in due:
            self._believe(self._doubts.pop(peer), now)
        self.doubts_end = min((doubt.until for doubt in self._doubts.values()), default=math.inf)

    def _believe(self, doubt: Doubt, now: float) -> None:
        entry = self._view.get(doubt.signed.peer)
        if entry is not None and entry.seqno == doubt.signed.seqno:
            entry.watched().was_asked = True
            self._accuse(entry, doubt.source, now)

    def echoed(self, signed: SignedHeartbeat, now: float) -> None:
        """Our own words come back. If they are newer than ours, our disk was lost: count on
        from there."""
        if signed.seqno > self._voice.seqno and self._judge.is_signed(signed):
            self._voice.count_on_from(signed.seqno, now)

    def probe(self, entry: Entry) -> None:
        """Ask the silent peer itself, once."""
        if entry.stage is Stage.FRESH:
            entry.watched().stage = Stage.PROBED
            self._view.judged(entry)
            self._outbox.send(entry.peer, Accuse((entry.signed,)))

    def unreachable(self, peer: PeerId, now: float) -> None:
        """No address of ``peer`` answered: if it used to beat to us, ask everybody."""
        entry = self._view.get(peer)
        doubt = self._doubts.pop(peer, None)
        if doubt is not None:
            self._believe(doubt, now)
        elif entry is not None and entry.direct and entry.stage is not Stage.ACCUSED:
            self._accuse(entry, self._voice.peer, now)

    def sweep(self, now: float) -> None:
        """Judge those whose silence has lasted."""
        for entry in self._view.overdue(now):
            self._judge_silence(entry, now)
            self._view.judged(entry)

    def bury(self, signed: SignedHeartbeat, change: Change, now: float) -> None:
        """The peer died or left: remember that, and find another neighbour."""
        member = self._view.bury(signed, now, healable=change is Change.DIED)
        self._overlay.remove(signed.peer, now)
        if member is not None:
            self._outbox.tell(change, member)

    def forget(self, peer: PeerId) -> None:
        """There is no room for the peer, no news of it, or it is not admitted."""
        member = self._view.drop(peer)
        if member is not None:
            self._outbox.tell(Change.FORGOTTEN, member)

    def _judge_silence(self, entry: Entry, now: float) -> None:
        if not self._judge.may(entry.peer):
            self.forget(entry.peer)  # we do not listen to it: its silence says nothing
            self._overlay.remove(entry.peer, now)
        elif entry.stage is Stage.ACCUSED:
            self._bury_accused(entry, now)
        elif not entry.direct:
            self.forget(entry.peer)
        elif entry.stage is Stage.FRESH:
            self.probe(entry)
        else:
            self._accuse(entry, self._voice.peer, now)

    def _bury_accused(self, entry: Entry, now: float) -> None:
        """An accusation was not refuted. Where many are false, nobody is buried whom we have
        not asked."""
        was_asked = entry.watch is not None and entry.watch.was_asked
        if entry.direct or was_asked or self._floods.is_calm(now):
            self.bury(entry.signed, Change.DIED, now)
            return
        self._view.hear(entry, entry.signed, entry.seen)  # not accused any more
        if entry.peer not in self._doubts and self._floods.may_ask_before_burial(now):
            self._doubt(entry, self._voice.peer, now)

    def _accuse(self, entry: Entry, source: PeerId, now: float) -> None:
        self._view.accuse(entry, now)
        self._rumours.spread(entry.signed, accused=True, source=source, now=now)

    def _answer(self, signed: SignedHeartbeat, source: PeerId, now: float) -> None:
        """We are accused: show our newest heartbeat, or make a newer one."""
        newest = self._voice.newest()
        if signed.seqno < newest.seqno:
            self._outbox.send(source, Give((newest,)))
        else:
            self.echoed(signed, now)
            self._voice.owe(source, now)
