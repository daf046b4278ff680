"""Chooses the relays at which a host that nobody can dial has reservations."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Final

from p2p.bounded import BoundedDict
from p2p.identity import PeerId

WANTED: Final = 2
"""Reservations that a host keeps: when a relay dies, the other holds the door meanwhile."""
MAX_ASKED: Final = 8
"""Relays whose round trips are measured for one choice."""
STEP: Final = 0.03
"""Seconds: round trips that differ by less are equal, and the free places decide."""
FIRST_REST: Final = 30.0
LONGEST_REST: Final = 3600.0
"""Seconds for which a relay that was of no use is left alone, twice as long each time."""
_MAX_RESTING: Final = 1024


@dataclass(frozen=True, slots=True)
class Candidate:
    """A relay that has answered."""

    peer: PeerId
    network: str
    """Empty on loopback."""
    seconds: float
    """Its round trip."""
    places: int
    """Reservations that it has left, as it says; 0 if it does not say."""


def rank(candidates: Iterable[Candidate], held: Container[str]) -> list[Candidate]:
    """Return candidates, best first: those in networks other than the ``held`` ones, then the
    near ones, then those with many free places."""
    return sorted(
        candidates,
        key=lambda one: (
            one.network != "" and one.network in held,
            int(one.seconds / STEP),
            -one.places,
        ),
    )


class Rests:
    """Relays that were of no use, and until when each is left alone."""

    def __init__(self) -> None:
        self._until: BoundedDict[PeerId, tuple[float, float]] = BoundedDict(_MAX_RESTING)
        """End of the rest, and its length."""

    def failed(self, relay: PeerId, now: float) -> None:
        """Leave ``relay`` alone, for longer than the last time."""
        rest = min(2 * self._until.get(relay, (0.0, FIRST_REST / 2))[1], LONGEST_REST)
        self._until.renew(relay, (now + rest, rest))

    def served(self, relay: PeerId) -> None:
        """``relay`` has granted a reservation."""
        self._until.pop(relay, None)

    def rests(self, relay: PeerId, now: float) -> bool:
        """Return True if ``relay`` is to be left alone now."""
        return now < self._until.get(relay, (0.0, 0.0))[0]
