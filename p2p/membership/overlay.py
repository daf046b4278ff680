"""Who our neighbours are: a random graph of small degree that stays connected (after HyParView).

Theory of operation
-------------------
Each node keeps about ``active`` symmetric neighbours and a passive view to replace them from. A newcomer
sends `Join` to one peer it was told of, which takes it in, pushing somebody out if need be, and sends the
newcomer's heartbeat on short random walks; where a walk ends, another neighbour is found. A lost neighbour
is replaced by a random passive member that has room. A node without any neighbour asks urgently, and may
not be refused; if it knows nobody, it goes back to its bootstrap peers, ever more slowly.

A partition that has healed does not mend itself when both sides think the other dead. So each node now
and then knocks at one peer it buried, or at a bootstrap peer it does not see: one link is enough, the
digests of both sides then flow over it.

Leitao, Pereira, Rodrigues: HyParView (DSN 2007). Left out are the paper's shuffle walks, which open a
connection for every exchange: digests travel with the heartbeats between neighbours instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Final

from p2p.identity import PeerId
from p2p.membership.events import MembershipConfig
from p2p.membership.heartbeat import SignedHeartbeat
from p2p.membership.messages import ForwardJoin, Join, Link, Linked, Message, Unlink
from p2p.membership.view import View

SLACK: Final = 2
"""Neighbours below or above the number aimed at before anything is done about it: without slack the last
node short of one would ask around for ever."""
MAX_BOOTSTRAPS: Final = 16
FIRST_RETRY: Final = 1.0
LAST_RETRY: Final = 60.0
"""Seconds between attempts to join, doubling: a bootstrap that comes back meets no stampede."""
HEAL_INTERVALS: Final = 6.0
"""Intervals between two knocks at the other side of what may have been a partition."""
HEAL_WINDOW: Final = 600.0
"""Seconds for which the dead are knocked at; afterwards the bootstrap peers are the meeting point."""
PENDING: Final = 2.0
"""Intervals until a request for a link counts as refused."""
AVOID: Final = 6.0
"""Intervals before a peer that refused a link, or could not be reached, is asked again."""


class Overlay:
    """The active view, and everything that keeps it filled."""

    __slots__ = (
        "_bootstraps", "_config", "_heal_at", "_own", "_pending", "_retry", "_retry_at", "_rng", "_send",
        "_view", "active",
    )  # fmt: skip

    def __init__(
        self,
        view: View,
        config: MembershipConfig,
        rng: Random,
        send: Callable[[PeerId, Message], None],
        own: Callable[[], SignedHeartbeat],
    ) -> None:
        self.active: dict[PeerId, None] = {}
        """Our neighbours, longest first."""
        self._view = view
        self._config = config
        self._rng = rng
        self._send = send
        self._own = own
        self._pending: dict[PeerId, float] = {}
        self._bootstraps: dict[PeerId, None] = {}
        self._retry = FIRST_RETRY
        self._retry_at = math.inf
        self._heal_at = math.inf

    @property
    def next_deadline(self) -> float:
        """When `tick` has something to do."""
        soonest = self._retry_at if self._retry_at < self._heal_at else self._heal_at
        return min(soonest, *self._pending.values()) if self._pending else soonest

    def bootstrap(self, peers: tuple[PeerId, ...], now: float) -> None:
        """Join through ``peers``, one after the other, until a neighbour is found."""
        self._bootstraps = dict.fromkeys(peers[:MAX_BOOTSTRAPS])
        self._retry = FIRST_RETRY
        if not self.active:
            self._retry_at = now
        self._arm_heal(now)

    def tick(self, now: float) -> None:
        """Give up on requests nobody answered; join again; knock."""
        for peer in [peer for peer, deadline in self._pending.items() if deadline <= now]:
            self.unreachable(peer, now)
        if self._heal_at <= now:
            self._heal_at = math.inf
            self._arm_heal(now)
            self._heal(now)
        if self._retry_at <= now:
            self._rejoin(now)

    def fill(self, now: float) -> None:
        """Ask for neighbours if there are too few."""
        config = self._config
        if len(self.active) + len(self._pending) > config.active - SLACK:
            return
        urgent = not self.active
        for peer in self._view.candidates(self.active, now):
            if len(self.active) + len(self._pending) >= config.active:
                return
            if peer not in self._pending:
                self._ask(peer, urgent, now)
        if urgent and not self._pending and self._bootstraps:
            self._retry_at = min(self._retry_at, now + self._retry)

    def joined(self, peer: PeerId, now: float) -> None:
        """A newcomer asks to be taken in: do so, and let its heartbeat walk."""
        entry = self._view.get(peer)
        if entry is None:
            return
        others = [other for other in self.active if other != peer]
        self.add(peer, now)
        self._send(peer, Linked(True, self._own()))
        for other in others:
            self._send(other, ForwardJoin(self._config.hops, entry.signed))

    def walked(self, message: ForwardJoin, source: PeerId, now: float) -> None:
        """A newcomer's heartbeat walks by: let it go on, or become a neighbour."""
        newcomer = message.heartbeat.peer
        onward = [peer for peer in self.active if peer not in (source, newcomer)]
        if message.hops > 0 and onward:
            self._send(self._rng.choice(onward), ForwardJoin(message.hops - 1, message.heartbeat))
        elif newcomer in self._view and newcomer not in self.active and self._has_room():
            self._ask(newcomer, False, now)

    def link_wanted(self, peer: PeerId, urgent: bool, now: float) -> None:
        """Somebody asks us to be its neighbour."""
        accepted = peer in self._view and (urgent or self._has_room() or peer in self.active)
        if accepted:
            self.add(peer, now)
        self._send(peer, Linked(accepted, self._own()))

    def link_answered(self, peer: PeerId, accepted: bool, now: float) -> None:
        """Somebody answered our request to be neighbours."""
        asked = self._pending.pop(peer, None) is not None or peer in self._bootstraps
        if peer in self.active:
            return
        if accepted and asked and peer in self._view:
            self.add(peer, now)
        elif accepted:
            self._send(peer, Unlink())
        else:
            self._avoid(peer, now)
            self.fill(now)

    def beaten(self, peer: PeerId, linked: bool, now: float) -> None:
        """A peer beat to us and said whether we are neighbours: agree with it, as far as there is room."""
        if linked and peer not in self.active:
            if self._has_room():
                self.add(peer, now)
            else:
                self._send(peer, Unlink())
        elif not linked and peer in self.active:
            self.remove(peer, now)

    def add(self, peer: PeerId, now: float) -> None:
        """Make a member a neighbour; if there are too many, push a random one out."""
        if peer not in self._view:
            return
        self._pending.pop(peer, None)
        others = [other for other in self.active if other != peer]
        if peer not in self.active and len(others) >= self._config.active + SLACK:
            self._push_out(self._rng.choice(others))
        self.active[peer] = None
        self._view.expect(peer, now)
        self._retry, self._retry_at = FIRST_RETRY, math.inf
        self._arm_heal(now)

    def remove(self, peer: PeerId, now: float) -> None:
        """A neighbour is gone: find another."""
        self._pending.pop(peer, None)
        if peer in self.active:
            del self.active[peer]
            self.fill(now)

    def unreachable(self, peer: PeerId, now: float) -> None:
        """A peer did not answer: it is no neighbour, and is left alone for a while."""
        self._avoid(peer, now)
        was_pending = self._pending.pop(peer, None) is not None
        self.remove(peer, now)
        if was_pending:
            self.fill(now)

    def _push_out(self, peer: PeerId) -> None:
        del self.active[peer]
        self._view.lose_touch(peer)
        self._send(peer, Unlink())

    def _has_room(self) -> bool:
        return len(self.active) < self._config.active + SLACK

    def _ask(self, peer: PeerId, urgent: bool, now: float) -> None:
        self._pending[peer] = now + PENDING * self._config.interval
        self._send(peer, Link(urgent, self._own()))

    def _avoid(self, peer: PeerId, now: float) -> None:
        entry = self._view.get(peer)
        if entry is not None:
            entry.avoid_until = now + AVOID * self._config.interval

    def _rejoin(self, now: float) -> None:
        """Nobody is linked: try the next bootstrap peer, later each time."""
        self._retry_at = math.inf
        if self.active or not self._bootstraps:
            return
        peer = next(iter(self._bootstraps))
        self._bootstraps[peer] = self._bootstraps.pop(peer)
        self._send(peer, Join(self._own()))
        self._retry_at = now + self._retry * self._rng.uniform(0.75, 1.25)
        self._retry = min(2 * self._retry, LAST_RETRY)

    def _arm_heal(self, now: float) -> None:
        if self._heal_at == math.inf:
            self._heal_at = now + HEAL_INTERVALS * self._config.interval * self._rng.uniform(0.75, 1.25)

    def _heal(self, now: float) -> None:
        """Knock at somebody who may live where we cannot see."""
        lost = self._view.lost(now - HEAL_WINDOW)
        lost += [peer for peer in self._bootstraps if peer not in self._view]
        if lost:
            self._ask(self._rng.choice(lost), True, now)
