"""Sweeps: which settings can be varied, and how what came of them is shown."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest

import sim
from p2p.errors import ConfigError
from sim.cli import main
from sim.run.plots import sweep_plots, unit_of
from sim.run.report import page as drawing_page
from sim.run.scenario import load_scenario
from sim.run.sweep import changed, run_one, summarise
from tests.support.scenarios import RING


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


def test_a_page_of_a_sweep_has_a_point_for_each_seed_and_its_data_inside(
    tmp_path: Path,
) -> None:
    """Medians alone hide the one run in twenty that went wrong."""
    for name, settings, drawn in (
        ("by_setting", ["--set", "hold=0.05,0.1"], "rounds by hold"),
        ("by_seed", [], "rounds by seed: 3 runs"),
    ):
        page, found = tmp_path / f"{name}.html", tmp_path / f"{name}.json"
        arguments = ["sweep", str(RING), "--seeds", "1-3", "--jobs", "1", *settings]
        assert main([*arguments, "--report", str(page), "--json", str(found)]) == 0
        text, summary = page.read_text(encoding="utf-8"), json.loads(found.read_text())
        (data,) = re.findall(r'<script type="application/json" id="data">(.*)</script>', text)
        assert json.loads(data) == summary
        assert drawn in text
        points = [row["points"]["rounds"] for row in summary["settings"]]
        assert [[seed for seed, _ in row] for row in points] == [[1, 2, 3]] * len(points)
        for seed, value in (point for row in points for point in row):
            assert f"<title>seed {seed}: {value:g}</title>" in text
        assert text.count("<circle") == 3 * len(points) * len(summary["expected"])


def test_a_report_can_run_nothing_and_fetch_nothing_and_has_two_schemes(tmp_path: Path) -> None:
    """It embeds what strangers' scenarios are called: a name must not end the element."""
    page = tmp_path / "run.html"
    assert main(["run", str(RING), "--report", str(page), "--set", "hold=0.1"]) == 0
    text = page.read_text(encoding="utf-8")
    (style,) = re.findall(r"<style>(.*)</style>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    rule = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'"
    assert f'content="{rule}"' in text
    assert "prefers-color-scheme: dark" in style
    assert not re.search(r"style='|#[0-9a-f]{3,6}\b", text.replace(style, ""))
    hostile = drawing_page("x", [], data={"</script><script>": 1})
    assert hostile.count("</script>") == 1


def test_only_numbers_that_were_varied_are_drawn() -> None:
    scenario = load_scenario(str(RING))
    runs = [run_one(scenario, 1, {"hold": hold}) for hold in (0.1, 0.2)]
    settings = summarise(runs)["settings"]
    assert len(sweep_plots(settings, ["rounds"])) == 1
    assert unit_of("bytes_per_second") == "B/s"
    assert [unit_of(name) for name in ("bytes sent", "death_seconds_p99", "deaths")] == [
        "B", "s", "",
    ]  # fmt: skip
    assert sweep_plots(settings, []) == []
    assert sweep_plots(settings[:1], ["rounds"]) == []


def test_play_returns_a_row_for_each_run() -> None:
    rows = sim.play(str(RING), range(1, 3), hold=[0.1, 0.2], link__up=5)
    assert [(row["seed"], row["hold"], row["link.up"]) for row in rows] == [
        (1, 0.1, 5), (2, 0.1, 5), (1, 0.2, 5), (2, 0.2, 5),
    ]  # fmt: skip
    assert all(row["rounds"] > 10 for row in rows)  # type: ignore[operator]
