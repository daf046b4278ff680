"""Which node a command is about."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from p2p.node.cli import key_main
from p2p.node.dashboard.commands import peers_main, status_main
from p2p.node.folders import running
from roles.doctor import main as doctor_main
from tests.e2e.node_process import node
from tests.support.runs import RUN


def test_a_node_is_named_by_its_folder_or_the_runs_or_not_at_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``status`` took ``--data DIR``, ``pause`` took ``DIR``, and nobody remembered which."""
    (tmp_path / "run.shoal").write_bytes(RUN.document)
    folder = tmp_path / "trainer"
    arguments = ("--run", str(tmp_path / "run.shoal"))
    with node(folder, *arguments) as one, node(tmp_path / "a", *arguments) as other:
        peer = one.line_with("event", "started")["peer"]
        one.line_with("event", "joined")
        other.line_with("event", "joined")
        for words in ([str(folder)], ["--data", str(folder)], [str(tmp_path)]):
            assert status_main([*words, "--json"]) == 0
            assert json.loads(capsys.readouterr().out)["own"] == peer
            assert key_main(words) == 0
            assert capsys.readouterr().out.strip() == peer
        assert status_main([str(tmp_path)]) == 0
        assert f"\n{tmp_path / 'a'}\n" in capsys.readouterr().out
        assert peers_main([str(tmp_path)]) == 0
        assert f"this is {folder}; there are {tmp_path / 'a'}" in capsys.readouterr().err
        assert status_main([str(folder), "--data", str(tmp_path)]) == 2
        if sys.platform == "linux":
            assert {folder, tmp_path / "a"} <= set(running())
        one.process.kill()
        one.process.wait()
        capsys.readouterr()
        assert status_main([str(folder)]) == 1
        said = capsys.readouterr().err
    assert "does not run (its log ends on " in said
    assert f"this starts it: shoal node --data {folder} --json --listen " in said
    doctor_main([str(folder)])
    assert f"the run {RUN.name!r}" in capsys.readouterr().out
