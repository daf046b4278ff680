"""Failure detection as in SWIM: probe, suspect, confirm.

The times are in `member_list`. The stages of a peer that sends us heartbeats itself:

1. *alive*: its newest heartbeat came within 1.5 of its intervals;
2. *probed*: we asked the peer itself, once (`probe`);
3. *suspected*: we flooded a suspicion, or another node's suspicion reached us (`_suspect`);
4. dead: no newer heartbeat came within 0.8 intervals more (`_confirm_death`).

A suspicion carries the last signed heartbeat of the suspected peer. So a node that never heard
of the peer can check it, and no node can repeat it once the peer has sent a newer one. A node
that hears the peer directly asks the peer itself before it passes the suspicion on; a node that
has a newer heartbeat answers with that; the peer itself refutes.

Example, interval 5 s: the last heartbeat comes at 0 s. At 7.5 s the neighbour asks the peer, at
10 s it floods the suspicion, at 14 s each node that lists the peer declares it dead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from p2p.identity import PeerId
from p2p.membership.core.active_view import ActiveView
from p2p.membership.core.dissemination import Dissemination
from p2p.membership.core.events import Change, EffectBuffer
from p2p.membership.core.local_heartbeat import LocalHeartbeat
from p2p.membership.core.member_list import Liveness, MemberList, MemberState
from p2p.membership.core.quotas import FloodQuotas
from p2p.membership.core.verifier import HeartbeatVerifier
from p2p.membership.heartbeat import SignedHeartbeat
from p2p.membership.messages import Heartbeats, Suspect
from p2p.offence import Offence


@dataclass(slots=True)
class PendingCheck:
    """Suspicion that waits for an answer from the suspected peer."""

    signed: SignedHeartbeat
    source: PeerId
    until: float


class FailureDetector:
    """Handles suspicions, refutations and deaths."""

    def __init__(
        self,
        effects: EffectBuffer,
        members: MemberList,
        active_view: ActiveView,
        dissemination: Dissemination,
        verifier: HeartbeatVerifier,
        local: LocalHeartbeat,
        quotas: FloodQuotas,
    ) -> None:
        self.checks_end = math.inf
        """Time of the next call to `confirm_unanswered`."""
        self._checks: dict[PeerId, PendingCheck] = {}
        """Pending checks by suspected peer, bounded by `FloodQuotas`."""
        self._quotas = quotas
        self._effects = effects
        self._members = members
        self._active_view = active_view
        self._dissemination = dissemination
        self._verifier = verifier
        self._local = local

    def on_suspect(self, signed: SignedHeartbeat, source: PeerId, now: float) -> None:
        """Handle the claim of ``source`` that nothing came after ``signed``."""
        peer = signed.peer
        if peer == self._local.peer:
            self._refute(signed, source, now)
            return
        member = self._members.get(peer)
        if member is not None and member.seqno > signed.seqno:
            # Intervals after which a suspicion older than the heartbeat that we know is an
            # offence. No honest peer lacks a newer heartbeat for so long.
            if member.seen < now - 3.0 * member.interval:
                self._verifier.refuse("obsolete suspicion", source, Offence.OBSOLETE)
            self._effects.send(source, Heartbeats((member.signed,)))
            return
        if self._dissemination.is_known(peer, signed.seqno, suspected=True, source=source):
            return
        if member is None and self._members.seqno_of_dead(peer) >= signed.seqno:
            return
        if member is not None and member.seqno == signed.seqno:
            signed = member.signed  # its signature was verified, that of a look-alike was not
        elif not self._verifier.is_genuine(signed, source):
            return
        if source not in self._active_view.neighbours:
            # Honest suspicions come from neighbours.
            self._verifier.counters["suspicion by a stranger"] += 1
        elif member is None:
            if self._quotas.unchecked.take(source, now):
                self._dissemination.flood(signed, suspected=True, source=source, now=now)
            else:
                self._verifier.counters["strangers suspected"] += 1
        else:
            # Intervals within which a second suspicion of one peer is checked instead of
            # flooded, because a liar gets a fresh heartbeat from each refutation. This is
            # shorter than a check (`_check`) by more than a flood takes, so that two honest
            # suspicions of a death are not checked one after the other.
            since = now - 0.4 * member.interval
            is_doubtful = member.is_heard(now) or self._dissemination.was_suspected(peer, since)
            if self._quotas.trusts_suspicions(now) and not is_doubtful:
                self._members.record_heartbeat(member, signed, member.seen)
                self._suspect(member, source, now)
            elif peer not in self._checks and self._quotas.checks.take(source, now):
                self._members.record_heartbeat(member, signed, member.seen)
                self._check(member, source, now)
            else:
                self._verifier.counters["suspicion not checked"] += 1

    def _check(self, member: MemberState, source: PeerId, now: float) -> None:
        """Ask the suspected peer ourselves, and continue when the answer is overdue."""
        # Intervals within which it must answer: 2.5 s at 5 s, enough for a dial and a round
        # trip. Each node that checks adds this to the time until a death is known.
        until = now + 0.5 * member.interval
        self._checks[member.peer] = PendingCheck(member.signed, source, until)
        self.checks_end = min(self.checks_end, until)
        self._effects.send(member.peer, Suspect((member.signed,)))

    def on_sign_of_life(
        self, signed: SignedHeartbeat, now: float, *, counted: bool = False
    ) -> None:
        """Send a peer's newer heartbeat to the neighbour whose suspicion of it we check.
        ``counted`` is True if a refutation was counted already."""
        check = self._checks.pop(signed.peer, None) if self._checks else None
        if check is None:
            return  # nearly always
        if not counted:
            ahead = signed.seqno - check.signed.seqno
            self._quotas.count_refutation(signed.peer, ahead, now)
        if check.source != self._local.peer:
            self._effects.send(check.source, Heartbeats((signed,)))

    def confirm_unanswered(self, now: float) -> None:
        """Pass on the suspicions that we checked and that no heartbeat refuted in time."""
        due = [peer for peer, check in self._checks.items() if check.until <= now]
        for peer in due:
            self._confirm_unanswered(self._checks.pop(peer), now)
        ends = [check.until for check in self._checks.values()]
        self.checks_end = min(ends, default=math.inf)

    def _confirm_unanswered(self, check: PendingCheck, now: float) -> None:
        member = self._members.get(check.signed.peer)
        if member is not None and member.seqno == check.signed.seqno:
            member.watched().was_asked = True
            self._suspect(member, check.source, now)

    def on_own_heartbeat(self, signed: SignedHeartbeat, now: float) -> None:
        """Handle our own heartbeat from another node. If it is newer than ours, our disk was
        lost, and numbering continues from there."""
        if signed.seqno > self._local.seqno and self._verifier.is_signed(signed):
            self._local.continue_from(signed.seqno, now)

    def probe(self, member: MemberState) -> None:
        """Ask a silent peer once for a sign of life."""
        if member.liveness is Liveness.ALIVE:
            member.watched().liveness = Liveness.PROBED
            self._members.reschedule(member)
            self._effects.send(member.peer, Suspect((member.signed,)))

    def on_unreachable(self, peer: PeerId, now: float) -> None:
        """Suspect `peer`, none of whose addresses answered, if it used to send us
        heartbeats."""
        member = self._members.get(peer)
        check = self._checks.pop(peer, None)
        if check is not None:
            self._confirm_unanswered(check, now)
        elif member is not None and member.direct and member.liveness is not Liveness.SUSPECTED:
            self._suspect(member, self._local.peer, now)

    def check_overdue(self, now: float) -> None:
        """Judge the members whose silence has lasted long enough."""
        for member in self._members.overdue(now):
            self._on_silence(member, now)
            self._members.reschedule(member)

    def declare_gone(self, signed: SignedHeartbeat, change: Change, now: float) -> None:
        """Record that a peer died or left, and look for another neighbour."""
        member = self._members.add_tombstone(
            signed, now, may_be_partitioned=change is Change.DIED
        )
        self._active_view.remove(signed.peer, now)
        if member is not None:
            self._effects.tell(change, member)

    def forget(self, peer: PeerId) -> None:
        """Forget a peer without room, news or admission."""
        member = self._members.drop(peer)
        if member is not None:
            self._effects.tell(Change.FORGOTTEN, member)

    def _on_silence(self, member: MemberState, now: float) -> None:
        if not self._verifier.may(member.peer):
            self.forget(member.peer)  # we do not listen to it: its silence says nothing
            self._active_view.remove(member.peer, now)
        elif member.liveness is Liveness.SUSPECTED:
            self._confirm_death(member, now)
        elif not member.direct:
            self.forget(member.peer)
        elif member.liveness is Liveness.ALIVE:
            self.probe(member)
        else:
            self._suspect(member, self._local.peer, now)

    def _confirm_death(self, member: MemberState, now: float) -> None:
        """Declare a suspected peer dead. Where many suspicions are false, first ask a peer that
        we have not asked."""
        was_asked = member.watch is not None and member.watch.was_asked
        if member.direct or was_asked or self._quotas.trusts_suspicions(now):
            self.declare_gone(member.signed, Change.DIED, now)
            return
        # It is not suspected any more.
        self._members.record_heartbeat(member, member.signed, member.seen)
        local = self._local.peer
        if member.peer not in self._checks and self._quotas.checks.take(local, now):
            self._check(member, local, now)

    def _suspect(self, member: MemberState, source: PeerId, now: float) -> None:
        self._members.suspect(member, now)
        self._dissemination.flood(member.signed, suspected=True, source=source, now=now)

    def _refute(self, signed: SignedHeartbeat, source: PeerId, now: float) -> None:
        """Answer a suspicion of ourselves with our newest heartbeat, or schedule a newer
        one."""
        self._active_view.on_suspected(source, now)
        newest = self._local.newest()
        if signed.seqno < newest.seqno:
            self._effects.send(source, Heartbeats((newest,)))
        else:
            self.on_own_heartbeat(signed, now)
            self._local.add_suspecter(source, now)
