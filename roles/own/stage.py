"""The stage of a run's nodes: shown in a terminal and on a page, and ended in order.

The page is made of what the nodes say of themselves (`roles.own.nodes`). What a node's own page
cannot know is here: names, and who was killed.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import trio
from rich.console import Console, RenderableType
from rich.live import Live

from p2p.concurrency import leaves
from p2p.errors import ConfigError, ShoalError, StorageError
from p2p.machine import open_world
from p2p.node.dashboard.core.picture import NodeView, SwarmView
from p2p.node.dashboard.page import write_report
from p2p.node.dashboard.server import Dashboard
from p2p.node.dashboard.snapshots import Snapshots
from p2p.node.entries import installed
from p2p.node.panels import PANELS, load_panels
from p2p.node.process import told_by_signals
from p2p.node.usage import ignore_interrupts, is_interrupt
from roles.own.nodes import LocalNodes
from roles.own.pending import pending
from roles.own.view import work_of

INTERRUPTED: Final = "interrupted"
"""End of a play that Ctrl-C or SIGTERM has ended."""


class Show(Protocol):
    """A play of several nodes, and the view of it for people."""

    async def act(
        self, nodes: LocalNodes, look: Callable[[], None], say: Callable[[str], None]
    ) -> None:
        """Start the nodes, and return when the show is over. Call ``look`` at each news of a
        node."""
        ...

    def draw(self, nodes: LocalNodes, seconds: float) -> RenderableType:
        """Return the lines that a terminal shows now."""
        ...

    def news(self, nodes: LocalNodes) -> Iterator[tuple[Hashable, str]]:
        """Yield lines for a pipe with their keys. A line with a known key is not printed
        again."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The place where a play is shown."""

    console: Console
    address: tuple[str, int]
    """Address of the page."""
    report: Path | None = None
    """File for the page at the end; None: one among the temporary files."""
    command: str
    """The command line, for a reader of the page."""

    def say(self, text: str, style: str = "") -> None:
        """Print a line for people."""
        self.console.print(text, style=style, soft_wrap=True, markup=False, highlight=False)


@dataclass(frozen=True, slots=True)
class Played:
    """A play that is over."""

    nodes: LocalNodes
    """The nodes. They have ended; their last statuses are still there."""
    report: Path
    """The page, as a file."""
    trouble: str
    """Why it ended before its end: `INTERRUPTED`, or what failed; empty if it did not."""
    seconds: float

    @property
    def is_interrupted(self) -> bool:
        return self.trouble == INTERRUPTED


def play(show: Show, make: Callable[[trio.Nursery], LocalNodes], stage: Stage) -> Played:
    """Let nodes play until the show is over, one of them fails, or a signal comes; then end
    them.

    However it ends, the page is written, and what was played so far is returned.

    Raises:
        ConfigError: There is no page at that address.
        StorageError: The page cannot be written.
        KeyboardInterrupt: The signal came before anything was played.
    """
    trouble: list[BaseException] = []
    try:
        return trio.run(_play, show, make, stage)
    except* (ShoalError, KeyboardInterrupt) as errors:
        trouble.extend(leaves(errors))
    ignore_interrupts()
    if any(map(is_interrupt, trouble)):
        raise KeyboardInterrupt
    raise trouble[0]


async def _play(show: Show, make: Callable[[trio.Nursery], LocalNodes], stage: Stage) -> Played:
    began = time.monotonic()  # noqa: TID251 - a command line tool, outside every world

    def seconds() -> float:
        return time.monotonic() - began  # noqa: TID251

    trouble: list[BaseException] = []
    report: Path | None = None
    try:
        async with trio.open_nursery() as nursery:
            nodes = make(nursery)
            with told_by_signals(nursery.cancel_scope.cancel) as told:
                try:
                    async with open_page(nodes, stage.address, stage.command) as (url, feed):
                        stage.say(f"see the swarm: {url}")
                        try:
                            await _show(show, nodes, stage, seconds)
                        finally:
                            report = write_page(feed, stage.report)
                finally:
                    with trio.CancelScope(shield=True):
                        await nodes.stop()
            if told:
                ignore_interrupts()  # what is left to say is short
            nursery.cancel_scope.cancel()
    except* ShoalError as errors:
        trouble.extend(leaves(errors))
    for failure in trouble:
        if report is None or isinstance(failure, ConfigError | StorageError):
            raise failure
    if report is None:  # the signal came before there was a page
        raise KeyboardInterrupt
    ended = INTERRUPTED if told else "".join(map(str, trouble[:1]))
    return Played(nodes, report, ended, round(seconds(), 1))


