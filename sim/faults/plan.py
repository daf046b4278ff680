"""Faults as data: a plan is a list of timed faults, so that it can be drawn, kept, replayed and
shrunk.

Theory of operation
-------------------
Each kind of fault is a row of `KINDS`: a function that does it, and returns what undoes it. A
drawn plan follows swarm testing (Groce et al., ISSTA 2012): each kind is off with probability
one half, because a run in which everything happens always hides what only happens when
something else does not. All faults end before the safety phase does; then every node is up and
every link whole, and the swarm has a bounded time to converge (the liveness phase, as
TigerBeetle's VOPR has it).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final, TypeVar

from p2p.errors import ConfigError
from p2p.node.usage import did_you_mean
from sim.faults.overlapping_faults import Bends, Words
from sim.kernel.queue import SECOND
from sim.net.link import LinkSpec
from sim.net.relink import relink
from sim.node.clock import Pace
from sim.node.disk import DiskModel
from sim.node.swarm import Swarm

T = TypeVar("T")

SWITCHED_OFF: Final = 0.5
"""Probability that a kind of fault does not occur at all in a drawn plan."""
MAX_FAULTS: Final = 10_000
"""Faults of one plan: more is a mistake in the file."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Fault:
    """One thing that goes wrong, at some nodes, for some time."""

    at: float
    """Virtual seconds."""

    kind: str

    who: tuple[str, ...]
    """Names of nodes; in files also patterns (``n1*``), shares (``25%``) and zones
    (``zone:zone1``)."""

    seconds: float = 0.0
    """How long it lasts; 0 is for ever, or at one moment only."""

    value: float = 0.0
    """How bad it is, by kind: see `KINDS`."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"no fault is called {self.kind!r}; {did_you_mean(self.kind, KINDS)}")
        if not (self.at >= 0 and self.seconds >= 0 and math.isfinite(self.at + self.seconds)):
            raise ConfigError(f"fault {self.kind}: at and seconds must be finite and not negative")
        if not self.who:
            raise ConfigError(f"fault {self.kind} at {self.at:g} s: who names no node")
        for word in self.who:
            if word.endswith("%"):
                share_of(word)

    def __str__(self) -> str:
        until = f" for {self.seconds:g} s" if self.seconds else ""
        return f"{self.at:g} s: {self.kind}({self.value:g}) at {', '.join(self.who)}{until}"


Undo = Callable[[], None]
Act = Callable[[Swarm, Fault], Undo]


def _kill(
    swarm: Swarm, fault: Fault, *, silent: bool = False, torn: bool = False, wipe: bool = False
) -> Undo:
    victims = [name for name in fault.who if swarm.nodes[name].alive]
    for name in victims:
        swarm.kill(name, silent=silent, torn=torn)

    def undo() -> None:
        for name in victims:
            if not swarm.nodes[name].alive:
                swarm.restart(name, wipe=wipe)

    return undo


def _pause(swarm: Swarm, fault: Fault) -> Undo:
    for name in fault.who:
        swarm.pause(name, fault.seconds)
    return _nothing


def _partition(swarm: Swarm, fault: Fault) -> Undo:
    rest = [name for name in swarm.nodes if name not in fault.who]
    cuts = swarm.partition(fault.who, rest)
    return lambda: swarm.repair(cuts)


def _mute(swarm: Swarm, fault: Fault) -> Undo:
    rest = [name for name in swarm.nodes if name not in fault.who]
    cuts = swarm.partition(fault.who, rest, one_way=True)
    return lambda: swarm.repair(cuts)


def _hold(swarm: Swarm, fault: Fault) -> Undo:
    rest = [name for name in swarm.nodes if name not in fault.who]
    cuts = [
        swarm.fabric.cut(one, other, breaks=False)
        for one, other in ((list(fault.who), rest), (rest, list(fault.who)))
    ]
    return lambda: swarm.repair(cuts)


def _bend(
    bends: Bends[T], known: Mapping[str, T], change: Callable[[T], T], put: Callable[[str, T], None]
) -> Undo:
    """Change one thing of several nodes until the fault ends, whatever else bends it
    meanwhile."""

    def once(value: T) -> T:  # a change is known by its identity
        return change(value)

    for name, value in known.items():
        put(name, bends.bend(name, value, once))

    def undo() -> None:
        for name in known:
            put(name, bends.unbend(name, once))

    return undo


def _clog(swarm: Swarm, fault: Fault) -> Undo:
    pairs = {f"{name}>{other}": 0.0 for name in fault.who for other in swarm.nodes if other != name}

    def put(pair: str, seconds: float) -> None:
        one, _, other = pair.partition(">")
        swarm.fabric.clog(one, other, seconds)

    return _bend(swarm.bent.clogs, pairs, lambda seconds: seconds + fault.value, put)


def _relink(swarm: Swarm, fault: Fault, **changes: Callable[[float], float]) -> Undo:
    def change(spec: LinkSpec) -> LinkSpec:
        new: dict[str, Any] = {field: change(getattr(spec, field)) for field, change in changes.items()}
        return replace(spec, **new)

    ends = {name: swarm.nodes[name].endpoint for name in fault.who}
    specs = {name: end.spec for name, end in ends.items()}
    return _bend(
        swarm.bent.links, specs, change, lambda name, spec: relink(swarm.simulation.queue, ends[name], spec)
    )


def _throttle(swarm: Swarm, fault: Fault) -> Undo:
    return _relink(swarm, fault, up=lambda up: up * fault.value, down=lambda down: down * fault.value)


def _drip(swarm: Swarm, fault: Fault) -> Undo:
    return _relink(swarm, fault, up=lambda up: fault.value)


def _lossy(swarm: Swarm, fault: Fault) -> Undo:
    return _relink(swarm, fault, loss=lambda loss: fault.value)


def _jitter(swarm: Swarm, fault: Fault) -> Undo:
    return _relink(swarm, fault, jitter=lambda jitter: fault.value)


def _repace(swarm: Swarm, fault: Fault, change: Callable[[Pace], Pace]) -> Undo:
    clocks = {name: swarm.nodes[name].clock for name in fault.who}
    paces = {name: clock.pace for name, clock in clocks.items()}
    return _bend(swarm.bent.clocks, paces, change, lambda name, pace: clocks[name].set_pace(pace))


def _skew(swarm: Swarm, fault: Fault) -> Undo:
    return _repace(swarm, fault, lambda pace: replace(pace, skew=pace.skew + fault.value))


def _drift(swarm: Swarm, fault: Fault) -> Undo:
    return _repace(swarm, fault, lambda pace: replace(pace, rate=pace.rate * fault.value))


def _slow_cpu(swarm: Swarm, fault: Fault) -> Undo:
    return _repace(swarm, fault, lambda pace: replace(pace, slowness=pace.slowness * fault.value))


def _redisk(swarm: Swarm, fault: Fault, change: Callable[[DiskModel], DiskModel]) -> Undo:
    disks = {name: swarm.nodes[name].disk for name in fault.who}
    models = {name: disk.model for name, disk in disks.items()}

    def put(name: str, model: DiskModel) -> None:
        disks[name].model = model

    return _bend(swarm.bent.disks, models, change, put)


def _slow_disk(swarm: Swarm, fault: Fault) -> Undo:
    return _redisk(swarm, fault, lambda model: replace(model, fsync=fault.value, bytes_per_second=1e6))


def _full_disk(swarm: Swarm, fault: Fault) -> Undo:
    return _redisk(swarm, fault, lambda model: replace(model, capacity=0))


def _decay(swarm: Swarm, fault: Fault) -> Undo:
    rng = swarm.rng("faults/decay")
    for name in fault.who:
        disk = swarm.nodes[name].disk
        paths = [path for path in disk.paths() if disk.size_now(path)]
        if paths:
            disk.corrupt(rng.choice(paths), rng.randrange(1 << 30))
    return _nothing


def _respeak(swarm: Swarm, fault: Fault, change: Callable[[Words], Words]) -> Undo:
    ends = {name: swarm.nodes[name].endpoint for name in fault.who}
    words = {name: Words(lies=end.lies, repeats=end.repeats, lags=end.lags) for name, end in ends.items()}

    def put(name: str, now: Words) -> None:
        end = ends[name]
        end.lies, end.repeats, end.lags = now.lies, now.repeats, now.lags

    return _bend(swarm.bent.words, words, change, put)


def _lie(swarm: Swarm, fault: Fault) -> Undo:
    return _respeak(swarm, fault, lambda words: replace(words, lies=max(words.lies, fault.value)))


def _repeat(swarm: Swarm, fault: Fault) -> Undo:
    return _respeak(swarm, fault, lambda words: replace(words, repeats=max(words.repeats, fault.value)))


def _reorder(swarm: Swarm, fault: Fault) -> Undo:
    return _respeak(swarm, fault, lambda words: replace(words, lags=max(words.lags, fault.value)))


def _impostor(swarm: Swarm, fault: Fault) -> Undo:
    """The first of ``who`` is dialled in place of the others."""
    impostor = swarm.nodes[fault.who[0]].endpoint.index
    places = {name: swarm.nodes[name].endpoint.index for name in fault.who[1:]}

    def put(name: str, place: int) -> None:
        if place == places[name]:
            swarm.fabric.detours.pop(place, None)
        else:
            swarm.fabric.detours[places[name]] = place

    return _bend(swarm.bent.places, places, lambda _: impostor, put)


def _nothing() -> None:
    """There is nothing to undo."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One row of the table: how a kind of fault works and how it is drawn."""

    act: Act
    value: tuple[float, float]
    """From where to where its value is drawn."""
    victims: int = 1
    """How many nodes at most a drawn fault hits."""


