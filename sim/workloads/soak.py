"""Search for tables that grow without bound, while whole nodes come and go for weeks. (L1)

Theory of operation
-------------------
Every node is `open_node` over a simulated host: membership, gossip, DHT, SHARDCAST, wiring. A
tenth of them live for the whole run, the trainer among them; the others die and come back, on
their disks or, now and then, with a new identity. The trainer publishes a small policy every
few hours.

Every ``sample`` hours the object graph of each living node is walked, from its services and its
host along attributes and through containers, by type alone: no table has to be registered, so
none is forgotten. A table is a dict, list, deque, set or bytearray, named by the attributes
that lead to it (what lies below a container counts as one table, `_entries[]`). Its size is the
sum of lengths over all nodes, by node.

A table grows if its largest size in the last quarter of the run is more than `TOLERANCE` times,
and `LEAST` entries a node more than, its largest in the second quarter, and the third quarter
lies between. The first quarter does not count: tables fill. A table whose type bounds it
(`BoundedDict`, a deque with a length) cannot grow for ever, but may take longer than a month to
fill: it remembers every peer that was ever met, say, up to 4,096, and this swarm meets some
600. Such tables are listed as filling, with their limits, and do not fail the scenario. A limit
that stands only in the code around a plain dictionary does not count.

`_traffic` of the simulated host is left out: the simulator's own tally, which no real node has.

Fewer beats than in production: a month of heartbeats every 5 s is 5 * 10^5 beats a node.
``interval`` (120 s, the longest there is) stands in for membership's 5 s and gossip's 1 s, six
hours for the minute between looks into the DHT and at the run document. What is forgotten after
a number of intervals lives 24 times longer here, and what is forgotten after seconds is
forgotten after fewer beats: both kinds of bound are met.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import trio

from p2p.bounded import BoundedDict
from p2p.membership.heartbeat import MAX_INTERVAL
from p2p.node.config import NodeConfig
from p2p.node.node import Node
from p2p.shardcast.manifest import PolicyVersion
from roles.contract import Run
from roles.contract.core.file import Delivery
from sim.faults.churn import HOUR
from sim.node.host import End
from sim.node.swarm import SimNode, Swarm
from sim.run.scenario import Scenario
from sim.workloads.dht import STAMP_BITS
from sim.workloads.policies import make_weights
from sim.workloads.run_file import open_member, write_run

STAYING: Final = 0.1
"""Share of the nodes that live for the whole run: growth that a restart would end shows in
them."""
TOLERANCE: Final = 1.25
"""The last quarter's largest size over the second's, up to which a table counts as bounded.
Sizes of a swarm under churn vary by a tenth between quarters; a leak of one entry an hour is a
factor of two."""
LEAST: Final = 2.0
"""Entries a node, below which growth is noise: one more peer, one more topic."""
LISTED: Final = 10
"""Tables that the metrics name."""
POLICY_BYTES: Final = 64 * 1024
"""Bytes of a policy: small, as weeks of them are moved."""
TALLY: Final = "_traffic"
"""The simulated host's bytes by peer, for the figures of scenarios."""
TABLES: Final = (dict, list, deque, set, bytearray)
STOPS: Final = (
    "sim.kernel.simulation",
    "sim.kernel.queue",
    "sim.net.fabric",
    "sim.node.swarm",
    "sim.node.world",
    "sim.node.disk",
    "sim.node.clock",
)
"""Modules whose objects the walk does not enter: what all nodes share."""


