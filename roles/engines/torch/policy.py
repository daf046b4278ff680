"""A policy on disk: one safetensors file, or, of a run with a base, a model's folder.

The folder is the base's with other weights: config, tokenizer and template are links to the
base's files, and each file of weights has the same tensors in the same order, in bfloat16.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from p2p.errors import BadMessage
from roles.engines import safetensors
from roles.engines.base import EngineError
from roles.engines.torch.files import encode_weights, sync_folder, write_atomically
from roles.engines.torch.model import TransformerModel

_DTYPES: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_WEIGHTS: Final = ".safetensors"


def read_policy(model: TransformerModel, policy: Path) -> None:
    """Replace the weights of ``model``. Raises `EngineError` if file or folder do not hold
    it."""
    weights = _weights(model)
    missing = set(weights)
    for path in _weight_files(policy):
        for name, stored in _stored(path):
            if name == _HEAD and model.shape.tied:
                continue
            if name not in missing or stored.shape != weights[name].shape:
                raise EngineError(f"{path} does not hold this model: {name} is not one of its")
            with torch.no_grad():
                weights[name].copy_(stored)
            missing.discard(name)
    if missing:
        raise EngineError(
            f"{policy} does not hold this model: {len(missing)} tensors are missing, the first"
            f" is {min(missing)}"
        )


def write_policy(
    model: TransformerModel, policy: Path, base: Path | None, *, is_base: bool = False
) -> None:
    """Write ``model`` at ``policy``, each file atomically: as a folder like ``base``, if there
    is one, whose own weights are taken if they are the model's (``is_base``)."""
    if base is None:
        write_atomically(policy, encode_weights(model))
        return
    policy.mkdir(parents=True, exist_ok=True)
    for path in sorted(base.iterdir()):
        if path.suffix == _WEIGHTS and not is_base:
            _write_weights(model, path, policy / path.name)
        elif path.is_file() and not path.name.startswith("."):
            _link(path, policy / path.name)
    sync_folder(policy / "any")
    sync_folder(policy)


_HEAD: Final = "lm_head.weight"


def _weights(model: TransformerModel) -> dict[str, Tensor]:
    return {name: weight.detach() for name, weight in model.named_parameters()}


def _weight_files(policy: Path) -> list[Path]:
    """The files of weights in a folder, or the file that this is."""
    if not policy.is_dir():
        return [policy]
    found = sorted(policy.glob(f"*{_WEIGHTS}"))
    if not found:
        raise EngineError(f"{policy} holds no weights: there is no {_WEIGHTS} file in it")
    return found


def _stored(path: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        tensors = safetensors.decode_untrusted(bytearray(path.read_bytes()))
    except BadMessage as error:
        raise EngineError(f"{path} is not a weights file: {error}") from error
    for name, raw in tensors.items():
        if raw.dtype not in _DTYPES:
            raise EngineError(f"{path}: {name} is {raw.dtype}, which weights are not stored in")
        yield name, torch.frombuffer(raw.data, dtype=_DTYPES[raw.dtype]).view(raw.shape)


def _write_weights(model: TransformerModel, like: Path, path: Path) -> None:
    """The tensors that ``like`` has, in its order, in bfloat16: tensor by tensor."""
    weights = _weights(model)
    names = list(_names(like))
    for name in names:
        if name == _HEAD and model.shape.tied:
            weights[name] = weights["model.embed_tokens.weight"]
    unfinished = path.with_name(path.name + ".partial")
    with unfinished.open("wb") as file:
        file.write(
            safetensors.encode_head(
                {name: ("BF16", tuple(weights[name].shape)) for name in names}
            )
        )
        for name in names:
            file.write(weights[name].bfloat16().contiguous().view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def _names(path: Path) -> Iterator[str]:
    """Of the tensors in a file, in the order of their data."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(safetensors.PREFIX_BYTES)
        try:
            more = safetensors.head_size_untrusted(prefix, size) - len(prefix)
            yield from safetensors.spans_untrusted(prefix + file.read(more), size)
        except BadMessage as error:
            raise EngineError(f"{path} is not a weights file: {error}") from error


def _link(source: Path, target: Path) -> None:
    """The same file under another name; a copy where the disk is another."""
    target.unlink(missing_ok=True)
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)
