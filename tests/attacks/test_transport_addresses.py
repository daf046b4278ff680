"""A listen address that is no place, told by identify, ended the node with a ValueError."""

from __future__ import annotations

import pytest
import trio

import p2p
from p2p.errors import BadMessage
from p2p.identity import KeyPair, ProtocolId
from p2p.multiaddr import Multiaddr, decode_multiaddr_untrusted
from p2p.protobuf import field
from p2p.swarm import identify
from p2p.transport.memory import MemoryNetwork
from p2p.wire import encode_varint, frame

PEER = KeyPair(b"\x05" * 32).peer_id
P2P = encode_varint(421) + encode_varint(len(PEER)) + PEER.digest
IP4 = bytes.fromhex("0401020304")
IP6 = b"\x29" + bytes(15) + b"\x01"
TCP = bytes.fromhex("0610e1")
DNS = b"\x36\x04a.io"
MEMORY = bytes.fromhex("8906") + bytes(7) + b"\x07"

NO_PLACES = {
    "only a peer": P2P,
    "a peer twice": P2P + P2P,
    "a place and a peer twice": IP4 + TCP + P2P + P2P,
    "a peer in the middle": IP4 + P2P + TCP,
    "a port": TCP,
    "a port and a peer": TCP + P2P,
    "a host": IP4,
    "a host and a peer": IP4 + P2P,
    "a name": DNS,
    "two hosts": IP4 + IP6 + TCP,
    "two ports": IP4 + TCP + TCP,
    "a name on a host": DNS + IP4 + TCP,
    "the wrong way round": TCP + IP4,
    "memory with a port": MEMORY + TCP,
    "memory twice": MEMORY + MEMORY,
    "memory on a host": IP4 + MEMORY,
}


@pytest.mark.parametrize("what", NO_PLACES)
def test_what_is_no_place_is_refused_when_it_is_decoded(what: str) -> None:
    with pytest.raises(BadMessage):
        decode_multiaddr_untrusted(NO_PLACES[what])


@pytest.mark.parametrize("data", [IP4 + TCP, IP6 + TCP, DNS + TCP, MEMORY])
def test_nothing_that_is_done_with_a_decoded_address_raises(data: bytes) -> None:
    for addr in (decode_multiaddr_untrusted(data), decode_multiaddr_untrusted(data + P2P)):
        assert addr.transport.with_peer(PEER).peer_id == PEER
        assert addr.transport.to_bytes() == data
        assert Multiaddr.parse(str(addr)) == addr
        if data != MEMORY:
            assert addr.host_port[1] == 4321


async def test_a_node_survives_an_identify_full_of_no_places() -> None:
    info = b"".join(
        [
            field(1, field(1, 1) + field(2, PEER.public_key)),
            *(field(2, data) for data in NO_PLACES.values()),
            field(2, IP4 + TCP),
            *(field(4, data) for data in NO_PLACES.values()),
            field(3, "/a"),
            field(3, "/not ascii \N{SNOWMAN}"),
            field(6, "agent\x1b[2J"),
        ]
    )
    asked = trio.Event()

    async def lie(stream: p2p.Stream) -> None:
        await stream.send_all(frame(info))
        asked.set()

    network = MemoryNetwork()
    async with (
        p2p.open_host(
            network=network, listen=["/memory/0"], key=KeyPair(b"\x04" * 32), strict=True
        ) as honest,
        p2p.open_host(network=network, listen=[], key=KeyPair(b"\x05" * 32)) as hostile,
    ):
        hostile.set_handler(identify.PROTOCOL_ID, lie, replaces=True)
        await hostile.connect_addr(honest.addrs[0])
        with trio.fail_after(60):
            await asked.wait()
            while honest.info(PEER) is None:
                await trio.lowlevel.checkpoint()
        told = honest.info(PEER)
        assert told is not None
        assert told.listen_addrs == (Multiaddr.parse("/ip4/1.2.3.4/tcp/4321"),)
        assert told.observed_addr is None
        assert told.agent == ""
        assert told.protocols == (ProtocolId("/a"),)
        assert PEER in honest.connected
