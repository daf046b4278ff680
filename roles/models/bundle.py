"""A model's folder as a whole: which files count, their pins, and whether the weights fit.

A run pins every file that changes what is computed or asked. What lies beside them (a README, a
licence, other formats of the same weights) is neither pinned nor read. A file that counts and
is not pinned is refused like one that was altered: a ``chat_template.jinja`` that is put beside
a pinned ``tokenizer_config.json`` would take its place.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from p2p.errors import BadMessage
from roles.contract.core.pin import FILE_NAME, OPTIONAL, REQUIRED, FilePin
from roles.contract.core.shape import ModelShape
from roles.models.config import MAX_CONFIG, ModelConfig, read_config_untrusted
from roles.models.errors import BadModel
from roles.models.files import check_regular, json_object_untrusted, read_bounded
from roles.models.safetensors import (
    PREFIX_BYTES,
    TensorSpan,
    head_size_untrusted,
    spans_untrusted,
)

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.unsignedinteger[Any]]

CONFIG: Final = "config.json"
GENERATION_CONFIG: Final = "generation_config.json"
WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"

MAX_INDEX: Final = 16 * 1024 * 1024
"""Bytes of the index: 100 a tensor, so 160,000 tensors, as many as a header may have."""
SLICE: Final = 4 * 1024 * 1024
"""Bytes of a tensor that are looked through at a time, so that the copies of a comparison stay
small: 3 to 4 GB/s of CPU time at any size from 256 KiB to 64 MiB."""

_EXPONENTS: Final[dict[str, tuple[np.dtype[np.unsignedinteger[Any]], int]]] = {
    "F32": (np.dtype("<u4"), 0x7F80_0000),
    "BF16": (np.dtype("<u2"), 0x7F80),
    "F16": (np.dtype("<u2"), 0x7C00),
}
"""Maps each dtype that engines load to an integer type and the bits of the exponent. All these
bits are set in a number that is infinite or NaN, and in no other.
"""
EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"
"""Name of the head, which some files hold as a copy of the embedding although it is tied.
Nothing reads it then.
"""
UNREAD_HEAD: Final = (
    "{} has a head of its own, and by the run the head is the embedding: its owner must sign"
    " the run again, from this base as it is"
)
"""Error of an engine about such weights in a run whose shape is tied."""
DERIVED: Final = (
    *(f"rotary_emb.{name}" for name in ("inv_freq", "cos_cached", "sin_cached")),
    ".attention.bias",  # the causal mask of old GPT-NeoX files
    ".attention.masked_bias",
)
"""Ends of the names of numbers that follow from the configuration, which old files hold.
Nothing reads them, and no policy has them."""


def pin_folder(folder: Path) -> tuple[FilePin, ...]:
    """Return a pin for each file that counts, by name.

    Raises:
        BadModel: A file is missing or cannot be used.
    """
    return tuple(_pin(path) for path in _counted(folder))


def check_folder(folder: Path, pins: Sequence[FilePin]) -> None:
    """Check a folder against its pins.

    Raises:
        BadModel: A file is missing, altered, or not pinned. The message names the first.
    """
    for pin in pins:
        path = folder / pin.name
        if not path.is_file():
            raise BadModel(
                f"{folder} lacks {pin.name} ({pin.size:,} bytes), which is pinned: fetch the"
                " folder again"
            )
        if path.stat().st_size != pin.size or _digest(path) != pin.digest:
            raise BadModel(
                f"{path} is not the pinned file: its content has another digest; fetch the"
                " folder again"
            )
    surplus = {path.name for path in _counted(folder)} - {pin.name for pin in pins}
    if surplus:
        raise BadModel(f"{folder / min(surplus)} is not among the pinned files: remove it")


def read_config(folder: Path) -> ModelConfig:
    """Return the folder's configuration. If the weights hold a head although ``config.json``
    ties it to the embedding, the configuration has this head, with which the model was trained.
    Raises `BadModel`."""
    path = folder / CONFIG
    try:
        config = read_config_untrusted(read_bounded(path, MAX_CONFIG))
    except BadMessage as error:
        raise BadModel(f"{path} cannot be used: {error}") from None
    if not config.shape.tied or not has_own_head(folder, config.shape):
        return config
    note = (
        f"the weights have a head ({HEAD}) that is not the embedding, though {CONFIG} says"
        " tie_word_embeddings: the head is used; other programs may drop it, unless you set"
        " tie_word_embeddings to false there"
    )
    return replace(config, shape=replace(config.shape, tied=False), notes=(*config.notes, note))


def has_own_head(weights: Path, shape: ModelShape) -> bool:
    """Return True if the weights, a file or a folder, have a head with other numbers than the
    embedding."""
    try:
        found = {
            name: (path, span)
            for path in (weight_files(weights) if weights.is_dir() else (weights,))
            for name, span in read_spans(path).items()
            if name in (EMBEDDING, HEAD)
        }
    except BadModel:
        return False  # `check_weights` says what is wrong
    size = (shape.vocabulary, shape.width)
    if len(found) < 2 or found[EMBEDDING][1].shape != size:
        return False
    if any(span.shape != size or span.dtype not in _EXPONENTS for _, span in found.values()):
        return True
    step = max(1, SLICE // (4 * shape.width))

    def numbers(name: str, start: int) -> Floats:
        path, span = found[name]
        kind, _ = _EXPONENTS[span.dtype]
        stored = np.memmap(path, kind, mode="r", offset=span.begin, shape=size)
        return read_floats(span.dtype, stored[start : start + step].tobytes())

    return not all(
        np.array_equal(numbers(EMBEDDING, start), numbers(HEAD, start))
        for start in range(0, shape.vocabulary, step)
    )


def read_floats(dtype: str, data: bytes) -> Floats:
    """Return numbers of a safetensors dtype as float32."""
    if dtype == "BF16":  # numpy has none: the upper halves of float32
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, {"F32": "<f4", "F16": "<f2"}[dtype]).astype(np.float32)


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the weights files by name: one, or the shards that the index names.

    Raises:
        BadModel: One of them is missing, or there are other safetensors files.
    """
    whole, index = folder / WEIGHTS, folder / INDEX
    if whole.exists() and index.exists():
        raise BadModel(f"{folder} has both {WEIGHTS} and {INDEX}: remove one of them")
    if index.exists():
        names = sorted(set(_weight_map(index).values()))
    else:
        names = [WEIGHTS]
    for name in names:
        if not (folder / name).is_file():
            raise BadModel(
                f"{folder} lacks {name}: the weights are {WEIGHTS}, or shards with {INDEX}"
            )
    surplus = sorted({path.name for path in folder.glob("*.safetensors")} - set(names))
    if surplus:
        raise BadModel(
            f"{folder / surplus[0]} is none of the model's weights files, and engines would"
            " read it: remove it"
        )
    return tuple(folder / name for name in names)


