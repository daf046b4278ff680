"""How much work the trainer asks for: enough that no step waits, little enough that none of it
goes stale.

Theory of operation
-------------------
It is a stock that is ordered up to a level. What waits in the buffer, and what was ordered and
is still on its way, must last for the next step and for as many more as an order takes to
arrive (measured; one at least, since an order is placed once a step). What is missing is
ordered when a policy is published, under that policy: so what is learnt from is as young as it
can be. Between policies no more is ordered, but while the trainer waits, and then only in place
of what should have come by now (its worker has died, or was refused). That is twice as much
each time, and is not taken back as too much: names that bring nothing would keep the trainer
waiting for ever.

Orders are in submissions. How many of a submission's groups teach anything, how many
submissions come of one that is ordered, how long they take and how long a step takes are
measured and smoothed. A name that takes its share and brings nothing makes the second smaller,
and all shares larger, until enough comes in: names that are minted to take the demand away
delay a run by a few policies.

A step that had to wait for long raises what is ordered by half, a step that did not lowers it
by a fifth, and groups that went stale halve it again: where workers are too few for the trainer
all of them work all the time, the fast ones for the slow. Nobody is held back before work was
lost, nor when the trainer has stood still for several times what an order takes
(`roles.trainer.demand`). No I/O: the caller knows the time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from p2p.shardcast.manifest import PolicyVersion

SMOOTHING: Final = 0.3
"""Weight of the newest measurement: three policies make two thirds of what is known."""
SPARE: Final = 0.25
"""Steps' worth of groups beyond what is needed if all goes as measured."""
FIRST_SECONDS: Final = 600.0
"""How long the first submission may take before more is ordered in its place: what a 32 B
model takes on four small GPUs."""
PATIENCE: Final = 3.0
"""Times the usual seconds after which an order that has not arrived is not counted on."""
WAITING_PATIENCE: Final = 1.5
"""The same while the trainer stands still for it."""
GIVEN_UP: Final = 3.0
"""The same after which workers are held back no more: orders in its place have failed, too."""
RISES: Final = ((0.25, 1.5), (0.1, 1.1))
"""From which share of a step's time that the trainer has waited what is ordered rises, by what
factor; a tenth comes about where workers are too many, too, since lots and speeds vary."""
FALL: Final = 0.8
"""By what factor it falls after a step that has not waited."""
BACK: Final = 0.5
"""The same after one in which groups went stale: there are workers enough."""
CORRECTION: Final = 0.5
"""Share of what the stock is off its level that one policy's order makes up for: all of it
would be ordered, and then nothing, by turns."""
MOST: Final = 8.0
"""Times what is needed that are ordered at most: the fastest of the workers makes that many
times what the mean makes."""
BRINGS: Final = (0.01, 100.0)
"""Submissions that may come of one that is ordered: one name in a hundred works, or the
trainer knows one worker in a hundred."""


@dataclass(slots=True)
class _Order:
    """Under one policy."""

    published: float
    at: float
    """When what is waited for was ordered, in the mean: a little more does not make it new."""
    usual: float | None
    """Seconds that orders took to arrive before it, or its own first submission: patience that
    grew with what comes while the trainer waits, ever later, would have no end."""
    wanted: float = 0.0
    """Submissions."""
    places: int = 0
    """Places that workers were asked to fill, for those to come."""
    arrived: int = 0
    lost: float = 0.0
    """Submissions that were ordered again, since they should have come by then."""
    again: float = 1.0
    """Times what is missing that is ordered."""

    @property
    def coming(self) -> float:
        """Submissions that are waited for."""
        return max(0.0, self.wanted - self.arrived - self.lost)

    def give_up(self) -> None:
        """What is waited for will not come: each time more is ordered in its place."""
        self.lost = self.wanted - self.arrived
        self.again = min(2 * self.again, 1 / BRINGS[0])

    def add(self, more: float, now: float) -> None:
        """Order ``more``."""
        self.at += (now - self.at) * more / (self.coming + more)
        self.wanted += more

    def patience(self, is_waiting: bool) -> float:
        """Seconds for which it is counted on."""
        usual = FIRST_SECONDS if self.usual is None else self.usual
        return usual * (WAITING_PATIENCE if is_waiting else PATIENCE)


