"""What strangers fill is theirs: promises, seen ids, kept messages, penalties."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from p2p.errors import BadMessage
from p2p.gossip.config import GossipConfig
from p2p.gossip.core import caches
from p2p.gossip.core.events import Validity
from p2p.gossip.core.promises import MAX_OWED, MAX_PROMISES, Promises
from p2p.gossip.messages import MAX_DATA, Rpc
from p2p.identity import KeyPair, PeerId
from p2p.machine import open_world
from p2p.node.policies import judge_announcement
from p2p.shardcast import open_shardcast
from p2p.shardcast.messages import Hello, encode_message
from p2p.swarm.swarm import open_host
from tests.attacks.gossip_node import TOPIC, Victim, said
from tests.support.shardcast_town import RUN, Town, publish
from tests.unit.core_swarm import peer_named

FRIEND = peer_named(1)
AUTHOR = peer_named(2)
STRANGERS = [peer_named(10_000 + number) for number in range(48)]


def asked(victim: Victim, peer: PeerId, ids: list[bytes]) -> bool:
    before = len(victim.rpcs.get(peer, ()))
    victim.hear(peer, Rpc(ihave=[(TOPIC, ids)]))
    return any(set(ids) <= set(rpc.iwant) for rpc in victim.rpcs.get(peer, [])[before:])


@pytest.mark.parametrize("count", [17, 48])
def test_strangers_that_promise_thousands_of_ids_keep_no_room_from_others(count: int) -> None:
    victim = Victim()
    victim.meet(FRIEND, *STRANGERS[:count])
    for second in range(4):
        for number, stranger in enumerate(STRANGERS[:count]):
            ids = [b"%d of %d at %d" % (each, number, second) for each in range(500)]
            victim.hear(stranger, Rpc(ihave=[(TOPIC, ids)]))
        assert asked(victim, FRIEND, [said(AUTHOR, seqno=second).id])
        victim.later(1)
    assert len(victim.core._promises) <= MAX_PROMISES


def test_one_peer_that_promises_without_end_owes_no_more_than_its_share() -> None:
    victim, enemy = Victim(), peer_named(40)
    victim.meet(enemy)
    for number in range(4):
        ids = [b"%d/%d" % (number, each) for each in range(5000)]
        victim.hear(enemy, Rpc(ihave=[(TOPIC, ids)]))
    assert len(victim.core._promises) == MAX_OWED


def test_strangers_that_promise_an_id_do_not_keep_us_from_asking_for_it() -> None:
    """The first to tell of an id was asked, and no other for 3 s."""
    victim = Victim()
    victim.meet(FRIEND, *STRANGERS)
    victim.hear(FRIEND, Rpc(messages=[said(AUTHOR, b"good", seqno=1)]))
    news = said(AUTHOR, b"news", seqno=2)
    for stranger in STRANGERS:
        victim.hear(stranger, Rpc(ihave=[(TOPIC, [news.id])]))
    assert asked(victim, FRIEND, [news.id])
    victim.hear(FRIEND, Rpc(messages=[news]))
    assert victim.delivered == [b"good", b"news"]
    victim.later(10)
    assert not victim.points  # it came


def test_promises_of_a_peer_that_left_are_forgotten() -> None:
    table = Promises(GossipConfig())
    for peer in STRANGERS[:3]:
        assert table.ask(b"id", peer, 0.0, proven=False)
        assert table.ask(peer.digest, peer, 0.0, proven=False)
    for peer in STRANGERS[:3]:
        table.disconnected(peer)
    assert len(table) == 0
    assert table._requests == {}
    assert table.heartbeat(1e9) == []


def test_messages_that_are_no_news_do_not_flush_what_was_seen() -> None:
    """After 66,000 messages of unknown authors all that was heard was heard again."""
    victim = Victim()
    victim.meet(FRIEND, STRANGERS[0])
    news = said(AUTHOR, b"news")
    victim.hear(FRIEND, Rpc(messages=[news]))
    for number in range(caches.MAX_SEEN // 100 + 10):
        batch = [said(STRANGERS[0], b"old", seqno=100 * number + each) for each in range(100)]
        victim.hear(STRANGERS[0], Rpc(messages=batch))
        victim.later(0.02)
    victim.hear(FRIEND, Rpc(messages=[news]))
    assert victim.delivered == [b"news"]
    assert victim.points[FRIEND] == 0
    assert victim.core.counters["ignore"] < 400  # the validator's time is not free


def test_noise_evicts_the_noise_of_the_loudest_and_never_news() -> None:
    seen = caches.SeenCache()
    for number in range(500):
        seen.accept(b"news %d" % number, 0.0)
    seen.add(b"quiet", FRIEND, 0.0)
    dice = Random(1)
    for number in range(caches.MAX_SEEN + 2000):
        seen.add(b"noise %d" % number, dice.choice(STRANGERS), 1.0)
        assert len(seen) <= caches.MAX_SEEN
    assert b"quiet" in seen
    assert all(b"news %d" % number in seen for number in range(500))
    for number in range(500, caches.MAX_SEEN + 500):
        seen.accept(b"news %d" % number, 2.0)
    assert len(seen) <= caches.MAX_SEEN
    assert b"news %d" % number in seen
    seen.expire(200.0)
    assert len(seen) == 0
    assert not seen._unaccepted


def test_ignored_messages_of_an_honest_forwarder_cost_it_nothing_but_its_quota() -> None:
    """A trainer of a newer run document: two policies and two rosters a minute."""
    victim = Victim()
    victim.meet(FRIEND)
    for number in range(240):
        victim.hear(FRIEND, Rpc(messages=[said(AUTHOR, b"old", seqno=number)]))
        victim.later(15)
    assert not victim.points
    assert victim.core.counters["ignore"] == 240


def test_one_author_does_not_fill_the_cache() -> None:
    kept = caches.MessageCache()
    for number in range(100):
        kept.put(said(AUTHOR, bytes(MAX_DATA), seqno=number))
    honest = said(FRIEND, bytes(MAX_DATA))
    kept.put(honest)
    assert honest.id in kept.gossip_ids(TOPIC)
    for _ in range(5):
        kept.shift()
    assert kept._bytes == 0
    assert kept._bytes_of == {}


def test_messages_without_data_are_not_kept_without_a_limit() -> None:
    kept = caches.MessageCache()
    for author in range(10):
        for number in range(caches.MAX_CACHE_BYTES // 512 // 8):
            identity = b"%036d" % author, number.to_bytes(8, "big")
            kept.put(caches.PubsubMessage(*identity, TOPIC, None))
    assert len(kept._messages) == caches.MAX_CACHE_BYTES // 512


async def test_what_can_never_be_valid_is_rejected_and_what_others_may_believe_is_ignored(
    tmp_path: Path,
) -> None:
    town = Town(tmp_path)
    said: list[bytes] = []
    town.announce = lambda sender, data: said.append(data)  # type: ignore[method-assign]
    async with (
        town.member(0) as trainer,
        open_world(tmp_path / "elsewhere", KeyPair(b"e" * 32)) as world,
        open_host(network=town.network, world=world, listen=["/memory/0"]) as host,
        open_shardcast(
            world,
            host,
            town.config,
            run=RUN,
            may_publish=lambda peer: False,
            roster=lambda: [],
            announce=said.append,
        ) as elsewhere,
    ):
        await publish(trainer, 1)
        author = trainer.host.peer_id
        assert said
        for data in said:  # by a trainer that this node's run document does not name yet
            assert judge_announcement(elsewhere, author, data) is Validity.IGNORE
            for bad in (b"garbage", data[:-1], encode_message(Hello(3))):
                with pytest.raises(BadMessage):  # gossip rejects it
                    judge_announcement(elsewhere, author, bad)
