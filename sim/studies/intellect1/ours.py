"""Our members on INTELLECT-1's sites, from four to fourteen, with overlap. (L1)

Real sessions on simulated hosts, links and disks; the model is pretended. One of ``size``
pretended weights stands for `WEIGHTS` / ``size``, on the lines as in the time that a site's
processors need for an outer step. Sites come in the order of `CITIES`: four found the run, the
other four in the United States follow, then Europe, then Asia, each group once the last has
had its rounds. With each group every line is laid anew: as wide as if all of a site's
connections, one to each member, were as slow as the slowest of them.

A stage's figures are of the rounds in which all of its sites are members: the worst site's
share of time that is computed, and the median time from the last update that is ready to the
record.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import ClassVar, Final

from p2p.identity import PeerId
from roles.contract.core.diloco import Codec, DilocoTerms
from roles.diloco.config import DilocoConfig
from roles.diloco.session import DilocoSession
from roles.engines.config import DeviceProfile, EngineConfig
from sim.errors import SimulationError
from sim.net.fabric import Endpoint
from sim.net.link import LinkSpec
from sim.net.relink import relink
from sim.node.swarm import SimNode, Swarm
from sim.run.scenario import Scenario
from sim.studies.intellect1.sites import (
    CITIES,
    PHASE,
    STAGES,
    STEP,
    WEIGHTS,
    City,
    round_trip,
    shared_line,
)
from sim.workloads.diloco import RUN
from sim.workloads.inner import STEP_RATE, FakeInner
from sim.workloads.supervision import supervise

FOUNDERS: Final = 4
STEPS: Final = 100
"""Inner steps of a round, as published."""
TURN: Final = PHASE / 25
"""Seconds of inner steps between looks at what the others have agreed."""
BEAT: Final = 120.0
"""Seconds: lines are scaled down and control messages are not, so these are rarer."""
LOOK: Final = 20.0
"""Virtual seconds between looks at the swarm."""
VANISHES: Final = 5
"""City whose site is cut off silently."""
BASE: Final = 1.0
"""Irreducible loss in nats, added to the simulated loss, which falls towards 0."""


class Intellect1:
    """Sites that join group by group; at the end a site vanishes and comes back."""

    parameters: ClassVar[Sequence[str]] = ("size", "rounds", "overlap")

    def __init__(self) -> None:
        self._sessions: dict[str, DilocoSession] = {}
        self._terms = DilocoTerms()
        self._size = 0
        self._sites: dict[str, City] = {}
        self._peers: list[PeerId] = []
        self._seen: dict[int, Seen] = {}

    async def run(self, swarm: Swarm, scenario: Scenario) -> Mapping[str, float | int | str]:
        """Play all stages, each for ``rounds`` rounds with all of its sites."""
        rounds = int(scenario.parameter("rounds", 4))
        self._size = int(scenario.parameter("size", 1 << 18))
        self._sites = {city.name.replace(" ", "-"): city for city in CITIES}
        self._terms = DilocoTerms(
            outer_steps=10**6, inner_steps=STEPS, codec=Codec.INT4, beat=BEAT,
            overlap=bool(scenario.parameter("overlap", 1)), grace=PHASE / 4, patience=PHASE,
        )  # fmt: skip
        swarm.fabric.latency = self._latency
        names = [*self._sites]
        self._peers = [swarm.simulation.keys.signer(name).peer_id for name in names]
        swarm.every(LOOK, lambda: self._look(swarm))
        self._add(swarm, FOUNDERS)
        await self._pass(swarm, scenario, 2, FOUNDERS)
        found: dict[str, float | int | str] = {}
        for stage in STAGES:
            self._add(swarm, stage.sites)
            await self._pass(swarm, scenario, 1, stage.sites)
            before, first = self._computed(swarm), self._newest
            await self._pass(swarm, scenario, rounds, stage.sites)
            after = self._computed(swarm)
            worst = min(_utilised(before[name], after[name]) for name in before)
            waits = [self._seen[step].waited for step in range(first + 1, self._newest + 1)]
            found[f"{stage.name}_utilised"] = round(worst, 4)
            found[f"{stage.name}_seconds"] = round(median(waits), 1)
        most = STAGES[-1].sites
        swarm.kill(names[VANISHES], silent=True)
        await self._pass(swarm, scenario, 1, most - 1)
        swarm.restart(names[VANISHES])
        await self._pass(swarm, scenario, 2, most)
        return {**found, **self._totals(swarm)}

    def _latency(self, one: Endpoint, other: Endpoint) -> float:
        return round_trip(self._sites[one.name], self._sites[other.name]) / 2

    def _add(self, swarm: Swarm, count: int) -> None:
        """Add sites up to this number, on lines that fit the number."""
        names = [*self._sites][:count]
        for name in names:
            others = [self._sites[other] for other in names if other != name]
            width = shared_line(self._sites[name], others) * self._size / WEIGHTS
            link = LinkSpec(up=width, down=width)
            if name in swarm.nodes:
                relink(swarm.simulation.queue, swarm.nodes[name].endpoint, link)
                continue
            node = swarm.add(name, self._live, link=link)
            slowness = STEP * STEP_RATE / (8 * self._size)
            node.clock.set_model(replace(node.clock.model, slowness=slowness))

    async def _pass(self, swarm: Swarm, scenario: Scenario, rounds: int, members: int) -> None:
        """Wait for this many rounds with this many members, or the end of the scenario."""
        first: int | None = None
        while first is None or self._newest < first + rounds:
            await swarm.sleep(LOOK)
            if swarm.simulation.now > scenario.duration:
                raise SimulationError(
                    f"the last of {len(self._seen)} rounds has"
                    f" {self._seen[self._newest].members} members, not {members}"
                )
            if first is None and self._newest and self._seen[self._newest].members == members:
                first = self._newest

    @property
    def _newest(self) -> int:
        return max((step for step, seen in self._seen.items() if seen.members), default=0)

    def _computed(self, swarm: Swarm) -> dict[str, tuple[float, float]]:
        """Return for each site the seconds computed and the seconds passed, up to the end of
        its last turn."""
        figures = {node.name: self._sessions[node.name].figures for node in swarm.alive}
        return {name: (one.computed, one.present) for name, one in figures.items()}

    async def _live(self, machine: SimNode) -> None:
        await supervise(machine, self._process)

    async def _process(self, machine: SimNode) -> None:
        config = EngineConfig(kind="fake", profile=DeviceProfile(step_seconds=PHASE / STEPS))
        engine = FakeInner(machine.world, config, self._terms, self._size)
        async with machine.open_host() as host:
            for other in machine.siblings:
                host.add_addrs(other.peer_id, [other.addr])
            session = DilocoSession(
                machine.world,
                host,
                RUN,
                self._terms,
                DilocoConfig(turn_seconds=TURN),
                engine,
                self._peers[:FOUNDERS],
                frozenset(self._peers).__contains__,
            )
            session.client.patience = PHASE
            self._sessions[machine.name] = session
            await session.work_forever()

    def _look(self, swarm: Swarm) -> None:
        now = swarm.simulation.now
        for node in swarm.alive:
            session = self._sessions.get(node.name)
            if session is None or not hasattr(session, "core"):
                continue
            core = session.core
            if core.is_member and core.round.ready is None:
                self._seen.setdefault(core.record.step + 1, Seen()).unready_at = now
            for one in session.figures.rounds:
                seen = self._seen.setdefault(one.step, Seen())
                seen.members, seen.loss = one.members, one.loss or seen.loss
                seen.held_at = min(seen.held_at, now)
                seen.digests.add(one.digest)

    def _totals(self, swarm: Swarm) -> Mapping[str, float | int | str]:
        losses = [
            BASE + seen.loss for _, seen in sorted(self._seen.items()) if seen.loss is not None
        ]
        spikes = [after / before - 1 for before, after in pairwise(losses)]
        return {
            "rounds": self._newest,
            "members_end": self._seen[self._newest].members,
            "most_spike": round(max(spikes), 4),
            "loss": round(losses[-1], 4),
            "replicas_differ": sum(len(seen.digests) > 1 for seen in self._seen.values()),
            "views": max(one.figures.views for one in self._sessions.values()),
            "days": round(swarm.simulation.now / 86400, 3),
        }


def _utilised(before: tuple[float, float], after: tuple[float, float]) -> float:
    return (after[0] - before[0]) / (after[1] - before[1])


@dataclass(slots=True)
class Seen:
    """One round, as observed from outside."""

    members: int = 0
    loss: float | None = None
    unready_at: float = 0.0
    """The last time at which some member was seen without an update for the round."""
    held_at: float = math.inf
    """The first time at which the round's state was seen in force."""
    digests: set[str] = field(default_factory=set)

    @property
    def waited(self) -> float:
        """Seconds from the last update to the new state, to two looks."""
        return max(0.0, self.held_at - self.unready_at)
