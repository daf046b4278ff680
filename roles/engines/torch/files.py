"""Weights on disk: read from mapped files into a model that is there, written as safetensors.

A policy is one safetensors file or a model's folder, whose weights may be in several files.
Files are mapped: the pages of a tensor come in as it is copied into the model, converted on the
way, and the system may drop them again. So loading takes the memory of the model and no more,
and a policy that is replaced is never there twice.
"""

from __future__ import annotations

import math
import mmap
import os
from pathlib import Path
from typing import Final

import torch
from torch import nn

from p2p.errors import BadMessage
from p2p.naming import derived
from roles.engines.base import EngineError
from roles.engines.torch.model import TransformerModel
from roles.engines.torch.sharding import put
from roles.models import safetensors
from roles.models.bundle import (
    CONFIG,
    DERIVED,
    HEAD,
    UNREAD_HEAD,
    WEIGHTS,
    has_own_head,
    weight_files,
)
from roles.models.config import ModelConfig, write_config
from roles.models.errors import BadModel
from roles.models.safetensors import RawTensor

_DTYPES: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Dtypes in which weights may be stored. They are converted to the dtype of the run."""


def write_atomically(path: Path, data: bytes) -> None:
    """Put ``data`` at ``path`` so that a crash leaves the old file or the new one, on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(derived(path.name, after=".partial"))
    with unfinished.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    sync_folder(path)


def sync_folder(path: Path) -> None:
    """Make the name of ``path`` survive a crash."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def encode_weights(model: nn.Module) -> bytes:
    """Return the fp32 parameters as a safetensors file, in the order of their names."""
    weights = sorted(model.named_parameters())
    return safetensors.encode(
        {
            name: RawTensor(
                "F32", tuple(weight.shape), weight.detach().cpu().contiguous().numpy().tobytes()
            )
            for name, weight in weights
        }
    )


def load_weights(model: TransformerModel, weights: Path) -> None:
    """Replace the weights of ``model`` in place by those of a file or of a folder.

    Raises `EngineError` if they are not this model's (nothing is replaced then), or if one is
    not a number: what was replaced before it stays replaced.
    """
    stored = _stored(model, weights)
    parameters = dict(model.named_parameters())
    if stored.keys() != parameters.keys():
        odd = sorted(stored.keys() ^ parameters.keys())
        raise EngineError(
            f"{weights} does not hold this model: {len(odd)} names differ, the first is"
            f" {odd[0]}"
        )
    if model.shape.tied and has_own_head(weights, model.shape):
        raise EngineError(UNREAD_HEAD.format(weights))
    for name, raw in stored.items():
        if raw.shape != tuple(parameters[name].shape) or raw.dtype not in _DTYPES:
            raise EngineError(
                f"{weights}: {name} is {raw.dtype} of shape {raw.shape}, not what the model has"
            )
    with torch.no_grad():
        for name, raw in stored.items():
            tensor = torch.frombuffer(raw.data, dtype=_DTYPES[raw.dtype]).view(raw.shape)
            # the head of a bfloat16 model has bfloat16 values, in float32
            tensor = tensor.to(model.dtype)
            put(parameters[name], tensor)
            if not all(map(math.isfinite, tensor.aminmax())):
                raise EngineError(
                    f"{weights}: {name} holds NaN or infinity, with which nothing can be"
                    " computed"
                )


def _stored(model: TransformerModel, weights: Path) -> dict[str, RawTensor]:
    """Return the tensors of all files, except those that follow from others."""
    try:
        files = weight_files(weights) if weights.is_dir() else (weights,)
    except BadModel as error:
        raise EngineError(str(error)) from error
    stored: dict[str, RawTensor] = {}
    for path in files:
        for name, raw in _mapped(path).items():
            if name in stored:
                raise EngineError(f"{path}: {name} is in another file of {weights} as well")
            if (name != HEAD or not model.shape.tied) and not name.endswith(DERIVED):
                stored[name] = raw
    return stored


def _mapped(path: Path) -> dict[str, RawTensor]:
    """Return the tensors of one file, which stays mapped as long as one of them exists."""
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            raise EngineError(f"{path} is not a weights file: it is empty")
        # a private mapping, since torch wants memory that could be written to
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    try:
        return safetensors.decode_untrusted(memoryview(pages))
    except BadMessage as error:
        raise EngineError(f"{path} is not a weights file: {error}") from error


def save_folder(
    model: TransformerModel, folder: Path, *, context: int, end_tokens: tuple[int, ...]
) -> None:
    """Write an fp32 model as a folder that transformers and vLLM load."""
    config = ModelConfig(
        shape=model.shape, context=context, dtype="float32", end_tokens=end_tokens
    )
    write_atomically(folder / WEIGHTS, encode_weights(model))
    write_atomically(folder / CONFIG, write_config(config))