KINDS: Final[Mapping[str, Kind]] = {
    "kill": Kind(_kill, (0, 0), 3),  # the process ends, its peers are told; it comes back after `seconds`
    "vanish": Kind(partial(_kill, silent=True), (0, 0), 3),  # the machine is gone without a word
    "torn": Kind(
        partial(_kill, silent=True, torn=True), (0, 0)
    ),  # power cut: a random part of the unsynced writes survives
    "wipe": Kind(partial(_kill, wipe=True), (0, 0)),  # comes back with an empty disk
    "pause": Kind(_pause, (0, 0), 2),  # nothing happens for a while, then everything at once
    "partition": Kind(_partition, (0, 0), 1000),  # cut off from the rest, both ways
    "mute": Kind(_mute, (0, 0), 3),  # hears, and is not heard
    "hold": Kind(_hold, (0, 0), 2),  # everything is late, nothing is lost
    "clog": Kind(_clog, (0.1, 3.0), 3),  # value: seconds of delay on all that is sent
    "throttle": Kind(_throttle, (0.01, 0.5), 3),  # value: share of the bandwidth that is left
    "drip": Kind(_drip, (0.01, 0.1)),  # value: Mbit/s of upload; promises much and gives drops
    "lossy": Kind(_lossy, (0.01, 0.3), 5),  # value: probability of a retransmission
    "jitter": Kind(_jitter, (0.01, 0.5), 5),  # value: seconds
    "skew": Kind(_skew, (-600, 600), 3),  # value: seconds by which the wall clock is off
    "drift": Kind(_drift, (0.9, 1.1), 3),  # value: how fast all clocks run
    "slow_disk": Kind(_slow_disk, (0.05, 2.0), 3),  # value: seconds of an fsync; reads at 1 MB/s
    "full_disk": Kind(_full_disk, (0, 0)),
    "slow_cpu": Kind(_slow_cpu, (2, 20), 3),  # value: factor on blocking work
    "decay": Kind(_decay, (0, 0)),  # one bit of one stored file flips
    "liar": Kind(_lie, (0.05, 1.0)),  # value: share of messages and stream segments with a flipped bit
    "equivocator": Kind(_repeat, (0.05, 0.5)),  # value: share of messages replaced by older ones
    "reorder": Kind(_reorder, (0.05, 0.5), 3),  # value: share of messages that other protocols' overtake
    "impostor": Kind(_impostor, (0, 0), 3),  # the first answers where the others are dialled
}


