"""A live node under attack: a real process, an attacker in another, and an honest newcomer once
a second.

Theory of operation
-------------------
The node is ``python -m p2p.node`` with an owner's run file, on loopback, without a role. Its
numbers before the attack are taken after one newcomer was served, when all that is imported
late is there. While the attack runs, a newcomer with a fresh key dials, pings and identifies
the node each second; how long the worst of them waits is the figure. When the attack ends, the
node has a minute to give back what it held.

The tree whose code the node runs is a parameter: the same attacks measure the code before and
after.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import trio

from bench.hostile.kinds import KINDS
from bench.hostile.raw import TROUBLE, pause
from p2p.identity import KeyPair
from p2p.multiaddr import Multiaddr
from p2p.swarm import identify
from p2p.swarm.swarm import open_host, ping

HERE: Final = Path(__file__).parent.parent.parent
PATIENCE: Final = 3.0
"""Seconds after which a newcomer gives up; three times what it should take."""
EVERY: Final = 1.0
"""Seconds between two newcomers."""
SAMPLE: Final = 0.25
"""Seconds between two looks at the process."""
START: Final = 30.0
"""Seconds for the node to say where it listens."""
SETTLE: Final = 60.0
"""Seconds that the node has after an attack to give everything back."""
MOST_SECONDS: Final = 1.0
"""Most seconds in which a newcomer must be served during the attack."""
MOST_MIB: Final = 150.0
"""Memory that the node may ever use."""
FREED_MIB: Final = 32.0
"""Memory above the former use that counts as freed: the allocator keeps nearly empty arenas,
and bounded caches are warm."""
FREED_FILES: Final = 4
"""Descriptors above those before that count as freed: timers and neighbours come and go."""

DRAFT: Final = (
    'name = "attacked"\ndays = 1\ntrainers = ["{trainer}"]\nvalidators = ["{validator}"]\n'
    'environments = ["sort"]\n[sampling]\nsteps = 60\ngroup_size = 16\nmax_new_tokens = 12\n'
    "[model.shape]\nvocabulary = 50\nwidth = 64\nlayers = 2\nquery_heads = 4\nkey_heads = 2\n"
    "head_width = 16\nfeed_forward = 192\n"
)


@dataclass(frozen=True, slots=True)
class Vitals:
    """Resource use of a process, from /proc."""

    mib: float
    most_mib: float
    threads: int
    files: int
    cpu: float
    """CPU time in seconds."""

    @classmethod
    def of(cls, pid: int) -> Vitals:
        """Return the vitals of a process.

        Raises:
            OSError: The process has gone.
        """
        status = dict(
            re.findall(
                r"^(\w+):\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE
            )
        )
        if "VmRSS" not in status:
            raise ProcessLookupError(f"process {pid} has ended")
        times = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks = int(times[11]) + int(times[12])
        return cls(
            mib=int(status["VmRSS"]) / 1024,
            most_mib=int(status["VmHWM"]) / 1024,
            threads=int(status["Threads"]),
            files=len(os.listdir(f"/proc/{pid}/fd")),
            cpu=ticks / os.sysconf("SC_CLK_TCK"),
        )


@dataclass(slots=True)
class Outcome:
    """Outcome of an attack."""

    name: str
    alive: bool = False
    served: list[float] = field(default_factory=list)
    """Seconds that each newcomer took; `PATIENCE` for those who gave up."""
    failures: int = 0
    mib_before: float = 0.0
    mib_most: float = 0.0
    mib_after: float = 0.0
    files_before: int = 0
    files_most: int = 0
    files_after: int = 0
    threads_most: int = 0
    cpu_percent: float = 0.0
    freed_after: float = float("inf")
    """Seconds after the attack until memory and descriptors were back; infinite if they were
    not in time.
    """
    crashes: int = 0
    """Tracebacks in the node's log and on its standard error."""
    blamed: int = 0
    """Penalties in the node's log."""
    said: str = ""
    """Last output of a node that died."""
    tally: dict[str, int] = field(default_factory=dict)
    """The attacker's counts."""

    @property
    def worst(self) -> float:
        """Seconds that the slowest newcomer took."""
        return max(self.served, default=PATIENCE)

    @property
    def median(self) -> float:
        """Median of the seconds that newcomers took."""
        return statistics.median(self.served) if self.served else PATIENCE

    def broken(self) -> list[str]:
        """Return the broken promises in words."""
        found = [] if self.alive else ["the node died"]
        if self.failures or self.worst > MOST_SECONDS:
            found.append(f"a newcomer waited {self.worst:.1f} s, {self.failures} gave up")
        if self.mib_most > MOST_MIB:
            found.append(f"{self.mib_most:.0f} MiB")
        if self.alive and self.freed_after > SETTLE:
            held = self.mib_after - self.mib_before, self.files_after - self.files_before
            found.append(f"not freed: {held[0]:+.0f} MiB, {held[1]:+d} files")
        if KINDS[self.name].honest and self.blamed:
            found.append(f"{self.blamed} penalties for honest peers")
        if self.crashes:
            found.append(f"{self.crashes} tracebacks")
        return found


