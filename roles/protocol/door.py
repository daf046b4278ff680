"""The door of whoever hears workers: how many streams are heard, and in which order.

Peers that are known (in standing, or officers) go in at once, up to a rate that no honest node
reaches. Strangers wait outside, where nothing is read of them, and go in by turns
(`roles.protocol.core.turnstile`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import trio

from p2p.bounded import BoundedDict, RateLimit
from p2p.identity import PeerId
from p2p.node.node import Node
from p2p.swarm.core.limits import MAX_SERVED
from roles.protocol.core.turnstile import Turnstile
from roles.protocol.seats import Seats

HEADS: Final = 32.0
"""Requests of strangers that are heard in a second, all together: at 0.6 ms each 2 % of a core.
A scorer judges fewer."""
HEADS_AT_ONCE: Final = 64.0
OWN_HEADS: Final = 64.0
"""Requests of one known node in a second before it waits among strangers."""
AT_DOOR: Final = 1024
"""Streams of strangers that wait: 128 nodes with eight each, 7 MiB."""
AT_DOOR_PER_NETWORK: Final = AT_DOOR // 8
DOOR_SECONDS: Final = 60.0
"""How long such a stream waits at most: less than its peer waits for an answer."""


@dataclass(slots=True, eq=False)
class _Turn:
    """A stream that waits."""

    is_over: trio.Event = field(default_factory=trio.Event)
    is_heard: bool = False
    """Else it had to go, for one of a peer with fewer."""


class Door:
    """Who waits to be heard, and how many are inside."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._streams = Seats(in_all=MAX_SERVED)
        self._turns: Turnstile[_Turn] = Turnstile(
            HEADS,
            HEADS_AT_ONCE,
            in_all=AT_DOOR,
            per_network=AT_DOOR_PER_NETWORK,
            evict=lambda turn: turn.is_over.set(),
        )
        self._timer_runs = False
        self._heads: BoundedDict[PeerId, RateLimit] = BoundedDict(1024)

    @contextmanager
    def stream(self, peer: PeerId) -> Iterator[bool]:
        """Count a stream for the length of the block; False if the peer has too many."""
        with self._streams.seat(peer) as seated:
            yield seated

    async def enter(self, peer: PeerId, *, is_known: bool) -> bool:
        """Return True when it is the peer's turn to be heard; False if it was not in time."""
        world = self._node.world
        if is_known and self._meter(peer):
            return True
        network, turn = self._node.host.network_of(peer), _Turn()
        if not self._turns.add(peer, network, turn, world.now()):
            return False
        self._let_in()
        with trio.move_on_after(DOOR_SECONDS):
            try:
                await turn.is_over.wait()
            finally:
                self._turns.remove(peer, network, turn)
        return turn.is_heard

    def _meter(self, peer: PeerId) -> bool:
        meter = self._heads.get(peer) or RateLimit(OWN_HEADS, OWN_HEADS)
        self._heads.renew(peer, meter)
        return meter.allows(1.0, self._node.world.now())

    def _let_in(self) -> None:
        now = self._node.world.now()
        while (turn := self._turns.next(now)) is not None:
            turn.is_heard = True
            turn.is_over.set()
        if len(self._turns) and not self._timer_runs:
            self._timer_runs = True
            self._node.world.call_at(now + self._turns.seconds_left(now), self._on_timer)

    def _on_timer(self) -> None:
        self._timer_runs = False
        self._let_in()
