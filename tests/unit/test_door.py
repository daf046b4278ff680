"""What strangers can make a trainer or a validator hold and do has an end, and passes."""

from __future__ import annotations

import pytest

from p2p.identity import KeyPair, PeerId
from p2p.shardcast.manifest import PolicyVersion
from p2p.wire import KI
from proofs.checks import Verdict
from proofs.toploc import proof_size
from roles.contract.core.sizes import MAX_SUBMISSION, WorkSize
from roles.protocol.core.turnstile import Turnstile
from roles.protocol.core.verdict import SignedVerdict
from roles.protocol.core.window import Commitment
from roles.protocol.door import HEADS, HEADS_AT_ONCE
from roles.protocol.seats import GRACE, Seats
from roles.protocol.stats import Records
from roles.shared.reasons import MAX_REASONS, OTHER


def peers(count: int) -> list[PeerId]:
    return [KeyPair(number.to_bytes(32, "big")).peer_id for number in range(1, count + 1)]


def test_turns_go_by_network_then_by_peer_and_what_waits_has_an_end() -> None:
    door: Turnstile[str] = Turnstile(1.0, 1.0, in_all=12, per_network=6)
    mob = peers(9)
    for number in range(8):  # two peers of one network
        door.add(mob[number % 2], "net", f"mob {number}", 0.0)
    assert len(door) == 6
    assert door.add(mob[2], "", "lone", 0.0)
    assert door.add(mob[3], "other", "neighbour", 0.0)
    order = [door.next(now) for now in map(float, range(4))]
    assert order == ["mob 0", "lone", "neighbour", "mob 1"]
    assert door.next(3.5) is None
    assert door.seconds_left(3.5) == pytest.approx(0.5)
    door.remove(mob[0], "net", "mob 2")
    door.remove(mob[0], "net", "never came")
    assert [door.next(now) for now in (4.0, 5.0, 6.0, 7.0)] == ["mob 4", "mob 3", "mob 5", None]
    assert len(door) == 0
    assert all(door.add(peer, "", "one", 8.0) for peer in mob)
    assert [door.add(peer, "", "another", 8.0) for peer in mob] == [True] * 3 + [False] * 6


def test_a_newcomer_is_heard_before_those_who_had_many_turns_and_shuts_no_other_out() -> None:
    """It waited for a turn behind each of a hundred that send and send."""
    door: Turnstile[str] = Turnstile(64.0, 64.0, in_all=1024, per_network=128)
    crowd, (newcomer, *mob) = peers(100), peers(2000)[1000:]
    now = 0.0
    for number in range(2000):
        for peer in crowd[: 1 + number % 8]:
            door.add(peer, "", "crowd", now)
        now += 1 / 64
        door.next(now)
    door.add(newcomer, "", "newcomer", now)
    assert "newcomer" in [door.next(now + turn / 64) for turn in (1, 2)]
    now, names = now + 1.0, iter(mob)
    heard = []
    for turn in range(400):  # a new name for each turn
        door.add(next(names), "", "minted", now)
        heard.append(door.next(now + turn / 64))
    assert heard.count("crowd") >= 400 / 4 / 2


def test_a_full_door_makes_room_for_who_has_fewer_streams_at_it() -> None:
    """128 names filled it, and a newcomer was never heard."""
    gone: list[str] = []
    door: Turnstile[str] = Turnstile(
        HEADS, HEADS_AT_ONCE, in_all=1024, per_network=128, evict=gone.append
    )
    *mob, newcomer = peers(129)
    for number in range(8):
        assert all(door.add(peer, "", f"{number}", 0.0) for peer in mob)
    assert not door.add(mob[0], "", "9", 0.0)
    assert [door.add(newcomer, "", "newcomer", 0.0) for _ in range(4)] == [True] * 4
    assert gone == ["7"] * 4  # the newest of whoever has the most
    assert len(door) == 1024
    heard = []
    for turn in range(2 * 128):  # what is set free is theirs at once
        heard.append(door.next(turn / HEADS))
        any(door.add(peer, "", "again", turn / HEADS) for peer in mob)
    assert "newcomer" in heard[:180]


def test_one_name_shuts_no_other_of_its_network_out() -> None:
    gone: list[str] = []
    door: Turnstile[str] = Turnstile(1.0, 1.0, in_all=99, per_network=6, evict=gone.append)
    one, other = peers(2)
    for number in range(9):
        door.add(one, "net", f"{number}", 0.0)
    assert [door.add(other, "net", "other", 0.0) for _ in range(4)] == [True] * 3 + [False]
    assert gone == ["5", "4", "3"]


def test_seats_are_bounded_by_peer_and_in_all_and_come_back() -> None:
    seats, (one, other) = Seats(per_peer=2, in_all=3), peers(2)
    with seats.seat(one) as first, seats.seat(one) as second, seats.seat(one) as third:
        assert (first, second, third) == (True, True, False)
        with seats.seat(other) as theirs, seats.seat(other) as one_too_many:
            assert (theirs, one_too_many) == (True, False)
    with pytest.raises(ZeroDivisionError), seats.seat(one):
        raise ZeroDivisionError
    with seats.seat(one) as first, seats.seat(one) as second:
        assert (first, second) == (True, True)


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


def test_strangers_never_take_the_seats_of_names_in_standing() -> None:
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


def verdict(node: PeerId, kind: Verdict, reason: str = "") -> SignedVerdict:
    digest = bytes(32)
    commitment = Commitment(digest, digest, node, PolicyVersion(1), digest, 0, digest)
    return SignedVerdict(node, commitment, kind, reason, 0.0, 0.0, ())


def test_reasons_that_quote_the_sender_have_an_end() -> None:
    records, (node,) = Records(), peers(1)
    for number in range(10 * MAX_REASONS):
        records.count(verdict(node, Verdict.REJECTED, f"not msgpack: at {number}"))
    reasons = records.of(node).reasons
    assert len(reasons) == MAX_REASONS + 1
    assert sum(reasons.values()) == records.rejected == 10 * MAX_REASONS
    assert reasons[OTHER] == 9 * MAX_REASONS


def test_records_have_an_end_totals_stay_and_minted_names_displace_no_worker() -> None:
    records, (worker, *mob) = Records(max_nodes=3), peers(400)
    records.count(verdict(worker, Verdict.ACCEPTED))
    for node in mob:
        records.count(verdict(node, Verdict.REJECTED))
    assert records.of(worker).accepted == 1
    assert len(records) < 100
    for node in mob[:3]:
        records.count(verdict(node, Verdict.ACCEPTED))
    assert (records.accepted, records.rejected) == (4, 399)
    assert records.of(worker).accepted == 0
    records.count(verdict(worker, Verdict.INCONCLUSIVE, "the policy is gone"))
    assert (records.accepted, records.rejected, records.of(worker).reasons) == (4, 399, {})


def test_what_a_run_lets_a_submission_hold_is_what_its_recipe_needs() -> None:
    """The demo's are a four-hundredth of what any may have."""
    size = WorkSize(groups=8, completions=16, tokens=12, vocabulary=50, proof_values=62)
    assert size.max_submission < 23 * KI < MAX_SUBMISSION / 300
    group = 16 * (16 + 12 * 2 + proof_size(12, 64, 62))
    assert 8 * group < size.max_submission < 8 * group + 2 * KI
