"""Cost of relaying circuits, and a newcomer's wait behind greedy peers.

The relay is a process of its own, on loopback, with production's limits. First 128 peers keep a
reservation and say nothing; then 100 peers hold reservations, ask for circuits to one another
and send through them as fast as they can, while honest newcomers reserve, are dialled through
the relay and answer, one after the other.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from contextlib import AsyncExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import trio

from bench.report import Report
from p2p import SwarmHost, open_host
from p2p.circuit.core.book import RelayConfig
from p2p.circuit.relay import relaying
from p2p.errors import ShoalError
from p2p.host import Stream, request, serve_requests
from p2p.identity import KeyPair, PeerId
from p2p.multiaddr import Multiaddr

RELAY: Final = KeyPair(bytes([200]) * 32)
ECHO: Final = "/bench/echo/1.0.0"
SINK: Final = "/bench/sink/1.0.0"
WARM_UP: Final = 10.0
"""Seconds for greedy peers to have taken what they can."""


async def _echo(_: PeerId, data: bytes) -> bytes:
    return data


def _relay(pipe: Connection) -> None:
    async def main() -> None:
        # all clients have one address here: no limits by network
        config = RelayConfig(strangers=True, per_network=1000)
        async with open_host(key=RELAY) as host:
            with relaying(host.world, host, RELAY, config) as relay:
                pipe.send(str(host.addrs[0]))
                while await trio.to_thread.run_sync(pipe.recv):
                    pipe.send((time.process_time(), relay.places))

    trio.run(main)


def _greedy(pipe: Connection, place: str, count: int) -> None:
    async def main() -> None:
        relay = Multiaddr.parse(place).through
        keys = [KeyPair(number.to_bytes(32, "big")) for number in range(1, count + 1)]
        async with AsyncExitStack() as stack:
            hosts: list[SwarmHost] = []
            taken = 0

            async def sink(stream: Stream) -> None:
                nonlocal taken
                while data := await stream.receive_some():
                    taken += len(data)

            async def be_greedy(host: SwarmHost) -> None:
                async with trio.open_nursery() as nursery:
                    while True:
                        for other in keys:
                            nursery.start_soon(send, host, other.peer_id)
                            await host.world.sleep(0.05)

            async def send(host: SwarmHost, other: PeerId) -> None:
                with suppress(ShoalError, trio.BrokenResourceError, trio.ClosedResourceError):
                    await host.connect_addr(relay.with_peer(other))
                    stream = await host.open_stream(other, SINK)
                    while True:
                        await stream.send_all(bytes(16384))

            for key in keys:
                host = await stack.enter_async_context(open_host(key=key, listen=[]))
                stack.enter_context(host.serving(SINK, sink))
                await host.listen(relay)
                hosts.append(host)
            pipe.send(None)
            async with trio.open_nursery() as nursery:
                for host in hosts:
                    nursery.start_soon(be_greedy, host)
                while await trio.to_thread.run_sync(pipe.recv):
                    pipe.send(taken)
                nursery.cancel_scope.cancel()

    trio.run(main)


async def _idle(pipe: Connection, relay: Multiaddr, seconds: float, report: Report) -> None:
    async with AsyncExitStack() as stack:
        for _ in range(128):
            host = await stack.enter_async_context(open_host(listen=[]))
            await host.listen(relay.through)
        before = await _ask(pipe)
        await host.world.sleep(seconds)
        after = await _ask(pipe)
        share = 100 * (after[0] - before[0]) / seconds
        report.add("128 reservations, idle", "relay", "share of a core", "%", [share])
        report.add("128 reservations, idle", "relay", "places left", "", [float(after[1])])


async def _ask(pipe: Connection) -> tuple[float, int]:
    pipe.send(True)
    answer: tuple[float, int] = await trio.to_thread.run_sync(pipe.recv)
    return answer


async def _newcomers(
    pipe: Connection, crowd: Connection, relay: Multiaddr, rounds: int, report: Report
) -> None:
    sleep, clock = trio.sleep, trio.current_time  # noqa: TID251 - a bench has no world
    await trio.to_thread.run_sync(crowd.recv)
    await sleep(WARM_UP)
    waits, began = [], clock()
    before, [cpu, _] = await _taken(crowd), await _ask(pipe)
    for _ in range(rounds):
        async with open_host(listen=[]) as home, open_host(listen=[]) as guest:
            with home.serving(ECHO, serve_requests(_echo)):
                started = clock()
                await home.listen(relay.through)
                await guest.connect_addr(home.addrs[0])
                await request(guest, home.peer_id, ECHO, b"hello")
                waits.append(clock() - started)
        await sleep(1.0)
    seconds = clock() - began
    rate = (await _taken(crowd) - before) / seconds / 2**20
    share = 100 * ((await _ask(pipe))[0] - cpu) / seconds
    case = "100 greedy peers"
    report.add(case, "newcomer", "reserved, dialled and answered", "s", waits)
    report.add(case, "relay", "carried, of 1 MiB/s", "MiB/s", [rate])
    report.add(case, "relay", "share of a core", "%", [share])


async def _taken(crowd: Connection) -> int:
    crowd.send(True)
    taken: int = await trio.to_thread.run_sync(crowd.recv)
    return taken


def run(args: list[str]) -> int:
    """Measure and print. ``--seconds`` sets the length of the quiet phase, ``--rounds`` the
    number of newcomers."""
    parser = argparse.ArgumentParser(prog="python -m bench relay", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(args)
    report = Report("relay")
    spawn = multiprocessing.get_context("spawn")
    for case in ("idle", "greedy"):
        pipe, theirs = spawn.Pipe()
        processes = [spawn.Process(target=_relay, args=(theirs,), daemon=True)]
        processes[0].start()
        place = pipe.recv()
        relay = Multiaddr.parse(place)
        if case == "idle":
            trio.run(_idle, pipe, relay, options.seconds, report)
        else:
            crowd, their_crowd = spawn.Pipe()
            greedy = spawn.Process(target=_greedy, args=(their_crowd, place, 100), daemon=True)
            greedy.start()
            processes.append(greedy)
            trio.run(_newcomers, pipe, crowd, relay, options.rounds, report)
        for process in processes:
            process.kill()
            process.join()
    print(report)
    report.write(options.json)
    return 0
