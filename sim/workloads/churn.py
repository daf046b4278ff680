"""Membership under churn: each node's knowledge of which others are alive. (L1)

Membership alone, over the simulated host.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import ClassVar, Final

import trio

from p2p.errors import ConfigError
from p2p.identity import PeerId
from p2p.membership import Change, MemberEvent, Membership, MembershipConfig, open_membership
from sim.faults.churn import DAY, PRESETS, Churn, ChurnModel, Lognormal, Session, read_sessions
from sim.node.swarm import SimNode, Swarm
from sim.run.scenario import Scenario, place_of
from sim.workloads.supervision import supervise

GONE: Final = frozenset({Change.LEFT, Change.DIED, Change.FORGOTTEN})
KNOWN_WITHIN: Final = 15.0
"""Seconds after which a death should be known to 99 % of those who hold the peer."""
SETTLED: Final = 30.0
"""Seconds a node must have been up before others must know it."""
DRAWN: Final = 10_000
"""Delays that go into a report at most."""
BOOTSTRAP: Final = 3
"""Nodes that stay, and that newcomers dial."""


class MembershipChurn:
    """Nodes that join, heartbeat, die and return."""

    parameters: ClassVar[Sequence[str]] = (
        "sessions",
        "zones",
        "arrival",
        "preset",
        "lifetime",
        "lifetime_sigma",
        "downtime",
        "downtime_sigma",
        "silent",
        "zone_interval",
        "day",
        "day_swing",
    )

    def __init__(self) -> None:
        self._views: dict[str, Membership] = {}
        self._watch = DeathWatch(self._views)
        self._since: dict[str, float] = {}
        self._join_seconds: list[float] = []
        self._returned: list[float] = []

    async def run(self, swarm: Swarm, scenario: Scenario) -> Mapping[str, float | int | str]:
        """Play churn over ``scenario.duration`` and measure the survivors' knowledge."""
        churn = self._open_churn(swarm, scenario)
        sessions = scenario.parameters.get("sessions")
        if isinstance(sessions, str):
            self._replay(swarm, scenario, churn, read_sessions(place_of(sessions)))
        else:
            await self._arrive(swarm, scenario, churn)
        swarm.every(scenario.duration / 100, lambda: self._plot(swarm))
        await swarm.sleep_until(scenario.duration)
        metrics = self._measure(swarm, churn, swarm.simulation.now)
        nodes = swarm.nodes.values()
        swarm.simulation.distributions["bytes sent, by node"] = [
            float(node.endpoint.sent) for node in nodes
        ]
        swarm.simulation.distributions["seconds until a death was known"] = self._watch.delays(
            DRAWN
        )
        return metrics

    async def _arrive(self, swarm: Swarm, scenario: Scenario, churn: Churn) -> None:
        """Let all nodes come one after the other, and then live by the model."""
        zones = max(1, int(scenario.parameter("zones", 4)))
        spread = scenario.parameter("arrival", 30.0) / scenario.nodes
        for number in range(scenario.nodes):
            name = f"n{number}"
            swarm.add(name, self._live, link=scenario.link, zone=f"zone{number % zones}")
            if number >= BOOTSTRAP:
                churn.add(name)
            await swarm.sleep(spread)
        for zone in range(zones):
            churn.add_zone(f"zone{zone}")

    def _replay(
        self, swarm: Swarm, scenario: Scenario, churn: Churn, sessions: Sequence[Session]
    ) -> None:
        """Let a few nodes stay, and the others live as the recording says."""
        for number in range(BOOTSTRAP):
            swarm.add(f"n{number}", self._live, link=scenario.link)
        recorded = {session.node: None for session in sessions}
        if len(recorded) != scenario.nodes - BOOTSTRAP or not recorded.keys().isdisjoint(
            swarm.nodes
        ):
            raise ConfigError(
                f"scenario {scenario.name}: {len(recorded)} machines were recorded, which with"
                f" {BOOTSTRAP} that stay (n0 to n{BOOTSTRAP - 1}) must make {scenario.nodes}"
                " nodes"
            )
        churn.replay(sessions, lambda name: swarm.add(name, self._live, link=scenario.link))

    def _plot(self, swarm: Swarm) -> None:
        known = [view.size for view in self._views.values()]
        swarm.simulation.plot("nodes alive", len(swarm.alive))
        swarm.simulation.plot(
            "members known, mean over nodes", statistics.fmean(known) if known else 0
        )
        swarm.simulation.plot(
            "bytes sent so far", sum(node.endpoint.sent for node in swarm.nodes.values())
        )

    def _open_churn(self, swarm: Swarm, scenario: Scenario) -> Churn:
        preset = scenario.parameters.get("preset")
        if isinstance(preset, str):
            up, down = PRESETS[preset]
        else:
            up = Lognormal(
                scenario.parameter("lifetime", 300.0),
                scenario.parameter("lifetime_sigma", 1.46),
            )
            down = Lognormal(
                scenario.parameter("downtime", 60.0), scenario.parameter("downtime_sigma", 1.28)
            )
        model = ChurnModel(
            up=up,
            down=down,
            silent=scenario.parameter("silent", 0.5),
            zone_interval=scenario.parameter("zone_interval", math.inf),
            day=scenario.parameter("day", DAY),
            day_swing=scenario.parameter("day_swing", 0.0),
        )
        churn = Churn(swarm, model)
        swarm.on_death.append(self._note_death)
        swarm.on_return.append(self._note_return)
        return churn

    def _note_return(self, node: SimNode) -> None:
        self._watch.returned(node.peer_id)
        self._returned.append(node.simulation.now)

    def _note_death(self, node: SimNode) -> None:
        self._views.pop(node.name, None)
        self._since.pop(node.name, None)
        self._watch.died(node.name, node.peer_id, node.simulation.now)

    async def _live(self, node: SimNode) -> None:
        await supervise(node, self._run_process)

    async def _run_process(self, node: SimNode) -> None:
        async with (
            node.open_host() as host,
            open_membership(node.world, host, MembershipConfig(), may=_anyone) as membership,
        ):
            membership.on_change(
                lambda event: self._watch.changed(node.name, event, node.simulation.now)
            )
            started = node.simulation.now
            self._since[node.name] = started
            self._views[node.name] = membership
            try:
                await membership.join(
                    [other.addr for other in node.siblings[:BOOTSTRAP] if other is not node]
                )
                self._join_seconds.append(node.simulation.now - started)
                await trio.sleep_forever()
            finally:
                self._lose_view(node.name, membership)

    def _lose_view(self, name: str, membership: Membership) -> None:
        """Forget the view of a process that has ended, unless the machine's next one is here
        already.
        """
        if self._views.get(name) is membership:
            del self._views[name], self._since[name]
            self._watch.blind(name)

    def _measure(
        self, swarm: Swarm, churn: Churn, now: float
    ) -> Mapping[str, float | int | str]:
        settled = {name for name, since in self._since.items() if now - since >= SETTLED}
        known = {swarm.nodes[name].peer_id: name for name in self._views if name in settled}
        alive = {node.peer_id for node in swarm.alive}
        capacity = MembershipConfig().capacity
        coverage, ghosts, listed = [], 0, 0
        for name in self._views:
            if name in settled:
                members = [member.peer for member in self._views[name].members()]
                found = sum(peer in known for peer in members)
                newcomers = sum(peer in alive and peer not in known for peer in members)
                coverage.append(found / max(1, min(len(known) - 1, capacity - newcomers)))
                ghosts += sum(peer not in alive for peer in members)
                listed += len(members)
        sent = sum(node.endpoint.sent for node in swarm.nodes.values())
        by_day = sum(
            math.cos(2 * math.pi * when / churn.model.day) > 0 for when in self._returned
        )
        return {
            "coverage": round(statistics.fmean(coverage), 4) if coverage else 0.0,
            "ghost_share": round(ghosts / max(1, listed), 4),
            "deaths": churn.deaths,
            "returns": churn.returns,
            "returns_by_day": round(by_day / max(1, len(self._returned)), 4),
            "zone_events": churn.zone_events,
            **self._watch.metrics(now),
            "join_seconds_median": round(
                statistics.median(self._join_seconds or [math.nan]), 3
            ),
            "bytes_per_second": round(sent / now / len(swarm.nodes), 1),
            "alive": len(alive),
        }


