"""Peak memory of DiLoCo members with SmolLM2's 135 M weights: node processes and workers.

``python -m bench diloco-memory [--json FILE] [--rounds N]``

Two members on this machine take a few inner steps of drawn weights on short windows of Python's
library, exchange them in four bits, and write the model at the end. A node holds digests and
serves files, so its memory must not grow with the model: the exit status is 1 beyond `MOST`.
A worker holds weights, gradients, two moments, and a vector or two at a time; pages of mapped
states count too. Linux only.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import trio

from bench.devices import SHAPES
from bench.report import Report
from p2p.machine import load_or_create_key
from p2p.node.tables import write_table
from roles.contract import Run
from roles.contract.core.diloco import DilocoTerms
from roles.own.draft import read_draft
from roles.own.editions import sign_edition
from roles.own.layout import RunFolder
from roles.own.nodes import LocalNodes

MOST: Final = 400
"""MB that a node process may take: Python and its libraries are the most of it."""
CAST: Final = {"trainer-1": "trainer", "trainer-2": "trainer"}
CONFIG: Final = """\
[membership]
interval = 1.0

[role.trainer.diloco]
evaluate_every = 0
"""


def run(args: Sequence[str]) -> int:
    """Play, and look at each process's high-water mark at the end."""
    parser = argparse.ArgumentParser(prog="python -m bench diloco-memory")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args(args)
    report = Report("diloco-memory")
    with tempfile.TemporaryDirectory() as place:
        peaks, seconds = trio.run(_play, RunFolder(Path(place)), options.rounds)
    for kind, found in peaks.items():
        report.add("135 M weights", kind, "peak memory", "MB", found)
    report.add("135 M weights", "all", f"{options.rounds} rounds", "s", [seconds])
    print(report)
    report.write(options.json)
    return int(max(peaks["node"]) > MOST)


def _signed(folder: RunFolder, rounds: int) -> Run:
    keys = {name: load_or_create_key(folder.node(name) / "key") for name in CAST}
    terms = DilocoTerms(
        outer_steps=rounds, inner_steps=2, sequences=2, window=32, held_out=2, warmup=1,
        grace=300.0, patience=600.0,
    )  # fmt: skip
    draft = {
        "name": "memory",
        "days": 1,
        "trainers": [str(key.peer_id) for key in keys.values()],
        "model": {"shape": write_table(SHAPES["smollm2"]), "context": 128},
        "algorithm": "diloco",
        "diloco": write_table(terms),
    }
    folder.config.write_text(CONFIG)
    now = time.time()  # noqa: TID251 - a command line tool
    run = sign_edition(
        read_draft(draft, "the bench", now),
        load_or_create_key(folder.owner),
        folder.owner,
        folder.document,
    )
    folder.document.write_bytes(run.document)
    return run


async def _play(folder: RunFolder, rounds: int) -> tuple[dict[str, list[float]], float]:
    signed, began = _signed(folder, rounds), time.perf_counter()
    async with trio.open_nursery() as nursery:
        nodes = LocalNodes(folder, signed, CAST, nursery)
        await nodes.start()
        while not all(_is_over(nodes, name) for name in CAST):
            await nodes.news.wait()
        seconds = time.perf_counter() - began
        peaks: dict[str, list[float]] = {"node": [], "worker": []}
        for name in CAST:
            process = nodes.children[name].process
            assert process is not None
            peaks["node"].append(_peak(process.pid))
            peaks["worker"].append(max(map(_peak, _below(process.pid))))
        await nodes.stop()
        nursery.cancel_scope.cancel()
    return peaks, seconds


def _is_over(nodes: LocalNodes, name: str) -> bool:
    status = nodes.children[name].status
    return status is not None and bool(status["roles"].get("trainer", {}).get("sample"))


def _below(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            yield child
            yield from _below(child)


def _peak(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1000
    return 0.0
