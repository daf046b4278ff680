"""A bootstrap address that is a name: texts of DNS say where the peer is."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import pytest
import trio

from p2p import TcpNetwork, open_host
from p2p.errors import BadMessage, PeerUnreachable
from p2p.multiaddr import Multiaddr
from p2p.transport import dns
from p2p.transport.dns import TXT, decode_dns_untrusted, encode_question, encode_record
from tests.unit.test_circuit import KEYS


@asynccontextmanager
async def name_server(
    texts: Mapping[str, Sequence[str]], asked: list[str]
) -> AsyncIterator[tuple[str, int]]:
    """Says ``texts`` by name, behind junk and an answer to another question."""

    async def serve(sock: trio.socket.SocketType) -> None:
        while True:
            data, place = await sock.recvfrom(512)
            message = decode_dns_untrusted(data)
            [(name, _)] = message.questions
            asked.append(name)
            found = [text.encode() for text in texts.get(name, ())]
            records = [encode_record(name, TXT, 9, bytes([len(text)]) + text) for text in found]
            for number, flags in ((message.id ^ 1, 0x8180), (message.id, 0x8180)):
                question = encode_question(name, TXT)[12:]
                lies = [] if number != message.id else records
                await sock.sendto(b"junk", place)
                head = struct.pack(">HHHHHH", number, flags, 1, len(lies), 0, 0)
                await sock.sendto(head + question + b"".join(lies), place)

    with trio.socket.socket(type=trio.socket.SOCK_DGRAM) as sock:
        await sock.bind(("127.0.0.1", 0))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, sock)
            yield sock.getsockname()
            nursery.cancel_scope.cancel()


async def test_a_name_leads_to_the_peer_through_another_name() -> None:
    async with open_host(key=KEYS[0]) as there:
        texts = {
            "_dnsaddr.example.org": [
                f"dnsaddr=/dnsaddr/a.example.org/p2p/{KEYS[0].peer_id}",
                f"dnsaddr=/dnsaddr/b.example.org/p2p/{KEYS[1].peer_id}",
                "v=spf1",
            ],
            "_dnsaddr.a.example.org": [
                f"dnsaddr=/ip4/127.0.0.1/udp/9/quic-v1/p2p/{KEYS[0].peer_id}",
                f"dnsaddr={there.addrs[0]}",
            ],
        }
        asked: list[str] = []
        async with (
            name_server(texts, asked) as place,
            open_host(network=TcpNetwork([place]), key=KEYS[2]) as host,
        ):
            addr = f"/dnsaddr/example.org/p2p/{KEYS[0].peer_id}"
            assert await host.connect_addr(addr) == KEYS[0].peer_id
            assert asked == ["_dnsaddr.example.org", "_dnsaddr.a.example.org"]


async def test_names_that_lead_in_circles_end() -> None:
    loop = f"/dnsaddr/loop.example/p2p/{KEYS[0].peer_id}"
    asked: list[str] = []
    async with (
        name_server({"_dnsaddr.loop.example": [f"dnsaddr={loop}"] * 9}, asked) as place,
        open_host(network=TcpNetwork([place]), key=KEYS[2]) as host,
    ):
        with pytest.raises(PeerUnreachable, match="no address"):
            await host.connect_addr(loop)
        assert len(asked) == 4


async def test_names_that_branch_cost_few_questions() -> None:
    """60 names, each of which leads to 60 others: 3,600 questions, and 216,000 behind them."""
    texts = {
        f"_dnsaddr.{name}example": [
            f"dnsaddr=/dnsaddr/{name}{n}.example/p2p/{KEYS[0].peer_id}" for n in range(20)
        ]
        for name in ("", *(f"{n}." for n in range(20)))
    }
    asked: list[str] = []
    async with name_server(texts, asked) as place:
        addr = f"/dnsaddr/example/p2p/{KEYS[0].peer_id}"
        with pytest.raises(OSError, match="no address"):
            await dns.resolve(Multiaddr.parse(addr), [place])
        assert len(asked) <= 1 + 3 * 16


async def test_a_dead_name_server_holds_up_no_dial(autojump_clock) -> None:
    name = {"_dnsaddr.example": [f"dnsaddr=/memory/1/p2p/{KEYS[0].peer_id}"]}
    with trio.socket.socket(type=trio.socket.SOCK_DGRAM) as dead:
        await dead.bind(("127.0.0.1", 0))
        async with name_server(name, []) as place:
            addr = Multiaddr.parse(f"/dnsaddr/example/p2p/{KEYS[0].peer_id}")
            with trio.fail_after(2):
                assert await dns.resolve(addr, [dead.getsockname(), place])


def test_a_name_that_points_to_itself_ends() -> None:
    head = struct.pack(">HHHHHH", 1, 0x8180, 1, 0, 0, 0)
    with pytest.raises(BadMessage, match="circles"):
        decode_dns_untrusted(head + b"\xc0\x0c" + struct.pack(">HH", TXT, 1))


def test_a_name_travels_in_bytes_as_libp2p_writes_it() -> None:
    addr = Multiaddr.parse(f"/dnsaddr/example.org/p2p/{KEYS[0].peer_id}")
    assert addr.to_bytes().startswith(b"\x38\x0bexample.org\xa5\x03")
