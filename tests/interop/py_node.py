"""A py-libp2p node for Shoal's tests; runs under a Python that has the package libp2p, never
under ours.

``py_node.py dial ADDR`` pings and echoes 1 MiB, then leaves; of a circuit's address it says
when there is a direct connection, and stays. ``py_node.py listen`` echoes until it is killed,
``listen RELAY`` behind a relay; ``relay`` relays.
"""

from __future__ import annotations

import json
import sys

import multiaddr
import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.relay.circuit_v2.config import RelayConfig
from libp2p.relay.circuit_v2.dcutr import DCUtRProtocol
from libp2p.relay.circuit_v2.protocol import PROTOCOL_ID as HOP, CircuitV2Protocol
from libp2p.relay.circuit_v2.transport import CircuitV2Transport
from libp2p.tools.anyio_service import background_trio_service

ECHO = "/shoal/interop/echo/1.0.0"


def say(**what) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


async def try_echo(host, peer, pieces=256) -> None:
    stream = await host.new_stream(peer, [ECHO])
    sent, received = bytes(range(256)) * 16 * pieces, bytearray()

    async def send() -> None:
        await stream.write(sent)
        await stream.close()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        while len(received) < len(sent):
            received += await stream.read(65536)
    say(echo=received == sent)


async def dial(host, addr: str) -> None:
    info = info_from_p2p_addr(multiaddr.Multiaddr(addr))
    await host.connect(info)
    stream = await host.new_stream(info.peer_id, ["/ipfs/ping/1.0.0"])
    await stream.write(b"p" * 32)
    say(ping=await stream.read(32) == b"p" * 32)
    await try_echo(host, info.peer_id)


async def dial_circuit(host, transport, punching, addr: str) -> None:
    place = multiaddr.Multiaddr(addr)
    relay, peer = transport.parse_circuit_ma(place)
    await host.connect(info_from_p2p_addr(relay))
    await transport.dial(place)
    await try_echo(host, peer, 4)
    while not await punching._have_direct_connection(peer):  # noqa: ASYNC110 - it tells nobody
        await trio.sleep(0.1)  # noqa: TID251 - not our world
    await try_echo(host, peer)
    say(direct=True)


async def reserve(host, transport, nursery, relay: str) -> None:
    info = info_from_p2p_addr(multiaddr.Multiaddr(relay))
    await host.connect(info)
    stream = await host.new_stream(info.peer_id, [HOP])
    if await transport.reserve(stream, info.peer_id, nursery):
        say(addr=f"{relay}/p2p-circuit/p2p/{host.get_id()}")


async def echo(stream) -> None:
    while data := await stream.read(65536):
        await stream.write(data)


async def main() -> None:
    command, *rest = sys.argv[1:]
    at = next((word for word in rest if word.startswith("--at=")), "--at=/ip4/127.0.0.1/tcp/0")
    listen = [multiaddr.Multiaddr(at[5:])]
    host = new_host(key_pair=create_new_key_pair(), listen_addrs=listen)
    protocol = CircuitV2Protocol(host, allow_hop=command == "relay")
    punching = DCUtRProtocol(host)
    transport = CircuitV2Transport(host, protocol, RelayConfig())
    async with (
        host.run(listen_addrs=listen),
        background_trio_service(protocol),
        background_trio_service(punching),
        trio.open_nursery() as nursery,
    ):
        host.set_stream_handler(ECHO, echo)
        if command == "dial" and "p2p-circuit" not in rest[0]:
            await dial(host, rest[0])
            nursery.cancel_scope.cancel()
            return
        if command == "dial":
            await dial_circuit(host, transport, punching, rest[0])
        elif rest and not rest[0].startswith("--"):
            await reserve(host, transport, nursery, rest[0])
        else:
            say(addr=str(host.get_addrs()[0]))
        await trio.sleep_forever()


trio.run(main)
