"""The nodes of one run as processes of this machine: started, heard, killed, started again.

One of them gets the run file; every other gets the address of that one and, if it was in the
run before, the newest run file. Their data is in ``DIR/<name>/{key,store,ledger,log}``; each
ends when its parent does, however that dies: its standard input ends. Each prints its health as
a line of JSON twice a second; those lines, and nothing else, are what is known here of a node.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import trio

from p2p.concurrency import Notifier
from p2p.errors import ShoalError
from p2p.node.rundoc import PATH as PIN
from p2p.wire import KI
from roles.contract import Run
from roles.own.layout import RunFolder
from roles.own.status import Status, SwarmStatus

START_SECONDS = 60.0  # until a process says its address, on a busy machine
FINISH_SECONDS = 60.0  # after the last step, until all nodes hold the last policy
STOP_SECONDS = 1.5  # until a process that was asked to end is killed: Ctrl-C takes under 3 s


class NodeFailed(ShoalError):
    """A node did not start, or ended by itself; its log is kept."""


class NodeProcess:
    """One node process with its greeting, its newest status and its end."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder / name
        self.greeting: Status | None = None
        self.status: Status | None = None
        self.process: trio.Process | None = None
        self._heard = Notifier()

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.returncode is None

    async def start(self, arguments: list[str]) -> trio.Process:
        """Run ``python -m p2p.node``; its log goes to the folder."""
        self.greeting = None
        with (self.folder / "log").open("ab") as log:
            self.process = await trio.lowlevel.open_process(
                [sys.executable, "-m", "p2p.node", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the parent, which ends them in order
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
                said: dict[str, Any] = json.loads(line)
                if said.get("event") == "started":
                    self.greeting = said
                elif "event" not in said:
                    self.status = said
                self._heard.notify_all()
                heard()

    async def wait_greeting(self) -> Status:
        """Return the first line of status that the process printed.

        Raises:
            NodeFailed: It says nothing for `START_SECONDS`.
        """
        with trio.move_on_after(START_SECONDS):
            while self.greeting is None:
                await self._heard.wait()
            return self.greeting
        raise NodeFailed(
            f"{self.name} did not start within {START_SECONDS:.0f} s; see {self.folder / 'log'}"
        )

    async def wait_status(self, condition: Callable[[Status], bool]) -> Status:
        """Return the first status from now on for which ``condition`` holds."""
        while self.status is None or not condition(self.status):
            await self._heard.wait()
        return self.status

    @property
    def last_words(self) -> str:
        """Return the sentence with which the process ended, if it printed one."""
        with (self.folder / "log").open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 4 * KI))
            lines = log.read().decode(errors="replace").splitlines()
        said = [line for line in lines if line.startswith("error: ")]
        return f": {said[-1].removeprefix('error: ')}" if said else ""

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()

    async def stop(self) -> None:
        """End the process politely, then by force."""
        if self.process is None or not self.is_alive:
            return
        self.process.terminate()
        with trio.move_on_after(STOP_SECONDS):
            await self.process.wait()
        if self.is_alive:
            self.process.kill()
            await self.process.wait()


class LocalNodes:
    """The nodes of one run, each a process, inside a nursery that ends with them."""

    def __init__(
        self, folder: RunFolder, run: Run, cast: Mapping[str, str], nursery: trio.Nursery
    ) -> None:
        """Prepare nodes; ``cast`` maps each name to a role, and its first node is the bootstrap
        peer.
        """
        self.folder = folder
        self.run = run
        self.cast = cast
        self.children = {name: NodeProcess(name, folder.path) for name in cast}
        self.news = Notifier()  # of a status of any node
        self._nursery = nursery
        self._stopping = False

    async def start(self) -> None:
        """Start all: first the bootstrap peer, then the rest."""
        for name in self.cast:
            await self.start_child(name)
        for child in self.children.values():
            await child.wait_greeting()

    async def start_child(self, name: str) -> NodeProcess:
        """Start a node of the cast, or start it again."""
        child = self.children[name]
        arguments = [
            "--role", self.cast[name], "--data", str(child.folder), "--listen",
            "/ip4/127.0.0.1/tcp/0", "--config", str(self.folder.config_of(name)), "--json",
            "--status", "0.5", "--die-with-parent",
        ]  # fmt: skip
        is_first = name == next(iter(self.cast))
        if not is_first:
            arguments += ["--bootstrap", self.bootstrap]
        # A node that has met the run before would begin under the edition that it knows, and
        # rest when it hears of a later one.
        if is_first or (child.folder / PIN).exists():
            arguments += ["--run", str(self.folder.document)]
        process = await child.start(arguments)
        self._nursery.start_soon(self._attend, child, process)
        if is_first:
            await child.wait_greeting()
        return child

    @property
    def bootstrap(self) -> str:
        greeting = self.children[next(iter(self.cast))].greeting
        assert greeting is not None
        return str(greeting["addrs"][0])

    @property
    def join_command(self) -> str:
        """The command with which a second shell takes part, with a folder of its own for each
        run.

        The folder is in the home folder, and not in the working directory: in a checkout ``git
        add .`` would take the node's private key along.
        """
        folder = f"~/shoal-{self.run.id.hex()[:6]}"
        line = f"shoal node --role inference --data {folder} --bootstrap {self.bootstrap}"
        has_capsule = any(pin.is_capsule for pin in self.run.terms.environments)
        return f"{line} --accept-capsules" if has_capsule else line

    async def _attend(self, child: NodeProcess, process: trio.Process) -> None:
        await child.listen(self.news.notify_all)
        code = await process.wait()
        if not self._stopping and code >= 0:  # a signal is a person's will, or a test's
            raise NodeFailed(
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
        sampling = self.run.terms.sampling
        return SwarmStatus(nodes, sampling.submission * sampling.group_size)

    async def wait_done(self, look: Callable[[], None]) -> SwarmStatus:
        """Return when the trainer has all its steps and every node holds its last policy."""
        while not self.status.trainer.get("done"):
            await self.news.wait()
            look()
        with trio.move_on_after(FINISH_SECONDS):
            while not self.status.done:
                await self.news.wait()
                look()
        return self.status

    async def stop(self) -> None:
        self._stopping = True
        async with trio.open_nursery() as nursery:
            for child in self.children.values():
                nursery.start_soon(child.stop)
