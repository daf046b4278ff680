"""How many streams a service reads and answers at a time: of one peer, and of all together.

A stream may hold a whole submission in memory before anything is known of it, so the seat is taken before
the first byte is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from p2p.identity import PeerId

PER_PEER: Final = 8
"""Twice the four submissions, or deliveries, that an honest peer has under way: each may be asked again."""
IN_ALL: Final = 128
"""At 8 MiB a submission this bounds what waits in memory at 1 GiB."""


class Seats:
    """Seats taken now, by peer."""

    def __init__(self, per_peer: int = PER_PEER, in_all: int = IN_ALL) -> None:
        self._per_peer = per_peer
        self._in_all = in_all
        self._taken: dict[PeerId, int] = {}

    @contextmanager
    def seat(self, peer: PeerId) -> Iterator[bool]:
        """Give ``peer`` a seat for the length of the block; False if there is none left for it."""
        own = self._taken.get(peer, 0)
        if own >= self._per_peer or sum(self._taken.values()) >= self._in_all:
            yield False
            return
        self._taken[peer] = own + 1
        try:
            yield True
        finally:
            left = self._taken.pop(peer) - 1
            if left:
                self._taken[peer] = left
