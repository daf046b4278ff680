"""Other weights than those of a policy, for cheats: one step older, or of eight bits.

A policy is a safetensors file, or a folder with some; what it holds besides is copied.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from p2p.errors import BadMessage, ConfigError
from roles.engines.safetensors import RawTensor, decode_untrusted, encode

Change: TypeAlias = Callable[[NDArray[np.float32]], NDArray[np.float32]]
"""What becomes of the values of one tensor."""

INT8_LEVELS: Final = 127.0
"""Symmetric, one scale per row: what most eight-bit formats of weights do."""


def rewrite(source: Path, target: Path, change: Change) -> Path:
    """Write ``source`` to ``target`` with changed matrices; return ``target``. Raises
    `ConfigError` if a file of it holds no weights."""
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
    """Write a policy with weights of eight bits; both are named as `Disk.locate` does."""
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
    """The values as eight bits hold them."""
    highest = np.abs(values).max(axis=-1, keepdims=True)
    scale = np.where(highest > 0, highest / INT8_LEVELS, 1.0).astype(np.float32)
    return np.ascontiguousarray(np.round(values / scale) * scale, dtype=np.float32)


def one_step_away(rate: float, seed: int = 0) -> Change:
    """A change of the size that one step of Adam makes: each value moves by about the rate,
    one way or the other, whatever its gradient."""
    rng = np.random.default_rng(seed)

    def move(values: NDArray[np.float32]) -> NDArray[np.float32]:
        signs = rng.integers(0, 2, values.shape).astype(np.float32) * 2 - 1
        return np.ascontiguousarray(values + np.float32(rate) * signs, dtype=np.float32)

    return move
