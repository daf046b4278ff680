"""Makes faults happen in a swarm of simulated nodes, and ends them.

Theory of operation
-------------------
`FaultInjector.apply` puts each fault of a plan on the heap. When its time comes, the words of
``who`` are resolved to nodes (`victims_of`), the action of its kind is called, and what that
returns is put on the heap to be called at its end. Actions that change a value (a line, a
clock, a disk) do so through `OverlappingFaults`, because faults may overlap and end in any
order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Final, TypeVar

from p2p.errors import ConfigError
from p2p.node.usage import did_you_mean
from sim.faults.overlapping_faults import (
    Change,
    MessageFaults,
    OverlappingChanges,
    OverlappingFaults,
)
from sim.faults.plan import Fault, share_of
from sim.kernel.queue import SECOND
from sim.net.link import LinkSpec
from sim.net.relink import relink
from sim.node.clock import ClockModel
from sim.node.disk import DiskModel
from sim.node.swarm import Swarm

T = TypeVar("T")

Undo = Callable[[], None]
"""Takes back what the fault did, as far as no other fault of its kind still does it."""
Action = Callable[["FaultInjector", Fault], Undo]
"""Does the fault to the nodes that ``who`` names, and returns what ends it."""


SLOW_DISK_RATE: Final = 1e6
"""Bytes per second that a slow disk reads and writes: a thousandth of an ordinary one's."""


class FaultInjector:
    """Lets the faults of plans happen in one swarm, and knows which of them overlap.

    One for each swarm: the plan of the scenario and the one that is drawn from the seed may
    change the same line at the same time, and both must be whole again at the end.
    """

    def __init__(self, swarm: Swarm) -> None:
        self.swarm: Final = swarm
        self.overlapping: Final = OverlappingFaults()

    def apply(self, plan: Iterable[Fault]) -> None:
        """Let the faults of ``plan`` happen at their times, as callbacks of the heap."""
        queue = self.swarm.simulation.queue
        for fault in sorted(plan):
            queue.schedule(int(fault.at * SECOND), queue.kernel, fault.kind, self._begin, fault)

    def _begin(self, fault: Fault) -> None:
        known = victims_of(self.swarm, fault)
        simulation = self.swarm.simulation
        simulation.trace.record((simulation.queue.now, "sim", "fault", str(fault)))
        simulation.sometimes(f"fault/{fault.kind}", True)
        undo = ACTIONS[fault.kind](self, replace(fault, who=known))
        if fault.seconds > 0:
            due = simulation.queue.now + int(fault.seconds * SECOND)
            simulation.queue.schedule(
                due, simulation.queue.kernel, f"end of {fault.kind}", undo
            )


def victims_of(swarm: Swarm, fault: Fault) -> tuple[str, ...]:
    """Return the nodes that ``who`` means: names, patterns (``n1*``), shares (``25%``), zones
    (``zone:z1``).

    Raises `ConfigError` for a word that means none: a fault that hits no
    node makes a good figure for nothing.
    """
    found: dict[str, None] = {}
    for word in fault.who:
        hit = _meant(swarm, word)
        if not hit:
            zones = [f"zone:{node.zone}" for node in swarm.nodes.values() if node.zone]
            near = did_you_mean(word, [*swarm.nodes, *dict.fromkeys(zones)])
            raise ConfigError(
                f"fault {fault.kind} at {fault.at:g} s: no node is meant by {word!r}; {near}"
            )
        found.update(dict.fromkeys(hit))
    return tuple(found)


def _meant(swarm: Swarm, word: str) -> list[str]:
    if word.endswith("%"):
        count = round(len(swarm.nodes) * share_of(word) / 100)
        return swarm.rng("faults/who").sample(list(swarm.nodes), count)
    if word.startswith("zone:"):
        return [name for name, node in swarm.nodes.items() if node.zone == word[5:]]
    return [name for name in swarm.nodes if fnmatchcase(name, word)]


