"""The draw order: each place once, none left out."""

from __future__ import annotations

from hypothesis import given, strategies as st
from roles.validator.core.sequence import DrawSequences, PlaceState

from p2p.identity import KeyPair
from p2p.shardcast.manifest import PolicyVersion
from roles.protocol.core.assignment import REORDER_WINDOW

NODE = KeyPair(b"n" * 32).peer_id
V1, V2 = PolicyVersion(1), PolicyVersion(2)


@given(st.permutations(range(REORDER_WINDOW + 1)))
def test_any_order_within_the_window_is_fresh_once(order: list[int]) -> None:
    book = DrawSequences()
    for index in order:
        assert book.judge(NODE, V1, index) is PlaceState.FRESH
        book.fill(NODE, V1, index, b"")
        assert book.judge(NODE, V1, index) is PlaceState.REPLAYED
    assert book.judge(NODE, V1, len(order)) is PlaceState.FRESH
    assert book.forget_below(V2) == 0


def test_leaving_places_out_is_a_gap() -> None:
    book = DrawSequences()
    assert book.judge(NODE, V1, REORDER_WINDOW) is PlaceState.FRESH
    assert book.judge(NODE, V1, REORDER_WINDOW + 1) is PlaceState.GAP


def test_places_left_out_are_counted_when_the_version_is_forgotten() -> None:
    book = DrawSequences()
    for index in (0, 2, 5):
        book.fill(NODE, V1, index, b"")
    book.fill(NODE, V2, 0, b"")
    assert book.forget_below(V2) == 3
    assert book.judge(NODE, V2, 0) is PlaceState.REPLAYED


def test_versions_and_nodes_have_orders_of_their_own() -> None:
    book = DrawSequences()
    book.fill(NODE, V1, 0, b"")
    assert book.judge(NODE, V2, 0) is PlaceState.FRESH
    assert book.judge(KeyPair(b"m" * 32).peer_id, V1, 0) is PlaceState.FRESH


def test_what_a_restart_forgets_is_no_gap_and_may_still_come_once() -> None:
    book = DrawSequences()
    # nobody's fault, or on the way
    recorded = [index for index in range(30) if index not in (3, 27)]
    for index in recorded:
        book.recall(NODE, V1, index, b"")
    book.settle()
    assert book.judge(NODE, V1, 29 + REORDER_WINDOW) is PlaceState.FRESH
    assert book.judge(NODE, V1, 31 + REORDER_WINDOW) is PlaceState.GAP
    assert all(book.judge(NODE, V1, index) is PlaceState.REPLAYED for index in [*recorded, 3])
    assert book.judge(NODE, V1, 27) is PlaceState.FRESH
    book.fill(NODE, V1, 27, b"")
    assert book.judge(NODE, V1, 27) is PlaceState.REPLAYED
    assert not book.has_strayed(NODE, V1)
    assert book.forget_below(V2) == 0


@given(st.permutations(range(REORDER_WINDOW + 1)), st.integers(0, REORDER_WINDOW))
def test_a_restart_is_seen_only_by_what_is_forgotten(order: list[int], kept: int) -> None:
    before, after = DrawSequences(), DrawSequences()
    for index in order[:kept]:
        before.fill(NODE, V1, index, b"")
        after.recall(NODE, V1, index, b"")
    after.settle()
    for index in range(REORDER_WINDOW + 1):
        assert after.judge(NODE, V1, index) is before.judge(NODE, V1, index)