class LiveNode:
    """The process that is attacked. Open it with `open_node_process`."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process = process
        self.folder = folder
        assert process.stdout is not None
        started = json.loads(process.stdout.readline() or '{"addrs": []}')
        joined = json.loads(process.stdout.readline() or '{"run": ""}')
        if not started["addrs"]:
            raise RuntimeError(f"the node did not start: {self.errors()}")
        self.addr = Multiaddr.parse(started["addrs"][0])
        self.run: str = joined["run"]

    def vitals(self) -> Vitals:
        """Memory, descriptors and CPU time of the process."""
        return Vitals.of(self.process.pid)

    @property
    def alive(self) -> bool:
        """True if the process runs."""
        return self.process.poll() is None

    def errors(self) -> str:
        """Standard error of the node."""
        return (self.folder / "errors").read_text(errors="replace")

    def log(self) -> str:
        path = self.folder / "data" / "log"
        return path.read_text(errors="replace") if path.exists() else ""


@functools.cache
def make_run_file(tree: Path) -> bytes:
    """Return an owner's run file, made by the usual command of ``tree`` once per process."""
    with tempfile.TemporaryDirectory(prefix="shoal-owner-") as name:
        folder = Path(name)
        draft, document = folder / "draft.toml", folder / "run.shoal"
        trainer, validator = (KeyPair(bytes((number,)) * 32).peer_id for number in (1, 2))
        draft.write_text(DRAFT.format(trainer=trainer, validator=validator))
        where = ["--key", str(folder / "owner.key"), "--out", str(document)]
        command = [sys.executable, "-m", "roles.own", "create", str(draft), *where]
        subprocess.run(
            command, check=True, capture_output=True, cwd=tree, env=_environment(tree)
        )
        return document.read_bytes()


def _environment(tree: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}


@contextmanager
def open_node_process(
    folder: Path, tree: Path, descriptors: int | None = None
) -> Iterator[LiveNode]:
    """Open a node that runs the code of ``tree``, with its own limit of open files.

    The node is killed at the end.
    """
    document = folder / "run.shoal"
    document.write_bytes(make_run_file(tree))

    def limit() -> None:
        if descriptors is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

    with (folder / "errors").open("w") as errors:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "p2p.node", "--json", "--data", str(folder / "data")),
                *("--run", str(document), "--listen", "/ip4/127.0.0.1/tcp/0"),
            ],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=tree,
            env=_environment(tree),
            preexec_fn=limit,
        )
    try:
        yield LiveNode(process, folder)
    finally:
        process.kill()
        process.communicate()


async def serve_newcomer(addr: Multiaddr, patience: float = PATIENCE) -> float:
    """Return the seconds until a fresh identity has dialled, pinged and identified the node."""
    async with open_host(listen=()) as host:
        start = time.perf_counter()
        with trio.fail_after(patience):
            peer = await host.connect_addr(addr)
            await ping(host, peer)
            async with await host.open_stream(peer, identify.PROTOCOL_ID) as stream:
                await identify.receive_info(stream)
        return time.perf_counter() - start


