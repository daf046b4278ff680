"""Delta debugging of a failing plan to the few faults that matter.

Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input, 2002.

Fewer faults first, then fewer victims, then shorter faults. A plan of n faults of which k
matter takes about k log n runs; no generator has to find the failure anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from sim.faults.plan import Fault

Fails = Callable[[Sequence[Fault]], bool]
"""True if a run with this plan still fails in the same way."""

MAX_RUNS: Final = 300
"""Runs after which the best plan so far has to do."""


class _Budget:
    def __init__(self, fails: Fails, runs: int) -> None:
        self._fails = fails
        self.left = runs

    def __call__(self, plan: Sequence[Fault]) -> bool:
        if self.left <= 0:
            return False
        self.left -= 1
        return self._fails(plan)


def shrink(plan: Sequence[Fault], fails: Fails, *, max_runs: int = MAX_RUNS) -> list[Fault]:
    """Return a plan that still fails and of which nothing can be left out; ``plan`` must
    fail.
    """
    judge = _Budget(fails, max_runs)
    if judge(()):
        return []
    best = _fewest(list(plan), judge)
    changed = True
    while changed and judge.left:
        changed = False
        for index, fault in enumerate(best):
            for smaller in _smaller(fault):
                attempt = [*best[:index], smaller, *best[index + 1 :]]
                if judge(attempt):
                    best, changed = attempt, True
                    break
    return best


def _fewest(plan: list[Fault], fails: Fails) -> list[Fault]:
    parts = 2
    while len(plan) >= 2:
        size = -(-len(plan) // parts)
        pieces = [plan[start : start + size] for start in range(0, len(plan), size)]
        for piece in pieces:
            rest = [fault for fault in plan if fault not in piece]
            if fails(piece):
                plan, parts = piece, 2
                break
            if len(pieces) > 2 and fails(rest):
                plan, parts = rest, max(2, parts - 1)
                break
        else:
            if parts >= len(plan):
                return plan
            parts = min(len(plan), 2 * parts)
    return plan


def _smaller(fault: Fault) -> Iterator[Fault]:
    if len(fault.who) > 1:
        half = len(fault.who) // 2
        yield replace(fault, who=fault.who[:half])
        yield replace(fault, who=fault.who[half:])
    if fault.seconds > 1:
        yield replace(fault, seconds=round(fault.seconds / 2, 3))
