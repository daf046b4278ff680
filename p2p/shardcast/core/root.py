"""One root of a hand-out, as its origin sees it: what it was given, and how fast it
confirms."""

from __future__ import annotations

import math

from p2p.shardcast.core.gifts import Gift
from p2p.shardcast.core.line import MAX_CREDIT, Line
from p2p.shardcast.core.patience import Patience, SmoothedAverage
from p2p.shardcast.core.queue import RECENT


class Root:
    """One root of the forest: what it was given, what it confirmed, how fast."""

    def __init__(self, stripe: int, line: Line, rate: float, patience: Patience) -> None:
        """By their classes its children can take ``rate`` chunks a second."""
        self.stripe: int | None = stripe
        """None once it is the root of no stripe any more: it still confirms."""
        self.confirmed = 0
        self.trusted = True
        """Whether it may be given more: not while a chunk of its own is late."""
        self.patience = patience
        """How long to wait for its confirmations."""
        self._line = line
        self._rate = rate
        self._granted = MAX_CREDIT
        self._gifts: list[Gift] = []
        self._left = 0
        self._interval = SmoothedAverage()
        """Seconds between two of its confirmations."""
        self._heard_at = -math.inf

    @property
    def given(self) -> int:
        """Chunks that it was given in all."""
        return len(self._gifts)

    @property
    def pending(self) -> int:
        """Chunks given and not yet confirmed."""
        return len(self._gifts) - self.confirmed

    @property
    def is_open(self) -> bool:
        """Whether it asks for more than it was given."""
        return self.stripe is not None and self.trusted and self.given < self._granted

    @property
    def has_credit(self) -> bool:
        """Whether it may be given a chunk more, by its own word and by what its line holds.

        Its class says what the line carries until its confirmations do.
        """
        interval = self._interval.value
        rate = 1 / interval if interval else self._rate
        return self.is_open and self.pending < self._line.credit(rate)

    @property
    def finish(self) -> float:
        """Seconds until it will have confirmed a chunk that it is given now; 0 while it has
        confirmed none."""
        usual = self.patience.usual if self.confirmed else 0.0
        return usual + self.pending * (self._interval.value or usual)

    @property
    def relay_time(self) -> float:
        """Seconds after which a chunk should be with all below it: behind those that it relays
        first, and over several lines like its own, so four times what it takes for one."""
        by_class = 1 / self._rate if self._rate else 0.0
        return self.patience.wait(floor=4 * max(self.patience.usual, by_class))

    def give(self, gift: Gift) -> None:
        """A chunk is queued for it."""
        self._gifts.append(gift)

    def note_left(self, now: float) -> None:
        """The first chunk that had not left has left."""
        if self._left < len(self._gifts):
            gift = self._gifts[self._left]
            gift.since, gift.has_left = now, True
            self._left += 1

    def confirm(self, received: int, granted: int, now: float) -> list[Gift]:
        """It has ``received`` chunks in all; returns those for which that is news."""
        news = self._gifts[self.confirmed : received]
        if news:
            took = now - news[-1].since
            if now > self._heard_at > -math.inf:
                self._interval.observe((now - self._heard_at) / len(news))
            self._heard_at = now
            self.confirmed = received
            self.patience.observe(took)
            self._line.note_round_trip(took)
        self._granted = min(granted, received + MAX_CREDIT)
        self.trusted = self.trusted or not self.pending
        return news

    @property
    def late_at(self) -> float:
        """When the first chunk that it owes is late; infinite if there is none, or it was late
        already. One that has not left waits in the origin's own queue."""
        if not (self.trusted and self.pending):
            return math.inf
        oldest = self._gifts[self.confirmed]
        return oldest.since + self.patience.wait() * (1 if oldest.has_left else RECENT)

    def distrust(self) -> list[Gift]:
        """Give it nothing more until it has confirmed what it owes; returns that."""
        self.trusted = False
        return self._gifts[self.confirmed :]

    def at_risk(self) -> list[Gift]:
        """What it may not have relayed if it is gone: what it owes, and what it got last."""
        return self._gifts[min(self.confirmed, max(0, self.given - RECENT)) :]

    def retire(self) -> list[Gift]:
        """It is no root any more; returns all that it was given."""
        self.stripe = None
        return self._gifts

    def move(self, stripe: int, rate: float) -> None:
        """By the new roster it is the root of this stripe."""
        self.stripe, self._rate = stripe, rate
