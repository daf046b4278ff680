"""The membership core as a state machine, which passes each event to the responsible part.

Theory of operation
-------------------
Every node signs a heartbeat each ``interval`` and sends it to its neighbours (`active_view`)
and to the peers that the node is interested in. With each heartbeat go digests (20 bytes: key,
sequence number, policy) of the sender's neighbours and of a random sample of the members it
knows. A receiver that reads of something new asks the sender for the signed heartbeat itself,
within a budget (`pull`). So in a swarm of up to about 200 all nodes learn of all others within
a few intervals; in a larger one each keeps a fresh random sample. Digests of newcomers do not
wait for the next heartbeat: they are sent on within a second (`dissemination`).

A failure is detected as in SWIM, from silence on our own monotonic clock (`member_list` has
the times), which does not count the time for which this process was stopped (`p2p.own_time`).
A node that misses a neighbour's heartbeats first asks the neighbour itself; then it floods a
*suspicion*, which carries the silent peer's last signed heartbeat. The flood ends at the
suspected peer, which answers with a newer heartbeat, and at any node that has one. A suspicion
that no node refutes is a death. So a lie cannot kill a living peer; it makes that peer speak
once more. The sequence number plays the part of SWIM's incarnation: only the peer itself can
raise it, since heartbeats are signed.

Wall clocks appear in one place: a heartbeat whose expiry is long past, or absurdly far ahead,
is dropped (`verifier`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from random import Random
from typing import Final, assert_never

from p2p.bounded import KeyedQuotas
from p2p.errors import BadMessage
from p2p.events import AddAddrs, PeerDown, PeerUp, Received, Tick
from p2p.identity import PeerId, Signer, Verify
from p2p.membership import messages as msg
from p2p.membership.config import MembershipConfig
from p2p.membership.core import events as ev
from p2p.membership.core.active_view import ActiveView
from p2p.membership.core.dissemination import Dissemination
from p2p.membership.core.events import EffectBuffer
from p2p.membership.core.failure_detector import FailureDetector
from p2p.membership.core.local_heartbeat import LocalHeartbeat, differs
from p2p.membership.core.member_list import Liveness, MemberList, MemberState
from p2p.membership.core.pull import Pull
from p2p.membership.core.quotas import RESTART, FloodQuotas
from p2p.membership.core.verifier import HeartbeatVerifier
from p2p.membership.heartbeat import Digest, SignedHeartbeat, key_of
from p2p.multiaddr import AddrSource, Multiaddr
from p2p.offence import Offence
from p2p.own_time import STALL, OwnTime


class MembershipCore:
    """State machine for the heartbeats, neighbours and deaths of one node."""

    def __init__(
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
        """Set up the parts of the core.

        Args:
            seqno: The first number to use (`p2p.world.first_seqno`).
            is_stamped: Tells whether the stamp in a peer's heartbeat suffices; None if none is
                needed.
        """
        self.peer: Final = signer.peer_id
        self._config = config
        self._effects = effects = EffectBuffer()
        self._verifier = verifier = HeartbeatVerifier(
            verify, may, wall, config.lifetime, effects.put, is_stamped
        )
        self._local = local = LocalHeartbeat(signer, config, wall, seqno)
        self._members = members = MemberList(self.peer, config, rng)
        self._quotas = quotas = FloodQuotas(config.interval)
        self._active_view = active_view = ActiveView(
            members, config, rng, effects.send, local.newest, quotas
        )
        self._dissemination = dissemination = Dissemination(self.peer)
        self._detector = FailureDetector(
            effects, members, active_view, dissemination, verifier, local, quotas
        )
        self._pull = Pull(members, config)
        # Heartbeats' worth of bytes that one peer may send: 200 a second, which take about
        # 1.5 % of a core to verify (a neighbour in a storm sends up to 160), and 2,000 at once:
        # the death of 1,000 peers in one zone, reported from both sides of it.
        self._message_quotas = KeyedQuotas(200.0, 2000.0)
        self._anchors: tuple[PeerId, ...] = ()
        self._told_changes = 0
        """Value of `ActiveView.changes` when the neighbours were last reported to the
        driver."""
        self._own_time = OwnTime(self._on_resume)
        self._due = math.inf
        self._resumed = -math.inf
        self.next_deadline = -math.inf
        """Time of the next `Tick`."""

    @property
    def counters(self) -> Mapping[str, int]:
        """Counts dropped messages by reason."""
        return self._verifier.counters

    @property
    def neighbours(self) -> tuple[PeerId, ...]:
        """The active view, longest first."""
        return tuple(self._active_view.neighbours)

    @property
    def clock_off(self) -> ev.ClockOff | None:
        """Offset of our wall clock from that of other peers; None if ours is right."""
        return self._verifier.clock_off(len(self._members))

    def __contains__(self, peer: PeerId) -> bool:
        """Return True if ``peer`` is one of the `members`."""
        return peer in self._members and self._verifier.may(peer)

    def shown_by(self, peer: PeerId) -> bytes:
        """Return the credential in the newest heartbeat of a living member; empty for
        others."""
        member = self._members.get(peer)
        return b"" if member is None else member.signed.heartbeat.profile.stamp

    @property
    def size(self) -> int:
        """Number of `members`."""
        return len(self._members)

    def members(self) -> list[ev.Member]:
        """Return the living, admitted members without ourselves, longest known first."""
        return [member for member in self._members.members() if self._verifier.may(member.peer)]

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        """Advance by one event and return what to do about it."""
        now = self._own_time.at(now, self._due)
        match event:
            case Received(peer, data):
                self._on_received(peer, data, now)
            case PeerDown(peer, unreachable):
                member = self._members.get(peer)
                if unreachable:
                    self._local.back_off(peer, now)
                    if now >= self._resumed + STALL:  # else we let the dial wait, not the peer
                        self._detector.on_unreachable(peer, now)
                    self._active_view.on_unreachable(peer, now)
                else:
                    if member is not None and member.direct:
                        self._detector.probe(member)
                    self._active_view.remove(peer, now)
            case PeerUp():
                pass
            case ev.Bootstrap(addrs, anchors):
                peers = self._peers_at(addrs)
                self._active_view.bootstrap(peers, self._peers_at(anchors), now)
            case ev.Interest(peers, has_audience):
                self._local.set_interest(peers)
                self._members.has_audience = has_audience
            case ev.Seek(peer, among):
                self._pull.sought(key_of(peer), now)
                self._effects.send_all(list(among), msg.Want((key_of(peer),)))
            case ev.UpdateProfile(profile):
                self._local.set_profile(profile, now)
            case Tick():
                self._tick(now)
            case ev.Leave():
                farewell = msg.Heartbeats((self._local.farewell(),))
                self._effects.send_all(list(self._active_view.neighbours), farewell)
            case _:
                assert_never(event)
        if self._dissemination.flush_at <= now:
            self._flush(now)
        # `min` over a list takes three times as long.
        self._due = min(
            self._members.settle(), self._local.next_beat, self._local.refute_at,
            self._dissemination.flush_at, self._detector.checks_end,
            self._active_view.next_deadline,
        )  # fmt: skip
        self.next_deadline = self._own_time.deadline(self._due)
        if self._active_view.changes != self._told_changes:
            self._told_changes = self._active_view.changes
            self._effects.put(ev.NeighboursChanged(self.neighbours))
        return self._effects.take()

    def _on_resume(self, now: float) -> None:
        """Schedule a heartbeat at once, because this process was stopped and peers may suspect
        it."""
        self._local.next_beat = self._resumed = now

    # Messages.

    def _on_received(self, peer: PeerId, data: bytes, now: float) -> None:
        if not self._verifier.asks_stamps and not self._verifier.may(peer):
            self._verifier.counters["unadmitted"] += 1
        elif not self._message_quotas.take(peer, now, 1 + len(data) / 256):
            self._verifier.refuse("over quota", peer, Offence.OVER_QUOTA)
        else:
            try:
                message = msg.decode_message_untrusted(data)
            except BadMessage as error:
                self._verifier.refuse("malformed", peer, Offence.MALFORMED, str(error))
                return
            # These do not introduce their sender, which must have shown its stamp before.
            anonymous = (msg.Suspect, msg.ForwardJoin, msg.Newcomers, msg.Disconnect, msg.Want)
            if isinstance(message, anonymous) and not self._verifier.has_stamp(peer):
                self._verifier.refuse_stamp(peer)
            else:
                self._dispatch(peer, message, now)

    def _dispatch(self, peer: PeerId, message: msg.Message, now: float) -> None:
        match message:  # the most frequent first
            case msg.Newcomers(digests):
                if self._dissemination.has_newcomers:
                    self._dissemination.neighbour_knows(digests, peer)
                self._on_digests(peer, digests, now)
            case msg.Beat() | msg.Join() | msg.Neighbor() | msg.NeighborReply():
                self._on_introduction(peer, message, now)
            case msg.Suspect(heartbeats):
                for signed in heartbeats:
                    self._detector.on_suspect(signed, peer, now)
            case msg.ForwardJoin(hops, signed):
                is_news = self._accept(signed, peer, now, hold=not hops)
                if is_news or signed.peer in self._members:
                    self._active_view.on_forward_join(message, peer, now)
            case msg.Disconnect():
                self._stop_expecting(peer, now)
            case msg.Want(keys):
                self._on_want(peer, keys, now)
            case msg.Heartbeats(heartbeats):
                for signed in heartbeats:
                    hold = self._pull.arrived(key_of(signed.peer))
                    self._accept(signed, peer, now, hold=hold)
            case _:
                assert_never(message)

    def _on_introduction(
        self,
        peer: PeerId,
        message: msg.Beat | msg.Join | msg.Neighbor | msg.NeighborReply,
        now: float,
    ) -> None:
        """Handle a message that carries the sender's own heartbeat."""
        if message.heartbeat.heartbeat.peer != peer:
            self._verifier.refuse(
                "malformed",
                peer,
                Offence.MALFORMED,
                "it passed off another's heartbeat as its own",
            )
            return
        kind, is_expected = type(message), False
        if kind is msg.Beat:
            is_expected = self._members.expect(peer, now)
        elif kind is not msg.NeighborReply and not self._quotas.asks.take(peer, now):
            self._verifier.refuse("asks too often", peer, Offence.ASKED)
            return
        self._accept(message.heartbeat, peer, now, hold=True)
        if self._members.get(peer) is None:
            return
        match message:
            case msg.Beat(is_neighbour, _, digests):
                if not is_expected:
                    self._members.expect(peer, now)
                self._active_view.on_heartbeat(peer, is_neighbour, now)
                self._on_digests(peer, digests, now)
            case msg.Join():
                if self._active_view.on_join(peer, now) is not None:
                    self._effects.send(peer, msg.Newcomers(self._welcome_digests()))
            case msg.Neighbor(urgent):
                if self._active_view.reply(peer, urgent, now) is False and urgent:
                    # Others may have a seat.
                    self._effects.send(peer, msg.Newcomers(self._welcome_digests()))
            case msg.NeighborReply(accepted):
                self._active_view.on_neighbor_reply(peer, accepted, now)

    def _on_digests(self, peer: PeerId, digests: tuple[Digest, ...], now: float) -> None:
        keys = self._pull.wanted(digests, peer, now)
        if keys:
            self._effects.send(peer, msg.Want(keys))

    def _on_want(self, peer: PeerId, keys: tuple[bytes, ...], now: float) -> None:
        heartbeats = []
        for key in dict.fromkeys(keys):
            member = self._members.by_key(key)
            if key == key_of(self.peer):
                heartbeats.append(self._local.newest())
            elif member is not None and member.liveness is not Liveness.SUSPECTED:
                heartbeats.append(member.signed)
        # A neighbour counts as a stranger for so many intervals, but for a newcomer's first
        # requests. Else minted identities would take a seat in turn, ask for all, and go: 15
        # bytes for each of theirs.
        age = now - self._active_view.neighbours.get(peer, math.inf)
        free = math.inf if age >= 12.0 * self._config.interval else 32.0 if age >= 0 else 0.0
        if not self._quotas.may_answer(peer, len(heartbeats), now, free=free):
            self._verifier.counters["asked for too much"] += 1
            return
        for start in range(0, len(heartbeats), msg.MAX_HEARTBEATS):
            self._effects.send(
                peer, msg.Heartbeats(tuple(heartbeats[start : start + msg.MAX_HEARTBEATS]))
            )

    def _accept(
        self, signed: SignedHeartbeat, source: PeerId, now: float, *, hold: bool
    ) -> bool:
        """Judge a heartbeat and return True if it is genuine news. ``hold`` adds its author
        even to a full view."""
        peer, seqno = signed.heartbeat.peer, signed.heartbeat.seqno
        if peer == self.peer:
            self._detector.on_own_heartbeat(signed, now)
            return False
        member, dissemination = self._members.get(peer), self._dissemination
        held = member is not None
        if seqno <= (self._members.seqno_of_dead(peer) if member is None else member.seqno):
            dissemination.neighbour_heard(peer, seqno, source)
            known = member or self._members.tombstone(peer)
            if source == peer and known is not None and seqno < known.signed.seqno:
                # Old news are normal from others. From the peer itself it is a replay, or it
                # lost its numbers.
                self._verifier.refuse("replayed", source, Offence.REPLAYED)
                self._effects.send(source, msg.Heartbeats((known.signed,)))
            return False
        if not held and self._members.has_key_of_another(peer):
            self._verifier.counters["key taken"] += 1
            return False
        if source != peer and seqno <= dissemination.suspected_seqno(peer):
            return False  # said before a silence of which we heard: no sign of life
        if not (held or hold) and dissemination.is_known(
            peer, seqno, suspected=False, source=source
        ):
            return False
        if not self._verifier.is_genuine(signed, source):
            return False
        if signed.heartbeat.leaving:
            # Others are told, unless the peer says so all the time, or a neighbour of too many.
            # Intervals after a suspicion or good-bye of a peer in which a good-bye of it is not
            # passed on: a peer that lives says good-bye once, and who heard the other flood
            # knows that it is gone.
            since = now - 1.0 * self._config.paced(signed.heartbeat.interval)
            was_gone = dissemination.was_suspected(peer, since)
            is_fit = source in self._active_view.neighbours or (held and source == peer)
            may_pass = is_fit and not was_gone and self._quotas.unchecked.take(source, now)
            if held or may_pass:
                self._detector.declare_gone(signed, ev.Change.LEFT, now)
            if may_pass:
                dissemination.flood(signed, suspected=False, source=source, now=now)
            else:
                self._verifier.counters["good-byes"] += 1
            return True
        # Intervals after a suspicion in which a sign of life is news for all: later the peer is
        # dead for all, and its return is a newcomer's.
        since = now - 2.0 * self._config.paced(signed.heartbeat.interval)
        suspected = dissemination.suspected_seqno(peer)
        refutes = suspected >= 0 and dissemination.was_suspected(peer, since)
        if refutes:
            self._quotas.count_refutation(peer, seqno - suspected, now)
        self._detector.on_sign_of_life(signed, now, counted=refutes)
        if member is not None:
            self._update_member(member, signed, source, now)
        elif hold or self._members.room > 0:
            self._add_member(signed, source, now)
        if refutes:
            self._dissemination.flood(signed, suspected=False, source=source, now=now)
        return True

    def _add_member(self, signed: SignedHeartbeat, source: PeerId, now: float) -> None:
        """Add a member that was unknown. Announce it to neighbours while the view is far from
        full, unless another member was evicted for it."""
        peer, profile = signed.heartbeat.peer, signed.heartbeat.profile
        member = self._members.admit(signed, now)
        self._effects.put(AddAddrs(peer, profile.addrs, AddrSource.SIGNED))
        self._effects.tell(ev.Change.JOINED, ev.Member(peer, profile, now))
        evictee = self._members.evictee(self._active_view.neighbours, peer, now)
        # Names that push each other out are not named before all others: 200 peers of one /24
        # that asked every node in turn filled each beat, no honest member was named for ten
        # minutes, and then all that were known through others were forgotten as stale at once.
        if evictee is None or not self._members.is_young(evictee, now):
            self._members.name_next(member)
        if evictee is not None:
            self._detector.forget(evictee)
        elif self._members.is_sparse():
            # Not if another must go for it: of a network that has its share each member that
            # comes is new, and evicts one that will be new again. With 70 of one network each
            # of 70 nodes sent 1 KB/s of such announcements.
            self._dissemination.announce(peer, source, now)

    def _update_member(
        self, member: MemberState, signed: SignedHeartbeat, source: PeerId, now: float
    ) -> None:
        """Replace a member's heartbeat with a newer one."""
        profile, peer = signed.heartbeat.profile, member.peer
        known = member.signed.heartbeat.profile
        restarted = signed.seqno - member.seqno >= RESTART
        self._members.renew(member, signed, now)
        # Strangers may have flushed its addresses. A returning neighbour is reached within a
        # minute if the host is told them again with each twelfth heartbeat.
        if known.addrs != profile.addrs or member.seqno % 12 == 0:
            self._effects.put(AddAddrs(peer, profile.addrs, AddrSource.SIGNED))
        if known is not profile and (differs(known, profile) or known.ledger != profile.ledger):
            self._effects.tell(ev.Change.CHANGED, ev.Member(peer, profile, now))
        if member.direct and not member.is_heard(now) and (source == peer or restarted):
            # It lives, but does not send us heartbeats: it answers us, or was started again and
            # has forgotten us. What else others bring may be words that it gave to suspecting
            # peers before it died; with 20 % liars every neighbour was brought some.
            self._stop_expecting(peer, now)

    # What the host, the node and the clock say.

    def _peers_at(self, addrs: tuple[Multiaddr, ...]) -> tuple[PeerId, ...]:
        """Return the peers at ``addrs`` and tell the host their addresses."""
        peers: dict[PeerId, None] = {}
        for addr in addrs:
            peer = addr.peer_id
            if peer is not None and peer != self.peer:
                peers[peer] = None
                self._effects.put(AddAddrs(peer, (addr,), AddrSource.OWNER))
        return tuple(peers)

    def _tick(self, now: float) -> None:
        if self._local.next_beat <= now:
            self._send_heartbeats(now)
        if self._local.refute_at <= now:
            self._refute_suspicions(now)
        if self._detector.checks_end <= now:
            self._detector.confirm_unanswered(now)
        if self._members.settle() <= now:
            self._detector.check_overdue(now)
        if self._active_view.next_deadline <= now:
            self._active_view.tick(now)

    def _send_heartbeats(self, now: float) -> None:
        """Send our next heartbeat to all peers that wait for one."""
        signed = self._local.beat(now)
        # A peer that is not admitted any more is neither heard nor listed from that moment.
        # Checking a whole view each time took a fortieth of a node's time in a large swarm.
        if self._local.beats % 12 == 0:
            for peer in self._members.unadmitted(self._verifier.may):
                self._detector.forget(peer)
                self._active_view.remove(peer, now)
        if self._local.beats % 60 == 12:  # only lasting anchors are worth writing
            self._save_anchors()
        neighbours = self._active_view.neighbours
        self._effects.send_all(list(neighbours), msg.Beat(True, signed, self._digests()))
        others = [peer for peer in self._local.interested(now) if peer not in neighbours]
        self._effects.send_all(others, msg.Beat(False, signed))
        self._effects.send_all(self._local.take_suspecters(), msg.Heartbeats((signed,)))
        self._active_view.fill(now)

    def _refute_suspicions(self, now: float) -> None:
        """Send a heartbeat to the peers that asked for a sign of life."""
        signed, peers = self._local.refute(now), self._local.take_suspecters()
        neighbours = self._active_view.neighbours
        ours = [peer for peer in peers if peer in neighbours]
        others = [peer for peer in peers if peer not in neighbours]
        self._effects.send_all(ours, msg.Beat(True, signed))
        self._effects.send_all(others, msg.Heartbeats((signed,)))

    def _save_anchors(self) -> None:
        """Have our anchors written to disk if they have changed."""
        anchors = self._active_view.anchors
        if anchors and anchors != self._anchors:
            self._anchors = anchors
            members = filter(None, map(self._members.get, anchors))
            addrs = [member.signed.heartbeat.profile.addrs[:1] for member in members]
            self._effects.put(ev.SaveAnchors(tuple(addr for place in addrs for addr in place)))

    def _flush(self, now: float) -> None:
        """Send floods and newcomers' digests to each neighbour that may lack them."""
        neighbours = self._active_view.neighbours
        for peers, floods in self._dissemination.take_floods(now, neighbours):
            suspected = tuple([flood.signed for flood in floods if flood.suspected])
            alive = tuple([flood.signed for flood in floods if not flood.suspected])
            if suspected:
                self._effects.send_all(peers, msg.Suspect(suspected))
            if alive:
                self._effects.send_all(peers, msg.Heartbeats(alive))
        for peers, newcomers in self._dissemination.take_newcomers(now, neighbours):
            members = map(self._members.by_key, newcomers)
            digests = tuple([member.signed.digest for member in members if member is not None])
            if digests:
                self._effects.send_all(peers, msg.Newcomers(digests))

    # Shared steps.

    def _digests(self) -> tuple[Digest, ...]:
        """Return the digests to send with a heartbeat: about a hundred an interval over all
        neighbours."""
        is_crowded = self._members.is_crowded()
        # One heartbeat of three carries digests when the view is crowded: what they tell can
        # wait as long (`Pull.wanted`), and to look them up was a tenth of a node's time in a
        # large swarm.
        if is_crowded and self._local.beats % 3:
            return ()
        return self._members.sample(15, () if is_crowded else self._active_view.neighbours)

    def _welcome_digests(self) -> tuple[Digest, ...]:
        # Digests for a newcomer, beside those of our neighbours: its next neighbours tell it
        # the rest.
        return self._members.sample(16, self._active_view.neighbours)

    def _stop_expecting(self, peer: PeerId, now: float) -> None:
        """Stop expecting heartbeats from a living peer, and drop it as a neighbour."""
        self._members.stop_expecting(peer)
        self._active_view.remove(peer, now)
