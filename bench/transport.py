"""Cost of the wire: a Shoal host against a bare trio TCP stream, two processes over loopback.

Bulk is reported "CPU-limited": bytes over the larger of the two processes' CPU time, that is
what one core per side could carry whatever else the machine is doing. Round trips, streams and
dials are CPU time per side.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import trio

import p2p
from bench.report import Report
from p2p.wire import KI, MIB

SINK: Final = p2p.ProtocolId("/shoal/bench-sink/1.0.0")
ECHO: Final = p2p.ProtocolId("/shoal/bench-echo/1.0.0")
CPU: Final = p2p.ProtocolId("/shoal/bench-cpu/1.0.0")
WRITES: Final = {"64 KiB": 64 * KI, "1 MiB": MIB, "4 KiB": 4 * KI}
BULK_BYTES: Final = 256 * MIB
SMALL_BYTES: Final = 64 * MIB
ROUND_TRIPS: Final = 3000
STREAMS: Final = 1000
DIALS: Final = 100
PINGS: Final = 300
IDLE: Final = 200


async def serve() -> None:
    """Run the other process: a Shoal host and bare sockets, which discard or echo all input."""

    async def sink(stream: trio.abc.Stream) -> None:
        while await stream.receive_some():
            pass
        await stream.send_all(b"!")

    async def echo(stream: trio.abc.Stream) -> None:
        while data := await stream.receive_some():
            await stream.send_all(data)

    async def cpu(peer: p2p.PeerId, data: bytes) -> bytes:
        if data == b"idle":
            gc.collect()
            return json.dumps(_resident()).encode()
        return json.dumps(time.process_time()).encode()

    async def bare(stream: trio.SocketStream) -> None:
        async with stream:
            await (sink if await stream.receive_some(1) == b"s" else echo)(stream)

    async with p2p.open_host() as host, trio.open_nursery() as nursery:
        host.set_handler(SINK, sink)
        host.set_handler(ECHO, echo)
        host.set_handler(CPU, p2p.serve_requests(cpu))
        listeners = await nursery.start(trio.serve_tcp, bare, 0)
        port = listeners[0].socket.getsockname()[1]
        print(json.dumps({"addr": str(host.addrs[0]), "port": port}), flush=True)
        await trio.to_thread.run_sync(sys.stdin.read)
        nursery.cancel_scope.cancel()


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@dataclass
class Bench:
    """The two processes of the bench."""

    host: p2p.SwarmHost
    peer: p2p.PeerId
    port: int

    async def other(self, question: bytes = b"") -> float:
        """Return the other process's CPU seconds, or its resident bytes."""
        return float(json.loads(await p2p.request(self.host, self.peer, CPU, question)))

    async def cpu(self, work: Callable[[], Awaitable[None]]) -> tuple[float, float]:
        """Return the CPU seconds of both sides for ``work``."""
        theirs, ours = await self.other(), time.process_time()
        await work()
        ours = time.process_time() - ours
        return ours, await self.other() - theirs

    @contextlib.asynccontextmanager
    async def bare(self, mode: bytes) -> AsyncIterator[trio.SocketStream]:
        async with await trio.open_tcp_stream("127.0.0.1", self.port) as stream:
            await stream.send_all(mode)
            yield stream

    async def bulk(self, stream: trio.abc.HalfCloseableStream, size: int) -> None:
        data = bytes(size)
        total = SMALL_BYTES if size < 16 * KI else BULK_BYTES
        for _ in range(total // size):
            await stream.send_all(data)
        await stream.send_eof()
        assert await stream.receive_some() == b"!"

    async def round_trips(self, stream: trio.abc.HalfCloseableStream) -> None:
        for _ in range(ROUND_TRIPS):
            await stream.send_all(bytes(100))
            await stream.receive_some()

    async def requests(self) -> None:
        for _ in range(STREAMS):
            await p2p.request(self.host, self.peer, CPU, b"")

    async def dials(self) -> None:
        for _ in range(DIALS):
            await self.host.disconnect(self.peer)
            await self.host.connect(self.peer)


def _rate(size: int, cpu: tuple[float, float]) -> float:
    total = SMALL_BYTES if size < 16 * KI else BULK_BYTES
    return total / max(cpu) / 1e6


async def _round(bench: Bench, note: Callable[[str, str, str, str, float], None]) -> None:
    for name, size in WRITES.items():
        async with bench.bare(b"s") as raw:
            cpu = await bench.cpu(partial(bench.bulk, raw, size))
        note(f"bulk {name}", "trio TCP", "CPU-limited", "MB/s", _rate(size, cpu))
        async with await bench.host.open_stream(bench.peer, SINK) as stream:
            cpu = await bench.cpu(partial(bench.bulk, stream, size))
        note(f"bulk {name}", "shoal", "CPU-limited", "MB/s", _rate(size, cpu))
    async with bench.bare(b"e") as raw:
        cpu = await bench.cpu(partial(bench.round_trips, raw))
    note("round trip", "trio TCP", "CPU, worse side", "us", max(cpu) / ROUND_TRIPS * 1e6)
    async with await bench.host.open_stream(bench.peer, ECHO) as stream:
        cpu = await bench.cpu(partial(bench.round_trips, stream))
    note("round trip", "shoal", "CPU, worse side", "us", max(cpu) / ROUND_TRIPS * 1e6)
    cpu = await bench.cpu(bench.requests)
    note("stream and request", "shoal", "CPU, worse side", "us", max(cpu) / STREAMS * 1e6)
    cpu = await bench.cpu(bench.dials)
    note("dial and identify", "shoal", "CPU, worse side", "ms", max(cpu) / DIALS * 1e3)


async def measure(addr: str, port: int, rounds: int, report: Report) -> None:
    """Interleaved rounds of everything, then the idle connections."""
    values: dict[tuple[str, str, str, str], list[float]] = {}

    def note(case: str, subject: str, metric: str, unit: str, value: float) -> None:
        values.setdefault((case, subject, metric, unit), []).append(value)

    async with p2p.open_host(listen=()) as host:
        peer = await host.connect_addr(p2p.Multiaddr.parse(addr))
        bench = Bench(host, peer, port)
        # First: later on, the other process has freed memory to reuse.
        note(
            "idle connection",
            "shoal",
            "resident, per side",
            "KiB",
            await _idle(bench, addr) / KI,
        )
        for _ in range(rounds):
            await _round(bench, note)
        note("ping under bulk", "shoal", "p50", "ms", (await _pings(bench, 0.5)) * 1e3)
        note("ping under bulk", "shoal", "p99", "ms", (await _pings(bench, 0.99)) * 1e3)
    for (case, subject, metric, unit), numbers in values.items():
        report.add(case, subject, metric, unit, numbers)
    for name in WRITES:
        report.compare(f"bulk {name}", "CPU-limited", "shoal", "trio TCP")
    report.compare("round trip", "CPU, worse side", "shoal", "trio TCP")


async def _pings(bench: Bench, quantile: float) -> float:
    """Seconds for a ping on the connection that carries a bulk stream."""
    times: list[float] = []
    async with (
        await bench.host.open_stream(bench.peer, SINK) as stream,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(_forever, stream)
        for _ in range(PINGS):
            times.append(await p2p.ping(bench.host, bench.peer))
        nursery.cancel_scope.cancel()
    return sorted(times)[int(len(times) * quantile)]


async def _forever(stream: trio.abc.SendStream) -> None:
    data = bytes(MIB)
    while True:
        await stream.send_all(data)


async def _idle(bench: Bench, addr: str) -> float:
    """Resident bytes of the other process for one more idle connection."""
    async with contextlib.AsyncExitStack() as stack:
        network = p2p.TcpNetwork()
        before = await bench.other(b"idle")
        for _ in range(IDLE):
            host = await stack.enter_async_context(p2p.open_host(network=network, listen=()))
            await host.connect_addr(p2p.Multiaddr.parse(addr))
        return (await bench.other(b"idle") - before) / IDLE


def run(args: Sequence[str]) -> int:
    """Run ``python -m bench transport [--json FILE] [--rounds N]``."""
    parser = argparse.ArgumentParser(prog="python -m bench transport", description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(args)
    report = Report("transport")
    command = [sys.executable, "-c", "import trio, bench.transport as t; trio.run(t.serve)"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        where = json.loads(other.stdout.readline())
        trio.run(measure, where["addr"], where["port"], options.rounds, report)
        other.stdin.close()
    print(report)
    report.write(options.json)
    return 0
