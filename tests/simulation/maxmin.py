"""Exact max-min fair sharing of access links, as a fluid: the oracle for the FIFO link model. Exponentially
dearer in a mesh, exact on trees, and independent of everything in sim/."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

PAYLOAD = 1448 / 1514


@dataclass
class Line:
    up: float
    down: float
    """Mbit/s."""


@dataclass
class Topology:
    lines: dict[str, Line]
    feeds: list[tuple[str, str]]
    """(parent, child), parents first; the first parent has everything."""
    chunks: int = 32
    chunk_bytes: int = 256 * 1024


@dataclass
class _Flow:
    parent: str
    child: str
    next_chunk: int = 0
    left: float = 0.0
    rate: float = 0.0


@dataclass
class _State:
    have: dict[str, int] = field(default_factory=dict)
    done: dict[str, float] = field(default_factory=dict)


def finish_times(topology: Topology) -> dict[str, float]:
    """Seconds until each node has every chunk, each forwarded once it is whole."""
    root = topology.feeds[0][0]
    state = _State({name: 0 for name in topology.lines})
    state.have[root] = topology.chunks
    flows = [_Flow(parent, child) for parent, child in topology.feeds]
    now = 0.0
    while len(state.done) < len(topology.lines) - 1:
        active = []
        for flow in flows:
            if flow.left <= 0 and flow.next_chunk < state.have[flow.parent]:
                flow.left = float(topology.chunk_bytes)
                flow.next_chunk += 1
            if flow.left > 0:
                active.append(flow)
        _share(active, topology.lines)
        step = min(flow.left / flow.rate for flow in active)
        now += step
        for flow in active:
            flow.left -= flow.rate * step
            if flow.left < 1e-6:
                flow.left = 0.0
                state.have[flow.child] += 1
                if state.have[flow.child] == topology.chunks:
                    state.done[flow.child] = now
    return state.done


def _share(flows: list[_Flow], lines: dict[str, Line]) -> None:
    """Progressive filling: raise all rates alike; freeze those whose line is full."""
    capacity = {}
    for name, line in lines.items():
        capacity[name, "up"] = line.up * 1e6 / 8 * PAYLOAD
        capacity[name, "down"] = line.down * 1e6 / 8 * PAYLOAD
    users: dict[tuple[str, str], list[_Flow]] = {}
    for flow in flows:
        flow.rate = 0.0
        users.setdefault((flow.parent, "up"), []).append(flow)
        users.setdefault((flow.child, "down"), []).append(flow)
    frozen: list[_Flow] = []
    while len(frozen) < len(flows):
        best, link = math.inf, None
        for key, sharing in users.items():
            free = [flow for flow in sharing if flow not in frozen]
            if free:
                fair = (capacity[key] - sum(flow.rate for flow in sharing if flow in frozen)) / len(free)
                if fair < best:
                    best, link = fair, key
        assert link is not None
        for flow in users[link]:
            if flow not in frozen:
                flow.rate = best
                frozen.append(flow)
