"""View of a run that learns from rewards: one line for each node, the learning curve, and
verdicts."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rich.console import Group as Lines
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from p2p.naming import printable
from roles.own.nodes import LocalNodes
from roles.own.pending import pending
from roles.own.status import Doorbell, SwarmStatus

Decode = Callable[[Sequence[int]], str]
"""A function that returns tokens as text."""

CURVE = 36  # newest evaluations that the curve shows: what is left of a line
BANS = 2  # banned workers that are shown: the demo has one cheat
REASONS = 5  # the most frequent reasons for rejection: what is left of 24 lines
QUESTION = 48  # characters of a question or an answer that are shown, its last


@dataclass(frozen=True, kw_only=True)
class Learning:
    """The show of a run that learns from rewards (a `roles.own.stage.Show`)."""

    opening: str
    """Text that is shown until the first evaluation."""
    answers: int = 0
    """Number of answers that are meant for reading."""
    decode: Decode = field(repr=False)

    async def act(
        self, nodes: LocalNodes, look: Callable[[], None], say: Callable[[str], None]
    ) -> None:
        """Start all nodes, invite others, and wait until the run is over."""
        doorbell, told = Doorbell(), set[tuple[str, str]]()

        def seen() -> None:
            for line in doorbell.news(nodes.status):
                say(line)
            changed = set(pending(nodes.folder, nodes.status.learner))
            for _, sentence in sorted(changed - told):
                say(sentence)
            told.clear()
            told.update(changed)
            look()

        await nodes.start()
        say(f"join from another shell: {nodes.join_command}")
        await nodes.wait_done(seen)

    def draw(self, nodes: LocalNodes, seconds: float) -> Lines:
        """Return the lines that a terminal shows now."""
        return draw(nodes.status, seconds, self)

    def news(self, nodes: LocalNodes) -> Iterator[tuple[Hashable, str]]:
        """Yield a line for the newest evaluation, and one for the newest answer."""
        trainer = nodes.status.trainer
        if trainer.get("now") and trainer.get("greedy_start") is None:
            yield ("now", trainer["now"]), trainer["now"]
        if warning := trainer.get("warning"):
            yield ("warning", trainer["step"]), warning
        if editions := nodes.status.editions:
            yield editions, editions
        for step, greedy, sampled in (trainer.get("curve") or [])[-1:]:
            yield step, f"step {step:3d}  held-out greedy {greedy:.3f}  sampled {sampled:.3f}"
        if line := sample_line(trainer, self):
            yield ("sample", trainer["step"]), line


def size(count: float) -> str:
    """Return a number of bytes for people."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def draw(status: SwarmStatus, seconds: float, show: Learning) -> Lines:
    """Return the whole view: at most 78 columns and, without guests, 18 lines, so that 80 x 24
    hold it and the rest."""
    trainer = status.trainer
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("node", "policy", "sees", "work", "received", "by peers", "sent on"):
        justify: Literal["left", "right"] = "left" if column in {"node", "work"} else "right"
        table.add_column(column, justify=justify, no_wrap=True, overflow="ellipsis")
    for name, node in status.nodes.items():
        stats = node["shardcast"]
        received = stats["from_peers"] + stats["from_origin"]
        table.add_row(
            name,
            str(stats["newest"]) if stats["newest"] >= 0 else "-",
            str(node["members"]),
            work_of(node["roles"]),
            size(received),
            f"{stats['from_peers'] / received:.0%}" if received else "-",
            size(stats["uploaded_as_origin"] + stats["uploaded_as_relay"]),
        )
    for guest in status.guests:
        made = f"{guest.accepted} accepted, {guest.rejected} rejected"
        held = str(guest.policy) if guest.policy >= 0 else "-"
        table.add_row(guest.name, held, "", made if "inference" in guest.roles else "relays")
    editions = [Text(status.editions, "yellow")] if status.editions else []
    lines = (*_headlines(trainer, seconds, show), *editions, table, *_verdict_lines(status))
    return Lines(*lines)


