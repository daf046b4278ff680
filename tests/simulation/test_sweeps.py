"""Sweeps: which settings can be varied, and how what came of them is shown."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest

from p2p.errors import ConfigError
from sim.cli import main
from sim.kernel.simulation import Simulation
from sim.run.report import drawing
from sim.run.scenario import load_scenario
from sim.run.sweep import changed
from tests.support.scenarios import RING, embedded


def test_the_line_of_a_machine_is_a_setting() -> None:
    scenario = load_scenario(str(RING))
    assert changed(scenario, {"link.up": 1, "hold": 0.2}).link.up == 1
    assert changed(scenario, {"link.up": 1}).link.down == scenario.link.down
    with pytest.raises(ConfigError, match=r"no line has link\.upp; did you mean 'up'\?"):
        changed(scenario, {"link.upp": 1})
    with pytest.raises(ConfigError, match=r"\[link\]: a link needs some upload"):
        changed(scenario, {"link.up": 0})


def test_a_sweep_prints_a_row_for_each_setting_and_says_how_far_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "sweep.html"
    arguments = ["sweep", str(RING), "--seeds", "1-2", "--jobs", "1", "--report", str(page)]
    assert main([*arguments, "--set", "hold=0.05,0.1", "--set", "link.up=1,10"]) == 0
    out, err = capsys.readouterr()
    assert len(re.findall(r"^ hold=0\.(?:05|1), link\.up=\d+ +2 ", out, re.MULTILINE)) == 4
    assert "8 of 8 runs, 0 failed" in err
    charts = {
        one["title"]: one for one in embedded(page.read_text("utf-8"), "report")["charts"]
    }
    labels = [line["label"] for line in charts["rounds by hold"]["lines"]]
    assert labels == ["link.up = 1", "link.up = 10"]
    assert "slowest_round by link.up" in charts


def test_a_piped_sweep_says_every_few_seconds_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sweep of 13 s that ended in one tenth of a line each was silent for most of them."""
    monkeypatch.setattr("sim.cli.TOLD_SECONDS", 0.05)
    assert main(["sweep", str(RING), "--seeds", "1-2", "--jobs", "1"]) == 0
    out, err = capsys.readouterr()
    said = err.splitlines()
    assert said[0] == "0 of 2 runs, 0 failed", "before the first has ended"
    assert said[-1] == "2 of 2 runs, 0 failed"
    assert len(said) > 3
    assert "of 2 runs" not in out


def test_a_page_of_a_sweep_has_a_point_for_each_seed_and_its_data_inside(
    tmp_path: Path,
) -> None:
    """Medians alone hide the one run in twenty that went wrong."""
    for name, settings, drawn in (
        ("by_setting", ["--set", "hold=0.05,0.1"], "rounds by hold"),
        ("by_seed", [], "rounds by seed"),
    ):
        page, found = tmp_path / f"{name}.html", tmp_path / f"{name}.json"
        arguments = ["sweep", str(RING), "--seeds", "1-3", "--jobs", "1", *settings]
        assert main([*arguments, "--report", str(page), "--json", str(found)]) == 0
        text, summary = page.read_text(encoding="utf-8"), json.loads(found.read_text())
        assert embedded(text, "data") == summary
        charts = {one["title"]: one for one in embedded(text, "report")["charts"]}
        points = [row["points"]["rounds"] for row in summary["settings"]]
        assert [[seed for seed, _ in row] for row in points] == [[1, 2, 3]] * len(points)
        dots = [(value, name) for _, value, _, name in charts[drawn]["dots"]]
        assert dots == [(value, f"seed {seed}") for row in points for seed, value in row]


def test_a_report_runs_only_its_own_scripts_and_fetches_nothing(tmp_path: Path) -> None:
    """It embeds what strangers' scenarios are called: a name must not end the element."""
    page = tmp_path / "run.html"
    assert main(["run", str(RING), "--report", str(page), "--set", "hold=0.1"]) == 0
    text = page.read_text(encoding="utf-8")
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digests = [
        f"'sha256-{base64.b64encode(hashlib.sha256(one.encode()).digest()).decode()}'"
        for one in scripts
    ]
    assert f'script-src {" ".join(digests)}"' in text
    assert "default-src 'none'" in text
    assert not re.search(r'(?:src|href)="(?!data:,|#)', text)
    hostile = drawing(Simulation(1), "</script><script>alert(1)</script>")
    assert hostile.count("</script>") == 2 + 3  # two data, uPlot, draw, report
