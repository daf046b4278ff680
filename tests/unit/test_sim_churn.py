"""Machines that come and go: recorded, by the hours of a day, and after a full disk."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import trio
from hypothesis import given, settings, strategies as st

from p2p.errors import ConfigError, StorageError
from sim.errors import NodeFailed
from sim.faults.churn import DAY, Churn, ChurnModel, Lognormal, Session, Weibull, read_sessions
from sim.faults.plan import Fault
from sim.kernel.simulation import Simulation
from sim.kernel.virtual_time import run_simulation
from sim.node.swarm import SimNode, open_swarm
from sim.run.runner import run_scenario
from sim.run.scenario import load_scenario, place_of
from sim.workloads.supervision import RESTART_AFTER, supervise
from tests.sweeps import swept

FOREVER = Lognormal(1e9, 0.1)


async def idle(node: SimNode) -> None:
    await trio.sleep_forever()


def write(folder: Path, text: str) -> Path:
    path = folder / "lives.csv"
    path.write_text(text, encoding="utf-8")
    return path


# Recordings.


def test_a_recording_is_read_in_order_of_time(tmp_path: Path) -> None:
    path = write(tmp_path, "start,node,end\n20,b,30.5\n0,a,10\n\n10,a,12\n")
    assert read_sessions(path) == [
        Session(0, 10, "a"),
        Session(10, 12, "a"),
        Session(20, 30.5, "b"),
    ]


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


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 50), st.integers(1, 20)), max_size=12
    )
)
def test_a_replay_is_exactly_what_was_recorded(drawn: list[tuple[str, int, int]]) -> None:
    sessions: list[Session] = []
    for name, start, length in drawn:
        since = max((other.end for other in sessions if other.node == name), default=0.0)
        sessions.append(Session(since + start, since + start + length, name))
    seen: list[Session] = []

    async def main(simulation: Simulation) -> tuple[int, int]:
        async def live(node: SimNode) -> None:
            await node.world.disk.write("lives", b"%d" % node.life)
            await trio.sleep_forever()

        async with open_swarm(simulation) as swarm:
            births: dict[str, float] = {}

            def add(name: str) -> None:
                births[name] = simulation.now - 3
                swarm.add(name, live)

            swarm.on_return.append(lambda node: births.update({node.name: simulation.now - 3}))
            swarm.on_death.append(
                lambda node: seen.append(
                    Session(births[node.name], simulation.now - 3, node.name)
                )
            )
            await swarm.sleep(3)
            churn = Churn(swarm, ChurnModel(up=FOREVER, down=FOREVER, silent=0.5))
            churn.replay(sessions, add)
            await swarm.sleep(1000)
            return churn.deaths, churn.returns

    counts = run_simulation(main, seed=1, horizon=2000).value
    assert sorted(seen) == sorted(sessions)
    assert counts == (
        len(sessions),
        len(sessions) - len({session.node for session in sessions}),
    )


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


@given(st.floats(0, DAY), st.floats(0, DAY), st.floats(0, DAY))
def test_who_stays_away_longer_returns_later(now: float, away: float, more: float) -> None:
    model = ChurnModel(up=FOREVER, down=FOREVER, day_swing=0.9)
    assert model.return_after(now, away) <= model.return_after(now, away + more) + 1e-5


@pytest.mark.parametrize("swing", swept([0.8, 0.0], 1))
def test_arrivals_follow_the_curve_of_the_day(swing: float) -> None:
    """Whoever is away comes back with the chance 1 + swing * cos: 1,000 machines, two days,
    hour by hour.
    """
    arrivals: list[float] = []
    mean = 1.5 * DAY
    nodes = 1000

    async def main(simulation: Simulation) -> None:
        async with open_swarm(simulation) as swarm:
            model = ChurnModel(up=FOREVER, down=Weibull(1.0, mean), day_swing=swing)
            churn = Churn(swarm, model)
            for number in range(nodes):
                swarm.add(f"n{number}", idle)
            await swarm.sleep(DAY / 5)
            for number in range(nodes):
                churn.kill(f"n{number}")
            swarm.on_return.append(lambda node: arrivals.append(simulation.now))
            await swarm.sleep(2 * DAY)

    run_simulation(main, seed=5, horizon=4 * DAY)
    away, bins, surprise = nodes, 24, 0.0
    for number in range(bins):
        begin, end = (DAY / 5 + (number + step) * 2 * DAY / bins for step in (0, 1))
        came = sum(begin <= when < end for when in arrivals)
        turns = [2 * math.pi * when / DAY for when in (begin, end)]
        pace = (
            end
            - begin
            + swing * DAY / (2 * math.pi) * (math.sin(turns[1]) - math.sin(turns[0]))
        )
        chance = 1 - math.exp(-pace / mean)
        surprise += (came - away * chance) ** 2 / (away * chance * (1 - chance))
        away -= came
    assert surprise < 51, "chi-square of 24 bins: one seed in a thousand is beyond"


def test_an_hour_away_is_short_by_day_and_long_by_night() -> None:
    model = ChurnModel(up=FOREVER, down=FOREVER, day_swing=0.9)
    by_day, by_night = model.return_after(0, 3600), model.return_after(DAY / 2, 3600)
    assert by_day == pytest.approx(3600 / 1.9, rel=0.02)
    assert by_night > 3 * by_day


@pytest.mark.parametrize(
    "fields",
    [{"silent": 1.1}, {"day_swing": -0.1}, {"zone_all": 2}, {"day": 0}, {"zone_interval": 0}],
)
def test_a_model_that_makes_no_sense_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="churn"):
        ChurnModel(up=FOREVER, down=FOREVER, **fields)


def test_day_and_night_in_membership() -> None:
    result = run_scenario(load_scenario("day_and_night").with_changes(nodes=12), 1)
    assert result.ok, result.expectations


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

    async def main(simulation: Simulation) -> None:
        async with open_swarm(simulation) as swarm:
            node = swarm.add("n1", lambda node: supervise(node, process))
            await swarm.sleep(1)
            node.disk.limit(100)
            await swarm.sleep(15)

    outcome = run_simulation(main, seed=1, horizon=100)
    assert starts == pytest.approx([0, 10 + RESTART_AFTER], abs=0.01)
    assert outcome.simulation.witnessed["supervision/started a process again"] == 1


@pytest.mark.parametrize(
    "wrong", [ValueError("a bug"), ExceptionGroup("", [StorageError("full"), KeyError()])]
)
def test_no_other_failure_is_restarted(wrong: Exception) -> None:
    async def process(node: SimNode) -> None:
        await node.world.sleep(1)
        raise wrong

    async def main(simulation: Simulation) -> None:
        async with open_swarm(simulation) as swarm:
            swarm.add("n1", lambda node: supervise(node, process))
            await swarm.sleep(20)

    with pytest.raises(ExceptionGroup) as caught:
        run_simulation(main, seed=1, horizon=100)
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
