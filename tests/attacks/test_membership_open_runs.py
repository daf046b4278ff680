"""In an open run a heartbeat shows its author's work stamp, or counts for nothing."""

from __future__ import annotations

import pytest

from p2p.dht.stamp import check_stamp, make_stamp
from p2p.events import Send, Tick
from p2p.identity import PeerId
from p2p.membership import messages as msg
from p2p.membership.core.core import MembershipCore
from p2p.membership.core.events import Interest, UpdateProfile
from p2p.membership.heartbeat import Profile, SignedHeartbeat, decode_heartbeat_untrusted
from tests.unit.core_swarm import peer_named
from tests.unit.membership_swarm import heartbeat_of, make_core, tell

WALL = 1_700_000_000.0
BITS = 8
NAMED = peer_named(9)  # named in the run's document: it needs no stamp


def is_stamped(peer: PeerId, nonce: bytes) -> bool:
    return peer == NAMED or check_stamp(peer, nonce, BITS)


def open_core() -> MembershipCore:
    core = make_core(is_stamped=is_stamped)
    core.handle(Tick(), 0.0)
    return core


def words(peer: PeerId, seqno: int = 5, stamp: bytes | None = None) -> SignedHeartbeat:
    return heartbeat_of(peer, seqno, stamp=make_stamp(peer, BITS) if stamp is None else stamp)


@pytest.mark.parametrize("stamp", [b"", b"short", bytes(8)])
def test_sixty_minted_identities_are_no_members(stamp: bytes) -> None:
    core = open_core()
    for number in range(100, 160):
        peer = peer_named(number)
        stamp = stamp if not check_stamp(peer, stamp, BITS) else b""
        assert tell(core, peer, msg.Join(words(peer, stamp=stamp))) == []
        assert tell(core, peer, msg.Neighbor(True, words(peer, stamp=stamp))) == []
        tell(core, peer_named(100), msg.Heartbeats((words(peer, stamp=stamp),)))
    assert core.size == 0  # before: 60
    assert core.neighbours == ()
    assert core.counters["no stamp"] >= 120


def test_a_stamp_is_a_place_and_of_one_peer_only() -> None:
    core = open_core()
    worker, thief = peer_named(2), peer_named(3)
    tell(core, worker, msg.Neighbor(True, words(worker)))
    tell(core, thief, msg.Neighbor(True, words(thief, stamp=make_stamp(worker, BITS))))
    tell(core, NAMED, msg.Neighbor(True, words(NAMED, stamp=b"")))
    assert set(core.neighbours) == {worker, NAMED}


@pytest.mark.parametrize("kind", [msg.Suspect, msg.Newcomers, msg.Want, msg.ForwardJoin])
def test_who_has_shown_no_stamp_is_not_listened_to(kind: type[msg.Message]) -> None:
    core = open_core()
    worker, minted = peer_named(2), peer_named(3)
    tell(core, worker, msg.Neighbor(True, words(worker)))
    other = words(peer_named(4))
    message: msg.Message = {
        msg.Suspect: msg.Suspect((words(worker),)),
        msg.Newcomers: msg.Newcomers((other.digest,)),
        msg.Want: msg.Want((words(worker).digest.key,)),
        msg.ForwardJoin: msg.ForwardJoin(0, other),
    }[kind]
    assert tell(core, minted, message) == []
    assert core.counters["no stamp"] == 1


def test_it_is_checked_once_per_peer() -> None:
    asked: list[PeerId] = []
    core = open_core()
    check = core._verifier._is_stamped
    assert check is not None
    core._verifier._is_stamped = lambda peer, nonce: asked.append(peer) or check(peer, nonce)
    worker = peer_named(2)
    for seqno in range(5, 50):
        signed = words(worker, seqno)
        tell(
            core,
            worker,
            msg.Neighbor(True, signed) if seqno == 5 else msg.Heartbeats((signed,)),
        )
    assert asked == [worker]


def test_it_travels_only_where_there_is_one() -> None:
    plain = words(NAMED, stamp=b"")
    stamped = words(NAMED, stamp=bytes(8))
    assert len(stamped.wire) == len(plain.wire) + 10
    assert decode_heartbeat_untrusted(stamped.wire).heartbeat.profile.stamp == bytes(8)
    assert decode_heartbeat_untrusted(plain.wire).heartbeat.profile.stamp == b""


def test_we_show_ours() -> None:
    core = open_core()
    core.handle(Interest((NAMED,)), 1.0)
    core.handle(UpdateProfile(Profile(stamp=b"12345678")), 1.0)
    (effect,) = core.handle(Tick(), core.next_deadline)
    assert isinstance(effect, Send)
    assert (
        msg.decode_message_untrusted(effect.data).heartbeat.heartbeat.profile.stamp
        == b"12345678"
    )
