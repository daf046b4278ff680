"""Bounds of the numbers that a run's owner signs.

A run file comes from a stranger, and its numbers size arrays, divide and count loops on every
volunteer's machine: a width of 10^12 or a ramp of 0 must be refused where the document is read,
by name, and not when it is used. The bounds say what makes sense at all; what *this* machine
can bear is `MachineLimits` (`roles.engines.config`).
"""

from __future__ import annotations

from collections.abc import Mapping

Bounds = Mapping[str, tuple[float, float]]
"""By field: the least and the largest value. A tuple of numbers is held against it number by
number."""


def check_bounds(value: object, bounds: Bounds) -> None:
    """Raise `ValueError` naming the first field of ``value`` that is out of bounds,
    not-a-number included."""
    for name, (least, most) in bounds.items():
        held = getattr(value, name)
        for number in held if isinstance(held, tuple) else (held,):
            if not least <= number <= most:
                raise ValueError(
                    f"{name} must be from {least:g} to {most:g}, not {number!r:.40}"
                )
