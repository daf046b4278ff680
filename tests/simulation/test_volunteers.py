"""The scenario `volunteers`, small: real roles whose time and sizes come from device
profiles.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from random import Random

import pytest
import trio

from p2p.errors import ConfigError
from p2p.host import Stream
from p2p.identity import ProtocolId
from p2p.wire import FrameReader, frame
from sim.kernel.simulation import Simulation
from sim.kernel.virtual_time import run_simulation
from sim.net.link import MBIT, PAYLOAD_SHARE, LinkSpec
from sim.node.swarm import SimNode, open_swarm
from sim.run.result import Result
from sim.run.runner import run_scenario
from sim.run.scenario import load_scenario
from sim.workloads.profiles import MODELS, machine_named
from sim.workloads.volunteers.freight import Freight
from sim.workloads.volunteers.plan import deal_machines, plan_of
from sim.workloads.volunteers.timesheet import DECODING, IDLE, WAITING, Timesheet
from tests.support.scenarios import few_volunteers

TWO_4090S = {
    "model": "32B", "trainer": "8xH100", "share_4x4090": 0.0, "share_4x3090": 0.0,
    "share_2x4090": 1.0,
}  # fmt: skip
HEAVY = ProtocolId("/test/heavy/1.0.0")


@cache
def outcome() -> Result:
    return run_scenario(few_volunteers(), 1)


@pytest.mark.deep
def test_the_shares_of_everybodys_time_add_up_to_one() -> None:
    metrics = outcome().metrics
    groups: dict[str, list[float]] = {}
    for name, value in metrics.items():
        group, _, activity = name.rpartition("_")
        if activity in {
            "training",
            "saving",
            "encoding",
            "generating",
            "scoring",
            "loading",
            WAITING,
            IDLE,
        }:
            groups.setdefault(group, []).append(float(value))
    assert set(groups) == {"trainer", "validators", "volunteers", "4x4090", "4x3090"}
    for group, shares in groups.items():
        # the trainer's engine replays while its node encodes
        most = 1.001 + float(metrics.get(f"{group}_encoding", 0.0))
        assert 0.999 <= sum(shares) <= most, group
        assert min(shares) >= 0, group
        assert len(shares) == (6 if group == "trainer" else 4), group


@pytest.mark.deep
def test_every_rollout_has_one_fate() -> None:
    metrics = outcome().metrics
    fates = (
        "learnt_from", "in_a_step_at_end", "without_spread", "pooled_at_end",
        "on_probation", "unanswered_at_end", "lost_stale", "rejected",
    )  # fmt: skip
    assert (
        sum(int(metrics[f"rollouts_{fate}"]) for fate in fates) == metrics["rollouts_generated"]
    )
    assert all(int(metrics[f"rollouts_{fate}"]) >= 0 for fate in fates)
    assert metrics["rollouts_rejected"] == 0


@pytest.mark.deep
def test_the_run_makes_progress_with_work_that_is_fresh_enough() -> None:
    metrics = outcome().metrics
    assert int(metrics["steps"]) >= 3
    assert float(metrics["reward_end"]) > float(metrics["reward_start"])
    assert int(metrics["staleness_max"]) <= 2
    assert int(metrics["deaths"]) > 0
    # A patch travels; what one's own line would take is said of the whole policy.
    assert 0 < float(metrics["broadcast_seconds_50"]) < float(metrics["own_line_seconds_50"])
    assert float(metrics["from_peers_share"]) > 0.5
    assert metrics["broadcast_missed_share"] == 0


@pytest.mark.deep
def test_the_report_gets_curves_and_histograms() -> None:
    result = outcome()
    assert {"share of them that generate", "policies published"} <= set(result.series)
    assert all(result.distributions.values())


@pytest.mark.deep
def test_too_many_volunteers_waste_little_once_work_was_lost() -> None:
    """Each made all it could: 59 % of the rollouts went stale, the trainer waited 14 % of the
    time, and a submission was sent eight times. Now it is so until the first work is lost."""
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


@pytest.mark.deep
def test_twice_as_fast_lines_do_not_lengthen_the_broadcast() -> None:
    fast = run_scenario(few_volunteers(up_low=2000.0, up_high=8000.0), 1).metrics
    slow = outcome().metrics
    assert float(fast["own_line_seconds_50"]) == pytest.approx(
        float(slow["own_line_seconds_50"]) / 2, rel=0.01
    )
    assert float(fast["broadcast_seconds_50"]) <= float(slow["broadcast_seconds_50"])
    assert float(fast["broadcast_seconds_mean"]) <= float(slow["broadcast_seconds_mean"])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (TWO_4090S, "2x4090 has 43.2 GB"),
        ({"model": "32B", "trainer": "8x4090"}, "training 32B keeps 520.0 GB"),
        ({"validator": "1x3090", "model": "32B", "trainer": "8xH100"}, "1x3090 has 21.6 GB"),
        ({"model": "70B"}, "no model '70B'"),
        ({"trainer": "4xTPU"}, "no machine is called '4xTPU'"),
        ({"share_4x3090": 0.4}, "must add up to 1"),
    ],
)
def test_machines_that_cannot_do_their_job_are_refused(
    change: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        run_scenario(few_volunteers(**change), 1)


def test_machines_are_dealt_by_their_shares() -> None:
    plan = plan_of(load_scenario("volunteers"))
    dealt = deal_machines(plan, 200, Random(1))
    assert [
        sum(str(one) == name for one in dealt) for name in ("8xH100", "4x4090", "4x3090")
    ] == [
        10,
        90,
        100,
    ]
    assert len(deal_machines(plan, 7, Random(1))) == 7


def test_a_smaller_run_has_a_smaller_trainer_that_still_fits() -> None:
    scenario = load_scenario("volunteers")
    half, tiny = (plan_of(replace(scenario, nodes=nodes)) for nodes in (100, 2))
    whole = plan_of(scenario)
    assert (2 * half.batch, 2 * half.trainer.count) == (whole.batch, whole.trainer.count)
    assert (str(tiny.trainer), tiny.validators, tiny.relays) == ("8xH100", 1, 1)


def test_a_plan_scales_policies_and_answers() -> None:
    plan = plan_of(load_scenario("volunteers"))
    assert plan.scale * plan.chunks * 4096 == pytest.approx(62e9)
    assert 600 < plan.token_scale < 1200
    table = plan.role_table(machine_named("8xH100"), 0.02, 0.35)["profile"]
    full = machine_named("8xH100").generate_rate(plan.model, plan.context)
    assert table["generate_rate"] * plan.token_scale < full  # 64 rows do not fill eight H100s


def test_fewer_sequences_than_fit_leave_a_machine_idle() -> None:
    machine, model = machine_named("8xH100"), MODELS["32B"]
    rates = [machine.generate_rate(model, 3500, rows) for rows in (16, 64, 256, 1000)]
    assert rates[0] < rates[1] < rates[2] == rates[3] == machine.generate_rate(model, 3500)


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
    assert (sheet.alive, sheet.spent(WAITING), sheet.spent("loading"), sheet.spent(IDLE)) == (
        20,
        15,
        2,
        3,
    )
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


def heavy_arrivals(
    frames: int, scale: float, *, dies: float | None = None
) -> list[tuple[float, bytes]]:
    """When frames of 1,000 bytes that stand for ``scale`` times as many come over 80 Mbit/s."""
    came: list[tuple[float, bytes]] = []

    async def main(simulation: Simulation) -> None:
        async with open_swarm(simulation) as swarm:
            freight = Freight(swarm, {HEAVY: lambda data: scale * len(data)})

            async def take(stream: Stream) -> None:
                reader = FrameReader(stream, 1 << 20)
                while (payload := await reader.receive()) is not None:
                    came.append((simulation.now, payload))

            async def live(node: SimNode) -> None:
                async with freight.open_host(node) as host:
                    host.set_handler(HEAVY, take)
                    if node.name == "giver":
                        await give(node, host)
                    await trio.sleep_forever()

            async def give(node: SimNode, host: object) -> None:
                taker = node.siblings[1]
                host.add_addrs(taker.peer_id, [taker.addr])  # type: ignore[attr-defined]
                try:
                    async with await host.open_stream(taker.peer_id, HEAVY) as stream:  # type: ignore[attr-defined]
                        for number in range(frames):
                            await stream.send_all(frame(bytes([number]) * 998))
                        await stream.send_eof()
                        await stream.receive_some()
                except trio.BrokenResourceError:
                    came.append((simulation.now, b"lost"))

            line = LinkSpec(up=80.0, down=80.0)
            for name in ("giver", "taker"):
                freight.line(swarm.add(name, live, link=line))
            if dies is not None:
                await swarm.sleep(dies)
                swarm.kill("taker")
            await swarm.sleep(300)

    run_simulation(main, seed=1)
    return came


def test_freight_takes_the_time_of_what_it_stands_for() -> None:
    came = heavy_arrivals(5, 10_000)
    each = 1000 * 10_000 * 8 / (80 * MBIT * PAYLOAD_SHARE)
    assert [data[0] for _, data in came] == [0, 1, 2, 3, 4]
    assert came[0][0] == pytest.approx(2 * each, rel=0.15)  # store and forward
    assert came[-1][0] - came[0][0] == pytest.approx(4 * each, rel=0.15)


def test_freight_for_a_machine_that_died_is_lost() -> None:
    came = heavy_arrivals(50, 10_000, dies=10.0)
    assert came[-1][1] == b"lost"
    assert came[-1][0] < 20
    assert 5 < len(came) < 12
