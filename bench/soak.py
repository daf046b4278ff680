"""``python -m bench soak``: eight processes of one run on loopback, with trouble, for an hour.

Every ``--every`` seconds one kind: kill -9 and a restart, SIGSTOP for `PAUSE` seconds, a full
disk for as long (a tmpfs of 96 MiB; left out where mounting is not allowed), or the next
edition of the run file. The learner, a thread that speaks the folder format of
roles/shared/exchange.py, takes ``--pace`` seconds a step: the swarm is mostly idle.

Figures of each node: memory of its process and of its workers in the second and the last
quarter, its troubles, and what went wrong: tracebacks in its log, versions and editions that it
is behind at the end, and lost work: how far its counts of all lives, or its newest version,
ever went back. Exit status 1 if anything went wrong, or honest work was rejected.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, ClassVar, Final

import trio

from bench.hostile.live import Vitals
from bench.hostile.raw import pause
from bench.report import Report
from p2p.wire import KI, MIB
from roles.demo.command import cpu_seconds, prepare
from roles.demo.shows import SORTING, RewardDemo
from roles.own.layout import TRAINER, VALIDATOR, RunFolder
from roles.own.nodes import LocalNodes
from roles.rl.learner import WarmUp
from roles.trl.run import SwarmRun

PAUSE: Final = 30.0
FULL: Final = (TRAINER, "inference-4")
"""Nodes on a disk of 96 MiB."""
TROUBLE: Final = (
    "kill inference-1", "stop inference-2", "full inference-4", "kill trainer",
    "edition relay-2", "stop trainer", "kill validator", "full trainer", "stop validator",
    "kill inference-4",
)  # fmt: skip
LASTING: Final = {
    "trainer": ("step", "submissions_taken"), "validator": ("accepted",),
    "inference": ("made", "accepted"),
}  # fmt: skip


class Soak(RewardDemo):
    """Two nodes that only relay, a trainer, a validator and four inference nodes."""

    cast: ClassVar[Mapping[str, str]] = {
        "relay-1": "none", "relay-2": "none", TRAINER: "trainer", VALIDATOR: "validator",
        **{f"inference-{number}": "inference" for number in range(1, 5)},
    }  # fmt: skip


def small_demo() -> Soak:
    """Return the sorting demo with small steps and a learner outside the node."""
    shown = {one.name: getattr(SORTING, one.name) for one in fields(SORTING)}
    learner = {"kind": "external", "groups": 16, "minibatches": 2, "evaluate_every": 0}
    learner["warm_up"] = WarmUp(steps=80, rate=4e-3, ramp=20)
    tables = {**SORTING.tables, "sampling": {"group_size": 8, "submission": 4}}
    return Soak(**{**shown, "steps": 100_000, "tables": tables, "learner": learner})


def learn_slowly(folder: Path, pace: float) -> None:
    """Publish for ever: each version is the last version with a little noise."""
    import numpy as np
    from safetensors.numpy import load_file, save

    def insist(action: Callable[..., object], *arguments: object) -> None:
        while True:
            try:
                action(*arguments)
                break
            except OSError:  # its disk is full
                time.sleep(1.0)  # noqa: TID251 - a thread of its own

    run, rng = SwarmRun(folder), np.random.default_rng(0)
    weights = load_file(Path(run.model) / "model.safetensors")
    insist(run.begin, run.first)
    for step in range(run.first + 1, run.steps + 1):
        insist(run.wait_groups, step)
        time.sleep(pace)  # noqa: TID251
        for name, value in weights.items():
            weights[name] = value + rng.normal(scale=1e-5, size=value.shape).astype(value.dtype)
        data = save(weights)
        insist(run.publish, step, lambda path, data=data: path.write_bytes(data))
        insist(run.report, step, {"loss": 0.0})
        insist(run.note_checkpoint, step, folder / "task.json")  # it needs nothing to go on


def kept(status: Mapping[str, Any]) -> dict[str, int]:
    """Return the counts of a node that never fall, in all its lives; those not yet read from
    disk after a start are left out."""
    found = {"newest": status["shardcast"]["newest"]}
    for role, said in status["roles"].items():
        lasting = said.get("life", said)
        found |= {key: lasting[key] for key in LASTING.get(role, ()) if lasting.get(key)}
    return {key: value for key, value in found.items() if value > 0}


def family(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(one for child in children for one in family(int(child)))]


def tracebacks(folder: Path) -> int:
    logs = [path.read_text(errors="replace") for path in folder.glob("log*")]
    return sum(text.count("Traceback (most recent call last)") for text in logs)


@contextmanager
def small_disks(folder: Path) -> Iterator[bool]:
    """Mount a small file system for each node of `FULL`; False if that is not allowed."""
    places = [folder / name for name in FULL]
    with contextlib.ExitStack() as stack:
        for place in places:
            place.mkdir()
            command = ["mount", "-t", "tmpfs", "-o", f"size={96 * MIB}", "soak", str(place)]
            if subprocess.run(command, capture_output=True, check=False).returncode:
                yield False
                return
            stack.callback(subprocess.run, ["umount", "-l", str(place)], check=False)
        yield True


class Watch:
    """Observations of the nodes, and the troubles that were caused."""

    def __init__(self, nodes: LocalNodes) -> None:
        self.nodes = nodes
        self.memory = defaultdict[str, list[tuple[float, float]]](list)
        self.most = dict[tuple[str, str], int]()
        self.lost, self.trouble = Counter[str](), Counter[tuple[str, str]]()

    def weigh(self) -> None:
        """Note each node's memory in MiB."""
        for name, child in self.nodes.children.items():
            with contextlib.suppress(OSError):  # it has just been killed
                assert child.process is not None
                own, *workers = [Vitals.of(pid).mib for pid in family(child.process.pid)]
                self.memory[name].append((own, sum(workers)))

    def count(self) -> None:
        """Record the losses of nodes. It is called long after a restart, since nodes read their
        counts from disk first."""
        for name, child in self.nodes.children.items():
            for key, value in kept(child.status).items() if child.status else ():
                if (before := self.most.get((name, key), value)) > value:
                    print(f"{name}: {key} fell from {before} to {value}", file=sys.stderr)
                    self.lost[name] += before - value
                self.most[name, key] = value

    async def give(self, kind: str, name: str) -> None:
        """Give one node trouble, and end it."""
        print(f"{time.strftime('%H:%M:%S')} {kind} {name}", file=sys.stderr, flush=True)
        self.trouble[name, kind] += 1
        child, folder = self.nodes.children[name], self.nodes.folder
        assert child.process is not None
        if kind == "edition":
            sign = f"-m roles.own amend {folder.document} --out {folder.document} --expires 2d"
            command = [sys.executable, *sign.split(), "--key", str(folder.owner)]
            await trio.run_process(command, stdout=subprocess.DEVNULL)
        if kind in {"edition", "kill"}:
            child.kill()
            await child.process.wait()
            child.status = None
            await self.nodes.start_child(name)
        elif kind == "stop":
            child.process.send_signal(signal.SIGSTOP)
            await pause(PAUSE)
            child.process.send_signal(signal.SIGCONT)
        else:
            filler = folder.node(name) / "filler"
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while file.write(bytes(4 * KI)):
                    pass
            await pause(PAUSE)
            filler.unlink()


