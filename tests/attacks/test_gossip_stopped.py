"""What waited while this process was stopped is held against no honest peer; and crashes."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2p.events import PeerUp, Received
from p2p.gossip import GossipConfig, Validity, open_gossip
from p2p.gossip.config import BURST
from p2p.gossip.messages import Rpc, encode_rpc, sign_message
from p2p.host import MAX_OUTBOX
from p2p.identity import KeyPair, PeerId
from p2p.machine import open_world
from p2p.protobuf import field
from p2p.swarm.swarm import open_host
from p2p.transport.memory import MemoryNetwork
from p2p.wire import MIB
from tests.attacks.gossip_node import TOPIC, Victim, said
from tests.unit.core_swarm import peer_named

AUTHOR = peer_named(900)
FRIENDS = [peer_named(number) for number in range(1, 9)]
LARGE = field(9, bytes(1000))


def test_a_minute_of_traffic_that_comes_at_once_is_no_flood() -> None:
    """Stopped for 60 s: 8 honest peers, 600 messages and 60 lists of 200 ids each."""
    victim = Victim()
    victim.meet(*FRIENDS)
    victim.later(20)
    victim.now += 60
    lists = []
    for number, friend in enumerate(FRIENDS):
        ids = [said(friend, seqno=1000 * number + each).id for each in range(200)]
        lists.append(encode_rpc(Rpc(ihave=[(TOPIC, ids)])))
    for second in range(60):
        for each in range(10):
            message = said(AUTHOR, bytes(200), seqno=10 * second + each)
            for friend in FRIENDS:
                victim.hear(friend, Rpc(messages=[message]))
        for friend, told in zip(FRIENDS, lists, strict=True):
            victim.do(Received(friend, told))
    victim.later(30)
    assert not victim.points
    victim.hear(FRIENDS[0], Rpc(messages=[said(AUTHOR, b"news", seqno=10**6)]))
    assert victim.delivered[-1] == b"news"


def test_a_peer_that_goes_on_is_blamed_after_a_stop_too() -> None:
    victim = Victim()
    victim.meet(FRIENDS[0])
    victim.later(20)
    victim.now += 60
    flood = victim.flood(FRIENDS[0], lambda number: LARGE, rate=5_000, seconds=30)
    assert FRIENDS[0] in victim.refused
    assert flood.seconds < 30
    assert 2 * BURST > MAX_OUTBOX + MIB


async def test_a_validator_that_crashes_does_not_make_a_node_deaf(tmp_path: Path) -> None:
    """Each crash left a message that waited for ever, until no message was taken any more."""

    def judge(author: PeerId, data: bytes) -> Validity:
        if data == b"crash":
            raise RuntimeError("a bug of ours")
        return Validity.ACCEPT

    heard: list[bytes] = []
    friend = KeyPair(bytes([1]) * 32)
    async with (
        open_world(tmp_path) as world,
        open_host(network=MemoryNetwork(), world=world, listen=["/memory/0"]) as host,
        open_gossip(world, host, GossipConfig()) as gossip,
    ):
        gossip.subscribe(TOPIC, judge, lambda author, data: heard.append(data))
        gossip._driver.feed(PeerUp(friend.peer_id))
        for number in range(20):
            rpc = Rpc(messages=[sign_message(friend, TOPIC, b"crash", number)])
            with pytest.raises(RuntimeError, match="a bug of ours"):
                gossip._driver.feed(Received(friend.peer_id, encode_rpc(rpc)))
        rpc = Rpc(messages=[sign_message(friend, TOPIC, b"good", 1000)])
        gossip._driver.feed(Received(friend.peer_id, encode_rpc(rpc)))
        assert heard == [b"good"]
