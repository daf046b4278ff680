"""Sweeps: which settings can be varied, and how what came of them is shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import sim
from p2p.errors import ConfigError
from sim.cli import main
from sim.run.report import sweep_plots
from sim.run.scenario import load_scenario
from sim.run.sweep import changed, run_one, summarise

RING = Path(__file__).parent.parent.parent / "examples" / "ring" / "ring.toml"


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
    text = page.read_text(encoding="utf-8")
    assert (
        "rounds by hold: medians with intervals, a curve for each of link.up = 1; link.up = 10"
        in text
    )
    assert "slowest_round by link.up" in text


def test_only_numbers_that_were_varied_are_drawn() -> None:
    scenario = load_scenario(str(RING))
    runs = [run_one(scenario, 1, {"hold": hold}) for hold in (0.1, 0.2)]
    settings = summarise(runs)["settings"]
    assert len(sweep_plots(settings, ["rounds"])) == 1
    assert sweep_plots(settings, []) == []
    assert sweep_plots(settings[:1], ["rounds"]) == []


def test_play_returns_a_row_for_each_run() -> None:
    rows = sim.play(str(RING), range(1, 3), hold=[0.1, 0.2], link__up=5)
    assert [(row["seed"], row["hold"], row["link.up"]) for row in rows] == [
        (1, 0.1, 5), (2, 0.1, 5), (1, 0.2, 5), (2, 0.2, 5),
    ]  # fmt: skip
    assert all(row["rounds"] > 10 for row in rows)  # type: ignore[operator]
