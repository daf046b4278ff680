"""Adapters that a learner with ``[lora]`` has learnt, written as a folder that PEFT opens."""

from __future__ import annotations

import json
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from p2p.errors import BadMessage
from p2p.shardcast.adapter import DOWN, LORA, UP
from roles.models import safetensors
from roles.models.errors import BadModel
from roles.models.safetensors import RawTensor

SEAL: Final = b"shoal checkpoint file 2\n"
"""First 24 bytes of a learner's checkpoint. Together with the digest they keep tensors of
8-byte numbers aligned."""
DIGEST_BYTES: Final = 32
"""Bytes of the SHA-256 of the tensors, which follows the seal."""
NUMBERS: Final = "numbers"
"""Name of the tensor in a checkpoint with the step and the number of the optimiser's
updates."""
WEIGHT: Final = "weight."
TRAVELS: Final = ".lora"
"""Suffix of the path of the adapter that SHARDCAST sends in place of a policy."""


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """Matrices A and B of each target at a step."""

    step: int
    rank: int
    alpha: float
    weights: dict[str, RawTensor]


def read_adapter(checkpoint: Path) -> StoredAdapter | None:
    """Return the adapter in a trainer's checkpoint; None if all weights are trained.

    Raises:
        BadModel: The file is no checkpoint.
    """
    try:
        with checkpoint.open("rb") as file:
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if pages[: len(SEAL)] != SEAL:
            raise BadMessage("it does not begin as one")
        found = safetensors.decode_untrusted(memoryview(pages)[len(SEAL) + DIGEST_BYTES :])
        if LORA not in found:
            return None
        step, _ = struct.unpack("<qq", found[NUMBERS].data)
        rank, alpha = struct.unpack("<ff", found[LORA].data)
        rank = int(rank)
    except (OSError, ArithmeticError, ValueError, KeyError, struct.error, BadMessage) as error:
        raise BadModel(f"{checkpoint} is no checkpoint of a learner: {error}") from None
    weights = {
        name.removeprefix(WEIGHT): raw
        for name, raw in found.items()
        if name.startswith(WEIGHT) and name.endswith((DOWN, UP))
    }
    return StoredAdapter(step, rank, alpha, weights)


def write_peft(adapter: StoredAdapter, base: str, folder: Path) -> None:
    """Write a folder that ``PeftModel.from_pretrained(model, folder)`` opens.

    Args:
        base: Where the model lies that the adapter belongs to, for whoever opens the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = {name.removesuffix(DOWN) for name in adapter.weights if name.endswith(DOWN)}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": sorted({name.rpartition(".")[2] for name in names}),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {f"base_model.model.{name}.weight": raw for name, raw in adapter.weights.items()}
    (folder / "adapter_model.safetensors").write_bytes(safetensors.encode(tensors))
