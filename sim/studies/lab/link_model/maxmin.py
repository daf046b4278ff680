"""Exact max-min fair sharing of access links: an oracle for tests, too slow for large swarms.

Theory of operation
-------------------
Every flow uses its sender's upload and its receiver's download. Rates are max-min fair: no flow
can get more without taking from one that has no more than it. They are found by progressive
filling: the link with the least left per flow is full first, its flows keep that share, and the
rest is shared again.

`broadcast_times` lets a file flow down a tree as a fluid, chunk by chunk: a flow is active
while its sender holds a whole chunk that its receiver lacks, and rates are solved anew whenever
a chunk is complete. That is what perfect congestion control would do, without acks, windows and
queues, and what `sim.net.link` is held against where there are no real links.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sim.net.link import LinkSpec, cost_per_byte

_ROUNDING = 1e-9
"""Share of a chunk below which the rest is rounding error."""


@dataclass(frozen=True, slots=True)
class Flow:
    """Bytes on their way from one machine's uplink to another's downlink."""

    src: str
    dst: str


def fair_rates(
    flows: Sequence[Flow], up: Mapping[str, float], down: Mapping[str, float]
) -> list[float]:
    """Return the max-min fair rate of each flow, in the unit of the capacities ``up`` and
    ``down``.
    """
    rates = [math.inf] * len(flows)
    links = _links(flows, up, down)
    left = [capacity for capacity, _ in links]
    waiting = [dict.fromkeys(users) for _, users in links]
    while any(waiting):
        share, tightest = min(
            (left[i] / len(users), i) for i, users in enumerate(waiting) if users
        )
        for flow in list(waiting[tightest]):
            rates[flow] = share
            for i, users in enumerate(waiting):
                if flow in users:
                    del users[flow]
                    left[i] = max(0.0, left[i] - share)
    return rates


def _links(
    flows: Sequence[Flow], up: Mapping[str, float], down: Mapping[str, float]
) -> list[tuple[float, list[int]]]:
    """Return every link in use: its capacity, and the numbers of its flows."""
    senders: dict[str, list[int]] = {}
    receivers: dict[str, list[int]] = {}
    for number, flow in enumerate(flows):
        senders.setdefault(flow.src, []).append(number)
        receivers.setdefault(flow.dst, []).append(number)
    uplinks = [(up[name], users) for name, users in senders.items()]
    return uplinks + [(down[name], users) for name, users in receivers.items()]


def broadcast_times(
    parents: Mapping[str, str | None],
    links: Mapping[str, LinkSpec],
    chunks: int,
    chunk_bytes: int,
) -> dict[str, float]:
    """Seconds until each machine holds all ``chunks`` that the roots (parent None) have from
    the start."""
    up = {name: 1e9 / cost_per_byte(link.up) for name, link in links.items()}
    down = {name: 1e9 / cost_per_byte(link.down) for name, link in links.items()}
    flows = [Flow(parent, name) for name, parent in parents.items() if parent is not None]
    held = {name: chunks if parent is None else 0 for name, parent in parents.items()}
    left = dict.fromkeys(flows, float(chunk_bytes))
    times = {name: 0.0 for name, parent in parents.items() if parent is None}
    now = 0.0
    while active := [flow for flow in flows if held[flow.src] > held[flow.dst]]:
        rates = fair_rates(active, up, down)
        step = min(left[flow] / rate for flow, rate in zip(active, rates, strict=True))
        now += step
        for flow, rate in zip(active, rates, strict=True):
            left[flow] -= rate * step
        for flow in active:
            if left[flow] <= _ROUNDING * chunk_bytes:
                left[flow] = float(chunk_bytes)
                held[flow.dst] += 1
                if held[flow.dst] == chunks:
                    times[flow.dst] = now
    return times
