"""What a peer may make a node do in a second is bounded, whatever it sends."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from p2p.events import PeerDown, Received
from p2p.gossip.config import BURST, RATE
from p2p.gossip.core.events import Publish
from p2p.gossip.core.mesh import MAX_BACKOFFS
from p2p.gossip.core.quotas import FIELD_COST, NEWCOMER, RPC_COST
from p2p.gossip.messages import MAX_FIELDS, MAX_RPC, Rpc, encode_rpc
from p2p.identity import PeerId
from p2p.wire import KI, MIB
from tests.attacks.gossip_node import TOPIC, Victim, said
from tests.unit.core_swarm import peer_named

ENEMY = peer_named(10_000)
FRIEND = peer_named(1)
AUTHOR = peer_named(2)
Floods = Callable[[int], bytes]


FLAPPING = [
    encode_rpc(Rpc(subscriptions=[(f"t{each % 32}", wanted) for each in range(256)]))
    for wanted in (True, False)
]
TOPICS = [TOPIC, *(f"t{each}" for each in range(255))]
GRAFTS = encode_rpc(Rpc(graft=TOPICS, prune=[(topic, 3600) for topic in TOPICS]))
TOLD = [
    encode_rpc(Rpc(ihave=[(TOPIC, [b"%8d%32d" % (number, each) for each in range(5000)])]))
    for number in range(10)
]
ASKED = encode_rpc(Rpc(iwant=[said(AUTHOR, seqno=each).id for each in range(5000)]))
REPEATED = encode_rpc(Rpc(messages=[said(AUTHOR, b"seen", seqno=1)]))
FOREIGN_TOPIC = encode_rpc(Rpc(messages=[said(AUTHOR, b"x", topic="elsewhere")]))
FLOODS: dict[str, tuple[Floods, int]] = {
    "empty RPCs": (lambda number: b"", 98_000),
    "unknown fields": (lambda number: b"\x48\x01" * 8, 40_000),
    "subscriptions": (lambda number: FLAPPING[number % 2], 2_000),
    "grafts and prunes": (lambda number: GRAFTS, 500),
    "5,000 ids": (lambda number: TOLD[number % 10], 40),
    "5,000 questions": (lambda number: ASKED, 40),
    "a message that was seen": (lambda number: REPEATED, 20_000),
    "messages of another topic": (lambda number: FOREIGN_TOPIC, 20_000),
}
"""What is sent, and how often in a second."""


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_is_dropped_unread_and_ends_with_a_refusal(name: str) -> None:
    rpcs, rate = FLOODS[name]
    victim = Victim()
    victim.meet(FRIEND, ENEMY)
    victim.hear(FRIEND, Rpc(messages=[said(AUTHOR, b"seen", seqno=1)]))
    flood = victim.flood(ENEMY, rpcs, rate=rate, seconds=30)
    size = len(rpcs(0))
    # An account may be overdrawn by one RPC and no more.
    units = NEWCOMER + RATE * flood.seconds + RPC_COST + size + MAX_FIELDS * FIELD_COST
    assert flood.decoded * (RPC_COST + size) + flood.fields * FIELD_COST <= units
    assert ENEMY in victim.refused
    assert flood.seconds < 20
    assert victim.points[FRIEND] == 0


def test_a_peer_that_sends_a_little_too_much_is_cut_off_and_blamed_if_it_goes_on() -> None:
    victim = Victim()
    victim.meet(ENEMY)
    rpc = encode_rpc(Rpc(messages=[said(AUTHOR, bytes(4 * KI), topic="elsewhere")]))
    flood = victim.flood(ENEMY, lambda number: rpc, rate=100, seconds=15)
    assert flood.decoded < 0.9 * flood.sent
    assert victim.points[ENEMY] == 0
    victim.flood(ENEMY, lambda number: rpc, rate=100, seconds=120)
    assert ENEMY in victim.refused


def test_a_crowd_spends_no_more_than_sixteen() -> None:
    """Each sends less than a flood; all together would have taken a whole core."""
    victim = Victim()
    crowd = [peer_named(10_000 + number) for number in range(96)]
    victim.meet(FRIEND, *crowd)
    rpc = encode_rpc(Rpc(messages=[said(AUTHOR, bytes(32 * KI), topic="elsewhere")]))
    decoded = []
    for second in range(8):
        before = victim.core.counters["not ours"]
        for _ in range(20):
            for peer in crowd:
                victim.do(Received(peer, rpc))
            victim.later(0.05)
        decoded.append(victim.core.counters["not ours"] - before)
        news = said(AUTHOR, b"news", seqno=second)
        victim.hear(FRIEND, Rpc(messages=[news]))
        assert len(victim.delivered) == second + 1
    share = 16 * RATE / len(rpc)
    assert sum(decoded[4:]) <= 1.5 * 4 * share


def test_answers_stand_on_the_account_of_the_peer_that_asks() -> None:
    """An RPC of 3 KB asked for 16 MiB, three times."""
    victim = Victim()
    friends = [peer_named(number) for number in range(1, 9)]
    victim.meet(*friends, ENEMY, hears=False)
    victim.later(20)
    messages = [said(peer_named(100 + number), bytes(250 * KI)) for number in range(60)]
    for number, message in enumerate(messages):
        victim.hear(friends[number % 8], Rpc(messages=[message]))
    start = victim.now
    for _ in range(200):
        victim.hear(ENEMY, Rpc(iwant=[message.id for message in messages]))
        victim.later(0.01)
    assert 0 < victim.sent[ENEMY] <= BURST + RATE * (victim.now - start) + MIB
    assert victim.points[ENEMY] == 0


def test_an_answer_fits_one_rpc() -> None:
    """Five thousand messages without data had 1.25 MB in one answer: more than a host sends."""
    victim = Victim()
    victim.meet(ENEMY, hears=False)
    victim.later(20)
    ids = []
    for _ in range(5000):
        victim.do(Publish(TOPIC, b""))
    ids = victim.core._cache.gossip_ids(TOPIC)
    victim.hear(ENEMY, Rpc(iwant=ids[:5000]))
    assert 0 < victim.sent[ENEMY] < MAX_RPC


def test_reconnecting_fills_no_account() -> None:
    victim = Victim()
    flood = 0
    for _ in range(10):
        victim.meet(ENEMY, hears=False)
        flood += victim.flood(ENEMY, lambda number: b"", rate=20_000, seconds=0.2).decoded
        victim.do(PeerDown(ENEMY))
    assert flood * RPC_COST <= NEWCOMER + RATE * 2 + RPC_COST


def test_backoffs_of_minted_peers_are_bounded() -> None:
    victim = Victim()
    for number in range(MAX_BACKOFFS + 10):
        peer = peer_named(20_000 + number)
        victim.meet(peer, hears=False)
        victim.hear(peer, Rpc(prune=[(TOPIC, 3600)]))
        victim.do(PeerDown(peer))
    assert len(victim.core._mesh._backoff) == MAX_BACKOFFS


def test_a_graft_of_a_topic_that_we_do_not_hear_leaves_nothing_and_is_not_answered() -> None:
    victim = Victim()
    victim.meet(ENEMY)
    before = victim.sent[ENEMY]
    victim.hear(ENEMY, Rpc(graft=["elsewhere"], prune=[("elsewhere", 60)]))
    assert victim.sent[ENEMY] == before
    assert victim.core._mesh._backoff == {}
    assert "elsewhere" not in victim.core._mesh._subscribers


def test_an_admitted_author_that_says_too_much_stops_itself_and_no_forwarder() -> None:
    victim = Victim()
    friends = [peer_named(number) for number in range(1, 9)]
    victim.meet(*friends)
    victim.later(20)
    sent = 0
    for step in range(1000):  # 4 messages of 16 KiB in 10 ms: 6.4 MB/s
        for each in range(4):
            sent += 16 * KI
            message = said(AUTHOR, bytes(16 * KI), seqno=4 * step + each)
            victim.hear(friends[(step + each) % 8], Rpc(messages=[message]))
        victim.later(0.01)
    passed_on = sum(map(len, victim.delivered))
    assert 0 < passed_on <= 2 * MIB + 10 * 128 * KI + 16 * KI
    assert not victim.points
    victim.later(10)
    quiet: PeerId = peer_named(3_000)
    victim.hear(friends[0], Rpc(messages=[said(quiet, b"honest words")]))
    assert victim.delivered[-1] == b"honest words"
