"""What a process does first after it was stopped, in production and in simulation alike.

It runs all that is due by its own clock, timers and deadlines, and only then looks at what its
kernel has taken in meanwhile.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import trio

from p2p.machine import open_world
from p2p.multiaddr import Multiaddr
from p2p.network import Network
from p2p.transport.tcp import TcpNetwork
from p2p.world import World
from sim.kernel.simulation import Simulation
from sim.kernel.virtual_time import run_simulation
from sim.node.swarm import SimNode, open_swarm

DUE = 0.5  # seconds from when the process is ready until everything that it waits for is due
OWN_CLOCK = {"deadline", "sleep", "timer", "timer set by a timer"}
READ = {"bytes", "thread"}


async def live(
    world: World,
    network: Network,
    place: str,
    ready: Callable[[Multiaddr], None],
    work: Callable[[float], object],
) -> list[str]:
    """Wait for one thing of each kind; return them in the order in which they came."""
    seen: list[str] = []

    def ring() -> None:
        seen.append("timer")
        world.call_at(world.now(), lambda: seen.append("timer set by a timer"))

    async def sleep() -> None:
        await world.sleep_until(due)
        seen.append("sleep")

    async def time_out() -> None:
        with trio.move_on_at(due):
            await trio.sleep_forever()
        seen.append("deadline")

    async def compute() -> None:
        await world.run_blocking(work, DUE, cost=DUE)
        seen.append("thread")

    listener = await network.listen(Multiaddr.parse(place))
    ready(listener.addr)
    stream = await listener.accept()
    due = world.now() + DUE
    async with stream, trio.open_nursery() as nursery:
        world.call_at(due, ring)
        for wait in (sleep, time_out, compute):
            nursery.start_soon(wait)
        world.call_at(due - DUE / 2, lambda: ready(listener.addr))
        await stream.receive_some(1)
        seen.append("bytes")
    return seen


def block(seconds: float) -> None:
    time.sleep(seconds)  # noqa: TID251 - in a thread of the process that is stopped


async def main() -> None:
    """Print where it listens, then when it is ready and all is due, then what it saw."""

    def ready(addr: Multiaddr) -> None:
        print(json.dumps([str(addr), time.monotonic() + DUE]), flush=True)  # noqa: T201, TID251

    async with open_world() as world:
        place = "/ip4/127.0.0.1/tcp/0"
        print(json.dumps(await live(world, TcpNetwork(), place, ready, block)))  # noqa: T201


def state_of(pid: int) -> str:
    """Return the state of a process as the kernel calls it: S waits, R runs, T is stopped."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]


async def test_a_stopped_process_runs_its_timers_before_it_reads() -> None:
    with subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-m", __name__], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        addr, _ = json.loads(process.stdout.readline())
        async with await TcpNetwork().dial(Multiaddr.parse(addr)) as stream:
            _, due = json.loads(process.stdout.readline())
            # Busy, it would look at its sockets once more before it looks at the time.
            while state_of(process.pid) != "S":  # noqa: ASYNC110
                await trio.sleep(0.01)  # noqa: TID251
            process.send_signal(signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)  # noqa: ASYNC222
            await stream.send_all(b"x")
            # the stop outlasts all waits
            await trio.sleep(due - time.monotonic())  # noqa: TID251
            process.send_signal(signal.SIGCONT)
            seen = json.loads(process.stdout.readline())
    assert set(seen[:4]) == OWN_CLOCK
    assert set(seen[4:]) == READ


def test_so_does_a_paused_node() -> None:
    async def play(simulation: Simulation) -> list[str]:
        addrs: list[Multiaddr] = []
        seen: list[str] = []

        async def stopped(node: SimNode) -> None:
            seen.extend(await live(node.world, node.network, "/memory/0", addrs.append, abs))

        async def peer(node: SimNode) -> None:
            async with await node.network.dial(addrs[0]) as stream:
                await swarm.sleep(0.1)
                swarm.pause("stopped", 2 * DUE)
                await stream.send_all(b"x")
                await swarm.sleep(3 * DUE)

        async with open_swarm(simulation) as swarm:
            swarm.add("stopped", stopped)
            await swarm.sleep(0.1)
            swarm.add("peer", peer)
            await swarm.sleep(4 * DUE)
        return seen

    seen = run_simulation(play, seed=1).value
    assert seen is not None
    assert set(seen[:4]) == OWN_CLOCK
    assert set(seen[4:]) == READ


if __name__ == "__main__":
    trio.run(main)