def apply_plan(swarm: Swarm, plan: Iterable[Fault]) -> None:
    """Let the faults of ``plan`` happen at their times, as callbacks of the heap."""
    queue = swarm.simulation.queue
    for fault in sorted(plan):
        queue.schedule(int(fault.at * SECOND), queue.kernel, fault.kind, _begin, swarm, fault)


def _begin(swarm: Swarm, fault: Fault) -> None:
    known = _victims(swarm, fault)
    simulation = swarm.simulation
    simulation.trace.record((simulation.queue.now, "sim", "fault", str(fault)))
    simulation.sometimes(f"fault/{fault.kind}", True)
    undo = KINDS[fault.kind].act(swarm, replace(fault, who=known))
    if fault.seconds > 0:
        due = simulation.queue.now + int(fault.seconds * SECOND)
        simulation.queue.schedule(due, simulation.queue.kernel, f"end of {fault.kind}", undo)


def _victims(swarm: Swarm, fault: Fault) -> tuple[str, ...]:
    """The nodes that ``who`` means: names, patterns (``n1*``), shares (``25%``) and zones
    (``zone:z1``).

    Raises `ConfigError` for a word that means none: a fault that hits nobody makes a good
    figure for nothing.
    """
    found: dict[str, None] = {}
    for word in fault.who:
        hit = _meant(swarm, word)
        if not hit:
            zones = [f"zone:{node.zone}" for node in swarm.nodes.values() if node.zone]
            near = did_you_mean(word, [*swarm.nodes, *dict.fromkeys(zones)])
            raise ConfigError(f"fault {fault.kind} at {fault.at:g} s: no node is meant by {word!r}; {near}")
        found.update(dict.fromkeys(hit))
    return tuple(found)