def _kill(
    injector: FaultInjector,
    fault: Fault,
    *,
    silent: bool = False,
    torn: bool = False,
    wipe: bool = False,
) -> Undo:
    killed = [name for name in fault.who if injector.swarm.nodes[name].alive]
    for name in killed:
        injector.swarm.kill(name, silent=silent, torn=torn)

    def undo() -> None:
        for name in killed:
            if not injector.swarm.nodes[name].alive:
                injector.swarm.restart(name, wipe=wipe)

    return undo


def _pause(injector: FaultInjector, fault: Fault) -> Undo:
    for name in fault.who:
        injector.swarm.pause(name, fault.seconds)
    return _nothing


def _partition(injector: FaultInjector, fault: Fault) -> Undo:
    rest = [name for name in injector.swarm.nodes if name not in fault.who]
    cuts = injector.swarm.partition(fault.who, rest)
    return lambda: injector.swarm.repair(cuts)


def _mute(injector: FaultInjector, fault: Fault) -> Undo:
    rest = [name for name in injector.swarm.nodes if name not in fault.who]
    cuts = injector.swarm.partition(fault.who, rest, one_way=True)
    return lambda: injector.swarm.repair(cuts)


def _hold(injector: FaultInjector, fault: Fault) -> Undo:
    rest = [name for name in injector.swarm.nodes if name not in fault.who]
    cuts = [
        injector.swarm.fabric.cut(one, other, breaks=False)
        for one, other in ((list(fault.who), rest), (rest, list(fault.who)))
    ]
    return lambda: injector.swarm.repair(cuts)


def _change(
    changes: OverlappingChanges[T],
    known: Mapping[str, T],
    change: Callable[[T], T],
    put: Callable[[str, T], None],
) -> Undo:
    """Change one property of several nodes until the fault ends. Other faults may change it
    meanwhile."""

    def once(value: T) -> T:  # a change is known by its identity
        return change(value)

    for name, value in known.items():
        put(name, changes.begin(name, value, once))

    def undo() -> None:
        for name in known:
            put(name, changes.end(name, once))

    return undo


def _clog(injector: FaultInjector, fault: Fault) -> Undo:
    pairs = {
        f"{name}>{other}": 0.0
        for name in fault.who
        for other in injector.swarm.nodes
        if other != name
    }

    def put(pair: str, seconds: float) -> None:
        one, _, other = pair.partition(">")
        injector.swarm.fabric.clog(one, other, seconds)

    return _change(
        injector.overlapping.clogs, pairs, lambda seconds: seconds + fault.value, put
    )


def _change_links(
    injector: FaultInjector, fault: Fault, **changes: Callable[[float], float]
) -> Undo:
    def change(spec: LinkSpec) -> LinkSpec:
        new: dict[str, Any] = {
            field: change(getattr(spec, field)) for field, change in changes.items()
        }
        return replace(spec, **new)

    ends = {name: injector.swarm.nodes[name].endpoint for name in fault.who}
    specs = {name: end.spec for name, end in ends.items()}
    return _change(
        injector.overlapping.links,
        specs,
        change,
        lambda name, spec: relink(injector.swarm.simulation.queue, ends[name], spec),
    )


def _throttle(injector: FaultInjector, fault: Fault) -> Undo:
    return _change_links(
        injector, fault, up=lambda up: up * fault.value, down=lambda down: down * fault.value
    )


def _drip(injector: FaultInjector, fault: Fault) -> Undo:
    return _change_links(injector, fault, up=lambda up: fault.value)


def _lossy(injector: FaultInjector, fault: Fault) -> Undo:
    return _change_links(injector, fault, loss=lambda loss: fault.value)


def _jitter(injector: FaultInjector, fault: Fault) -> Undo:
    return _change_links(injector, fault, jitter=lambda jitter: fault.value)


def _change_clocks(injector: FaultInjector, fault: Fault, change: Change[ClockModel]) -> Undo:
    clocks = {name: injector.swarm.nodes[name].clock for name in fault.who}
    models = {name: clock.model for name, clock in clocks.items()}
    return _change(
        injector.overlapping.clocks,
        models,
        change,
        lambda name, model: clocks[name].set_model(model),
    )


def _skew(injector: FaultInjector, fault: Fault) -> Undo:
    return _change_clocks(
        injector, fault, lambda model: replace(model, skew=model.skew + fault.value)
    )


