"""``shoal push`` and pullers that come after it (L1).

One machine pushes a file, and is alone. The others start ``arrive`` seconds later or within
that time, as a machine room does that is told to pull: they dial the pusher, find one another,
and are put on its roster while they come. All of it is `p2p.cast`, but for the command line.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import ClassVar, Final

import trio

from p2p.cast.swarm import CastNode, open_cast
from p2p.cast.ticket import SECRET_BYTES
from p2p.policy import PolicyVersion
from p2p.shardcast import ShardcastConfig
from sim.net.link import MBIT
from sim.node.swarm import SimNode, Swarm
from sim.run.scenario import Scenario

PUSHER: Final = "pusher"
FILE: Final = "model.bin"
SECRET: Final = b"s" * SECRET_BYTES
CONFIG: Final = ShardcastConfig(keep_versions=1)
VERSION: Final = PolicyVersion(0)


class Cast:
    """One pusher, and pullers that come later."""

    parameters: ClassVar[Sequence[str]] = ("policy_bytes", "arrive")

    def __init__(self) -> None:
        self._nodes: dict[str, CastNode] = {}
        self._seconds: dict[str, float] = {}
        self._size = 0

    async def run(self, swarm: Swarm, scenario: Scenario) -> Mapping[str, float | int | str]:
        """Push, let the pullers come, and wait until all have the content or the time is
        over."""
        self._size = int(scenario.parameter("policy_bytes", 8_000_000))
        arrive = scenario.parameter("arrive", 0.0)
        dice = swarm.rng("arrivals")
        swarm.add(PUSHER, self._push, link=scenario.link)
        await swarm.sleep(1)
        began = swarm.simulation.now
        delays = sorted(arrive * dice.random() for _ in range(1, scenario.nodes))
        for number, delay in enumerate(delays, 1):
            await swarm.sleep_until(began + delay)
            swarm.add(f"n{number}", self._pull, link=scenario.link)
        while swarm.simulation.now < scenario.duration and len(self._seconds) < len(delays):
            await swarm.sleep(0.5)
        return self._measure(scenario, len(delays))

    async def _push(self, machine: SimNode) -> None:
        await machine.world.disk.replace(FILE, machine.world.rng("file").randbytes(self._size))
        async with (
            machine.open_host() as host,
            open_cast(machine.world, host, CONFIG, pusher=host.peer_id, secret=SECRET) as node,
        ):
            self._nodes[machine.name] = node
            await node.shardcast.publish(VERSION, FILE)
            node.announce(VERSION)
            await trio.sleep_forever()

    async def _pull(self, machine: SimNode) -> None:
        pusher = machine.siblings[0].addr
        assert pusher.peer_id is not None
        began = machine.world.now()
        async with (
            machine.open_host() as host,
            open_cast(
                machine.world,
                host,
                CONFIG,
                pusher=pusher.peer_id,
                secret=SECRET,
                bootstrap=[pusher],
            ) as node,
        ):
            self._nodes[machine.name] = node
            await node.shardcast.wait_policy(VERSION)
            node.announce(VERSION)
            self._seconds[machine.name] = machine.world.now() - began
            await trio.sleep_forever()

    def _measure(self, scenario: Scenario, pullers: int) -> Mapping[str, float | int | str]:
        seconds = sorted(self._seconds.values())
        seconds += [math.inf] * (pullers - len(seconds))
        link = scenario.link
        total = link.up * (pullers + 1)
        least = max(1 / link.up, 1 / link.down, pullers / total)
        stats = {name: node.shardcast.stats for name, node in self._nodes.items()}
        came = sum(one.from_peers + one.from_origin for one in stats.values())
        return {
            "pullers": pullers,
            "whole": len(self._seconds),
            "in_view": len(self._nodes[PUSHER].others()),
            "seconds_50": round(statistics.median(seconds), 3),
            "seconds_100": round(seconds[-1], 3),
            "bound_seconds": round(8 * self._size / MBIT * least, 3),
            "origin_policies_sent": round(stats[PUSHER].uploaded_as_origin / self._size, 3),
            "duplicate_share": round(
                sum(one.duplicates for one in stats.values()) / max(1, came), 4
            ),
            "chunks_repaired": sum(one.chunks_repaired for one in stats.values()),
        }
