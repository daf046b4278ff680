"""Value of each rule of SHARDCAST: its scenarios with one rule off, against all rules on.

``python -m bench ablate [--json FILE] [--seeds N] [--jobs N] [--rules NAME ...] [NAME ...]``

Level 1 and level 0 are deterministic, so a busy machine changes no figure. A rule is switched
off by replacing the attribute that carries it, in a process of its own. The table gives the
scenario's main metric as a ratio, the median over the seeds; "!" marks a scenario that breaks
its own expectations. A rule that helps its own scenario alone, or helps by less than a tenth,
goes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from pathlib import Path
from statistics import median
from typing import Any, Final

from p2p.shardcast.chunkset import EMPTY
from sim.run.runner import run_scenario
from sim.run.scenario import load_scenario
from sim.run.sweep import changed

ALL_ON: Final = "all on"
SHORT: Final[Mapping[str, Mapping[str, float]]] = {
    "lab_uneven": {},
    "lab_slow_relay": {},
    "lab_killed": {},
    "lab_adsl": {},
    "lab_even_20": {},
    "lab_broadcast": {},
    "lab_warm": {},
    "lab_warm_small": {},
    "warm_far": {"versions": 2},
    "black_hole": {},
    "black_hole_forty": {},
    "black_hole_roots": {},
    "boaster": {"nodes": 101, "versions": 2},
    "overclaim": {"versions": 3},
    "slander": {"versions": 2},
    "liar": {"versions": 2},
    "dripper": {"versions": 2},
    "slow_relay": {"versions": 2},
    "after_push": {},
    "after_ticket": {},
    "crowd": {},
    "late_joiners": {},
    "origin_dies": {"versions": 2},
    "deltas": {},
    "deltas_thousand": {"nodes": 300},
}
"""Scenarios, with changes that make them cheap."""
METRICS: Final[Mapping[str, str]] = {
    "after_push": "join_seconds_100",
    "late_joiners": "join_seconds_100",
    "deltas_thousand": "times_bound_99",
}
"""The main metric of a scenario, if it is not the seconds until the last node had it."""


def always(value: object) -> Callable[..., object]:
    """Return a method that gives ``value``."""
    return lambda *_, **__: value


def fixed(value: object) -> property:
    """Return a property that is ``value``."""
    return property(lambda _: value)


def everything_held(_: object, download: Any, claims: Any) -> Any:
    """Believe what any holder claims to have."""
    return reduce(or_, (download.holders[peer] for peer in claims), EMPTY)


@dataclass(frozen=True)
class Rule:
    """A rule, the law that it protects, and its replacement when it is off."""

    law: str
    off: Mapping[str, object] = field(repr=False)
    """Replacements by ``module:attribute``, below `p2p.shardcast.core`."""


RULES: Final[Mapping[str, Rule]] = {
    ALL_ON: Rule("", {}),
    "earliest finish": Rule(
        "the root that confirms last is not given the last chunk",
        {"handout:Root.finish": fixed(0.0)},
    ),
    "late roots": Rule(
        "what a root does not confirm goes to another", {"handout:HandOut.expire": always(None)}
    ),
    "asked twice": Rule(
        "what two peers miss comes along another stripe", {"handout:HandOut.ask": always(False)}
    ),
    "demotion": Rule(
        "a root that relays nothing loses its stripe", {"handout:HandOut.report": always(False)}
    ),
    "roster is dialled": Rule(
        "no root is reported before its children are there", {"handout:MESH": 10**9}
    ),
    "busy origin": Rule(
        "asking does not keep the origin's line from its roots",
        {"upload:Upload.lanes": fixed(0)},
    ),
    "settle": Rule("those that come together get one roster", {"handout:_SETTLE": 0.0}),
    "line credit": Rule("a long line is filled", {"queue:Line.credit": always(2)}),
    "two classes": Rule(
        "who asks does not hold up a stripe",
        {"queue:SendQueue.push": lambda queue, header: queue._stripes.append(header)},
    ),
    "one answer": Rule(
        "a crowd of askers does not hold up the stripes",
        {"queue:SendQueue.waits": fixed(False)},
    ),
    "withholding": Rule(
        "a slow child does not hold its siblings up", {"upload:CHILD_BACKLOG": 10**6}
    ),
    "dial ahead": Rule(
        "hops do not dial one after another",
        {"upload:Upload.connect": lambda *_: iter(())},
    ),
    "origin's turns": Rule(
        "chunks that are on their way are not asked of the origin",
        {"download:LateChunks._overdue_after": property(lambda late: late._stall)},
    ),
    "usual lag": Rule(
        "a node behind its neighbours does not pull what is coming",
        {"pace:ChunkPace.note_lag": always(None)},
    ),
    "proven holders": Rule(
        "who boasts is asked for one chunk", {"repair:Repair._believable": everything_held}
    ),
    "trial": Rule(
        "who drips costs each asker one wait",
        {"repair:Source.room": property(lambda source: 4 - source.owed)},
    ),
    "own line": Rule("no node asks for more than its line carries", {"repair:_AHEAD": 1e9}),
    "credulity": Rule("one claim does not bend the forest", {"receipts:_CREDULITY": 1e9}),
    "receipts": Rule(
        "who claims much and relays little is believed what it relays",
        {"receipts:ReceiptBook.judge": lambda *_: iter(())},
    ),
    "rare first": Rule(
        "a restarted origin gives what most lack",
        {"handout:HandOut._doubt_what_is_rare": always(None)},
    ),
}


def switch_off(rule: Rule) -> None:
    """Replace the implementation of a rule for the rest of this process."""
    for place, value in rule.off.items():
        module, _, path = place.partition(":")
        owner: object = importlib.import_module(f"p2p.shardcast.core.{module}")
        *outer, last = path.split(".")
        for name in outer:
            owner = getattr(owner, name)
        if last not in vars(owner):
            raise AttributeError(f"{place} carries no rule any more")
        setattr(owner, last, value)


def measure(rule: str, scenario: str, seed: int) -> tuple[float, bool]:
    """Return the main metric with a rule off, and whether the scenario keeps its expectations.

    Call it in a process of its own.
    """
    switch_off(RULES[rule])
    result = run_scenario(changed(load_scenario(scenario), dict(SHORT[scenario])), seed)
    value = result.metrics[METRICS.get(scenario, "seconds_100")]
    return float("inf") if isinstance(value, str) else float(value), result.ok


def table(rows: Mapping[tuple[str, str], Sequence[tuple[float, bool]]]) -> list[str]:
    """Lines of Markdown: a rule each, with the scenarios in which it matters by a tenth."""
    lines = [
        "| rule off | its law | ratio to all rules on, where a tenth or more |",
        "|---|---|---|",
    ]
    base = {
        name: median(v for v, _ in runs)
        for (rule, name), runs in rows.items()
        if rule == ALL_ON
    }
    for rule in dict.fromkeys(rule for rule, _ in rows if rule != ALL_ON):
        cells = []
        for name, usual in base.items():
            runs = rows.get((rule, name), ())
            ratio = median(v for v, _ in runs) / usual if runs else 1.0
            broken = "" if all(ok for _, ok in runs) else " !"
            if abs(ratio - 1) >= 0.1 or broken:
                cells.append(f"{name} {ratio:.2f}{broken}")
        lines.append(f"| {rule} | {RULES[rule].law} | {', '.join(cells) or 'none'} |")
    return lines


def run(args: Sequence[str]) -> int:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="python -m bench ablate", description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--rules", nargs="+", default=list(RULES), choices=list(RULES))
    parser.add_argument("scenarios", nargs="*", default=list(SHORT))
    options = parser.parse_args(args)
    rules = dict.fromkeys([ALL_ON, *options.rules])
    rows: dict[tuple[str, str], list[tuple[float, bool]]] = {}
    # One run a process: what is switched off stays off, and a simulation leaves memory behind.
    with ProcessPoolExecutor(options.jobs, max_tasks_per_child=1) as pool:
        runs = {
            (rule, name, seed): pool.submit(measure, rule, name, seed)
            for rule in rules
            for name in options.scenarios
            for seed in range(1, options.seeds + 1)
        }
        for (rule, name, seed), future in runs.items():
            value, is_ok = future.result()
            rows.setdefault((rule, name), []).append((value, is_ok))
            print(f"{rule}, {name}, seed {seed}: {value:.3f}", file=sys.stderr)
    print("\n".join(table(rows)))
    if options.json is not None:
        named = [[rule, name, runs] for (rule, name), runs in rows.items()]
        options.json.write_text(json.dumps(named), encoding="utf-8")
    return 0
