"""Machines that come and go: recorded, by the hours of a day, and after a full disk."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import trio
from hypothesis import given, strategies as st

from p2p.errors import ConfigError, StorageError
from sim.errors import NodeFailed
from sim.faults.churn import DAY, ChurnModel, Lognormal, read_sessions
from sim.faults.plan import Fault
from sim.node.swarm import SimNode, Swarm
from sim.run.runner import run_scenario
from sim.run.scenario import load_scenario, place_of
from sim.workloads.supervision import RESTART_AFTER, supervise
from tests.support.simulated import on_swarm

FOREVER = Lognormal(1e9, 0.1)


def write(folder: Path, text: str) -> Path:
    path = folder / "lives.csv"
    path.write_text(text, encoding="utf-8")
    return path


# Recordings.


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("node,start,end\na,0,10\nb,ten,20\n", "line 3: .*ten"),
        ("node,start,end\na,0,10\nb,5\n", "line 3: "),
        ("node,start,end\na,0,10,20\n", "line 2: .*more fields"),
        ("node,start,end\na,10,10\n", "line 2: .*end after it starts"),
        ("node,start,end\na,-1,10\n", "line 2: .*before 0"),
        ("node,start,end\na,nan,10\n", "line 2: "),
        ("node,start,end\na,0,inf\n", "line 2: "),
        ("node,start,end\n,0,10\n", "line 2: .*no name"),
        ("node,start,end\na,0,10\nb,0,5\na,9,20\n", "line 4: a lives already, since 0 s"),
        ("node,start,end\na,0,10\na,0,10\n", "line 3: .*the same as line 2"),
        ("node,begin,end\na,0,10\n", "line 2: .*start"),
        ('node,start,end\n"a,0,10\n', "lives.csv: "),
        ("node,start,end\n", "there is no session"),
        ("", "there is no session"),
    ],
)
def test_a_bad_line_of_a_recording_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=complaint) as caught:
        read_sessions(path)
    assert str(path) in str(caught.value)


def test_a_recording_that_is_not_there_or_no_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.csv"):
        read_sessions(tmp_path / "nowhere.csv")
    (tmp_path / "bytes.csv").write_bytes(b"node,start,end\n\xff,0,1\n")
    with pytest.raises(ConfigError, match=r"bytes\.csv"):
        read_sessions(tmp_path / "bytes.csv")


def test_the_recorded_scenario_has_the_deaths_of_its_recording() -> None:
    scenario = load_scenario("recorded")
    sessions = read_sessions(place_of(scenario.parameters["sessions"]))
    result = run_scenario(scenario, 1)
    assert result.ok, result.expectations
    assert result.metrics["deaths"] == sum(
        session.end < scenario.duration for session in sessions
    )
    lasting = sum(session.start < scenario.duration <= session.end for session in sessions)
    assert result.metrics["alive"] == 3 + lasting


def test_a_recording_of_another_number_of_machines_is_refused() -> None:
    with pytest.raises(ConfigError, match="17 machines were recorded"):
        run_scenario(load_scenario("recorded").with_changes(nodes=30), 1)


# The hours of a day.


@given(st.floats(0, 10 * DAY), st.floats(0, 3 * DAY), st.floats(0, 1))
def test_time_away_is_spent_at_the_pace_of_the_hour(
    now: float, away: float, swing: float
) -> None:
    model = ChurnModel(up=FOREVER, down=FOREVER, day_swing=swing)
    seconds = model.return_after(now, away)
    steps = 2000
    spent = sum(
        1 + swing * math.cos(2 * math.pi * (now + (step + 0.5) * seconds / steps) / DAY)
        for step in range(steps)
    )
    assert spent * seconds / steps == pytest.approx(away, abs=1.0)
    assert abs(seconds - away) <= swing * DAY / math.pi + 1


# Full disks.


def test_a_process_that_its_disk_ended_is_started_again() -> None:
    starts: list[float] = []

    async def process(node: SimNode) -> None:
        starts.append(node.simulation.now)
        await node.world.disk.replace("numbers", b"x" * 100)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            await node.world.sleep(10)
            await node.world.disk.append("numbers", b"more")
            raise AssertionError

    async def main(swarm: Swarm) -> None:
        node = swarm.add("n1", lambda node: supervise(node, process))
        await swarm.sleep(1)
        node.disk.limit(100)
        await swarm.sleep(15)
        witnessed = swarm.simulation.witnessed
        assert witnessed["supervision/started a process again"] == 1

    on_swarm(main, horizon=100)
    assert starts == pytest.approx([0, 10 + RESTART_AFTER], abs=0.01)


@pytest.mark.parametrize(
    "wrong", [ValueError("a bug"), ExceptionGroup("", [StorageError("full"), KeyError()])]
)
def test_no_other_failure_is_restarted(wrong: Exception) -> None:
    async def process(node: SimNode) -> None:
        await node.world.sleep(1)
        raise wrong

    async def main(swarm: Swarm) -> None:
        swarm.add("n1", lambda node: supervise(node, process))
        await swarm.sleep(20)

    with pytest.raises(ExceptionGroup) as caught:
        on_swarm(main, horizon=100)
    assert isinstance(caught.value.exceptions[0], NodeFailed)


def test_membership_survives_full_disks() -> None:
    """A node that starts on a full disk takes its numbers from the clock."""
    faults = (
        Fault(at=20.0, kind="full_disk", who=("n5", "n6"), seconds=30.0),
        Fault(at=25.0, kind="kill", who=("n5", "n7"), seconds=3.0),
    )
    parameters = {"lifetime": 1e9, "arrival": 5.0}
    scenario = load_scenario("churn").with_changes(
        nodes=10, duration=110.0, faults=faults, parameters=parameters, expect=()
    )
    result = run_scenario(scenario, 1)
    assert result.metrics["coverage"] == 1.0
    assert result.metrics["ghost_share"] == 0.0
