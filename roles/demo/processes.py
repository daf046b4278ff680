"""The demo's swarm: real processes on loopback, started, watched, killed and started again.

A relay-only node that knows the run, one trainer, two honest inference nodes, one that cheats,
one validator. Every process but the first gets one bootstrap address and nothing else; the run
comes from the peer behind it. Their data is in ``DIR/<role>-<n>/{key,store,ledger,log}``; each
ends when its parent does, however that dies: its standard input ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import trio

from p2p.concurrency import Notifier
from p2p.errors import BadMessage, ConfigError, ShoalError
from p2p.machine import load_or_create_key
from p2p.wire import KI
from roles.contract import Run, decode_run_untrusted
from roles.contract.core.file import Delivery, EnvironmentPin, Terms
from roles.demo.players import CAST
from roles.demo.shows import SORTING, Show
from roles.demo.status import Status, SwarmStatus
from roles.envs.base import environment_digest
from roles.own.editions import sign_edition, write_edition
from roles.protocol.model_files import FOLDER
from roles.rl.learner import FILE, write_learner

RUN_FILE: Final = "run.shoal"
"""The signed run file, in the demo's folder."""
RUN_SECONDS: Final = 24 * 3600
"""How long a demo's run is valid."""
START_SECONDS: Final = 60.0
"""How long a process may take to say its address on a busy machine."""
FINISH_SECONDS: Final = 60.0
"""How long after the last step all nodes may take to hold the last policy."""
STOP_SECONDS: Final = 1.5
"""How long a process may take to end before it is killed: Ctrl-C promises under 3 s for all."""


LAST_WORDS: Final = 4 * KI
"""Bytes at the end of a log in which the sentence stands with which a node ended."""

_ONE_THREAD: Final = 'device = "cpu"\nthreads = 1\n'
"""Five engines share the machine: with a thread each they do twenty times as much as with
torch's default."""
_TORCH: Final = f'engine = "torch"\n{_ONE_THREAD}'
_MEMBERSHIP: Final = "[membership]\ninterval = 1.0\n"


class DemoError(ShoalError):
    """The demo could not be played to its end; the logs of its nodes are kept."""


@dataclass(frozen=True, slots=True)
class DemoFaces:
    """Where a demo is shown."""

    address: tuple[str, int] = ("127.0.0.1", 0)
    """Of its page."""
    report: Path | None = None
    """Where the page goes at the end; None is among the temporary files."""
    command: str = "shoal demo"
    """What made it, for its reader."""


