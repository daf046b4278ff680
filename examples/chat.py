"""A chat room without a server: `python chat.py NAME [ADDRESS]`."""

import sys

import trio

import p2p

ROOM = "/example/chat/1"


async def main(name, *others):
    async with (
        p2p.open_world() as world,
        p2p.open_host(world=world) as host,
        p2p.open_gossip(world, host) as gossip,
        p2p.open_dht(world, host) as dht,
    ):

        def hear(author, line):
            print(line.decode(), flush=True)

        gossip.subscribe(ROOM, lambda author, line: p2p.Validity.ACCEPT, hear)
        print("others join with", host.addrs[0], flush=True)
        await dht.bootstrap([p2p.Multiaddr.parse(addr) for addr in others])
        await dht.put("room", ROOM.encode(), name.encode(), 600)
        for record in await dht.get("room", ROOM.encode()):
            if record.publisher != host.peer_id and await dht.find_peer(record.publisher):
                await host.connect(record.publisher)
        while line := await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
            gossip.publish(ROOM, f"{name}: {line.strip()}".encode())


try:
    trio.run(main, *sys.argv[1:])
except KeyboardInterrupt:
    print("left the room; the same line comes back")
