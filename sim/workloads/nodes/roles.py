"""Roles of whole nodes in a scenario about policies: witness arrivals, and publish.

Ordinary roles of ``python -m p2p.node``: the same code runs in a simulation and in a process.
Times are wall clock times, which all processes of one machine, and all nodes of one simulation,
share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import ClassVar, Final, Self

import trio

from p2p.node.node import Node
from p2p.node.tables import read_table
from p2p.shardcast import PolicyVersion
from sim.workloads.policies import make_weights

ZERO_PATH: Final = "publisher/zero"
"""File on the publisher's disk: wall clock time of the scenario's second 0, for its next
life."""
LEAD: Final = 2.0
"""Seconds between knowing when the first policy goes out and its going out: time to tell who
watches."""
LOOK: Final = 0.5
"""Seconds between looks at members: their upload comes with a heartbeat and is no event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WitnessConfig:
    """Settings from the table ``[role.witness]``."""

    upload: int
    """Bytes per second that heartbeats claim we can send."""


class Witness:
    """Holds, relays, and remembers when each policy was whole."""

    name: ClassVar[str] = "witness"

    def __init__(self, upload: int) -> None:
        self._upload = upload
        self._arrivals: dict[int, float] = {}

    @classmethod
    def from_config(cls, table: Mapping[str, object]) -> Self:
        """Return the role of a node with this table.

        Raises:
            ConfigError: A key is wrong. The message names it.
        """
        return cls(read_table(WitnessConfig, table, "role.witness").upload)

    async def run(self, node: Node) -> None:
        """Watch policies come, until cancelled."""
        node.membership.me.update(upload=self._upload)
        newest = node.shardcast.newest
        while True:
            if newest >= 0:
                self._arrivals.setdefault(newest, node.world.wall())
            newest = await node.shardcast.wait_policy(PolicyVersion(newest + 1))

    def health(self) -> dict[str, object]:
        """Return the ``arrivals`` of policies: pairs of version and wall clock time."""
        return {"arrivals": list(self._arrivals.items())}


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherConfig:
    """Settings from the table ``[role.publisher]``."""

    seed: int
    """Seed of the random weights."""

    receivers: int
    """Witnesses that must be there before the first policy goes out."""

    first_at: float
    """Second of the scenario at which it does."""

    interval: float
    """Seconds from one policy to the next."""

    versions: int
    """Number of versions to publish."""

    policy_bytes: int


class ScheduledPublisher:
    """Publishes policies on a schedule that begins when all witnesses are there."""

    name: ClassVar[str] = "publisher"

    def __init__(self, config: PublisherConfig) -> None:
        self._config = config
        self._zero: float | None = None
        self._published: dict[int, float] = {}

    @classmethod
    def from_config(cls, table: Mapping[str, object]) -> Self:
        """Return the role of a node with this table.

        Raises:
            ConfigError: A key is wrong. The message names it.
        """
        return cls(read_table(PublisherConfig, table, "role.publisher"))

    async def run(self, node: Node) -> None:
        """Wait for all witnesses, publish, and stay. After a restart, go on with what is
        due."""
        config = self._config
        self._zero = zero = await self._find_zero(node)
        for version in range(1, config.versions + 1):
            due = zero + config.first_at + (version - 1) * config.interval
            overtaken = version < config.versions and node.world.wall() >= due + config.interval
            if version <= node.shardcast.newest or overtaken:
                continue
            await node.world.sleep(due - node.world.wall())
            path = f"weights-{version}.safetensors"
            weights = make_weights(Random(f"{config.seed}/{version}"), config.policy_bytes)
            await node.world.disk.replace(path, weights)
            self._published[version] = node.world.wall()
            await node.shardcast.publish(PolicyVersion(version), path)
        await trio.sleep_forever()

    async def _find_zero(self, node: Node) -> float:
        """Wall clock time of second 0: our start, or later if it takes longer until all
        witnesses are there."""
        try:
            return float(await node.world.disk.read(ZERO_PATH))
        except FileNotFoundError:
            started = node.world.wall()
        while self._missing(node) > 0:
            await node.world.sleep(LOOK)
        zero = max(started, node.world.wall() + LEAD - self._config.first_at)
        await node.world.disk.replace(ZERO_PATH, repr(zero).encode())
        return zero

    def _missing(self, node: Node) -> int:
        return self._config.receivers - sum(
            member.upload > 0 for member in node.membership.find(Witness.name)
        )

    def health(self) -> dict[str, object]:
        """Return ``zero``, the wall clock time of second 0 once it is known, and ``published``,
        pairs of version and wall clock time.
        """
        return {"zero": self._zero, "published": list(self._published.items())}
