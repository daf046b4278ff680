"""The exchange of a DiLoCo round beside torch's gloo, on shaped lines in network namespaces.

``python -m bench allreduce [--json FILE] [--mbit 40] [--members 4] [--values 4194304]``

Each machine has a line of its own, both ways; Linux, as root. What a member must send is
2 (n - 1) / n vectors, whichever way it is done: that at the rate of its line is the least time.
The share of the line is that time by the time until the slowest member had the mean, encryption
and digests included; headers alone take 4 %. An audit follows, of a piece of each member: one
in 64 where a vector is small, one in ten thousand where it is as large as INTELLECT-1's. "times
faster" is beside gloo in float32.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, Final

import trio

from bench.report import Report
from p2p.concurrency import Notifier
from roles.contract.core.diloco import Codec
from roles.diloco.core.pieces import PieceGrid
from sim.net.link import MBIT, LinkSpec
from sim.studies.lab.machines import EmulationConfig, open_emulation

GLOO: Final = "gloo"
SUBJECTS: Final = (GLOO, "fp32", "int8", "int4")
PATIENCE: Final = 300.0
"""Seconds for one course on a busy machine."""
LEAST: Final = 0.85
"""Share of the line's rate that float32 must reach."""


def run(args: list[str]) -> int:
    """Run the bench; 1 if float32 fills less than `LEAST` of the line."""
    parser = argparse.ArgumentParser(prog="python -m bench allreduce")
    parser.add_argument("--mbit", type=float, default=40.0)
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--values", type=int, default=1 << 22)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(args)
    report, found = Report("allreduce"), dict[str, list[float]]()
    audited: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for how in SUBJECTS:
            whole, checked = trio.run(course, how, options)
            found.setdefault(how, []).append(whole)
            audited.setdefault(how, []).append(checked)
    case = f"{options.members} at {options.mbit:g} Mbit/s"
    shares: dict[str, list[float]] = {}
    for how, seconds in found.items():
        least = least_seconds(how, options)
        shares[how] = [least / one for one in seconds]
        report.add(case, how, "all-reduce", "s", seconds)
        report.add(case, how, "with the audit", "s", audited[how])
        report.add(case, how, "share of the line", "", shares[how])
        faster = [one / two for one, two in zip(found[GLOO], seconds, strict=True)]
        report.add(case, how, "times faster", "", faster)
    print(report)
    report.write(options.json)
    return 0 if max(shares["fp32"]) >= LEAST else 1


def least_seconds(how: str, options: Any) -> float:
    """Return the seconds that a line needs for a member's upload."""
    size = PieceGrid.of(options.values, Codec.FP32 if how == GLOO else Codec(how)).total_bytes
    sent = 2 * (options.members - 1) / options.members * size
    return float(8 * sent / (options.mbit * MBIT))


async def course(how: str, options: Any) -> tuple[float, float]:
    """Seconds of the slowest member, without and with the audit."""
    said, news = list[dict[str, Any]](), Notifier()
    link = LinkSpec(up=options.mbit, down=options.mbit)

    def hear(words: dict[str, Any]) -> None:
        said.append(words)
        news.notify_all()

    async def heard(what: str) -> list[float]:
        """Return a line of each member."""
        while len(found := [one[what] for one in said if what in one]) < options.members:
            await news.wait()
        return found

    with trio.fail_after(PATIENCE), ExitStack() as stack:
        async with open_emulation(EmulationConfig()) as emulation:
            pipes = [stack.enter_context(_pipe(emulation.folder / at)) for at in ("meet", "go")]
            for rank in range(options.members):
                machine = await emulation.add(f"m{rank}", link, lambda _: None)
                words = (how, rank, options.members, options.values, emulation.folder)
                line = [sys.executable, "-m", "bench.allreduce_member", *map(str, words)]
                await machine.start(line, hear)
            for pipe, what in zip(pipes, ("listens", "up"), strict=True):
                await heard(what)
                pipe.write(bytes(options.members))
            return max(await heard("seconds")), max(await heard("audited"))
    raise AssertionError


def _pipe(place: Path) -> BinaryIO:
    """Return a pipe that both sides can open at once, and that stays open."""
    os.mkfifo(place)
    return open(os.open(place, os.O_RDWR), "wb", buffering=0)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