HERE: Final = DemoFaces()
"""On this machine, at a free port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPlan:
    """What to play."""

    seed: int = 0
    """Of the initial weights and of the warm-up."""

    show: Show = SORTING
    """What is learnt, how, and what is promised of it."""

    folder: Path
    """Where the nodes keep their data."""

    faces: DemoFaces = HERE


def signed_run(folder: Path, terms: Terms) -> Run:
    """Return the run of a demo's folder: an earlier demo's, which goes on, or a new one.

    Raises:
        ConfigError: The folder has a run of other terms, or one that has expired.
    """
    path = folder / RUN_FILE
    if not path.exists():
        key = folder / "owner.key"
        run = sign_edition(terms, load_or_create_key(key), key, path)
        write_edition(run, key, path)
        return run
    with contextlib.suppress(BadMessage):
        run = decode_run_untrusted(path.read_bytes())
        is_over = run.expiry <= terms.expiry - RUN_SECONDS
        if not is_over and replace(run.terms, expiry=terms.expiry) == terms:
            return run
    raise ConfigError(
        f"--data {folder} holds the nodes of an earlier demo, whose run has its own seed and"
        " steps, and ends after a day: name another folder, or remove that one"
    )


def write_run(plan: DemoPlan) -> Run:
    """Make every node's key, and the run file that names trainer and validator.

    Returns the run. Raises what `signed_run` raises.
    """
    show = plan.show
    keys = {name: load_or_create_key(plan.folder / name / "key") for name in CAST}
    terms = Terms(
        name=f"demo-{plan.seed}",
        expiry=int(time.time()) + RUN_SECONDS,  # noqa: TID251 - a command line tool, outside every world
        environments=(
            EnvironmentPin(
                name=show.environment,
                digest=environment_digest(show.environment),
                kinds=show.kinds,
            ),
        ),
        trainers=(keys["trainer-1"].peer_id,),
        validators=(keys["validator-1"].peer_id,),
        model=replace(show.model, seed=plan.seed),
        sampling=show.sampling,
        limits=show.limits,
        delivery=Delivery(chunk_bytes=show.chunk_bytes),
        trust=show.trust,
    )
    run = signed_run(plan.folder, terms)
    (plan.folder / "trainer-1" / FILE).write_text(
        write_learner(replace(show.learner, run=terms.name))
    )
    (plan.folder / "node.toml").write_text(
        f"[role.trainer]\n{_ONE_THREAD}"
        f"checkpoint_every = {show.checkpoint_every}\n\n"
        f"[role.inference]\n{_TORCH}\n[role.validator]\n{_TORCH}\n{_MEMBERSHIP}"
    )
    (plan.folder / "cheat.toml").write_text(
        f"[role.cheat]\n{_TORCH}rest = {show.cheat_rest}\n\n{_MEMBERSHIP}"
    )
    if show.base is not None:
        lay_base(show.base, plan.folder / "trainer-1" / FOLDER, run)
    return run


def lay_base(source: Path, target: Path, run: Run) -> None:
    """Put the files that ``run`` pins where its trainer looks for them."""
    target.mkdir(parents=True, exist_ok=True)
    for pin in run.terms.model.base:
        (target / pin.name).unlink(missing_ok=True)
        try:
            os.link((source / pin.name).resolve(), target / pin.name)
        except OSError:  # another disk
            shutil.copyfile(source / pin.name, target / pin.name)


class NodeProcess:
    """One node process: what it said first, its newest status, its end."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder / name
        self.greeting: Status | None = None
        self.status: Status | None = None
        self.process: trio.Process | None = None
        self._heard = Notifier()

    async def start(self, arguments: list[str]) -> trio.Process:
        """Run ``python -m p2p.node``; its log goes to the folder."""
        self.greeting = None
        with (self.folder / "log").open("ab") as log:
            self.process = await trio.lowlevel.open_process(
                [sys.executable, "-m", "p2p.node", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the demo, which ends them in order
            )
        return self.process

    async def listen(self, heard: Callable[[], None]) -> None:
        """Read status lines until the process ends."""
        assert self.process is not None
        assert self.process.stdout is not None
        buffer = b""
        while data := await self.process.stdout.receive_some():
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                self._hear(json.loads(line))
                heard()

    def _hear(self, said: dict[str, Any]) -> None:
        if said.get("event") == "started":
            self.greeting = said
        elif "event" not in said:
            self.status = said
        self._heard.notify_all()

    async def wait_greeting(self) -> Status:
        """What it said first. Raises `DemoError` if it says nothing."""
        with trio.move_on_after(START_SECONDS):
            while self.greeting is None:
                await self._heard.wait()
            return self.greeting
        raise DemoError(
            f"{self.name} did not start within {START_SECONDS:.0f} s; see {self.folder / 'log'}"
        )

    async def wait_status(self, condition: Callable[[Status], bool]) -> Status:
        """The first status from now on for which ``condition`` holds."""
        while self.status is None or not condition(self.status):
            await self._heard.wait()
        return self.status

    @property
    def last_words(self) -> str:
        """The sentence with which it ended, if it said one."""
        with (self.folder / "log").open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LAST_WORDS))
            lines = log.read().decode(errors="replace").splitlines()
        said = [line for line in lines if line.startswith("error: ")]
        return f": {said[-1].removeprefix('error: ')}" if said else ""

    def kill(self) -> None:
        """kill -9."""
        assert self.process is not None
        self.process.kill()

    async def stop(self) -> None:
        """End it politely, then by force."""
        if self.process is None:
            return
        if self.process.returncode is None:
            self.process.terminate()
            with trio.move_on_after(STOP_SECONDS):
                await self.process.wait()
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


