"""Plans of faults: drawn, kept, applied, undone, shrunk."""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random

import pytest
import trio
from hypothesis import given, strategies as st

from p2p.errors import ConfigError
from p2p.identity import ProtocolId
from sim.errors import NodeFailed
from sim.faults.injector import FaultInjector
from sim.faults.plan import KINDS, Fault, draw_plan, plan_from_table
from sim.faults.shrink import shrink
from sim.net.link import LinkSpec
from sim.node.clock import ClockModel
from sim.node.swarm import SimNode, Swarm
from tests.support.simulated import on_swarm

NAMES = [f"n{number}" for number in range(6)]


async def idle(node: SimNode) -> None:
    async with node.open_host():
        await node.world.disk.replace("file", b"content")
        await trio.sleep_forever()


def state_of(swarm: Swarm) -> list[object]:
    return [
        (
            node.alive,
            node.endpoint.spec,
            node.endpoint.lies,
            node.endpoint.repeats,
            node.endpoint.lags,
            node.clock.model,
            node.disk.model,
            [node.disk.read_now(path, 0, None) for path in node.disk.paths()],
        )
        for node in swarm.nodes.values()
    ] + [swarm.fabric.cuts, dict(swarm.fabric.detours), dict(swarm.fabric._clogs)]


def play_plan(*plan: Fault, until: float, ask: Callable[[Swarm], object]) -> list[object]:
    """What ``ask`` says every second, from second 2.5 on."""

    async def main(swarm: Swarm) -> list[object]:
        for name in NAMES:
            swarm.add(name, idle)
        await swarm.sleep(1)
        FaultInjector(swarm).apply(plan)
        seen = []
        for second in range(2, round(until)):
            await swarm.sleep_until(second + 0.5)
            seen.append(ask(swarm))
        return seen

    return on_swarm(main, horizon=until + 10)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_fault_is_witnessed_and_undone(kind: str) -> None:
    async def main(swarm: Swarm) -> None:
        for name in NAMES:
            swarm.add(name, idle)
        await swarm.sleep(1)
        before = state_of(swarm)
        value = KINDS[kind].value[1] or 0.5
        FaultInjector(swarm).apply(
            [Fault(at=2.0, kind=kind, who=("n1", "n2"), seconds=5.0, value=value)]
        )
        await swarm.sleep_until(4)
        if kind != "pause":
            assert state_of(swarm) != before
        await swarm.sleep_until(12)
        assert swarm.simulation.witnessed == {f"fault/{kind}": 1}
        if kind != "decay":  # a flipped bit stays flipped
            assert state_of(swarm) == before

    on_swarm(main, horizon=100)


@pytest.mark.parametrize(
    ("kind", "value", "wrong"),
    [
        ("skew", 60.0, ClockModel(skew=60.0)),
        ("drift", 1.1, ClockModel(rate=1.1)),
        ("slow_cpu", 8.0, ClockModel(slowness=8.0)),
    ],
)
def test_a_restart_does_not_set_a_machine_right(
    kind: str, value: float, wrong: ClockModel
) -> None:
    seen = play_plan(
        Fault(at=2, kind=kind, who=("n1",), seconds=6, value=value),
        Fault(at=4, kind="kill", who=("n1",), seconds=1),
        until=10,
        ask=lambda swarm: (swarm.nodes["n1"].life, swarm.nodes["n1"].world.clock.model),
    )
    assert seen[0] == (0, wrong)
    assert seen[3] == (1, wrong)
    assert seen[-1] == (1, ClockModel())


@pytest.mark.parametrize(
    ("kind", "values", "state", "expected"),
    [
        ("drift", (2.0, 3.0), lambda node: node.clock.model.rate, [2.0, 6.0, 3.0, 1.0]),
        ("skew", (60.0, -20.0), lambda node: node.clock.model.skew, [60.0, 40.0, -20.0, 0.0]),
        ("slow_cpu", (2.0, 5.0), lambda node: node.clock.model.slowness, [2.0, 10.0, 5.0, 1.0]),
        ("liar", (0.9, 0.4), lambda node: node.endpoint.lies, [0.9, 0.9, 0.4, 0.0]),
        ("equivocator", (0.2, 0.4), lambda node: node.endpoint.repeats, [0.2, 0.4, 0.4, 0.0]),
        ("throttle", (0.5, 0.1), lambda node: node.endpoint.spec.up / LinkSpec().up,
         [0.5, 0.05, 0.1, 1.0]),
        ("full_disk", (0.0, 0.0), lambda node: node.disk.model.capacity == 0,
         [True, True, True, False]),
    ],
)  # fmt: skip
def test_what_one_fault_leaves_of_another(
    kind: str,
    values: tuple[float, float],
    state: Callable[[SimNode], float],
    expected: list[float],
) -> None:
    seen = play_plan(
        Fault(at=2, kind=kind, who=("n1",), seconds=2, value=values[0]),
        Fault(at=3, kind=kind, who=("n1", "n2"), seconds=2, value=values[1]),
        until=6,
        ask=lambda swarm: state(swarm.nodes["n1"]),
    )
    assert seen == pytest.approx(expected)


