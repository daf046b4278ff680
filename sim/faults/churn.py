"""Machines that come and go, as measured.

Parameters are fits, with their sources; the trace files they come from are not copied. In all
five spot fits lognormal beats Weibull. Losses come together (88 to 97 % of the nodes lost in
the 16-node zones went in drops of four or more), so each zone also has events of its own that
take a share of it, or all.

People's machines keep hours: with ``day_swing`` the chance that a machine comes back rises and
falls over the day. A drawn time away is spent at that pace, so that at every moment the chance
to come is ``1 + day_swing * cos(2 pi t / day)`` times the average, whatever distribution it was
drawn from.

Instead of a model, recorded lives may happen (`Churn.replay`): whose, and when, is then no
chance at all.
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
from sim.kernel.queue import SECOND
from sim.node.swarm import Swarm

HOUR: Final = 3600.0
"""Seconds of an hour."""
DAY: Final = 24 * HOUR
"""Seconds of a day."""
PRECISION: Final = 1e-6
"""Seconds to which the hours of the day are worked out: below the millisecond that a scenario
may notice, and far above the rounding of a float after a year (4e-9)."""
LONGEST: Final = 365 * DAY
"""Longest drawn span, in seconds. A lognormal tail has no end, and no scenario lasts a year."""


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Spans of time, by median (seconds) and sigma (of the natural logarithm)."""

    median: float
    sigma: float

    def draw(self, rng: Random) -> float:
        """Draw a span in seconds, at most `LONGEST`."""
        return min(LONGEST, rng.lognormvariate(math.log(self.median), self.sigma))


@dataclass(frozen=True, slots=True)
class Weibull:
    """Spans of time, by shape and scale (seconds)."""

    shape: float
    scale: float

    def draw(self, rng: Random) -> float:
        """Draw a span in seconds, at most `LONGEST`."""
        return min(LONGEST, rng.weibullvariate(self.scale, self.shape))


Span = Lognormal | Weibull

