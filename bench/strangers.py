"""``python -m bench strangers``: what a hundred strangers cost the honest workers of a swarm.

A swarm of real processes on loopback (a relay, a trainer, a validator, honest workers; the
engine pretends, so that the trainer's own work is what there is) is pinned to one core, the
strangers, at nice 19, to another. By turns the strangers are quiet and send windows. In each
turn a newcomer begins, and its first acceptance is waited for. Figures: honest acceptances a
second, the same by second of the swarm's CPU (which a busy machine does not change), the
newcomer's first, the trainer's CPU, what the strangers cost the swarm (of a core that is the
swarm's own, the share that honest work loses), and what they left in the trainer's ledger and
among the gate's rows.

Gate: honest acceptances under attack are 80 % of those of quiet turns. Exit status 1 if not.
``--tree PATH`` measures the code of another checkout.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import trio

from bench.hostile.live import HERE, Vitals
from bench.hostile.raw import pause
from bench.hostile.strangers import KINDS, Orders
from bench.report import Report
from p2p.errors import BadMessage
from p2p.identity import verify
from p2p.machine import load_or_create_key
from p2p.shardcast.store import HEAD, decode_head_untrusted
from p2p.wire import KI
from proofs.checks import Limits
from roles.contract import Run, sign_run
from roles.contract.core.file import Delivery, EnvironmentPin, Terms
from roles.contract.core.sampling import SamplingTerms
from roles.envs.base import environment_digest
from roles.own.nodes import NodeProcess
from roles.protocol.core.terms import terms_digest
from roles.rl.learner import FILE, LearnerConfig, write_learner
from roles.rl.recipes import SORTING

WORKERS: Final = 2
"""Honest workers from the start; each turn has a newcomer more."""
WARM: Final = 200
"""Acceptances of each worker before the first turn: a few policies have come and gone."""
SHARE: Final = 0.8
"""Share of the quiet rate of honest acceptances that must remain."""
LEAD: Final = 3.0
"""Seconds that the strangers have before a turn counts: they are all connected by then."""
STATUS: Final = 0.5
"""Seconds between status lines of the nodes."""
NODE: Final = "[membership]\ninterval = 1.0\n"
FIRST_SECONDS: Final = 90.0
"""Most seconds to a newcomer's first acceptance, beyond its turn."""


@dataclass(slots=True)
class Turn:
    """Result of one turn."""

    seconds: float = 0.0
    attacked: float = 0.0
    """Seconds for which the strangers were at it."""
    accepted: int = 0
    """Honest submissions; the newcomer's, too."""
    rejected: int = 0
    swarm_cpu: float = 0.0
    trainer_cpu: float = 0.0
    kept_bytes: int = 0
    """Growth of the trainer's ledger and of the gate's rows, in bytes."""
    newcomer: float = FIRST_SECONDS
    """Seconds from its process's start to its first acceptance."""
    tally: dict[str, int] = field(default_factory=dict)

    @property
    def figures(self) -> dict[str, tuple[float, str]]:
        """Figures by name, with units."""
        return {
            "acceptances": (self.accepted / self.seconds, "1/s"),
            "acceptances_by_cpu": (self.accepted / max(self.swarm_cpu, 1e-9), "1/CPU s"),
            "newcomer_first": (self.newcomer, "s"),
            "trainer_cpu": (self.trainer_cpu / self.seconds, "CPU s/s"),
            "swarm_cpu": (self.swarm_cpu / self.seconds, "CPU s/s"),
            "kept_growth": (self.kept_bytes / self.seconds, "B/s"),
            "windows": (self.tally.get("windows", 0) / max(self.attacked, 1e-9), "1/s"),
            "window_bytes": (self.tally.get("bytes", 0) / max(self.attacked, 1e-9), "B/s"),
        }


