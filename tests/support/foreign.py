"""Bytes of strangers: anything, and messages that unpack to much more than they are."""

from __future__ import annotations

from hypothesis import strategies as st

from p2p.errors import BadMessage
from p2p.wire import KI, MIB, pack, unpack_untrusted


def listed(count: int, item: bytes) -> bytes:
    return b"\xdd" + count.to_bytes(4, "big") + item * count


BOMBS = {
    "empty lists": listed(MIB, b"\x90"),
    "empty tables": listed(MIB, b"\x80"),
    "nothing": listed(MIB, b"\xc0"),
    "lists of a few": listed(60 * KI, b"\xdc\x00\x10" + b"\xc0" * 16),
    "lists that claim a million": b"\xdd\x00\x10\x00\x00" * 1000 + b"\xc0" * MIB,
    "lists of 128 in lists": b"\xdc\x00\x80" * 1000 + b"\xc0" * MIB,
    "a table of lists": b"\xdf" + (10_000).to_bytes(4, "big") + b"\xa1a\x90" * 10_000,
    "a thousand deep": b"\x91" * 1000 + b"\xc0",
    "extensions": b"\x91\xc9\x00\x10\x00\x00\x05" + bytes(MIB),
}


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary(),
    lambda inner: st.lists(inner, max_size=12),
    max_leaves=24,
)
packed = values.map(pack) | st.sampled_from(list(BOMBS.values())).map(lambda bomb: bomb[:5000])
foreign = st.binary(max_size=200) | packed | st.lists(packed, max_size=12).map(pack)


@st.composite
def damaged(draw: st.DrawFn, valid: bytes = b"") -> bytes:
    """Bytes of strangers, or valid ones with a few bytes or any part changed."""
    whole, way = _unpacked(valid), draw(st.integers(0, 3))
    if not valid or way == 0:
        return draw(foreign)
    if whole is not None and way > 1:
        return pack(draw(_changed(whole)))
    return draw(_spoiled(valid))


@st.composite
def _spoiled(draw: st.DrawFn, valid: bytes) -> bytes:
    data = bytearray(valid)
    for _ in range(draw(st.integers(0, 4))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    end = draw(st.integers(0, len(data))) if draw(st.booleans()) else len(data)
    return bytes(data[:end]) + draw(st.binary(max_size=8))


def _unpacked(data: object) -> object:
    """What these bytes contain, or None if they are no message of our own."""
    try:
        found = unpack_untrusted(data) if isinstance(data, bytes) else None
    except BadMessage:
        return None
    return found if isinstance(found, list | dict) else None


@st.composite
def _changed(draw: st.DrawFn, value: object) -> object:
    """``value`` with one of its parts replaced, however deep, also in messages inside."""
    inner, goes_in = _unpacked(value), draw(st.integers(0, 3)) > 0
    if inner is not None and goes_in:
        return pack(draw(_changed(inner)))
    if isinstance(value, list) and value and goes_in:
        at = draw(st.integers(0, len(value) - 1))
        return [*value[:at], draw(_changed(value[at])), *value[at + 1 :]]
    if isinstance(value, dict) and value and goes_in:
        name = draw(st.sampled_from(sorted(value)))
        return {**value, name: draw(_changed(value[name]))}
    if isinstance(value, list) and draw(st.booleans()):
        return draw(
            st.sampled_from([value[:-1], value * 2, [*value, draw(values)], value * 99])
        )
    if isinstance(value, bytes) and value and draw(st.booleans()):
        return draw(_spoiled(value))
    if isinstance(value, int) and draw(st.booleans()):
        return draw(st.sampled_from([-1, 0, value + 1, 2**31, 2**53, 2**63, 2**64 - 1]))
    return draw(values)