class DemandRule:
    """What one trainer asks for. ``batch`` groups make a step, ``submission`` a submission."""

    def __init__(self, batch: int, submission: int, lag: int) -> None:
        self._batch = batch
        self._submission = submission
        self._lag = lag
        self._orders: dict[PolicyVersion, _Order] = {}
        self._spread = 0.5
        """Share of groups that teach: a half, until some have come."""
        self._seen = 0
        """Submissions that say so."""
        self._brings = 1.0
        self._seconds: float | None = None
        """From an order to its arrival."""
        self._step: float | None = None
        """Seconds from a policy to the next."""
        self._boost = 1.0

    def publish(
        self,
        version: PolicyVersion,
        workers: int,
        now: float,
        *,
        waited: float,
        has_lost: bool,
    ) -> None:
        """A policy is out. Since the last one the trainer ``waited`` so many seconds for
        groups, and ``has_lost`` some that went stale. No worker begins another place under an
        older one: each has one on its way at most."""
        for order in self._orders.values():
            order.wanted -= max(0.0, order.coming - workers)
        if self._orders:
            took = max(1e-3, now - max(one.published for one in self._orders.values()))
            rise = next((rise for idle, rise in RISES if waited > idle * took), FALL)
            if has_lost or self._step is None:
                rise = BACK
            self._step = _smooth(self._step, took)
            self._boost = min(max(1.0, rise * self._boost), MOST)
        for old in [one for one in self._orders if one < version - self._lag]:
            order = self._orders.pop(old)
            if order.places:
                came = min(max(order.arrived / order.places, BRINGS[0]), BRINGS[1])
                self._brings = _smooth(self._brings, came)
        self._orders[version] = _Order(now, now, self._seconds)

    def arrive(self, version: PolicyVersion, teaching: int | None, now: float) -> None:
        """A submission under ``version`` has come, with so many groups that teach; None: too
        late for any of them."""
        order = self._orders.get(version)
        if order is not None:
            order.arrived += 1
            ordered = order.at if order.lost else order.published
            self._seconds = _smooth(self._seconds, now - ordered)
            order.usual = self._seconds if order.usual is None else order.usual
        if teaching is not None:
            share = max(teaching / self._submission, 1 / 64)
            self._seen += 1
            self._spread += max(SMOOTHING / 4, 1 / (1 + self._seen)) * (share - self._spread)

    def places(
        self,
        version: PolicyVersion,
        pooled: int,
        workers: int,
        now: float,
        *,
        is_waiting: bool,
        is_new: bool,
    ) -> int:
        """How many places ``workers`` are to fill under ``version``, the newest, if ``pooled``
        groups lie in the buffer."""
        order = self._orders[version]
        is_first = self._seconds is None and now - order.published <= FIRST_SECONDS
        if is_first:
            order.wanted = max(order.wanted, workers)
        elif is_new or is_waiting:
            missing = self._missing(pooled, now, is_waiting)
            if not is_waiting:
                each = self._batch / (self._submission * self._spread)
                missing = each + CORRECTION * (missing - each)
            if missing > 0:
                if now - order.at > order.patience(is_waiting):
                    order.give_up()
                order.add(max(self._boost, order.again) * missing, now)
        if self._seconds is not None and self._boost == order.again == 1:
            # too much by now, if not begun
            surplus = max(0.0, -self._missing(pooled, now, is_waiting))
            order.wanted -= min(surplus, order.coming)
        places = math.ceil(order.wanted / self._brings)
        order.places = max(order.places, places)
        return places

    @property
    def patience(self) -> float:
        """Seconds that the trainer stands still before it holds no worker back any more."""
        return GIVEN_UP * (FIRST_SECONDS if self._seconds is None else self._seconds)

    def still_wanted(self, version: PolicyVersion) -> int:
        """Groups that are ordered under ``version`` and have not come: for people."""
        order = self._orders[version]
        return math.ceil(order.coming * self._submission)

    def _missing(self, pooled: int, now: float, is_waiting: bool) -> float:
        """Submissions that are neither here nor on their way."""
        coming = sum(
            one.coming
            for one in self._orders.values()
            if now - one.at <= one.patience(is_waiting)
        )
        lead = 0.0  # the first is for one step
        if self._step:
            lead = max(1.0, (self._seconds or FIRST_SECONDS) / self._step)
        # at least what this step lacks, though at lag 0 all that is left over goes stale
        steps = min(1 + lead + SPARE, max(1 + SPARE, self._lag + 0.5))
        return (self._batch * steps - pooled) / (self._submission * self._spread) - coming


def _smooth(known: float | None, measured: float) -> float:
    return measured if known is None else known + SMOOTHING * (measured - known)
