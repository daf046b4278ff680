"""INTELLECT-2's broadcast, by the reference's own design, on the lines that ours gets. (L0)

What is modelled is the PyPI package shardcast 0.3.2, from its source: files of 50 MB, whole
files passed on; relay servers that look every 30 seconds whether the origin lists something
new, and list it themselves before they have any of it; ten downloads at a time; a relay chosen
per file by success rate times bandwidth (moving averages of weight 0.3, each success rate
healing by 0.01 an update, a failure counted as 30 MB/s); after a "not there yet" waits of 2, 2,
2 and 15 seconds, for ever.

Where the package would be slower than a reasonable deployment, the deployment is modelled:
every server answers any number of requests at a time (the package serves one after the other;
in production a web server stood in front), no request times out, and the lists are never stale,
so no client hangs in the package's races. A connection is opened for each file: two round
trips. Clients look for new policies as often as relays do.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar, Final

from sim.kernel.queue import SECOND, nanoseconds
from sim.kernel.simulation import Simulation
from sim.net.fabric import Direction
from sim.run.scenario import Scenario
from sim.studies.intellect2.sites import SITE_PARAMETERS, Site, Sites
from sim.studies.profiles import DISK_RATE

FILE: Final = 50_000_000
"""Bytes of one file (``SHARDCAST_SHARD_SIZE``)."""
DOWNLOADS: Final = 10
"""Concurrent downloads of one machine (``SHARDCAST_MAX_CONCURRENT_DOWNLOADS``)."""
LOOK: Final = 30.0
"""Seconds between two looks for something new (the middle node's ``check_interval``)."""
WAITS: Final = (2.0, 2.0, 2.0, 15.0, 0.0)
"""Seconds after each failed attempt, then from the start again."""
SMOOTHING: Final = 0.3
"""Weight of the newest value in the moving averages of rate and success (the package's own)."""
HEALING: Final = 0.01
"""Rise of each server's success rate with every update (the package's own value)."""
FAILURE_RATE: Final = 30.0
"""Rate in MB/s that a failed download counts as. The package records its timeout, a time, in
the place of the rate."""
REQUEST_LATENCIES: Final = 4
"""Latencies of a connection and a request: two round trips. The last half of them brings the
answer.
"""
CHECK_PASSES: Final = 3
"""Times a client reads or writes the whole policy before it can load it: join the files (two),
hash (one)."""


@dataclass(slots=True)
class _Score:
    """A machine's record of one server."""

    success: float = 1.0
    rate: float = FAILURE_RATE


class Downloader:
    """A relay server or a client: ten downloads at a time from ``servers``, each file from one
    of them."""

    def __init__(self, tree: StaticTree, site: Site, servers: Sequence[Downloader]) -> None:
        self.site = site
        self.has = bytearray(tree.files)
        self.refusals = 0
        self.listed_at = math.inf
        """Virtual second at which this machine's list names the policy."""
        self._tree = tree
        self._queue = tree.sites.queue
        self._rng: Random = tree.sites.simulation.rng(site.name, "tree")
        self._servers = servers
        self._scores = [_Score() for _ in servers]
        self._directions = [self._direction_from(server) for server in servers]
        self._files = deque(range(tree.files))
        self._missing = tree.files

    def _direction_from(self, server: Downloader) -> Direction:
        fabric = self._tree.sites.fabric
        latency = fabric.latency_of(server.site.endpoint, self.site.endpoint)
        return Direction(server.site.endpoint, self.site.endpoint, latency)

    def start(self) -> None:
        """Look for the policy now and then; the first time at a random moment."""
        self._after(self._rng.random() * LOOK, self._look)

    def _after(self, seconds: float, callback: object, *args: object) -> None:
        due = self._queue.now + nanoseconds(seconds)
        self._queue.schedule(due, self.site.owner, "tree", callback, *args)  # type: ignore[arg-type]

    def _look(self) -> None:
        if self._rng.choice(self._servers).listed_at > self._tree.sites.now:
            self._after(LOOK, self._look)
            return
        self.listed_at = self._tree.sites.now
        for _ in range(DOWNLOADS):
            self._next()

    def _next(self) -> None:
        if self._files:
            self._attempt(self._files.popleft(), 0)

    def _attempt(self, file: int, failures: int) -> None:
        weights = [score.success * score.rate for score in self._scores]
        place = self._rng.choices(range(len(weights)), weights)[0]
        asked = self._directions[place].latency * (REQUEST_LATENCIES - 1) / SECOND
        self._after(asked, self._answer, place, file, failures, self._tree.sites.now)

    def _answer(self, place: int, file: int, failures: int, since: float) -> None:
        """Answer a request in the server's place. Servers never die in this study, so the
        client can look up the answer itself."""
        direction = self._directions[place]
        if self._servers[place].has[file]:
            fabric = self._tree.sites.fabric
            fabric.transmit(direction, FILE, "file", self._came, place, file, since)
            return
        self.refusals += 1
        self._learn(place, FAILURE_RATE, 0.0)
        wait = WAITS[failures % len(WAITS)] + direction.latency / SECOND
        self._after(wait, self._attempt, file, failures + 1)

    def _came(self, place: int, file: int, since: float) -> None:
        self._learn(place, FILE / 1e6 / (self._tree.sites.now - since), 1.0)
        self.has[file] = 1
        self._missing -= 1
        if self._missing == 0:
            self._tree.sites.arrived(
                self.site, CHECK_PASSES * self._tree.sites.policy_bytes / DISK_RATE
            )
        self._next()

    def _learn(self, place: int, rate: float, success: float) -> None:
        score = self._scores[place]
        score.rate += SMOOTHING * (rate - score.rate)
        score.success += SMOOTHING * (success - score.success)
        for other in self._scores:
            other.success = min(1.0, other.success + HEALING)


class StaticTree:
    """An origin, relay servers that all clients know, and the clients."""

    levels: ClassVar = (0,)
    parameters: ClassVar[Sequence[str]] = SITE_PARAMETERS

    def run_bare(
        self, simulation: Simulation, scenario: Scenario
    ) -> Mapping[str, float | int | str]:
        """Set up, let it flow, and measure."""
        self.sites = sites = Sites(simulation, scenario)
        self.files = math.ceil(sites.policy_bytes / FILE)
        origin = Downloader(self, sites.origin, ())
        origin.has = bytearray(b"\1") * self.files
        origin.listed_at = 0.0
        relays = [Downloader(self, site, [origin]) for site in sites.relays]
        clients = [Downloader(self, site, relays) for site in sites.workers]
        for downloader in (*relays, *clients):
            downloader.start()
        for site in sites.workers:
            if math.isfinite(site.died):
                sites.queue.schedule(
                    nanoseconds(site.died), sites.queue.kernel, "death", _die, site
                )
        sites.queue.run(until=scenario.duration)
        return {
            **sites.distribution(),
            "relays_seconds_100": round(
                max((site.whole for site in sites.relays), default=math.inf), 1
            ),
            "refusals": sum(downloader.refusals for downloader in (*relays, *clients)),
            **sites.generation(),
        }


def _die(site: Site) -> None:
    site.owner.alive = False
