"""The demo of DiLoCo, ``shoal demo --diloco``: four trainers pre-train one model on text.

The text is the library of this Python. Three trainers begin, the fourth joins while they train,
and one is killed with -9. What is promised: the late one is a member, the killed one is not,
every replica has the same digest at every step, and the loss falls, for a hundredth of the
traffic that averaging gradients would need, or less.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Self

import trio
from rich.table import Table

from p2p.node.tables import write_table
from roles.contract import Run
from roles.contract.core.diloco import Codec, DilocoTerms
from roles.own.layout import RunFolder
from roles.own.nodes import FINISH_SECONDS, LocalNodes
from roles.own.view import size
from roles.rl.recipes import SORTER
from roles.shared.reasons import printable

Health = Mapping[str, Any]

TRAINERS: Final = ("trainer-1", "trainer-2", "trainer-3", "trainer-4")
LATE: Final = "trainer-4"
"""Starts when the others have taken `LATE_AT` rounds."""
LATE_AT: Final = 2
KILLED: Final = "trainer-2"
"""Killed with -9 when the late one has been a member for a round, and `KILL_AT` are taken."""
KILL_AT: Final = 6
FACTOR: Final = 100.0
"""The least factor by which traffic must be below that of averaging gradients."""
FALL: Final = 1.0
"""Nats a byte by which the loss must fall from the first round to the last."""

SHAPE: Final = replace(SORTER, vocabulary=256, tied=True)
"""115,072 weights; a token is a byte."""
TERMS: Final = DilocoTerms(
    outer_steps=24,
    inner_steps=100,
    sequences=8,
    window=64,
    warmup=150,
    outer_rate=0.9,
    outer_momentum=0.5,
    codec=Codec.INT4,
    grace=10.0,
    patience=30.0,
    beat=0.5,
)

HEADLINE: Final = (
    "{rounds} rounds, {tokens:,} tokens, {weights:,} weights, {seconds:.0f} s,"
    " {cpu_seconds:.0f} CPU s"
)
LOSSES: Final = """\
  held-out loss     {loss_start:.3f} → {loss_end:.3f} nats a byte
  members           {members}; at the end {at_the_end}
  replicas          differed at {digests_differ} steps"""
NO_LOSSES: Final = "  no round was evaluated"
TRAFFIC: Final = """\
  traffic           {sent} sent by all; averaging gradients {data_parallel}, {factor:g} times \
as much
  inner steps       {least:.0%} to {most:.0%} of the time"""


@dataclass(frozen=True, kw_only=True)
class PretrainingDemo:
    """A relay and four trainers, of which one comes late and one is killed."""

    cast: ClassVar[Mapping[str, str]] = {
        "relay-1": "none",
        **dict.fromkeys(TRAINERS, "trainer"),
    }
    memory: ClassVar[int] = 2 << 30
    """Bytes that all processes together need: four workers with torch and a corpus each."""
    disk: ClassVar[int] = 200 << 20

    diloco: DilocoTerms = TERMS

    @property
    def steps(self) -> int:
        return self.diloco.outer_steps

    def with_steps(self, steps: int) -> Self:
        """Return the same demo with another number of rounds."""
        return replace(self, diloco=replace(self.diloco, outer_steps=steps))

    def draft(self, seed: int, peers: Mapping[str, str]) -> dict[str, Any]:
        """Return the draft, which names all trainers."""
        return {
            "name": f"pretraining-{seed}",
            "trainers": [peers[name] for name in TRAINERS],
            "model": {"shape": write_table(SHAPE), "seed": seed},
            "algorithm": "diloco",
            "diloco": write_table(self.diloco),
        }

    def furnish(self, folder: RunFolder, run: Run) -> None:
        """Write the nodes' configuration."""
        folder.config.write_text("[membership]\ninterval = 1.0\n")

    async def act(
        self, nodes: LocalNodes, look: Callable[[], None], say: Callable[[str], None]
    ) -> None:
        """Play from the start to the last round, with the late one and the kill."""
        for name in nodes.cast:
            if name != LATE:
                await nodes.start_child(name)
        is_late_started = is_killed = False
        while not (healths := healths_of(nodes))[TRAINERS[0]].get("done"):
            step = max(int(one.get("step", -1)) for one in healths.values())
            if not is_late_started and step >= LATE_AT:
                is_late_started = True
                await nodes.start_child(LATE)
            is_late_in = LATE in members_of(healths[TRAINERS[0]], names_of(nodes.run))
            if not is_killed and step >= KILL_AT and is_late_in:
                is_killed = True
                nodes.children[KILLED].kill()
            await nodes.news.wait()
            look()
        with trio.move_on_after(FINISH_SECONDS):  # until the members show that they hold it
            while not all(
                one.get("sample")
                for name, one in healths_of(nodes).items()
                if not (is_killed and name == KILLED)
            ):
                await nodes.news.wait()
                look()

    def draw(self, nodes: LocalNodes, seconds: float) -> Table:
        """Return what a terminal shows now."""
        killed = nodes.children[KILLED]
        gone = (KILLED,) if killed.process is not None and not killed.is_alive else ()
        return draw(healths_of(nodes), seconds, self.steps, gone)

    def news(self, nodes: LocalNodes) -> Iterator[tuple[Hashable, str]]:
        """Yield a line for each round that was evaluated."""
        for one in healths_of(nodes)[TRAINERS[0]].get("rounds", ()):
            if one["loss"] is not None:
                yield (
                    one["step"],
                    f"round {one['step']:3d}  loss {one['loss']:.3f}  {one['members']} members,"
                    f" {one['summed']} updates  {one['digest'][:8]}",
                )

    def figures(self, nodes: LocalNodes) -> dict[str, Any]:
        """Return what came of it."""
        return figures(healths_of(nodes), names_of(nodes.run))

    def complaints(self, figures: Mapping[str, Any], *, promised: bool) -> Iterator[str]:
        """Yield what went otherwise than promised, which is nothing for fewer rounds."""
        if not promised:
            return
        if KILLED in figures["members_end"]:
            yield f"{KILLED} was killed and is still a member"
        if LATE not in figures["members_end"]:
            yield f"{LATE} came late and is no member"
        if figures["digests_differ"]:
            yield f"replicas differed at {figures['digests_differ']} steps"
        factor = figures["factor"]
        if factor is None:
            yield "nothing was sent"
        elif factor < FACTOR:
            yield f"traffic is {factor} times less than data parallel's, not {FACTOR:g}"
        if not figures["losses"]:
            yield "no round came to its end, so that no loss is known"
        elif figures["loss_start"] - figures["loss_end"] < FALL:
            yield (
                f"the loss went from {figures['loss_start']:.3f} to {figures['loss_end']:.3f}"
                " only"
            )

    def summary(self, figures: Mapping[str, Any], *, promised: bool) -> Iterator[str]:
        """Yield what came of it, for people."""
        words = {
            **figures,
            "members": " ".join(map(str, figures["members"])),
            "at_the_end": ", ".join(figures["members_end"]),
            "least": min(figures["utilised"]),
            "most": max(figures["utilised"]),
            "sent": size(figures["sent"]),
            "data_parallel": size(figures["data_parallel"]),
        }
        yield HEADLINE.format_map(words)
        yield (LOSSES if figures["losses"] else NO_LOSSES).format_map(words)
        if figures["factor"] is not None:
            yield TRAFFIC.format_map(words)
        if figures["sample"]:
            text = " ".join(printable(figures["sample"]).split())
            yield f"  it writes         def {text}"


