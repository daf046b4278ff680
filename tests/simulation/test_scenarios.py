"""Scenario files, the runner, and the command line around them."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from p2p.errors import ConfigError
from sim.cli import main
from sim.faults.plan import KINDS, Fault
from sim.run.catalogue import THEMES, cost
from sim.run.meanings import MEANINGS
from sim.run.report import report
from sim.run.runner import run_scenario
from sim.run.scenario import Scenario, load_scenario, scenario_from_table, scenario_names
from sim.run.sweep import changed, grid, run_one, summarise
from tests.support.scenarios import embedded
from tests.sweeps import DEEP, swept


@pytest.mark.parametrize("name", scenario_names())
def test_every_scenario_loads_and_says_what_it_asks(name: str) -> None:
    scenario = load_scenario(name)
    assert scenario.caption.endswith("?")
    assert scenario.expect
    assert [one.metric for one in scenario.expect if one.metric not in MEANINGS] == []
    scenario.open_workload()


def test_every_scenario_has_one_theme_and_a_cost() -> None:
    listed = [name for costs in THEMES.values() for name in costs]
    assert sorted(listed) == sorted(scenario_names())
    for costs in THEMES.values():
        assert all(str(seconds)[0] in "125" and seconds > 0 for seconds in costs.values())
    assert (cost("soak_month"), cost("black_hole")[-1]) == ("83 min", "s")


EVERYDAY = ("black_hole", "churn", "diloco", "lab_warm_small")
"""A quick one of most services; deep runs play all."""
HOURS = ("soak_month", "thousand", "volunteers")
"""100 CPU seconds, 400, and hours: for `python -m sim run`."""
PLAYED = [name for name in scenario_names() if name not in HOURS]


@pytest.mark.parametrize("name", PLAYED if DEEP else EVERYDAY)
def test_a_scenario_keeps_what_it_expects_of_itself(name: str) -> None:
    """``churn`` and ``eclipse`` failed at their own defaults; tests only loaded them."""
    result = run_scenario(load_scenario(name), 1)
    assert result.ok, [entry for entry in result.expectations if not entry["ok"]]
    assert {f"fault/{fault['kind']}" for fault in result.faults} <= set(result.witnessed)


DEMO_KEYS = {
    "peers", "greedy_start", "greedy_end", "reward_start", "reward_end", "policies",
    "staleness_max", "rollouts_accepted", "rollouts_rejected", "cheater_submitted",
    "cheater_accepted", "honest_rejected", "policy_bytes", "origin_upload_bytes",
    "leaf_share_from_peers", "seconds",
}  # fmt: skip


@pytest.mark.parametrize("seed", swept(range(1, 21), 1))
def test_the_spine_ends_whole_whatever_the_seed(seed: int) -> None:
    result = run_scenario(load_scenario("spine"), seed)
    assert result.ok, [entry for entry in result.expectations if not entry["ok"]]
    metrics = result.metrics
    assert set(metrics) >= DEMO_KEYS
    assert float(metrics["reward_end"]) > float(metrics["reward_start"])
    payload = float(metrics["policy_bytes"]) * float(metrics["policies"])
    # The first policy as it is, all others as patches of a hundredth.
    assert float(metrics["origin_upload_bytes"]) <= 0.5 * payload


def small(name: str, **changes) -> Scenario:
    return dataclasses.replace(load_scenario(name), **changes)


def test_a_broadcast_at_level_0_reaches_the_living() -> None:
    result = run_scenario(small("ten_thousand", nodes=300), 1)
    assert result.ok, result.expectations
    assert result.metrics["dead"] == 6
    assert result.metrics["times_bound"] < 1.5
    again = run_scenario(small("ten_thousand", nodes=300), 1)
    assert again.trace_hash == result.trace_hash
    assert run_scenario(small("ten_thousand", nodes=300), 2).trace_hash != result.trace_hash


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"speed": 3}, "unknown key 'speed'"),
        ({"link": {"upp": 3}}, r"\[link\]: unknown key 'upp'"),
        ({"link": {"up": -3}}, "upload"),
        ({"nodes": 0}, "nodes must be 1"),
        ({"duration": -1}, "duration"),
        ({"expect": [{"metric": "x"}]}, "at_least or at_most"),
        ({"faults": [{"at": 1, "kind": "x", "who": []}]}, "no fault is called 'x'"),
        ({"draw": {"start": 9.0, "end": 5.0}}, "end at least 2 s later"),
        ({"draw": {"start": 5.0, "end": 5.5}}, "end at least 2 s later"),
        ({"draw": 3}, r"\[draw\] must be a table"),
        ({"parameters": 3}, "must be a table"),
        ({"nodes": "many"}, "nodes must be a whole number, not 'many'"),
        ({"duration": "long"}, "duration must be a number, not 'long'"),
        ({"latency": -0.1}, "latency must not be negative"),
        ({"source": "here"}, "unknown key 'source'"),
        ({"workload": "sim.nowhere:Churn"}, "no workload"),
        ({"workload": "sim.workloads.churn:Nobody"}, "no workload"),
        ({"parameters": {"lifetime": "long"}}, "must be a number"),
    ],
)
def test_what_is_wrong_in_a_scenario_is_named(change: dict, complaint: str) -> None:
    table = {
        "caption": "?",
        "workload": "sim.workloads.churn:MembershipChurn",
        "nodes": 5,
        "duration": 30,
        **change,
    }
    with pytest.raises(ConfigError, match=complaint):
        run_scenario(scenario_from_table("test", table), 1)
    with pytest.raises(ConfigError, match=r"there are: .*churn"):
        load_scenario("no-such")


def mine(folder: Path, text: str) -> Path:
    """A scenario of one's own, which expects six nodes to be alive."""
    path = folder / "mine.toml"
    head = 'caption = "Mine?"\nworkload = "sim.workloads.churn:MembershipChurn"'
    path.write_text(f'{head}\n{text}\n[[expect]]\nmetric = "alive"\nat_least = 6\n')
    return path


