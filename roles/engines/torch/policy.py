"""A policy on disk: one safetensors file, or, of a run with a base, a model's folder.

The folder is the base's with other weights: config, tokenizer and template are links to the
base's files, and each file of weights has the same tensors in the same order, in bfloat16. What
is no part of a model, such as a README, stays behind.
`roles.engines.torch.files.load_weights` reads both.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from p2p.naming import derived
from roles.contract.core.pin import WEIGHTS_SUFFIX, counts
from roles.engines.base import EngineError
from roles.engines.torch.files import encode_weights, sync_folder, write_atomically
from roles.engines.torch.model import TransformerModel
from roles.models import safetensors
from roles.models.bundle import EMBEDDING, HEAD, INDEX, WEIGHTS, read_spans
from roles.models.errors import BadModel


def write_policy(
    model: TransformerModel,
    policy: Path,
    base: Path | None,
    *,
    is_base: bool = False,
) -> None:
    """Write ``model`` at ``policy``, atomically. If there is a ``base``, the policy is a folder
    like it; with ``is_base`` its own weights are used, since they are the model's."""
    if base is None:
        write_atomically(policy, encode_weights(model))
        return
    unfinished = policy.with_name(derived(policy.name, after=".partial"))
    for folder in (unfinished, policy):  # a folder that is there is whole
        if folder.exists():
            shutil.rmtree(folder)
    unfinished.mkdir(parents=True)
    files = [path for path in sorted(base.iterdir()) if counts(path.name)]
    weights = [path for path in files if path.suffix == WEIGHTS_SUFFIX]
    if not is_base:
        for path in weights:
            _write_weights(model, _names(path), unfinished / path.name)
        if not weights:  # its owner has removed them, which only the first policy needs
            names = sorted(name for name, _ in model.named_parameters())
            _write_weights(model, names, unfinished / WEIGHTS)
    for path in files:
        is_weights = path.suffix == WEIGHTS_SUFFIX or (not weights and path.name == INDEX)
        if is_weights and not is_base:
            continue
        if path.is_file():
            _link(path, unfinished / path.name)
    sync_folder(unfinished / "its files")
    unfinished.replace(policy)
    sync_folder(policy)


def _weights(model: TransformerModel) -> dict[str, Tensor]:
    return {name: weight.detach() for name, weight in model.named_parameters()}


def _write_weights(model: TransformerModel, names: Sequence[str], path: Path) -> None:
    """Write these tensors, in this order, in bfloat16, one by one. Other tensors of a base
    (rotary frequencies, in old folders) are left out, since they follow from the shape."""
    weights = _weights(model)
    if model.shape.tied and EMBEDDING in weights:
        weights[HEAD] = weights[EMBEDDING]
    names = [name for name in names if name in weights]
    shapes = {name: ("BF16", tuple(weights[name].shape)) for name in names}
    with path.open("wb") as file:
        file.write(safetensors.encode_head(shapes))
        for name in names:
            rounded = weights[name].bfloat16().cpu().contiguous()
            file.write(rounded.view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _names(path: Path) -> list[str]:
    """Return the names of the tensors in a file, in the order of their data."""
    try:
        return list(read_spans(path))
    except BadModel as error:
        raise EngineError(str(error)) from error


def _link(source: Path, target: Path) -> None:
    """Link the file under another name, or copy it where the disk is another."""
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)
