"""The node's numbers in Prometheus' text format.

As many series at 1,000 peers as at 10: members are counted by role, and only by roles that are
installed here, since others' names are strangers' words. No peer id is a label.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from p2p.node.dashboard.core.picture import Health, SwarmView, find, plain
from p2p.node.entries import installed
from p2p.node.panels import Kind, Panels, Value
from p2p.node.plugins import NO_ROLE, ROLES
from p2p.shardcast.config import ShardcastStats


def write_metrics(view: SwarmView, panels: Panels, viewers: int) -> bytes:
    """Return all series of a node in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Numbers(view, panels, viewers))
    return bytes(generate_latest(registry))


@dataclass(eq=False)
class _Numbers:
    """Collector of one moment's numbers, for prometheus-client."""

    view: SwarmView
    panels: Panels
    viewers: int

    def collect(self) -> Iterator[Metric]:
        """Yield each metric family once."""
        health: Health = next((one.health for one in self.view.known.values()), {})
        yield _gauge("shoal_viewers", "Dashboards that are open.", self.viewers)
        newest = plain(find(health, "shardcast.newest"))
        yield _gauge(
            "shoal_policy_version",
            "Newest policy that is whole here; -1 if none is.",
            -1 if newest is None else newest,
        )
        if self.view.members:
            yield self._members()
        if "connected" in health:
            yield _gauge("shoal_connections", "Peers connected.", health["connected"])
        yield from _moved(health)
        for role, panels in self.panels.items():
            status = find(health, f"roles.{role}")
            if isinstance(status, Mapping):
                scalars = (one for panel in panels for one in panel.values)
                yield from _of_role(role, status, scalars)
                counts = (panel for panel in panels if panel.kind is Kind.COUNTS)
                for panel in counts:
                    yield from _total(role, status, panel.rows, panel.title)

    def _members(self) -> Metric:
        family = GaugeMetricFamily(
            "shoal_members", "Peers that are alive, by role; other for unknown roles.",
            labels=["role"],
        )  # fmt: skip
        counts = dict.fromkeys((*installed(ROLES), "other", NO_ROLE), 0)
        for member in self.view.members.values():
            for role in member.get("roles") or (NO_ROLE,):
                counts[role if role in counts else "other"] += 1
        for role, count in counts.items():
            family.add_metric([role], count)
        return family


def _moved(health: Health) -> Iterator[Metric]:
    """Yield the counters of SHARDCAST that the health contains."""
    stats = find(health, "shardcast")
    known: Health = stats if isinstance(stats, Mapping) else {}
    family = CounterMetricFamily(
        "shoal_policy_bytes", "Bytes of policies moved, by direction.", labels=["direction"]
    )
    for name in ("uploaded_as_origin", "uploaded_as_relay", "from_origin", "from_peers"):
        if name in known:
            family.add_metric([name], _number(known[name]))
    yield family
    for field in fields(ShardcastStats):
        if field.name.startswith(("chunks_", "versions_")) and field.name in known:
            yield CounterMetricFamily(
                f"shoal_policy_{field.name}",
                f"Of SHARDCAST: {field.name.replace('_', ' ')}.",
                value=_number(known[field.name]),
            )


def _of_role(role: str, status: Health, values: Iterator[Value]) -> Iterator[Metric]:
    told = set()
    for value in values:
        number = plain(find(status, value.key))
        if isinstance(number, int | float) and value.key not in told:
            told.add(value.key)
            units = {"bytes": "_bytes", "seconds": "_seconds", "share": "_ratio"}
            unit = units.get(value.unit, "")
            name = f"shoal_{role}_{value.key.replace('.', '_')}"
            name = name if name.endswith(unit) else name + unit
            text = value.about or f"{value.label}."
            kind = CounterMetricFamily if value.counts else GaugeMetricFamily
            yield kind(name, text, value=float(number))


def _total(role: str, status: Health, key: str, title: str) -> Iterator[Metric]:
    rows = find(status, key)
    if isinstance(rows, Mapping):
        name = f"shoal_{role}_{key.replace('.', '_')}"
        yield CounterMetricFamily(name, f"{title}.", value=sum(map(_number, rows.values())))


def _gauge(name: str, text: str, number: object) -> Metric:
    return GaugeMetricFamily(name, text, value=_number(number))


def _number(value: object) -> float:
    number = plain(value)
    return float(number) if isinstance(number, int | float) else 0.0
