"""`open_host(nat=True)`, and the same inside an asyncio program."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from p2p import (
    NatConfig,
    open_host,
    open_nat,
)
from p2p.circuit.core.book import RelayConfig
from p2p.dht import DhtConfig
from p2p.host import request, serve_requests
from p2p.identity import KeyPair
from p2p.machine import open_world
from p2p.membership import MembershipConfig
from p2p.multiaddr import Multiaddr
from p2p.node.config import NodeConfig
from p2p.node.node import Node, open_node
from p2p.node.wiring import is_member, relay_offers, seek_relays
from p2p.reach.core.verdict import Reach
from p2p.reach.mapping import ReachConfig
from p2p.swarm.identify import PUSH_ID, encode_info, send_info
from p2p.swarm.swarm import SwarmConfig
from tests.support.runs import RUN, TRAINER, VALIDATOR
from tests.unit.test_circuit import ECHO, KEYS, OPEN, echo, until

QUIET = ReachConfig(map_port=False)
EMBEDDING = Path(__file__).parents[2] / "docs" / "embedding.md"


async def test_a_host_behind_a_router_is_reached_through_a_relay_that_it_meets() -> None:
    """The relay is a peer that the home dials; nobody names it as a relay."""
    async with (
        open_host(key=KEYS[0], strict=True) as relay,
        open_nat(relay, KEYS[0], NatConfig(relay=OPEN, reach=QUIET)),
        open_host(key=KEYS[1], strict=True, nat=True) as home,
        open_host(key=KEYS[2], strict=True, nat=True) as guest,
    ):
        await home.connect_addr(relay.addrs[0])
        await until(home, lambda: home.network.relays == (relay.peer_id,))
        [circuit] = [addr for addr in home.addrs if addr.relay is not None]
        with home.serving(ECHO, serve_requests(echo)):
            await guest.connect_addr(circuit)
            assert await request(guest, home.peer_id, ECHO, b"hello") == b"hello"


async def test_with_nat_a_relay_that_is_away_ends_no_host() -> None:
    away = Multiaddr.tcp("127.0.0.1", 9).with_peer(KEYS[3].peer_id)
    async with open_host(listen=[away.through], nat=True) as host:
        assert host.addrs == ()


@pytest.mark.parametrize(
    ("announce", "reach", "places"),
    [((), Reach.CLOSED, 0), (("/ip4/192.0.2.1/tcp/1",), Reach.OPEN, 7)],
)
async def test_only_a_host_that_others_can_dial_offers_to_relay(
    announce: tuple[str, ...], reach: Reach, places: int
) -> None:
    config = SwarmConfig(announce=tuple(map(Multiaddr.parse, announce)))
    nat = NatConfig(reach=QUIET, relay=RelayConfig(reservations=7))
    async with (
        open_host(key=KEYS[0], config=config) as host,
        open_nat(host, KEYS[0], nat) as opened,
    ):
        assert (opened.reach, opened.places) == (reach, places)


async def test_peers_are_told_the_likeliest_address_first() -> None:
    """One that peers deny stays: liars must not be able to take an address from us."""
    denied, confirmed = (Multiaddr.tcp(host, 4001) for host in ("8.0.0.1", "8.0.0.2"))
    async with open_host() as host:
        inside = host.addrs
        host.set_mapped(denied)
        host.set_standing({denied: False, confirmed: True})
        told = [addr.transport for addr in host.addrs]
        assert told == [confirmed, denied, *(addr.transport for addr in inside)]


def test_an_asyncio_program_runs_a_host_as_the_document_says() -> None:
    text = EMBEDDING.read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(import asyncio\n.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, str(EMBEDDING), "exec"), names)

    async def whole() -> bytes:
        async with open_host() as host, open_host() as other:
            with other.serving(ECHO, serve_requests(echo)):
                host.add_addrs(other.peer_id, other.addrs)
                return await request(host, other.peer_id, ECHO, b"from asyncio")

    async def fails() -> None:
        await trio.lowlevel.checkpoint()
        raise ValueError("comes out")

    async def main() -> None:
        answer, ticks = await asyncio.gather(names["in_trio"](whole), count())
        assert (answer, ticks) == (b"from asyncio", 3)
        with pytest.raises(ValueError, match="comes out"):
            await names["in_trio"](fails)

    async def count() -> int:
        for _ in range(3):
            await asyncio.sleep(0)
        return 3

    # trio_asyncio, which other tests import, puts a loop of its own behind asyncio.run
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(main())


@asynccontextmanager
async def open_member(
    folder: Path, key: KeyPair, config: NodeConfig, document: bytes | None = None
) -> AsyncIterator[Node]:
    """A node as `p2p.node.cli` opens it."""
    nodes: list[Node] = []
    config = replace(
        config, membership=MembershipConfig(interval=0.1), dht=DhtConfig(difficulty=8)
    )
    async with (
        open_world(folder, key=key) as world,
        open_host(world=world, listen=config.places, config=config.host) as host,
        open_nat(
            host,
            key,
            config.nat,
            named=config.relays,
            is_member=partial(is_member, nodes),
            offers=partial(relay_offers, nodes),
            seek=partial(seek_relays, nodes),
        ) as nat,
        open_node(world, host, config, document=document, nat=nat) as node,
    ):
        nodes.append(node)
        yield node


async def test_a_node_finds_the_relay_that_a_heartbeat_tells_of(tmp_path: Path) -> None:
    """The trainer can be dialled, as its owner says, and relays for members only. Its worker
    announces the circuit in heartbeats of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = Multiaddr.tcp(*free.getsockname())
    quiet = ReachConfig(map_port=False)
    open_one = NodeConfig(
        listen=(place,), host=SwarmConfig(announce=(place,), strict=True), reach=quiet
    )
    closed = NodeConfig(
        listen=(Multiaddr.tcp("127.0.0.1", 0),),
        host=SwarmConfig(punch=True, strict=True),
        reach=quiet,
        bootstrap=(place.with_peer(TRAINER.peer_id),),
    )
    async with (
        open_member(tmp_path / "open", TRAINER, open_one, RUN.document) as trainer,
        open_member(tmp_path / "closed", VALIDATOR, closed) as worker,
    ):
        network = worker.host.network
        await until(worker.host, lambda: network.relays == (trainer.peer_id,))
        assert [one.slots > 0 for one in worker.membership.members()] == [True]

        def told() -> list[Multiaddr]:
            members = trainer.membership.members()
            return [addr for one in members for addr in one.addrs if addr.relay is not None]

        while not told():
            await trainer.world.sleep(0.1)
        assert told() == [place.with_peer(trainer.peer_id).through.with_peer(worker.peer_id)]
        assert worker.health()["relays"] == [str(trainer.peer_id)]


