"""Bounds of the numbers that a run's owner signs.

A run file comes from a stranger, and its numbers size arrays, divide and count loops on every
volunteer's machine: a width of 10^12 or a ramp of 0 must be refused where the document is read,
by name, and not when it is used. The bounds say what makes sense at all; what *this* machine
can bear is `MachineLimits` (`roles.engines.config`).
"""

from __future__ import annotations

from collections.abc import Mapping

Bounds = Mapping[str, tuple[float, float]]
"""Least and largest value of each field. Each number of a tuple is held against them."""


def check_bounds(value: object, bounds: Bounds) -> None:
    """Check ``value``. Raise `ValueError` that names the first field out of bounds,
    not-a-number included."""
    for name, (least, most) in bounds.items():
        held = getattr(value, name)
        for number in held if isinstance(held, tuple) else (held,):
            if not least <= number <= most:
                raise ValueError(
                    f"{name} must be from {least:g} to {most:g}, not {number!r:.40}"
                )
