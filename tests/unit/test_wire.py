"""Varints, frames, and msgpack read with distrust."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from p2p.errors import BadMessage
from p2p.wire import (
    decode_varint_untrusted,
    encode_varint,
    fields_untrusted,
    pack,
    unpack_untrusted,
)


@given(st.integers(0, 2**63 - 1), st.binary(max_size=3))
def test_varints_go_both_ways(number: int, behind: bytes) -> None:
    data = encode_varint(number)
    assert decode_varint_untrusted(data + behind) == (number, len(data))
    assert all(decode_varint_untrusted(data[:cut]) is None for cut in range(len(data)))


@pytest.mark.parametrize("data", [b"\x80\x00", b"\xff" * 9, b"\x80" * 20])
def test_long_or_padded_varints_are_bad(data: bytes) -> None:
    with pytest.raises(BadMessage):
        decode_varint_untrusted(data)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.binary(max_size=9)
    | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=20,
)


@given(values)
def test_msgpack_goes_both_ways(value: object) -> None:
    assert unpack_untrusted(pack(value)) == value


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x91" * 17 + b"\x00",
        b"\xdd\xff\xff\xff\xff",
        b"\x00\x00",
        b"\x81\x01\x02\x03",
    ],
)
def test_what_is_no_msgpack_is_a_bad_message(data: bytes) -> None:
    with pytest.raises(BadMessage):
        unpack_untrusted(data)


@pytest.mark.parametrize(
    "value",
    [
        [0] * 7,
        [[0] * 3, [0] * 3],
        [[], [], [], []],
        [{"a": 0, "b": 0}, {"c": 0}, []],
        {"a": [0] * 6},
    ],
)
def test_items_are_counted_in_all_lists_and_tables_together(value: object) -> None:
    behind = b"x" * 10  # data no longer than the limit need not be counted
    with pytest.raises(BadMessage):
        unpack_untrusted(pack([value, behind]), max_items=7)
    assert unpack_untrusted(pack([value, behind]), max_items=14, max_list=8) == [value, behind]


def test_a_list_and_the_nesting_have_limits_of_their_own() -> None:
    assert unpack_untrusted(pack([[1, 2, 3]]), max_list=3, max_depth=2) == [[1, 2, 3]]
    with pytest.raises(BadMessage):
        unpack_untrusted(pack([[1, 2, 3]]), max_list=2)
    with pytest.raises(BadMessage, match="deep"):
        unpack_untrusted(pack([[1, 2, 3]]), max_depth=1)


def test_fields_have_the_types_asked_for() -> None:
    assert fields_untrusted([1, b"x"], int, bytes, what="thing") == [1, b"x"]
    for value in ([1], [1, "x"], [True, b"x"], "no list", {}):
        with pytest.raises(BadMessage, match="thing"):
            fields_untrusted(value, int, bytes, what="thing")
