"""View of a run that pre-trains by DiLoCo: a line for each trainer, the held-out loss, a text
of the model, and the traffic."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import trio
from rich.console import Group as Lines
from rich.table import Table
from rich.text import Text

from p2p.naming import printable
from roles.own.layout import TRAINER
from roles.own.nodes import FINISH_SECONDS, LocalNodes
from roles.own.view import curve, size

Health = Mapping[str, Any]

WRITTEN = 300
"""Characters of a sample that are shown: four lines of a terminal."""

WIDE = 28
"""Rounds whose loss is drawn: what is left of a line."""


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """The show of a run of DiLoCo (a `roles.own.stage.Show`)."""

    async def act(
        self, nodes: LocalNodes, look: Callable[[], None], say: Callable[[str], None]
    ) -> None:
        """Start all nodes, and wait until each that lives has the last round's model."""
        await nodes.start()
        while not any(one.get("done") for one in healths_of(nodes).values()):
            await nodes.news.wait()
            look()
        await finish(nodes, look)

    def draw(self, nodes: LocalNodes, seconds: float) -> Lines:
        """Return the lines that a terminal shows now."""
        rounds = nodes.run.terms.diloco.outer_steps
        drawn = draw(healths_of(nodes), seconds, rounds, gone_of(nodes))
        editions = nodes.status.editions
        return Lines(Text(editions, "yellow"), drawn) if editions else drawn

    def news(self, nodes: LocalNodes) -> Iterator[tuple[Hashable, str]]:
        """Yield a line for each round that was evaluated, and for each sample."""
        for one in rounds_of(healths_of(nodes)):
            if one["loss"] is not None:
                yield (
                    one["step"],
                    f"round {one['step']:3d}  loss {one['loss']:.3f}  {one['members']} members,"
                    f" {one['summed']} updates  {one['digest'][:8]}",
                )
            if one["sample"]:
                text = f"round {one['step']:3d}  it writes: {_written(one['sample'])}"
                yield ("sample", one["step"]), text

    def figures(self, nodes: LocalNodes) -> dict[str, Any]:
        """Return the figures of the result."""
        return figures(healths_of(nodes), names_of(nodes))


async def finish(nodes: LocalNodes, look: Callable[[], None]) -> None:
    """Return when each trainer that lives has exported the last round's model."""
    with trio.move_on_after(FINISH_SECONDS):
        while not all(
            one.get("finished")
            for name, one in healths_of(nodes).items()
            if nodes.children[name].is_alive
        ):
            await nodes.news.wait()
            look()


def names_of(nodes: LocalNodes) -> dict[str, str]:
    """Return the name of each local node that has reported a status, keyed by peer id."""
    found = {}
    for name, child in nodes.children.items():
        if child.status is not None:
            found[str(child.status["peer"])] = name
    return found


def members_of(health: Health, names: Mapping[str, str]) -> list[str]:
    """Return a name for each member that a trainer knows: the local node's name, or the end of
    the peer id."""
    return [names.get(peer, f"…{peer[-6:]}") for peer in health.get("members") or ()]


def gone_of(nodes: LocalNodes) -> list[str]:
    """Return the trainers that were started and have ended."""
    return [
        name
        for name, child in nodes.children.items()
        if child.process is not None and not child.is_alive
    ]


def healths_of(nodes: LocalNodes) -> dict[str, Health]:
    """Return the last health of each trainer's role; empty until it has read the run."""
    found = {}
    for name in (name for name, role in nodes.cast.items() if role == TRAINER):
        status = nodes.children[name].status
        health: Health = {} if status is None else status["roles"].get(TRAINER, {})
        found[name] = health if health.get("algorithm") == "diloco" else {}
    return found


def furthest(healths: Mapping[str, Health]) -> Health:
    """Return the health of the trainer that has taken the most rounds."""
    return max(healths.values(), key=lambda one: int(one.get("step", -1)))


def rounds_of(healths: Mapping[str, Health]) -> list[dict[str, Any]]:
    """Return the figures of each round, from the first trainer that has measured or heard
    them."""
    found: dict[int, dict[str, Any]] = {}
    for health in healths.values():
        for one in health.get("rounds", ()):
            known = found.setdefault(one["step"], {"sample": "", **one})
            for key in ("loss", "sample"):
                known[key] = known[key] or one.get(key)
    return [found[step] for step in sorted(found)]


