"""The link model against real links: six trees, real TCP over shaped namespaces, simulated, and
exact.

"real" is real processes over `tc tbf` (level L3), "simulated L1" and "L2" the same program over
the production link model, "max-min" the fluid oracle. Errors are per cent, medians of the
model's runs (one a seed) against medians of the real ones; "machines" is the mean over machines
of the error's size. Where namespaces are not allowed, the models alone are shown. Exit status 1
when simulated L2 misses a bound.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from bench.report import Ratio, Report
from sim.studies.lab.link_model.maxmin import broadcast_times
from sim.studies.lab.link_model.real import real_times
from sim.studies.lab.link_model.simulated import simulated_times
from sim.studies.lab.link_model.topologies import TOPOLOGIES, Topology
from sim.studies.lab.namespaces import CUBIC, reason_to_skip

LAST: Final = "last machine"
MACHINES: Final = "error of machines"
JUDGED: Final = "simulated L2"
BOUND: Final = 12.0
"""Per cent that the time to the last machine may be off, on any topology."""
MEAN_BOUND: Final = 7.0
"""Per cent, the mean over topologies."""
SEEDS: Final = range(1, 10)
"""Seeds of simulated runs of each topology."""

Times = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Finding:
    """Error of a model on a topology, in per cent."""

    case: str
    model: str
    last: float
    machines: float


def compare(case: str, model: str, runs: Sequence[Times], real: Sequence[Times]) -> Finding:
    """Return the deviation of a model's runs from the real runs."""
    errors = [abs(_typical(runs, name) / _typical(real, name) - 1) for name in runs[0]]
    last = statistics.median(_lasts(runs)) / statistics.median(_lasts(real)) - 1
    return Finding(case, model, 100 * last, 100 * statistics.fmean(errors))


def _typical(runs: Sequence[Times], name: str) -> float:
    return statistics.median(times[name] for times in runs)


def _lasts(runs: Sequence[Times]) -> list[float]:
    return [max(times.values()) for times in runs]


def models_of(topology: Topology) -> dict[str, list[Times]]:
    """Return the models' results: one run, or one a seed."""
    exact = broadcast_times(
        topology.parents, topology.links, topology.chunks, topology.chunk_bytes
    )
    root = topology.members[0].name
    return {
        "simulated L1": [simulated_times(topology, level=1, seed=seed) for seed in SEEDS],
        JUDGED: [simulated_times(topology, level=2, seed=seed) for seed in SEEDS],
        "max-min": [{name: at for name, at in exact.items() if name != root}],
    }


def measure(topology: Topology, report: Report, congestion: str, runs: int) -> list[Finding]:
    """Fill in the rows of one topology; with ``runs`` = 0 only the models' results."""
    case, subject = topology.name, f"real, {congestion or 'default'}"
    real = [trio.run(real_times, topology, congestion) for _ in range(runs)]
    if real:
        report.add(case, subject, LAST, "s", _lasts(real))
    findings = []
    for model, simulated in models_of(topology).items():
        report.add(case, model, LAST, "s", _lasts(simulated))
        if real:
            finding = compare(case, model, simulated, real)
            findings.append(finding)
            report.add(case, model, MACHINES, "%", [finding.machines])
            ratio = 1 + finding.last / 100
            report.ratios.append(
                Ratio(case=case, metric=LAST, of=model, to=subject, median=ratio)
            )
    return findings


def verdict(findings: Sequence[Finding]) -> bool:
    """Print a line per topology and model, and say whether the judged model keeps its
    bounds.
    """
    print(f"\n{'topology':16} {'model':14} {'last machine':>13} {'machines':>9}")
    for finding in findings:
        print(
            f"{finding.case:16} {finding.model:14} {finding.last:+12.1f}%"
            f" {finding.machines:8.1f}%"
        )
    for model in dict.fromkeys(finding.model for finding in findings):
        errors = [abs(finding.last) for finding in findings if finding.model == model]
        print(
            f"{model:14} worst {max(errors):.1f} %, mean over topologies"
            f" {statistics.fmean(errors):.1f} %"
        )
    judged = [abs(finding.last) for finding in findings if finding.model == JUDGED]
    return max(judged) <= BOUND and statistics.fmean(judged) <= MEAN_BOUND


def run(args: Sequence[str]) -> int:
    """Run ``python -m bench links [--json FILE] [--runs N] [--congestion NAME] [--only
    TEXT]``.
    """
    parser = argparse.ArgumentParser(prog="python -m bench links", description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--congestion", default=CUBIC, help="TCP's congestion control; empty: the default"
    )
    parser.add_argument("--only", default="", help="topologies whose name contains this")
    options = parser.parse_args(args)
    reason = reason_to_skip()
    runs = options.runs if reason is None else 0
    if reason is not None:
        print(f"no real links: {reason}", file=sys.stderr)
    report, findings = Report("links"), []
    for topology in TOPOLOGIES:
        if options.only in topology.name:
            print(
                f"{topology.name}: {topology.caption} (load {os.getloadavg()[0]:.1f})",
                file=sys.stderr,
            )
            findings += measure(topology, report, options.congestion, runs)
    print(report)
    report.write(options.json)
    return 0 if not findings or verdict(findings) else 1
