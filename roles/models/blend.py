"""Weights of several models as one: by shares, or along the arc between two.

Both are sums of the models' tensors times a number each. For a linear merge the numbers are the
shares. For a spherical one they follow, tensor by tensor, from the angle between the two:
halfway between directions that differ a straight line passes nearer to zero than either end,
the arc does not. Where there is no angle, the arc is the line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

FLAT: Final = 1e-4
"""Radians: below, or as near to the opposite, the quotients of sines would be noise."""
KINDS: Final[dict[str, np.dtype[Any]]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
"""Of each dtype, how its numbers are read; numpy has no BF16, so that comes as bits."""


def shares_of(weights: Sequence[float]) -> tuple[float, ...]:
    """Weights of the models, such that they sum to one. Raises `ValueError`."""
    total = math.fsum(weights)
    if not all(math.isfinite(one) and one >= 0 for one in weights) or not total > 0:
        raise ValueError("weights are zero or more, and some of them are above zero")
    return tuple(one / total for one in weights)


def arc_factors(first: float, second: float, both: float, share: float) -> tuple[float, float]:
    """What two tensors are multiplied by at ``share`` of the arc from one to the other, by
    their squared norms and their product."""
    if not (first > 0 and second > 0):
        return 1 - share, share
    angle = math.acos(max(-1.0, min(1.0, both / math.sqrt(first * second))))
    if angle < FLAT or math.pi - angle < FLAT:
        return 1 - share, share
    sine = math.sin(angle)
    return math.sin((1 - share) * angle) / sine, math.sin(share * angle) / sine


def blended(parts: Sequence[Floats], factors: Sequence[float]) -> Floats:
    """The sum of the parts times their factors, in float32 and this order."""
    total = np.zeros_like(parts[0])
    for part, factor in zip(parts, factors, strict=True):
        total += np.float32(factor) * part
    return total


def read_floats(dtype: str, data: bytes) -> Floats:
    """Numbers of a safetensors dtype as float32."""
    raw: NDArray[Any] = np.frombuffer(data, KINDS[dtype])
    if dtype == "BF16":
        raw = (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    found: Floats = raw.astype(np.float32)
    return found


def write_floats(dtype: str, values: NDArray[Any]) -> bytes:
    """The nearest numbers of a safetensors dtype; half-way, the even one."""
    if dtype == "BF16":
        bits = values.view(np.uint32)
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        values = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    data: bytes = values.astype(KINDS[dtype]).tobytes()
    return data
