"""Bytes of strangers: anything, and messages that unpack to much more than they are."""

from __future__ import annotations

from hypothesis import strategies as st

from p2p.wire import KI, MIB, pack


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
