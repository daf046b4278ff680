"""Cost of publishing, serving, relaying and keeping a policy: CPU per GB, memory, bytes on
disk.

Real processes over loopback: an origin publishes, receivers fetch from it and from each other
(up to 16 peers every receiver relays a share to all others). "delivered" is the CPU of all
processes for each GB that a receiver got, which is how libtorrent's 4.3 s were counted;
"receiver" is one of them, relaying included; "publish" and "hand-out" are the origin's.
"memory" is the largest anonymous memory of any process, "disk" what is below a receiver's
folder. Weights are bf16 from a normal distribution, or bytes without any pattern (``--noise``).

``python -m bench store --node '{...}'`` is one of the processes; the tests that kill them use
it too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import trio

from bench.report import Report
from p2p.identity import KeyPair, PeerId, ProtocolId
from p2p.machine import open_world
from p2p.shardcast import (
    NO_POLICY,
    PolicyVersion,
    RosterEntry,
    Shardcast,
    ShardcastConfig,
    open_shardcast,
)
from p2p.shardcast.core import events as ev
from p2p.shardcast.index import digest_of
from p2p.swarm.swarm import open_host
from p2p.wire import MIB
from p2p.world import World

RUN: Final = b"bench"
ANNOUNCE: Final = ProtocolId("/bench/announce/1.0.0")
GB: Final = 1e9
UPLOAD: Final = 1e9
"""Bytes a second that every peer is said to upload: all are alike."""
PATIENCE: Final = 300.0
"""Seconds for a process to say something, on a busy machine."""
LIBTORRENT: Final = 4.3
"""CPU seconds of libtorrent 2 (v1 torrents) per GB delivered, on the machine class of
shared/reference/weight-distribution.md."""


def key(number: int) -> KeyPair:
    """Return the key of a process, which every other process knows."""
    return KeyPair(digest_of(b"bench node %d" % number))


def write_weights(path: Path, size: int, *, noise: bool = False) -> None:
    """Write a safetensors file of about ``size`` bytes.

    It repeats one tensor of 16 MiB; no chunk sees the repetition.
    """
    rng = np.random.default_rng(1)
    tensor = min(size, 16 * MIB) // 2 * 2
    count = max(1, size // tensor)
    described = {
        f"layer.{number}": {
            "dtype": "BF16",
            "shape": [tensor // 2],
            "data_offsets": [number * tensor, (number + 1) * tensor],
        }
        for number in range(count)
    }
    header = json.dumps(described).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        values = rng.standard_normal(tensor // 2, dtype=np.float32) * np.float32(0.02)
        data = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        if noise:
            data = rng.bytes(tensor)
        for _ in range(count):
            file.write(data)


# One process


def anonymous_bytes() -> int:
    """Memory of this process that no file stands behind."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


class BenchNode:
    """Node ``number`` of ``count``; 0 publishes."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.number, self.count = int(told["number"]), int(told["count"])
        self.folder = Path(told["folder"])
        self.config = ShardcastConfig(**told.get("config", {}))
        self.traces = bool(told.get("traces", False))
        self.peak = 0

    def say(self, **what: object) -> None:
        """Print one JSON line for the parent process."""
        print(json.dumps(what), flush=True)

    async def watch_memory(self, world: World) -> None:
        """Note the largest size, ten times a second."""
        while True:
            self.peak = max(self.peak, anonymous_bytes())
            await world.sleep(0.1)

    async def run(self) -> None:
        """Serve until standard input ends."""
        self.folder.mkdir(parents=True, exist_ok=True)
        others = [key(number).peer_id for number in range(self.count) if number != self.number]
        async with (
            open_world(self.folder, key(self.number)) as world,
            open_host(world=world, listen=["/ip4/127.0.0.1/tcp/0"]) as host,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(self.watch_memory, world)

            def announce(data: bytes) -> None:
                for other in others:
                    host.send(other, ANNOUNCE, data)

            async with open_shardcast(
                world,
                host,
                self.config,
                run=RUN,
                may_publish=key(0).peer_id.__eq__,
                roster=lambda: [RosterEntry(peer, UPLOAD) for peer in others],
                announce=announce,
            ) as shardcast:

                def hear(peer: PeerId, data: bytes) -> None:
                    shardcast.receive_announcement(peer, data)

                with host.receiving(ANNOUNCE, hear):
                    if self.traces:
                        self.trace(shardcast)
                    nursery.start_soon(self.report_newest, shardcast)
                    self.say(listens=str(host.addrs[0]), newest=shardcast.newest)
                    lines = trio.wrap_file(sys.stdin)
                    async for line in lines:
                        order = json.loads(line)
                        if "dial" in order:
                            for addr in order["dial"]:
                                await host.connect_addr(addr)
                            self.say(dialled=len(order["dial"]))
                        else:
                            await self.publish(shardcast, order["publish"], order["path"])
            nursery.cancel_scope.cancel()

    def trace(self, shardcast: Shardcast) -> None:
        """Print the spans that an earlier life left, and each chunk that arrives."""
        found = [spans for e in shardcast._store._entries.values() for spans in e.verified]
        self.say(resumed=found)
        handle = shardcast._receiver._handle

        def handle_and_say(event: ev.Event) -> object:
            if isinstance(event, ev.ChunkCame) and event.is_right:
                self.say(came=event.header.index)
            return handle(event)

        shardcast._receiver._handle = handle_and_say

    async def publish(self, shardcast: Shardcast, version: int, path: str) -> None:
        """Publish, and report the cost."""
        before, began = time.process_time(), time.perf_counter()
        await shardcast.publish(PolicyVersion(version), path)
        self.say(
            published=version,
            cpu=time.process_time() - before,
            seconds=time.perf_counter() - began,
        )

    async def report_newest(self, shardcast: Shardcast) -> None:
        """Report the complete versions whenever they change."""
        newest = NO_POLICY
        while True:
            newest = await shardcast.wait_policy(PolicyVersion(newest + 1))
            stats = shardcast.stats
            self.say(
                whole=newest,
                weights=shardcast.weights(newest),
                cpu=time.process_time(),
                peak=max(self.peak, anonymous_bytes()),
                bytes_came=stats.from_origin + stats.from_peers,
                duplicates=stats.duplicates,
            )


# All of them


class BenchProcess:
    """A node in a process of its own."""

    def __init__(self, **told: object) -> None:
        self._unread: list[dict[str, Any]] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench", "store", "--node", json.dumps(told)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def order(self, **what: object) -> None:
        """Tell it to dial or to publish."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def line_with(self, *words: str) -> dict[str, Any]:
        """Return the next line with one of these words. Other lines stay for later calls.

        Raises:
            EOFError: The process ended, or says nothing for `PATIENCE`.
        """
        for number, waiting in enumerate(self._unread):
            if any(word in waiting for word in words):
                return self._unread.pop(number)
        assert self.process.stdout is not None
        timer = threading.Timer(PATIENCE, self.process.kill)
        timer.start()
        try:
            for line in self.process.stdout:
                said: dict[str, Any] = json.loads(line)
                if any(word in said for word in words):
                    return said
                self._unread.append(said)
        finally:
            timer.cancel()
        raise EOFError(f"the process ended with {self.process.wait()}")

    def kill_after(self, seconds: float) -> None:
        """Send SIGKILL after some seconds."""
        time.sleep(seconds)  # noqa: TID251 - real processes
        self.process.kill()

    def kill(self) -> list[dict[str, Any]]:
        """Kill the process with SIGKILL and return the lines that it had printed."""
        if self.process.stdin is None or self.process.stdin.closed:
            return []
        self.process.kill()
        self.process.stdin.close()
        assert self.process.stdout is not None
        lines = self.process.stdout.read().splitlines()
        self.process.stdout.close()
        self.process.wait()
        return [*self._unread, *map(json.loads, lines)]


