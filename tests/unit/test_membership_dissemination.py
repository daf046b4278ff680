"""Floods: who passes on first, what is remembered, and that a freed seat is offered once."""

from __future__ import annotations

from random import Random

from p2p.membership.config import MembershipConfig
from p2p.membership.core.dissemination import MEMORY, Dissemination
from p2p.membership.core.member_list import MemberList
from p2p.membership.core.pull import MAX_ASKED, Pull
from p2p.membership.heartbeat import Digest, key_of
from tests.unit.core_swarm import peer_named
from tests.unit.membership_swarm import heartbeat_of


def test_a_rumour_is_not_remembered_for_ever() -> None:
    dissemination, others = Dissemination(peer_named(1)), (peer_named(2), peer_named(3))

    def is_known(number: int) -> bool:
        return dissemination.is_known(peer_named(number), 1, suspected=True, source=others[1])

    for number, now in ((50, 0.0), (51, MEMORY - 1), (52, 2 * MEMORY + 1), (53, 4 * MEMORY)):
        said = heartbeat_of(peer_named(number))
        dissemination.flood(said, suspected=True, source=others[0], now=now)
        assert is_known(50) is (number < 53)
    assert is_known(52)


def test_one_free_seat_is_offered_to_one_stranger() -> None:
    config = MembershipConfig(passive=10)
    view = MemberList(peer_named(1), config, Random(1))
    for number in range(2, 2 + config.capacity - 1):
        view.admit(heartbeat_of(peer_named(number)), 0.0)
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
    assert pull.arrived(key_of(peer_named(299)))
    named = Digest(key_of(peer_named(300)), 1, -1)
    later = 2 * config.interval
    assert pull.wanted([named], peer_named(2), later) == (named.key,)
    assert not pull.arrived(key_of(peer_named(100)))
    for number in range(2 * MAX_ASKED):
        pull.sought(key_of(peer_named(number)), later)
    assert not pull.arrived(key_of(peer_named(2 * MAX_ASKED - 1)))
