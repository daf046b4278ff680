"""Parameters of one law that are many: by default a few of them, with ``SHOAL_DEEP=1`` all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final, TypeVar

T = TypeVar("T")

DEEP: Final = os.environ.get("SHOAL_DEEP") == "1"


def swept(values: Sequence[T], usual: int) -> list[T]:
    """All of them in a deep run; otherwise ``usual`` of them, evenly from the whole range."""
    if DEEP:
        return list(values)
    step = len(values) / usual
    return [values[int(place * step)] for place in range(usual)]