def write_run(folder: Path, names: Sequence[str]) -> Run:
    """Keys of all nodes, the owner's run file, and the nodes' configuration."""
    keys = {name: load_or_create_key(folder / name / "key").peer_id for name in names}
    terms = Terms(
        name="strangers",
        expiry=2**32 - 1,
        environments=(EnvironmentPin(name="sort", digest=environment_digest("sort")),),
        trainers=(keys["trainer-1"],),
        validators=(keys["validator-1"],),
        model=replace(SORTING, engine="fake"),
        sampling=SamplingTerms(steps=100_000, group_size=8, submission=4, max_new_tokens=12),
        limits=replace(Limits.fp32(), end_probability=1e-12),
        delivery=Delivery(chunk_bytes=8 * KI),
    )
    run = sign_run(terms, load_or_create_key(folder / "owner.key"))
    (folder / "run.shoal").write_bytes(run.document)
    (folder / "node.toml").write_text(NODE)
    learner = LearnerConfig(groups=256, rate=8e-4, evaluate_every=0)
    (folder / "trainer-1" / FILE).write_text(write_learner(learner))
    return run


class BenchNode(NodeProcess):
    """A node of ``tree``, in a session of its own as `NodeProcess` makes it."""

    async def begin(self, folder: Path, bootstrap: str, role: str) -> None:
        """Start the node, and read its output until it ends."""
        where = (
            ["--bootstrap", bootstrap] if bootstrap else ["--run", str(folder / "run.shoal")]
        )
        await self.start([
            *("--role", role, "--data", str(self.folder), "--listen", "/ip4/127.0.0.1/tcp/0"),
            *("--config", str(folder / "node.toml"), "--json", "--status", str(STATUS)),
            *("--die-with-parent", *where),
        ])  # fmt: skip

    @property
    def vitals(self) -> Vitals:
        """Memory and CPU time of its process."""
        assert self.process is not None
        return Vitals.of(self.process.pid)


class BenchSwarm:
    """The swarm, and the strangers that attack it."""

    def __init__(self, folder: Path, turns: int, nursery: trio.Nursery) -> None:
        self._folder = folder
        self._nursery = nursery
        self._workers = [f"inference-{number + 1}" for number in range(WORKERS)]
        self.newcomers = [f"newcomer-{number + 1}" for number in range(turns)]
        names = ("relay-1", "trainer-1", "validator-1", *self._workers, *self.newcomers)
        self.run = write_run(folder, names)
        self.nodes = {name: BenchNode(name, folder) for name in names}
        self._bootstrap = ""
        self._stopping = False

    async def start(self) -> None:
        """Start all but the newcomers, and wait until work is accepted."""
        await self.add("relay-1", "none")
        greeting = await self.nodes["relay-1"].wait_greeting()
        self._bootstrap = greeting["addrs"][0]
        for name in ("trainer-1", "validator-1", *self._workers):
            await self.add(name, name.partition("-")[0])
        await self.trainer.wait_status(
            lambda _: all(self.accepted_of(name) > WARM for name in self._workers)
        )

    @property
    def trainer(self) -> BenchNode:
        """The attacked trainer."""
        return self.nodes["trainer-1"]

    async def add(self, name: str, role: str) -> None:
        """Start one of the nodes."""
        node = self.nodes[name]
        await node.begin(self._folder, self._bootstrap, role)
        self._nursery.start_soon(self._hear, node)

    async def _hear(self, node: BenchNode) -> None:
        await node.listen(lambda: None)
        if not self._stopping and node.name not in self.newcomers:  # those are killed
            log = (node.folder / "log").read_text(errors="replace")
            raise RuntimeError(f"{node.name} ended: {log[-2000:]}")

    async def stop(self) -> None:
        """Stop all nodes."""
        self._stopping = True
        for node in self.nodes.values():
            await node.stop()

    def said(self) -> list[dict[str, Any]]:
        """Return the health of the trainer's and the validator's roles, by their last
        statuses.
        """
        scorers = (("trainer-1", "trainer"), ("validator-1", "validator"))
        statuses = [(self.nodes[name].status, role) for name, role in scorers]
        return [one["roles"].get(role, {}) for one, role in statuses if one is not None]

    def accepted_of(self, name: str) -> int:
        """Accepted places of one worker."""
        peer = str(load_or_create_key(self._folder / name / "key").peer_id)
        records = [one.get("nodes", {}).get(peer, {}) for one in self.said()]
        return sum(record.get("accepted", 0) for record in records)

    def count(self, key: str) -> int:
        """Accepted places of all workers; strangers have none."""
        return sum(one.get(key, 0) for one in self.said())

    def newest(self) -> tuple[int, str]:
        """Number and digest of the newest policy, as the relay holds it."""
        store = f"store/{self.run.id.hex()[:16]}"
        found = [(0, bytes(32))]
        for path in (self.nodes["relay-1"].folder / store).glob(f"*{HEAD}"):
            with contextlib.suppress(OSError, BadMessage):
                held = decode_head_untrusted(path.read_bytes(), self.run.id, verify, store)
                found.append((int(held.manifest.version), held.manifest.weights_digest))
        number, digest = max(found)
        return number, digest.hex()

    def cpu(self) -> float:
        """Seconds of all nodes but newcomers, and their engines and environments."""
        own = [node.process.pid for node in self.nodes.values() if node.process is not None]
        return sum(map(_tree_cpu, own))

    def kept_bytes(self) -> int:
        """Bytes of the trainer's ledger and the gate's rows on disk."""
        folders = (self.trainer.folder / "ledger", self.trainer.folder / "trainer" / "gate")
        files = [file for folder in folders for file in folder.rglob("*")]
        total = 0
        for file in files:
            with contextlib.suppress(OSError):  # a row that is replaced meanwhile
                total += file.stat().st_size
        return total