def _drift(injector: FaultInjector, fault: Fault) -> Undo:
    return _change_clocks(
        injector, fault, lambda model: replace(model, rate=model.rate * fault.value)
    )


def _slow_cpu(injector: FaultInjector, fault: Fault) -> Undo:
    return _change_clocks(
        injector, fault, lambda model: replace(model, slowness=model.slowness * fault.value)
    )


def _change_disks(injector: FaultInjector, fault: Fault, change: Change[DiskModel]) -> Undo:
    disks = {name: injector.swarm.nodes[name].disk for name in fault.who}
    models = {name: disk.model for name, disk in disks.items()}

    def put(name: str, model: DiskModel) -> None:
        disks[name].model = model

    return _change(injector.overlapping.disks, models, change, put)


def _slow_disk(injector: FaultInjector, fault: Fault) -> Undo:
    return _change_disks(
        injector,
        fault,
        lambda model: replace(model, fsync=fault.value, bytes_per_second=SLOW_DISK_RATE),
    )


def _full_disk(injector: FaultInjector, fault: Fault) -> Undo:
    return _change_disks(injector, fault, lambda model: replace(model, capacity=0))


def _decay(injector: FaultInjector, fault: Fault) -> Undo:
    rng = injector.swarm.rng("faults/decay")
    for name in fault.who:
        disk = injector.swarm.nodes[name].disk
        paths = [path for path in disk.paths() if disk.size_now(path)]
        if paths:
            disk.corrupt(rng.choice(paths), rng.randrange(1 << 30))
    return _nothing


def _change_messages(
    injector: FaultInjector, fault: Fault, change: Change[MessageFaults]
) -> Undo:
    ends = {name: injector.swarm.nodes[name].endpoint for name in fault.who}
    faults = {
        name: MessageFaults(lies=end.lies, repeats=end.repeats, lags=end.lags)
        for name, end in ends.items()
    }

    def put(name: str, now: MessageFaults) -> None:
        end = ends[name]
        end.lies, end.repeats, end.lags = now.lies, now.repeats, now.lags

    return _change(injector.overlapping.messages, faults, change, put)


def _lie(injector: FaultInjector, fault: Fault) -> Undo:
    return _change_messages(
        injector, fault, lambda faults: replace(faults, lies=max(faults.lies, fault.value))
    )


def _repeat(injector: FaultInjector, fault: Fault) -> Undo:
    return _change_messages(
        injector,
        fault,
        lambda faults: replace(faults, repeats=max(faults.repeats, fault.value)),
    )


def _reorder(injector: FaultInjector, fault: Fault) -> Undo:
    return _change_messages(
        injector, fault, lambda faults: replace(faults, lags=max(faults.lags, fault.value))
    )


def _impostor(injector: FaultInjector, fault: Fault) -> Undo:
    """Let dials to the other nodes of ``who`` reach the first one."""
    impostor = injector.swarm.nodes[fault.who[0]].endpoint.index
    places = {name: injector.swarm.nodes[name].endpoint.index for name in fault.who[1:]}

    def put(name: str, place: int) -> None:
        if place == places[name]:
            injector.swarm.fabric.detours.pop(place, None)
        else:
            injector.swarm.fabric.detours[places[name]] = place

    return _change(injector.overlapping.answering, places, lambda _: impostor, put)


def _nothing() -> None:
    """Undo nothing."""


ACTIONS: Final[Mapping[str, Action]] = {
    "kill": _kill,
    "vanish": partial(_kill, silent=True),
    "torn": partial(_kill, silent=True, torn=True),
    "wipe": partial(_kill, wipe=True),
    "pause": _pause,
    "partition": _partition,
    "mute": _mute,
    "hold": _hold,
    "clog": _clog,
    "throttle": _throttle,
    "drip": _drip,
    "lossy": _lossy,
    "jitter": _jitter,
    "skew": _skew,
    "drift": _drift,
    "slow_disk": _slow_disk,
    "full_disk": _full_disk,
    "slow_cpu": _slow_cpu,
    "decay": _decay,
    "liar": _lie,
    "equivocator": _repeat,
    "reorder": _reorder,
    "impostor": _impostor,
}