async def play(
    options: argparse.Namespace, folder: Path, report: Report, *, full: bool
) -> None:
    """Run the swarm and fill the report."""
    demo, place = small_demo(), RunFolder(folder)
    trouble = cycle([one for one in TROUBLE if full or "full" not in one])
    async with trio.open_nursery() as nursery:
        nodes = LocalNodes(place, prepare(demo, 0, place), demo.cast, nursery)
        watch = Watch(nodes)

        async def watch_for(seconds: float) -> None:
            for _ in range(round(seconds)):
                watch.weigh()
                await pause(1.0)
            watch.count()

        try:
            await nodes.start()
            learner = partial(trio.to_thread.run_sync, abandon_on_cancel=True)
            exchange = place.node(TRAINER) / "trainer/external"
            nursery.start_soon(learner, learn_slowly, exchange, options.pace)
            trainer = nodes.children[TRAINER]
            await trainer.wait_status(lambda status: status["shardcast"]["newest"] > 0)
            for _ in range(round(options.seconds / options.every) - 1):
                kind, name = next(trouble).split()
                nursery.start_soon(watch.give, kind, name)
                await watch_for(options.every)
            await watch_for(options.every)
            newest = watch.most[TRAINER, "newest"]
            with trio.move_on_after(60):
                for child in nodes.children.values():
                    await child.wait_status(lambda said: said["shardcast"]["newest"] >= newest)
            status = nodes.status
        finally:
            with trio.CancelScope(shield=True):
                await nodes.stop()
        nursery.cancel_scope.cancel()
    epoch, figures = max(said["epoch"] for said in status.nodes.values()), status.figures()
    for name, said in status.nodes.items():
        quarter = len(watch.memory[name]) // 4
        for when, start in (("2nd quarter", quarter), ("last quarter", 3 * quarter)):
            own, workers = zip(*watch.memory[name][start : start + quarter], strict=True)
            report.add(name, when, "node", "MiB", (statistics.median(own),))
            report.add(name, when, "workers", "MiB", (statistics.median(workers),))
        for kind in ("kill", "stop", "full", "edition"):
            if times := watch.trouble[name, kind]:
                report.add(name, "trouble", kind, "times", (times,))
        wrong = {
            "tracebacks": tracebacks(place.node(name)),
            "lost": watch.lost[name],
            "versions_behind": max(0, newest - said["shardcast"]["newest"]),
            "editions_behind": epoch - said["epoch"],
        }
        for what, number in wrong.items():
            report.add(name, "wrong", what, "", (number,))
    report.add("swarm", "wrong", "honest_rejected", "places", (figures["honest_rejected"],))
    report.add("swarm", "all", "accepted", "rollouts", (figures["rollouts_accepted"],))
    report.add("swarm", "all", "versions", "", (newest,))
    report.add("swarm", "all", "cpu", "CPU s/s", (cpu_seconds() / options.seconds,))


def run(args: Sequence[str]) -> int:
    """Run ``python -m bench soak [--json FILE] [--seconds N] [--every N] [--pace N]``."""
    parser = argparse.ArgumentParser(prog="python -m bench soak", description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--every", type=float, default=100.0, help="seconds between troubles")
    parser.add_argument("--pace", type=float, default=20.0, help="seconds of a step")
    options, report = parser.parse_args(args), Report("soak")
    with (
        tempfile.TemporaryDirectory(prefix="shoal-soak-") as name,
        small_disks(Path(name)) as full,
    ):
        if not full:
            print("no tmpfs may be mounted here: no disk is filled", file=sys.stderr)
        trio.run(partial(play, options, Path(name), report, full=full))
    print(report)
    report.write(options.json)
    return int(any(row.median for row in report.rows if row.subject == "wrong"))
