"""The demo of DiLoCo, ``shoal demo --diloco``: four trainers pre-train one model on text.

The text is the library of this Python. Three trainers begin, the fourth joins while they train,
and one is killed with -9. What is promised: the late one is a member, the killed one is not,
every replica has the same digest at every step, and the loss falls, for a hundredth of the
traffic that averaging gradients would need, or less.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Self

from p2p.node.tables import write_table
from roles.contract import Run
from roles.contract.core.diloco import DilocoTerms
from roles.own.draft import Plan
from roles.own.layout import RunFolder
from roles.own.nodes import LocalNodes
from roles.own.pretraining import TERMS, write_pretraining
from roles.own.rounds import Rounds, finish, furthest, healths_of, members_of, names_of, results

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

DEMO_TERMS: Final = replace(
    TERMS, outer_steps=24, sequences=8, window=64, grace=10.0, patience=30.0, beat=0.5
)


@dataclass(frozen=True, kw_only=True)
class PretrainingDemo(Rounds):
    """A demo with a relay and four trainers, of which one comes late and one is killed."""

    cast: ClassVar[Mapping[str, str]] = {
        "relay-1": "none",
        **dict.fromkeys(TRAINERS, "trainer"),
    }
    memory: ClassVar[int] = 2 << 30
    """Bytes that all processes together need: four workers with torch and a corpus each."""
    disk: ClassVar[int] = 200 << 20

    diloco: DilocoTerms = DEMO_TERMS

    @property
    def steps(self) -> int:
        return self.diloco.outer_steps

    def with_steps(self, steps: int) -> Self:
        """Return the same demo with another number of rounds."""
        return replace(self, diloco=replace(self.diloco, outer_steps=steps))

    def draft(self, seed: int, peers: Mapping[str, str]) -> dict[str, Any]:
        """Return the draft that ``shoal run init --diloco`` writes, for a short run."""
        table = tomllib.loads(write_pretraining(Plan(f"pretraining-{seed}")))
        table["model"]["seed"] = seed
        trainers = [peers[name] for name in TRAINERS]
        return table | {"trainers": trainers, "diloco": write_table(self.diloco)}

    def furnish(self, folder: RunFolder, run: Run) -> None:
        folder.config.write_text("[membership]\ninterval = 1.0\n")

    async def act(
        self, nodes: LocalNodes, look: Callable[[], None], say: Callable[[str], None]
    ) -> None:
        """Play from the start to the last round, with the late trainer and the kill."""
        for name in nodes.cast:
            if name != LATE:
                await nodes.start_child(name)
        is_late_started = is_killed = False
        while not (healths := healths_of(nodes))[TRAINERS[0]].get("done"):
            step = int(furthest(healths).get("step", -1))
            if not is_late_started and step >= LATE_AT:
                is_late_started = True
                await nodes.start_child(LATE)
            is_late_in = LATE in members_of(healths[TRAINERS[0]], names_of(nodes))
            if not is_killed and step >= KILL_AT and is_late_in:
                is_killed = True
                nodes.children[KILLED].kill()
            await nodes.news.wait()
            look()
        await finish(nodes, look)

    def complaints(self, figures: Mapping[str, Any], *, promised: bool) -> Iterator[str]:
        """Yield the broken promises. With fewer rounds than the default nothing is promised."""
        if not promised:
            return
        if KILLED in figures["members_end"]:
            yield f"{KILLED} was killed and is still a member"
        if LATE not in figures["members_end"]:
            yield f"{LATE} came late and is no member"
        if figures["digests_differ"]:
            yield f"replicas differed at {figures['digests_differ']} rounds"
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
        """Yield the result in lines for people."""
        first, *rest = results(figures, self.steps)
        seconds, cpu_seconds = figures["seconds"], figures["cpu_seconds"]
        yield f"{first}, {seconds:.0f} s, {cpu_seconds:.0f} CPU s"
        yield from rest
