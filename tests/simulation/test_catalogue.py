"""The list of scenarios: complete, by theme, with a cost, within 80 columns."""

from __future__ import annotations

import pytest

from sim.cli import main
from sim.run.catalogue import THEMES, cost
from sim.run.scenario import scenario_names
from tests.support.scenarios import RING


def test_every_scenario_has_one_theme_and_a_cost() -> None:
    listed = [name for costs in THEMES.values() for name in costs]
    assert sorted(listed) == sorted(scenario_names())
    for costs in THEMES.values():
        assert all(str(seconds)[0] in "125" and seconds > 0 for seconds in costs.values())
    assert (cost("soak_month"), cost("black_hole")[-1]) == ("83 min", "s")


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