def _meant(swarm: Swarm, word: str) -> list[str]:
    if word.endswith("%"):
        count = round(len(swarm.nodes) * share_of(word) / 100)
        return swarm.rng("faults/who").sample(list(swarm.nodes), count)
    if word.startswith("zone:"):
        return [name for name, node in swarm.nodes.items() if node.zone == word[5:]]
    return [name for name in swarm.nodes if fnmatchcase(name, word)]


def share_of(word: str) -> float:
    """The number in ``25%``. Raises `ConfigError` unless it is from 0 to 100."""
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
    """A random plan for the safety phase from ``start`` to ``end``; every fault is over by
    then.

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
        for _ in range(1 + int(rng.expovariate(0.7))):
            at = rng.uniform(start, end - 1)
            seconds = min(end - at - 0.5, rng.lognormvariate(math.log(10), 1.0))
            count = min(len(victims) // 2 or 1, 1 + int(rng.random() * row.victims))
            if kind == "impostor":
                count = 2
            who = tuple(sorted(rng.sample(victims, min(count, len(victims)))))
            fault = Fault(
                at=round(at, 3),
                kind=kind,
                who=who,
                seconds=round(max(0.5, seconds), 3),
                value=round(rng.uniform(*row.value), 4),
            )
            plan.append(fault)
    return sorted(plan)


def plan_to_json(plan: Iterable[Fault]) -> list[dict[str, Any]]:
    """As plain values."""
    return [asdict(fault) for fault in plan]


def plan_from_table(rows: object) -> tuple[Fault, ...]:
    """Raises `ConfigError` that names the row."""
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
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
