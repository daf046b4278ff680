"""The stage of a swarm of processes: it is shown on a page while it plays, and ended in order.

A demo hears its nodes' statuses anyway. What a node's own page cannot know is here: names, and
who was killed.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

import trio

from p2p.concurrency import leaves
from p2p.errors import ConfigError, ShoalError, StorageError
from p2p.machine import open_world
from p2p.node.dashboard.core.picture import Known, Scene
from p2p.node.dashboard.feed import Feed
from p2p.node.dashboard.report import write_report
from p2p.node.dashboard.sockets import Faces
from p2p.node.entries import installed
from p2p.node.panels import PANELS, load_panels
from p2p.node.process import told_by_signals
from p2p.node.usage import ignore_interrupts
from roles.contract import Run
from roles.demo.processes import DemoFaces, NodeProcess
from roles.demo.view import work_of

INTERRUPTED: Final = "interrupted"
"""How a play ended that Ctrl-C, or SIGTERM, has ended."""


class Cast(Protocol):
    """Node processes that play together."""

    @property
    def run(self) -> Run:
        """What they play."""
        ...

    @property
    def children(self) -> Mapping[str, NodeProcess]:
        """By name."""
        ...

    async def stop(self) -> None:
        """End all of them."""
        ...


CastT = TypeVar("CastT", bound=Cast)


@dataclass(frozen=True, slots=True)
class Played(Generic[CastT]):
    """A play that is over."""

    cast: CastT
    """Its nodes have ended; what they said last is still there."""
    report: Path
    """The page, as a file."""
    trouble: str
    """Why it ended before its end: `INTERRUPTED`, or what failed; empty if it did not."""


async def on_stage(
    make: Callable[[trio.Nursery], CastT],
    act: Callable[[CastT, str], Awaitable[None]],
    faces: DemoFaces,
) -> Played[CastT]:
    """Let a cast play until ``act`` returns, a node fails, or a signal comes; then end it.

    However it ends, the page is written, and what was played so far is returned.

    Args:
        make: Makes the cast, whose tasks run in the nursery.
        act: Plays; it gets the cast and the line that says where the page is.
        faces: Where the play is shown.

    Raises:
        ConfigError: There is no page at that address.
        StorageError: The page cannot be written.
        KeyboardInterrupt: The signal came before anything was played.
    """
    told: list[bool] = []
    trouble: list[BaseException] = []
    report: Path | None = None
    try:
        async with trio.open_nursery() as nursery:

            def end() -> None:
                told.append(True)
                nursery.cancel_scope.cancel()

            cast = make(nursery)
            page = DemoPage(cast.run, cast.children, faces.command)
            with told_by_signals(end):
                try:
                    async with open_page(page, faces.address):
                        try:
                            await act(cast, page.invitation)
                        finally:
                            report = page.report(faces.report)
                finally:
                    with trio.CancelScope(shield=True):
                        await cast.stop()
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
    return Played(cast, report, INTERRUPTED if told else "".join(map(str, trouble[:1])))


class DemoPage:
    """What is shown of a demo's nodes."""

    def __init__(self, run: Run, children: Mapping[str, NodeProcess], command: str) -> None:
        self._run = run
        self._children = children
        self._command = command
        self.url = ""
        self.feed: Feed | None = None

    @property
    def invitation(self) -> str:
        """Where to look, for a terminal."""
        return f"see the swarm: {self.url}"

    def scene(self) -> Scene:
        """All nodes that run, by what they last said."""
        living = {
            name: child.status
            for name, child in self._children.items()
            if child.status is not None
            and child.process is not None
            and child.process.returncode is None
        }
        run = self._run
        return Scene(
            title=f"Demo: {run.name}",
            says=says(living),
            run={"name": run.name, "id": run.id.hex(), "epoch": run.epoch,
                 "owner": str(run.owner)},
            known={
                str(status["peer"]): Known(
                    health=status, name=name, says=work_of(status["roles"])
                )
                for name, status in living.items()
            },
            members=self._guests(living),
            facts=[("command", self._command)],
        )  # fmt: skip

    def _guests(self, living: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Who joined from elsewhere, as far as the nodes name whom they know."""
        ours = {one.status["peer"] for one in self._children.values() if one.status is not None}
        heard = (one for status in living.values() for one in status["known"])
        return {one["peer"]: one for one in heard if one["peer"] not in ours}

    def report(self, path: Path | None) -> Path:
        """Write the page as one file, to ``path`` or among the temporary files. Raises
        `StorageError`."""
        assert self.feed is not None  # `open_page` has made it
        self.feed.look()  # what came in the last second
        text = write_report(self.feed.whole())
        try:
            if path is None:
                with tempfile.NamedTemporaryFile(
                    "w", prefix="shoal-demo-", suffix=".html", encoding="utf-8", delete=False
                ) as file:
                    file.write(text)
                return Path(file.name)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise StorageError(f"the report cannot be written: {error.strerror}") from None
        return path


def says(nodes: Mapping[str, Mapping[str, Any]]) -> str:
    """What goes on, in a sentence."""
    trainers = [one["roles"]["trainer"] for one in nodes.values() if "trainer" in one["roles"]]
    trainer: Mapping[str, Any] = max(
        trainers, key=lambda one: int(one.get("step", -1)), default={}
    )
    peers = f"{len(nodes)} peers on this machine"
    if trainer.get("algorithm") == "diloco" and trainer["step"] < 0:
        return f"{peers} find each other; the trainers read their text."
    if trainer.get("algorithm") == "diloco":
        rounds = f"{trainer['step']} of {trainer.get('steps')}"
        return f"{peers} pre-train one model: round {rounds}."
    if trainer.get("greedy") is None:
        return f"{peers} find each other; the trainer warms up the first policy."
    first, last = trainer["greedy_start"], trainer["greedy"]
    gain = f"held-out reward {first:.2f}" + (f" → {last:.2f}" if last != first else "")
    if trainer["done"]:
        return f"{peers} have trained one model in {trainer['step']} steps: {gain}."
    return f"{peers} train one model: step {trainer['step']} of {trainer['steps']}, {gain}."


@asynccontextmanager
async def open_page(page: DemoPage, address: tuple[str, int]) -> AsyncIterator[None]:
    """Serve ``page`` for the length of the block. Raises `ConfigError`."""
    async with open_world() as world, trio.open_nursery() as nursery:
        feed = page.feed = Feed(world, load_panels(installed(PANELS)), page.scene)
        nursery.start_soon(feed.run)
        async with Faces(world, feed).at_address(*address) as page.url:
            yield
        nursery.cancel_scope.cancel()