class LocalNodes:
    """The nodes of one run, each a process, inside a nursery that ends with them."""

    def __init__(
        self, folder: Path, run: Run, cast: Mapping[str, str], nursery: trio.Nursery
    ) -> None:
        self.folder = folder
        self.run = run
        self.cast = cast
        """The role of each, by folder name; the first is the bootstrap peer of the others."""
        self.children = {name: NodeProcess(name, folder) for name in cast}
        self._nursery = nursery
        self._stopping = False
        self._news = Notifier()

    def config_of(self, name: str) -> Path:
        """The configuration of one of the cast."""
        return self.folder / "node.toml"

    async def start(self) -> None:
        """Start all: first the bootstrap peer, then the rest."""
        first, *others = self.cast
        await self.start_child(first)
        for name in others:
            await self.start_child(name)
        for name in others:
            await self.children[name].wait_greeting()

    async def start_child(self, name: str) -> NodeProcess:
        """Start, or start again, one of the cast."""
        child = self.children[name]
        first = next(iter(self.cast))
        arguments = [
            "--role", self.cast[name], "--data", str(child.folder), "--listen",
            "/ip4/127.0.0.1/tcp/0", "--config", str(self.config_of(name)), "--json",
            "--status", "0.5", "--die-with-parent",
        ]  # fmt: skip
        if name == first:
            arguments += ["--run", str(self.folder / RUN_FILE)]
        else:
            arguments += ["--bootstrap", self.bootstrap]
        process = await child.start(arguments)
        self._nursery.start_soon(self._attend, child, process)
        if name == first:
            await child.wait_greeting()
        return child

    @property
    def bootstrap(self) -> str:
        """The one address that every node gets."""
        greeting = self.children[next(iter(self.cast))].greeting
        assert greeting is not None
        return str(greeting["addrs"][0])

    def _hear(self) -> None:
        self._news.notify_all()

    async def _attend(self, child: NodeProcess, process: trio.Process) -> None:
        await child.listen(self._hear)
        code = await process.wait()
        if not self._stopping and code >= 0:  # a signal is a person's will, or a test's
            raise DemoError(
                f"{child.name} ended (exit status {code}){child.last_words}; see"
                f" {child.folder / 'log'}"
            )

    @property
    def status(self) -> SwarmStatus:
        """The newest status of every node that has one."""
        nodes = {
            name: child.status
            for name, child in self.children.items()
            if child.status is not None
        }
        recipe = self.run.terms.sampling
        return SwarmStatus(nodes, recipe.submission * recipe.group_size)

    async def wait_done(self, show: Callable[[SwarmStatus], None]) -> SwarmStatus:
        """Until the trainer has all its steps and every node holds its last policy."""
        while not self.status.trainer.get("done"):
            await self.wait_news()
            show(self.status)
        with trio.move_on_after(FINISH_SECONDS):
            while not self.status.done:
                await self.wait_news()
                show(self.status)
        return self.status

    async def wait_news(self) -> None:
        """Return when any of the cast has said something."""
        await self._news.wait()

    async def stop(self) -> None:
        """End all nodes."""
        self._stopping = True
        async with trio.open_nursery() as nursery:
            for child in self.children.values():
                nursery.start_soon(child.stop)


class DemoNodes(LocalNodes):
    """The demo's cast at work."""

    def __init__(self, plan: DemoPlan, nursery: trio.Nursery) -> None:
        super().__init__(plan.folder, write_run(plan), CAST, nursery)
        self.plan = plan

    def config_of(self, name: str) -> Path:
        """A node refuses the table of a role that it cannot find; the cheat alone finds its
        own."""
        cheats = name.startswith("cheat")
        return self.folder / "cheat.toml" if cheats else super().config_of(name)
