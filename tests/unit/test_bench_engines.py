"""``bench engines`` on a small random model, torch with torch: it stops, goes on, judges."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")


from bench import engines
from bench.falsified import FALSIFIED
from tests.model_folders import END, make_folder


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the bench sets it
    folder = tmp_path / "model"
    make_folder(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
    return folder


def test_what_was_measured_stays_and_the_rest_is_done_later(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, out = tmp_path / "store", tmp_path / "report.json"
    asked = [
        "--writer", "torch", "--model", str(model), "--store", str(store),
        "--new-tokens", "8", "--groups", "5", "--cheats", "1", "--falsified", "1",
        "--json", str(out),
    ]  # fmt: skip
    assert engines.run([*asked, "--seconds", "0"]) == engines.UNFINISHED
    assert not list(store.rglob("*.000"))
    assert engines.run(asked) == 0
    pieces = {path: path.stat().st_mtime_ns for path in store.rglob("*.00?")}
    assert sum(path.name.startswith("honest") for path in pieces) == 2 * 2
    rows = json.loads(out.read_text())["rows"]
    rejected = {
        row["case"]: row["median"]
        for row in rows
        if (row["metric"], row["subject"]) == ("rejected", "of a group")
    }
    assert rejected["honest"] == 0
    found = {name for name, share in rejected.items() if share == 1}
    sure = {"other seed", "another prompt", "int4 weights", "greedy", *FALSIFIED}
    # rounded to int4 so small a model still draws nearly the same tokens
    assert found >= sure - {"another model's tokens"}
    capsys.readouterr()
    assert engines.run(asked) == 0
    assert {path: path.stat().st_mtime_ns for path in store.rglob("*.00?")} == pieces
    assert "honest: 5 groups, " in capsys.readouterr().out
    assert engines.run([*asked, "--fitted"]) == 0
    assert "honest: 2 groups, " in capsys.readouterr().out
