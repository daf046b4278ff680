"""``python -m bench trust [--json FILE] [--seeds 1 2 3] [--hours 8] [--bfloat16]``: what trust
is worth.

200 workers, of which 20 lie from the start, 20 leave out what earns little and 10 turn after an
hour, 20 more machines with 500 minted names, and 20 validators, one hostile and one lazy, live
for some hours by the rules of the product (`bench.trust_swarm`). Figures: what of the lies
reaches the trainer, beside the leak that the run states; who is banned; what selecting,
grinding and minting gain; what is spent on checks. Exit status 1 if a line does not hold.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from typing import Final

from bench.report import Report
from bench.trust_swarm import BFLOAT16, FLOAT32, SCORE, Machine, TrustSwarm
from roles.run.core.trust import TrustTerms

HOUR: Final = 3600.0
LYING: Final = ("cheating", "turncoat", "grinding")
SELECTING: Final = ("selecting", "selecting all", "grinding", "minting", "ending")
TURNCOATS: Final = 10
"""Machines that turn: in bfloat16 their strikes come too seldom for a ban."""
GAIN: Final = 0.01
"""Of reward, that selecting, grinding and minting may gain at most."""
CHECKS: Final = 0.1
"""Of what generators spend, that validators may after the first hour."""
WINDOW_BYTES: Final = 1024
"""That may be sent of work that is neither drawn nor learnt from."""


def swarm(terms: TrustTerms, seed: int, *, is_bfloat16: bool = False) -> TrustSwarm:
    """All machines and validators."""
    kinds = list(BFLOAT16)
    machines = [Machine("honest", n, stride=1 + n % 3) for n in range(150)]
    machines += [
        Machine(
            "cheating", n, lies=(terms.window, terms.window // 4, 1)[n % 3], lie=kinds[n % 10]
        )
        for n in range(20)
    ]
    machines += [Machine("selecting", n, stride=1 + n % 3) for n in range(10)]
    machines += [Machine("selecting all", n, stride=1 + n % 3) for n in range(10)]
    machines += [
        Machine("turncoat", n, lies=(5, 1, 16, 5, 5)[n], turns_at=HOUR) for n in range(5)
    ]
    machines += [Machine("grinding", n, lies=5, turns_at=HOUR) for n in range(5)]
    machines += [Machine("minting", n) for n in range(20)]
    machines += [Machine("ending", n, depth=4) for n in range(5)]
    validators = [*18 * ["honest"], "hostile", "lazy"]
    excess = BFLOAT16 if is_bfloat16 else FLOAT32
    return TrustSwarm(terms, machines, validators, excess, seed)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of what must hold."""

    name: str
    value: float
    limit: float
    unit: str = ""

    @property
    def holds(self) -> bool:
        """Whether it does."""
        return self.value <= self.limit

    def __str__(self) -> str:
        def text(number: float) -> str:
            return f"{number:.2%}" if self.unit == "%" else f"{number:,.0f}{self.unit}"

        sign = "  " if self.holds else "! "
        return f"{sign}{self.name:<58} {text(self.value):>9}   at most {text(self.limit)}"


def lines(one: TrustSwarm) -> Iterator[Line]:
    """What a swarm must show after its hours."""
    sums = one.sums
    learnt = sum(each.learnt for each in sums.values())
    leaked = sum(each.leaked for each in sums.values())
    yield Line("lies, of what is learnt from", leaked / learnt, one.stated_leak, "%")
    yield Line("lies of newcomers learnt from", sums["cheating"].leaked, 0)
    liars = sum(each.kind in LYING for each in one.machines)
    found = sum(len(sums[kind].found) for kind in LYING)
    yield Line("lying machines whose standing never ended", liars - found, 0)
    convicted = sum(len(sums[kind].convicted) for kind in LYING)
    most = TURNCOATS if one.is_bfloat16 else 0
    yield Line("lying machines of which no name was banned", liars - convicted, most)
    innocent = sum(len(each.banned) for kind, each in sums.items() if kind not in LYING)
    yield Line("names banned that never lied", innocent, 0)
    asked = [judge.kind for judge in one.judges.values() if judge.is_asked]
    yield Line("bad validators that lots still fall on", len(asked) - asked.count("honest"), 0)
    yield Line("good validators that lots pass over", 18 - asked.count("honest"), 0)
    for kind in SELECTING:
        yield Line(f"reward gained by {kind}", sums[kind].gain, GAIN, "%")
    first, later = one.hours[0], sum(one.hours[1:], Counter())
    yield Line("checks in the first hour, of drawing", checks(first), 2 * SCORE, "%")
    yield Line("checks later", checks(later), CHECKS, "%")
    yield Line(
        "replays by the trainer later", later["replayed"] * SCORE / later["drawn"], 0.001, "%"
    )
    yield Line("bytes of a signed window of 16 places", one.window_bytes, WINDOW_BYTES, " B")


def checks(hours: Counter[str]) -> float:
    """What validators spend, of what workers do."""
    return hours["checked"] * SCORE / hours["drawn"]


PLACES: Final = ("made", "learnt", "income", "lies", "drawn", "learnt")
NAMES: Final = ("names", "banned", "fell", "missed")


def table(one: TrustSwarm) -> str:
    """What became of whose places, names and windows; lies are those told in standing."""
    rows = [f"{'':<14}" + "".join(f"{name:>9}" for name in (*PLACES, *NAMES))]
    for kind, of in one.sums.items():
        income = of.income / one.sums["honest"].income
        names = sum(1 + each.names for each in one.machines if each.kind == kind)
        counts = (of.lies, of.drawn, of.leaked, names, len(of.banned), of.fallen, of.left_out)
        row = f"{kind:<14}{of.made:>9,}{of.learnt:>9,}{income:>9.1%}"
        rows.append(row + "".join(f"{count:>9,}" for count in counts))
    return "\n".join(rows)


def run(args: list[str]) -> int:
    """Run the bench; 1 if a line does not hold for a seed."""
    parser = argparse.ArgumentParser(prog="python -m bench trust")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--hours", type=float, default=8.0)
    parser.add_argument("--share", type=float, default=TrustTerms().share)
    parser.add_argument("--bfloat16", action="store_true", help="as far as lies show there")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(args)
    report, failed = Report("trust"), 0
    for seed in options.seeds:
        began = process_time()
        one = swarm(TrustTerms(share=options.share), seed, is_bfloat16=options.bfloat16)
        one.run(options.hours)
        print(f"seed {seed}, {options.hours:g} hours, {process_time() - began:.0f} CPU s")
        print(table(one))
        for line in lines(one):
            print(line)
            failed += not line.holds
            report.add(f"seed {seed}", "shoal", line.name, line.unit, [line.value])
    report.write(options.json)
    return 1 if failed else 0
