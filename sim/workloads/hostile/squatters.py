"""Lookups of a run's officers under a DHT key that is full of other publishers (L1).

The attackers mint ``squatters`` identities and store a record of each, under the run's name,
with every node of the DHT that they know: admitted all of them, since the run is open and their
stamps are good, and for no longer than honest members do. They repeat it every ``every``
seconds. Some members are there before, as holders; the run's two officers and the other members
come when the key is full. In the end ``newcomers``, which know the relay's address only, read
the key, and ask for each officer's own address.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import trio

from p2p.dht import Dht, DhtConfig, open_dht
from p2p.dht.messages import Store, encode
from p2p.dht.record import PROTOCOL_ID as KAD, Record, record_key, sign_record
from p2p.dht.stamp import make_stamp
from p2p.identity import PeerId, Signer
from p2p.node.config import NodeConfig
from p2p.node.wiring import RUN_RECORDS
from p2p.wire import pack
from roles.contract import Run
from sim.node.swarm import NodeMain, SimNode, Swarm
from sim.run.scenario import Scenario
from sim.workloads.dht import STAMP_BITS
from sim.workloads.run_file import open_member, write_run

RELAY: Final = "relay"
OFFICERS: Final = ("trainer", "validator")
ATTACKERS: Final = 4
"""Machines of the attackers: each stores a quarter of the minted identities' records, within
its quotas."""


class Squatters:
    """Honest members, machines that squat the run's key, and newcomers that read it."""

    def __init__(self) -> None:
        self._run: Run | None = None
        self._readers: dict[str, Dht] = {}
        self._minted: dict[PeerId, tuple[Signer, bytes]] = {}
        self._lifetime = 1800.0
        self._every = 10.0

    async def run(self, swarm: Swarm, scenario: Scenario) -> Mapping[str, float | int | str]:
        """Squat, start the run, look it up."""
        self._lifetime = scenario.parameter("lifetime", 1800.0)
        self._every = scenario.parameter("every", 15.0)
        run = self._run = write_run(swarm.simulation.keys, "squatted", *OFFICERS)
        early = int(scenario.parameter("holders", 30))
        members = [
            f"n{number}" for number in range(early + int(scenario.parameter("members", 4)))
        ]
        honest = {
            swarm.add(name, self._member, link=scenario.link).peer_id
            for name in (RELAY, *members[:early])
        }
        await swarm.sleep(10.0)
        self._mint(swarm, int(scenario.parameter("squatters", 80)))
        for number in range(ATTACKERS):
            swarm.add(f"h{number}", self._squat, link=scenario.link)
        await swarm.sleep_until(scenario.parameter("run_starts_at", 40.0))
        late = {
            swarm.add(name, self._member, link=scenario.link).peer_id
            for name in (*OFFICERS, *members[early:])
        }
        relay = swarm.nodes[RELAY]
        await swarm.sleep_until(scenario.duration - 30.0)
        newcomers = [
            f"new{number}" for number in range(int(scenario.parameter("newcomers", 5)))
        ]
        for name in newcomers:
            swarm.add(name, self._newcomer(relay), link=scenario.link)
        await swarm.sleep(10.0)
        officers = {swarm.nodes[name].peer_id for name in OFFICERS}
        found = [await self._look_up(self._readers[name], run, officers) for name in newcomers]
        seen = [publishers for publishers, _ in found]
        return {
            "squatters": len(self._minted),
            "squatters_read_most": max(
                len(self._minted.keys() & publishers) for publishers in seen
            ),
            "officers_in_key_least": min(len(officers & publishers) for publishers in seen),
            "honest_in_key_least": min(
                len((honest | late) & publishers) for publishers in seen
            ),
            "latecomers_in_key_least": min(len(late & publishers) for publishers in seen),
            "officers_located_least": min(located for _, located in found),
        }

    async def _look_up(
        self, dht: Dht, run: Run, officers: set[PeerId]
    ) -> tuple[set[PeerId], int]:
        """Return the publishers that a newcomer reads under the run's key, and the number of
        officers that it can locate."""
        records = await dht.get(RUN_RECORDS.name, run.id)
        located = [bool(await dht.find_peer(officer)) for officer in sorted(officers)]
        return {record.publisher for record in records}, sum(located)

    async def _member(self, machine: SimNode) -> None:
        """Run a whole honest node: the relay, an officer, or a member."""
        assert self._run is not None
        async with open_member(machine, _config(), self._run):
            await trio.sleep_forever()

    def _mint(self, swarm: Swarm, squatters: int) -> None:
        for number in range(squatters):
            signer = swarm.simulation.keys.signer(f"minted{number}")
            self._minted[signer.peer_id] = signer, make_stamp(signer.peer_id, STAMP_BITS)

    async def _squat(self, machine: SimNode) -> None:
        """Store a share of the minted identities' records with every node of the DHT that is
        known."""
        assert self._run is not None
        number = int(machine.name[1:])
        minted = list(self._minted.values())[number::ATTACKERS]
        config = DhtConfig(difficulty=STAMP_BITS)
        async with (
            machine.open_host() as host,
            open_dht(machine.world, host, config, namespaces=[RUN_RECORDS]) as dht,
        ):
            await dht.bootstrap([other.addr for other in machine.siblings[:3]])
            while True:
                requests = [
                    encode(
                        serial,
                        dht.contact,
                        Store(record_key(RUN_RECORDS.name, self._run.id, salt), blob),
                    )
                    for serial, (salt, blob) in enumerate(
                        (salt, self._record(machine, signer, nonce))
                        for signer, nonce in minted
                        for salt in range(RUN_RECORDS.salts)
                    )
                ]
                for other in machine.siblings:
                    if not other.name.startswith("h"):
                        host.add_addrs(other.peer_id, [other.addr])
                        for request in requests:
                            host.send(other.peer_id, KAD, request)
                await machine.world.sleep(self._every)

    def _record(self, machine: SimNode, signer: Signer, nonce: bytes) -> bytes:
        assert self._run is not None
        wall = machine.world.wall()
        unsigned = Record(
            RUN_RECORDS.name,
            self._run.id,
            signer.peer_id,
            nonce,
            int(wall * 1000),
            int(wall + self._lifetime),
            pack([machine.addr.transport.to_bytes()]),
            b"",
        )
        return sign_record(unsigned, signer).encode()

    def _newcomer(self, relay: SimNode) -> NodeMain:
        async def live(machine: SimNode) -> None:
            config = DhtConfig(difficulty=STAMP_BITS)
            async with (
                machine.open_host() as host,
                open_dht(machine.world, host, config, namespaces=[RUN_RECORDS]) as dht,
            ):
                self._readers[machine.name] = dht
                await dht.bootstrap([relay.addr])
                await trio.sleep_forever()

        return live


def _config() -> NodeConfig:
    config = NodeConfig()
    return replace(config, dht=replace(config.dht, difficulty=STAMP_BITS))
