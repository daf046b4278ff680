"""Latency between machines: seconds one way, by region.

Figures and weights: libp2p/test-plans, gossipsub-interop/network_graph.py (one-way milliseconds
between eight regions, and how many Ethereum nodes were seen in each).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Final

from sim.net.fabric import Endpoint

REGIONS: Final[Mapping[str, int]] = {
    "australia": 290,
    "europe": 5599,
    "east_asia": 1059,
    "west_asia": 161,
    "na_east": 2894,
    "na_west": 1240,
    "south_africa": 47,
    "south_america": 36,
}
"""Maps each region to its weight."""

_MILLISECONDS: Final[Sequence[Sequence[int]]] = (
    (2, 165, 110, 180, 150, 110, 220, 190),
    (165, 2, 125, 60, 70, 110, 95, 140),
    (110, 125, 4, 110, 140, 100, 175, 175),
    (180, 60, 110, 5, 110, 150, 110, 145),
    (150, 70, 140, 110, 2, 60, 130, 100),
    (110, 110, 100, 150, 60, 2, 160, 100),
    (220, 95, 175, 110, 130, 160, 7, 195),
    (190, 140, 175, 145, 100, 100, 195, 7),
)
"""One-way latency between two regions in milliseconds; rows and columns in the order of
`REGIONS`."""

_SECONDS: Final[Mapping[tuple[str, str], float]] = {
    (one, other): _MILLISECONDS[row][column] / 1000
    for row, one in enumerate(REGIONS)
    for column, other in enumerate(REGIONS)
}
"""Maps each pair of regions to its latency in seconds."""


def draw_region(rng: Random) -> str:
    """Return a random region for a new machine, as often as nodes were seen in it."""
    return rng.choices(list(REGIONS), list(REGIONS.values()))[0]


class RegionLatency:
    """Latency by region; machines whose region is not in the table are ``otherwise`` apart."""

    def __init__(self, otherwise: float) -> None:
        self._otherwise = otherwise

    def __call__(self, one: Endpoint, other: Endpoint) -> float:
        """Return the seconds that a byte takes one way."""
        return _SECONDS.get((one.region, other.region), self._otherwise)