@contextmanager
def bench_process(**told: object) -> Iterator[BenchProcess]:
    """Start a process for the length of the block."""
    process = BenchProcess(**told)
    try:
        yield process
    finally:
        process.kill()


def spread(folder: Path, size: int, receivers: int, *, noise: bool = False) -> dict[str, float]:
    """Publish one policy to all and return the cost."""
    origin_folder = folder / "0"
    origin_folder.mkdir()
    write_weights(origin_folder / "weights", size, noise=noise)
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(
                bench_process(
                    number=number, count=receivers + 1, folder=str(folder / str(number))
                )
            )
            for number in range(receivers + 1)
        ]
        addrs: list[str] = []
        for node in nodes:
            listens = node.line_with("listens")["listens"]
            node.order(dial=addrs)
            node.line_with("dialled")
            addrs.append(listens)
        began = {node: _cpu(node) for node in nodes}
        start = time.perf_counter()
        nodes[0].order(publish=1, path="weights")
        published = nodes[0].line_with("published")
        whole = [node.line_with("whole") for node in nodes]
        seconds = time.perf_counter() - start
        cpu = {node: _cpu(node) - began[node] for node in nodes}
    sent = (origin_folder / "weights").stat().st_size
    used = [_used(folder / str(number)) for number in range(1, receivers + 1)]
    delivered = sent * receivers / GB
    return {
        "publish CPU s/GB": published["cpu"] / (sent / GB),
        "publish seconds": published["seconds"],
        "hand-out CPU s/GB": (cpu[nodes[0]] - published["cpu"]) / (sent / GB),
        "receiver CPU s/GB": statistics.fmean(cpu[n] for n in nodes[1:]) / (sent / GB),
        "delivered CPU s/GB": sum(cpu.values()) / delivered,
        "seconds": seconds,
        "memory MiB": max(line["peak"] for line in whole) / MIB,
        "disk, of the policy": max(used) / sent,
        "duplicates, of what came": sum(one["duplicates"] for one in whole)
        / sum(one["bytes_came"] for one in whole[1:]),
    }


def _cpu(node: BenchProcess) -> float:
    """Return the CPU seconds of a process so far."""
    fields = Path(f"/proc/{node.process.pid}/stat").read_text(encoding="ascii").split(") ")[1]
    user, system = fields.split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _used(folder: Path) -> int:
    """Return the bytes that files below ``folder`` occupy."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def run(argv: Sequence[str]) -> int:
    """Print and write the figures; 1 if delivering costs more CPU than libtorrent."""
    parser = argparse.ArgumentParser(prog="python -m bench store", description=__doc__)
    parser.add_argument("--node", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--receivers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--noise", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    if options.node is not None:
        trio.run(BenchNode(options.node).run)
        return 0
    report = Report("store")
    case = f"{options.mib} MiB to {options.receivers}" + (", noise" if options.noise else "")
    found: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            values = spread(
                Path(folder), options.mib * MIB, options.receivers, noise=options.noise
            )
        for metric, value in values.items():
            found.setdefault(metric, []).append(value)
    for metric, measured in found.items():
        report.add(case, "shoal", metric, "", measured)
    print(report)
    report.write(options.json)
    return int(statistics.median(found["delivered CPU s/GB"]) > LIBTORRENT)
