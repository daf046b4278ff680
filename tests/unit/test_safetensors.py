"""The container: round trips, what is refused, and what others write."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import given, strategies as st

from p2p.errors import BadMessage
from roles.models.safetensors import DTYPE_BYTES, RawTensor, decode_untrusted, encode

shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def raw_tensors(draw: st.DrawFn) -> RawTensor:
    dtype = draw(st.sampled_from(sorted(DTYPE_BYTES)))
    shape = draw(shapes)
    size = DTYPE_BYTES[dtype]
    for length in shape:
        size *= length
    return RawTensor(dtype, shape, draw(st.binary(min_size=size, max_size=size)))


@given(
    st.dictionaries(
        st.text(max_size=8).filter(lambda name: name != "__metadata__"), raw_tensors()
    )
)
def test_round_trip(tensors: dict[str, RawTensor]) -> None:
    data = encode(tensors)
    back = decode_untrusted(data)
    assert {name: (t.dtype, t.shape, bytes(t.data)) for name, t in back.items()} == {
        name: (t.dtype, t.shape, bytes(t.data)) for name, t in tensors.items()
    }
    assert int.from_bytes(data[:8], "little") % 8 == 0


def file(header: object, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(begin: int, end: int, shape: Sequence[object] | None = None, dtype: str = "U8"):
    sizes = [end - begin] if shape is None else list(shape)
    return {"dtype": dtype, "shape": sizes, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8,
        b"\x00" * 8,
        file([], b""),
        file({"a": 1}, b""),
        file({"a": entry(0, 4)}, b"abc"),  # cut off
        file({"a": entry(0, 3)}, b"abcd"),  # something follows
        file({"a": entry(0, 2), "b": entry(1, 3)}, b"abc"),  # overlap
        file({"a": entry(0, 1), "b": entry(2, 3)}, b"abc"),  # hole
        file({"a": entry(0, 4, [3])}, b"abcd"),
        file({"a": entry(0, 4, [-2, -2])}, b"abcd"),
        file({"a": entry(0, 4, [True, 4])}, b"abcd"),
        file({"a": entry(0, 4, [4.0])}, b"abcd"),
        file({"a": entry(0, 4, [1] * 9 + [4])}, b"abcd"),
        file({"a": entry(0, 4, dtype="F8")}, b"abcd"),
        file({"a": {**entry(0, 4), "dtype": ["U8"]}}, b"abcd"),
        file({"a": {**entry(0, 4), "data_offsets": [0, 2, 4]}}, b"abcd"),
    ],
)
def test_what_is_refused(data: bytes) -> None:
    with pytest.raises(BadMessage):
        decode_untrusted(data)


def test_a_tensor_has_the_bytes_of_its_shape() -> None:
    with pytest.raises(ValueError, match="8 bytes, not 7"):
        RawTensor("F32", (2,), b"1234567")