def check_weights(folder: Path, config: ModelConfig) -> None:
    """Check all weights: each tensor of this model once, as the index says, and all numbers
    finite.

    Every byte is read, a few MiB at a time.

    Raises:
        BadModel: They are not so.
    """
    # what else an architecture of transformers has, the engine says when it loads it
    shapes = None if config.shape.architecture else tensor_shapes(config.shape)
    places: dict[str, str] = {}
    for path in weight_files(folder):
        for name, span in read_spans(path).items():
            if name in places:
                raise BadModel(f"{path}: {name!r:.80} is in {places[name]} as well")
            places[name] = path.name
            expected = span.shape if shapes is None else shapes.get(name)
            _check_tensor(path, name, span, expected)
    lacking = sorted(() if shapes is None else shapes.keys() - places.keys())
    if lacking:
        raise BadModel(
            f"{folder} lacks {len(lacking)} tensors of the model that {CONFIG} describes, the"
            f" first is {lacking[0]}"
            + (
                f"; a model without one says tie_word_embeddings in {CONFIG}"
                * (HEAD in lacking)
            )
        )
    index = folder / INDEX
    if index.exists():
        _check_index(index, places)


def read_spans(path: Path) -> dict[str, TensorSpan]:
    """Return the place of each tensor in a weights file, reading only its header.

    Raises:
        BadModel: The header is wrong.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(PREFIX_BYTES)
            head = prefix + file.read(head_size_untrusted(prefix, size) - PREFIX_BYTES)
        return spans_untrusted(head, size)
    except BadMessage as error:
        raise BadModel(f"{path} is no weights file: {error}") from None
    except OSError as error:
        raise BadModel(f"{path} cannot be read: {error.strerror}") from None


def tensor_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of the model, under Hugging Face's names."""
    width, head = shape.width, shape.head_width
    rows = {"q": shape.query_heads * head, "k": shape.key_heads * head}
    rows["v"] = rows["k"]
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
        "self_attn.o_proj.weight": (width, rows["q"]),
        "mlp.gate_proj.weight": (shape.feed_forward, width),
        "mlp.up_proj.weight": (shape.feed_forward, width),
        "mlp.down_proj.weight": (width, shape.feed_forward),
    }
    for one, height in rows.items():
        layer[f"self_attn.{one}_proj.weight"] = (height, width)
        if shape.qkv_bias:
            layer[f"self_attn.{one}_proj.bias"] = (height,)
    if shape.qk_norm:
        layer |= {f"self_attn.{one}_norm.weight": (head,) for one in "qk"}
    tensors: dict[str, tuple[int, ...]] = {
        EMBEDDING: (shape.vocabulary, width),
        "model.norm.weight": (width,),
    }
    if not shape.tied:
        tensors[HEAD] = (shape.vocabulary, width)
    for number in range(shape.layers):
        tensors |= {f"model.layers.{number}.{name}": size for name, size in layer.items()}
    return tensors


