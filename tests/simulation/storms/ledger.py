"""Ledgers: what was acknowledged is there after any crash, and no number is signed twice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from p2p.errors import StorageError
from p2p.ledger import Ledger
from sim.node.swarm import SimNode, Swarm
from sim.run.scenario import Scenario
from tests.simulation.storms import Broken

SEGMENT_BYTES = 2000
"""Small, so that segments are closed often."""
RESTART = 1.0
FSYNC = 0.05
"""Seconds, as on a disk that turns: many a crash comes between a write and its fsync."""


class LedgerStorm:
    """A `sim.run.scenario.Workload`."""

    def __init__(self) -> None:
        self._told: dict[str, list[bytes]] = {}
        self._appended: dict[str, float] = {}

    async def run(self, swarm: Swarm, scenario: Scenario) -> Mapping[str, float | int | str]:
        for number in range(scenario.nodes):
            node = swarm.add(f"n{number}", self._live, link=scenario.link)
            node.disk.model = replace(node.disk.model, fsync=FSYNC)
        await swarm.sleep_until(scenario.duration)
        return {
            "appended": sum(len(told) for told in self._told.values()),
            "at_work": sum(when > scenario.duration - 10 for when in self._appended.values()),
        }

    async def _live(self, node: SimNode) -> None:
        """One life of the machine: its process is started again when the disk fails it."""
        while True:
            try:
                ledger = await Ledger(node.world, segment_bytes=SEGMENT_BYTES).opened()
                await self._check(node, ledger)
                await self._append(node, ledger)
            except StorageError as error:
                if "disk full" not in str(error):
                    raise
                await node.world.sleep(RESTART)

    async def _check(self, node: SimNode, ledger: Ledger) -> None:
        found = [entry.digest async for entry in ledger.entries()]
        told = self._told.get(node.name, [])
        if found[: len(told)] != told:
            raise Broken(
                f"{node.name} had {len(told)} entries; of {len(found)} found not all are these"
            )
        # Entries that were written but not acknowledged may be there; from now on they count.
        self._told[node.name] = found

    async def _append(self, node: SimNode, ledger: Ledger) -> None:
        dice = node.world.rng("entries")
        told = self._told[node.name]
        while True:
            bodies = [dice.randbytes(dice.randrange(300)) for _ in range(dice.randint(1, 3))]
            try:
                entries = await ledger.append_all([("note", body) for body in bodies])
            except StorageError:
                if dice.random() < 0.5:
                    raise  # start again, or go on with what is open
                await node.world.sleep(RESTART)
                continue
            for entry in entries:
                if entry.seqno != len(told):
                    raise Broken(f"{node.name} gave number {entry.seqno} to entry {len(told)}")
                told.append(entry.digest)
            self._appended[node.name] = node.simulation.now
            await node.world.sleep(dice.uniform(0, 0.5))
