"""What curves looked like so far, in bounded memory.

A curve that is full keeps every other point, and from then on every second of what comes: it
shows the whole run, at half the resolution. A run that goes back (a trainer took up an older
checkpoint) loses what lies ahead of it, as it will be learnt again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from p2p.bounded import BoundedDict

MAX_POINTS: Final = 512
"""Points of one curve: as many as a phone has pixels across, twice over."""
MAX_SERIES: Final = 64
"""Curves of one dashboard: ten of each role in a demo of six nodes. All of them full are 32,768
points: 4 MB here, half a megabyte to a new viewer."""

Point = tuple[float, float]


class Curve:
    """One line."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self._newest: Point | None = None
        """The last one that came, kept or not."""
        self._every = 1
        self._left_out = 0

    def fresh(self, points: Sequence[Point]) -> Sequence[Point]:
        """Those of ``points`` that are not yet here; one that lies behind is a new start."""
        if self._newest is None or not points:
            return points
        if points[-1][0] <= self._newest[0]:
            return () if points[-1] == self._newest else points[-1:]
        return [point for point in points if point[0] > self._newest[0]]

    def add(self, point: Point) -> bool:
        """Whether the point was kept."""
        points, self._newest = self.points, point
        while points and points[-1][0] >= point[0]:
            points.pop()
        self._left_out += 1
        if self._left_out < self._every and points:
            return False
        self._left_out = 0
        points.append(point)
        if len(points) > MAX_POINTS:
            del points[1::2]
            self._every *= 2
        return True


class History:
    """All lines, by the name of their series."""

    def __init__(self) -> None:
        self._curves: BoundedDict[str, Curve] = BoundedDict(MAX_SERIES)

    def note(self, series: str, points: Sequence[Point]) -> list[Point]:
        """Add what is not yet there; returns what was kept of it."""
        curve = self._curves.get(series)
        if curve is None:
            curve = self._curves[series] = Curve()
        return [point for point in curve.fresh(points) if curve.add(point)]

    def curves(self) -> dict[str, list[Point]]:
        """All points, as plain values."""
        return {name: list(curve.points) for name, curve in self._curves.items()}
