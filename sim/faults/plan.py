"""Faults as data: a plan is a list of timed faults, which can be drawn, kept and shrunk.

Theory of operation
-------------------
Each kind of fault is a row of `KINDS`: how bad it may be and how many nodes it may hit. What it
does is in `sim.faults.injector` (simulated nodes) and `sim.studies.lab.faults` (real
processes). A drawn plan follows swarm testing (Groce et al., ISSTA 2012): each kind is off with
probability one half, because a run in which everything happens always hides what only happens
when something else does not. All faults end before the safety phase does; then every node is up
and every link whole, and the swarm has a bounded time to converge (the liveness phase, as
TigerBeetle's VOPR has it).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

from p2p.errors import ConfigError
from p2p.node.usage import did_you_mean, write_text

SWITCHED_OFF: Final = 0.5
"""Probability that a kind of fault does not occur at all in a drawn plan (swarm testing, see
above). With 23 kinds a plan has 11 or 12 of them on average."""
FURTHER_RATE: Final = 0.7
"""Rate of the exponential from which the number of further faults of a kind is drawn, rounded
down: 1 / (e^0.7 - 1), so one beside the first on average, and four or more for 6 % of the
kinds that occur (e^-2.8)."""
MEDIAN_SECONDS: Final = 10.0
"""Median duration of a drawn fault: as long as a dialer waits for a silent machine
(`sim.net.fabric.DIAL_TIMEOUT`), so half of the faults outlast a dial."""
SIGMA: Final = 1.0
"""Standard deviation of the logarithm of the duration: 95 % of the faults last 1.4 to 71 s,
unless the phase ends first."""
SHORTEST: Final = 0.5
"""Seconds that every drawn fault lasts at least, and must have left before the phase ends."""
MAX_FAULTS: Final = 10_000
"""Faults of one plan: more is a mistake in the file. One a second for three hours."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Fault:
    """A fault at some nodes for some time."""

    at: float
    """Start of the fault, in virtual seconds."""

    kind: str

    who: tuple[str, ...]
    """Names of nodes; in files also patterns (``n1*``), shares (``25%``) and zones
    (``zone:zone1``)."""

    seconds: float = 0.0
    """Duration; 0 means for ever, or a single moment."""

    value: float = 0.0
    """Severity, by kind: see `KINDS`."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(
                f"no fault is called {self.kind!r}; {did_you_mean(self.kind, KINDS)}"
            )
        if not (self.at >= 0 and self.seconds >= 0 and math.isfinite(self.at + self.seconds)):
            raise ConfigError(
                f"fault {self.kind}: at and seconds must be finite and not negative"
            )
        if not self.who:
            raise ConfigError(f"fault {self.kind} at {self.at:g} s: who names no node")
        for word in self.who:
            if word.endswith("%"):
                share_of(word)

    def __str__(self) -> str:
        until = f" for {self.seconds:g} s" if self.seconds else ""
        return f"{self.at:g} s: {self.kind}({self.value:g}) at {', '.join(self.who)}{until}"


@dataclass(frozen=True, slots=True)
class FaultKind:
    """The ranges from which faults of a kind are drawn.

    `sim.faults.injector` has the kind's effect under the same name.
    """

    value: tuple[float, float]
    """The range from which its value is drawn."""
    victims: int = 1
    """The most nodes that a drawn fault hits."""


KINDS: Final[Mapping[str, FaultKind]] = {
    # the process ends, its peers are told; it comes back after `seconds`
    "kill": FaultKind((0, 0), 3),
    "vanish": FaultKind((0, 0), 3),  # the machine is gone without a word
    "torn": FaultKind((0, 0)),  # power cut: a random part of the unsynced writes survives
    "wipe": FaultKind((0, 0)),  # comes back with an empty disk
    "pause": FaultKind((0, 0), 2),  # nothing happens for a while, then everything at once
    "partition": FaultKind((0, 0), 1000),  # cut off from the rest, both ways
    "mute": FaultKind((0, 0), 3),  # hears, and is not heard
    "hold": FaultKind((0, 0), 2),  # everything is late, nothing is lost
    "clog": FaultKind((0.1, 3.0), 3),  # value: seconds of delay on all that is sent
    "throttle": FaultKind((0.01, 0.5), 3),  # value: share of the bandwidth that is left
    "drip": FaultKind((0.01, 0.1)),  # value: Mbit/s of upload; promises much and gives drops
    "lossy": FaultKind((0.01, 0.3), 5),  # value: probability of a retransmission
    "jitter": FaultKind((0.01, 0.5), 5),  # value: seconds
    "skew": FaultKind((-600, 600), 3),  # value: seconds by which the wall clock is off
    "drift": FaultKind((0.9, 1.1), 3),  # value: how fast all clocks run
    "slow_disk": FaultKind((0.05, 2.0), 3),  # value: seconds of an fsync; reads at 1 MB/s
    "full_disk": FaultKind((0, 0)),
    "slow_cpu": FaultKind((2, 20), 3),  # value: factor on blocking work
    "decay": FaultKind((0, 0)),  # one bit of one stored file flips
    # value: share of messages and stream segments with a flipped bit
    "liar": FaultKind((0.05, 1.0)),
    "equivocator": FaultKind((0.05, 0.5)),  # value: share of messages replaced by older ones
    "reorder": FaultKind(
        (0.05, 0.5), 3
    ),  # value: share of messages that other protocols' overtake
    "impostor": FaultKind((0, 0), 3),  # the first answers where the others are dialled
}


def share_of(word: str) -> float:
    """Return the number in ``25%``.

    Raises:
        ConfigError: It is not from 0 to 100.
    """
    try:
        share = float(word[:-1])
    except ValueError:
        share = math.nan
    if not 0 <= share <= 100:
        raise ConfigError(f"{word!r} is no share of the nodes: write 0% to 100%")
    return share


def draw_plan(
    rng: Random,
    names: Sequence[str],
    start: float,
    end: float,
    kinds: Sequence[str] | None = None,
    spare: Mapping[str, Sequence[str]] | None = None,
) -> list[Fault]:
    """Return a random plan for the safety phase from ``start`` to ``end``; all faults end in
    it.

    ``spare`` names nodes, by kind, that a fault does not hit.
    """
    if end <= start or not names:
        return []
    plan = []
    for kind in kinds if kinds is not None else sorted(KINDS):
        if rng.random() < SWITCHED_OFF:
            continue
        row = KINDS[kind]
        spared = spare.get(kind, ()) if spare is not None else ()
        victims = [name for name in names if name not in spared]
        if not victims:
            continue
        for _ in range(1 + int(rng.expovariate(FURTHER_RATE))):
            at = rng.uniform(start, end - 1)
            seconds = min(
                end - at - SHORTEST, rng.lognormvariate(math.log(MEDIAN_SECONDS), SIGMA)
            )
            count = min(len(victims) // 2 or 1, 1 + int(rng.random() * row.victims))
            if kind == "impostor":
                count = 2
            who = tuple(sorted(rng.sample(victims, min(count, len(victims)))))
            fault = Fault(
                at=round(at, 3),
                kind=kind,
                who=who,
                seconds=round(max(SHORTEST, seconds), 3),
                value=round(rng.uniform(*row.value), 4),
            )
            plan.append(fault)
    return sorted(plan)


def plan_to_json(plan: Iterable[Fault]) -> list[dict[str, Any]]:
    """Return the faults as a list for JSON, which `plan_from_table` reads."""
    return [asdict(fault) for fault in plan]


def plan_from_table(rows: object) -> tuple[Fault, ...]:
    """Return the faults of a list of tables.

    Raises:
        ConfigError: A row is wrong. The message names it.
    """
    if not isinstance(rows, list | tuple) or len(rows) > MAX_FAULTS:
        raise ConfigError(f"a plan is a list of at most {MAX_FAULTS} faults")
    plan = []
    for number, row in enumerate(rows):
        try:
            plan.append(Fault(**{**row, "who": tuple(row["who"])}))
        except (TypeError, KeyError) as error:
            raise ConfigError(f"fault {number}: need at, kind and who ({error})") from None
    return tuple(sorted(plan))


def save_plan(
    path: Path,
    scenario: str,
    seed: int,
    nodes: int,
    plan: Iterable[Fault],
    why: str,
    *,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Write a file that ``shoal sim replay`` runs again.

    ``settings`` are those of the run (`sim.run.scenario.scenario_to_table`); without them a
    replay has those of ``scenario`` as it is then.
    """
    content = {"scenario": scenario, "seed": seed, "nodes": nodes, "why": why}
    content |= {"settings": settings} if settings is not None else {}
    content["faults"] = plan_to_json(plan)
    write_text("the plan", path, json.dumps(content, indent=2))
