"""A topology as processes on real, shaped lines (L3): the same broadcast over TCP.

Each machine runs this module. It takes connections from its children, then dials its parent: so
the tree is complete when the root has its children.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Final

import trio

from sim.errors import LabError
from sim.studies.lab.link_model.broadcast import TreeBroadcast
from sim.studies.lab.link_model.topologies import Topology
from sim.studies.lab.machines import EmulationConfig, open_emulation
from sim.studies.lab.namespaces import CUBIC

PORT: Final = 4001
"""The port of every machine: each has an address of its own."""
NOT_SENT_LOW_WATER: Final = 128 * 1024
"""The most unsent bytes that the kernel holds, as in `p2p.transport.tcp`."""
SECONDS: Final = 360.0
"""Seconds for the processes to start and for one broadcast: ten times the longest of the
six."""

Report = tuple[str, dict[str, Any]]
"""The name of a machine, and what its process has printed."""


async def real_times(topology: Topology, congestion: str = CUBIC) -> dict[str, float]:
    """Broadcast once. Return the seconds until each machine (not the root) has everything.

    ``congestion`` is a name in net.ipv4.tcp_available_congestion_control, or empty for the
    default.

    Raises:
        LabError: The lines cannot be made, a process dies, or `SECONDS` are over.
    """
    whole: dict[str, float] = {}
    async with open_emulation(EmulationConfig(congestion=congestion)) as emulation:
        machines = {
            member.name: await emulation.add(member.name, member.link, lambda _: None)
            for member in topology.members
        }
        send, reports = trio.open_memory_channel[Report](len(machines))

        async def hear() -> None:
            name, report = await reports.receive()
            if "whole_at" in report:
                whole[name] = report["whole_at"]

        with trio.move_on_after(SECONDS):
            for name, parent in topology.parents.items():
                above = machines[parent].address if parent else "-"
                children = len(topology.children(name))
                sizes = (children, topology.chunks, topology.chunk_bytes)
                command = [sys.executable, "-m", __name__, above, *map(str, sizes)]
                await machines[name].start(command, partial(_pass_on, send, name))
                await hear()  # that it listens
            while len(whole) < len(machines):
                await hear()
    if len(whole) < len(machines):
        raise LabError(f"{topology.name} did not end within {SECONDS:.0f} s")
    root, *others = topology.parents
    return {name: whole[name] - whole[root] for name in others}


def _pass_on(reports: trio.MemorySendChannel[Report], name: str, said: dict[str, Any]) -> None:
    reports.send_nowait((name, said))


async def relay(parent: str, *sizes: str) -> None:
    """Play one machine, until standard input ends."""
    children, chunks, chunk_bytes = map(int, sizes)
    async with AsyncExitStack() as stack:

        async def adopt(stream: trio.SocketStream) -> trio.SocketStream:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, NOT_SENT_LOW_WATER)
            return await stack.enter_async_context(stream)

        (listener,) = await trio.open_tcp_listeners(PORT, host="0.0.0.0")
        say({"listens_at": PORT})
        down = [await adopt(await listener.accept()) for _ in range(children)]
        up = None if parent == "-" else await adopt(await trio.open_tcp_stream(parent, PORT))
        # A clock that all processes of this machine share.
        broadcast = TreeBroadcast(
            chunks, chunk_bytes, lambda: time.clock_gettime(time.CLOCK_MONOTONIC)
        )
        await broadcast.run(up, down)
        say({"whole_at": broadcast.whole_at})
        await trio.to_thread.run_sync(sys.stdin.read)


def say(report: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    trio.run(relay, sys.argv[1], *sys.argv[2:])
