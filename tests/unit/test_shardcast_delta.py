"""Deltas: exact over all bit patterns, small where little changed, and strict with foreign
bytes.
"""

from __future__ import annotations

import contextlib
import struct

import numpy as np
import pytest
import zstandard
from hypothesis import given, strategies as st

from p2p.errors import BadMessage
from p2p.shardcast import delta
from p2p.shardcast.delta import (
    Coding,
    decode_delta_untrusted,
    encode_delta,
)

KINDS = [0, 2, 4]
PATTERNS = np.arange(1 << 16, dtype=np.uint16)
PLUS_ZERO, MINUS_ZERO, ONE, INFINITY, NAN, MINUS_NAN = 0, 0x8000, 0x3F80, 0x7F80, 0x7FC1, 0xFFFF


def back_and_forth(old: bytes, new: bytes, kind: int) -> bytes:
    wire = encode_delta(old, new, kind)
    assert decode_delta_untrusted(old, wire, len(old), kind) == new
    return wire


def weights(count: int, seed: int) -> np.ndarray:
    """bf16 values of a spread of magnitudes like that of trained matrices."""
    floats = np.random.default_rng(seed).normal(0, 0.02, count).astype(np.float32)
    return (floats.view(np.uint32) >> 16).astype(np.uint16)


def updated(old: np.ndarray, rate: float, seed: int) -> np.ndarray:
    """What is left in bf16 of an update of fp32 masters by about ``rate``."""
    rng = np.random.default_rng(seed)
    hidden = rng.integers(0, 1 << 16, len(old), dtype=np.uint32)
    masters = ((old.astype(np.uint32) << 16) | hidden).view(np.float32)
    moved = masters + rng.normal(0, rate, len(old)).astype(np.float32)
    return (moved.view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("special", [PLUS_ZERO, MINUS_ZERO, ONE, INFINITY, NAN, MINUS_NAN])
def test_every_pattern_comes_from_and_goes_to_the_special_ones(special: int) -> None:
    one = np.full(1 << 16, special, np.uint16)
    back_and_forth(one.tobytes(), PATTERNS.tobytes(), 2)
    back_and_forth(PATTERNS.tobytes(), one.tobytes(), 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("every", [1, 3, 100])
def test_every_pattern_takes_every_kind_of_step(every: int, kind: int) -> None:
    """``every``: dense, between, and sparse."""
    rng = np.random.default_rng(every)
    for step in (1, 2, 0x7FFF, 0x8000, 0xFFFF):
        new = PATTERNS.copy()
        new[::every] += np.uint16(step)
        back_and_forth(PATTERNS.tobytes(), new.tobytes(), kind)
    shuffled = PATTERNS.copy()
    shuffled[::every] = rng.permutation(shuffled[::every])
    back_and_forth(PATTERNS.tobytes(), shuffled.tobytes(), kind)


@given(
    old=st.binary(max_size=300),
    changes=st.lists(st.tuples(st.integers(0, 299), st.integers(1, 255)), max_size=40),
    kind=st.sampled_from(KINDS),
)
def test_any_bytes_become_any_others(
    old: bytes, changes: list[tuple[int, int]], kind: int
) -> None:
    """Also sizes that are no multiple of the kind."""
    new = bytearray(old)
    for place, change in changes:
        if place < len(new):
            new[place] ^= change
    back_and_forth(old, bytes(new), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_segments_follow_each_other(kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sparse, unchanged, dense and full ones, and the last one shorter."""
    monkeypatch.setattr(delta, "SEGMENT", 1_024)
    old = weights(6 * 1_024 + 100, 1)
    new = old.copy()
    new[:1_024:50] += 1
    new[2_048:4_096:3] += 2
    new[4_096:6_144] = weights(2_048, 2)
    new[-1] ^= 0x8000
    back_and_forth(old.tobytes(), new.tobytes(), kind)


def test_the_coding_with_the_fewest_bytes_is_taken() -> None:
    old = weights(10_000, 1)
    few, most = old.copy(), old + np.uint16(1)
    few[::70] += 1
    noise = np.random.default_rng(3).integers(0, 1 << 16, 10_000, dtype=np.uint16)
    codings = [
        back_and_forth(old.tobytes(), new.tobytes(), 2)[0] for new in (old, few, most, noise)
    ]
    assert codings == [Coding.SAME, Coding.SPARSE, Coding.DENSE, Coding.FULL]


# The vectors of docs/protocols/shardcast.md

VECTORS = {
    "nothing changed": (2, "803f 0000 003e", "803f 0000 003e", "00"),
    "one ulp up and one down, and a zero that changes its sign": (
        2,
        "803f 0080 003e 80bf 0000 0000 0000 0000 0000 0000 0000 0000"
        "0000 0000 0000 0000 0000 0000 0000 0000 0000 0000 0000 0000",
        "813f 0080 003e 7fbf 0000 0000 0000 0000 0000 0000 0000 0000"
        "0000 0000 0000 0000 0000 0000 0000 0000 0000 0000 0080 0000",
        "01 01 00000003 00 00000003 00000003 000212 00000002 1100 00000000 00000000 00000000",
    ),
    "every opaque byte": (0, "0010ff", "ff0000", "02 00000002 1f20 00000001 10 00000000"),
    "new values": (
        2, "0000 0000", "1234 abcd", "03 00000002 12ab 00000002 34cd",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VECTORS)
def test_vectors(name: str) -> None:
    kind, old, new, wire = VECTORS[name]
    base, result = bytes.fromhex(old), bytes.fromhex(new)
    decoded = decode_delta_untrusted(base, bytes.fromhex(wire), len(base), kind)
    assert decoded.hex() == result.hex()


# Foreign bytes


def sparse(*parts: bytes, classes: bytes = b"\x01") -> bytes:
    return bytes([Coding.SPARSE]) + classes + b"".join(parts)


def word(number: int) -> bytes:
    return struct.pack(">I", number)


def bomb(size: int) -> bytes:
    frame = zstandard.ZstdCompressor().compress(bytes(size))
    return word(len(frame)) + frame


ONE_CHANGE = struct.pack(">IB", 1, 0)

MALFORMED = {
    "nothing": b"",
    "an unknown coding": b"\x04",
    "something behind": b"\x00\x00",
    "no class": sparse(ONE_CHANGE, classes=b"\x00"),
    "two classes": sparse(ONE_CHANGE * 2, classes=b"\x02\x70"),
    "more changes than values": sparse(struct.pack(">IB", 101, 0)),
    "more than half changed": sparse(struct.pack(">IB", 51, 0)),
    "a shift of 32": sparse(struct.pack(">IB", 1, 32)),
    "gaps without end": sparse(ONE_CHANGE, word(1 << 20), bomb(1 << 20)),
    "fewer gaps than changes": sparse(
        struct.pack(">IB", 2, 0), word(1), word(1), b"\x01", word(1), b"\x00", word(0) * 3
    ),
    "a change behind the end": sparse(
        ONE_CHANGE, word(1), word(1), b"\x64", word(1), b"\x00", word(0) * 3
    ),
    "a plane that decompresses to more": b"\x02" + bomb(1 << 24),
    "a plane cut short": b"\x02" + word(50) + bytes(49),
    "a plane that is no zstd": b"\x02" + word(49) + bytes(49),
    "a frame without a size": b"\x02"
    + word(19)
    + zstandard.ZstdCompressor(write_content_size=False).compress(bytes(50)).ljust(19, b"\0"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_deltas_are_bad_messages(name: str) -> None:
    with pytest.raises(BadMessage):
        decode_delta_untrusted(bytes(200), MALFORMED[name], 200, 2)


def test_a_bomb_is_not_inflated(monkeypatch: pytest.MonkeyPatch) -> None:
    inflated: list[int] = []

    class Watched:
        def __init__(self, **_: object) -> None: ...

        def decompress(self, data: bytes, **_: object) -> bytes:
            inflated.append(len(data))
            return b""

    monkeypatch.setattr(zstandard, "ZstdDecompressor", Watched)
    with pytest.raises(BadMessage, match="decompresses to 16777216"):
        decode_delta_untrusted(bytes(200), b"\x02" + bomb(1 << 24), 200, 2)
    assert inflated == []


@given(data=st.data(), every=st.sampled_from([1, 2, 5, 60]))
def test_damaged_deltas_are_refused_or_give_the_size(data: st.DataObject, every: int) -> None:
    """Damage behind the head of a valid delta reaches every line of the reader."""
    old = weights(3_000, 1)
    new = old.copy()
    new[::every] += (PATTERNS[: len(new[::every])] * np.uint16(257)) >> np.uint16(every % 13)
    wire = bytearray(encode_delta(old.tobytes(), new.tobytes(), 2))
    flips = st.lists(
        st.tuples(st.integers(0, min(150, len(wire) - 1)), st.integers(1, 255)),
        min_size=1,
        max_size=3,
    )
    for place, flip in data.draw(flips):
        wire[place] ^= flip
    del wire[data.draw(st.integers(len(wire) // 2, len(wire))) :]
    with contextlib.suppress(BadMessage):
        result = decode_delta_untrusted(old.tobytes(), bytes(wire), old.nbytes, 2)
        assert len(result) == old.nbytes
