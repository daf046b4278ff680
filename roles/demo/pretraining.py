"""``shoal demo --diloco``: four trainers on this machine pre-train one model on text.

Real processes on loopback, the text is the library of this Python. Three trainers begin, the
fourth joins while they train, and one is killed with -9. What is promised: the late one is a
member, the killed one is not, every replica has the same digest at every step, and the loss
falls, for a hundredth of the traffic that averaging gradients would need, or less.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio
from rich.console import Console
from rich.live import Live
from rich.table import Table

from p2p.concurrency import Notifier
from p2p.machine import load_or_create_key
from roles.contract import Run, Terms
from roles.contract.core.diloco import Algorithm, Codec, DilocoTerms
from roles.contract.core.file import Model
from roles.contract.core.sampling import NO_SAMPLING
from roles.contract.core.shape import ModelShape
from roles.demo.page import on_stage
from roles.demo.processes import (
    HERE,
    RUN_FILE,
    RUN_SECONDS,
    DemoError,
    DemoFaces,
    NodeProcess,
    signed_run,
)
from roles.demo.view import size
from roles.shared.reasons import printable

TRAINERS: Final = ("trainer-1", "trainer-2", "trainer-3", "trainer-4")
LATE: Final = "trainer-4"
"""Starts when the others have taken `LATE_AT` rounds."""
LATE_AT: Final = 2
KILLED: Final = "trainer-2"
"""Killed with -9 when the late one has been a member for a round, and `KILL_AT` are taken."""
KILL_AT: Final = 6
RELAY: Final = "relay-1"
"""The bootstrap peer, which only relays."""
MEMORY: Final = 2 << 30
"""Bytes that all processes together need: four workers with torch and a corpus each."""
DISK: Final = 200 << 20
"""Bytes of the nodes' folders."""
END_SECONDS: Final = 60.0
"""How long after the last round the members may take to show that they hold it."""
FACTOR: Final = 100.0
"""The least factor by which traffic must be below that of averaging gradients."""
FALL: Final = 1.0
"""Nats a byte by which the loss must fall from the first round to the last."""

