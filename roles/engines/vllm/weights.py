"""The weights of a policy, a file or a folder, tensor by tensor as they lie on the disk.

vLLM's own loader would take what it finds in a folder, and say little of what does not fit.
Here all names and shapes are held against the run's model before the first weight changes.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final, Self

import torch
from torch import Tensor

from roles.contract.core.shape import ModelShape
from roles.engines.base import EngineError
from roles.models.bundle import (
    DERIVED,
    EMBEDDING,
    HEAD,
    UNREAD_HEAD,
    has_own_head,
    read_spans,
    tensor_shapes,
    weight_files,
)
from roles.models.safetensors import TensorSpan

_DTYPES: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Dtypes in which weights may be stored."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in a mapped file."""

    file: mmap.mmap
    span: TensorSpan

    def tensor(self) -> Tensor:
        """Return the tensor as it is on the disk; valid while the file is open."""
        span = self.span
        flat = torch.frombuffer(
            self.file, dtype=_DTYPES[span.dtype], count=prod(span.shape), offset=span.begin
        )
        return flat.view(span.shape)


class OpenWeights:
    """The tensors of one policy, mapped for the length of a ``with`` block. Raises
    `EngineError` when it is entered, if they are not those of the model."""

    def __init__(self, path: Path, shape: ModelShape) -> None:
        self._path = path
        self._shape = shape
        self._files = ExitStack()
        self._stored: dict[str, _Stored] = {}

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            for path in weight_files(self._path) if self._path.is_dir() else (self._path,):
                self._open(path, opened)
            self._check()
            self._files = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stored.clear()
        self._files.close()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors, layer after layer: vLLM holds back the tensors of a layer until it
        has the last one."""
        for name in tensor_shapes(self._shape):
            yield name, self._stored[name].tensor()

    def head(self) -> Tensor:
        """Return the tensor of the head, which may be the embedding."""
        return self._stored[EMBEDDING if self._shape.tied else HEAD].tensor()

    def _open(self, path: Path, opened: ExitStack) -> None:
        spans = read_spans(path)
        file = opened.enter_context(path.open("rb"))
        # a private mapping: torch wants to be able to write, and does not
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        for name, span in spans.items():
            if name in self._stored:
                raise EngineError(f"{path}: {name} is in another file as well")
            if not name.endswith(DERIVED):
                self._stored[name] = _Stored(mapped, span)

    def _check(self) -> None:
        expected = tensor_shapes(self._shape)
        if self._shape.tied:
            self._stored.pop(HEAD, None)  # some files hold the embedding twice
        if self._stored.keys() != expected.keys():
            odd = sorted(self._stored.keys() ^ expected.keys())
            raise EngineError(
                f"{self._path} does not hold this model: {len(odd)} names differ, the first is"
                f" {odd[0]}"
            )
        if self._shape.tied and has_own_head(self._path, self._shape):
            raise EngineError(UNREAD_HEAD.format(self._path))
        for name, stored in self._stored.items():
            span = stored.span
            if span.shape != expected[name] or span.dtype not in _DTYPES:
                raise EngineError(
                    f"{self._path}: {name} is {span.dtype} of shape {span.shape}, not what the"
                    " model has"
                )
            # a sum is not finite if one of its terms is not, and needs no second copy
            if not stored.tensor().sum(dtype=torch.float32).isfinite():
                raise EngineError(
                    f"{self._path}: {name} holds NaN or infinity, with which nothing can be"
                    " computed"
                )
