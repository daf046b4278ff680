"""Every site in production code that misbehaves on purpose does so, and every claim it makes
comes true.

Sites and claims are found by reading the code: a new one that is never reached here fails.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Final

import pytest

import sim.kernel.simulation
from p2p.identity import KeyPair
from p2p.machine import RealWorld
from p2p.world import dawdle, lateness
from sim.faults.plan import Fault
from sim.run.result import Result
from sim.run.runner import run_scenario
from sim.run.scenario import Scenario, load_scenario
from tests.simulation.hunt import with_plan
from tests.simulation.storms import load_storm

ROOT: Final = Path(__file__).parent.parent.parent
SEAM: Final = ("p2p/machine.py", "p2p/world.py")
"""Where the functions below are written, and call each other with a name they were given."""
SITES: Final = {"buggify": 0, "lateness": 1, "dawdle": 1}
CLAIMS: Final = {"sometimes": 0}  # which argument is the name


def names(functions: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """(file, name) of every call of one of ``functions`` in production code."""
    for where, called, node in calls():
        if called in functions:
            name = node.args[functions[called]]
            assert isinstance(name, ast.Constant), f"{where}:{node.lineno} makes up its name"
            yield where, name.value


@cache
def calls() -> list[tuple[str, str, ast.Call]]:
    """(file, function, call) of every call in production code that may be such a one."""
    found = []
    for path in sorted([*ROOT.glob("p2p/**/*.py"), *ROOT.glob("roles/**/*.py")]):
        where, text = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        if where in SEAM or not any(f"{name}(" in text for name in SITES | CLAIMS):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                found.append((where, name, node))
    return found


def storms() -> Iterator[Scenario]:
    """Faults that between them bring about everything that is claimed."""
    lies = Fault(at=10, kind="liar", who=("n1",), seconds=30, value=0.5)
    crashes = [
        Fault(at=11 + 10 * n, kind="torn", who=(f"n{n + 2}",), seconds=12) for n in range(5)
    ]
    yield with_plan(load_storm("gossip"), [lies])
    policies = load_storm("policies")
    # Half a minute more: of eight other seeds one in three has a node that is late by then.
    policies = replace(policies, duration=policies.duration + 30)
    yield with_plan(policies, [lies, *crashes])
    yield with_plan(load_storm("transport"), [lies, *crashes[:2]])
    spine = load_storm("spine")
    assert spine.draw is not None
    deaths = [
        Fault(at=at, kind="kill", who=(who,), seconds=2)
        for at, who in (
            (14, "trainer-1"),
            (20, "validator-1"),
            (26, "inference-2"),
            (32, "trainer-1"),
        )
    ]
    yield with_plan(replace(spine, draw=replace(spine.draw, end=300.0)), deaths)
    yield load_scenario("diloco")


@cache
def results() -> list[Result]:
    """Runs in which every site is active and misbehaves half of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sim.kernel.simulation, "BUGGIFY_ACTIVE", 1.0)
        patch.setattr(sim.kernel.simulation, "BUGGIFY_FIRES", 0.5)
        return [run_scenario(storm, seed) for storm in storms() for seed in (1, 3)]


def happened(counts: Iterable[Mapping[str, int]]) -> set[str]:
    return {name for count in counts for name, times in count.items() if times}


def test_a_name_tells_where_it_is_and_is_used_once() -> None:
    used = [*names(SITES), *names(CLAIMS)]
    for where, name in used:
        module, _, what = name.partition("/")
        assert module in Path(where).with_suffix("").parts, f"{name} is in {where}"
        assert what
    assert len(used) > 50
    assert len({name for _, name in used}) == len(used)


@pytest.mark.deep
def test_nothing_breaks_though_every_site_misbehaves() -> None:
    for result in results():
        assert result.ok, (result.scenario, result.seed, result.expectations)


@pytest.mark.deep
def test_every_site_misbehaves() -> None:
    assert {name for _, name in names(SITES)} - happened(
        result.fired for result in results()
    ) == set()


@pytest.mark.deep
def test_every_claim_comes_true() -> None:
    assert {name for _, name in names(CLAIMS)} - happened(
        result.witnessed for result in results()
    ) == set()


def test_production_is_never_late(tmp_path: Path) -> None:
    world = RealWorld(KeyPair(bytes(32)), tmp_path)
    assert not world.buggify("a/b")
    assert lateness(world, "a/b") == 0.0
    with pytest.raises(StopIteration):  # at once: not a pass through the event loop
        dawdle(world, "a/b").send(None)
