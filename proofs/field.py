"""Polynomials over the prime field of TOPLOC, many at a time.

Theory of operation
-------------------
Every element is below 2^16, so a product plus an element fits 32 unsigned bits: all arithmetic
is uint32, which numpy does with vector instructions where 64-bit remainders are one slow
division each. Remainders are spelled x - x // P * P for the same reason: numpy has a vectorised
division by a scalar and no vectorised remainder.

Arrays come in as (polynomials, points) and are turned round inside, so that each of the n^2 / 2
steps of Newton's scheme is a few calls on long contiguous rows, one element per polynomial and
point. Elements of several hundred polynomials stay in the second-level cache; callers bring
about that many.
"""

from __future__ import annotations

from functools import cache
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Elements: TypeAlias = NDArray[np.uint32]
"""Field elements, each below `PRIME`."""

# The package's prime. Every finite bfloat16 pattern is an element (the largest, -3.4e38, is
# 65407). 65496 * 65496 + 65496 < 2^32.
PRIME: Final = 65497


@cache
def _inverses() -> Elements:
    """Return the inverse of each element, with zero for zero. It computes a^(P - 2) by repeated
    squaring, 2 ms once."""
    result = np.ones(PRIME, dtype=np.uint32)
    power = np.arange(PRIME, dtype=np.uint32)
    for bit in range((PRIME - 2).bit_length()):
        if (PRIME - 2) >> bit & 1:
            result = result * power % PRIME
        power = power * power % PRIME
    return result


def _reduce(values: Elements, scratch: Elements, out: Elements) -> None:
    """Write ``values`` mod `PRIME` to ``out``. ``scratch`` has the same size and is
    overwritten."""
    np.floor_divide(values, PRIME, out=scratch)
    np.multiply(scratch, PRIME, out=scratch)
    np.subtract(values, scratch, out=out)


def _divided_differences(points: NDArray[np.intp], values: Elements) -> Elements:
    """Replace ``values`` by Newton's coefficients. Both arrays are (n, polynomials)."""
    inverses = _inverses()
    gaps, numerators, factors = (
        np.empty_like(points),
        np.empty_like(values),
        np.empty_like(values),
    )
    for order in range(1, len(points)):
        rest = len(points) - order
        gap, numerator, factor = gaps[:rest], numerators[:rest], factors[:rest]
        # A difference below zero wraps to the top of uint32; adding P brings exactly those
        # back.
        np.subtract(values[order:], values[order - 1 : -1], out=numerator)
        np.add(numerator, PRIME, out=factor)
        np.minimum(numerator, factor, out=numerator)
        np.subtract(points[order:], points[:rest], out=gap)
        np.take(inverses, gap, out=factor, mode="wrap")
        np.multiply(numerator, factor, out=numerator)
        _reduce(numerator, factor, values[order:])
    return values


def interpolate(x: NDArray[np.integer], y: NDArray[np.integer]) -> Elements:
    """Return the coefficients, constant term first, of the polynomials through the points.

    Both arrays are (polynomials, n). The x of one polynomial must be distinct elements; y is
    taken modulo `PRIME`. The result, (polynomials, n), does not depend on the order of the
    points.
    """
    points = np.ascontiguousarray(x.T, dtype=np.intp)
    newton = np.ascontiguousarray(y.T % PRIME, dtype=np.uint32)
    _divided_differences(points, newton)
    negated = ((PRIME - points) % PRIME).astype(np.uint32)
    result = np.zeros_like(newton)
    products, scratch = np.empty_like(newton), np.empty_like(newton)
    result[:1] = newton[-1:]
    for step in range(len(points) - 2, -1, -1):  # result = result * (x - x_step) + newton_step
        size = len(points) - step
        product = products[:size]
        np.multiply(result[:size], negated[step], out=product)
        np.add(product[1:], result[: size - 1], out=product[1:])
        np.add(product[0], newton[step], out=product[0])
        _reduce(product, scratch[:size], result[:size])
    return np.ascontiguousarray(result.T)


def evaluate(coefficients: NDArray[np.integer], x: NDArray[np.integer]) -> Elements:
    """Return the values of the polynomials (polynomials, n) at the elements (polynomials, k),
    by Horner's rule."""
    terms = np.ascontiguousarray(coefficients.T, dtype=np.uint32)
    points = np.ascontiguousarray(x.T, dtype=np.uint32)
    result = np.zeros_like(points)
    scratch = np.empty_like(points)
    for term in terms[::-1]:
        np.multiply(result, points, out=result)
        np.add(result, term, out=result)
        _reduce(result, scratch, result)
    return np.ascontiguousarray(result.T)
