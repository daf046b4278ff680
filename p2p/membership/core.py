"""Who is alive, according to whom: membership as a state machine, events and time in, effects out.

Theory of operation
-------------------
Every node signs a heartbeat each ``interval`` and sends it to its neighbours (`overlay`) and to the peers
that the node is interested in. Neighbours tell each other, with each heartbeat, digests of their own
neighbours and of a random sample of all they know; who reads of something new asks for the signed
heartbeat itself, within a budget. So in a small swarm everybody learns of everybody within a few intervals,
and in a large one everybody keeps a fresh random sample. Newcomers' digests do not wait for the next
heartbeat.

Silence is judged on our own monotonic clock (`entry`). Whoever misses a neighbour's heartbeats asks
everybody with an accusation that carries the silent peer's last signed words: it floods the overlay
(`rumours`) until it meets the accused, who answers with a newer heartbeat, or somebody who has one. What
nobody refutes is a death. An accusation thus cannot kill the living, only make them speak once more.

Wall clocks appear in one place: a heartbeat whose expiry is long past, or absurdly far ahead, is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from random import Random
from typing import Final, assert_never

from p2p.errors import BadMessage
from p2p.identity import PeerId, Signer, Verify
from p2p.membership.entry import PROBE, Entry, Stage
from p2p.membership.events import (
    AddAddrs,
    Anchors,
    Bootstrap,
    Change,
    ClockOff,
    Disconnected,
    Effect,
    Event,
    Interest,
    Leave,
    Member,
    MembershipConfig,
    Received,
    Reserve,
    Tick,
    Unreachable,
    Update,
)
from p2p.membership.floods import Floods
from p2p.membership.heartbeat import SignedHeartbeat, key_of
from p2p.membership.judge import ASKED_POINTS, FLOOD_POINTS, MALFORMED_POINTS, REPLAYED_POINTS, Judge
from p2p.membership.messages import (
    MAX_HEARTBEATS,
    Accuse,
    Beat,
    Digest,
    ForwardJoin,
    Give,
    Join,
    Link,
    Linked,
    Message,
    News,
    Unlink,
    Want,
    decode_message_untrusted,
)
from p2p.membership.outbox import Outbox
from p2p.membership.overlay import Overlay
from p2p.membership.pull import Pull
from p2p.membership.rumours import QUOTA_BURST, QUOTA_RATE, QUOTA_UNIT, Quotas, Rumours
from p2p.membership.silence import SUSPICION, Silence
from p2p.membership.view import View
from p2p.membership.voice import Voice, differs
from p2p.multiaddr import Multiaddr

WELCOME_DIGESTS: Final = 16
"""Digests for a newcomer, beside those of our neighbours: its next neighbours tell it the rest."""

ADMISSION_BEATS: Final = 12
"""Heartbeats between two looks whether all members are still admitted. Who is not is neither heard nor listed
from that moment; to look through a whole view each time took a fortieth of a node's time in a large swarm."""

ANCHOR_BEATS: Final = 60
"""Heartbeats between two looks whether our anchors are those on disk: those that stay are worth writing."""

CROWDED_BEATS: Final = 3
"""Heartbeats of which one carries digests when the view is crowded: what they tell can wait as long
(`pull.LEISURE`), and to look them up was a tenth of a node's time in a large swarm."""

READDRESS_BEATS: Final = 12
"""Of so many of a member's sequence numbers one makes the host remember its addresses again: strangers may
have flushed them out of its book meanwhile. A neighbour's come back within a minute."""

REFUTABLE: Final = 2.0
"""Intervals after an accusation in which a sign of life is news for everybody: later the peer is dead for
all (`CONFIRM`), and its return is a newcomer's."""


_FROM_THE_STAMPED: Final = frozenset({Accuse, ForwardJoin, News, Unlink, Want})
"""Messages that do not introduce their sender: it must have shown its stamp before."""


