"""A process that was stopped blames nobody for the silence that it did not hear."""

from __future__ import annotations

import pytest
import trio

from p2p.host import request, serve_requests
from p2p.identity import PeerId
from p2p.membership import Change, MemberEvent, MembershipConfig, open_membership
from p2p.own_time import STALL
from p2p.patience import fail_after_own
from p2p.swarm.swarm import open_host
from sim.node.swarm import SimNode, Swarm
from tests.support.simulated import on_swarm
from tests.sweeps import swept
from tests.unit.diloco_swarm import DilocoSwarm

ECHO = "/test/echo/1.0.0"


@pytest.mark.parametrize("seconds", swept([2, 7, 14, 30, 90, 700], 1))
def test_nobody_is_declared_dead_by_a_process_that_was_stopped(seconds: float) -> None:
    """Its neighbours were, at once, by three timers that ran before anything was read."""
    told: list[tuple[str, MemberEvent]] = []

    async def live(node: SimNode) -> None:
        async with (
            node.open_host() as host,
            open_membership(
                node.world, host, MembershipConfig(), may=lambda _: True
            ) as members,
        ):
            members.on_change(lambda event: told.append((node.name, event)))
            await members.join([other.addr for other in node.siblings[:2] if other is not node])
            await trio.sleep_forever()

    async def body(swarm: Swarm) -> None:
        names = [swarm.add(f"n{number}", live).name for number in range(8)]
        await swarm.sleep(60)
        told.clear()
        swarm.pause("n3", seconds)
        await swarm.sleep(seconds + 1)
        gone = [event.change for name, event in told if name == "n3"]
        assert Change.DIED not in gone
        assert Change.FORGOTTEN not in gone
        await swarm.sleep(60)
        back = {name for name, event in told if event.change is Change.JOINED}
        lost = {name for name, event in told if event.change is Change.DIED}
        assert back == lost  # whoever gave it up takes it in again
        assert lost <= {*names} - {"n3"}

    on_swarm(body, seed=int(seconds))


@pytest.mark.parametrize("seconds", [35.0, 305.0])
def test_connections_over_which_somebody_asks_are_not_idle(seconds: float) -> None:
    """The peer stands still as well, so that no keep-alive of its own ends the connection."""
    served: list[PeerId] = []

    async def answer(peer: PeerId, data: bytes) -> bytes:
        served.append(peer)
        return data

    async def serve(node: SimNode) -> None:
        listen = [node.addr.transport]
        async with open_host(network=node.network, world=node.world, listen=listen) as host:
            host.set_handler(ECHO, serve_requests(answer))
            await trio.sleep_forever()

    async def ask(node: SimNode) -> None:
        async with open_host(network=node.network, world=node.world, listen=[]) as host:
            peer = await host.connect_addr(node.siblings[0].addr)
            asked.set()
            await node.world.sleep(1)
            assert await request(host, peer, ECHO, b"still there?") == b"still there?"
            await trio.sleep_forever()

    asked = trio.Event()

    async def body(swarm: Swarm) -> None:
        swarm.add("server", serve)
        await swarm.sleep(1)
        swarm.add("client", ask)
        await asked.wait()
        await swarm.sleep(0.5)
        swarm.pause("server", seconds)
        await swarm.sleep(1)
        swarm.pause("client", seconds - 1)
        await swarm.sleep(seconds + 5)
        assert len(served) == 1

    on_swarm(body)


@pytest.mark.parametrize("comes", [True, False])
def test_a_wait_of_our_own_time_ends_only_in_time_that_we_lived(comes: bool) -> None:
    ended: list[tuple[str, float]] = []

    async def live(node: SimNode) -> None:
        listener = await node.network.listen(node.addr.transport)
        stream = await listener.accept()
        try:
            with fail_after_own(node.world, 5):
                ended.append(((await stream.receive_some(1)).decode(), node.world.now()))
        except trio.TooSlowError:
            ended.append(("too slow", node.world.now()))
        await trio.sleep_forever()

    async def peer(node: SimNode) -> None:
        async with await node.network.dial(node.siblings[0].addr.transport) as stream:
            await node.world.sleep(2)
            if comes:
                await stream.send_all(b"x")
            await trio.sleep_forever()

    async def body(swarm: Swarm) -> None:
        swarm.add("n0", live)
        await swarm.sleep(1)
        swarm.add("peer", peer)
        await swarm.sleep(1)
        swarm.pause("n0", 60)
        await swarm.sleep(100)
        assert ended == [("x", 62)] if comes else [("too slow", 67)]

    on_swarm(body)


@pytest.mark.parametrize("number", swept(range(4), 1))
def test_a_member_that_was_stopped_misses_no_majority(number: int) -> None:
    """It told its people that no other member was heard, before it had read a word."""
    swarm = DilocoSwarm(4, 1)
    swarm.start()
    swarm.run(60)
    assert not swarm.machines[number].stalls
    swarm.stop(number, until=60 + 20 * STALL)
    swarm.run(200)
    assert not swarm.machines[number].stalls
    swarm.check()
    assert len({machine.core.record.members for machine in swarm.machines if machine.core}) == 1
    assert len(swarm.machines[number].records[-1].members) == 4