SHAPE: Final = ModelShape(vocabulary=256, tied=True)
"""115,776 weights; a token is a byte."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainingPlan:
    """What to play."""

    seed: int
    folder: Path
    terms: DilocoTerms = TERMS
    shape: ModelShape = SHAPE
    faces: DemoFaces = HERE


def write_run(plan: PretrainingPlan) -> Run:
    """Make every node's key, and the run file that names the trainers.

    Returns the run. Raises what `roles.demo.processes.signed_run` raises.
    """
    keys = {name: load_or_create_key(plan.folder / name / "key") for name in (RELAY, *TRAINERS)}
    terms = Terms(
        name=f"pretraining-{plan.seed}",
        expiry=int(time.time()) + RUN_SECONDS,  # noqa: TID251 - a command line tool
        environments=(),
        trainers=tuple(keys[name].peer_id for name in TRAINERS),
        validators=(),
        model=Model(shape=plan.shape, seed=plan.seed),
        sampling=NO_SAMPLING,
        algorithm=Algorithm.DILOCO,
        diloco=plan.terms,
    )
    (plan.folder / "node.toml").write_text("[membership]\ninterval = 1.0\n")
    return signed_run(plan.folder, terms)


class PretrainingNodes:
    """The cast at work, inside a nursery that ends with it."""

    def __init__(self, plan: PretrainingPlan, nursery: trio.Nursery) -> None:
        self.plan = plan
        self.children: Mapping[str, NodeProcess] = {
            name: NodeProcess(name, plan.folder) for name in (RELAY, *TRAINERS)
        }
        self.run = write_run(plan)
        self.peers = dict(zip(map(str, self.run.terms.trainers), TRAINERS, strict=True))
        self.killed = False
        self._nursery = nursery
        self._stopping = False
        self._news = Notifier()

    async def start(self, name: str) -> None:
        """Start one of the cast."""
        child = self.children[name]
        arguments = [
            "--role", "none" if name == RELAY else "trainer", "--data", str(child.folder),
            "--listen", "/ip4/127.0.0.1/tcp/0", "--config", str(self.plan.folder / "node.toml"),
            "--json", "--status", "0.5", "--die-with-parent",
        ]  # fmt: skip
        if name == RELAY:
            arguments += ["--run", str(self.plan.folder / RUN_FILE)]
        else:
            greeting = self.children[RELAY].greeting
            assert greeting is not None
            arguments += ["--bootstrap", str(greeting["addrs"][0])]
        process = await child.start(arguments)
        self._nursery.start_soon(self._attend, child, process)
        if name == RELAY:
            await child.wait_greeting()

    async def _attend(self, child: NodeProcess, process: trio.Process) -> None:
        await child.listen(self._news.notify_all)
        code = await process.wait()
        if not self._stopping and code >= 0:
            raise DemoError(
                f"{child.name} ended (exit status {code}); see {child.folder / 'log'}"
            )

    def health(self, name: str) -> Mapping[str, Any]:
        """What a trainer last said of its part; empty until it has read the run."""
        status = self.children[name].status
        found: Mapping[str, Any] = {} if status is None else status["roles"].get("trainer", {})
        return found if found.get("algorithm") == "diloco" else {}

    @property
    def step(self) -> int:
        """The newest that any trainer holds."""
        return max(int(self.health(name).get("step", -1)) for name in TRAINERS)

    async def play(self, show: Callable[[PretrainingNodes], None]) -> None:
        """From the start to the last round, with the late one and the kill."""
        for name in (RELAY, *(one for one in TRAINERS if one != LATE)):
            await self.start(name)
        is_late_started = False
        while not self._is_over():
            await self._news.wait()
            show(self)
            if not is_late_started and self.step >= LATE_AT:
                is_late_started = True
                await self.start(LATE)
            if not self.killed and self.step >= KILL_AT and self._is_late_one_in():
                self.killed = True
                self.children[KILLED].kill()
        with trio.move_on_after(END_SECONDS):
            while not all(self.health(name).get("sample") for name in self.survivors):
                await self._news.wait()
                show(self)

    @property
    def survivors(self) -> list[str]:
        """Trainers that are to be members at the end."""
        return [name for name in TRAINERS if not (self.killed and name == KILLED)]

    def _is_late_one_in(self) -> bool:
        members = self.health(TRAINERS[0]).get("members") or []
        return any(self.peers.get(peer) == LATE for peer in members)

    def _is_over(self) -> bool:
        return bool(self.health(TRAINERS[0]).get("done"))

    async def stop(self) -> None:
        """End all."""
        self._stopping = True
        async with trio.open_nursery() as nursery:
            for child in self.children.values():
                nursery.start_soon(child.stop)


async def play(plan: PretrainingPlan, console: Console) -> dict[str, Any]:
    """Play once; returns the figures, also of a play that ended early.

    Raises what `roles.demo.page.on_stage` raises.
    """
    began = time.monotonic()  # noqa: TID251 - a command line tool, outside every world

    async def act(nodes: PretrainingNodes, invitation: str) -> None:
        with _live(console, began) as live:
            console.print(invitation, soft_wrap=True, markup=False)
            await nodes.play(live)

    played = await on_stage(partial(PretrainingNodes, plan), act, plan.faces)
    seconds = time.monotonic() - began  # noqa: TID251
    return {
        **figures(played.cast),
        "ended": played.trouble,
        "seed": plan.seed,
        "seconds": round(seconds, 1),
        "report": str(played.report),
    }


def figures(nodes: PretrainingNodes) -> dict[str, Any]:
    """What came of it, from what the trainers said of themselves."""
    healths = {name: nodes.health(name) for name in TRAINERS}
    first = healths[TRAINERS[0]]
    rounds = first.get("rounds", [])
    digests: dict[int, set[str]] = {}
    for health in healths.values():
        for one in health.get("rounds", ()):
            digests.setdefault(one["step"], set()).add(one["digest"])
    losses = [one["loss"] for one in rounds if one["loss"] is not None]
    sent = sum(int(health.get("sent", 0)) for health in healths.values())
    steps = sum(int(health.get("inner_steps", 0)) for health in healths.values())
    parallel = 2 * 3 / 4 * 4 * int(first.get("weights", 0)) * steps
    utilised = [float(health.get("utilised", 0)) for health in healths.values()]
    return {
        "rounds": max(0, first.get("step", 0)),
        "weights": first.get("weights", 0),
        "tokens": sum(int(health.get("tokens", 0)) for health in healths.values()),
        "loss_start": losses[0] if losses else None,
        "loss_end": losses[-1] if losses else None,
        "losses": losses,
        "members": [one["members"] for one in rounds],
        "members_end": [nodes.peers[peer] for peer in first.get("members", [])],
        "digests_differ": sum(len(found) > 1 for found in digests.values()),
        "sent": sent,
        "data_parallel": parallel,
        "factor": round(parallel / sent, 1) if sent else None,
        "utilised": utilised,
        "sample": first.get("sample", ""),
    }


def complaints(found: Mapping[str, Any]) -> Iterator[str]:
    """What went otherwise than promised."""
    if KILLED in found["members_end"]:
        yield f"{KILLED} was killed and is still a member"
    if LATE not in found["members_end"]:
        yield f"{LATE} came late and is no member"
    if found["digests_differ"]:
        yield f"replicas differed at {found['digests_differ']} steps"
    if found["factor"] is None:
        yield "nothing was sent"
    elif found["factor"] < FACTOR:
        yield f"traffic is {found['factor']} times less than data parallel's, not {FACTOR:g}"
    if not found["losses"]:
        yield "no round came to its end, so that no loss is known"
    elif found["loss_start"] - found["loss_end"] < FALL:
        yield f"the loss went from {found['loss_start']:.3f} to {found['loss_end']:.3f} only"


def report(console: Console, found: Mapping[str, Any], failures: list[str]) -> None:
    """The summary for people."""
    lines = [
        f"\n{found['rounds']} rounds, {found['tokens']:,} tokens, {found['weights']:,} weights,"
        f" {found['seconds']:.0f} s, {found['cpu_seconds']:.0f} CPU s"
    ]
    if found["losses"]:
        lines += [
            f"  held-out loss     {found['loss_start']:.3f} → {found['loss_end']:.3f} nats a"
            " byte",
            f"  members           {' '.join(map(str, found['members']))}; at the end"
            f" {', '.join(found['members_end'])}",
            f"  replicas          differed at {found['digests_differ']} steps",
        ]
    else:
        lines.append("  no round was evaluated")
    if found["factor"] is not None:
        lines += [
            f"  traffic           {size(found['sent'])} sent by all; averaging gradients"
            f" {size(found['data_parallel'])}, {found['factor']:g} times as much",
            f"  inner steps       {min(found['utilised']):.0%} to"
            f" {max(found['utilised']):.0%} of the time",
        ]
    if found["sample"]:
        lines.append(f"  it writes         def {' '.join(printable(found['sample']).split())}")
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
    for failure in failures:
        console.print(f"[red]not as promised: {failure}[/red]", soft_wrap=True)


@contextlib.contextmanager
def _live(console: Console, began: float) -> Iterator[Callable[[PretrainingNodes], None]]:
    """A function that shows the swarm: redrawn on a terminal, a line a round elsewhere."""

    def seconds() -> float:
        return time.monotonic() - began  # noqa: TID251

    if console.is_terminal:
        with Live(console=console, refresh_per_second=4) as live:
            yield lambda nodes: live.update(draw(nodes, seconds()))
        return
    shown: list[int] = []

    def tell(nodes: PretrainingNodes) -> None:
        for one in nodes.health(TRAINERS[0]).get("rounds", ()):
            if one["step"] not in shown and one["loss"] is not None:
                shown.append(one["step"])
                console.print(
                    f"{seconds():5.0f} s  round {one['step']:3d}  loss {one['loss']:.3f} "
                    f" {one['members']} members, {one['summed']} updates  {one['digest'][:8]}",
                    highlight=False,
                )

    yield tell


def draw(nodes: PretrainingNodes, seconds: float) -> Table:
    """A line a trainer."""
    title = f"{seconds:4.0f} s   round {max(0, nodes.step)} of {nodes.plan.terms.outer_steps}"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for column in (
        "trainer",
        "round",
        "members",
        "loss",
        "training",
        "sent",
        "of DP",
        "computes",
    ):
        table.add_column(
            column, no_wrap=True, justify="left" if column == "trainer" else "right"
        )
    for name in TRAINERS:
        table.add_row(*_row(nodes, name))
    return table


def _row(nodes: PretrainingNodes, name: str) -> list[str]:
    health = nodes.health(name)
    if nodes.killed and name == KILLED:
        return [name, "killed", *[""] * 6]
    if not health or int(health.get("step", -1)) < 0:
        return [name, "-", *[""] * 6]
    losses = [one["loss"] for one in health["rounds"] if one["loss"] is not None]
    training = health["training_loss"]
    parallel = 6 * int(health["weights"]) * int(health["inner_steps"])
    return [
        name,
        str(health["step"]),
        str(len(health["members"])),
        f"{losses[-1]:.3f}" if losses else "-",
        f"{training:.3f}" if training else "-",
        size(health["sent"]),
        f"1/{parallel / health['sent']:.0f}" if health["sent"] else "-",
        f"{health['utilised']:.0%}",
    ]


def with_rounds(plan: PretrainingPlan, rounds: int | None) -> PretrainingPlan:
    """The plan with another number of rounds, if one is asked for."""
    if rounds is None:
        return plan
    return replace(plan, terms=replace(plan.terms, outer_steps=rounds))
