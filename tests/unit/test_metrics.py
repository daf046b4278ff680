"""Sinks take each step's numbers; none of them, whatever it does, is in the way of learning."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import trio

from roles.trainer import metrics
from roles.trainer.metrics import METRICS, OLDER, JsonLines, open_sinks
from tests.support.packages import install

VALUES = {"loss": -1 / 3, "k3": 0.001, "tokens": 900, "changed": 0.0345678912}


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines() if line]


def lines(tmp_path: Path) -> JsonLines:
    (tmp_path / "trainer").mkdir(exist_ok=True)
    return JsonLines("mine", tmp_path / "trainer")


def install_sinks(
    monkeypatch: pytest.MonkeyPatch, folder: Path, source: str, *names: str
) -> None:
    points = [f"{name.lower()} = own_sinks:{name}" for name in names]
    install(folder, "own-sinks", *points, group="shoal.sinks")
    (folder / "own_sinks.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "own_sinks", raising=False)


async def note(names: Sequence[str], folder: Path, count: int) -> None:
    async with open_sinks(names, "mine", str(folder / "trainer")) as sinks:
        for step in range(count):
            await sinks.note(step, VALUES)


async def test_a_line_says_what_a_step_was(tmp_path: Path) -> None:
    await note(["jsonl"], tmp_path, 1)
    assert (tmp_path / METRICS).read_text() == (
        '{"step":0,"loss":-0.333333,"k3":0.001,"tokens":900,"changed":0.0345679}\n'
    )


def test_two_files_of_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "METRICS_BYTES", 300)
    sink = lines(tmp_path)
    for step in range(20):
        sink.note(step, VALUES)
        assert (tmp_path / METRICS).stat().st_size <= 300
    kept = steps(tmp_path / OLDER) + steps(tmp_path / METRICS)
    assert kept == list(range(20 - len(kept), 20))
    assert len(kept) >= 4


def test_a_line_that_a_crash_cut_off_spoils_no_other(tmp_path: Path) -> None:
    lines(tmp_path).note(1, VALUES)
    path = tmp_path / METRICS
    path.write_bytes(path.read_bytes()[:-40])
    lines(tmp_path).note(2, VALUES)
    torn, whole = path.read_text().splitlines()
    assert json.loads(whole)["step"] == 2
    with pytest.raises(json.JSONDecodeError):
        json.loads(torn)


async def test_a_disk_that_refuses_a_line_stops_nothing(tmp_path: Path) -> None:
    async with open_sinks(["jsonl"], "mine", str(tmp_path / "trainer")) as sinks:
        (tmp_path / METRICS).mkdir()  # no line can be written to it
        await sinks.note(1, VALUES)
        (tmp_path / METRICS).rmdir()
        await sinks.note(2, VALUES)
    assert steps(tmp_path / METRICS) == [2]


async def test_an_own_sink_that_fails_or_hangs_is_dropped_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metrics, "PATIENCE", 1.0)
    install_sinks(
        monkeypatch,
        tmp_path,
        """
from time import sleep

class Own:
    def __init__(self, run, folder):
        self.file = open(folder / run, "w")
    def note(self, step, values):
        print(step, values["tokens"], file=self.file)
    def close(self):
        self.file.close()

class Raises:
    def __init__(self, run, folder):
        pass
    def note(self, step, values):
        raise KeyError("token")

class Hangs:
    def __init__(self, run, folder):
        pass
    def note(self, step, values):
        sleep(3)

class Refuses:
    def __init__(self, run, folder):
        raise SystemError("no account")

class Exits(Raises):
    def note(self, step, values):
        values.clear()
        raise SystemExit("no key")
""",
        "Own", "Raises", "Hangs", "Refuses", "Exits",
    )  # fmt: skip
    with caplog.at_level(logging.INFO):
        await note(["exits", "raises", "own", "hangs", "refuses", "jsonl"], tmp_path, 3)
    assert (tmp_path / "trainer" / "mine").read_text() == "0 900\n1 900\n2 900\n"
    assert steps(tmp_path / METRICS) == [0, 1, 2]
    assert [one.getMessage() for one in caplog.records] == [
        "sink_dropped name=refuses: SystemError: no account",
        "sink_dropped name=exits: SystemExit: no key",
        "sink_dropped name=raises: KeyError: 'token'",
        "sink_dropped name=hangs: it took over 1 s",
    ]


def test_a_simulated_trainer_writes_nothing_to_this_machine(tmp_path: Path) -> None:
    trio.run(note, ["jsonl"], tmp_path / "simulated" / "node", 1)
    assert not list(tmp_path.glob("*"))


async def test_a_trainer_that_ends_waits_for_its_sinks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_sinks(
        monkeypatch,
        tmp_path,
        """
class Own:
    def __init__(self, run, folder):
        self.folder = folder
    def close(self):
        (self.folder / "closed").touch()
""",
        "Own",
    )
    with trio.CancelScope() as scope:
        async with open_sinks(["own"], "mine", str(tmp_path / "trainer")):
            scope.cancel()
            await trio.lowlevel.checkpoint()
    assert (tmp_path / "trainer" / "closed").exists()
