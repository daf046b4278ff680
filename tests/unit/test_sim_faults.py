"""Plans of faults: drawn, kept, applied, undone, shrunk."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
import trio
from hypothesis import given, settings, strategies as st

from p2p.errors import ConfigError
from sim.faults import KINDS, Fault, apply_plan, draw_plan, plan_from_table, plan_to_json, save_plan
from sim.kernel import run_simulation
from sim.shrink import shrink
from sim.simulation import Simulation
from sim.swarm import SimNode, Swarm, open_swarm

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
            round(node.world.skew, 6),
            round(node.world.slowness, 6),
            node.world._rate,
            node.disk.model,
            [node.disk.read_now(path, 0, None) for path in node.disk.paths()],
        )
        for node in swarm.nodes.values()
    ] + [swarm.fabric.cuts, dict(swarm.fabric.detours), dict(swarm.fabric._clogs)]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_fault_is_witnessed_and_undone(kind: str) -> None:
    async def main(simulation: Simulation) -> None:
        async with open_swarm(simulation) as swarm:
            for name in NAMES:
                swarm.add(name, idle)
            await swarm.sleep(1)
            before = state_of(swarm)
            value = KINDS[kind].value[1] or 0.5
            apply_plan(swarm, [Fault(at=2.0, kind=kind, who=("n1", "n2"), seconds=5.0, value=value)])
            await swarm.sleep_until(4)
            if kind != "pause":
                assert state_of(swarm) != before
            await swarm.sleep_until(12)
            assert simulation.witnessed == {f"fault/{kind}": 1}
            if kind != "decay":  # a flipped bit stays flipped
                assert state_of(swarm) == before

    run_simulation(main, seed=1, horizon=100)


def test_victims_can_be_patterns_shares_and_zones() -> None:
    async def main(simulation: Simulation) -> list[list[str]]:
        async with open_swarm(simulation) as swarm:
            for number, name in enumerate([*NAMES, "n10", "n11"]):
                swarm.add(name, idle, zone=f"z{number % 2}")
            await swarm.sleep(1)
            dead = []
            for when, who in enumerate((("n1*",), ("50%",), ("zone:z1",), ("nobody",)), start=2):
                apply_plan(swarm, [Fault(at=float(when), kind="kill", who=who, seconds=0.5)])
                await swarm.sleep_until(when + 0.1)
                dead.append([name for name, node in swarm.nodes.items() if not node.alive])
                await swarm.sleep_until(when + 0.9)
            return dead

    dead = run_simulation(main, seed=1, horizon=100).value
    assert dead is not None
    assert dead[0] == ["n1", "n10", "n11"]
    assert len(dead[1]) == 4
    assert dead[2] == ["n1", "n3", "n5", "n11"]
    assert dead[3] == []


@given(st.integers(0, 10_000), st.floats(5, 50), st.floats(10, 300))
def test_drawn_faults_lie_within_the_safety_phase(seed: int, start: float, length: float) -> None:
    plan = draw_plan(Random(seed), NAMES, start, start + length)
    assert plan == draw_plan(Random(seed), NAMES, start, start + length)
    assert plan == sorted(plan)
    for fault in plan:
        assert start - 0.001 <= fault.at < start + length
        assert 0 < fault.at + fault.seconds <= start + length + 0.001
        assert len(fault.who) in range(1, len(NAMES) + 1)


def test_half_of_the_kinds_are_off_in_a_plan_and_all_occur_over_many() -> None:
    seen: dict[str, int] = {}
    for seed in range(200):
        for kind in {fault.kind: None for fault in draw_plan(Random(seed), NAMES, 10, 100)}:
            seen[kind] = seen.get(kind, 0) + 1
    assert sorted(seen) == sorted(KINDS)
    assert all(60 < count < 140 for count in seen.values())


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    plan = tuple(draw_plan(Random(4), NAMES, 10, 100))
    assert plan_from_table(json.loads(json.dumps(plan_to_json(plan)))) == plan
    save_plan(tmp_path / "plan.json", "storm", 3, 6, plan, "why not")
    assert json.loads((tmp_path / "plan.json").read_text())["seed"] == 3


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


@settings(max_examples=40)
@given(st.integers(0, 1000), st.data())
def test_shrinking_leaves_exactly_the_faults_that_matter(seed: int, data: st.DataObject) -> None:
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


def test_a_run_that_fails_without_faults_needs_none() -> None:
    assert shrink(draw_plan(Random(1), NAMES, 10, 100), lambda plan: True) == []
