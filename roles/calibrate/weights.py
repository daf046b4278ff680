"""Other weights than those of a policy, for cheats: one step older, or of eight or four bits.

A policy is a safetensors file, or a folder with some; what it holds besides is copied.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from p2p.errors import BadMessage, ConfigError
from roles.models.safetensors import RawTensor, decode_untrusted, encode

Change: TypeAlias = Callable[[NDArray[np.float32]], NDArray[np.float32]]
"""A function that changes the values of one tensor."""

INT8_LEVELS: Final = 127.0
"""Symmetric, one scale per row: what most eight-bit formats of weights do."""
INT4_LEVELS: Final = 7.0
"""Largest level of an integer of four bits, as `INT8_LEVELS` is of eight."""
FP8_HIGHEST: Final = 448.0
"""Largest number of float8 e4m3, in which GPUs multiply weights; a scale per row brings a row's
highest value here.
"""
FP8_LOWEST_EXPONENT: Final = -6
"""Lowest exponent of float8 e4m3: below it steps grow no finer."""
FP8_MANTISSA: Final = 3
"""Bits of float8 e4m3: eight steps from one power of two to the next."""


def rewrite(source: Path, target: Path, change: Change) -> Path:
    """Write ``source`` to ``target`` with changed matrices; return ``target``.

    Raises:
        ConfigError: A file of ``source`` holds no weights.
    """
    if source.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        _rewrite_file(source, target, change)
        return target
    target.mkdir(parents=True)
    for path in sorted(source.iterdir()):
        if path.suffix == ".safetensors":
            _rewrite_file(path, target / path.name, change)
        elif path.is_file():
            shutil.copyfile(path, target / path.name)
    return target


def round_policy(source: str, target: str) -> None:
    """Write a policy with weights of eight bits. Both paths are those of the operating
    system."""
    rewrite(Path(source), Path(target), to_int8)


def _rewrite_file(source: Path, target: Path, change: Change) -> None:
    try:
        tensors = decode_untrusted(source.read_bytes())
    except BadMessage as error:
        raise ConfigError(f"{source} is no safetensors file: {error}") from error
    target.write_bytes(encode({name: _changed(one, change) for name, one in tensors.items()}))


def _changed(tensor: RawTensor, change: Change) -> RawTensor:
    """Vectors, scales of norms above all, stay: no format of weights rounds them."""
    if len(tensor.shape) < 2 or tensor.dtype not in ("F32", "BF16"):
        return tensor
    if tensor.dtype == "F32":
        values = np.frombuffer(tensor.data, dtype="<f4").reshape(tensor.shape)
        return RawTensor("F32", tensor.shape, change(values).astype("<f4").tobytes())
    bits = np.frombuffer(tensor.data, dtype="<u2").astype(np.uint32) << np.uint32(16)
    changed = change(bits.view(np.float32).reshape(tensor.shape)).view(np.uint32)
    rounded = (changed + 0x7FFF + (changed >> 16 & 1)) >> 16
    return RawTensor("BF16", tensor.shape, rounded.astype("<u2").tobytes())


def to_int8(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the values rounded to integers of eight bits."""
    return _to_integers(values, INT8_LEVELS)


def to_int4(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the values rounded to integers of four bits."""
    return _to_integers(values, INT4_LEVELS)


def to_fp8(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the values rounded to floats of eight bits."""
    scale = _scale(values, FP8_HIGHEST)
    scaled = values / scale
    _, exponents = np.frexp(scaled)  # of a number in [0.5, 1)
    places = np.maximum(exponents - 1, FP8_LOWEST_EXPONENT) - FP8_MANTISSA
    rounded = np.ldexp(np.round(np.ldexp(scaled, -places)), places)
    return np.ascontiguousarray(rounded * scale, dtype=np.float32)


def _to_integers(values: NDArray[np.float32], levels: float) -> NDArray[np.float32]:
    scale = _scale(values, levels)
    return np.ascontiguousarray(np.round(values / scale) * scale, dtype=np.float32)


def _scale(values: NDArray[np.float32], highest: float) -> NDArray[np.float32]:
    """Return each row's divisor, which brings all its values to at most ``highest``."""
    found = np.abs(values).max(axis=-1, keepdims=True)
    return np.where(found > 0, found / highest, 1.0).astype(np.float32)


def one_step_away(rate: float, seed: int = 0) -> Change:
    """Return a change as large as one step of Adam.

    Each value moves by about the rate, one way or the other, whatever its gradient.
    """
    rng = np.random.default_rng(seed)

    def move(values: NDArray[np.float32]) -> NDArray[np.float32]:
        signs = rng.integers(0, 2, values.shape).astype(np.float32) * 2 - 1
        return np.ascontiguousarray(values + np.float32(rate) * signs, dtype=np.float32)

    return move


def low_rank(share: float, rank: int = 8) -> Change:
    """Return the change of an adapter of this rank, with ``share`` of each matrix's norm.

    The change of the same matrix is always the same.
    """

    def adapt(values: NDArray[np.float32]) -> NDArray[np.float32]:
        rows = values.reshape(len(values), -1)
        rng = np.random.default_rng(crc32(np.ascontiguousarray(rows[0]).tobytes()))
        left = rng.standard_normal((len(rows), rank), dtype=np.float32)
        change = left @ rng.standard_normal((rank, rows.shape[1]), dtype=np.float32)
        change *= np.float32(share * np.linalg.norm(rows) / np.linalg.norm(change))
        return np.ascontiguousarray((rows + change).reshape(values.shape))

    return adapt
