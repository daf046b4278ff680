"""Peers in one network find each other by mDNS; what hostile datagrams say is bounded."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest
import trio.testing

from p2p import open_host
from p2p.identity import KeyPair
from p2p.multiaddr import Multiaddr
from p2p.reach.lan import GROUP, PORT, SERVICE, Lan, open_lan
from p2p.transport.dns import PTR, TXT, encode_name, encode_question, encode_record
from tests.support.foreign_nodes import other_machine
from tests.unit.test_circuit import KEYS


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with other_machine():
        yield


async def until(lan: Lan, count: int) -> tuple[Multiaddr, ...]:
    while len(lan.found) < count:
        await lan.news.wait()
    return lan.found


async def test_two_hosts_find_each_other() -> None:
    async with (
        open_host(key=KEYS[0]) as one,
        open_lan(one) as left,
        open_host(key=KEYS[1]) as two,
        open_lan(two) as right,
    ):
        assert await until(left, 1) == two.addrs
        [addr] = await until(right, 1)
        assert await two.connect_addr(addr) == one.peer_id


def answer(*places: str) -> bytes:
    texts = [f"dnsaddr={place}".encode() for place in places]
    data = b"".join(bytes([len(text)]) + text for text in texts)
    head = struct.pack(">HHHHHH", 0, 0x8400, 0, 1, 0, 1)
    name = f"somebody.{SERVICE}"
    return (
        head
        + encode_record(SERVICE, PTR, 9, encode_name(name))
        + encode_record(name, TXT, 9, data)
    )


async def test_a_hostile_machine_names_itself_only_and_fills_nothing() -> None:
    """Names of victims are not heard, junk is passed by, a flood of peers is bounded, and a
    flood of questions has few answers."""
    async with open_host(key=KEYS[0]) as host, open_lan(host) as lan:
        ids = [KeyPair(number.to_bytes(32, "big")).peer_id for number in range(1, 200)]
        victim = f"/ip4/192.168.1.9/tcp/22/p2p/{ids[-1]}"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as enemy:
            enemy.setsockopt(
                socket.IPPROTO_IP,
                socket.IP_MULTICAST_IF,
                socket.inet_aton("127.0.0.1"),
            )

            async def say(data: bytes) -> None:
                enemy.sendto(data, (GROUP, PORT))
                await trio.testing.wait_all_tasks_blocked()

            for junk in (b"", bytes(12), b"\xff" * 600, answer(victim)[:-9]):
                await say(junk)
            named = f"/dns4/victim.example/tcp/22/p2p/{ids[-1]}"
            itself = f"/ip4/127.0.0.1/tcp/1/p2p/{host.peer_id}"
            await say(answer(victim, named, itself, "/ip4/127.0.0.1/tcp/2", "nonsense"))
            for peer in ids:
                await say(answer(victim, f"/ip4/127.0.0.1/tcp/7/p2p/{peer}"))
                await say(encode_question(SERVICE, PTR))
            while not any(addr.peer_id == ids[-1] for addr in lan.found):
                await lan.news.wait()
        assert len(lan.found) == 64
        assert {addr.transport for addr in lan.found} == {Multiaddr.tcp("127.0.0.1", 7)}


async def test_who_writes_from_the_internet_is_not_in_the_room() -> None:
    peer = KeyPair(bytes(32)).peer_id
    async with open_host(key=KEYS[0]) as host, open_lan(host) as lan:
        for place in ("192.168.1.9", "8.8.8.8"):
            lan._hear([Multiaddr.parse(f"/ip4/{place}/tcp/7/p2p/{peer}")], place)
        assert lan.found == (Multiaddr.parse(f"/ip4/192.168.1.9/tcp/7/p2p/{peer}"),)
