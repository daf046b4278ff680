"""Machines that come and go, as measured.

Parameters are fits, with their sources; the trace files they come from are not copied. In all five spot
fits lognormal beats Weibull. Losses come together (88 to 97 % of the nodes lost in the 16-node zones went in
drops of four or more), so each zone also has events of its own that take a share of it, or all.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

from p2p.errors import ConfigError
from sim.queue import SECOND
from sim.swarm import Swarm

HOUR: Final = 3600.0
DAY: Final = 24 * HOUR
LONGEST: Final = 365 * DAY
"""A lognormal tail has no end; a simulation has."""


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Spans of time, by median (seconds) and sigma (of the natural logarithm)."""

    median: float
    sigma: float

    def draw(self, rng: Random) -> float:
        """Seconds."""
        return min(LONGEST, rng.lognormvariate(math.log(self.median), self.sigma))


@dataclass(frozen=True, slots=True)
class Weibull:
    """Spans of time, by shape and scale (seconds)."""

    shape: float
    scale: float

    def draw(self, rng: Random) -> float:
        """Seconds."""
        return min(LONGEST, rng.weibullvariate(self.scale, self.shape))


Span = Lognormal | Weibull

PRESETS: Final[Mapping[str, tuple[Span, Span]]] = {
    # Own fit on skypilot-org/spot-traces, availability/1-node/aws-02-15-2023: 9 zones, 45 days, 1,884 lives.
    "spot": (Lognormal(math.exp(-0.23) * HOUR, 1.46), Lognormal(math.exp(-0.40) * HOUR, 1.28)),
    # The same, preemption/1-node/aws-04-22-2023: V100 preemptions, 4 zones, 7 days, 202 intervals.
    "preemption": (Lognormal(math.exp(-0.54) * HOUR, 1.68), Lognormal(math.exp(-0.88) * HOUR, 1.47)),
    # Stutzbach and Rejaie, Understanding Churn in P2P Networks, IMC 2006 (Debian): sessions, also for gaps.
    "bittorrent": (Weibull(0.38, 42.4 * 60), Weibull(0.38, 42.4 * 60)),
    # probe-lab/network-measurements, rfm2: half of new peers of the IPFS DHT are gone after two hours.
    "ipfs": (Lognormal(2 * HOUR, 1.46), Lognormal(2 * HOUR, 1.28)),
}
"""How long machines stay, and how long they stay away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChurnModel:
    """Who goes when, and for how long."""

    up: Span

    down: Span

    silent: float = 0.5
    """Share of ends in which the machine vanishes without a word (power, network), not only its process."""

    zone_interval: float = math.inf
    """Mean seconds between events that hit a zone, for each zone."""

    zone_all: float = 0.5
    """Share of zone events that take the whole zone; the others take a share drawn evenly."""

    day_swing: float = 0.0
    """How much more likely machines come at the best hour than on average, 0 to 1, over a day."""


class Churn:
    """Lets nodes of a swarm die and come back, as callbacks of the heap."""

    def __init__(self, swarm: Swarm, model: ChurnModel) -> None:
        self.deaths = 0
        self.returns = 0
        self.zone_events = 0
        self._swarm = swarm
        self._model = model
        self._queue = swarm.simulation.queue
        self._rng = swarm.rng("churn")
        self._stopped = False

    def add(self, name: str) -> None:
        """Let a node that has just been added live by the model from now on."""
        self._after(self._model.up.draw(self._rng), self._die, name, self._swarm.nodes[name].life)

    def add_zone(self, zone: str) -> None:
        """Let events hit ``zone`` from now on."""
        if self._model.zone_interval < math.inf:
            self._after(self._rng.expovariate(1 / self._model.zone_interval), self._hit_zone, zone)

    def stop(self) -> None:
        """No more deaths; whoever is away still comes back."""
        self._stopped = True

    def _after(self, seconds: float, callback: Callable[..., None], *args: object) -> None:
        due = self._queue.now + int(seconds * SECOND)
        self._queue.schedule(due, self._queue.kernel, "churn", callback, *args)

    def _die(self, name: str, life: int) -> None:
        node = self._swarm.nodes[name]
        if node.alive and node.life == life and not self._stopped:
            self.kill(name)

    def kill(self, name: str) -> None:
        """End a node by the model, and let it come back."""
        self.deaths += 1
        self._swarm.kill(name, silent=self._rng.random() < self._model.silent)
        self._after(self._pause(), self._return, name)

    def _pause(self) -> float:
        """Time away: drawn, and longer when people sleep."""
        away = self._model.down.draw(self._rng)
        hour = math.cos(2 * math.pi * self._swarm.simulation.now / DAY)
        return away / max(0.05, 1 + self._model.day_swing * hour)

    def _return(self, name: str) -> None:
        self.returns += 1
        self._swarm.restart(name)
        self.add(name)

    def _hit_zone(self, zone: str) -> None:
        self.add_zone(zone)
        if self._stopped:
            return
        self.zone_events += 1
        share = 1.0 if self._rng.random() < self._model.zone_all else self._rng.random()
        for node in [node for node in self._swarm.alive if node.zone == zone]:
            if self._rng.random() < share:
                self.kill(node.name)


@dataclass(frozen=True, slots=True, order=True)
class Session:
    """One recorded life: seconds since the start of the recording."""

    start: float
    end: float
    node: str


def read_sessions(path: Path) -> list[Session]:
    """A CSV with the columns node, start, end (seconds), in order of time. Raises `ConfigError` by line."""
    sessions = []
    with path.open(newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            try:
                session = Session(float(row["start"]), float(row["end"]), row["node"])
            except (KeyError, TypeError, ValueError) as error:
                raise ConfigError(
                    f"{path}, line {number}: need node, start, end in seconds ({error})"
                ) from None
            if not 0 <= session.start < session.end:
                raise ConfigError(f"{path}, line {number}: a session must end after it starts")
            sessions.append(session)
    return sorted(sessions)


def replay_sessions(swarm: Swarm, sessions: Sequence[Session], start: Callable[[str], None]) -> None:
    """Let recorded lives happen: ``start`` adds or restarts the node, the recording ends it."""
    queue = swarm.simulation.queue
    for session in sessions:
        begin, end = (queue.now + int(moment * SECOND) for moment in (session.start, session.end))
        queue.schedule(begin, queue.kernel, "churn", start, session.node)
        queue.schedule(end, queue.kernel, "churn", swarm.kill, session.node)
