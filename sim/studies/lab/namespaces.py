"""Machines with shaped lines, out of network namespaces (L3).

They need Linux, root, iproute2 and util-linux.

Theory of operation
-------------------
Every machine is a network namespace on one bridge, which has a namespace too. ``tc tbf`` shapes
both ends of each veth pair: the machine's end is its uplink, the bridge's end its downlink
(burst 32 KiB, a queue of 100 ms). No namespace has a name and nothing is made in the caller's:
a namespace and its links live as long as some process is in it, and every process here ends
with its standard input. So nothing is left over however the caller ends, kill -9 included.

A bridge validates bandwidth: it adds no delay and no loss (that would need netem, which many
kernels lack). With a delay, `sim.studies.lab.switch` takes the bridge's place and shapes the
downlinks. That costs CPU, 8 seconds a GB: the lab stays on the bridge, and the benchmark that
compares programs over distance uses the switch.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Final

import trio

from sim.errors import LabError, LabUnavailable
from sim.net.link import MBIT, LinkSpec
from sim.studies.lab import switch

BURST: Final = "32kb"
QUEUE: Final = 0.1
"""Seconds that a full queue in front of a line takes to empty; homes have 0.1 to 1."""
CUBIC: Final = "cubic"
"""TCP's congestion control almost everywhere; a name in
net.ipv4.tcp_available_congestion_control."""
MAX_MACHINES: Final = 250
"""Hosts of one /24; a machine with two cores is busy with twenty."""
NETWORK: Final = "10.77.0.0/24"
"""Network of all machines on one bridge, without a route elsewhere."""
MAX_LINE: Final = 4096
"""Bytes read at once of what a program prints: its lines are shorter."""
TOOLS: Final = ("ip", "tc", "unshare", "nsenter")
CAPABILITIES: Final = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
"""Linux capabilities, by bit, that making namespaces and shaped links takes."""

_PROBE = (
    "ip link add b0 type bridge; ip link add v0 type veth peer name v1; tc qdisc add dev v0"
    " root tbf rate 8000kbit burst 32kb latency 100ms"
)


def reason_to_skip() -> str | None:
    """Return the reason why there can be no lab on this machine; None if there can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    missing = [tool for tool in TOOLS if shutil.which(tool, path=_path()) is None]
    if missing:
        return f"needs {', '.join(missing)} (packages iproute2 and util-linux)"
    forbidden = _missing_capabilities(
        Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    )
    if forbidden:
        return f"needs root, or {' and '.join(forbidden)}"
    command = ["unshare", "--net", "sh", "-ec", _PROBE]
    probe = subprocess.run(
        command, env=environment(), capture_output=True, text=True, check=False
    )
    return (
        None if probe.returncode == 0 else f"no shaped namespaces here: {probe.stderr.strip()}"
    )


def require_lab() -> None:
    """Check that this machine can run level 3.

    Raises:
        LabUnavailable: `reason_to_skip` has a reason.
    """
    reason = reason_to_skip()
    if reason is not None:
        raise LabUnavailable(
            f"level 3 runs real processes in shaped network namespaces: {reason}"
        )


def _missing_capabilities(status: str) -> list[str]:
    """Return the `CAPABILITIES` that ``/proc/self/status`` does not list as effective."""
    sets = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    effective = int(sets.get("CapEff", "0").strip(), 16)
    return [name for name, bit in CAPABILITIES.items() if not effective >> bit & 1]


def _path() -> str:
    return os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"


def environment() -> dict[str, str]:
    """Environment of the lab's processes: where the tools and our own packages are."""
    here = str(Path(__file__).parents[2])
    python_path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PATH": _path(), "PYTHONPATH": python_path}


class Hub:
    """The centre on which all lines end. Open it with `open_hub`."""

    def __init__(self, process: trio.Process, queue: float) -> None:
        self._process = process
        self._queue = queue

    def _shape(self, verb: str, device: str, mbit: float) -> str:
        rate, queue = round(mbit * 1000), round(self._queue * 1000)
        return (
            f"tc qdisc {verb} dev {device} root tbf rate {rate}kbit burst {BURST} latency"
            f" {queue}ms"
        )

    async def connect(self, pid: int, number: int, link: LinkSpec) -> None:
        """Connect machine ``number``, whose namespace has process ``pid``, by a line, and shape
        both ends.

        Raises `LabError`.
        """
        if math.isinf(link.up) or math.isinf(link.down):
            raise LabError(
                f"machine {number} has an infinite line, and `tc` shapes no such thing"
            )
        await self._lay(pid, number, link.down)
        await within(
            pid,
            "ip link set lo up",
            f"ip addr add {address_of(number)}/24 dev eth0",
            "ip link set eth0 up",
            self._shape("add", "eth0", link.up),
            # Each run begins without what TCP has learnt of the path in the run before.
            "echo 1 > /proc/sys/net/ipv4/tcp_no_metrics_save",
        )

    async def reshape(self, pid: int, number: int, link: LinkSpec) -> None:
        """Give machine ``number`` another line from now on.

        Raises:
            LabError: The line could not be changed.
        """
        await self._reshape_down(number, link.down)
        await within(pid, self._shape("change", "eth0", link.up))

    async def _lay(self, pid: int, number: int, down: float) -> None:
        """Give machine ``number`` its eth0, and let the other end carry ``down`` Mbit/s."""
        await within(
            self._process.pid,
            f"ip link add m{number} type veth peer name eth0 netns {pid}",
            f"ip link set m{number} master hub up",
            self._shape("add", f"m{number}", down),
        )

    async def _reshape_down(self, number: int, down: float) -> None:
        await within(self._process.pid, self._shape("change", f"m{number}", down))

    async def sent_bytes(self) -> dict[int, int]:
        """Return the bytes that each machine's line has carried up so far, headers included.

        Raises:
            LabError: The counters could not be read.
        """
        links = json.loads(await within(self._process.pid, "ip -s -j link show type veth"))
        return {int(link["ifname"][1:]): link["stats64"]["rx"]["bytes"] for link in links}


