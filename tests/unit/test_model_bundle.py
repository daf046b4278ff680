"""A model's folder: pins, shards, and weights that are numbers."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from p2p.errors import BadMessage
from roles.models.bundle import (
    check_folder,
    check_weights,
    pin_folder,
    read_config,
    read_spans,
    weight_files,
)
from roles.models.errors import BadModel
from roles.models.safetensors import DTYPE_BYTES, RawTensor, decode_untrusted, encode
from tests.model_folders import LLAMA, make_folder, random_weights, write_weights

SHARD = "model-00002-of-00003.safetensors"
INDEX = "model.safetensors.index.json"


def test_a_missing_altered_or_further_file_is_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", shards=3)
    pins, shard = pin_folder(folder), folder / SHARD
    whole = shard.read_bytes()
    for altered in (whole[:-1] + bytes([whole[-1] ^ 1]), whole + b"\0"):
        shard.write_bytes(altered)
        with pytest.raises(BadModel, match=f"{SHARD} is not the pinned file"):
            check_folder(folder, pins)
    shard.unlink()
    for look in (lambda: check_folder(folder, pins), lambda: pin_folder(folder)):
        with pytest.raises(BadModel, match=f"lacks {SHARD}"):
            look()
    shard.write_bytes(whole)
    (folder / "chat_template.jinja").write_text("mine")
    with pytest.raises(BadModel, match=r"chat_template.jinja is not among the pinned files"):
        check_folder(folder, pins)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_without_its_main_files_is_no_model(tmp_path: Path, name: str) -> None:
    folder = make_folder(tmp_path / "m")
    (folder / name).unlink()
    with pytest.raises(BadModel, match=f"lacks {name}"):
        pin_folder(folder)


def test_weights_of_two_kinds_are_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    with pytest.raises(BadModel, match="no folder"):
        pin_folder(tmp_path / "nothing")
    (folder / "consolidated.safetensors").write_bytes(b"")
    with pytest.raises(BadModel, match=r"consolidated.safetensors is none of"):
        weight_files(folder)
    (folder / "consolidated.safetensors").unlink()
    (folder / INDEX).write_text("{}")
    with pytest.raises(BadModel, match="both"):
        weight_files(folder)


@pytest.mark.parametrize(
    ("dtype", "value", "size"),
    [
        ("BF16", "c07f", 2), ("BF16", "80ff", 2), ("F16", "007c", 2), ("F16", "017e", 2),
        ("F32", "0000c07f", 4), ("F32", "000080ff", 4),
    ],
)  # fmt: skip
def test_weights_that_are_no_numbers_are_refused(
    tmp_path: Path, dtype: str, value: str, size: int
) -> None:
    folder = make_folder(tmp_path / "m")
    shape = (LLAMA.width,)
    data = bytearray(LLAMA.width * size)
    tensors = random_weights(LLAMA)
    config = read_config(folder)
    tensors["model.norm.weight"] = RawTensor(dtype, shape, bytes(data))
    write_weights(folder, tensors)
    check_weights(folder, config)
    data[5 * size : 6 * size] = bytes.fromhex(value)
    tensors["model.norm.weight"] = RawTensor(dtype, shape, bytes(data))
    write_weights(folder, tensors)
    with pytest.raises(BadModel, match=r"model.norm.weight is infinite or not a number .* 5:"):
        check_weights(folder, config)


def test_tensors_must_be_those_of_the_configuration(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    config, tensors = read_config(folder), random_weights(LLAMA)
    norm, head = tensors.pop("model.norm.weight"), tensors["model.embed_tokens.weight"]
    integers = RawTensor("I32", norm.shape, bytes(4 * LLAMA.width))
    for wrong, said in (
        ({}, r"lacks 1 tensors .* model.norm.weight"),
        ({"model.norm.weight": RawTensor("BF16", (1,), b"00")}, r"is BF16 of shape \(1,\)"),
        ({"model.norm.weight": integers}, r"model.norm.weight is I32"),
        ({"model.norm.weight": norm, "adapter": norm}, "'adapter' is no tensor of the model"),
    ):
        write_weights(folder, {**tensors, **wrong})
        with pytest.raises(BadModel, match=said):
            check_weights(folder, config)
    write_weights(folder, {**tensors, "model.norm.weight": norm, "lm_head.weight": head})
    check_weights(folder, config)


def test_the_index_is_held_against_the_headers(tmp_path: Path) -> None:
    folder, name = make_folder(tmp_path / "m", shards=3), "model.norm.weight"
    config, index = read_config(folder), json.loads((folder / INDEX).read_text())
    places = index.pop("weight_map")
    right = places.pop(name)
    other = next(shard for shard in places.values() if shard != right)
    extra = "model-extra.safetensors"
    for change, said in (
        ({name: other}, f"'{name}' is in {other} by the index, in {right}"),
        ({}, f"'{name}' is in no file by the index"),
        ({name: right, "more": extra}, f"'{name}' is in"),
    ):
        if extra in change.values():
            (folder / extra).write_bytes(encode({name: random_weights(LLAMA)[name]}))
        table = {**index, "weight_map": {**places, **change}}
        (folder / INDEX).write_text(json.dumps(table))
        with pytest.raises(BadModel, match=said):
            check_weights(folder, config)


def test_only_the_header_of_a_weights_file_is_read(tmp_path: Path) -> None:
    """A file of 10 GB: sparse, so that it takes no disk here."""
    path = tmp_path / "model.safetensors"
    rows = 5 * 10**9 // 1000
    header = json.dumps(
        {"a": {"dtype": "BF16", "shape": [rows, 1000], "data_offsets": [0, 2 * rows * 1000]}}
    ).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2 * rows * 1000)
    (span,) = read_spans(path).values()
    assert (span.shape, span.begin) == ((rows, 1000), 8 + len(header))
    with path.open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(BadModel, match="cut off"):
        read_spans(path)
    path.write_bytes(b"\xff" * 8)
    with pytest.raises(BadModel, match="does not fit"):
        read_spans(path)


# The container of weights


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


def container(header: object, data: bytes) -> bytes:
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
        container([], b""),
        container({"a": 1}, b""),
        container({"a": entry(0, 4)}, b"abc"),  # cut off
        container({"a": entry(0, 3)}, b"abcd"),  # something follows
        container({"a": entry(0, 2), "b": entry(1, 3)}, b"abc"),  # overlap
        container({"a": entry(0, 1), "b": entry(2, 3)}, b"abc"),  # hole
        container({"a": entry(0, 4, [3])}, b"abcd"),
        container({"a": entry(0, 4, [-2, -2])}, b"abcd"),
        container({"a": entry(0, 4, [True, 4])}, b"abcd"),
        container({"a": entry(0, 4, [4.0])}, b"abcd"),
        container({"a": entry(0, 4, [1] * 9 + [4])}, b"abcd"),
        container({"a": entry(0, 4, dtype="F8")}, b"abcd"),
        container({"a": {**entry(0, 4), "dtype": ["U8"]}}, b"abcd"),
        container({"a": {**entry(0, 4), "data_offsets": [0, 2, 4]}}, b"abcd"),
    ],
)
def test_what_is_refused(data: bytes) -> None:
    with pytest.raises(BadMessage):
        decode_untrusted(data)


def test_a_tensor_has_the_bytes_of_its_shape() -> None:
    with pytest.raises(ValueError, match="8 bytes, not 7"):
        RawTensor("F32", (2,), b"1234567")