def test_a_broken_expectation_fails_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = mine(
        tmp_path, 'nodes = 5\nduration = 40.0\n[[expect]]\nmetric = "no_such"\nat_most = 1'
    )
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    assert main(["run", str(path), "--json", str(out), "--report", str(page)]) == 1
    result = json.loads(out.read_text())
    assert [entry["ok"] for entry in result["expectations"]] == [False, False]
    keys = {
        "scenario", "seed", "level", "nodes", "trace_hash", "events", "virtual_seconds",
        "cpu_seconds",
    }  # fmt: skip
    assert keys <= result.keys()
    assert "FAILED" in capsys.readouterr().out
    assert main(["run", str(path), "--baseline", str(out)]) == 1
    assert "the trace is the same" in capsys.readouterr().out


def test_a_saved_plan_is_replayed_and_shrunk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "nodes = 6\nduration = 60.0\n[parameters]\nlifetime = 1e9\narrival = 1.0"
    path = mine(tmp_path, text)
    faults = [
        {"at": 20.0, "kind": "skew", "who": ["n1", "n2"], "seconds": 5.0, "value": 3.0},
        {"at": 30.0, "kind": "kill", "who": ["n3", "n4"]},
        {"at": 31.0, "kind": "clog", "who": ["n1"], "seconds": 5.0, "value": 1.0},
    ]
    plan = tmp_path / "plan.json"
    plan.write_text(
        json.dumps({"scenario": str(path), "seed": 1, "nodes": 6, "faults": faults})
    )
    assert main(["replay", str(plan)]) == 1
    small_plan = tmp_path / "small.json"
    assert main(["shrink", str(plan), "--out", str(small_plan)]) == 1
    left = json.loads(small_plan.read_text())["faults"]
    assert [fault["kind"] for fault in left] == ["kill"]
    assert len(left[0]["who"]) == 1
    capsys.readouterr()


def test_a_trace_opens_in_perfetto(tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    assert main(["trace", "churn", "--nodes", "5", "--duration", "20", "--out", str(out)]) == 0
    events = json.loads(out.read_text())["traceEvents"]
    kinds = {event["ph"] for event in events}
    assert kinds == {"X", "s", "f", "M"}
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} >= {
        f"n{n}" for n in range(5)
    }


def test_sweeps_try_every_setting_with_every_seed() -> None:
    assert grid({}) == [{}]
    assert grid({"a": [1, 2], "b": [3]}) == [{"a": 1, "b": 3}, {"a": 2, "b": 3}]
    scenario = changed(load_scenario("churn"), {"nodes": 6, "duration": 40.0, "lifetime": 5.0})
    assert (scenario.nodes, scenario.parameters["lifetime"]) == (6, 5.0)
    runs = [run_one(scenario, seed, {"lifetime": 1e9}) for seed in (1, 2)]
    summary = summarise(runs)
    assert summary["runs"] == 2
    assert set(summary["settings"][0]["metrics"]["alive"].values()) == {6}
    bad = run_one(scenario, 1, {"lifetime": "never"})
    assert bad.result is None
    assert "must be a number" in summarise([bad])["failed"][0]["why"]


def test_a_report_says_what_came_of_a_run_and_draws_its_lives() -> None:
    fault = Fault(at=30.0, kind="vanish", who=("n1",), seconds=20.0)
    result = run_scenario(small("churn", nodes=8, duration=60.0, faults=(fault,)), 1)
    content = embedded(report(result, "A <b>caption</b>"), "report")
    assert re.match(r"\d of 8 nodes live; a death is known to 99 % after", content["says"])
    swarm, *curves = content["charts"]
    assert swarm["rows"] == 8
    assert [span[0] for span in swarm["lives"]].count(1) >= 2  # it died and came back
    assert swarm["shades"] == [[30.0, 50.0, "vanish"]]
    assert "nodes alive" in [chart["title"] for chart in curves]
    measured = {row[0]["what"]: row for row in content["tables"][0]["rows"]}
    assert measured["coverage"][1][1] == measured["coverage"][2][1] == "share"
    assert embedded(report(result, ""), "data") == json.loads(json.dumps(result.to_json()))


def test_the_table_of_faults_is_documented() -> None:
    text = (Path(__file__).parent.parent.parent / "docs" / "simulation.md").read_text()
    assert [kind for kind in KINDS if f"`{kind}`" not in text] == []
