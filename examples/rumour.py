"""Fifty nodes pass rumours on while machines die: `python rumour.py`."""

from pathlib import Path

from p2p.identity import ProtocolId
from sim import Churn, ChurnModel, Lognormal, drawing, open_swarm, run_simulation

RUMOUR = ProtocolId("/example/rumour/1.0.0")
NODES, FRIENDS, SECONDS = 50, 3, 300


async def main(simulation):
    heard = {}  # node name -> newest rumour it knows

    async def live(node):  # one life of one node
        heard[node.name] = -1
        async with node.open_host() as host:

            def tell(number):
                rng = node.world.rng("friends")
                for friend in rng.sample(node.siblings, FRIENDS):
                    host.add_addrs(friend.peer_id, [friend.addr])
                    host.send(friend.peer_id, RUMOUR, b"%d" % number)

            def hear(peer, message):
                if int(message) > heard[node.name]:
                    heard[node.name] = int(message)
                    tell(int(message))

            with host.receiving(RUMOUR, hear):
                while True:  # n0 starts a rumour every ten seconds
                    await node.world.sleep(10)
                    if node.name == "n0":
                        hear(None, b"%d" % node.world.now())

    async with open_swarm(simulation) as swarm:
        churn = Churn(swarm, ChurnModel(up=Lognormal(120, 1.5), down=Lognormal(20, 1.3)))
        for number in range(NODES):
            node = swarm.add(f"n{number}", live)
            if number:
                churn.add(node.name)
        await swarm.sleep(5)
        while simulation.now < SECONDS:  # between two rumours
            await swarm.sleep(10)
            newest = max(heard.values())
            share = sum(heard[node.name] == newest for node in swarm.alive) / len(swarm.alive)
            simulation.plot("share of the living that know the newest rumour", share)
        return share


outcome = run_simulation(main, seed=1)
print(f"{outcome.value:.0%} of the living know the newest rumour; trace {outcome.trace_hash}")
Path("rumour.html").write_text(drawing(outcome.simulation, "Rumours under churn"), "utf-8")