async def _send_newcomer(addr: Multiaddr, outcome: Outcome, patience: float) -> None:
    try:
        outcome.served.append(await serve_newcomer(addr, patience))
    except* TROUBLE:
        outcome.served.append(patience)
        outcome.failures += 1


def _watch(node: LiveNode, outcome: Outcome) -> None:
    with contextlib.suppress(OSError):
        vitals = node.vitals()
        outcome.mib_most = max(outcome.mib_most, vitals.most_mib)
        outcome.threads_most = max(outcome.threads_most, vitals.threads)
        outcome.files_most = max(outcome.files_most, vitals.files)


async def _keep_watching(node: LiveNode, outcome: Outcome) -> None:
    while True:
        _watch(node, outcome)
        await pause(SAMPLE)


def _start_attacker(
    node: LiveNode, name: str, tree: Path, seconds: float, seed: int
) -> subprocess.Popen[str]:
    command = [
        "bench.hostile.attacker",
        name,
        str(node.addr),
        str(seconds),
        node.run,
        str(seed),
        str(tree),
    ]
    return subprocess.Popen(
        [sys.executable, "-m", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=HERE,
        env=_environment(HERE),
        # A session of its own: Linux shares the CPU among sessions first (autogroup), as among
        # machines.
        start_new_session=True,
    )


async def _attack(
    node: LiveNode,
    outcome: Outcome,
    tree: Path,
    seconds: float,
    seed: int,
    patience: float = PATIENCE,
) -> None:
    """Run the attack and the newcomers side by side; the attack ends when the last newcomer is
    done.
    """
    process = _start_attacker(node, outcome.name, tree, seconds + 2 * patience, seed)
    try:
        assert process.stdout is not None
        # it has imported what it needs, and begins
        await trio.to_thread.run_sync(process.stdout.readline)
        cpu_before = node.vitals().cpu
        start = time.perf_counter()
        await pause(EVERY / 2)
        async with trio.open_nursery() as newcomers:
            while (passed := time.perf_counter() - start) < seconds and node.alive:
                newcomers.start_soon(_send_newcomer, node.addr, outcome, patience)
                await pause(min(EVERY, seconds - passed))
        if node.alive:
            used = node.vitals().cpu - cpu_before
            outcome.cpu_percent = 100 * used / (time.perf_counter() - start)
    finally:
        process.terminate()
        try:
            said, _ = process.communicate(timeout=PATIENCE)
            outcome.tally = json.loads(said or "{}")
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


async def _wait_freed(node: LiveNode, outcome: Outcome, settle: float) -> None:
    start = time.perf_counter()
    while node.alive:
        try:
            vitals = node.vitals()
        except OSError:
            return
        outcome.mib_after, outcome.files_after = vitals.mib, vitals.files
        passed = time.perf_counter() - start
        if (
            vitals.mib <= outcome.mib_before + FREED_MIB
            and vitals.files <= outcome.files_before + FREED_FILES
        ):
            outcome.freed_after = passed
            return
        if passed > settle:
            return
        await pause(SAMPLE)


async def attack_live(
    name: str,
    tree: Path,
    *,
    seconds: float = 5.0,
    settle: float = SETTLE,
    seed: int = 1,
    patience: float = PATIENCE,
) -> Outcome:
    """Run one kind of attack against a fresh node of ``tree``."""
    outcome = Outcome(name)
    with (
        tempfile.TemporaryDirectory(prefix="shoal-attack-") as folder,
        open_node_process(Path(folder), tree, KINDS[name].descriptors) as node,
    ):
        with contextlib.suppress(*TROUBLE):
            await serve_newcomer(node.addr, patience)
        before = node.vitals()
        outcome.mib_before, outcome.files_before = before.mib, before.files
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_keep_watching, node, outcome)
            with contextlib.suppress(OSError):  # the node has gone
                await _attack(node, outcome, tree, seconds, seed, patience)
            nursery.cancel_scope.cancel()
        _watch(node, outcome)
        await _wait_freed(node, outcome, settle)
        outcome.alive = node.alive
        log = node.log() + node.errors()
        outcome.crashes = log.count("Traceback (most recent call last)")
        outcome.blamed = log.count("penalty points")
        outcome.said = "" if node.alive else node.errors()[-400:]
    return outcome
