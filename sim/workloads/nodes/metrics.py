"""Healths of nodes, and metrics from them: the same on every level."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sim.net.link import MBIT, PAYLOAD_SHARE
from sim.workloads.nodes.deployment import Deployment
from sim.workloads.participants import ORIGIN
from sim.workloads.policies import percentile

PERCENTILES: Final = (50, 90, 99, 100)
"""Shares of the nodes whose times a report names: half, most, and the last."""
COUNTS: Final = (
    "from_origin",
    "from_peers",
    "duplicates",
    "chunks_repaired",
    "chunks_bad",
    "versions_skipped",
)


class HealthLog:
    """`Node.health` of a node over all its lives."""

    def __init__(self) -> None:
        self.zero: float | None = None
        """Wall clock time of the scenario's second 0; known to the origin."""
        self.published: dict[int, float] = {}
        """Wall clock time at which each version went out."""
        self.arrivals: dict[int, float] = {}
        """Wall clock time at which each version was whole here."""
        self.line_bytes = 0
        """Bytes that left the machine, headers included."""
        self._lives: list[Mapping[str, Any]] = []

    def begin_life(self) -> None:
        """Note that another process reports from now on."""
        self._lives.append({})

    def hear(self, health: Mapping[str, Any]) -> None:
        """Take a newer health of the current life."""
        self._lives[-1] = health["shardcast"]
        for role in health["roles"].values():
            self.zero = role.get("zero", self.zero)
            for known, said in ((self.published, "published"), (self.arrivals, "arrivals")):
                for version, wall in role.get(said, ()):
                    known.setdefault(int(version), float(wall))

    @property
    def is_told(self) -> bool:
        """True if the node has said anything in its current life."""
        return bool(self._lives and self._lives[-1])

    @property
    def newest(self) -> int:
        """The newest policy of the current life; -1 if there is none."""
        return int(self._lives[-1].get("newest", -1)) if self._lives else -1

    def total(self, count: str) -> int:
        """Return a counter of `ShardcastStats` over all lives; the last counts of a killed life
        are lost.
        """
        return sum(int(life.get(count, 0)) for life in self._lives)


def seconds_to_whole(
    deployment: Deployment, logs: Mapping[str, HealthLog], alive: Sequence[str], version: int
) -> list[float]:
    """Return the seconds until each present node had ``version`` or a newer version, in order;
    infinite if never."""
    origin = logs[ORIGIN]
    published = origin.published[version]
    delays = []
    for name in deployment.receivers:
        if (
            name in alive
            and (origin.zero or 0.0) + deployment.participant(name).joins <= published
        ):
            came = [when for held, when in logs[name].arrivals.items() if held >= version]
            delays.append(min(came, default=math.inf) - published)
    return sorted(delays)


def measure(
    deployment: Deployment, logs: Mapping[str, HealthLog], alive: Sequence[str]
) -> dict[str, float | int | str]:
    """Return the metrics of one run; ``alive`` are the nodes that live at its end."""
    published = sorted(logs[ORIGIN].published)
    by_version = [seconds_to_whole(deployment, logs, alive, version) for version in published]
    delays = [delay for delays in by_version for delay in delays]
    receivers = [name for name in deployment.receivers if name in alive]
    holders = [name for name in receivers if logs[name].newest >= max(published, default=0)]
    return {
        "hold_newest": round(len(holders) / max(1, len(receivers)), 4),
        "published": len(published),
        "arrived_share": round(sum(map(math.isfinite, delays)) / max(1, len(delays)), 4),
        **{
            f"seconds_{percent}": round(_typical(by_version, percent), 3)
            for percent in PERCENTILES
        },
        "bound_seconds": round(bound_seconds(deployment, receivers), 3),
        **_traffic(deployment, logs),
    }


def _typical(by_version: Sequence[Sequence[float]], percent: int) -> float:
    return statistics.median(
        [percentile(delays, percent) for delays in by_version] or [math.inf]
    )


def bound_seconds(deployment: Deployment, receivers: Sequence[str]) -> float:
    """Return the least seconds in which all nodes can get a policy, headers included (Kumar and
    Ross, HotWeb 2006).
    """
    links = [deployment.participant(name).link for name in receivers]
    origin = deployment.participant(ORIGIN).link.up
    total = origin + sum(link.up for link in links)
    slowest = min((link.down for link in links), default=math.inf)
    megabits = 8 * deployment.policy_bytes / MBIT / PAYLOAD_SHARE
    return megabits * max(1 / origin, 1 / slowest, len(links) / total)


def _traffic(deployment: Deployment, logs: Mapping[str, HealthLog]) -> dict[str, float | int]:
    size = deployment.policy_bytes * max(1, len(logs[ORIGIN].published))
    total = {count: sum(log.total(count) for log in logs.values()) for count in COUNTS}
    relayed = [logs[name].total("uploaded_as_relay") / size for name in deployment.receivers]
    came = max(1, total["from_peers"] + total["from_origin"])
    return {
        "origin_policies_sent": round(logs[ORIGIN].total("uploaded_as_origin") / size, 3),
        "origin_line_policies": round(logs[ORIGIN].line_bytes * PAYLOAD_SHARE / size, 3),
        "upload_median_policies": round(statistics.median(relayed), 3),
        "upload_max_policies": round(max(relayed), 3),
        "from_peers_share": round(total["from_peers"] / came, 4),
        "duplicate_share": round(total["duplicates"] / came, 4),
        "chunks_repaired": total["chunks_repaired"],
        "chunks_bad": total["chunks_bad"],
        "versions_skipped": total["versions_skipped"],
    }
