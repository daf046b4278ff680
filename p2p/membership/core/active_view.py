"""The neighbours of a node: HyParView's active view, hardened against strangers.

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
An urgent one may get a *guest seat* beyond them, but no peer or network twice in a row. A guest
leaves its seat to the next, or, in quiet times, after two intervals; so guest seats are free
when an attack begins, and a neighbour of longer standing never goes for a guest. The two chosen
neighbours of longest standing are *anchors*: a node that restarts asks them first.

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

from p2p.bounded import BoundedDict
from p2p.identity import PeerId
from p2p.membership import messages as msg
from p2p.membership.config import MembershipConfig
from p2p.membership.core.member_list import MemberList
from p2p.membership.core.quotas import FloodQuotas
from p2p.membership.heartbeat import SignedHeartbeat


class ActiveView:
    """Keeps the active view filled."""

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
        """Maps each neighbour to the time at which it became one, longest first."""
        # Neighbours that may be missing or surplus before the node acts. Without slack, the
        # last node that lacks one neighbour would ask around for ever.
        slack = 2
        self._upper: Final = config.active + slack
        """Maximum number of neighbours, without the guest seats."""
        self._lower: Final = config.active - slack
        """Number of neighbours at or below which the node asks for all missing neighbours at
        once."""
        self._guest_seats: Final = 4
        """Number of further seats for peers that ask urgently. A new guest takes only the
        oldest guest's seat: a newcomer gets in while strangers hold the rest, and no crowd
        evicts a neighbour."""
        self._patience: Final = 2.0 * config.interval
        """Seconds until an unanswered request for a link counts as refused. An answer takes a
        dial and a round trip, about half an interval (`failure_detector._check`), and machines
        are busy."""
        self._least_chosen: Final = max(1, self._lower - 1)
        """Minimum number of neighbours that this node chooses itself: 2 of 7, so 5 seats are
        for peers that ask. A link is chosen by one of its ends or, where a walk made it, by
        none. With 3 of 7 the seats in a quiet swarm of 50 did not suffice, and its nodes asked
        around for ever (6 requests a second, all refused)."""
        self._hops: Final = 3
        """Steps of the walk that finds neighbours for a newcomer. At degree 5 the walk may end
        at any of 80 nodes (5 times 4 times 4), most of which its bootstrap does not know."""
        self._quotas = quotas
        self._members = members
        self._config = config
        self._rng = rng
        self._send = send
        self._own = own
        self.changes = 0
        """Counts the changes of `neighbours`."""
        self._chosen: dict[PeerId, None] = {}
        """Neighbours that this node chose, longest first."""
        self._pending: dict[PeerId, float] = {}
        """Maps each peer with an open request to its deadline."""
        self._chosen_pending: dict[PeerId, None] = {}
        """Peers in `_pending` that this node chose itself."""
        # Accusers remembered as asked: 13 may be in ten seconds.
        self._asked_back: BoundedDict[PeerId, float] = BoundedDict(16)
        """Maps each suspecting peer that was asked to the time until which it is not asked
        again."""
        self._choose_at = -math.inf
        self._granted: BoundedDict[bytes, float] = BoundedDict(1024)
        """Maps each peer or network to the time at which it got a guest seat, oldest first."""
        self._bootstraps: dict[PeerId, None] = {}
        self._retry = 1.0
        """Seconds between two attempts to join. A bootstrap that starts at the same time as we
        do is up after the first of them."""
        self._retry_at = math.inf
        self._heal_at = math.inf

    @property
    def next_deadline(self) -> float:
        """Time of the next call to `tick`."""
        soonest = self._retry_at if self._retry_at < self._heal_at else self._heal_at
        return min(soonest, *self._pending.values()) if self._pending else soonest

    @property
    def anchors(self) -> tuple[PeerId, ...]:
        """Chosen neighbours of longest standing: two, as in Bitcoin Core. One may be gone, and
        three tell an observer more of the graph than they help."""
        return tuple(self._chosen)[:2]

    def bootstrap(
        self, peers: tuple[PeerId, ...], anchors: tuple[PeerId, ...], now: float
    ) -> None:
        """Join through ``peers`` in turn until there is a neighbour, and ask ``anchors`` at
        once."""
        # Bootstrap peers that are tried in turn, the first of those given: a configuration
        # names a handful, and any one is enough.
        self._bootstraps = dict.fromkeys(peers[:16])
        for peer in anchors[:2]:
            if peer not in self.neighbours:
                self._ask_chosen(peer, False, now)
        self._retry = 1.0
        if not self.neighbours:
            self._retry_at = now
        self._arm_heal(now)

    def tick(self, now: float) -> None:
        """Give up on unanswered requests, repeat the join, and ask across partitions, if
        due."""
        for peer in [peer for peer, deadline in self._pending.items() if deadline <= now]:
            self.on_unreachable(peer, now)
        if self._heal_at <= now:
            self._heal_at = math.inf
            self._arm_heal(now)
            self._heal(now)
        if self._retry_at <= now:
            self._rejoin(now)

    def fill(self, now: float) -> None:
        """Ask for neighbours if there are too few, or too few that we chose. Also free guest
        seats."""
        if len(self.neighbours) > self._upper:
            self._release_guests(now)
        held, aim = len(self.neighbours) + len(self._pending), self._config.active
        if held <= self._lower:
            missing = aim - held
        elif self._choose_at > now:
            return
        elif held < aim:
            # Intervals between two requests of a node that has fewer neighbours than `active`.
            # With one hostile member in ten, one in twenty of the nodes with four neighbours
            # had only two honest ones by chance.
            self._choose_at = now + 1.0 * self._config.interval
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
        """Accept a newcomer if there is room, and send its heartbeat on walks.

        Returns whether it is a neighbour now; None if too many ask for us to answer each.
        """
        member = self._members.get(peer)
        if member is None:
            return None
        # One walk for each neighbour that the newcomer needs. With nine, walks were a ninth of
        # all messages of a swarm of 1,000 in its first two minutes; with two, one of 24 deaths
        # was known late (test_deaths_are_known_in_time_while_a_zone_comes_back).
        others = [other for other in self.neighbours if other != peer][: self._config.active]
        accepted = self.reply(peer, True, now)
        may_walk = accepted is not None and self._quotas.walks.take(peer, now)
        # A walk has twenty messages in all.
        if may_walk and self._quotas.may_link(member.prefix, 20, now):
            for other in others:
                self._send(other, msg.ForwardJoin(self._hops, member.signed))
        return accepted

    def on_forward_join(self, message: msg.ForwardJoin, source: PeerId, now: float) -> None:
        """Send a newcomer's heartbeat one step on, or ask the newcomer to be a neighbour."""
        newcomer = message.heartbeat.peer
        onward = [peer for peer in self.neighbours if peer not in (source, newcomer)]
        hops = min(message.hops, self._hops)
        if hops > 0 and onward:
            if not self._quotas.answers.take(source, now):
                return
            self._send(self._rng.choice(onward), msg.ForwardJoin(hops - 1, message.heartbeat))
        elif newcomer in self._members and self._may_ask(newcomer):
            self._ask(newcomer, False, now)

    def reply(self, peer: PeerId, urgent: bool, now: float) -> bool | None:
        """Answer a member that asks to be our neighbour. Return the answer, or None if there is
        none."""
        accepted = self._accepts(peer, urgent, now)
        if accepted:
            self.add(peer, now)
        # A refusal has 0.7 KB with the names of others. Who gets none takes silence for one.
        elif not self._quotas.may_link(self._members.prefix(peer), 3, now):
            return None
        self._send(peer, msg.NeighborReply(accepted, self._own()))
        return accepted

    def on_suspected(self, peer: PeerId, now: float) -> None:
        """Ask a peer that suspects us to be our neighbour if we have none.

        A peer that suspects us lists us. The bootstrap peers may be down or refuse us, and
        other peers that list us need not send us anything else. A bootstrap peer that had lied
        and was started again was refused by both of the others. All 49 members listed it and
        asked whether it lives, a dozen every ten seconds, and it knew none of them to the end
        (`storm`, seed 96). A stranger gains nothing by this: a node without neighbours accepts
        any peer that asks.
        """
        if not self._bootstraps or self.neighbours or peer in self._pending:
            return
        if self._asked_back.get(peer, -math.inf) <= now:
            self._asked_back.renew(peer, now + self._patience)
            self._send(peer, msg.Neighbor(True, self._own()))

    def on_neighbor_reply(self, peer: PeerId, accepted: bool, now: float) -> None:
        """Handle a peer's answer to our request to be neighbours."""
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
        """Adjust our view to a peer's claim that we are, or are not, neighbours, as far as
        there is room."""
        if is_neighbour and peer not in self.neighbours:
            if self._accepts(peer, False, now):
                self.add(peer, now)
            else:
                self._send(peer, msg.Disconnect())
        elif not is_neighbour and peer in self.neighbours:
            self.remove(peer, now)

    def add(self, peer: PeerId, now: float, *, chosen: bool = False) -> None:
        """Make a member a neighbour, or a neighbour a chosen one. Evict one if there are too
        many."""
        if peer not in self._members:
            return
        self._pending.pop(peer, None)
        chosen = chosen or peer in self._chosen_pending
        self._chosen_pending.pop(peer, None)
        if chosen:
            self._chosen[peer] = None
        if peer not in self.neighbours:
            if len(self.neighbours) >= self._upper + self._guest_seats:
                self._evict(next(reversed(self._unchosen() or self._chosen)))
            self.neighbours[peer] = now
            self.changes += 1
        self._members.expect(peer, now)
        self._retry, self._retry_at = 1.0, math.inf
        self._arm_heal(now)

    def remove(self, peer: PeerId, now: float) -> None:
        """Remove a neighbour and look for another."""
        self._pending.pop(peer, None)
        self._chosen_pending.pop(peer, None)
        if peer in self.neighbours:
            self._drop(peer)
            self.fill(now)

    def on_unreachable(self, peer: PeerId, now: float) -> None:
        """Remove a peer that did not answer from the neighbours, and avoid it for a while."""
        self._avoid(peer, now)
        was_pending = peer in self._pending
        self.remove(peer, now)
        if was_pending:
            self.fill(now)

    def _unchosen(self) -> list[PeerId]:
        """Return the neighbours that we did not choose, longest first."""
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
        """Evict guests that have held a seat for long enough."""
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
        """Return True if a peer that asks gets a seat. An urgent one may get a guest seat."""
        if peer in self.neighbours or peer in self._chosen_pending:
            return True
        if self._is_crowding(peer):
            return False
        return self._has_seat() or (urgent and self._grant(peer, now))

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
        """Return True if the peer's network already has its share of the neighbours."""
        prefix = self._members.prefix(peer)
        if not self._members.is_one_of_many(prefix):
            return False
        # Neighbours of one network, where there are others to choose from: two of five, so that
        # an attacker needs three networks for the whole view.
        return [self._members.prefix(other) for other in self.neighbours].count(prefix) >= 2

    def _grant(self, peer: PeerId, now: float) -> bool:
        """Give a peer without neighbours a guest seat if one is free. Return True if it got
        one."""
        granted, prefix = self._granted, self._members.prefix(peer)
        unchosen = self._unchosen()
        # Intervals for which a peer whose urgent request was granted, or another peer of its
        # network, is granted no other. A machine that restarts a minute later gets in at once.
        lately = now - 12.0 * self._config.interval
        names = [name for name in (peer.digest, prefix) if name is not None]
        if not unchosen or any(granted.get(name, -math.inf) > lately for name in names):
            return False
        if len(self.neighbours) >= self._upper + self._guest_seats:
            self._evict(unchosen[-self._guest_seats :][0])
        for name in names:
            granted.renew(name, now)
        return True

    def _ask_chosen(self, peer: PeerId, urgent: bool, now: float) -> None:
        """Ask a peer to be a neighbour that we chose ourselves."""
        self._chosen_pending[peer] = None
        self._ask(peer, urgent, now)

    def _ask(self, peer: PeerId, urgent: bool, now: float) -> None:
        self._pending[peer] = now + self._patience
        self._send(peer, msg.Neighbor(urgent, self._own()))

    def _avoid(self, peer: PeerId, now: float) -> None:
        member = self._members.get(peer)
        if member is not None:
            # Intervals before a peer that refused a link, or could not be reached, is asked
            # again.
            member.avoid_until = now + 6.0 * self._config.interval

    def _rejoin(self, now: float) -> None:
        """Try the next bootstrap peer if there is no neighbour, at growing intervals."""
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
        """Ask a peer that may be alive beyond a partition to be our neighbour."""
        # Seconds for which the dead are asked; afterwards the bootstrap peers are the meeting
        # point.
        maybe_partitioned = self._members.maybe_partitioned(now - 600.0)
        maybe_partitioned += [peer for peer in self._bootstraps if peer not in self._members]
        if maybe_partitioned:
            self._ask(self._rng.choice(maybe_partitioned), True, now)
