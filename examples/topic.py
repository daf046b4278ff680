"""Say and hear on a topic that any libp2p program can join: `python topic.py NAME`."""

import sys

import trio

import p2p

TOPIC = "/example/weather/1"


async def main(name):
    def hear(author, said):
        print(author.short, "says", said.decode(errors="replace"), flush=True)

    async with (
        p2p.open_world() as world,
        p2p.open_host(world=world) as host,
        p2p.open_gossip(world, host) as gossip,
    ):
        gossip.subscribe(TOPIC, lambda author, said: p2p.Validity.ACCEPT, hear)
        print("node topic.mjs", host.addrs[0], flush=True)
        while True:
            await trio.sleep(1)
            gossip.publish(TOPIC, f"fine, says {name}".encode())


try:
    trio.run(main, *sys.argv[1:])
except KeyboardInterrupt:
    print("left the topic; the same line comes back")
