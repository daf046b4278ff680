"""Looks for the seeds with which storms find planted bugs: ``python -m tests.simulation.hunt
[--seeds 1-200] NAME...``.

A seed counts that fails with the bug and passes without. Bugs that nobody planted are looked
for by ``python -m sim sweep tests/simulation/storms/NAME.toml``.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Final
from unittest.mock import patch

import sim.kernel.queue
import sim.run.simulated
from p2p.errors import ShoalError
from sim.errors import SimulationError
from sim.faults.plan import Fault, draw_plan
from sim.faults.shrink import shrink
from sim.run.runner import run_scenario
from sim.run.scenario import Scenario
from sim.run.sweep import describe
from tests.simulation.mutants import MUTANTS
from tests.simulation.storms import load_storm

Bug = Callable[[], AbstractContextManager[object]]  # plants a bug for the length of a block


SAME_INSTANT: Final = 10_000
"""Events at one nanosecond before a storm, which has few nodes, counts as stuck."""


@dataclass(frozen=True, slots=True)
class Find:
    """What came of one run."""

    seed: int
    plan: tuple[Fault, ...]
    why: str | None  # none if nothing is wrong


@contextmanager
def drawn_plan() -> Iterator[list[Fault]]:
    """What is drawn in the block, also when the run then ends with an error."""
    drawn: list[Fault] = []

    def note(*args, **keywords):
        drawn.extend(draw_plan(*args, **keywords))
        return list(drawn)

    with patch.object(sim.run.simulated, "draw_plan", note):
        yield drawn


def play(scenario: Scenario, seed: int, bug: Bug = nullcontext) -> Find:
    """Run once, with a bug planted or not."""
    with (
        bug(),
        drawn_plan() as drawn,
        patch.object(sim.kernel.queue, "MAX_SAME_INSTANT", SAME_INSTANT),
    ):
        try:
            result = run_scenario(scenario, seed)
        except (SimulationError, ShoalError, ExceptionGroup) as error:
            return Find(seed, (*scenario.faults, *drawn), describe(error))
    broken = [
        f"{entry['name']} (is {entry['value']})"
        for entry in result.expectations
        if not entry["ok"]
    ]
    return Find(seed, (*scenario.faults, *drawn), "; ".join(broken) or None)


def with_plan(scenario: Scenario, plan: Sequence[Fault]) -> Scenario:
    """The same storm, in which just this goes wrong; sites misbehave as they did."""
    draw = scenario.draw and replace(scenario.draw, kinds=())
    return replace(scenario, draw=draw, faults=tuple(plan))


def smallest(scenario: Scenario, find: Find, bug: Bug) -> list[Fault]:
    """The faults of a find that matter."""
    return shrink(
        find.plan, lambda plan: play(with_plan(scenario, plan), find.seed, bug).why is not None
    )


@cache
def passes(storm: str, seed: int) -> bool:
    """Return True if nothing is wrong without a planted bug."""
    return play(load_storm(storm), seed).why is None


def hunt(storm: str, seeds: Sequence[int], bug: Bug) -> Find | None:
    """The first seed that fails with a planted bug and passes without."""
    scenario = load_storm(storm)
    for seed in seeds:
        find = play(scenario, seed, bug)
        if find.why is not None and passes(storm, seed):
            return find
    return None


def main() -> int:
    """Print what was found, at once; return 1 if a planted bug escaped."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="all by default")
    parser.add_argument("--seeds", default="1-200", help="FIRST-LAST")
    options = parser.parse_args()
    logging.disable(logging.ERROR)  # a crash is in what is printed
    first, _, last = options.seeds.partition("-")
    escaped = 0
    for name in options.names or MUTANTS:
        mutant = MUTANTS[name]
        find = hunt(mutant.storm, range(int(first), int(last or first) + 1), mutant.plant)
        lines = [f"{name}: not found with seeds {options.seeds}"]
        if find is not None:
            plan = smallest(load_storm(mutant.storm), find, mutant.plant)
            counted = f"{len(find.plan)} faults, shrunk to {len(plan)}: {find.why}"
            lines = [f"{name}: {mutant.storm} seed {find.seed}, {counted}"]
            lines += [f"    {fault}" for fault in plan]
        escaped += find is None
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()
    return int(escaped > 0)


if __name__ == "__main__":
    raise SystemExit(main())
