"""PRIME's int8 quantiser, to be measured against ours: one scale for all, a mean for each code.

As its C++ has it (``collectives.cpp``, ``compression.cpp``): the scale is six times the root
mean square over 256, codes are clamped at three sigma either way, and each code decodes to the
mean of the values that got it. A heavy tail is cut off, and one NaN spoils all.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from roles.diloco.core.quant import Values


def prime_encode(values: Values) -> tuple[NDArray[np.uint8], Values]:
    """Return codes, and the table in which they are looked up."""
    total = np.sum(np.square(values, dtype=np.float64))
    if not total:
        return np.zeros(values.size, np.uint8), np.zeros(256, np.float32)
    # of one value the original divides by zero: its scale is infinite, its code the middle
    sigma = np.sqrt(total / (values.size - 1)) if values.size > 1 else np.inf
    scaled = values.astype(np.float64) / (6.0 * sigma / 256.0)
    rounded = np.copysign(np.floor(np.abs(scaled) + 0.5), scaled)  # half away from zero
    codes = np.clip(rounded + 128, 0, 255).astype(np.uint8)
    counts = np.bincount(codes, minlength=256)
    sums = np.bincount(codes, weights=values.astype(np.float64), minlength=256)
    return codes, (sums / np.maximum(counts, 1)).astype(np.float32)


def prime_decode(codes: NDArray[np.uint8], table: Values) -> Values:
    """Return the values that codes stand for."""
    decoded: Values = table[codes]
    return decoded