def plain(show: Learning, tokens: Sequence[int]) -> str:
    """Return the end of a text on one line, fit for a terminal: models write anything."""
    return printable(" ".join(show.decode(tokens).split())[-QUESTION:])


def sample_line(trainer: Any, show: Learning) -> str:
    """Return one answer of the last step; empty if this show's answers are not for reading."""
    sample = trainer.get("sample")
    if not show.answers or sample is None:
        return ""
    prompt, tokens, reward = sample
    return f"step {trainer['step']}: {plain(show, prompt)} {plain(show, tokens)}  → {reward:g}"


def curve(shares: Sequence[float]) -> str:
    """Return the newest of some numbers from 0 to 1 as bars."""
    return "".join("▁▂▃▄▅▆▇█"[round(share * 7)] for share in shares[-CURVE:])


def gain(figures: dict[str, Any]) -> str:
    """Return the held-out rewards at the start and at the end, in words."""
    if figures["greedy_start"] is None:
        return "no policy was examined"
    return (
        f"greedy {figures['greedy_start']:.3f} → {figures['greedy_end']:.3f},"
        f" sampled {figures['reward_start']:.3f} → {figures['reward_end']:.3f}"
    )


def _headlines(trainer: Any, seconds: float, show: Learning) -> Iterator[Text | Padding]:
    if not trainer or trainer.get("greedy_start") is None:
        yield _line(f"{seconds:4.0f} s  {(trainer or {}).get('now') or show.opening}")
    else:
        if warning := trainer.get("warning"):
            yield Padding(Text(warning, "yellow"), (0, 0, 0, 8))
        learnt = trainer["groups_used"]
        staleness = f"staleness ≤ {trainer['staleness_max']}   " if learnt else ""
        rewards = [min(max(greedy, 0.0), 1.0) for _, greedy, _ in trainer["curve"]]
        yield _line(
            f"{seconds:4.0f} s  step {trainer['step']}/{trainer['steps']}   {staleness}"
            f"{curve(rewards)}"
        )
        yield _line(
            f"        held-out greedy {trainer['greedy_start']:.2f} → {trainer['greedy']:.2f}  "
            f" sampled {trainer['reward_start']:.2f} → {trainer['reward']:.2f}"
        )
    if sample := sample_line(trainer, show):
        yield _line(f"        {sample}", "italic")


def _line(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def work_of(roles: Any) -> str:
    """Return a node's work so far, in a few words."""
    if "trainer" in roles:
        health = roles["trainer"]
        if health.get("algorithm") == "diloco":
            return f"round {health['step']}" if health["step"] >= 0 else "starts"
        if "pooled" not in health:
            return "starts"
        return f"{health['groups_used']} learnt, {health['pooled']} waiting"
    if "validator" in roles:
        health = roles["validator"]
        if not health["accepted"] + health["rejected"]:
            return "no newcomer to judge"
        return f"{health['accepted']} accepted, {health['rejected']} rejected"
    for role in ("inference", "cheat"):
        if role in roles:
            return f"{roles[role]['submitted']} submissions"
    return "relays"


def _verdict_lines(status: SwarmStatus) -> Iterator[Text]:
    def judged(role: str) -> str:
        peers = status.peers_with(role)
        counts = (f"{status.judged(peers, one)} {one}" for one in ("accepted", "rejected"))
        return ", ".join(counts)

    cheats = f"   cheater: {judged('cheat')}" if status.peers_with("cheat") else ""
    yield _line(f"honest: {judged('inference')}{cheats}")
    for name, ban in list(status.bans.items())[:BANS]:
        until = datetime.datetime.fromtimestamp(ban["until"]).astimezone()
        yield _line(
            f"  {name} is banned until {until:%d %b %H:%M}: {printable(ban['reason'])}",
            "yellow",
        )
    reasons: dict[str, int] = {}
    for _, record in status.judgements:
        for reason, count in record["reasons"].items():
            reasons[reason] = reasons.get(reason, 0) + count
    often = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    for reason, count in often[:REASONS]:
        yield _line(f"  {count:5d} × {printable(reason)}", "dim")
