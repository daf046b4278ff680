"""Controls of learning: the recipe against runs whose rewards carry no information.

``python -m bench rl-controls [--json FILE] [--seeds 0 1 2] [--steps 60]``

Every subject starts from the same warm-up. The recipe must pass the learning gate
(`roles.demo.gate`); the controls must not: advantages permuted over the completions of each
step (the same budget, the same statistics, no information), and the warm-up's policy at the
best of eight temperatures (no learning, but what sharper or flatter sampling gives). About
100 CPU seconds per seed.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final

from rich.console import Console

from bench.alone import Alone, Course, Progressed, learn, progress_bar, sorting
from bench.report import Report
from roles.demo.gate import LearningGate
from roles.engines.config import EngineConfig
from roles.engines.evaluation import Evaluation
from roles.rl.recipes import NETWORK

TEMPERATURES: Final = (0.0, 0.1, 0.25, 0.5, 0.7, 0.85, 1.0, 1.25)

RECIPE: Final = "recipe"
SHUFFLED: Final = "shuffled advantages"
TEMPERATURE: Final = "best temperature"


@dataclass(frozen=True)
class Result:
    seed: int
    subject: str
    gate: LearningGate
    course: Course | None = None

    @property
    def as_expected(self) -> bool:
        return self.gate.passed == (self.subject == RECIPE)


def run(args: list[str]) -> int:
    """Run the bench; 1 if the recipe fails the gate or a control passes it."""
    parser = argparse.ArgumentParser(prog="python -m bench rl-controls")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=NETWORK.sampling.steps)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(args)
    results = [result for seed in options.seeds for result in measure(seed, options.steps)]
    console = Console()
    for result in results:
        mark = "ok" if result.as_expected else "NOT AS EXPECTED"
        console.print(
            f"seed {result.seed}, {result.subject}: {result.gate} [{mark}]",
            markup=False,
            soft_wrap=True,
        )
    report(results).write(options.json)
    return 0 if all(result.as_expected for result in results) else 1


def measure(seed: int, steps: int) -> list[Result]:
    """Run the recipe and its controls for one seed."""
    config = sorting(seed, steps)
    results = []
    for subject in (RECIPE, SHUFFLED):
        with progress_bar(f"seed {seed}, {subject}", steps) as progressed:
            course = learn(config, steps, 20, progressed, shuffled=subject == SHUFFLED)
        results.append(Result(seed, subject, course.gate, course))
    with progress_bar(f"seed {seed}, {TEMPERATURE}", len(TEMPERATURES)) as progressed:
        results.append(Result(seed, TEMPERATURE, best_temperature(config, progressed)))
    return results


def best_temperature(config: EngineConfig, progressed: Progressed) -> LearningGate:
    """Compare the warm-up's policy before and after choosing the temperature that suits it
    best.
    """
    alone = Alone(config)
    alone.warm_up()
    best = 0.0
    for count, temperature in enumerate(TEMPERATURES, 1):
        best = max(best, fmean(alone.rewards_at(temperature)))
        progressed(count, None)
    return LearningGate(alone.course.evaluations[0], Evaluation(best, best))


def report(results: list[Result]) -> Report:
    """Print rewards and cost of every subject, and the controls' rises as a share of the
    recipe's rise.
    """
    table = Report("rl-controls")
    for subject in (RECIPE, SHUFFLED, TEMPERATURE):
        mine = [one for one in results if one.subject == subject]
        for name, of in (("greedy", 0), ("sampled", 1)):
            starts = [(one.gate.start.greedy, one.gate.start.sampled)[of] for one in mine]
            table.add("all seeds", subject, f"{name} start", "share", starts)
            rises = [one.gate.rises[of] for one in mine]
            table.add("all seeds", subject, f"{name} rise", "share", rises)
        courses = [one.course for one in mine if one.course is not None]
        if courses:
            speeds = [one.sampled_tokens / one.seconds["generation"] for one in courses]
            table.add("all seeds", subject, "generation", "tokens per CPU second", speeds)
            table.add(
                "all seeds",
                subject,
                "cost",
                "CPU seconds",
                [sum(c.seconds.values()) for c in courses],
            )
    for subject in (SHUFFLED, TEMPERATURE):
        for name in ("greedy", "sampled"):
            table.compare("all seeds", f"{name} rise", subject, RECIPE)
    return table


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
