"""Floods: who passes on first, what is remembered, and that a freed seat is offered once."""

from __future__ import annotations

from random import Random

from p2p.membership.config import MembershipConfig
from p2p.membership.core.dissemination import (
    MEMORY,
    Dissemination,
)
from p2p.membership.core.member_list import MemberList
from p2p.membership.core.pull import MAX_ASKED, Pull
from p2p.membership.heartbeat import (
    Digest,
    Heartbeat,
    Profile,
    SignedHeartbeat,
    key_of,
    sign_heartbeat,
)
from tests.unit.core_swarm import FakeSigner, peer_named


def words_of(number: int, seqno: int = 1) -> SignedHeartbeat:
    peer = peer_named(number)
    heartbeat = Heartbeat(peer=peer, seqno=seqno, expires=0, interval=5.0, profile=Profile())
    return sign_heartbeat(heartbeat, FakeSigner(peer))


def test_a_rumour_is_not_remembered_for_ever() -> None:
    dissemination = Dissemination(peer_named(1))
    dissemination.flood(words_of(50), suspected=True, source=peer_named(2), now=0.0)
    dissemination.flood(words_of(51), suspected=True, source=peer_named(2), now=MEMORY - 1)
    assert dissemination.is_known(peer_named(50), 1, suspected=True, source=peer_named(3))
    dissemination.flood(words_of(52), suspected=True, source=peer_named(2), now=2 * MEMORY + 1)
    dissemination.flood(words_of(53), suspected=True, source=peer_named(2), now=4 * MEMORY)
    assert not dissemination.is_known(peer_named(50), 1, suspected=True, source=peer_named(3))
    assert dissemination.is_known(peer_named(52), 1, suspected=True, source=peer_named(3))


def test_one_free_seat_is_offered_to_one_stranger() -> None:
    config = MembershipConfig(passive=10)
    view = MemberList(peer_named(1), config, Random(1))
    for number in range(2, 2 + config.capacity - 1):
        view.admit(words_of(number), peer_named(2), 0.0)
    pull = Pull(view, config)
    strangers = [Digest(key_of(peer_named(number)), 1, -1) for number in range(100, 120)]
    assert (
        len(pull.wanted(strangers, peer_named(2), 1.0)) == 2
    )  # one for the seat, one to renew the view at leisure
    assert pull.wanted(strangers, peer_named(2), 1.1) == ()


def test_who_is_asked_for_a_peer_that_it_never_named_owes_nothing() -> None:
    config = MembershipConfig()
    pull = Pull(MemberList(peer_named(1), config, Random(1)), config)
    for number in range(100, 300):
        pull.sought(key_of(peer_named(number)), 0.0)
    assert pull.was_asked(key_of(peer_named(100)))
    named = Digest(key_of(peer_named(300)), 1, -1)
    later = 2 * config.interval
    assert pull.wanted([named], peer_named(2), later) == (named.key,)
    assert not pull.was_asked(key_of(peer_named(100)))
    for number in range(2 * MAX_ASKED):
        pull.sought(key_of(peer_named(number)), later)
    assert not pull.was_asked(key_of(peer_named(2 * MAX_ASKED - 1)))
