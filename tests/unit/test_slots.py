"""The draw order: each place once, none left out."""

from __future__ import annotations

from hypothesis import given, strategies as st

from p2p.identity import KeyPair
from p2p.shardcast.manifest import PolicyVersion
from roles.slots import REORDER_WINDOW, Place, SlotBook

NODE = KeyPair(b"n" * 32).peer_id
V1, V2 = PolicyVersion(1), PolicyVersion(2)


@given(st.permutations(range(REORDER_WINDOW + 1)))
def test_any_order_within_the_window_is_fresh_once(order: list[int]) -> None:
    book = SlotBook()
    for index in order:
        assert book.judge(NODE, V1, index) is Place.FRESH
        book.fill(NODE, V1, index, b"")
        assert book.judge(NODE, V1, index) is Place.REPLAYED
    assert book.judge(NODE, V1, len(order)) is Place.FRESH
    assert book.forget_below(V2) == 0


def test_leaving_places_out_is_a_gap() -> None:
    book = SlotBook()
    assert book.judge(NODE, V1, REORDER_WINDOW) is Place.FRESH
    assert book.judge(NODE, V1, REORDER_WINDOW + 1) is Place.GAP


def test_places_left_out_are_counted_when_the_version_is_forgotten() -> None:
    book = SlotBook()
    for index in (0, 2, 5):
        book.fill(NODE, V1, index, b"")
    book.fill(NODE, V2, 0, b"")
    assert book.forget_below(V2) == 3
    assert book.judge(NODE, V2, 0) is Place.REPLAYED


def test_versions_and_nodes_have_orders_of_their_own() -> None:
    book = SlotBook()
    book.fill(NODE, V1, 0, b"")
    assert book.judge(NODE, V2, 0) is Place.FRESH
    assert book.judge(KeyPair(b"m" * 32).peer_id, V1, 0) is Place.FRESH