class DelayingHub(Hub):
    """`sim.studies.lab.switch` in a bridge's place."""

    def __init__(self, process: trio.Process, queue: float) -> None:
        super().__init__(process, queue)
        self._turn = trio.Lock()

    async def _ask(self, order: str) -> str:
        """Send an order and return the answer. A fault may reshape a line while bytes are
        counted."""
        async with self._turn:
            return await self._ask_alone(order)

    async def _ask_alone(self, order: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            await self._process.stdin.send_all(f"{order}\n".encode())
        except trio.BrokenResourceError:
            raise LabError(f"the switch has ended (at: {order})") from None
        answer = b""
        while not answer.endswith(b"\n"):
            heard = await self._process.stdout.receive_some(MAX_LINE)
            if not heard:
                raise LabError(f"the switch has ended (at: {order})")
            answer += heard
        return answer.decode()

    async def _lay(self, pid: int, number: int, down: float) -> None:
        await self._reshape_down(number, down)
        await within(self._process.pid, f"ip link set m{number} netns {pid} name eth0")
        await within(pid, f"ip link set eth0 address {switch.mac_of(number)}")

    async def _reshape_down(self, number: int, down: float) -> None:
        await self._ask(f"{number} {down * MBIT / 8}")

    async def sent_bytes(self) -> dict[int, int]:
        """Return the bytes that each machine has sent so far, headers included.

        Raises:
            LabError: The switch is gone.
        """
        sent = json.loads(await self._ask("sent"))
        return {int(number): size for number, size in sent.items()}


@asynccontextmanager
async def open_hub(queue: float = QUEUE, delay: float = 0.0) -> AsyncIterator[Hub]:
    """Open a bridge in a namespace of its own, for the length of the block.

    With a ``delay`` it is a switch on which every frame takes that many seconds.

    ``queue`` is how many seconds a full queue in front of any line takes to empty.

    Raises:
        LabError: The namespace could not be set up.
    """
    if delay:
        program = [sys.executable, "-I", str(switch.__file__), str(delay), str(queue)]
        async with open_process(program) as process:
            assert process.stdout is not None
            if await process.stdout.receive_some(MAX_LINE) != b"up\n":
                raise LabError("the switch did not start: has the kernel TAP devices?")
            yield DelayingHub(process, queue)
        return
    async with open_process(["cat"]) as process:
        await wait_ready(process)
        await within(process.pid, "ip link add hub type bridge", "ip link set hub up")
        yield Hub(process, queue)


def address_of(number: int) -> str:
    """Return the IP address of machine ``number``."""
    return f"10.77.0.{number}"


async def within(pid: int, *commands: str) -> str:
    """Run shell commands in the network namespace of process ``pid`` and return what they
    print.

    Raises `LabError` at the first that fails.
    """
    command = ["nsenter", "--target", str(pid), "--net", "sh", "-ec", "; ".join(commands)]
    done = await trio.run_process(
        command, env=environment(), capture_stdout=True, capture_stderr=True, check=False
    )
    if done.returncode != 0:
        raise LabError(f"{done.stderr.decode().strip()} (at: {'; '.join(commands)})")
    return done.stdout.decode()


async def wait_ready(echo: trio.Process) -> None:
    """Wait until a ``cat`` of `open_process` runs, which is in its namespace by then.

    Raises:
        LabError: The process ended instead.
    """
    assert echo.stdin is not None
    assert echo.stdout is not None
    try:
        await echo.stdin.send_all(b"!")
    except trio.BrokenResourceError:
        raise LabError("a namespace could not be made") from None
    if not await echo.stdout.receive_some(1):
        raise LabError("a namespace could not be made")


@asynccontextmanager
async def open_process(
    command: Sequence[str], *, of: int | None = None, stderr: IO[bytes] | None = None
) -> AsyncIterator[trio.Process]:
    """Open a process in a new network namespace, or in that of the process ``of``.

    The process is killed at the end of the block.
    """
    entered = ["unshare", "--net"] if of is None else ["nsenter", "--target", str(of), "--net"]
    process = await trio.lowlevel.open_process(
        [*entered, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=environment(),
        start_new_session=True,  # Ctrl-C is for the lab's owner, who ends them all
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