def names_of(run: Run) -> dict[str, str]:
    """Return the name of each trainer, by its peer id."""
    return dict(zip(map(str, run.terms.trainers), TRAINERS, strict=True))


def members_of(health: Health, names: Mapping[str, str]) -> list[str]:
    """Return the names of the members that a trainer knows."""
    return [names[peer] for peer in health.get("members") or () if peer in names]


def healths_of(nodes: LocalNodes) -> dict[str, Health]:
    """Return what each trainer last said of its part; empty until it has read the run."""
    found = {}
    for name in TRAINERS:
        status = nodes.children[name].status
        health: Health = {} if status is None else status["roles"].get("trainer", {})
        found[name] = health if health.get("algorithm") == "diloco" else {}
    return found


def figures(healths: Mapping[str, Health], names: Mapping[str, str]) -> dict[str, Any]:
    """Return what came of it, from what the trainers said of themselves."""
    first = healths[TRAINERS[0]]
    rounds = first.get("rounds", [])
    digests: dict[int, set[str]] = {}
    for health in healths.values():
        for one in health.get("rounds", ()):
            digests.setdefault(one["step"], set()).add(one["digest"])
    losses = [one["loss"] for one in rounds if one["loss"] is not None]
    sent = sum(int(health.get("sent", 0)) for health in healths.values())
    steps = sum(int(health.get("inner_steps", 0)) for health in healths.values())
    parallel = 6 * int(first.get("weights", 0)) * steps  # see `draw`
    return {
        "rounds": max(0, first.get("step", 0)),
        "weights": first.get("weights", 0),
        "tokens": sum(int(health.get("tokens", 0)) for health in healths.values()),
        "loss_start": losses[0] if losses else None,
        "loss_end": losses[-1] if losses else None,
        "losses": losses,
        "members": [one["members"] for one in rounds],
        "members_end": members_of(first, names),
        "digests_differ": sum(len(found) > 1 for found in digests.values()),
        "sent": sent,
        "data_parallel": parallel,
        "factor": round(parallel / sent, 1) if sent else None,
        "utilised": [float(health.get("utilised", 0)) for health in healths.values()],
        "sample": first.get("sample", ""),
    }


def draw(
    healths: Mapping[str, Health], seconds: float, rounds: int, killed: tuple[str, ...]
) -> Table:
    """Return a line a trainer. Of data parallel's traffic, which is 6 bytes a weight and step
    in a ring of four (2 * 3/4 * 4 bytes), each sends the share in the column *of DP*."""
    step = max(int(health.get("step", 0)) for health in healths.values())
    title = f"{seconds:4.0f} s   round {max(0, step)} of {rounds}"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("trainer", no_wrap=True)
    for column in ("round", "members", "loss", "training", "sent", "of DP", "computes"):
        table.add_column(column, no_wrap=True, justify="right")
    for name, health in healths.items():
        if name in killed:
            table.add_row(name, "killed")
            continue
        if int(health.get("step", -1)) < 0:
            table.add_row(name, "-")
            continue
        losses = [one["loss"] for one in health["rounds"] if one["loss"] is not None]
        training, sent = health["training_loss"], health["sent"]
        parallel = 6 * int(health["weights"]) * int(health["inner_steps"])
        table.add_row(
            name,
            str(health["step"]),
            str(len(health["members"])),
            f"{losses[-1]:.3f}" if losses else "-",
            f"{training:.3f}" if training else "-",
            size(sent),
            f"1/{parallel / sent:.0f}" if sent else "-",
            f"{health['utilised']:.0%}",
        )
    return table
