"""The state that all nodes of one simulation share: heap, trace, seed, keys and witnesses."""

from __future__ import annotations

from collections.abc import Callable, Container
from contextvars import ContextVar
from dataclasses import dataclass
from random import Random
from typing import Final

from sim.errors import SimulationError
from sim.kernel.keys import KeyRing, derived_rng
from sim.kernel.queue import EventQueue
from sim.kernel.trace import Trace

BUGGIFY_ACTIVE: Final = 0.25
"""Share of buggify sites that are active in one run (FoundationDB's flow/Buggify.h). Not all at
once, for the reason of `sim.faults.plan.SWITCHED_OFF`: a run in which every table is full and
every answer gets lost never comes to what lies behind them."""
BUGGIFY_FIRES: Final = 0.25
"""Probability that an active site misbehaves when it is reached (the same source)."""
CURRENT_NODE: Final = ContextVar("node", default="")
"""Name of the node that a task belongs to; empty if it belongs to none."""
EPOCH: Final = 1_767_225_600.0
"""Wall clock time at the start of every simulation: 2026-01-01 00:00 UTC. Any fixed moment
would do.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimOptions:
    """Settings of one simulation."""

    hashed_keys: bool = False
    """Keyed hashes instead of Ed25519: for many hundreds of nodes."""

    buggify: bool = False
    """True if `World.buggify` may say yes."""

    keep_trace: Container[int] | None = None
    """Blocks of the trace to remember (`sim.kernel.trace.EVERYTHING` for all)."""


class Simulation:
    """The world of one seed."""

    def __init__(self, seed: int, options: SimOptions | None = None) -> None:
        self.seed = seed
        self.options = options or SimOptions()
        self.trace = Trace(self.options.keep_trace)
        self.queue = EventQueue(self.trace)
        self.keys = KeyRing(seed, hashed=self.options.hashed_keys)
        self.end: Callable[[SimulationError | None], None] = self._raise
        """Ends the run; the kernel puts its own in place."""
        self.misbehaves = self.options.buggify
        """True if `World.buggify` may say yes now."""
        self.witnessed: dict[str, int] = {}
        """Number of times that each `sometimes` claim held; 0 for claims that were made and
        never held.
        """
        self.fired: dict[str, int] = {}
        """Number of times that each buggify site misbehaved; 0 for sites that never did."""
        self.series: dict[str, list[tuple[float, float]]] = {}
        """Curves for the report, by name: (virtual seconds, value)."""
        self.distributions: dict[str, list[float]] = {}
        """Histograms for the report, by name: one value per node."""
        self.lives: dict[str, list[list[float]]] = {}
        """Maps each node to the beginning and end of each of its lives, for the report."""
        self._active: dict[str, bool] = {}

    @property
    def now(self) -> float:
        """Virtual seconds since the start."""
        return self.queue.now / 1e9

    def rng(self, node: str, purpose: str) -> Random:
        """Return a generator that is a function of (seed, node, purpose)."""
        return derived_rng(self.seed, node, purpose)

    def sometimes(self, name: str, condition: bool) -> None:
        """Count a claim that must hold at least once over many simulations."""
        self.witnessed[name] = self.witnessed.get(name, 0) + bool(condition)

    def buggify(self, name: str, dice: Callable[[str], Random]) -> bool:
        """Return True if the site ``name`` misbehaves now; ``dice`` gives the node's own
        generators by purpose."""
        if not self.misbehaves:
            return False
        active = self._active.get(name)
        if active is None:
            active = derived_rng(self.seed, "buggify", name).random() < BUGGIFY_ACTIVE
            self._active[name] = active
            self.fired[name] = 0
        fires = active and dice(f"buggify/{name}").random() < BUGGIFY_FIRES
        self.fired[name] += fires
        return fires

    def plot(self, curve: str, value: float) -> None:
        """Add a point, now, to a curve of the report."""
        self.series.setdefault(curve, []).append((round(self.now, 6), float(value)))

    def _raise(self, failure: SimulationError | None) -> None:
        if failure is not None:
            raise failure