async def _show(
    show: Show, nodes: LocalNodes, stage: Stage, seconds: Callable[[], float]
) -> None:
    """Redraw on a terminal, at least once a second; elsewhere print lines as they come."""
    if stage.console.is_terminal:
        with Live(console=stage.console, refresh_per_second=4) as live:

            def look() -> None:
                live.update(show.draw(nodes, seconds()))

            async def tick() -> None:
                while True:
                    look()
                    await trio.sleep(1)  # noqa: TID251 - a command line tool

            async with trio.open_nursery() as nursery:
                nursery.start_soon(tick)
                await show.act(nodes, look, stage.say)
                nursery.cancel_scope.cancel()
        return
    told = set[Hashable]()

    def tell() -> None:
        for key, line in show.news(nodes):
            if key not in told:
                told.add(key)
                stage.say(f"{seconds():5.0f} s  {line}")

    await show.act(nodes, tell, stage.say)


@asynccontextmanager
async def open_page(
    nodes: LocalNodes, address: tuple[str, int], command: str
) -> AsyncIterator[tuple[str, Snapshots]]:
    """Serve a page of ``nodes`` for the length of the block; yield its URL and its snapshots.

    Raises:
        ConfigError: The address cannot be used.
    """
    async with open_world() as world, trio.open_nursery() as nursery:
        panels = load_panels(installed(PANELS))
        snapshots = Snapshots(world, panels, lambda: view_of(nodes, command))
        nursery.start_soon(snapshots.run)
        async with Dashboard(world, snapshots).at_address(*address) as url:
            yield url, snapshots
        nursery.cancel_scope.cancel()


def write_page(snapshots: Snapshots, path: Path | None) -> Path:
    """Write the page as one file, to ``path`` or among the temporary files.

    Raises:
        StorageError: The disk failed.
    """
    snapshots.look()  # what came in the last second
    try:
        if path is None:
            with tempfile.NamedTemporaryFile(
                prefix="shoal-demo-", suffix=".html", delete=False
            ) as file:
                path = Path(file.name)
        path.write_text(write_report(snapshots.whole()), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"the report cannot be written: {error.strerror}") from None
    return path


def view_of(nodes: LocalNodes, command: str) -> SwarmView:
    """Return all running nodes with their last status, and the guests that they name."""
    told = {name: one.status for name, one in nodes.children.items() if one.status is not None}
    living = {name: one for name, one in told.items() if nodes.children[name].is_alive}
    ours = {one["peer"] for one in told.values()}
    heard = (one for status in living.values() for one in status["known"])
    run = nodes.run
    return SwarmView(
        title=run.name,
        says=says(living),
        run={"name": run.name, "id": run.id.hex(), "epoch": run.epoch,
             "owner": str(run.owner)},
        known={
            str(one["peer"]): NodeView(
                health=one,
                name=name,
                says=work_of(one["roles"]) if name in living else "has ended",
                is_gone=name not in living,
            )
            for name, one in told.items()
        },
        members={one["peer"]: one for one in heard if one["peer"] not in ours},
        terms=run.words,
        facts=[("command", command), *pending(nodes.folder, nodes.status.learner)],
    )  # fmt: skip


def says(nodes: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a sentence on the progress of the run."""
    trainers = [one["roles"]["trainer"] for one in nodes.values() if "trainer" in one["roles"]]
    trainer: Mapping[str, Any] = max(
        trainers, key=lambda one: int(one.get("step", -1)), default={}
    )
    peers = f"{len(nodes)} peers on this machine"
    if trainer.get("algorithm") == "diloco" and trainer["step"] < 0:
        return f"{peers} find each other; the trainers read their text."
    if trainer.get("algorithm") == "diloco":
        losses = [one["loss"] for one in trainer.get("rounds", ()) if one["loss"] is not None]
        gain = f", held-out loss {losses[0]:.2f} → {losses[-1]:.2f}" if losses else ""
        rounds = f"{trainer['step']} of {trainer.get('steps')}"
        return f"{peers} pre-train one model: round {rounds}{gain}."
    if trainer.get("greedy") is None:
        return f"{peers} find each other; the trainer warms up the first policy."
    first, last = trainer["greedy_start"], trainer["greedy"]
    gain = f"held-out reward {first:.2f}" + (f" → {last:.2f}" if last != first else "")
    if trainer["done"]:
        return f"{peers} have trained one model in {trainer['step']} steps: {gain}."
    return f"{peers} train one model: step {trainer['step']} of {trainer['steps']}, {gain}."
