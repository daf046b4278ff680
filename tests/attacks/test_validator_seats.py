"""Strangers that hold a validator's streams, and send little or nothing on them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import trio
from roles.protocol.core.messages import OFFER_PROTOCOL

from p2p.errors import PeerUnreachable
from p2p.identity import KeyPair
from p2p.multiaddr import Multiaddr
from p2p.node.node import Node
from p2p.swarm.swarm import SwarmHost
from p2p.wire import frame
from roles.inference.role import Inference
from roles.run import run_of
from roles.shared.seats import GRACE, Seats
from tests.attacks.judged import accepted, forge, play, trainer, validator

STREAMS = 8
HOLDERS = 16
STEPS = 8
"""Of which a validator without enemies sees the last after 14 s."""


class Holder(Inference):
    """Holds as many streams as it gets, and opens others when it loses them."""

    name: ClassVar[str] = "holder"

    def opening(self, node: Node, number: int) -> bytes:
        """What is sent on a stream before nothing more is."""
        return b"\x80"

    async def run(self, node: Node) -> None:
        validator = run_of(node).terms.validators[0]
        await node.shardcast.wait_policy(node.shardcast.newest)
        async with trio.open_nursery() as nursery:
            for number in range(STREAMS):
                nursery.start_soon(self._hold, node, validator, number)

    async def _hold(self, node: Node, validator: Any, number: int) -> None:
        while True:
            try:
                await node.locate(validator)
                stream = await node.host.open_stream(validator, OFFER_PROTOCOL)
                async with stream:
                    await stream.send_all(self.opening(node, number))
                    while await stream.receive_some():
                        pass
            except (trio.BrokenResourceError, PeerUnreachable):
                pass
            self.counts.retries += 1
            await node.world.sleep(1.0)


class HeadAndOneByte(Holder):
    """Sends a head that says all that it should, and one byte of 2,000: a submission of this
    small run may have so many."""

    def opening(self, node: Node, number: int) -> bytes:
        whole = frame(
            forge(node, max(0, node.shardcast.newest), number, bytes(2_000)).to_bytes()
        )
        return whole[: len(whole) - 2_000 + 1]


class FutureClaims(Holder):
    """Hands in work under a policy that nobody has made."""

    def opening(self, node: Node, number: int) -> bytes:
        return frame(forge(node, node.shardcast.newest + 1000, number, bytes(1000)).to_bytes())


@pytest.mark.parametrize("kind", [Holder, HeadAndOneByte, FutureClaims])
def test_sixteen_identities_that_hold_eight_streams_each_starve_nobody(
    kind: type[Holder],
) -> None:
    """16 peers held 128 seats by a byte each: 0 of 12 steps in 60 s."""
    holders = {f"holder-{number}": f"{__name__}:{kind.__name__}" for number in range(HOLDERS)}
    health = play(
        {"inference-1": "inference", "inference-2": "inference", **holders}, 30.0, steps=STEPS
    )
    assert trainer(health)["step"] == STEPS
    assert validator(health)["rejected"] == 0
    assert accepted(health, "inference") > 0
    assert sum(health[name]["roles"]["holder"]["retries"] for name in holders) > 0


def test_connections_of_peers_with_accepted_work_are_kept() -> None:
    """A full host closed the connections of those who did the work like any
    other.
    """
    stages: list[Any] = []
    health = play({"inference-1": "inference"}, 60.0, steps=3, change=stages.append)
    node, _ = stages[0]._open["validator-1"]
    assert [str(peer) for peer in node.host._gater._protected["work"]] == [
        health["inference-1"]["peer"]
    ]


@pytest.mark.parametrize(
    ("addr", "network"),
    [
        ("/ip4/203.0.113.7/tcp/4001", "ip4/cb0071"),
        ("/ip6/2001:db8:1:2::3/tcp/4001", "ip6/20010db80001"),
        ("/ip4/127.0.0.1/tcp/4001", ""),
        ("/memory/3", ""),
    ],
)
def test_a_host_tells_the_network_of_a_peer_where_there_is_one(addr: str, network: str) -> None:
    """Limits count addresses too."""
    connection = SimpleNamespace(remote_addr=Multiaddr.parse(addr))
    host: Any = SimpleNamespace(_connector=SimpleNamespace(live=lambda _: connection))
    assert SwarmHost.network_of(host, KeyPair(b"p" * 32).peer_id) == network


def peers(count: int) -> list[Any]:
    return [KeyPair(number.to_bytes(32, "big")).peer_id for number in range(1, count + 1)]


def test_a_seat_goes_from_the_slowest_to_who_asks_once_it_had_its_chance() -> None:
    """A seat was held for 60 s by a byte."""
    seats, (slow, fast, late) = Seats(in_all=2), peers(3)
    gone: list[str] = []
    first = seats.take(slow, 0.0, evict=lambda: gone.append("slow"))
    second = seats.take(fast, 0.0, evict=lambda: gone.append("fast"))
    assert first is not None
    assert second is not None
    second.received = 1_000_000
    assert seats.take(late, GRACE / 2) is None
    assert seats.take(late, GRACE) is not None
    assert gone == ["slow"]
    assert first.evicted
    assert seats.take(slow, 2 * GRACE) is None, (
        "a peer that was too slow takes no seat from one that was not"
    )
    seats.leave(second)
    again = seats.take(slow, GRACE)
    assert again is not None
    assert seats.take(fast, GRACE) is not None, "a peer that was too slow before has no grace"
    assert again.evicted


def test_strangers_never_take_the_seats_of_peers_with_accepted_work() -> None:
    """Seats knew no difference between a stranger and a peer of a thousand
    submissions.
    """
    seats, known = Seats(per_peer=2, in_all=8, strangers=4), peers(20)
    strangers = [seats.take(peer, 0.0, is_stranger=True) for peer in known[:6]]
    assert [seat is not None for seat in strangers] == [True] * 4 + [False] * 2
    workers = [seats.take(peer, 0.0) for peer in known[6:10]]
    assert None not in workers
    assert seats.take(known[10], 10.0, is_stranger=True) is not None, (
        "in place of another stranger"
    )
    assert not any(seat.evicted for seat in workers if seat is not None)
    assert seats.take(known[11], 20.0) is not None, "strangers make room for work"
    assert len(seats) == 8
    assert not any(seat.evicted for seat in workers if seat is not None)


def test_one_network_has_a_share_whatever_its_names_and_unknown_networks_have_none() -> None:
    """Limits counted peers only, and names are cheap."""
    seats, known = Seats(in_all=100, per_network=4), peers(30)
    here = [seats.take(peer, 0.0, network="ip4/0a0000") for peer in known[:10]]
    assert sum(seat is not None for seat in here) == 4
    assert all(seats.take(peer, 0.0) is not None for peer in known[10:20])
    assert seats.take(known[20], 0.0, network="ip4/0b0000") is not None
