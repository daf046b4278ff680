"""Difference of two runs: the first event that differs.

Both runs are made twice: once for the digests of their blocks, and, from the first block that
differs, once more with that block kept. With one scenario and one seed, run in two processes
with different hash seeds, this finds what is not deterministic; with two seeds or two trees of
code, where they begin to differ.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sim.errors import SimulationError
from sim.kernel.simulation import SimOptions, Simulation
from sim.kernel.trace import BLOCK_EVENTS
from sim.run.runner import run_scenario
from sim.run.scenario import load_scenario
from sim.run.sweep import changed


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two runs."""

    scenario: str
    seed: int
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Changes, as `sim.run.sweep.changed` takes them."""
    hash_seed: str = "0"
    """Value of PYTHONHASHSEED for its process."""
    python: str = sys.executable
    """Interpreter that runs the simulation."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first event in which two runs differ; None on a side that had already ended."""

    number: int
    one: Sequence[Any] | None
    other: Sequence[Any] | None


def first_difference(one: Side, other: Side) -> Difference | None:
    """Return the first difference of two traces; None if they are equal."""
    blocks = [_run(side, None) for side in (one, other)]
    if blocks[0]["digest"] == blocks[1]["digest"]:
        return None
    pairs = list(zip(blocks[0]["blocks"], blocks[1]["blocks"], strict=False))
    block = next((number for number, (a, b) in enumerate(pairs) if a != b), len(pairs))
    events = [_run(side, block)["kept"] for side in (one, other)]
    for number in range(max(map(len, events))):
        a, b = (side[number] if number < len(side) else None for side in events)
        if a != b:
            return Difference(block * BLOCK_EVENTS + number, a, b)
    raise SimulationError("the traces differed, and did not when they were run again")


def _run(side: Side, block: int | None) -> Mapping[str, Any]:
    """Run one side in a process of its own and return what `report` printed."""
    arguments = [
        side.python,
        "-m",
        "sim.run.diff",
        side.scenario,
        str(side.seed),
        json.dumps(dict(side.changes)),
    ]
    arguments += [str(block)] if block is not None else []
    environment = {**os.environ, "PYTHONHASHSEED": side.hash_seed}
    done = subprocess.run(
        arguments, capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode != 0:
        raise SimulationError(f"{' '.join(arguments)} failed: {done.stderr.strip()[-2000:]}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def report(
    scenario: str, seed: int, changes: Mapping[str, Any], keep: int | None
) -> dict[str, Any]:
    """Digests of all blocks, and the events of block ``keep``."""
    traces: list[Simulation] = []
    options = SimOptions(keep_trace=() if keep is None else (keep,))
    played = changed(load_scenario(scenario), changes)
    result = run_scenario(played, seed, options=options, started=traces.append)
    trace = traces[0].trace
    kept = [[_text(item) for item in entry] for entry in trace.kept]
    return {"digest": result.trace_hash, "blocks": trace.blocks, "kept": kept}


def _text(item: object) -> object:
    return (
        item.hex()
        if isinstance(item, bytes)
        else [_text(i) for i in item]
        if isinstance(item, list)
        else item
    )


if __name__ == "__main__":
    name, seed, changes, *block = sys.argv[1:]
    sys.stdout.write(
        json.dumps(
            report(name, int(seed), json.loads(changes), int(block[0]) if block else None)
        )
    )
