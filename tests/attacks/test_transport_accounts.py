"""Whose bytes, windows and streams are given up when a host holds too much of them."""

from __future__ import annotations

from p2p.identity import PeerId
from p2p.transport.core.budget import HostBudget
from p2p.transport.core.yamux import HEADER, SYN, WINDOW_UPDATE, Mux
from p2p.wire import KI, MIB
from tests.support.hosts import peer_at


class Hoard:
    """Bytes of one peer on one stream."""

    def __init__(self, budget: HostBudget, peer: PeerId, count: int) -> None:
        self.peer, self.held, self.since = peer, 0, 0.0
        self.refilled = 0.0
        self.is_evicted = False
        self._budget = budget
        budget.hold(self, count)

    def evict(self) -> None:
        self.is_evicted = True
        self._budget.forget(self)


class Accounts:
    """A budget with a clock, which counts how often it asks for the protected."""

    def __init__(self, most: int) -> None:
        self.now, self.asked = 0.0, 0
        self.budget = HostBudget(lambda: self.now, protected=self._is_protected, max_held=most)

    def _is_protected(self, peer: PeerId) -> bool:
        self.asked += 1
        return False


def test_who_pours_pays_and_not_the_slowest_reader() -> None:
    accounts = Accounts(4 * MIB)
    slow = Hoard(accounts.budget, peer_at(1), 8 * KI)
    accounts.now = accounts.budget.time = 10.0
    flood = [Hoard(accounts.budget, peer_at(2), 256 * KI) for _ in range(17)]
    assert any(one.is_evicted for one in flood)
    assert not slow.is_evicted


def test_the_peer_with_the_most_pays_however_many_streams_it_has() -> None:
    accounts = Accounts(4 * MIB)
    honest = Hoard(accounts.budget, peer_at(1), 512 * KI)
    flood = [Hoard(accounts.budget, peer_at(2), 64 * KI) for _ in range(64)]
    assert sum(one.is_evicted for one in flood) > 8
    assert not honest.is_evicted


def test_a_flood_of_small_pieces_is_not_sorted_for_each() -> None:
    accounts = Accounts(256 * KI)
    for number in range(1000):
        Hoard(accounts.budget, peer_at(number), KI)
    assert accounts.budget.evicted > 700
    assert accounts.asked < 10_000


def test_later_streams_get_some_of_the_stock_of_window() -> None:
    budget = HostBudget(lambda: 0.0)
    streams = [Hoard(budget, peer_at(number), 0) for number in range(6)]
    assert all(budget.widen(stream, stream, 4 * MIB) for stream in streams)


def opened(budget: HostBudget, streams: int) -> Mux:
    """A listener that has ended all streams of a peer that ends none."""
    mux = Mux(dialer=False, budget=budget)
    for number in range(streams):
        stream_id = 2 * number + 1
        mux.receive_data(bytearray(HEADER.pack(0, WINDOW_UPDATE, SYN, stream_id, 0)))
        mux.send_end(stream_id)
        mux.stop_receiving(stream_id, unread=False)
        while mux.data_to_send() is not None:
            pass
    return mux


def test_streams_that_peers_never_end_are_bounded_over_all_connections() -> None:
    budget = HostBudget(lambda: 0.0)
    flood = [opened(budget, 256) for _ in range(100)]
    assert budget.lingering <= 16 * KI + 100 * 32
    assert len(opened(budget, 32).stream_ids) == 32, "a few may linger anyway"
    for mux in flood:
        mux.abandon()
    assert budget.lingering == 32


def test_what_others_queue_leaves_each_connection_a_share() -> None:
    budget = HostBudget(lambda: 0.0)
    mux = Mux(dialer=True, budget=budget)
    stream_id = mux.open_stream()
    budget.outgoing = 8 * MIB
    assert mux.room(stream_id) == 16 * KI
    budget.outgoing = 0
    assert mux.room(stream_id) == 256 * KI
