"""Many seeds and parameters at once: one process a run, through any executor.

A caller that stops reading `sweep` half-way (Ctrl-C) ends it at once: what waits is cancelled,
this machine's worker processes are terminated, and the runs that had ended were yielded
already.

A cluster's executor is named by import path (``dask.distributed:Client.get_executor`` style
factories work as long as what they return has ``submit``); by default all cores of this machine
are used.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import signal
import statistics
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import product
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any, Final

from p2p.concurrency import leaves
from p2p.errors import ConfigError, ShoalError
from p2p.node.usage import did_you_mean
from sim.errors import NodeFailed, SimulationError
from sim.net.link import LinkSpec
from sim.run.result import Result
from sim.run.runner import run_scenario
from sim.run.scenario import Scenario, load_scenario

FIELDS: Final = ("nodes", "duration", "latency", "level")
"""Keys of ``--set`` that change a scenario itself. ``link.up`` and its like change a field of
its ``[link]``; every other key is one of its ``[parameters]``."""
LINK: Final = "link."
"""Prefix of keys that change every machine's line."""
TAIL: Final = 0.1
"""Share of the runs of a setting below the lower and above the upper end of the interval that a
sweep shows: with ten seeds the second smallest and the second largest."""

MAX_POINTS: Final = 500
"""Runs of one setting of which each is kept and drawn by itself: as many as pixels across."""

_FAREWELL: Final = 2.0
"""Seconds for the pool's thread to end once its processes are terminated. It needs
milliseconds, but a process killed while it wrote a result leaves it waiting."""


@dataclass(frozen=True, slots=True)
class SweepRun:
    """A run of a sweep, and its outcome."""

    seed: int
    changes: Mapping[str, Any]
    result: Result | None
    error: str | None
    """Why there is no result."""

    @property
    def ok(self) -> bool:
        """True if it ended and met its expectations."""
        return self.result is not None and self.result.ok


def changed(scenario: Scenario, changes: Mapping[str, Any]) -> Scenario:
    """Return the scenario with other fields (``nodes``, ``duration`` ...), another line
    (``link.up`` ...) or other ``parameters``.

    Raises:
        ConfigError: There can be no such line.
    """
    own = {key: value for key, value in changes.items() if key in FIELDS}
    line = {
        key.removeprefix(LINK): value for key, value in changes.items() if key.startswith(LINK)
    }
    others = {
        key: value
        for key, value in changes.items()
        if key not in own and not key.startswith(LINK)
    }
    return scenario.with_changes(
        **own, link=_line(scenario, line), parameters={**scenario.parameters, **others}
    )


def _line(scenario: Scenario, line: Mapping[str, Any]) -> LinkSpec:
    known = [item.name for item in fields(LinkSpec)]
    for key in line:
        if key not in known:
            raise ConfigError(f"no line has {LINK}{key}; {did_you_mean(key, known)}")
    try:
        return replace(scenario.link, **line)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"scenario {scenario.name}, [link]: {error}") from None


def run_one(scenario: Scenario, seed: int, changes: Mapping[str, Any]) -> SweepRun:
    """Run one setting with one seed, in a worker process."""
    try:
        return SweepRun(seed, changes, run_scenario(changed(scenario, changes), seed), None)
    except (SimulationError, ShoalError, ExceptionGroup) as error:
        return SweepRun(seed, changes, None, describe(error))


def describe(error: BaseException) -> str:
    """Return the innermost reason in one line; for a bug, with the file and line that raised
    it.
    """
    *around, reason = _chain(error)
    where = "".join(
        f"node {e.node} at {e.seconds:g} s: " for e in around if isinstance(e, NodeFailed)
    )
    origin = f" ({_origin(reason)})" if is_bug(reason) else ""
    return f"{where}{type(reason).__name__}: {reason}{origin}"


def innermost(error: BaseException) -> BaseException:
    """Return the first exception, without the groups and the node around it."""
    return list(_chain(error))[-1]


def _chain(error: BaseException) -> Iterator[BaseException]:
    first = next(leaves(error))
    yield first
    if isinstance(first, NodeFailed):
        yield from _chain(first.error)


def is_bug(reason: BaseException) -> bool:
    """Return True if only a traceback helps: none of our own errors, whose text says it all."""
    return not isinstance(reason, ShoalError | SimulationError)


