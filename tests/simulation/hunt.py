"""Looks for seeds that fail and says which faults matter: ``python -m tests.simulation.hunt
--help``.

With ``--mutant`` a planted bug is looked for: a seed counts that fails with it and passes
without.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Final
from unittest.mock import patch

import sim.kernel.queue
import sim.run.simulated
from p2p.errors import ShoalError
from sim.errors import SimulationError
from sim.faults.plan import Fault, draw_plan, save_plan
from sim.faults.shrink import shrink
from sim.run.runner import run_scenario
from sim.run.scenario import Scenario
from sim.run.sweep import describe
from tests.simulation.mutants import MUTANTS
from tests.simulation.storms import FOLDER, STORMS, load_storm

Bug = Callable[[], AbstractContextManager[object]]
"""Plants a bug for the length of a block."""


SAME_INSTANT: Final = 10_000
"""Events at one nanosecond before a storm counts as stuck: it has a hundredth of the nodes that
may be.
"""


@dataclass(frozen=True, slots=True)
class Find:
    """What came of one run."""

    seed: int
    plan: tuple[Fault, ...]
    why: str | None
    """None if nothing is wrong."""


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


def smallest(scenario: Scenario, find: Find, bug: Bug = nullcontext) -> list[Fault]:
    """The faults of a find that matter."""
    return shrink(
        find.plan, lambda plan: play(with_plan(scenario, plan), find.seed, bug).why is not None
    )


@cache
def passes(storm: str, seed: int) -> bool:
    """Whether nothing is wrong without a planted bug. One seed finds several: it is played once
    for all.
    """
    return play(load_storm(storm), seed).why is None


def hunt(storm: str, seeds: Sequence[int], bug: Bug) -> Find | None:
    """The first seed that fails with a planted bug and passes without."""
    scenario = load_storm(storm)
    for seed in seeds:
        find = play(scenario, seed, bug)
        if find.why is not None and passes(storm, seed):
            return find
    return None


def say(text: str) -> None:
    """At once: a hunt takes long."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    """Print what was found; return 1 if a run without planted bugs failed, or a planted bug
    escaped.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--storm", choices=STORMS, action="append", help="only these storms")
    parser.add_argument(
        "--mutant", choices=["all", *MUTANTS], action="append", help="look for planted bugs"
    )
    parser.add_argument("--seeds", default="1-200", help="FIRST-LAST")
    parser.add_argument(
        "--out", type=Path, help="write shrunk plans of unplanted bugs to this folder"
    )
    options = parser.parse_args()
    logging.disable(logging.ERROR)  # a crash is in what is printed
    first, _, last = options.seeds.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    if options.mutant:
        names = list(MUTANTS) if "all" in options.mutant else options.mutant
        return max([_hunt_mutant(name, seeds) for name in names])
    return max([_hunt_storm(name, seeds, options.out) for name in options.storm or STORMS])


def _hunt_mutant(name: str, seeds: Sequence[int]) -> int:
    mutant = MUTANTS[name]
    find = hunt(mutant.storm, seeds, mutant.plant)
    if find is None:
        say(f"{name}: not found with seeds {seeds[0]} to {seeds[-1]}")
        return 1
    plan = smallest(load_storm(mutant.storm), find, mutant.plant)
    say(
        f"{name}: {mutant.storm} seed {find.seed}, {len(find.plan)} faults, shrunk to"
        f" {len(plan)}: {find.why}"
    )
    for fault in plan:
        say(f"    {fault}")
    return 0


def _hunt_storm(name: str, seeds: Sequence[int], out: Path | None) -> int:
    scenario = load_storm(name)
    failed = 0
    for seed in seeds:
        find = play(scenario, seed)
        if find.why is None:
            continue
        failed += 1
        plan = smallest(scenario, find)
        say(f"{name} seed {seed}, {len(find.plan)} faults, shrunk to {len(plan)}: {find.why}")
        for fault in plan:
            say(f"    {fault}")
        if out is not None:
            path = out / f"{name}-{seed}.json"
            save_plan(path, str(FOLDER / f"{name}.toml"), seed, scenario.nodes, plan, find.why)
    say(f"{name}: {failed} of {len(seeds)} seeds fail")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
