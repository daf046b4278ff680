"""Real nodes of the signed run on one machine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import ClassVar, Self

import trio

from p2p.dht import DhtConfig
from p2p.identity import KeyPair
from p2p.machine import open_world
from p2p.membership import MembershipConfig
from p2p.multiaddr import Multiaddr
from p2p.network import Network
from p2p.node.config import NodeConfig
from p2p.node.node import Node, open_node
from p2p.swarm.swarm import SwarmConfig, open_host
from p2p.transport.memory import MemoryNetwork
from tests.support.runs import RUN, TRAINER

CONFIG = NodeConfig(
    host=SwarmConfig(strict=True),
    membership=MembershipConfig(interval=1.0),
    dht=DhtConfig(difficulty=8),
)
WEIGHTS = bytes(range(256)) * 1024


class Echo:
    """A role that notes that it ran."""

    name: ClassVar[str] = "echo"

    def __init__(self) -> None:
        self.ran = trio.Event()

    @classmethod
    def from_config(cls, table: Mapping[str, object]) -> Self:
        return cls()

    async def run(self, node: Node) -> None:
        self.ran.set()
        await trio.sleep_forever()

    def health(self) -> dict[str, object]:
        return {"ran": self.ran.is_set()}


@asynccontextmanager
async def member(
    network: Network,
    folder: Path,
    key: KeyPair,
    *,
    document: bytes | None = None,
    bootstrap: tuple[Multiaddr, ...] = (),
    config: NodeConfig = CONFIG,
) -> AsyncIterator[Node]:
    async with (
        open_world(folder, key) as world,
        open_host(
            network=network, world=world, listen=["/memory/0"], config=config.host
        ) as host,
        open_node(world, host, config, document=document, bootstrap=bootstrap) as node,
    ):
        yield node


@asynccontextmanager
async def swarm(
    folder: Path, *others: KeyPair, config: NodeConfig = CONFIG
) -> AsyncIterator[list[Node]]:
    """A trainer with the run, and others that know only its address."""
    network = MemoryNetwork()
    with trio.fail_after(60):
        async with AsyncExitStack() as stack:
            yield await _gather(network, folder, others, stack, config)


async def _gather(
    network: Network,
    folder: Path,
    others: tuple[KeyPair, ...],
    stack: AsyncExitStack,
    config: NodeConfig = CONFIG,
) -> list[Node]:
    begins = member(network, folder / "0", TRAINER, document=RUN.document, config=config)
    first = await stack.enter_async_context(begins)
    nodes = [first]
    for number, key in enumerate(others, 1):
        joined = member(
            network, folder / str(number), key, bootstrap=first.host.addrs, config=config
        )
        nodes.append(await stack.enter_async_context(joined))
    for node in nodes:
        await wait_members(node, len(nodes) - 1)
    return nodes


async def wait_members(node: Node, count: int) -> None:
    """Until heartbeats of ``count`` others of the run are known."""
    changed = trio.Event()

    def note(_: object) -> None:
        changed.set()

    node.membership.on_change(note)
    with trio.fail_after(20):
        while sum(member.run == node.run.id for member in node.membership.members()) < count:
            await changed.wait()
            changed = trio.Event()