def arrivals(*plan: Fault) -> list[float]:
    """When n2 has each of four megabytes that n1 sends at once, one after the other, at 8
    Mbit/s.
    """
    times: list[float] = []
    bulk = ProtocolId("/test/bulk/1.0.0")

    async def live(node: SimNode) -> None:
        async with node.open_host() as host:
            with host.receiving(bulk, lambda peer, message: times.append(node.simulation.now)):
                if node.name == "n1":
                    friend = node.siblings[-1]
                    host.add_addrs(friend.peer_id, [friend.addr])
                    await node.world.sleep(1)
                    await host.connect(friend.peer_id)
                    await node.world.sleep(1 - (node.simulation.now - 1))
                    for _ in range(4):
                        assert host.send(friend.peer_id, bulk, bytes(900_000))
                await trio.sleep_forever()

    async def main(swarm: Swarm) -> None:
        for name in ("n1", "n2"):
            swarm.add(name, live, link=LinkSpec(up=8.0, down=80.0))
        FaultInjector(swarm).apply(plan)
        await swarm.sleep(300)

    on_swarm(main, horizon=400)
    return times


def test_what_waits_on_a_line_goes_at_the_pace_the_line_has() -> None:
    whole = arrivals()
    assert len(whole) == 4
    gap = whole[1] - whole[0]
    slow = arrivals(Fault(at=0.5, kind="throttle", who=("n1",), seconds=10.5, value=0.01))
    # Nine seconds at a hundredth, then whole: all four arrive as if they had been sent nine
    # seconds later.
    assert slow == pytest.approx([when + 9 * 0.99 for when in whole], abs=0.2)
    begun = arrivals(
        Fault(at=whole[0] + 0.1, kind="throttle", who=("n1",), seconds=5, value=0.01)
    )
    assert begun[0] == whole[0]
    assert begun[1] == pytest.approx(whole[1] + 5 * 0.99, abs=0.2)
    assert begun[3] - begun[2] == pytest.approx(gap, abs=0.1)


def test_victims_can_be_patterns_shares_and_zones() -> None:
    async def main(swarm: Swarm) -> list[list[str]]:
        for number, name in enumerate([*NAMES, "n10", "n11"]):
            swarm.add(name, idle, zone=f"z{number % 2}")
        await swarm.sleep(1)
        dead = []
        for when, who in enumerate((("n1*",), ("50%",), ("zone:z1",)), start=2):
            FaultInjector(swarm).apply(
                [Fault(at=float(when), kind="kill", who=who, seconds=0.5)]
            )
            await swarm.sleep_until(when + 0.1)
            dead.append([name for name, node in swarm.nodes.items() if not node.alive])
            await swarm.sleep_until(when + 0.9)
        return dead

    dead = on_swarm(main, horizon=100)
    assert dead[0] == ["n1", "n10", "n11"]
    assert len(dead[1]) == 4
    assert dead[2] == ["n1", "n3", "n5", "n11"]


@pytest.mark.parametrize("who", ["nobody", "n9*", "zone:z7", "1%"])
def test_a_fault_that_names_no_node_fails_the_run(who: str) -> None:
    """It did not happen, and the run said that everything was met."""
    fault = Fault(at=2.0, kind="kill", who=("n1", who), seconds=0.5)
    with pytest.raises(
        NodeFailed, match=f"fault kill at 2 s: no node is meant by {re.escape(repr(who))}"
    ):
        play_plan(fault, until=3, ask=lambda swarm: len(swarm.alive))


@given(st.integers(0, 10_000), st.floats(5, 50), st.floats(10, 300))
def test_drawn_faults_lie_within_the_safety_phase(
    seed: int, start: float, length: float
) -> None:
    plan = draw_plan(Random(seed), NAMES, start, start + length)
    assert plan == draw_plan(Random(seed), NAMES, start, start + length)
    assert plan == sorted(plan)
    for fault in plan:
        assert start - 0.001 <= fault.at < start + length
        assert 0 < fault.at + fault.seconds <= start + length + 0.001
        assert len(fault.who) in range(1, len(NAMES) + 1)


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ([{"at": 1, "kind": "flood", "who": ["a"]}], "flood"),
        ([{"kind": "kill", "who": ["a"]}], "fault 0"),
        ([{"at": 1, "kind": "kill"}], "who"),
        ([{"at": -1, "kind": "kill", "who": ["a"]}], "negative"),
        ([{"at": 1, "kind": "kill", "who": ["a"], "depth": 3}], "fault 0"),
        ("kill all", "list"),
    ],
)
def test_a_wrong_plan_is_named(rows: object, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        plan_from_table(rows)


@given(st.integers(0, 1000), st.data())
def test_shrinking_leaves_exactly_the_faults_that_matter(
    seed: int, data: st.DataObject
) -> None:
    plan = draw_plan(Random(seed), NAMES, 10, 400)
    if len(plan) < 3:
        return
    matter = data.draw(st.lists(st.sampled_from(plan), min_size=1, max_size=3, unique=True))
    keys = {(fault.at, fault.kind) for fault in matter}

    def fails(attempt) -> bool:
        return keys <= {(fault.at, fault.kind) for fault in attempt}

    smallest = shrink(plan, fails)
    assert {(fault.at, fault.kind) for fault in smallest} == keys
    assert all(fault.seconds <= 1 and len(fault.who) == 1 for fault in smallest)