def _origin(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return (
        f"{Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name}"
        if frames
        else "?"
    )


def grid(settings: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Yield every combination of the values of each key."""
    return [dict(zip(settings, values, strict=True)) for values in product(*settings.values())]


def open_executor(path: str | None, jobs: int | None) -> Executor:
    """Return an executor on this machine's cores, or that of the callable ``module:name``."""
    if path is None:
        # Spawned, not forked: a fork copies the parent's threads' locks as they happen to be.
        return ProcessPoolExecutor(jobs or os.cpu_count(), get_context("spawn"), _hush)
    module, _, name = path.partition(":")
    try:
        factory: Callable[[], Executor] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"no executor {path}: {error}") from error
    return factory()


def _hush() -> None:
    """Silence a worker: warnings are no news in a storm, and Ctrl-C is for the parent, which
    then ends this process."""
    logging.basicConfig(level=logging.ERROR)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def sweep(
    scenario: Scenario,
    seeds: Sequence[int],
    settings: Mapping[str, Sequence[Any]],
    executor: Executor,
) -> Iterator[SweepRun]:
    """Run every seed with every combination of settings; runs come as they end."""
    strangers, others = active_children(), threading.enumerate()
    threads: list[threading.Thread] = []
    try:
        with _interrupts_held():
            runs = {
                executor.submit(run_one, scenario, seed, changes): (seed, changes)
                for changes in grid(settings)
                for seed in seeds
            }
            threads += [each for each in threading.enumerate() if each not in others]
        for future in as_completed(runs):
            yield _outcome(future, *runs[future])
    except BaseException:
        executor.shutdown(wait=False, cancel_futures=True)
        for child in active_children():
            if child not in strangers:
                child.terminate()
        if isinstance(executor, ProcessPoolExecutor):
            # At exit Python 3.11 writes to the pipe that its thread may be closing: a traceback
            # after everything was said.
            for thread in threads:
                thread.join(_FAREWELL)
        raise
    executor.shutdown()


def _outcome(future: Future[SweepRun], seed: int, changes: Mapping[str, Any]) -> SweepRun:
    try:
        return future.result()
    except BrokenProcessPool:
        return SweepRun(
            seed,
            changes,
            None,
            "its process, or one beside it, was killed: out of memory? try --jobs",
        )


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Keep the terminal's Ctrl-C from workers that are started in the block, even while they
    import.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def summarise(runs: Sequence[SweepRun]) -> dict[str, Any]:
    """Summarise failures by seed, metrics, claims reached, sites that fired, and one hash of
    all traces."""
    rows: dict[str, Any] = {}
    for run in sorted(runs, key=_order):
        row = rows.setdefault(
            str(dict(run.changes)),
            {"changes": dict(run.changes), "runs": 0, "values": {}, "points": {}},
        )
        row["runs"] += 1
        for name, value in (run.result.metrics if run.result is not None else {}).items():
            if isinstance(value, int | float):
                row["values"].setdefault(name, []).append(value)
                if row["runs"] <= MAX_POINTS:
                    row["points"].setdefault(name, []).append([run.seed, value])
    for row in rows.values():
        row["metrics"] = {name: _spread(values) for name, values in row.pop("values").items()}
    results = [run.result for run in runs if run.result is not None]
    return {
        "runs": len(runs),
        "failed": [
            {"seed": run.seed, "changes": dict(run.changes), "why": _why(run)}
            for run in sorted(runs, key=lambda run: run.seed)
            if not run.ok
        ],
        "settings": list(rows.values()),
        "witnessed": _totals(result.witnessed for result in results),
        "fired": _totals(result.fired for result in results),
        "trace_hash": _hash_of_all(runs),
        "cpu_seconds": round(sum(result.cpu_seconds for result in results), 1),
    }


def _order(run: SweepRun) -> tuple[list[tuple[bool, Any]], int]:
    """Sort key: by setting, numbers as numbers and before text, then by seed."""
    return [(isinstance(value, str), value) for value in run.changes.values()], run.seed


def _totals(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the sum of each count, by name; counts of 0 are kept."""
    totals: dict[str, int] = {}
    for count in counts:
        for name, times in count.items():
            totals[name] = totals.get(name, 0) + times
    return dict(sorted(totals.items()))


def _hash_of_all(runs: Sequence[SweepRun]) -> str:
    """Return a hash that is equal for two sweeps in which every run had the same trace."""
    traces = sorted(
        (str(dict(run.changes)), run.seed, run.result.trace_hash)
        for run in runs
        if run.result is not None
    )
    return hashlib.blake2b(repr(traces).encode(), digest_size=16).hexdigest()


def _why(run: SweepRun) -> str:
    if run.result is None:
        return run.error or "no result"
    broken = [entry for entry in run.result.expectations if not entry["ok"]]
    return "; ".join(f"{entry['name']} (is {entry['value']})" for entry in broken)


def _spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    tail = int(TAIL * len(ordered))
    return {
        "min": ordered[0],
        "low": ordered[tail],
        "median": statistics.median(ordered),
        "high": ordered[-1 - tail],
        "max": ordered[-1],
    }


def play(
    scenario: str, seeds: Iterable[int] = (1,), **settings: object
) -> list[dict[str, int | float | str]]:
    """Play a scenario for each seed and each combination of ``settings`` in this process, and
    return one row a run: its seed, its settings and its metrics, as a table of pandas takes
    them.

    ``play("churn", range(1, 4), nodes=(20, 50))`` makes six rows. A setting is a value or a
    list of values; its name is a field or parameter as for ``--set``, with ``__`` for a dot
    (``link__up=10``). Raises `ConfigError` for one that the scenario does not have, and what a
    node raises.
    """
    values = {
        name.replace("__", "."): value if isinstance(value, list | tuple | range) else (value,)
        for name, value in settings.items()
    }
    found = load_scenario(scenario)
    return [
        {"seed": seed, **changes, **run_scenario(changed(found, changes), seed).metrics}
        for changes in grid(values)
        for seed in seeds
    ]
