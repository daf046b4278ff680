"""``bench devices`` on the CPU, with a model that takes no time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from bench import devices


def test_each_case_is_written_as_soon_as_it_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease that ends takes nothing with it that was measured."""
    out = tmp_path / "devices.json"

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    asked = [
        "--device", "cpu", "--shapes", "tiny", "--learn", "tiny", "--rows", "16",
        "--new", "4", "--rounds", "1", "--json", str(out),
    ]  # fmt: skip
    monkeypatch.setattr(devices, "open_transformers", lambda *_: None)
    with monkeypatch.context() as patch:
        patch.setattr(devices, "learn", fail)
        with pytest.raises(KeyboardInterrupt):
            devices.run(asked)
    cases = {(row["case"], row["subject"]) for row in json.loads(out.read_text())["rows"]}
    drawn = "tiny, 16 rows of 4"
    assert cases == {(drawn, "draw and prove"), (drawn, "replay")}
    assert devices.run(asked) == 0
    rows = json.loads(out.read_text())["rows"]
    assert {"GRPO"} == {row["subject"] for row in rows} - {"draw and prove", "replay"}
    assert all(row["median"] > 0 for row in rows if row["metric"] != "memory")
