"""A workload of one's own: a token goes round a ring of machines."""

import trio

TOKEN = "/example/token/1.0.0"


class Ring:
    """`shoal sim run ring.toml` in this folder plays it."""

    parameters = ("hold",)

    def __init__(self):
        self.rounds = []  # virtual times at which the token came home

    async def run(self, swarm, scenario):
        hold = scenario.parameter("hold", 0.1)
        names = [f"n{number}" for number in range(scenario.nodes)]

        async def live(node):
            following = names[(names.index(node.name) + 1) % len(names)]
            arrived = trio.Event()
            async with node.open_host() as host:

                def take(peer, message):
                    arrived.set()

                with host.receiving(TOKEN, take):
                    if node.name == names[0]:
                        arrived.set()
                    while True:
                        await arrived.wait()
                        arrived = trio.Event()
                        if node.name == names[0]:
                            self.rounds.append(node.world.now())
                            swarm.simulation.plot("rounds", len(self.rounds))
                        await node.world.sleep(hold)
                        friend = swarm.nodes[following]
                        host.add_addrs(friend.peer_id, [friend.addr])
                        host.send(friend.peer_id, TOKEN, b"token")

        for name in names:
            swarm.add(name, live, link=scenario.link)
        await swarm.sleep(scenario.duration)
        took = [b - a for a, b in zip(self.rounds, self.rounds[1:], strict=False)]
        return {"rounds": len(took), "slowest_round": max(took, default=scenario.duration)}