def _anyone(peer: PeerId) -> bool:
    return True


class DeathWatch:
    """Measures how soon the nodes that have a peer in view learn of its death."""

    def __init__(self, views: Mapping[str, Membership]) -> None:
        """Begin without deaths; ``views`` holds the membership of every node that runs."""
        self._views = views
        self._dying: dict[PeerId, tuple[float, dict[str, None]]] = {}
        self._delays: Counter[int] = Counter()
        """Milliseconds from a death until one holder knew, and how often: there are hundreds of
        thousands."""

    def changed(self, holder: str, event: MemberEvent, now: float) -> None:
        """Note an event that ``holder`` has learnt."""
        dying = self._dying.get(event.member.peer)
        if dying is not None and event.change in GONE and holder in dying[1]:
            del dying[1][holder]
            self._delays[round(1000 * (now - dying[0]))] += 1

    def blind(self, name: str) -> None:
        """Note that a node's process has ended, so that it has no peer in view any more."""
        for _, waiting in self._dying.values():
            waiting.pop(name, None)

    def died(self, name: str, peer: PeerId, now: float) -> None:
        """Note that a node is about to die."""
        self.blind(name)
        self._dying[peer] = (
            now,
            {holder: None for holder, view in self._views.items() if peer in view},
        )

    def returned(self, peer: PeerId) -> None:
        """Note that the peer lives again, so that nobody has to notice its death any more."""
        self._dying.pop(peer, None)

    def metrics(self, now: float) -> dict[str, float | int | str]:
        """Metrics of how quickly deaths became known."""
        delays = self._delays.copy()
        for since, unaware in self._dying.values():
            if now - since > KNOWN_WITHIN:
                delays[round(1000 * (now - since))] += len(unaware)
        late = sum(count for delay, count in delays.items() if delay > 1000 * KNOWN_WITHIN)
        total = delays.total()
        return {
            "deaths_known_share": round(1 - late / total, 4) if total else 1.0,
            "death_seconds_median": _after(0.5, delays),
            "death_seconds_p99": _after(0.99, delays),
            "views_of_deaths": total,
        }

    def delays(self, most: int) -> list[float]:
        """Return the seconds from a death until a holder knew, for each pair, or for a sample
        of ``most``."""
        every = 1 + self._delays.total() // most
        return [delay / 1000 for delay in islice(self._delays.elements(), 0, None, every)]


def _after(share: float, delays: Counter[int]) -> float:
    """Return the seconds after which ``share`` of the holders of dead peers knew."""
    left = share * delays.total()
    for delay, count in sorted(delays.items()):
        left -= count
        if left <= 0:
            return delay / 1000
    return 0.0
