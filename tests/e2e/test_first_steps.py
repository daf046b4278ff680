"""Issue 10.11 and 10.13 to 10.22: what a person meets who starts from the README.

Commands run as real processes where signals, pipes or missing modules matter, and in this process
elsewhere.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import trio

from p2p import Multiaddr
from p2p.machine import open_world
from p2p.node.cli import REACH, reach
from p2p.node.live import LiveLine
from p2p.node.role import Progress
from proofs.checks import Verdict
from roles.inference import MAX_REASONS, OTHER, Inference, InferenceConfig, InferenceCounts
from tests.e2e.node_process import LOOPBACK, START_SECONDS, fail
from tests.unit.test_run_file import RUN

ROOT = Path(__file__).parent.parent.parent
ADDR = "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooWCKCeqLPSgMnDjyFsJuWqREDtKNHx1JEBiwaMXhCLNTRb"


@contextmanager
def started(*command: str, cwd: Path | None = None, **env: str) -> Iterator[subprocess.Popen[str]]:
    """A process of this Python, ended whatever happens; standard output and error together."""
    process = subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | env,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def play(*command: str, cwd: Path | None = None, **env: str) -> tuple[int, str]:
    """Exit code and all output of a process of this Python."""
    with started(*command, cwd=cwd, **env) as process:
        output, _ = process.communicate(timeout=START_SECONDS)
        return process.returncode, output


def lines_until(process: subprocess.Popen[str], start: str) -> list[str]:
    """Lines of output up to the first that begins with ``start``."""
    assert process.stdout is not None
    lines: list[str] = []
    while not lines or not lines[-1].startswith(start):
        line = process.stdout.readline()
        assert line, f"it ended without a line {start!r}: {lines}"
        lines.append(line)
    return lines


# 13: a live line


class Told(LiveLine):
    """Remembers the lines, with the seconds at which they came."""

    def __init__(self, node, roles) -> None:
        super().__init__(node, roles)
        self.lines: list[tuple[float, str]] = []

    async def _write(self, text: str) -> None:
        self._print(text)
        await trio.lowlevel.checkpoint()

    def _print(self, text: str) -> None:
        self.lines.append((round(trio.current_time() - self.began), text.strip()))

    began: float


class Worker:
    """A role that reports."""

    name: ClassVar[str] = "worker"

    def __init__(self) -> None:
        self.over = False

    def progress(self) -> Progress:
        return Progress(text="rollouts 256 made", over=self.over)


def stub_node(world, *, newest: int = 3) -> SimpleNamespace:
    """As much of a node as the line asks for."""
    members = [SimpleNamespace(policy=4), SimpleNamespace(policy=2)]
    membership = SimpleNamespace(size=2, members=lambda: members)
    return SimpleNamespace(
        world=world, membership=membership, shardcast=SimpleNamespace(newest=newest, fetching=None)
    )


async def test_a_piped_node_tells_once_a_minute_and_when_the_run_is_over(autojump_clock) -> None:
    """Issue 10.13: a joined worker printed its run's owner, and then nothing for ever."""
    worker = Worker()
    async with open_world() as world:
        line = Told(stub_node(world), [worker])
        line.began = trio.current_time()
        with trio.move_on_after(200.5):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(line.run)
                await trio.sleep(150.5)
                worker.over = True
    told = "policy 3 (the swarm has 4)   rollouts 256 made   peers 2"
    assert line.lines == [
        (0, told),
        (60, told),
        (120, told),
        (151, "over     the run is over: nothing is left to do, and this node only relays; Ctrl-C ends it"),
        (151, told),
        (200, f"ended    {told}"),
    ]


def test_a_worker_says_what_it_made_and_why_it_was_rejected() -> None:
    """Issue 10.13: made, accepted, rejected and why, in rollouts, with nothing that moves a cursor."""
    counts = InferenceCounts(submitted=9, rollouts=128)
    for verdict, reason in [
        (Verdict.ACCEPTED, "within limits"),
        (Verdict.REJECTED, "tokens implausible"),
        (Verdict.REJECTED, "activation exponents differ"),
        (Verdict.REJECTED, "activation exponents differ"),
    ]:
        counts.count(SimpleNamespace(verdict=verdict, reason=reason))  # type: ignore[arg-type]
    assert counts.describe() == (
        "rollouts 1,152 made, 128 accepted, 384 rejected (activation exponents differ, tokens implausible)"
    )
    for number in range(MAX_REASONS + 5):
        hostile = SimpleNamespace(verdict=Verdict.REJECTED, reason=f"\x1b[2J{number}")
        counts.count(hostile)  # type: ignore[arg-type]
    assert len(counts.reasons) == MAX_REASONS + 1
    assert counts.reasons[OTHER] == 7
    assert counts.describe().isprintable()
    role = Inference(InferenceConfig())
    role.counts = counts
    counts.idle = True
    assert role.progress() == Progress(text=counts.describe(), over=True)


def test_a_node_in_a_pipe_has_a_first_line_and_a_last_one(tmp_path: Path) -> None:
    """Issue 10.13, and 10.20: a node on loopback says that others cannot reach it."""
    run_file = tmp_path / "run.shoal"
    run_file.write_bytes(RUN.document)
    arguments = ["--data", str(tmp_path / "n"), "--run", str(run_file), *LOOPBACK]
    with started("-m", "p2p.node", *arguments) as process:
        first = lines_until(process, "no policy yet")
        assert first[-1] == "no policy yet   peers 0\n"
        assert any("only this machine can dial that" in line for line in first)
        process.send_signal(signal.SIGINT)
        assert lines_until(process, "ended")[-1] == "ended    no policy yet   peers 0\n"
        assert process.wait(timeout=5) == 0


# 20: addresses that others cannot reach


@pytest.mark.parametrize(
    ("place", "who"),
    [
        ("/ip4/127.0.0.1/tcp/1", "only this machine"),
        ("/ip6/::1/tcp/1", "only this machine"),
        ("/dns4/localhost/tcp/1", "only this machine"),
        ("/ip4/192.168.1.7/tcp/1", "only this network"),
        ("/ip4/100.64.0.9/tcp/1", "only this network"),
        ("/ip6/fe80::1/tcp/1", "only this network"),
        ("/ip4/8.8.8.8/tcp/1", ""),
        ("/dns4/seed.example.org/tcp/1", ""),
    ],
)
def test_who_can_dial_an_address_is_said(place: str, who: str) -> None:
    """Issue 10.20: ``others join with`` offered addresses that nobody else can reach."""
    said = REACH.get(reach(Multiaddr.parse(place)), "")
    assert said.startswith(who)
    assert bool(said) == bool(who)