PRESETS: Final[Mapping[str, tuple[Span, Span]]] = {
    # Own fit on skypilot-org/spot-traces, availability/1-node/aws-02-15-2023: 9 zones, 45 days,
    # 1,884 lives.
    "spot": (Lognormal(math.exp(-0.23) * HOUR, 1.46), Lognormal(math.exp(-0.40) * HOUR, 1.28)),
    # The same, preemption/1-node/aws-04-22-2023: V100 preemptions, 4 zones, 7 days, 202
    # intervals.
    "preemption": (
        Lognormal(math.exp(-0.54) * HOUR, 1.68),
        Lognormal(math.exp(-0.88) * HOUR, 1.47),
    ),
    # Stutzbach and Rejaie, Understanding Churn in P2P Networks, IMC 2006 (Debian): sessions,
    # also for gaps.
    "bittorrent": (Weibull(0.38, 42.4 * 60), Weibull(0.38, 42.4 * 60)),
    # probe-lab/network-measurements, rfm2: half of new peers of the IPFS DHT are gone after two
    # hours.
    "ipfs": (Lognormal(2 * HOUR, 1.46), Lognormal(2 * HOUR, 1.28)),
}
"""Published fits of machines' lifetimes and absences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChurnModel:
    """The distributions of the times at which machines leave, and for how long."""

    up: Span

    down: Span

    silent: float = 0.5
    """Share of ends in which the machine vanishes without a word (power, network), not only its
    process."""

    zone_interval: float = math.inf
    """Mean seconds between events that hit a zone, for each zone."""

    zone_all: float = 0.5
    """Share of zone events that take the whole zone; the others take a share drawn evenly."""

    day_swing: float = 0.0
    """Excess of the chance to return at the best hour over that of an average hour, 0 to 1."""

    day: float = DAY
    """Seconds of a day. Its best hour is where the simulation begins."""

    def __post_init__(self) -> None:
        if not all(0 <= share <= 1 for share in (self.silent, self.zone_all, self.day_swing)):
            raise ConfigError("churn: silent, zone_all and day_swing are shares from 0 to 1")
        if not (self.zone_interval > 0 and 0 < self.day < math.inf):
            raise ConfigError("churn: zone_interval and day must be positive")

    def return_after(self, now: float, away: float) -> float:
        """Return the seconds after which a machine that leaves at ``now`` comes back, if it
        would be away for ``away`` seconds at the average rate of returns.

        Over a long absence good and bad hours cancel: the result differs from ``away`` by a
        third of a day at most.
        """
        turn = self.day_swing * self.day / (2 * math.pi)

        # the integral of the chance to come, over the average
        def spent(seconds: float) -> float:
            return seconds + turn * (_wave(now + seconds, self.day) - _wave(now, self.day))

        low, high = max(0.0, away - 2 * turn), away + 2 * turn
        while high - low > PRECISION:
            middle = (low + high) / 2
            low, high = (middle, high) if spent(middle) < away else (low, middle)
        return high


@dataclass(frozen=True, slots=True, order=True)
class Session:
    """A recorded life, in seconds since the start of the recording."""

    start: float
    end: float
    node: str

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end < math.inf:
            raise ValueError("a session must end after it starts, and neither before 0")
        if not self.node:
            raise ValueError("the node has no name")


def read_sessions(path: Path) -> list[Session]:
    """Return the sessions of a CSV file with the columns node, start, end (seconds), in order.

    Raises `ConfigError` naming the file and the line: one that cannot be read, or that lets a
    node live twice at a time.
    """
    try:
        rows = csv.DictReader(path.read_text(encoding="utf-8-sig").splitlines(), strict=True)
        sessions = _sessions(path, rows)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: no recorded sessions can be read ({error})") from None
    ends: dict[str, Session] = {}
    for session in sorted(sessions):
        before = ends.get(session.node)
        if before is not None and session.start < before.end:
            number = sessions[session]
            raise ConfigError(
                f"{path}, line {number}: {session.node} lives already, since {before.start:g} s"
            )
        ends[session.node] = session
    if not ends:
        raise ConfigError(f"{path}: there is no session; need the columns node, start, end")
    return sorted(sessions)


def _sessions(path: Path, rows: csv.DictReader[str]) -> dict[Session, int]:
    """Yield each session with its line."""
    sessions: dict[Session, int] = {}
    for row in rows:
        try:
            if None in row:
                raise ValueError("more fields than columns")
            session = Session(float(row["start"]), float(row["end"]), row["node"])
            if session in sessions:
                raise ValueError(f"the same as line {sessions[session]}")
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{path}, line {rows.line_num}: need node, start, end in seconds ({error})"
            ) from None
        sessions[session] = rows.line_num
    return sessions


def _wave(moment: float, day: float) -> float:
    return math.sin(2 * math.pi * math.fmod(moment, day) / day)


class Churn:
    """Lets nodes of a swarm die and come back, as callbacks of the heap."""

    def __init__(self, swarm: Swarm, model: ChurnModel) -> None:
        self.deaths = 0
        self.returns = 0
        self.zone_events = 0
        self.model: Final = model
        self._swarm = swarm
        self._queue = swarm.simulation.queue
        self._rng = swarm.rng("churn")
        self._stopped = False

    def add(self, name: str) -> None:
        """Let a node that has just been added live by the model from now on."""
        self._after(
            self.model.up.draw(self._rng), self._die, name, self._swarm.nodes[name].life
        )

    def add_zone(self, zone: str) -> None:
        """Let events hit ``zone`` from now on."""
        if self.model.zone_interval < math.inf:
            self._after(
                self._rng.expovariate(1 / self.model.zone_interval), self._hit_zone, zone
            )

    def stop(self) -> None:
        """End all further deaths; machines that are away still return."""
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
        self._swarm.kill(name, silent=self._rng.random() < self.model.silent)
        self._after(self._pause(), self._return, name)

    def _pause(self) -> float:
        """Return the time away: drawn, and spent slowly while people sleep."""
        away = self.model.down.draw(self._rng)
        return (
            self.model.return_after(self._swarm.simulation.now, away)
            if self.model.day_swing
            else away
        )

    def _return(self, name: str) -> None:
        self.returns += 1
        self._swarm.restart(name)
        self.add(name)

    def _hit_zone(self, zone: str) -> None:
        self.add_zone(zone)
        if self._stopped:
            return
        self.zone_events += 1
        share = 1.0 if self._rng.random() < self.model.zone_all else self._rng.random()
        for node in [node for node in self._swarm.alive if node.zone == zone]:
            if self._rng.random() < share:
                self.kill(node.name)

    def replay(self, sessions: Sequence[Session], add: Callable[[str], object]) -> None:
        """Let recorded lives happen from now on: ``add`` starts a node's first, its disk lives
        through all.

        How each ended was not recorded: `ChurnModel.silent` says how many vanish without a
        word.
        """
        for session in sessions:
            self._after(session.start, self._begin, session.node, add)
            self._after(session.end, self._end, session.node)

    def _begin(self, name: str, add: Callable[[str], object]) -> None:
        if name not in self._swarm.nodes:
            add(name)
        else:
            self.returns += 1
            self._swarm.restart(name)

    def _end(self, name: str) -> None:
        if self._swarm.nodes[name].alive:
            self.deaths += 1
            self._swarm.kill(name, silent=self._rng.random() < self.model.silent)