def figures(healths: Mapping[str, Health], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the figures of the result, from the trainers' healths."""
    last, rounds = furthest(healths), rounds_of(healths)
    digests: dict[int, set[str]] = {}
    for health in healths.values():
        for one in health.get("rounds", ()):
            digests.setdefault(one["step"], set()).add(one["digest"])
    losses = [one["loss"] for one in rounds if one["loss"] is not None]
    sent = sum(int(health.get("sent", 0)) for health in healths.values())
    steps = sum(int(health.get("inner_steps", 0)) for health in healths.values())
    parallel = _parallel(len(healths), int(last.get("weights", 0)), steps)
    return {
        "rounds": max(0, last.get("step", 0)),
        "weights": last.get("weights", 0),
        "tokens": sum(int(health.get("tokens", 0)) for health in healths.values()),
        "loss_start": losses[0] if losses else None,
        "loss_end": losses[-1] if losses else None,
        "losses": losses,
        "members": [one["members"] for one in rounds],
        "members_end": members_of(last, names),
        "digests_differ": sum(len(found) > 1 for found in digests.values()),
        "sent": sent,
        "data_parallel": parallel,
        "factor": round(parallel / sent, 1) if sent else None,
        "utilised": [float(health.get("utilised", 0)) for health in healths.values()],
        "prompt": last.get("prompt", ""),
        "sample": last.get("sample", ""),
    }


def _parallel(trainers: int, weights: int, steps: int) -> int:
    """Return the bytes that averaging gradients in a ring sends for so many inner steps: 2 (n -
    1) / n values of 4 bytes a weight, step and trainer."""
    return round(8 * (trainers - 1) / max(1, trainers) * weights * steps)


def results(figures: Mapping[str, Any], rounds: int) -> Iterator[str]:
    """Yield the result in lines for people."""
    yield (
        f"{figures['rounds']} of {rounds} rounds, {figures['tokens']:,} tokens,"
        f" {figures['weights']:,} weights"
    )
    if not figures["losses"]:
        yield "  no round was evaluated"
    else:
        losses = f"{figures['loss_start']:.3f} → {figures['loss_end']:.3f}"
        yield f"  held-out loss     {losses} nats a token"
        runs = [(members, len(list(same))) for members, same in groupby(figures["members"])]
        spans = (f"{members} for {count}" for members, count in runs)
        yield f"  members           {', '.join(spans)} rounds"
        yield f"  at the end        {', '.join(figures['members_end'])}"
        yield f"  replicas          differed at {figures['digests_differ']} rounds"
    if figures["factor"] is not None:
        yield (
            f"  traffic           {size(figures['sent'])} sent by all; averaging gradients"
            f" {size(figures['data_parallel'])}, {figures['factor']:g} times as much"
        )
        least, most = min(figures["utilised"]), max(figures["utilised"])
        yield f"  inner steps       {least:.0%} to {most:.0%} of the time"
    if figures["sample"]:
        yield f"  it goes on        {_written(figures['prompt'])}"
        yield f"  with              {_written(figures['sample'])}"


def _written(text: str) -> str:
    return printable(" ".join(text.split()))


def draw(healths: Mapping[str, Health], seconds: float, rounds: int, gone: list[str]) -> Lines:
    """Return the whole view: a line for each trainer, and a text that the model writes. Of data
    parallel's traffic each trainer sends the share in the column *of DP*."""
    last = furthest(healths)
    step, losses = int(last.get("step", -1)), [
        one["loss"] for one in rounds_of(healths) if one["loss"] is not None
    ]  # fmt: skip
    head = f"{seconds:4.0f} s   round {max(0, step)}/{rounds}"
    if step < 0:
        head += "   the trainers read their text and find each other …"
    elif losses:
        high, low = max(losses), min(losses)
        shares = [(one - low) / (high - low) if high > low else 0.0 for one in losses]
        head += f"   held-out loss {losses[0]:.2f} → {losses[-1]:.2f}   {curve(shares[-WIDE:])}"
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("trainer", no_wrap=True)
    for column in ("round", "members", "loss", "training", "sent", "of DP", "computes"):
        table.add_column(column, no_wrap=True, justify="right")
    for name, health in healths.items():
        if name in gone:
            table.add_row(name, "killed")
            continue
        if int(health.get("step", -1)) < 0:
            table.add_row(name, "-")
            continue
        own = [one["loss"] for one in health["rounds"] if one["loss"] is not None]
        training, sent = health["training_loss"], health["sent"]
        parallel = _parallel(len(healths), int(health["weights"]), int(health["inner_steps"]))
        table.add_row(
            name,
            str(health["step"]),
            str(len(health["members"])),
            f"{own[-1]:.3f}" if own else "-",
            f"{training:.3f}" if training else "-",
            size(sent),
            f"1/{parallel / sent:.0f}" if sent and parallel else "-",
            f"{health['utilised']:.0%}",
        )
    lines: list[Text | Table] = [Text(head, no_wrap=True, overflow="ellipsis"), table]
    if last.get("sample"):
        prompt = _written(last.get("prompt", ""))
        text = Text(f"{prompt} ", style="dim")
        lines.append(text.append(_written(last["sample"])[:WRITTEN], style="not dim italic"))
    return Lines(*lines)
