"""INTELLECT-1's sites, and the lines and connections between them.

A TCP connection over the open internet carries so many bits a round trip: with a constant share
of lost packets its rate falls as the round trip grows (Mathis et al.). `CARRIED`, how much that
is, is the only number here that was fitted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

WEIGHTS: Final = 10.2e9
"""Parameters of the trained model, embeddings included."""
PHASE: Final = 38 * 60.0
"""Seconds of a hundred inner steps, published."""
STEP: Final = 10.0
"""Seconds of the outer step on a site's processors: 5 to 10 published."""
LINE: Final = 4000.0
"""Mbit/s of a site's line, the widest published; what the long ways carry is far below."""
CARRIED: Final = 4.85
"""Megabits that one connection carries in a round trip: one number, fitted to the three
published medians together. Mathis has it for one packet lost of some hundred thousand."""
DETOUR: Final = 1.4
"""Times the great circle that a cable takes, on average."""
_LIGHT: Final = 200_000.0
"""Kilometres a second in glass."""
_EARTH: Final = 6371.0
"""Radius of the Earth in kilometres."""


@dataclass(frozen=True, slots=True)
class City:
    """Position of a site, in degrees north and east."""

    name: str
    north: float
    east: float


CITIES: Final = (
    City("dallas", 32.8, -96.8),
    City("kansas city", 39.1, -94.6),
    City("chicago", 41.9, -87.6),
    City("reston", 38.9, -77.3),
    City("denver", 39.7, -105.0),
    City("santa clara", 37.4, -121.9),
    City("los angeles", 34.1, -118.2),
    City("atlanta", 33.7, -84.4),
    City("helsinki", 60.2, 24.9),
    City("paris", 48.9, 2.4),
    City("stockholm", 59.3, 18.1),
    City("london", 51.5, -0.1),
    City("tokyo", 35.7, 139.7),
    City("osaka", 34.7, 135.5),
)
"""Cities in the order in which they join. Five countries and three continents are published;
the cities are ours: eight in the United States, four in Europe, two in Asia."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the run with published figures of its own."""

    name: str
    sites: int
    utilised: float
    """Published share of the time that is computed."""
    reduced: float
    """Published seconds of an all-reduce, the median."""


STAGES: Final = (
    Stage("usa", 8, 0.957, 103.0),
    Stage("usa_europe", 12, 0.856, 382.0),
    Stage("global", 14, 0.830, 469.0),
)


def round_trip(one: City, other: City) -> float:
    """Return the round trip time between two cities, in seconds."""
    a, b = math.radians(one.north), math.radians(other.north)
    turn = math.radians(one.east - other.east)
    angle = math.acos(
        min(1.0, math.sin(a) * math.sin(b) + math.cos(a) * math.cos(b) * math.cos(turn))
    )
    return 2 * DETOUR * _EARTH * angle / _LIGHT


def connection(one: City, other: City) -> float:
    """Return the rate of one connection, in Mbit/s."""
    return min(LINE, CARRIED / max(1e-9, round_trip(one, other)))


def shared_line(site: City, others: Sequence[City]) -> float:
    """Mbit/s of a site that exchanges with all others over a connection each, as if all were as
    slow as the slowest."""
    slowest = min(connection(site, other) for other in others)
    return min(LINE, len(others) * slowest)
