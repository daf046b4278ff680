"""What to make of silence: ask the silent, ask everybody, and in the end give up.

The stages and their times are in `entry`. An accusation carries the last signed words of the accused, so
that it can be judged by those who never heard of the peer, and cannot be repeated at will. Whoever hears
the accused directly stops it; whoever has newer words answers with them; the accused speaks up.
"""

from __future__ import annotations

from p2p.identity import PeerId
from p2p.membership.entry import Entry, Stage
from p2p.membership.events import Change
from p2p.membership.heartbeat import SignedHeartbeat
from p2p.membership.judge import Judge
from p2p.membership.messages import Accuse, Give
from p2p.membership.outbox import Outbox
from p2p.membership.overlay import Overlay
from p2p.membership.rumours import Rumours
from p2p.membership.view import View
from p2p.membership.voice import Voice


class Silence:
    """Accusations, in and out; and deaths."""

    __slots__ = ("_judge", "_outbox", "_overlay", "_rumours", "_view", "_voice")

    def __init__(
        self, outbox: Outbox, view: View, overlay: Overlay, rumours: Rumours, judge: Judge, voice: Voice
    ) -> None:
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
        if entry is not None and entry.signed.seqno > signed.seqno:
            self._outbox.send(source, Give((entry.signed,)))
            return
        if self._rumours.is_old(peer, signed.seqno, accused=True, source=source):
            return
        if entry is None and self._view.newest(peer) >= signed.seqno:
            return
        if entry is not None and entry.signed.seqno == signed.seqno:
            signed = entry.signed  # its signature was verified, that of a look-alike was not
        elif not self._judge.is_genuine(signed, source):
            return
        if entry is None:
            self._rumours.spread(signed, accused=True, source=source, now=now)
        elif entry.is_heard(now):
            self.probe(entry)
        else:
            entry.hear(signed, entry.seen)
            self._accuse(entry, source, now)

    def echoed(self, signed: SignedHeartbeat, now: float) -> None:
        """Our own words come back. If they are newer than ours, our disk was lost: count on from there."""
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
        if entry is not None and entry.direct and entry.stage is not Stage.ACCUSED:
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
            self.bury(entry.signed, Change.DIED, now)
        elif not entry.direct:
            self.forget(entry.peer)
        elif entry.stage is Stage.FRESH:
            self.probe(entry)
        else:
            self._accuse(entry, self._voice.peer, now)

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
