"""A topology as real processes on real, shaped links (L3). Needs Linux, root, iproute2 and util-linux.

Theory of operation
-------------------
Every machine is a process in a network namespace of its own, on one bridge, which has a namespace too.
``tc tbf`` shapes both ends of each veth pair: the machine's end is its uplink, the bridge's end its
downlink (burst 32 KiB, a queue of 100 ms). No namespace has a name and nothing is made in the
caller's: a namespace and its links live as long as their process does, and the processes end with their
standard input, so that nothing is left over even if the caller is killed.

This validates bandwidth. There is no added delay and no loss (that would need netem, which many kernels
lack), so latency and loss of the model are not checked here.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import trio

from sim.lab.topologies import Topology
from sim.link import LinkSpec

BURST: Final = "32kb"
QUEUE: Final = "100ms"
CUBIC: Final = "cubic"
"""Linux's default almost everywhere; needs `CAP_NET_ADMIN` where the kernel prefers another."""
MAX_MACHINES: Final = 250
"""Hosts of one /24; a machine with two cores is busy with twenty."""
START_SECONDS: Final = 60.0
"""For all processes to start: each imports trio, and a busy machine takes a second for that."""
RUN_SECONDS: Final = 300.0
"""For one broadcast: ten times the longest of the six."""
MAX_LINE: Final = 4096
TOOLS: Final = ("ip", "tc", "unshare", "nsenter")

_SHAPED = f"tc qdisc add dev {{}} root tbf rate {{}}kbit burst {BURST} latency {QUEUE}"
_PROBE = f"ip link add b0 type bridge; ip link add v0 type veth peer name v1; {_SHAPED.format('v0', 8000)}"


class LabError(Exception):
    """The lab's links or processes could not be set up, or broke."""


def reason_to_skip() -> str | None:
    """Why there can be no lab on this machine; None if there can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    missing = [tool for tool in TOOLS if shutil.which(tool, path=_path()) is None]
    if missing:
        return f"needs {', '.join(missing)} (packages iproute2 and util-linux)"
    command = ["unshare", "--net", "sh", "-ec", _PROBE]
    probe = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
    return None if probe.returncode == 0 else f"no shaped namespaces here: {probe.stderr.strip()}"


def _path() -> str:
    return os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"


def _environment() -> dict[str, str]:
    here = str(Path(__file__).parents[2])
    python_path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PATH": _path(), "PYTHONPATH": python_path}


class Machine:
    """A process that answers orders line by line."""

    def __init__(self, process: trio.Process) -> None:
        self._process = process
        self._unread = b""

    @property
    def pid(self) -> int:
        """Whose namespace it is in."""
        return self._process.pid

    async def ask(self, order: str) -> str:
        """Send an order and return its answer. Raises `LabError` if the process is gone."""
        assert self._process.stdin is not None
        try:
            await self._process.stdin.send_all(order.encode() + b"\n")
        except trio.BrokenResourceError as error:
            raise LabError(f"a machine of the lab is gone at {order!r}") from error
        return await self.answer()

    async def answer(self) -> str:
        """The next line it says. Raises `LabError` if it ends instead."""
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

    def __init__(self, topology: Topology, machines: dict[str, Machine]) -> None:
        self.topology = topology
        self.machines = machines

    async def times(self) -> dict[str, float]:
        """Broadcast once, over new connections; seconds until each machine (not the root) has everything.

        Raises `LabError` if a process dies or `RUN_SECONDS` are over.
        """
        try:
            with trio.fail_after(RUN_SECONDS):
                return await self._play()
        except trio.TooSlowError as error:
            raise LabError(f"{self.topology.name} did not end within {RUN_SECONDS:.0f} s") from error

    async def _play(self) -> dict[str, float]:
        topology = self.topology
        joins = {
            name: f"join {_address(topology, parent) if parent else '-'} {len(topology.children(name))}"
            for name, parent in topology.parents.items()
        }
        play = f"play {topology.chunks} {topology.chunk_bytes}"
        await self.ask_all(joins)
        root, *others = topology.parents
        answers = await self.ask_all({name: play for name in (*others, root)})
        start = float(answers.pop(root))
        return {name: float(answers[name]) - start for name in others}

    async def ask_all(self, orders: dict[str, str]) -> dict[str, str]:
        """Give every machine its order at once, and collect the answers. Raises `LabError`."""
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

    ``congestion`` is a name in net.ipv4.tcp_available_congestion_control, or empty for the default.
    Raises `LabError` if the links cannot be made.
    """
    if len(topology.places) > MAX_MACHINES:
        raise LabError(f"{len(topology.places)} machines are too many for one bridge")
    relay = [sys.executable, "-m", "sim.lab.relay", congestion]
    async with AsyncExitStack() as stack:
        hub = Machine(await stack.enter_async_context(_process(["cat"])))
        machines = {
            name: Machine(await stack.enter_async_context(_process(relay))) for name in topology.parents
        }
        lab = Lab(topology, machines)
        try:
            with trio.fail_after(START_SECONDS):
                await _build(hub, lab)
        except trio.TooSlowError as error:
            raise LabError(f"{topology.name} was not up within {START_SECONDS:.0f} s") from error
        yield lab


async def _build(hub: Machine, lab: Lab) -> None:
    """Connect the machines, once each is in its namespace, and let them listen."""
    await hub.ask("up")  # what comes back says that `cat` runs
    await _within(hub, "ip link add hub type bridge", "ip link set hub up")
    for number, place in enumerate(lab.topology.places, start=1):
        machine = lab.machines[place.name]
        await machine.answer()
        await _connect(hub, machine, number, place.link)
    await lab.ask_all({name: f"listen {_address(lab.topology, name)}" for name in lab.machines})


async def _connect(hub: Machine, machine: Machine, number: int, link: LinkSpec) -> None:
    """Lay machine ``number``'s line to the hub and shape both ends."""
    if math.isinf(link.up) or math.isinf(link.down):
        raise LabError(f"machine {number} has an infinite line, and `tc` shapes no such thing")
    await _within(
        hub,
        f"ip link add m{number} type veth peer name eth0 netns {machine.pid}",
        f"ip link set m{number} master hub up",
        _SHAPED.format(f"m{number}", round(link.down * 1000)),
    )
    await _within(
        machine,
        "ip link set lo up",
        f"ip addr add {_host(number)}/24 dev eth0",
        "ip link set eth0 up",
        _SHAPED.format("eth0", round(link.up * 1000)),
        # Each run begins without what TCP has learnt of the path in the run before.
        "echo 1 > /proc/sys/net/ipv4/tcp_no_metrics_save",
    )


def _address(topology: Topology, name: str) -> str:
    return _host(1 + [place.name for place in topology.places].index(name))


def _host(number: int) -> str:
    return f"10.77.0.{number}"


async def _within(machine: Machine, *commands: str) -> None:
    """Run shell commands in a machine's network namespace. Raises `LabError` at the first that fails."""
    command = ["nsenter", "--target", str(machine.pid), "--net", "sh", "-ec", "; ".join(commands)]
    done = await trio.run_process(command, env=_environment(), capture_stderr=True, check=False)
    if done.returncode != 0:
        raise LabError(f"{done.stderr.decode().strip()} (at: {'; '.join(commands)})")


@asynccontextmanager
async def _process(command: Sequence[str]) -> AsyncIterator[trio.Process]:
    """A process in a new network namespace, killed at the end of the block."""
    process = await trio.lowlevel.open_process(
        ["unshare", "--net", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=_environment(),
    )
    try:
        yield process
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    await stream.aclose()
