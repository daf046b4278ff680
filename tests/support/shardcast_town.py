"""Real SHARDCAST services in one process, on simulated lines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random

from p2p.host import Host
from p2p.identity import KeyPair
from p2p.machine import RealWorld, open_world
from p2p.shardcast import PolicyVersion, RosterEntry, Shardcast, ShardcastConfig, open_shardcast
from p2p.shardcast.index import digest_of
from p2p.swarm.swarm import open_host
from p2p.transport.memory import MemoryNetwork

RUN = b"run"


class Member:
    def __init__(self, world: RealWorld, host: Host, shardcast: Shardcast) -> None:
        self.world, self.host, self.shardcast = world, host, shardcast


class Town:
    """A trainer and some others on one memory network; gossip is a loop over all of them."""

    def __init__(self, folder: Path, config: ShardcastConfig | None = None) -> None:
        self.folder = folder
        self.config = config or ShardcastConfig(roster_interval=0.0)
        self.network = MemoryNetwork()
        self.members: dict[int, Member] = {}
        self.keys = [KeyPair(digest_of(b"member %d" % number)) for number in range(8)]

    def announce(self, sender: int, data: bytes) -> None:
        for number, member in self.members.items():
            if number != sender:
                member.shardcast.receive_announcement(self.keys[sender].peer_id, data)

    def may_publish(self, peer: object) -> bool:
        return peer == self.keys[0].peer_id

    @asynccontextmanager
    async def member(self, number: int) -> AsyncIterator[Member]:
        async with AsyncExitStack() as stack:
            folder = self.folder / str(number)
            folder.mkdir(exist_ok=True)
            world = await stack.enter_async_context(open_world(folder, self.keys[number]))
            host = await stack.enter_async_context(
                open_host(network=self.network, world=world, listen=["/memory/0"], strict=True)
            )
            shardcast = await stack.enter_async_context(
                open_shardcast(
                    world,
                    host,
                    self.config,
                    run=RUN,
                    may_publish=self.may_publish,
                    roster=lambda: [RosterEntry(self.keys[n].peer_id) for n in self.members],
                    announce=lambda data: self.announce(number, data),
                )
            )
            for other in self.members.values():
                await host.connect_addr(other.host.addrs[0])
                host.add_addrs(other.host.peer_id, other.host.addrs)
                other.host.add_addrs(host.peer_id, host.addrs)
            self.members[number] = Member(world, host, shardcast)
            try:
                yield self.members[number]
            finally:
                del self.members[number]


async def publish(member: Member, version: int, size: int = 420_000) -> bytes:
    weights = Random(version).randbytes(size)
    path = f"weights-{version}"
    await member.world.disk.write(path, weights)
    await member.shardcast.publish(PolicyVersion(version), path)
    return weights


async def everybody(town: Town, stack: AsyncExitStack, count: int) -> list[Member]:
    return [await stack.enter_async_context(town.member(number)) for number in range(count)]
