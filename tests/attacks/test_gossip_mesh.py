"""Ghosts in the mesh, and strangers who want to own it."""

from __future__ import annotations

from random import Random

import pytest

from p2p.events import PeerDown, PeerUp
from p2p.gossip.core.events import Publish, Subscribe, Unsubscribe
from p2p.gossip.core.mesh import MAX_FLOOD_PUBLISH
from p2p.gossip.messages import Rpc
from p2p.identity import PeerId
from tests.attacks.gossip_node import TOPIC, Victim, said
from tests.unit.core_swarm import peer_named

AUTHOR = peer_named(900)
HONEST = [peer_named(number) for number in range(1, 7)]
GHOSTS = [peer_named(10_000 + number) for number in range(48)]
JOIN = Rpc(subscriptions=[(TOPIC, True)], graft=[TOPIC])


def reached(victim: Victim, data: bytes, peers: list[PeerId]) -> int:
    return sum(
        any(m.data == data for rpc in victim.rpcs.get(p, ()) for m in rpc.messages)
        for p in peers
    )


def test_what_comes_after_a_connection_has_ended_leaves_nothing() -> None:
    """A host reads on in what was buffered. Twelve such ghosts owned the mesh."""
    victim = Victim()
    for ghost in GHOSTS:
        victim.do(PeerUp(ghost))
        victim.do(PeerDown(ghost))
        victim.hear(ghost, JOIN)
        victim.hear(ghost, Rpc(ihave=[(TOPIC, [b"id"])]))
    victim.meet(*HONEST)
    victim.later(2)
    assert victim.mesh() == set(HONEST)
    victim.do(Publish(TOPIC, b"news"))
    assert reached(victim, b"news", HONEST) == 6
    assert not victim.mesh() & set(GHOSTS)
    assert not any(reached(victim, b"news", [ghost]) for ghost in GHOSTS)
    assert victim.core.counters["not connected"] == 96


def test_what_a_stranger_says_before_it_is_connected_leaves_nothing() -> None:
    victim = Victim()
    victim.hear(GHOSTS[0], JOIN)
    victim.hear(GHOSTS[1], Rpc(prune=[(TOPIC, 3600)]))
    assert victim.mesh() == set()
    assert victim.core._mesh._backoff == {}
    assert victim.sent == {}


def test_those_that_heard_a_topic_and_left_are_not_grafted_when_we_subscribe() -> None:
    victim = Victim()
    victim.do(Unsubscribe(TOPIC))
    for peer in (*HONEST, *GHOSTS[:6]):
        victim.do(PeerUp(peer))
        victim.hear(peer, Rpc(subscriptions=[("other", True)]))
    for number in range(10):
        victim.do(Publish("other", b"%d" % number))
    for ghost in GHOSTS[:6]:
        victim.do(PeerDown(ghost))
    victim.do(Subscribe("other"))
    assert not set(victim.core.topics["other"]) & set(GHOSTS)


@pytest.mark.parametrize("count", [12, 24, 48])
def test_strangers_who_graft_first_do_not_own_the_mesh(count: int) -> None:
    victim = Victim()
    strangers = GHOSTS[:count]
    victim.meet(*strangers)
    for stranger in strangers:
        victim.hear(stranger, JOIN)
    for peer in HONEST[:3]:
        victim.do(PeerUp(peer, dialled=True))
        victim.hear(peer, Rpc(subscriptions=[(TOPIC, True)]))
    victim.meet(*HONEST[3:])
    for number in range(120):
        victim.later(1)
        # Who brings news is grafted beyond the full mesh, which is then cut back.
        news = said(AUTHOR, b"news %d" % number, seqno=number)
        victim.hear(HONEST[3 + number % 3], Rpc(messages=[news]))
        for stranger in strangers:  # they come back as soon as they may
            if stranger not in victim.mesh() and not victim.core._mesh.is_backed_off(
                TOPIC, stranger, victim.now
            ):
                victim.hear(stranger, Rpc(graft=[TOPIC]))
        assert len(victim.mesh() & set(HONEST[:3])) >= 2
        assert len(victim.mesh() & set(strangers)) <= 10
    victim.do(Publish(TOPIC, b"news"))
    assert reached(victim, b"news", HONEST) == 6


def test_peers_that_bring_news_take_the_seats_of_those_that_bring_none() -> None:
    """Nobody was dialled here: only what honest peers tell of brings them into the mesh."""
    victim = Victim()
    victim.meet(*GHOSTS[:12])
    for ghost in GHOSTS[:12]:
        victim.hear(ghost, JOIN)
    victim.meet(*HONEST)
    dice = Random(1)
    for number in range(5 * 60):
        victim.later(1)
        if number % 10 == 0:
            news = said(AUTHOR, b"news %d" % number, seqno=number)
            order = dice.sample(HONEST, len(HONEST))
            for peer in order:
                victim.hear(peer, Rpc(ihave=[(TOPIC, [news.id])]))
            for peer in order:
                if any(news.id in rpc.iwant for rpc in victim.rpcs.get(peer, ())):
                    victim.hear(peer, Rpc(messages=[news]))
    assert len(victim.delivered) == 30
    assert len(victim.mesh() & set(HONEST)) >= 3


def test_a_publication_reaches_those_we_dialled_before_a_crowd_of_strangers() -> None:
    victim = Victim()
    crowd = [peer_named(20_000 + number) for number in range(4 * MAX_FLOOD_PUBLISH)]
    victim.meet(*crowd)
    for stranger in crowd:
        victim.hear(stranger, JOIN)
    for peer in HONEST:
        victim.do(PeerUp(peer, dialled=True))
        victim.hear(peer, Rpc(subscriptions=[(TOPIC, True)]))
    victim.do(Publish(TOPIC, b"news"))
    assert reached(victim, b"news", HONEST) == 6
    assert reached(victim, b"news", crowd) <= MAX_FLOOD_PUBLISH
