"""One line a step: bounded, whole, and never in the way of learning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from p2p.errors import StorageError
from p2p.identity import KeyPair
from p2p.machine import RealWorld
from roles.engines.base import StepReport
from roles.trainer import metrics
from roles.trainer.metrics import METRICS, OLDER, Metrics

KEY = KeyPair(b"t" * 32)


def report(step: int) -> StepReport:
    return StepReport(
        step=step, loss=-1 / 3, k3=0.001, ratio_max=1.5, clipped=0.01, capped=0.02,
        entropy=0.5, gradient_norm=2.0, tokens=900, changed=0.0345678912,
    )  # fmt: skip


async def note(written: Metrics, step: int) -> None:
    await written.note(report(step), 0.25, [0, 1, 2], 3.0, replayed=12, lies=1)


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines() if line]


async def test_a_line_says_what_a_step_was(tmp_path: Path) -> None:
    await note(Metrics(RealWorld(KEY, tmp_path).disk), 7)
    (line,) = (tmp_path / METRICS).read_text().splitlines()
    assert json.loads(line) == {
        "step": 7, "loss": -0.333333, "k3": 0.001, "ratio_max": 1.5, "clipped": 0.01,
        "capped": 0.02, "entropy": 0.5, "gradient_norm": 2.0, "tokens": 900,
        "changed": 0.0345679, "reward": 0.25, "staleness_mean": 1.0, "staleness_max": 2,
        "seconds": 3.0, "replayed": 12, "lies": 1,
    }  # fmt: skip
    assert len(line) < 310


async def test_two_files_of_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "METRICS_BYTES", 1000)
    written = Metrics(RealWorld(KEY, tmp_path).disk)
    for step in range(20):
        await note(written, step)
        assert (tmp_path / METRICS).stat().st_size <= 1000
    assert steps(tmp_path / OLDER) + steps(tmp_path / METRICS) == list(range(12, 20))


async def test_a_line_that_a_crash_cut_off_spoils_no_other(tmp_path: Path) -> None:
    world = RealWorld(KEY, tmp_path)
    await note(Metrics(world.disk), 1)
    path = tmp_path / METRICS
    path.write_bytes(path.read_bytes()[:-40])
    await note(Metrics(world.disk), 2)
    torn, whole = path.read_text().splitlines()
    assert json.loads(whole)["step"] == 2
    with pytest.raises(json.JSONDecodeError):
        json.loads(torn)


async def test_a_disk_that_refuses_a_line_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = RealWorld(KEY, tmp_path)
    written = Metrics(world.disk)

    async def refuse(*_: object) -> None:
        raise StorageError("the disk is full")

    with monkeypatch.context() as full:
        full.setattr(world.disk, "append", refuse)
        await note(written, 1)
    await note(written, 2)
    assert steps(tmp_path / METRICS) == [2]
