"""Which members are our neighbours: HyParView's active view, hardened against strangers.

Theory of operation
-------------------
Each node keeps about ``active`` symmetric neighbours, and replaces a lost one by a random
member of its passive view that has room. A newcomer sends `Join` to a peer that it was told of.
That peer takes it in if it can, sends it digests of other members, and sends the newcomer's
heartbeat on short random walks (`ForwardJoin`); the peer at which a walk ends asks the newcomer
to be its neighbour. A node without any neighbour asks urgently. If it knows no member at all,
it goes back to its bootstrap peers, ever more slowly.

In HyParView a request of high priority may not be refused, and evicts a random neighbour. Six
minted identities had a node to themselves within ten seconds that way. So here a node *chooses*
at least two neighbours, at random from its own view or as its operator told it, and no request
of another peer displaces those. Of the other seats an asking peer gets one while one is free.
An urgent one may get a *guest seat* beyond them, at a limited rate, and no peer or network
twice in a row. A guest leaves its seat to the next, or, in quiet times, after two intervals; so
guest seats are free when an attack begins, and a neighbour of longer standing never goes for a
guest. The two chosen neighbours of longest standing are *anchors*: a node that restarts asks
them first.

When both sides of a partition have declared each other dead, nothing would bring them together
again. So each node now and then asks one peer that it declared dead, or a bootstrap peer that
it does not list, to be its neighbour. One link is enough: the digests of both sides flow over
it.

Leitao, Pereira, Rodrigues: HyParView (DSN 2007). Left out are the paper's shuffle walks, which
open a connection for every exchange: digests travel with the heartbeats between neighbours
instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Final

from p2p.bounded import BoundedDict, RateLimit
from p2p.identity import PeerId
from p2p.membership import messages as msg
from p2p.membership.config import MembershipConfig
from p2p.membership.core.member_list import MemberList
from p2p.membership.core.quotas import FloodQuotas
from p2p.membership.heartbeat import SignedHeartbeat

SLACK: Final = 2
"""Neighbours below or above the number aimed at before anything is done about it: without slack
the last node short of one would ask around for ever."""
FIRST_RETRY: Final = 1.0
"""Seconds until the first join is repeated: a bootstrap that starts at the same time as we do
is up by then."""
GRANTS: Final = 256.0
"""Urgent requests granted at once: the first of a crowd that starts through us, or half of a
zone that comes back from a partition. The others of a crowd of 1,000 find their neighbours by
walks, a second later."""
AGAIN: Final = 12.0
"""Intervals for which a peer that was granted an urgent request, or another of its network, is
granted no other: a machine that restarts a minute later gets in at once."""
GUEST_SEATS: Final = 4
"""Seats beyond `SLACK` for peers that ask urgently. A new guest takes the oldest guest's seat
and no other: a newcomer gets in while strangers hold the rest, and no crowd evicts a
neighbour."""
SPARSE: Final = 1.0
"""Intervals between two requests of a node that has fewer neighbours than are aimed at. Where a
tenth of the members are hostile, one in twenty of those with four had two honest ones by
chance."""
ANCHORS: Final = 2
"""Neighbours remembered over a restart. Bitcoin Core keeps two, too: one may be gone, three
tell an observer more of the graph than they help."""
PENDING: Final = 2.0
"""Intervals until a request for a link counts as refused: an answer is a dial and two ways,
half an interval (`failure_detector.CHECK_TIMEOUT`), and machines are busy."""
ASK_BACK_BURST: Final = 3.0
"""Accusers that a node without neighbours asks at once to be its neighbours; then one a second.
Several turns, so that a silent accuser costs one of them and holds no seat, and honest ones are
reached."""


class ActiveView:
    """The active view, and everything that keeps it filled."""

    def __init__(
        self,
        members: MemberList,
        config: MembershipConfig,
        rng: Random,
        send: Callable[[PeerId, msg.Message], None],
        own: Callable[[], SignedHeartbeat],
        quotas: FloodQuotas,
    ) -> None:
        self.neighbours: dict[PeerId, float] = {}
        """Our neighbours, longest first, and since when they are."""
        self._upper: Final = config.active + SLACK
        """Neighbours that a node bears at most, without the guest seats."""
        self._lower: Final = config.active - SLACK
        """Neighbours up to which a node asks for all that it lacks, and at once."""
        self._least_chosen: Final = max(1, self._lower - 1)
        """Neighbours that are to be of our own choice: 2 of 7, and 5 seats are for those that
        ask. A link is chosen by one of its ends or, where a walk made it, by none: with 3 of 7
        the seats of a quiet swarm of 50 did not suffice, and its nodes asked around for ever (6
        requests a second, all refused)."""
        self._quotas = quotas
        self._members = members
        self._config = config
        self._rng = rng
        self._send = send
        self._own = own
        self.changes = 0
        """Grows when `neighbours` changes."""
        self._chosen: dict[PeerId, None] = {}
        """Chosen neighbours, longest first."""
        self._pending: dict[PeerId, float] = {}
        """Peers that we asked, with the time until which we wait."""
        self._chosen_pending: dict[PeerId, None] = {}
        """Members of `_pending` that we chose ourselves."""
        # Intervals between two urgent requests for which a neighbour is pushed out, after the
        # first `GRANTS`. The lonely ask five peers at once and again after an interval: it is
        # enough if one in a hundred can grant it.
        self._grants = RateLimit(1 / (1.0 * config.interval), GRANTS)
        self._ask_backs = RateLimit(1.0, ASK_BACK_BURST)
        # Accusers remembered as asked: 13 may be in ten seconds.
        self._asked_back: BoundedDict[PeerId, float] = BoundedDict(16)
        """Accusers that were asked, with the time until which they are not asked again."""
        self._choose_at = -math.inf
        self._granted: dict[bytes, float] = {}
        """When a peer or a network pushed a neighbour out, longest ago first."""
        self._bootstraps: dict[PeerId, None] = {}
        self._retry = FIRST_RETRY
        self._retry_at = math.inf
        self._heal_at = math.inf

    @property
    def next_deadline(self) -> float:
        """When `tick` has something to do."""
        soonest = self._retry_at if self._retry_at < self._heal_at else self._heal_at
        return min(soonest, *self._pending.values()) if self._pending else soonest

    @property
    def anchors(self) -> tuple[PeerId, ...]:
        """Chosen neighbours of longest standing."""
        return tuple(self._chosen)[:ANCHORS]

    def bootstrap(
        self, peers: tuple[PeerId, ...], anchors: tuple[PeerId, ...], now: float
    ) -> None:
        """Join through ``peers``, in turn, until a neighbour is found; ask ``anchors`` at
        once."""
        # Bootstrap peers that are tried in turn, the first of those given: a configuration
        # names a handful, and any one is enough.
        self._bootstraps = dict.fromkeys(peers[:16])
        for peer in anchors[:ANCHORS]:
            if peer not in self.neighbours:
                self._ask_chosen(peer, False, now)
        self._retry = FIRST_RETRY
        if not self.neighbours:
            self._retry_at = now
        self._arm_heal(now)

    def tick(self, now: float) -> None:
        """Give up on requests no peer answered; join again; ask across partitions."""
        for peer in [peer for peer, deadline in self._pending.items() if deadline <= now]:
            self.on_unreachable(peer, now)
        if self._heal_at <= now:
            self._heal_at = math.inf
            self._arm_heal(now)
            self._heal(now)
        if self._retry_at <= now:
            self._rejoin(now)

    def fill(self, now: float) -> None:
        """Ask for neighbours if there are too few, or too few that we chose; the guest seats
        get free."""
        if len(self.neighbours) > self._upper:
            self._release_guests(now)
        held, aim = len(self.neighbours) + len(self._pending), self._config.active
        if held <= self._lower:
            missing = aim - held
        elif self._choose_at > now:
            return
        elif held < aim:
            self._choose_at = now + SPARSE * self._config.interval
            missing = 1
        elif len(self._chosen) + len(self._chosen_pending) < self._least_chosen:
            # Intervals between two requests of a node that has enough neighbours, but too few
            # of its own choice: in a swarm so small that no node has a seat left it would ask
            # all the time.
            self._choose_at = now + 3.0 * self._config.interval
            missing = 1
        else:
            return
        urgent = not self.neighbours or (missing == 1 and held > aim and not self._chosen)
        for peer in self._members.candidates(self.neighbours, now):
            if missing <= 0:
                return
            if peer not in self._pending:
                self._ask_chosen(peer, urgent, now)
                missing -= 1
        if not self.neighbours and not self._pending and self._bootstraps:
            self._retry_at = min(self._retry_at, now + self._retry)

    def on_join(self, peer: PeerId, now: float) -> bool | None:
        """A newcomer asks to be taken in: do so if we can, and let its heartbeat walk.

        Returns whether it is a neighbour now; None if too many ask for us to answer each.
        """
        member = self._members.get(peer)
        if member is None:
            return None
        others = [other for other in self.neighbours if other != peer][: self._upper]
        accepted = self._reply(peer, True, now)
        network = self._members.prefix(peer)
        if accepted is not None and self._quotas.may_walk(peer, network, now):
            for other in others:
                self._send(other, msg.ForwardJoin(self._config.hops, member.signed))
        return accepted

    def on_forward_join(self, message: msg.ForwardJoin, source: PeerId, now: float) -> None:
        """A newcomer's heartbeat walks by: let it go on, or become a neighbour."""
        newcomer = message.heartbeat.peer
        onward = [peer for peer in self.neighbours if peer not in (source, newcomer)]
        hops = min(message.hops, self._config.hops)
        if hops > 0 and onward:
            if not self._quotas.forwarded_walks.take(source, now):
                return
            self._send(self._rng.choice(onward), msg.ForwardJoin(hops - 1, message.heartbeat))
        elif newcomer in self._members and self._may_ask(newcomer):
            self._ask(newcomer, False, now)

    def on_neighbor(self, peer: PeerId, urgent: bool, now: float) -> bool | None:
        """A peer asks us to be its neighbour; return what we answer, None for nothing."""
        return self._reply(peer, urgent, now) if peer in self._members else None

    def on_suspected(self, peer: PeerId, now: float) -> None:
        """A peer asks whether we live, so it lists us: without a neighbour we ask it to be one.

        The bootstrap peers may be down or refuse us, and who lists us need not send us anything
        else. A bootstrap peer that had lied, and was started again, was refused by both of the
        others; all 49 members listed it and asked whether it lives, a dozen every ten seconds,
        and it knew none of them to the end (`storm`, seed 96). A stranger gains nothing by it:
        a node without neighbours takes in any that asks.
        """
        if not self._bootstraps or self.neighbours or peer in self._pending:
            return
        if self._asked_back.get(peer, -math.inf) <= now and self._ask_backs.allows(1, now):
            self._asked_back.renew(peer, now + PENDING * self._config.interval)
            self._send(peer, msg.Neighbor(True, self._own()))

    def on_neighbor_reply(self, peer: PeerId, accepted: bool, now: float) -> None:
        """A peer answered our request to be neighbours."""
        was_picked = peer in self._chosen_pending or peer in self._bootstraps
        was_asked = self._pending.pop(peer, None) is not None or was_picked
        self._chosen_pending.pop(peer, None)
        if self._asked_back.get(peer, -math.inf) > now:
            was_asked = was_asked or self._accepts(peer, False, now)
        if accepted and was_asked and peer in self._members:
            self.add(peer, now, chosen=was_picked)
        elif accepted and peer not in self.neighbours:
            self._send(peer, msg.Disconnect())
        elif not accepted:
            self._avoid(peer, now)
            held = len(self.neighbours) + len(self._pending)
            if peer not in self.neighbours and held <= self._lower:
                self.fill(now)

    def on_heartbeat(self, peer: PeerId, is_neighbour: bool, now: float) -> None:
        """A peer sent us heartbeats and said whether we are neighbours: agree with it, as far
        as there is room."""
        if is_neighbour and peer not in self.neighbours:
            if self._accepts(peer, False, now):
                self.add(peer, now)
            else:
                self._send(peer, msg.Disconnect())
        elif not is_neighbour and peer in self.neighbours:
            self.remove(peer, now)

    def add(self, peer: PeerId, now: float, *, chosen: bool = False) -> None:
        """Make a member a neighbour, or a neighbour a chosen one. If there are too many, one is
        dropped."""
        if peer not in self._members:
            return
        self._pending.pop(peer, None)
        chosen = chosen or peer in self._chosen_pending
        self._chosen_pending.pop(peer, None)
        if chosen:
            self._chosen[peer] = None
        if peer not in self.neighbours:
            if len(self.neighbours) >= self._upper + GUEST_SEATS:
                self._evict(next(reversed(self._unchosen() or self._chosen)))
            self.neighbours[peer] = now
            self.changes += 1
        self._members.expect(peer, now)
        self._retry, self._retry_at = FIRST_RETRY, math.inf
        self._arm_heal(now)

    def remove(self, peer: PeerId, now: float) -> None:
        """A neighbour is gone: find another."""
        self._pending.pop(peer, None)
        self._chosen_pending.pop(peer, None)
        if peer in self.neighbours:
            self._drop(peer)
            self.fill(now)

    def on_unreachable(self, peer: PeerId, now: float) -> None:
        """A peer did not answer: it is no neighbour, and is left alone for a while."""
        self._avoid(peer, now)
        was_pending = self._pending.pop(peer, None) is not None
        self._chosen_pending.pop(peer, None)
        self.remove(peer, now)
        if was_pending:
            self.fill(now)

    def _unchosen(self) -> list[PeerId]:
        """The neighbours that we did not choose, longest first."""
        return [peer for peer in self.neighbours if peer not in self._chosen]

    def _drop(self, peer: PeerId) -> None:
        del self.neighbours[peer]
        self._chosen.pop(peer, None)
        self.changes += 1

    def _evict(self, peer: PeerId) -> None:
        self._drop(peer)
        self._members.stop_expecting(peer)
        self._send(peer, msg.Disconnect())

    def _release_guests(self, now: float) -> None:
        """Free guest seats that were held for long enough."""
        guests = self._unchosen()[self._upper - len(self.neighbours) :]
        for peer in guests:
            member = self._members.get(peer)
            # A guest that fell silent has perhaps died before it had another neighbour: shown
            # out, no node would watch it, and it would stay listed for minutes. It stays until
            # its silence was judged.
            is_silent = member is not None and not member.is_heard(now)
            # Intervals after which such a seat is given up though no peer asks for it: a
            # newcomer has found others by then, and seven neighbours on average instead of 6.4
            # made a quiet swarm send a tenth more.
            since = now - 2.0 * self._config.interval
            if not is_silent and self.neighbours[peer] <= since:
                self._evict(peer)

    def _accepts(self, peer: PeerId, urgent: bool, now: float) -> bool:
        """Return True if a peer that asks gets a seat; if it is urgent, that of another that
        asked."""
        if peer in self.neighbours or peer in self._chosen_pending:
            return True
        if self._is_crowding(peer):
            return False
        return self._has_seat() or (urgent and self._grant(peer, now))

    def _reply(self, peer: PeerId, urgent: bool, now: float) -> bool | None:
        """Answer a request and return the answer; None if there is none."""
        accepted = self._accepts(peer, urgent, now)
        if accepted:
            self.add(peer, now)
        elif not self._quotas.may_refuse(self._members.prefix(peer), now):
            return None
        self._send(peer, msg.NeighborReply(accepted, self._own()))
        return accepted

    def _has_seat(self) -> bool:
        """Return True if there is a seat for a neighbour that we do not choose."""
        waiting = len(self._pending) - len(self._chosen_pending)
        unchosen = len(self.neighbours) - len(self._chosen)
        seats = self._upper - self._least_chosen
        return len(self.neighbours) < self._upper and unchosen + waiting < seats

    def _may_ask(self, peer: PeerId) -> bool:
        """Return True if a newcomer may be asked to be a neighbour."""
        held = len(self.neighbours) + len(self._pending)
        if peer in self.neighbours or held >= self._config.active:
            return False
        return self._has_seat() and not self._is_crowding(peer)

    def _is_crowding(self, peer: PeerId) -> bool:
        """Return True if the peer's network has its share of the neighbours."""
        prefix = self._members.prefix(peer)
        if not self._members.is_one_of_many(prefix):
            return False
        # Neighbours of one network, where there are others to choose from
        # (`member_list.OTHERS`): two of five, so that an attacker needs three networks for the
        # whole view.
        return [self._members.prefix(other) for other in self.neighbours].count(prefix) >= 2

    def _grant(self, peer: PeerId, now: float) -> bool:
        """Give a guest seat to a peer without neighbours, if one is free. Return True if it has
        one now."""
        granted, interval, prefix = (
            self._granted,
            self._config.interval,
            self._members.prefix(peer),
        )
        unchosen = self._unchosen()
        lately = now - AGAIN * interval
        if not unchosen or granted.get(peer.digest, -math.inf) > lately:
            return False
        if prefix is not None and granted.get(prefix, -math.inf) > lately:
            return False
        if not self._grants.allows(1, now):
            return False
        if len(self.neighbours) >= self._upper + GUEST_SEATS:
            self._evict(unchosen[-GUEST_SEATS:][0])
        for name in (peer.digest, prefix):
            if name is not None:
                granted.pop(name, None)
                granted[name] = now
        # Grants remembered: more than twice `GRANTS`, for peers and networks each, so that a
        # burst of grants pushes out none of itself.
        while len(granted) > 1024 or granted[next(iter(granted))] <= lately:
            del granted[next(iter(granted))]
        return True

    def _ask_chosen(self, peer: PeerId, urgent: bool, now: float) -> None:
        """Ask a peer of our own choice."""
        self._chosen_pending[peer] = None
        self._ask(peer, urgent, now)

    def _ask(self, peer: PeerId, urgent: bool, now: float) -> None:
        self._pending[peer] = now + PENDING * self._config.interval
        self._send(peer, msg.Neighbor(urgent, self._own()))

    def _avoid(self, peer: PeerId, now: float) -> None:
        member = self._members.get(peer)
        if member is not None:
            # Intervals before a peer that refused a link, or could not be reached, is asked
            # again.
            member.avoid_until = now + 6.0 * self._config.interval

    def _rejoin(self, now: float) -> None:
        """There is no neighbour: try the next bootstrap peer, later each time."""
        self._retry_at = math.inf
        if self.neighbours or not self._bootstraps:
            return
        peer = next(iter(self._bootstraps))
        self._bootstraps[peer] = self._bootstraps.pop(peer)
        self._send(peer, msg.Join(self._own()))
        self._retry_at = now + self._retry * self._rng.uniform(0.75, 1.25)
        # Seconds between attempts to join, doubling: a bootstrap that comes back meets no
        # stampede.
        self._retry = min(2 * self._retry, 60.0)

    def _arm_heal(self, now: float) -> None:
        if self._heal_at == math.inf:
            # Intervals between two requests to the other side of what may have been a
            # partition.
            self._heal_at = now + 6.0 * self._config.interval * self._rng.uniform(0.75, 1.25)

    def _heal(self, now: float) -> None:
        """Ask a peer that may live beyond a partition to be our neighbour."""
        # Seconds for which the dead are asked; afterwards the bootstrap peers are the meeting
        # point.
        maybe_partitioned = self._members.maybe_partitioned(now - 600.0)
        maybe_partitioned += [peer for peer in self._bootstraps if peer not in self._members]
        if maybe_partitioned:
            self._ask(self._rng.choice(maybe_partitioned), True, now)