def _counted(folder: Path) -> list[Path]:
    """Return the files of the folder that count, by name.

    Raises:
        BadModel: A required file is missing.
    """
    if not folder.is_dir():
        raise BadModel(f"{folder} is no folder: a model is a folder in Hugging Face's layout")
    for name in REQUIRED:
        if not (folder / name).is_file():
            raise BadModel(f"{folder} lacks {name}: it is no model's folder")
    small = [folder / name for name in (*REQUIRED, *OPTIONAL) if (folder / name).exists()]
    for path in small:
        check_regular(path)
    return sorted([*small, *weight_files(folder)])


def _pin(path: Path) -> FilePin:
    try:
        return FilePin(name=path.name, size=path.stat().st_size, digest=_digest(path))
    except ValueError as error:
        raise BadModel(f"{path} cannot be pinned: {error}") from None


def _digest(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        raise BadModel(f"{path} cannot be read: {error.strerror}") from None


def _weight_map(index: Path) -> dict[str, str]:
    """Return the shard of each tensor, by the index.

    Raises:
        BadModel: The index is wrong.
    """
    try:
        table = json_object_untrusted(read_bounded(index, MAX_INDEX)).get("weight_map")
        if not isinstance(table, dict) or not table:
            raise BadMessage("it has no weight_map")
        for shard in {str(one): None for one in table.values()}:
            if not FILE_NAME.fullmatch(shard) or not shard.endswith(".safetensors"):
                raise BadMessage(f"{shard!r:.40} is no name of a safetensors file")
    except BadMessage as error:
        raise BadModel(f"{index} cannot be used: {error}") from None
    return {name: str(shard) for name, shard in table.items()}


def _check_index(index: Path, places: dict[str, str]) -> None:
    named = _weight_map(index)
    for name in sorted(named.keys() | places.keys()):
        if not name.endswith(DERIVED) and named.get(name) != places.get(name):
            raise BadModel(
                f"{index}: {name!r:.80} is in {named.get(name, 'no file')} by the index, in"
                f" {places.get(name, 'no file')} by the headers"
            )


def _check_tensor(
    path: Path, name: str, span: TensorSpan, expected: tuple[int, ...] | None
) -> None:
    if name.endswith(DERIVED):
        return
    if expected is None:
        if name == HEAD:
            return
        raise BadModel(
            f"{path}: {name!r:.80} is no tensor of the model that {CONFIG} describes"
        )
    if span.shape != expected or span.dtype not in _EXPONENTS:
        raise BadModel(
            f"{path}: {name} is {span.dtype} of shape {span.shape}, and {CONFIG} describes"
            f" numbers of shape {expected}, as {', '.join(_EXPONENTS)}"
        )
    for start, numbers in _slices(path, span):
        _, exponent = _EXPONENTS[span.dtype]
        odd = np.flatnonzero((numbers & exponent) == exponent)
        if odd.size:
            raise BadModel(
                f"{path}: {name} is infinite or not a number at its element"
                f" {start + int(odd[0]):,}: a model with it computes nothing"
            )


def _slices(path: Path, span: TensorSpan) -> Iterator[tuple[int, Integers]]:
    """Yield the tensor's numbers as integers, some MiB at a time, each with its first index."""
    kind, _ = _EXPONENTS[span.dtype]
    count = math.prod(span.shape)
    mapped = np.memmap(path, dtype=kind, mode="r", offset=span.begin, shape=(count,))
    for start in range(0, count, SLICE // kind.itemsize):
        yield start, mapped[start : start + SLICE // kind.itemsize]
