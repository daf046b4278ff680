"""What an operator meets: stopped nodes, damaged files, packages that fail."""

from __future__ import annotations

import json
import logging
import os
import socket
from pathlib import Path
from typing import ClassVar

import pytest

from p2p.errors import ConfigError
from p2p.node.dashboard.commands import ASK_SECONDS, read
from p2p.node.folders import SOCKET
from p2p.node.role import Fact, Progress
from p2p.node.screen import progress_of
from roles.own.__main__ import main as run_main
from roles.own.report import kept
from roles.trainer.curve import PROGRESS
from roles.trainer.metrics import METRICS
from tests.support.stub_node import stub_node


async def test_a_stopped_node_is_a_sentence(tmp_path: Path, autojump_clock) -> None:
    """After SIGSTOP the kernel goes on accepting for it: ``shoal status`` waited for ever."""
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / SOCKET))
        silent.listen(1)
        with pytest.raises(ConfigError, match=f"nothing for {ASK_SECONDS:g} s: it is stopped"):
            await read(tmp_path, "/api/picture")
    assert autojump_clock.current_time() == ASK_SECONDS


def test_a_damaged_line_of_metrics_costs_that_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report failed, and blamed progress.json."""
    (tmp_path / "trainer").mkdir()
    (tmp_path / PROGRESS).write_bytes(b"digest\n" + json.dumps({"step": 3}).encode())
    lines = [json.dumps({"step": step, "loss": 0.5, "reward": 0.1}) for step in (1, 2, 3)]
    (tmp_path / METRICS).write_text("\n".join([lines[0], '{"step": \x00}', *lines[1:], "[1"]))
    curves = kept(tmp_path)["curves"]
    assert any([point[0] for point in curve] == [1, 2, 3] for curve in curves.values())
    said = capsys.readouterr().err
    assert f"{tmp_path / METRICS}: damaged, and left out: line 2, 5" in said


class Faulty:
    """A role of a package whose author made two mistakes."""

    name: ClassVar[str] = "faulty"

    def health(self) -> dict[str, object]:
        raise KeyError("made")

    def progress(self) -> Progress:
        return None  # type: ignore[return-value]


class Sound:
    """A role without one."""

    name: ClassVar[str] = "sound"

    def progress(self) -> Progress:
        return Progress(facts=(Fact("now", "drawing"),))


def test_what_a_role_says_of_itself_ends_no_node(caplog: pytest.LogCaptureFixture) -> None:
    """A ``progress()`` that raised ended the node, and said nothing of whose it was."""
    node, faulty = stub_node(None), Faulty()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert progress_of(node, [faulty, Sound()]) == [Sound().progress()]
            health = node.guard.health(faulty)
    assert health == {"failed": "KeyError: 'made'"}
    assert len(caplog.messages) == 2, "each mistake is told once"
    assert all("role=faulty" in one and "package tests" in one for one in caplog.messages)


def test_a_pipe_for_a_draft_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``init`` waited for somebody to write to it."""
    os.mkfifo(tmp_path / "draft")
    assert run_main(["init", str(tmp_path / "run"), "--draft", str(tmp_path / "draft")]) == 2
    assert "is no regular file" in capsys.readouterr().err
