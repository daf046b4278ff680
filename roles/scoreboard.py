"""The demo's live view: one line a node, the learning curve, what the validator thought."""

from __future__ import annotations

from typing import Any

from rich.console import Group as Lines
from rich.table import Table
from rich.text import Text

from roles.summary import SwarmStatus

_SPARK = "▁▂▃▄▅▆▇█"


def sparkline(values: list[float]) -> str:
    """Values from 0 to 1 as little bars."""
    top = len(_SPARK) - 1
    return "".join(_SPARK[round(min(max(value, 0.0), 1.0) * top)] for value in values)


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def draw(status: SwarmStatus, seconds: float) -> Lines:
    """The whole view."""
    trainer = status.trainer
    table = Table()
    for column in ("node", "peer", "policy", "sees", "work", "received", "from peers", "sent on"):
        table.add_column(column, justify="left" if column in {"node", "peer", "work"} else "right")
    for name, node in status.nodes.items():
        table.add_row(*_row(name, node, status))
    return Lines(_headline(trainer, seconds), table, *_verdict_lines(status))


def _headline(trainer: Any, seconds: float) -> Text:
    if not trainer or trainer.get("greedy_start") is None:
        return Text(f"{seconds:4.0f} s  warming up: short lists, supervised …")
    curve = [greedy for _, greedy, _ in trainer["curve"]]
    return Text(
        f"{seconds:4.0f} s  step {trainer['step']}/{trainer['steps']}   "
        f"held-out greedy {trainer['greedy_start']:.2f} → {trainer['greedy']:.2f} {sparkline(curve)}   "
        f"sampled {trainer['reward_start']:.2f} → {trainer['reward']:.2f}   "
        f"staleness ≤ {trainer['staleness_max']}"
    )


def _row(name: str, node: Any, status: SwarmStatus) -> list[str]:
    stats = node["shardcast"]
    received = stats["from_peers"] + stats["from_origin"]
    share = f"{stats['from_peers'] / received:.0%}" if received else "-"
    sent = stats["uploaded_as_origin"] + stats["uploaded_as_relay"]
    return [
        name,
        str(node["peer"])[-6:],
        str(stats["newest"]) if stats["newest"] >= 0 else "-",
        str(node["members"]),
        _work(node["roles"]),
        size(received),
        share,
        size(sent),
    ]


def _work(roles: Any) -> str:
    if "trainer" in roles:
        health = roles["trainer"]
        return f"{health['groups_used']} groups learnt, {health['pooled']} waiting"
    if "validator" in roles:
        health = roles["validator"]
        return f"{health['accepted']} accepted, {health['rejected']} rejected"
    for role in ("inference", "cheat"):
        if role in roles:
            return f"{roles[role]['submitted']} submissions"
    return "relays"


def _verdict_lines(status: SwarmStatus) -> list[Text]:
    honest, cheaters = status.peers_with("inference"), status.peers_with("cheat")
    lines = [
        Text(
            f"honest: {status.judged(honest, 'accepted')} accepted, {status.judged(honest, 'rejected')} "
            f"rejected   cheater: {status.judged(cheaters, 'accepted')} accepted, "
            f"{status.judged(cheaters, 'rejected')} rejected"
        )
    ]
    reasons: dict[str, int] = {}
    for health in status.role("validator"):
        for record in health["nodes"].values():
            for reason, count in record["reasons"].items():
                reasons[reason] = reasons.get(reason, 0) + count
    lines += [Text(f"  {count:5d} × {reason}", style="dim") for reason, count in sorted(reasons.items())]
    return lines
