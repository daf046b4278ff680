"""A py-libp2p node for Shoal's tests; runs under a Python that has the package libp2p, never
under ours.

``py_node.py dial ADDR`` pings and echoes 1 MiB, then leaves; ``py_node.py listen`` echoes until
it is killed.
"""

from __future__ import annotations

import json
import sys

import multiaddr
import trio
from libp2p import new_host
from libp2p.peer.peerinfo import info_from_p2p_addr

ECHO = "/shoal/interop/echo/1.0.0"
LISTEN = [multiaddr.Multiaddr("/ip4/127.0.0.1/tcp/0")]


def say(**what) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


async def dial(host, addr: str) -> None:
    info = info_from_p2p_addr(multiaddr.Multiaddr(addr))
    await host.connect(info)
    stream = await host.new_stream(info.peer_id, ["/ipfs/ping/1.0.0"])
    await stream.write(b"p" * 32)
    say(ping=await stream.read(32) == b"p" * 32)
    stream = await host.new_stream(info.peer_id, [ECHO])
    sent, received = bytes(range(256)) * 4096, bytearray()

    async def send() -> None:
        await stream.write(sent)
        await stream.close()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        while len(received) < len(sent):
            received += await stream.read(65536)
    say(echo=received == sent)


async def echo(stream) -> None:
    while data := await stream.read(65536):
        await stream.write(data)


async def main() -> None:
    host = new_host(listen_addrs=LISTEN)
    async with host.run(listen_addrs=LISTEN):
        if sys.argv[1] == "dial":
            await dial(host, sys.argv[2])
        else:
            host.set_stream_handler(ECHO, echo)
            say(addr=str(host.get_addrs()[0]))
            await trio.sleep_forever()


trio.run(main)
