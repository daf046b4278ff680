"""Weights as safetensors, in folders that transformers loads, written atomically and synced."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Final

import torch
from torch import nn

from p2p.errors import BadMessage
from roles.engines import safetensors
from roles.engines.base import EngineError
from roles.engines.config import ModelShape
from roles.engines.safetensors import RawTensor
from roles.engines.torch.model import TransformerModel

_DTYPES: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""What weights may be stored in; we compute in fp32."""


def write_atomically(path: Path, data: bytes) -> None:
    """Put ``data`` at ``path`` so that a crash leaves the old file or the new one, on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".partial")
    with unfinished.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    sync_folder(path)


def write_generation(path: Path, previous: Path, data: bytes) -> None:
    """As `write_atomically`, but what was at ``path`` is kept at ``previous``."""
    if path.exists():
        path.replace(previous)
        sync_folder(previous)
    write_atomically(path, data)


def sync_folder(path: Path) -> None:
    """Make the name of ``path`` survive a crash."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


_SEAL: Final = b"shoal sealed file 1\n"
_DIGEST_BYTES: Final = 32
"""SHA-256."""


def seal(data: bytes) -> bytes:
    """``data`` behind its SHA-256, so that `open_seal` notices a single flipped bit."""
    return _SEAL + hashlib.sha256(data).digest() + data


def open_seal(sealed: bytes) -> bytes:
    """What `seal` was given. Raises `EngineError` if a bit of it has changed since."""
    body = sealed[len(_SEAL) + _DIGEST_BYTES :]
    if not sealed.startswith(_SEAL):
        raise EngineError("it does not begin as a checkpoint does")
    if hashlib.sha256(body).digest() != sealed[len(_SEAL) : len(_SEAL) + _DIGEST_BYTES]:
        raise EngineError("its content does not have the digest that it was written with")
    return body


def encode_weights(model: nn.Module) -> bytes:
    """The fp32 parameters as a safetensors file, in the order of their names."""
    weights = sorted(model.state_dict().items())
    return safetensors.encode(
        {
            name: RawTensor(
                "F32", tuple(weight.shape), weight.detach().contiguous().numpy().tobytes()
            )
            for name, weight in weights
        }
    )


def load_weights(model: TransformerModel, path: Path) -> None:
    """Replace the weights of ``model`` in place. Raises `EngineError` if the file does not fit
    it.
    """
    try:
        tensors = safetensors.decode_untrusted(bytearray(path.read_bytes()))
    except BadMessage as error:
        raise EngineError(f"{path} is not a weights file: {error}") from error
    parameters = dict(model.named_parameters())
    if tensors.keys() != parameters.keys():
        odd = sorted(tensors.keys() ^ parameters.keys())
        raise EngineError(
            f"{path} does not hold this model: {len(odd)} names differ, the first is {odd[0]}"
        )
    for name, raw in tensors.items():
        if raw.shape != tuple(parameters[name].shape) or raw.dtype not in _DTYPES:
            raise EngineError(
                f"{path}: {name} is {raw.dtype} of shape {raw.shape}, not what the model has"
            )
    with torch.no_grad():
        for name, raw in tensors.items():
            stored = torch.frombuffer(raw.data, dtype=_DTYPES[raw.dtype]).view(raw.shape)
            parameters[name].copy_(stored)


def save_folder(model: TransformerModel, folder: Path) -> None:
    """Write a model folder that transformers and vLLM load as Qwen3."""
    write_atomically(folder / "model.safetensors", encode_weights(model))
    write_atomically(
        folder / "config.json", json.dumps(hugging_face_config(model.shape), indent=2).encode()
    )


def hugging_face_config(shape: ModelShape) -> dict[str, object]:
    """``config.json`` of a Qwen3 model of this shape."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.query_heads,
        "num_key_value_heads": shape.key_heads,
        "head_dim": shape.head_width,
        "intermediate_size": shape.feed_forward,
        "rope_theta": shape.rope_base,
        "rms_norm_eps": shape.epsilon,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "torch_dtype": "float32",
    }
