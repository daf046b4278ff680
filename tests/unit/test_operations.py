"""What an operator meets: stopped nodes, damaged files, packages that fail."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from p2p.errors import ConfigError
from p2p.node.dashboard import commands
from p2p.node.folders import SOCKET
from p2p.node.role import Fact, Progress, RoleGuard
from p2p.node.screen import progress_of
from roles.own.__main__ import main as run_main


def test_a_stopped_node_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After SIGSTOP the kernel goes on accepting for it: ``shoal status`` waited for ever."""
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / SOCKET))
        silent.listen(1)
        monkeypatch.setattr(commands, "ASK_SECONDS", 0.1)
        with pytest.raises(ConfigError, match=r"nothing for 0\.1 s: it is stopped"):
            commands.read(tmp_path, "/api/picture")


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
    node: Any = SimpleNamespace(guard=RoleGuard())
    faulty = Faulty()
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
