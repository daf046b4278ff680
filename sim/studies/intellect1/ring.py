"""The ring whose slowest edge is as fast as possible, as PRIME computes it at each change of
members (toposolve).

Exact: the cost of the slowest edge is found by bisection over all costs, and a bitmask program
says whether a ring with no dearer edge exists. A set of possible ends is one integer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

Costs = Sequence[Sequence[float]]
"""Row by row, from one node to another; the diagonal does not count."""


def bottleneck_ring(costs: Costs) -> tuple[float, list[int]]:
    """Return the largest edge cost of the best ring through all nodes, and its order from node
    0.
    """
    size = len(costs)
    if size < 2:
        raise ValueError("a ring has two nodes or more")
    levels = sorted({costs[a][b] for a in range(size) for b in range(size) if a != b})
    best = levels[bisect_left(levels, True, key=lambda most: _ring(costs, most) is not None)]
    order = _ring(costs, best)
    assert order is not None
    return best, order


def _ring(costs: Costs, most: float) -> list[int] | None:
    """Return a ring of edges that cost at most ``most``, or None."""
    size = len(costs)
    into = [
        sum(1 << a for a in range(size) if a != b and costs[a][b] <= most) for b in range(size)
    ]
    ends = [0] * (1 << size)  # of paths from node 0 through exactly these nodes
    ends[1] = 1
    for visited in range(1, 1 << size, 2):
        found = ends[visited]
        if found:
            for node in range(1, size):
                if not visited >> node & 1 and found & into[node]:
                    ends[visited | 1 << node] |= 1 << node
    whole = (1 << size) - 1
    last = ends[whole] & into[0]
    if not last:
        return None
    order, visited = [_lowest(last)], whole
    while order[-1] != 0:
        visited ^= 1 << order[-1]
        order.append(_lowest(ends[visited] & into[order[-1]]))
    return order[::-1]


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1