@dataclass(slots=True)
class Table:
    """The sizes of one table over the run: entries a node, for each sample."""

    sizes: list[float] = field(default_factory=list)
    limit: int | None = 0
    """The most entries that its type lets it have; None if one of its kind lets it have any
    number.
    """

    def hold(self, limit: int | None) -> None:
        """Note the size of one such table, and its limit."""
        self.limit = None if limit is None or self.limit is None else max(self.limit, limit)

    def most(self, quarter: int) -> float:
        """Return the largest size in a quarter of the run, counted from 0."""
        length = len(self.sizes)
        return max(self.sizes[quarter * length // 4 : (quarter + 1) * length // 4], default=0.0)

    @property
    def halves(self) -> tuple[float, float]:
        """Return the largest size in either half."""
        return max(self.most(0), self.most(1)), max(self.most(2), self.most(3))

    def grows(self, least: float) -> bool:
        """Return True if it is still growing at the end, by more than ``least`` entries a node.

        One that its type bounds grows too, until it is full: see `Table.limit`.
        """
        second, third, last = self.most(1), self.most(2), self.most(3)
        return last > TOLERANCE * second and last - second > least and second <= third <= last


class Soak:
    """Whole nodes that come and go for the whole duration, and samples of their tables."""

    def __init__(self) -> None:
        self._nodes: dict[str, Node] = {}
        self._tables: dict[str, Table] = {}
        self._samples = 0
        self._lives = 0
        self._identities = 0
        self._run: Run | None = None
        self._config = NodeConfig()

    async def run(self, swarm: Swarm, scenario: Scenario) -> Mapping[str, float | int | str]:
        """Let the nodes live, sample their tables, and report tables that grew."""
        self._scenario = scenario
        delivery = Delivery(chunk_bytes=8 * 1024)
        self._run = write_run(swarm.simulation.keys, "soak", "n0", "n0", delivery=delivery)
        self._config = _config(scenario.parameter("interval", MAX_INTERVAL))
        staying = max(2, round(scenario.nodes * STAYING))
        async with trio.open_nursery() as nursery:
            for number in range(scenario.nodes):
                nursery.start_soon(self._slot, swarm, number, number < staying)
            hours = min(scenario.parameter("sample", 1.0), scenario.duration / HOUR / 48)
            while swarm.simulation.now + hours * HOUR <= scenario.duration:
                await swarm.sleep(hours * HOUR)
                self._sample(swarm)
            nursery.cancel_scope.cancel()
        return self._figures(swarm)

    async def _slot(self, swarm: Swarm, number: int, stays: bool) -> None:
        """Play one place in the swarm: a machine, its deaths, and sometimes another machine
        after it."""
        name, generation, dice = f"n{number}", 0, swarm.rng(f"slot/{number}")
        await swarm.sleep(number)
        swarm.add(name, self._live, link=self._scenario.link)
        self._identities += 1
        while not stays:
            await swarm.sleep(
                dice.expovariate(1 / self._scenario.parameter("lifetime", 8 * HOUR))
            )
            swarm.kill(name, silent=dice.random() < 0.5)
            self._lives += 1
            await swarm.sleep(dice.expovariate(1 / self._scenario.parameter("downtime", HOUR)))
            if dice.random() < self._scenario.parameter("fresh", 0.1):
                generation += 1
                name = f"n{number}.{generation}"
                swarm.add(name, self._live, link=self._scenario.link)
                self._identities += 1
            else:
                swarm.restart(name)
        await trio.sleep_forever()

    async def _live(self, machine: SimNode) -> None:
        assert self._run is not None
        async with open_member(machine, self._config, self._run) as node:
            self._nodes[machine.name] = node
            try:
                if machine is machine.siblings[0]:
                    await self._publish(machine, node)
                await trio.sleep_forever()
            finally:
                if self._nodes.get(machine.name) is node:
                    del self._nodes[machine.name]

    async def _publish(self, machine: SimNode, node: Node) -> None:
        """Publish a small policy every few hours, as long as the run goes on."""
        every = self._scenario.parameter("publish", 6 * HOUR)
        version = 0
        while True:
            await machine.world.sleep(every)
            version += 1
            path = f"weights-{version % 8}.safetensors"
            rng = machine.simulation.rng(machine.name, f"weights/{version}")
            await machine.world.disk.replace(path, make_weights(rng, POLICY_BYTES))
            await node.shardcast.publish(PolicyVersion(version), path)

    # Counting.

    def _sample(self, swarm: Swarm) -> None:
        totals: dict[str, int] = {}
        limits: dict[str, list[int | None]] = {}
        seen: set[int] = set()
        for node in self._nodes.values():
            roots = {
                "host": node.host,
                "book": node.book,
                "membership": node.membership,
                "gossip": node.gossip,
                "dht": node.dht,
                "shardcast": node.shardcast,
            }
            for root, service in roots.items():
                for path, table in walk(root, service, seen):
                    totals[path] = totals.get(path, 0) + len(table)
                    limits.setdefault(path, []).append(limit_of(table))
        living = max(1, len(self._nodes))
        for path in totals.keys() | self._tables.keys():
            sizes = self._tables.setdefault(path, Table([0.0] * self._samples))
            sizes.sizes.append(totals.get(path, 0) / living)
            for limit in limits.get(path, ()):
                sizes.hold(limit)
        self._samples += 1
        swarm.simulation.plot("entries in all tables, a node", sum(totals.values()) / living)

    def _figures(self, swarm: Swarm) -> dict[str, float | int | str]:
        least = self._scenario.parameter("least", LEAST)
        growing = sorted(path for path, table in self._tables.items() if table.grows(least))
        filling = [path for path in growing if self._tables[path].limit is not None]
        growing = [path for path in growing if self._tables[path].limit is None]
        largest = sorted(
            self._tables.items(), key=lambda item: (-max(item[1].halves), item[0])
        )[:LISTED]
        listed = {
            f"table_{place}": f"{path}: {table.halves[0]:.1f}, then {table.halves[1]:.1f}"
            for place, (path, table) in enumerate(largest, 1)
        }
        return {
            "tables": len(self._tables),
            "tables_growing": len(growing),
            "growing": "; ".join(
                f"{path} ({' '.join(f'{self._tables[path].most(n):.1f}' for n in range(4))})"
                for path in growing
            )
            or "none",
            "filling": "; ".join(
                f"{path} ({self._tables[path].most(3):.1f} of {self._tables[path].limit})"
                for path in filling
            )
            or "none",
            "samples": self._samples,
            "deaths": self._lives,
            "identities": self._identities,
            "living": len(self._nodes),
            "versions": max(
                (int(node.shardcast.newest) for node in self._nodes.values()), default=0
            ),
            "entries_per_node": round(
                sum(t.sizes[-1] for t in self._tables.values() if t.sizes), 1
            ),
            **listed,
        }


def limit_of(table: Collection[object]) -> int | None:
    """Return the most entries that the type of ``table`` lets it have, or None."""
    if isinstance(table, BoundedDict):
        return table.limit
    return table.maxlen if isinstance(table, deque) else None


def walk(root: str, start: object, seen: set[int]) -> Iterator[tuple[str, Collection[object]]]:
    """Yield every table below ``start`` with its path. Objects in ``seen`` are not entered
    again."""
    stack: list[tuple[str, object]] = [(root, start)]
    while stack:
        path, thing = stack.pop()
        if id(thing) in seen:
            continue
        if isinstance(thing, TABLES):
            seen.add(id(thing))
            yield path, thing
            inside: Any = (
                thing.values() if isinstance(thing, dict) else () if _is_flat(thing) else thing
            )
            stack += [(f"{path}[]", item) for item in inside if _is_worth_a_look(item)]
        elif isinstance(thing, tuple):
            stack += [(path, item) for item in thing if _is_worth_a_look(item)]
        elif _is_worth_a_look(thing):
            seen.add(id(thing))
            stack += [(f"{path}.{name}", value) for name, value in _attributes(thing)]


def _is_flat(thing: object) -> bool:
    return isinstance(thing, bytearray)


def _is_worth_a_look(thing: object) -> bool:
    """Return True for containers, and for objects of our own classes that belong to one
    node."""
    if isinstance(thing, (*TABLES, tuple)):
        return True
    kind = type(thing)
    module = kind.__module__
    return (
        module.startswith(("p2p.", "sim."))
        and not module.startswith(STOPS)
        and not isinstance(thing, bytes)
    )


def _attributes(thing: object) -> Iterator[tuple[str, object]]:
    # leads into the peer's host: its tables are the peer's
    far = "other" if isinstance(thing, End) else ""
    for kind in type(thing).__mro__:
        for name in getattr(kind, "__slots__", ()):
            if name not in (far, TALLY) and hasattr(thing, name):
                yield name, getattr(thing, name)
    yield from getattr(thing, "__dict__", {}).items()


def _config(interval: float) -> NodeConfig:
    config, interval = NodeConfig(), min(interval, MAX_INTERVAL)
    return replace(
        config,
        dht=replace(
            config.dht,
            difficulty=STAMP_BITS,
            paths=1,
            alpha=1,
            # A third of the records: what a node holds for others shrinks, not for whom.
            replicas=1,
            quorum=1,
            refresh_interval=6 * HOUR,
            republish_interval=HOUR,
            addr_lifetime=2 * HOUR,
        ),
        membership=replace(config.membership, interval=interval),
        gossip=replace(config.gossip, interval=interval),
        run=replace(config.run, refresh=6 * HOUR),
    )