async def test_peers_hear_of_a_new_address_at_once() -> None:
    """Identify push: both stay connected, and nobody asks."""
    async with open_host(key=KEYS[0]) as one, open_host(key=KEYS[1]) as two:
        await one.connect_addr(two.addrs[0])
        await until(two, lambda: two.info(one.peer_id) is not None)
        await until(one, lambda: one.info(two.peer_id) is not None)
        mapped = Multiaddr.tcp("8.0.0.1", 4001)
        one.set_mapped(mapped)

        def heard() -> bool:
            info = two.info(one.peer_id)
            return info is not None and mapped in info.listen_addrs

        await until(two, heard)


async def test_of_many_pushes_one_counts() -> None:
    async with open_host(key=KEYS[0]) as host, open_host(key=KEYS[1]) as enemy:
        await enemy.connect_addr(host.addrs[0])
        await until(host, lambda: host.info(enemy.peer_id) is not None)
        for number in range(40):
            place = Multiaddr.tcp(f"8.0.0.{number}", 4001)
            info = encode_info(enemy.peer_id, [PUSH_ID], [place], None)
            with suppress(trio.BrokenResourceError):
                async with await enemy.open_stream(host.peer_id, PUSH_ID) as stream:
                    await send_info(stream, info)
                    await stream.receive_some()
        info_now = host.info(enemy.peer_id)
        assert info_now is not None
        assert info_now.listen_addrs == (Multiaddr.tcp("8.0.0.0", 4001),)
        assert host.is_direct(enemy.peer_id)
