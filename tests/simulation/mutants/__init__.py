"""Bugs planted in the membership protocol, to prove that the simulator finds such bugs.

Each mutant replaces one method. `hunt` looks for a seed whose drawn faults make a swarm of mutants miss its
expectations where a healthy swarm meets them, and shrinks the plan; what it found is kept as a file beside
this one and played again by test_mutants.py. Hunt anew with ``python -m tests.simulation.mutants [NAME]``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import p2p.membership.service as service
from p2p.membership.core import MembershipCore
from p2p.membership.overlay import Overlay
from p2p.membership.pull import Pull
from p2p.membership.silence import Silence
from p2p.membership.view import View
from p2p.membership.voice import Voice
from sim import queue
from sim.errors import SimulationError
from sim.faults import Fault, plan_from_table, save_plan
from sim.runner import Result, run_scenario
from sim.scenario import Expectation, Scenario, load_scenario
from sim.shrink import shrink

FOLDER = Path(__file__).parent
NODES = 12
SEEDS = range(200)


def _nothing(*args: Any, **keywords: Any) -> None:
    return None


def _nothing_wanted(*args: Any, **keywords: Any) -> tuple[()]:
    return ()


async def _no_memory(world: Any) -> int:
    return 0


MUTANTS: dict[str, tuple[Any, str, Any]] = {
    "never-sweeps": (Silence, "sweep", _nothing),
    "ignores-accusations": (Silence, "accused", _nothing),
    "never-refutes": (Silence, "echoed", _nothing),
    "never-heals": (Overlay, "_heal", _nothing),
    "never-rejoins": (Overlay, "_rejoin", _nothing),
    "never-fills": (Overlay, "fill", _nothing),
    "keeps-the-unreachable": (Overlay, "unreachable", _nothing),
    "keeps-the-disconnected": (MembershipCore, "_disconnected", _nothing),
    "deaf-to-unreachable": (MembershipCore, "_unreachable", _nothing),
    "never-pulls": (Pull, "wanted", _nothing_wanted),
    "buries-for-ever": (View, "_exhume", _nothing),
    "never-counts-on": (Voice, "count_on_from", _nothing),
    "answers-no-link": (Overlay, "link_wanted", _nothing),
    "keeps-neighbours": (Overlay, "remove", _nothing),
    "owes-nothing": (Voice, "owe", _nothing),
    "never-loses-touch": (MembershipCore, "_lose_touch", _nothing),
    "forgets-its-numbers": (service, "_read_ceiling", _no_memory),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Every node is a mutant for the length of the block."""
    owner, attribute, replacement = MUTANTS[name]
    original = getattr(owner, attribute)
    setattr(owner, attribute, replacement)
    try:
        yield
    finally:
        setattr(owner, attribute, original)


def scenario(plan: Sequence[Fault] | None) -> Scenario:
    """The storm on few nodes, with drawn faults or with these."""
    storm = load_scenario("storm")
    expect = (*storm.expect, Expectation(metric="deaths_known_share", at_least=0.9))
    changed = dataclasses.replace(storm, nodes=NODES, expect=expect)
    return changed if plan is None else dataclasses.replace(changed, draw=None, faults=tuple(plan))


def attempt(seed: int, plan: Sequence[Fault] | None) -> tuple[bool, Result | None]:
    """Whether the run holds, and its result unless it crashed."""
    queue.MAX_SAME_INSTANT = 20_000  # a mutant that spins shall not take a million events to show it
    try:
        result = run_scenario(scenario(plan), seed)
    except (SimulationError, ExceptionGroup):
        return False, None
    return result.ok, result


def hunt(names: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Find, shrink and keep; yields each mutant that was found with the number of seeds it took."""
    left = dict.fromkeys(names)
    for seed in SEEDS:
        healthy, result = attempt(seed, None)
        if not healthy or result is None:
            continue
        plan = plan_from_table(result.faults)
        for name in list(left):
            smallest = _broken_by(name, seed, plan)
            if smallest is not None and len(smallest) <= 3 and attempt(seed, smallest)[0]:
                save_plan(FOLDER / f"{name}.json", "storm", seed, NODES, smallest, f"found at seed {seed}")
                del left[name]
                yield name, seed + 1
        if not left:
            return


def _broken_by(name: str, seed: int, plan: Sequence[Fault]) -> Sequence[Fault] | None:
    with planted(name):
        if attempt(seed, plan)[0]:
            return None
        return shrink(plan, lambda faults: not attempt(seed, faults)[0], max_runs=40)


def kept_plans() -> dict[str, tuple[int, tuple[Fault, ...]]]:
    """Seed and plan of every mutant that was found."""
    plans = {}
    for path in sorted(FOLDER.glob("*.json")):
        content = json.loads(path.read_text())
        plans[path.stem] = (content["seed"], plan_from_table(content["faults"]))
    return plans