class MembershipCore:
    """Heartbeats, neighbours and deaths of one node. Feed it `Event`s, carry out its `Effect`s."""

    def __init__(  # noqa: PLR0913 - what the world gives, each under its name
        self,
        signer: Signer,
        config: MembershipConfig,
        rng: Random,
        *,
        verify: Verify,
        may: Callable[[PeerId], bool],
        wall: Callable[[], float],
        seqno: int,
        is_stamped: Callable[[PeerId, bytes], bool] | None = None,
    ) -> None:
        """``seqno`` is the first number to use; `voice.SEQNO_BLOCK` from there are already reserved.

        ``is_stamped`` says whether the stamp in a peer's heartbeat is worth its place; None asks for none.
        """
        self.peer: Final = signer.peer_id
        self._config = config
        self._outbox = outbox = Outbox()
        self._judge = judge = Judge(verify, may, wall, config.lifetime, outbox.put, is_stamped)
        self._voice = voice = Voice(signer, config, wall, seqno)
        self._view = view = View(self.peer, config, rng)
        self._floods = floods = Floods(config.interval)
        self._overlay = overlay = Overlay(view, config, rng, outbox.send, voice.newest, floods)
        self._rumours = rumours = Rumours(self.peer)
        self._silence = Silence(outbox, view, overlay, rumours, judge, voice, floods)
        self._pull = Pull(view, config)
        self._quotas = Quotas(QUOTA_RATE, QUOTA_BURST)
        self._anchors: tuple[PeerId, ...] = ()
        self.links_changed = 0
        """How often `neighbours` has changed: cheaper to compare than they are."""
        self.next_deadline = -math.inf
        """When to deliver the next `Tick`."""

    @property
    def counters(self) -> Mapping[str, int]:
        """What was dropped, by reason."""
        return self._judge.counters

    @property
    def neighbours(self) -> tuple[PeerId, ...]:
        """The active view, longest first."""
        return tuple(self._overlay.active)

    @property
    def is_linked(self) -> bool:
        """Whether we have a neighbour."""
        return bool(self._overlay.active)

    @property
    def clock_off(self) -> ClockOff | None:
        """By how much our wall clock differs from everybody's, if it is ours that is wrong."""
        return self._judge.clock_off(len(self._view))

    def __contains__(self, peer: PeerId) -> bool:
        """Whether ``peer`` is one of the `members`."""
        return peer in self._view and self._judge.may(peer)

    @property
    def size(self) -> int:
        """How many `members` there are."""
        return len(self._view)

    def members(self) -> list[Member]:
        """Everybody known to live and admitted, without ourselves, longest known first."""
        return [member for member in self._view.members() if self._judge.may(member.peer)]

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Advance by one event and return what to do about it."""
        match event:
            case Received(peer, data):
                self._receive(peer, data, now)
            case Disconnected(peer):
                self._disconnected(peer, now)
            case Unreachable(peer):
                self._unreachable(peer, now)
            case Bootstrap(addrs, anchors):
                self._bootstrap(addrs, anchors, now)
            case Interest(peers, has_audience):
                self._voice.interest(peers)
                self._view.has_audience = has_audience
            case Update(profile):
                self._voice.describe(profile, now)
            case Tick():
                self._tick(now)
            case Leave():
                self._leave()
            case _:
                assert_never(event)
        rumours, voice = self._rumours, self._voice
        if rumours.flush_at <= now:
            self._flush(now)
        soonest = self._view.settle()
        for when in (  # as `min` would, in half the time
            voice.next_beat, voice.answer_at, rumours.flush_at, self._silence.doubts_end,
            self._overlay.next_deadline,
        ):  # fmt: skip
            if when < soonest:
                soonest = when
        self.next_deadline, self.links_changed = soonest, self._overlay.changes
        return self._outbox.take()

    # What others say.

    def _receive(self, peer: PeerId, data: bytes, now: float) -> None:
        if not self._judge.may(peer):
            self._judge.counters["unadmitted"] += 1
        elif not self._quotas.take(peer, now, 1 + len(data) / QUOTA_UNIT):
            self._judge.refuse("over quota", peer, FLOOD_POINTS)
        else:
            try:
                message = decode_message_untrusted(data)
            except BadMessage as error:
                self._judge.refuse("malformed", peer, MALFORMED_POINTS, str(error))
            else:
                judge = self._judge
                if judge.asks_stamps and type(message) in _FROM_THE_STAMPED and not judge.has_stamp(peer):
                    self._judge.counters["no stamp"] += 1
                else:
                    self._dispatch(peer, message, now)

    def _dispatch(self, peer: PeerId, message: Message, now: float) -> None:
        match message:  # the most frequent first
            case News(digests):
                if self._rumours.has_news:
                    self._rumours.heard_of(digests, peer)
                self._offered(peer, digests, now)
            case Beat() | Join() | Link() | Linked():
                self._greeted(peer, message, now)
            case Accuse(heartbeats):
                for signed in heartbeats:
                    self._silence.accused(signed, peer, now)
            case ForwardJoin(hops, signed):
                if self._take_in(signed, peer, now, hold=not hops) or signed.peer in self._view:
                    self._overlay.walked(message, peer, now)
            case Unlink():
                self._lose_touch(peer, now)
            case Want(keys):
                self._give(peer, keys, now)
            case Give(heartbeats):
                for signed in heartbeats:
                    self._take_in(signed, peer, now, hold=self._pull.was_asked(key_of(signed.peer)))
                    self._pull.arrived(key_of(signed.peer))
            case _:
                assert_never(message)

    def _greeted(self, peer: PeerId, message: Beat | Join | Link | Linked, now: float) -> None:
        """A message in which the sender speaks of itself."""
        if message.heartbeat.heartbeat.peer != peer:
            self._judge.refuse(
                "malformed", peer, MALFORMED_POINTS, "it passed off another's heartbeat as its own"
            )
            return
        kind, is_expected = type(message), False
        if kind is Beat:
            is_expected = self._view.expect(peer, now)
        elif kind is not Linked and not self._floods.may_be_asked(peer, now):
            self._judge.refuse("asks too often", peer, ASKED_POINTS)
            return
        self._take_in(message.heartbeat, peer, now, hold=True)
        if self._view.get(peer) is None:
            return
        match message:
            case Beat(linked, _, digests):
                if not is_expected:
                    self._view.expect(peer, now)
                self._overlay.beaten(peer, linked, now)
                self._offered(peer, digests, now)
            case Join():
                if self._overlay.joined(peer, now) is not None:
                    self._outbox.send(peer, News(self._welcome()))
            case Link(urgent):
                if self._overlay.link_wanted(peer, urgent, now) is False and urgent:
                    self._outbox.send(peer, News(self._welcome()))  # others may have a seat
            case Linked(accepted):
                self._overlay.link_answered(peer, accepted, now)

    def _offered(self, peer: PeerId, digests: tuple[Digest, ...], now: float) -> None:
        keys = self._pull.wanted(digests, peer, now)
        if keys:
            self._outbox.send(peer, Want(keys))

    def _give(self, peer: PeerId, keys: tuple[bytes, ...], now: float) -> None:
        is_neighbour = peer in self._overlay.active
        if not self._floods.may_give(peer, len(keys), now, is_neighbour=is_neighbour):
            self._judge.counters["asked for too much"] += 1
            return
        heartbeats = []
        for key in dict.fromkeys(keys):
            entry = self._view.named(key)
            if key == key_of(self.peer):
                heartbeats.append(self._voice.newest())
            elif entry is not None and entry.stage is not Stage.ACCUSED:
                heartbeats.append(entry.signed)
        for start in range(0, len(heartbeats), MAX_HEARTBEATS):
            self._outbox.send(peer, Give(tuple(heartbeats[start : start + MAX_HEARTBEATS])))

    def _take_in(self, signed: SignedHeartbeat, source: PeerId, now: float, *, hold: bool) -> bool:
        """Judge a heartbeat; return whether it is genuine news. ``hold`` keeps it in a full view too."""
        peer, seqno = signed.heartbeat.peer, signed.heartbeat.seqno
        if peer == self.peer:
            self._silence.echoed(signed, now)
            return False
        entry, rumours = self._view.get(peer), self._rumours
        held = entry is not None
        if seqno <= (self._view.newest(peer) if entry is None else entry.seqno):
            self._stale(signed, source)
            return False
        if not held and self._view.is_taken(peer):
            self._judge.counters["key taken"] += 1
            return False
        if source != peer and seqno <= rumours.last_words(peer):
            return False  # said before a silence of which we heard: no sign of life
        if not (held or hold) and rumours.is_old(peer, seqno, accused=False, source=source):
            return False
        if not self._judge.is_genuine(signed, source):
            return False
        if signed.heartbeat.leaving:
            return self._farewell(signed, source, held, now)
        refutes = bool(rumours.accused) and self._refutes(signed, now)
        if refutes:
            self._floods.refuted(now)
        self._silence.speaks(signed, now)
        if entry is not None:
            self._renew(entry, signed, source, now)
        elif hold or self._view.has_room():
            self._meet(signed, source, now)
        if refutes:
            self._rumours.spread(signed, accused=False, source=source, now=now)
        return True

    def _refutes(self, signed: SignedHeartbeat, now: float) -> bool:
        """Whether its author was accused a moment ago."""
        interval = self._config.paced(signed.heartbeat.interval)
        return self._rumours.is_accused(signed.peer, now - REFUTABLE * interval)

    def _farewell(self, signed: SignedHeartbeat, source: PeerId, held: bool, now: float) -> bool:
        """A peer has left. Others are told, unless it says so all the time, or a neighbour of too many."""
        interval = self._config.paced(signed.heartbeat.interval)
        was_gone = self._rumours.was_suspected(signed.peer, now - SUSPICION * interval)
        is_fit = source in self._overlay.active or (held and source == signed.peer)
        may_pass = is_fit and not was_gone and self._floods.may_pass_unchecked(source, now)
        if held or may_pass:
            self._silence.bury(signed, Change.LEFT, now)
        if may_pass:
            self._rumours.spread(signed, accused=False, source=source, now=now)
        else:
            self._judge.counters["good-byes"] += 1
        return True

    def _stale(self, signed: SignedHeartbeat, source: PeerId) -> None:
        """Old news are normal from others. From the peer itself it is a replay, or it lost its numbers."""
        known = self._view.get(signed.peer) or self._view.grave(signed.peer)
        if source == signed.peer and known is not None and signed.seqno < known.signed.seqno:
            self._judge.refuse("replayed", source, REPLAYED_POINTS)
            self._outbox.send(source, Give((known.signed,)))

    def _meet(self, signed: SignedHeartbeat, source: PeerId, now: float) -> None:
        """A member that we did not know."""
        peer, profile = signed.heartbeat.peer, signed.heartbeat.profile
        self._view.admit(signed, source, now)
        self._outbox.put(AddAddrs(peer, profile.addrs))
        self._outbox.tell(Change.JOINED, Member(peer, profile, now))
        surplus = self._view.surplus(self._overlay.active, peer, now)
        if surplus is not None:
            self._silence.forget(surplus)
        elif self._view.is_sparse() and self._floods.may_announce(source, now):
            # Not if another must go for it: of a network that has its share each that comes is new and pushes
            # out one that will be new again. With 70 of one network each of 70 nodes sent 1 KB/s of news.
            self._rumours.announce(peer, source, now)

    def _renew(self, entry: Entry, signed: SignedHeartbeat, source: PeerId, now: float) -> None:
        """A newer heartbeat of a member."""
        profile, known, peer = signed.heartbeat.profile, entry.signed.heartbeat.profile, entry.peer
        self._view.renew(entry, signed, now)
        if known is not profile:
            if known.addrs != profile.addrs or entry.seqno % READDRESS_BEATS == 0:
                self._outbox.put(AddAddrs(peer, profile.addrs))
            if differs(known, profile):
                self._outbox.tell(Change.CHANGED, Member(peer, profile, now))
        elif entry.seqno % READDRESS_BEATS == 0:
            self._outbox.put(AddAddrs(peer, profile.addrs))
        if source == peer and entry.direct and entry.direct_at < now - PROBE * entry.interval:
            # It lives, but does not beat to us. Only its own answer says so: what others bring may be words
            # that it gave to accusers before it died; with 20 % liars every neighbour was brought some.
            self._lose_touch(peer, now)

    # What the host, the node and the clock say.

    def _disconnected(self, peer: PeerId, now: float) -> None:
        entry = self._view.get(peer)
        if entry is not None and entry.direct:
            self._silence.probe(entry)
        self._overlay.remove(peer, now)

    def _unreachable(self, peer: PeerId, now: float) -> None:
        self._voice.spare(peer, now)
        self._silence.unreachable(peer, now)
        self._overlay.unreachable(peer, now)

    def _bootstrap(self, addrs: tuple[Multiaddr, ...], anchors: tuple[Multiaddr, ...], now: float) -> None:
        self._overlay.bootstrap(self._placed(addrs), self._placed(anchors), now)

    def _placed(self, addrs: tuple[Multiaddr, ...]) -> tuple[PeerId, ...]:
        """The peers at ``addrs``, which the host remembers."""
        peers: dict[PeerId, None] = {}
        for addr in addrs:
            peer = addr.peer_id
            if peer is not None and peer != self.peer:
                peers[peer] = None
                self._outbox.put(AddAddrs(peer, (addr,), is_told=True))
        return tuple(peers)

    def _tick(self, now: float) -> None:
        if self._voice.next_beat <= now:
            self._beat(now)
        if self._voice.answer_at <= now:
            self._answer_accusers(now)
        if self._silence.doubts_end <= now:
            self._silence.believe(now)
        if self._view.settle() <= now:
            self._silence.sweep(now)
        if self._overlay.next_deadline <= now:
            self._overlay.tick(now)

    def _beat(self, now: float) -> None:
        """A sign of life to all who wait for one."""
        signed = self._voice.beat(now)
        ceiling = self._voice.reserve()
        if ceiling is not None:
            self._outbox.put(Reserve(ceiling))
        if self._voice.beats % ADMISSION_BEATS == 0:
            for peer in self._view.without(self._judge.may):
                self._silence.forget(peer)
                self._overlay.remove(peer, now)
        if self._voice.beats % ANCHOR_BEATS == ADMISSION_BEATS:
            self._note_anchors()
        active = self._overlay.active
        self._outbox.send_all(list(active), Beat(True, signed, self._digests()))
        others = [peer for peer in self._voice.interested(now) if peer not in active]
        self._outbox.send_all(others, Beat(False, signed))
        self._outbox.send_all(self._voice.take_owed(), Give((signed,)))
        self._overlay.fill(now)

    def _answer_accusers(self, now: float) -> None:
        """A sign of life to those who asked for one. A neighbour hears that we are neighbours still."""
        signed, peers, active = self._voice.answer(now), self._voice.take_owed(), self._overlay.active
        self._outbox.send_all([peer for peer in peers if peer in active], Beat(True, signed))
        self._outbox.send_all([peer for peer in peers if peer not in active], Give((signed,)))

    def _note_anchors(self) -> None:
        """Have our anchors written down, if they are others than before."""
        anchors = self._overlay.anchors
        entries = [self._view.get(peer) for peer in anchors]
        addrs = [entry.signed.heartbeat.profile.addrs[:1] for entry in entries if entry is not None]
        if anchors and anchors != self._anchors:
            self._anchors = anchors
            self._outbox.put(Anchors(tuple([addr for place in addrs for addr in place])))

    def _flush(self, now: float) -> None:
        """Pass on rumours and news, to each neighbour what it may not know."""
        active = self._overlay.active
        for peers, rumours in self._rumours.take(now, active):
            accused = tuple([rumour.signed for rumour in rumours if rumour.accused])
            alive = tuple([rumour.signed for rumour in rumours if not rumour.accused])
            if accused:
                self._outbox.send_all(peers, Accuse(accused))
            if alive:
                self._outbox.send_all(peers, Give(alive))
        for peers, newcomers in self._rumours.take_news(now, active):
            entries = map(self._view.named, newcomers)
            digests = tuple([entry.signed.digest for entry in entries if entry is not None])
            if digests:
                self._outbox.send_all(peers, News(digests))

    def _leave(self) -> None:
        """Say good-bye."""
        self._outbox.send_all(list(self._overlay.active), Give((self._voice.farewell(),)))

    # Shared steps.

    def _digests(self) -> tuple[Digest, ...]:
        """Of whom a beat speaks; seldom of anybody where its receiver, too, knows enough."""
        count = self._config.sample
        if not self._view.is_crowded():
            return _digests_of(self._view.sample(count, self._overlay.active))
        return _digests_of(self._view.sample(count, ())) if self._voice.beats % CROWDED_BEATS == 0 else ()

    def _welcome(self) -> tuple[Digest, ...]:
        return _digests_of(self._view.sample(WELCOME_DIGESTS, self._overlay.active))

    def _lose_touch(self, peer: PeerId, now: float) -> None:
        """A peer lives, but beats to us no more."""
        self._view.lose_touch(peer)
        self._overlay.remove(peer, now)


def _digests_of(heartbeats: Iterable[SignedHeartbeat]) -> tuple[Digest, ...]:
    return tuple([signed.digest for signed in heartbeats])
