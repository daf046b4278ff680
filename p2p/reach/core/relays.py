"""Chooses the relays at which a host that nobody can dial has reservations."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Final

from p2p.bounded import BoundedDict
from p2p.identity import PeerId

WANTED: Final = 2
"""Reservations that a host keeps, so that one is left when a relay dies."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A relay that has answered."""

    peer: PeerId
    network: str
    """Empty on loopback."""
    seconds: float
    """Round trip in seconds."""
    places: int
    """Free reservations according to the relay; 0 if it does not say."""


def rank(candidates: Iterable[Candidate], held: Container[str]) -> list[Candidate]:
    """Return candidates, best first: those in networks other than the ``held`` ones, then the
    near ones, then those with many free places."""
    return sorted(
        candidates,
        key=lambda one: (
            one.network != "" and one.network in held,
            int(one.seconds / 0.03),  # within 30 ms, free places decide
            -one.places,
        ),
    )


class Rests:
    """Rests of relays that were of no use."""

    def __init__(self) -> None:
        self._until: BoundedDict[PeerId, tuple[float, float]] = BoundedDict(1024)
        """End and length of each rest."""

    def failed(self, relay: PeerId, now: float) -> None:
        """Let ``relay`` rest, longer than the last time."""
        # The first rest is 30 s, the longest an hour.
        rest = min(2 * self._until.get(relay, (0.0, 15.0))[1], 3600.0)
        self._until.renew(relay, (now + rest, rest))

    def served(self, relay: PeerId) -> None:
        """Note that ``relay`` has granted a reservation."""
        self._until.pop(relay, None)

    def rests(self, relay: PeerId, now: float) -> bool:
        """Return True while ``relay`` rests."""
        return now < self._until.get(relay, (0.0, 0.0))[0]
