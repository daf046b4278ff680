"""A topology as processes on real, shaped links (L3): the same broadcast over TCP."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

import trio

from sim.errors import LabError
from sim.studies.lab.link_model.topologies import Topology
from sim.studies.lab.namespaces import (
    CUBIC,
    MAX_LINE,
    MAX_MACHINES,
    Hub,
    address_of,
    open_hub,
    open_process,
)

START_SECONDS: Final = 60.0
"""Seconds for all processes to start: each imports trio, which takes a second on a busy
machine."""
RUN_SECONDS: Final = 300.0
"""Seconds for one broadcast: ten times the longest of the six."""


class RelayProcess:
    """A process that answers orders line by line."""

    def __init__(self, process: trio.Process) -> None:
        self._process = process
        self._unread = b""

    @property
    def pid(self) -> int:
        """Process whose namespace it is in."""
        return self._process.pid

    async def ask(self, order: str) -> str:
        """Send an order and return its answer.

        Raises:
            LabError: The process is gone.
        """
        assert self._process.stdin is not None
        try:
            await self._process.stdin.send_all(order.encode() + b"\n")
        except trio.BrokenResourceError as error:
            raise LabError(f"a machine of the lab is gone at {order!r}") from error
        return await self.answer()

    async def answer(self) -> str:
        """Return the next line that the process prints.

        Raises:
            LabError: The process ended instead.
        """
        assert self._process.stdout is not None
        while b"\n" not in self._unread:
            piece = await self._process.stdout.receive_some(MAX_LINE)
            if not piece:
                raise LabError("a machine of the lab ended; its standard error says why")
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode()


class Lab:
    """The machines of one topology, connected and shaped."""

    def __init__(self, topology: Topology, machines: dict[str, RelayProcess]) -> None:
        self.topology = topology
        self.machines = machines

    async def times(self) -> dict[str, float]:
        """Broadcast once, over new connections; seconds until each machine (not the root) has
        everything.

        Raises `LabError` if a process dies or `RUN_SECONDS` are over.
        """
        try:
            with trio.fail_after(RUN_SECONDS):
                return await self._play()
        except trio.TooSlowError as error:
            raise LabError(
                f"{self.topology.name} did not end within {RUN_SECONDS:.0f} s"
            ) from error

    async def _play(self) -> dict[str, float]:
        topology = self.topology
        joins = {
            name: (
                f"join {_address(topology, parent) if parent else '-'}"
                f" {len(topology.children(name))}"
            )
            for name, parent in topology.parents.items()
        }
        play = f"play {topology.chunks} {topology.chunk_bytes}"
        await self.ask_all(joins)
        root, *others = topology.parents
        answers = await self.ask_all({name: play for name in (*others, root)})
        start = float(answers.pop(root))
        return {name: float(answers[name]) - start for name in others}

    async def ask_all(self, orders: dict[str, str]) -> dict[str, str]:
        """Give every machine its order at once, and return the answers.

        Raises:
            LabError: A machine's process is gone.
        """
        answers: dict[str, str] = {}
        failures: list[LabError] = []

        async def ask(name: str, order: str) -> None:
            try:
                answers[name] = await self.machines[name].ask(order)
            except LabError as error:
                failures.append(error)
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for name, order in orders.items():
                nursery.start_soon(ask, name, order)
        if failures:
            raise failures[0]
        return answers


@asynccontextmanager
async def open_lab(topology: Topology, congestion: str = CUBIC) -> AsyncIterator[Lab]:
    """Build the links and start the processes, for the length of the block.

    ``congestion`` is a name in net.ipv4.tcp_available_congestion_control, or empty for the
    default. Raises `LabError` if the links cannot be made.
    """
    if len(topology.members) > MAX_MACHINES:
        raise LabError(f"{len(topology.members)} machines are too many for one bridge")
    relay = [sys.executable, "-m", "sim.studies.lab.link_model.relay", congestion]
    async with AsyncExitStack() as stack:
        machines = {
            name: RelayProcess(await stack.enter_async_context(open_process(relay)))
            for name in topology.parents
        }
        lab = Lab(topology, machines)
        try:
            with trio.fail_after(START_SECONDS):
                await _build(await stack.enter_async_context(open_hub()), lab)
        except trio.TooSlowError as error:
            raise LabError(
                f"{topology.name} was not up within {START_SECONDS:.0f} s"
            ) from error
        yield lab


async def _build(hub: Hub, lab: Lab) -> None:
    """Connect the machines, once each is in its namespace, and let them listen."""
    for number, member in enumerate(lab.topology.members, start=1):
        machine = lab.machines[member.name]
        await machine.answer()
        await hub.connect(machine.pid, number, member.link)
    await lab.ask_all({name: f"listen {_address(lab.topology, name)}" for name in lab.machines})


def _address(topology: Topology, name: str) -> str:
    return address_of(1 + [member.name for member in topology.members].index(name))
