"""The scenario `volunteers`, small: real roles, whose time comes from device profiles."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sim.run.runner import run_scenario
from sim.studies.volunteers.timesheet import DECODING, IDLE, WAITING, Timesheet
from tests.support.scenarios import few_volunteers


@pytest.mark.deep
def test_the_shares_of_everybodys_time_add_up_to_one() -> None:
    metrics = run_scenario(few_volunteers(), 1).metrics
    groups: dict[str, list[float]] = {}
    activities = {
        "training", "saving", "encoding", "generating", "scoring", "loading", WAITING, IDLE,
    }  # fmt: skip
    for name, value in metrics.items():
        group, _, activity = name.rpartition("_")
        if activity in activities:
            groups.setdefault(group, []).append(float(value))
    assert set(groups) == {"trainer", "validators", "volunteers", "4x4090", "4x3090"}
    for group, shares in groups.items():
        # the trainer's engine replays while its node encodes
        most = 1.001 + float(metrics.get(f"{group}_encoding", 0.0))
        assert 0.999 <= sum(shares) <= most, group
        assert min(shares) >= 0, group
        assert len(shares) == (6 if group == "trainer" else 4), group


@pytest.mark.deep
def test_too_many_volunteers_waste_little_once_work_was_lost() -> None:
    """59 % of the rollouts went stale, and the trainer waited 14 % of the time."""
    many = few_volunteers(sized_for=24, batch_rollouts=384, validator="1xH100")
    early, whole = (
        run_scenario(replace(many, nodes=24, duration=seconds), 1).metrics
        for seconds in (1500.0, 2700.0)
    )
    lost, generated = (
        int(whole[name]) - int(early[name])
        for name in ("rollouts_lost_stale", "rollouts_generated")
    )
    assert lost < 0.15 * generated
    assert float(whole["trainer_idle"]) < 0.1
    assert int(whole["steps"]) - int(early["steps"]) >= 7


def test_a_timesheet_accounts_for_every_second_of_every_life() -> None:
    now = [0.0]
    sheet = Timesheet(lambda: now[0])
    sheet.begin_life()
    now[0] = 10
    with sheet.doing(DECODING):
        now[0] = 15
    assert sheet.spent(WAITING) == 15  # decoding keeps nobody from waiting
    with sheet.doing("loading"):
        now[0] = 17
    now[0] = 20
    assert sheet.alive == 20
    assert [sheet.spent(one) for one in (WAITING, "loading", IDLE)] == [15, 2, 3]
    with sheet.doing("generating"):
        now[0] = 24
        sheet.end_life()
        now[0] = 100
    assert (sheet.alive, sheet.spent("generating"), sheet.spent(IDLE)) == (24, 4, 3)
    sheet.begin_life()
    with sheet.doing("generating"):
        now[0] = 105
        sheet.restart()
        now[0] = 106
        assert (sheet.alive, sheet.spent("generating"), sheet.spent(IDLE)) == (1, 1, 0)
    now[0] = 108
    assert (sheet.alive, sheet.spent("generating"), sheet.spent(IDLE)) == (3, 1, 2)
