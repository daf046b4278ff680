"""Weights files of strangers: `BadMessage` and nothing else, whatever the bytes."""

import contextlib
import json

from hypothesis import given, strategies as st

from p2p.errors import BadMessage
from roles.models.safetensors import RawTensor, decode_untrusted, encode

leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["F32", "U8", "", "x"])
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["dtype", "shape", "data_offsets", "a"]), inner, max_size=4
        )
    ),
    max_leaves=20,
)
GOOD = encode(
    {"a": RawTensor("F32", (2, 2), b"0" * 16), "b": RawTensor("BF16", (3,), b"1" * 6)}
)


@given(values, st.binary(max_size=32))
def test_any_header(header: object, data: bytes) -> None:
    text = json.dumps(header).encode()
    with contextlib.suppress(BadMessage):
        decode_untrusted(len(text).to_bytes(8, "little") + text + data)


@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    with contextlib.suppress(BadMessage):
        decode_untrusted(data)


@given(
    st.lists(
        st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=4
    )
)
def test_flipped_bytes(changes: list[tuple[int, int]]) -> None:
    data = bytearray(GOOD)
    for at, byte in changes:
        data[at] = byte
    with contextlib.suppress(BadMessage):
        decode_untrusted(data)