def _tree_cpu(pid: int) -> float:
    """CPU seconds of a process and its children."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return Vitals.of(pid).cpu + sum(_tree_cpu(int(child)) for child in children)
    except OSError:
        return 0.0


@asynccontextmanager
async def strangers(orders: Orders, core: int, newest: Any) -> AsyncIterator[dict[str, int]]:
    """Run strangers on a core of their own for the length of the block. Yield an object that
    has their results afterwards."""
    tally: dict[str, int] = {}
    process = await trio.lowlevel.open_process(
        [sys.executable, "-m", "bench.hostile.strangers", orders.to_json()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=HERE,
        start_new_session=True,
    )
    os.sched_setaffinity(process.pid, {core})
    os.setpriority(os.PRIO_PROCESS, process.pid, 19)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_tell, process, newest)
            yield tally
            nursery.cancel_scope.cancel()
        assert process.stdin is not None
        assert process.stdout is not None
        await process.stdin.aclose()
        said = b""
        with trio.move_on_after(10):
            while not said.endswith(b"\n") and (piece := await process.stdout.receive_some()):
                said += piece
        with contextlib.suppress(ValueError):
            tally.update(json.loads(said))
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _tell(process: trio.Process, newest: Any) -> None:
    assert process.stdin is not None
    while True:
        await process.stdin.send_all("{} {}\n".format(*newest()).encode())
        await pause(0.5)


async def play_turn(
    swarm: BenchSwarm, newcomer: str, seconds: float, orders: Orders | None, core: int
) -> Turn:
    """Play one turn, quiet without ``orders``."""
    turn = Turn()
    addr = next(iter(swarm.trainer.greeting["addrs"])) if swarm.trainer.greeting else ""
    entered = time.perf_counter()
    async with contextlib.AsyncExitStack() as stack:
        if orders is not None:
            told = replace(
                orders, addr=addr, run=swarm.run.id.hex(), terms=terms_digest(swarm.run).hex()
            )
            turn.tally = await stack.enter_async_context(strangers(told, core, swarm.newest))
            await pause(LEAD)
        started = time.perf_counter()
        await swarm.trainer.wait_status(lambda _: True)
        accepted, cpu, kept = swarm.count("accepted"), swarm.cpu(), swarm.kept_bytes()
        rejected, own = swarm.count("rejected"), swarm.trainer.vitals.cpu
        await pause(seconds)
        turn.seconds = time.perf_counter() - started
        turn.accepted = swarm.count("accepted") - accepted
        turn.rejected = swarm.count("rejected") - rejected
        turn.swarm_cpu, turn.trainer_cpu = swarm.cpu() - cpu, swarm.trainer.vitals.cpu - own
        turn.kept_bytes = swarm.kept_bytes() - kept
        started = time.perf_counter()
        await swarm.add(newcomer, "inference")
        with trio.move_on_after(FIRST_SECONDS):
            await swarm.trainer.wait_status(lambda _: swarm.accepted_of(newcomer) > 0)
            turn.newcomer = time.perf_counter() - started
        turn.attacked = time.perf_counter() - entered
    swarm.nodes[newcomer].kill()
    return turn


async def measure(options: argparse.Namespace, report: Report) -> dict[str, list[Turn]]:
    """Play quiet and attacked turns alternately, and report the figures of both."""
    turns: dict[str, list[Turn]] = {"quiet": [], "attacked": []}
    swarm_core, attack_core = options.cores
    os.sched_setaffinity(0, {swarm_core})  # what is started from here on inherits it
    orders = Orders(
        addr="", run="", terms="", kind=options.kind, strangers=options.strangers,
        bytes_per_second=options.rate * 1000.0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="shoal-strangers-") as name:
        async with trio.open_nursery() as nursery:
            swarm = BenchSwarm(Path(name), 2 * options.turns, nursery)
            try:
                await swarm.start()
                for number, newcomer in enumerate(swarm.newcomers):
                    case = ("quiet", "attacked")[number % 2]
                    told = orders if number % 2 else None
                    turn = await play_turn(swarm, newcomer, options.seconds, told, attack_core)
                    turns[case].append(turn)
                    figures = {key: round(value, 3) for key, (value, _) in turn.figures.items()}
                    print(case, figures, turn.rejected, turn.tally, file=sys.stderr, flush=True)
            finally:
                with trio.CancelScope(shield=True):
                    await swarm.stop()
                nursery.cancel_scope.cancel()
    for case, played in turns.items():
        for key, (_, unit) in played[0].figures.items():
            values = [turn.figures[key][0] for turn in played]
            report.add(options.kind, case, key, unit, values)
    return turns


def strangers_cpu(turns: dict[str, list[Turn]]) -> float:
    """Return the CPU seconds per second that strangers cost the swarm: the cost of attacked
    turns beyond that of as many acceptances in quiet turns."""
    quiet, attacked = turns["quiet"], turns["attacked"]
    each = sum(turn.swarm_cpu for turn in quiet) / max(1, sum(turn.accepted for turn in quiet))
    beyond = sum(turn.swarm_cpu - each * turn.accepted for turn in attacked)
    return beyond / sum(turn.seconds for turn in attacked)


def run(args: Sequence[str]) -> int:
    """Run ``python -m bench strangers [--json FILE] [--kind NAME] [--strangers N] [--rate KB/S]
    [--seconds N] [--turns N] [--cores SWARM ATTACKERS] [--tree PATH]``.
    """
    parser = argparse.ArgumentParser(prog="python -m bench strangers", description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--kind", choices=KINDS, default="mixed")
    parser.add_argument("--strangers", type=int, default=100)
    parser.add_argument("--rate", type=float, default=50.0, help="KB/s of all strangers")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each turn")
    parser.add_argument("--turns", type=int, default=3, help="of each kind")
    parser.add_argument("--cores", type=int, nargs=2, default=(0, 1))
    parser.add_argument("--tree", type=Path, default=HERE, help="checkout whose nodes run")
    options = parser.parse_args(args)
    os.environ["PYTHONPATH"] = str(options.tree.resolve())
    os.environ["OMP_NUM_THREADS"] = "1"
    os.chdir(options.tree)  # ``python -m`` looks here first
    report = Report("strangers")
    turns = trio.run(measure, options, report)
    report.add(options.kind, "attacked", "strangers_cpu", "CPU s/s", (strangers_cpu(turns),))
    ratio = report.compare(options.kind, "acceptances", "attacked", "quiet")
    report.compare(options.kind, "acceptances_by_cpu", "attacked", "quiet")
    report.compare(options.kind, "newcomer_first", "attacked", "quiet")
    print(report)
    report.write(options.json)
    return int(ratio < SHARE)
