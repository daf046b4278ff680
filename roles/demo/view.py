"""The demo's live view: one line a node, the learning curve, what the validator thought."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any, Final, Literal, Protocol

from rich.console import Group as Lines
from rich.table import Table
from rich.text import Text

from roles.demo.shows import Decode
from roles.demo.status import SwarmStatus
from roles.shared.reasons import printable

CURVE: Final = 36
"""Newest evaluations that the curve shows: what is left of a line."""
BANS: Final = 2
"""Banned workers that are shown: the demo has one cheat."""
REASONS: Final = 5
"""Reasons for rejection that are shown, the most frequent: what is left of 24 lines."""
QUESTION: Final = 48
"""Characters of a question or an answer that are shown, its last."""
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


class Readable(Protocol):
    """What the view must know of what is played; a `roles.demo.shows.Show` is one."""

    @property
    def opening(self) -> str:
        """What is shown until the first evaluation."""
        ...

    @property
    def answers(self) -> int:
        """How many answers are for reading."""
        ...

    @property
    def decode(self) -> Decode:
        """Tokens as text."""
        ...


def draw(status: SwarmStatus, seconds: float, show: Readable) -> Lines:
    """The whole view: at most 78 columns and, without guests, 18 lines, so that 80 x 24 hold it
    and the rest."""
    trainer = status.trainer
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("node", "policy", "sees", "work", "received", "by peers", "sent on"):
        justify: Literal["left", "right"] = "left" if column in {"node", "work"} else "right"
        table.add_column(column, justify=justify, no_wrap=True, overflow="ellipsis")
    for name, node in status.nodes.items():
        table.add_row(*_row(name, node))
    for guest in status.guests:
        made = f"{guest.accepted} accepted, {guest.rejected} rejected"
        held = str(guest.policy) if guest.policy >= 0 else "-"
        table.add_row(guest.name, held, "", made if "inference" in guest.roles else "relays")
    sample = sample_line(trainer, show)
    shown = [_line(f"        {sample}", "italic")] if sample else []
    return Lines(*_headlines(trainer, seconds, show), *shown, table, *_verdict_lines(status))


def plain(show: Readable, tokens: Sequence[int]) -> str:
    """The end of a text on one line, fit for a terminal: models write what they like."""
    return printable(" ".join(show.decode(tokens).split())[-QUESTION:])


def sample_line(trainer: Any, show: Readable) -> str:
    """One answer of the last step, if this show's are for reading; else nothing."""
    sample = trainer.get("sample")
    if not show.answers or sample is None:
        return ""
    prompt, tokens, reward = sample
    return f"step {trainer['step']}: {plain(show, prompt)} {plain(show, tokens)}  → {reward:g}"


def _headlines(trainer: Any, seconds: float, show: Readable) -> list[Text]:
    if not trainer or trainer.get("greedy_start") is None:
        return [_line(f"{seconds:4.0f} s  {show.opening}")]
    curve = [greedy for _, greedy, _ in trainer["curve"]]
    warning = trainer.get("warning")
    return [
        *([_line(f"        {warning}", "yellow")] if warning else []),
        _line(
            f"{seconds:4.0f} s  step {trainer['step']}/{trainer['steps']}   "
            f"{_staleness(trainer)}{sparkline(curve[-CURVE:])}"
        ),
        _line(
            f"        held-out greedy {trainer['greedy_start']:.2f} → {trainer['greedy']:.2f}  "
            f" sampled {trainer['reward_start']:.2f} → {trainer['reward']:.2f}"
        ),
    ]


def _staleness(trainer: Any) -> str:
    """How old the policies were that groups came from, once one was learnt from."""
    return f"staleness ≤ {trainer['staleness_max']}   " if trainer["groups_used"] else ""


def _line(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _row(name: str, node: Any) -> list[str]:
    stats = node["shardcast"]
    received = stats["from_peers"] + stats["from_origin"]
    share = f"{stats['from_peers'] / received:.0%}" if received else "-"
    sent = stats["uploaded_as_origin"] + stats["uploaded_as_relay"]
    return [
        name,
        str(stats["newest"]) if stats["newest"] >= 0 else "-",
        str(node["members"]),
        work_of(node["roles"]),
        size(received),
        share,
        size(sent),
    ]


def work_of(roles: Any) -> str:
    """What a node has done, in a few words."""
    if "trainer" in roles:
        health = roles["trainer"]
        if health.get("algorithm") == "diloco":
            return f"round {health['step']}" if health["step"] >= 0 else "starts"
        if "pooled" not in health:
            return "starts"
        return f"{health['groups_used']} learnt, {health['pooled']} waiting"
    if "validator" in roles:
        health = roles["validator"]
        return f"{health['accepted']} accepted, {health['rejected']} rejected"
    for role in ("inference", "cheat"):
        if role in roles:
            return f"{roles[role]['submitted']} submissions"
    return "relays"


def _ban_line(name: str, ban: Any) -> str:
    """Return who is shut out, until when, and why."""
    until = datetime.datetime.fromtimestamp(ban["until"]).astimezone()
    return f"  {name} is banned until {until:%d %b %H:%M}: {printable(ban['reason'])}"


def _verdict_lines(status: SwarmStatus) -> list[Text]:
    honest, cheaters = status.peers_with("inference"), status.peers_with("cheat")
    cheater = (
        f"   cheater: {status.judged(cheaters, 'accepted')} accepted,"
        f" {status.judged(cheaters, 'rejected')} rejected"
    )
    lines = [
        _line(
            f"honest: {status.judged(honest, 'accepted')} accepted,"
            f" {status.judged(honest, 'rejected')} rejected{cheater if cheaters else ''}"
        )
    ]
    lines += [
        _line(_ban_line(name, ban), "yellow") for name, ban in list(status.bans.items())[:BANS]
    ]
    reasons: dict[str, int] = {}
    for health in (*status.role("validator"), *status.role("trainer")):
        for record in health.get("nodes", {}).values():
            for reason, count in record["reasons"].items():
                reasons[reason] = reasons.get(reason, 0) + count
    often = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    return [
        *lines,
        *(
            _line(f"  {count:5d} × {printable(reason)}", "dim")
            for reason, count in often[:REASONS]
        ),
    ]
