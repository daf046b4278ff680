"""Device that an engine computes on, and precision in which it trains: both are chosen by the
machine.

Every tensor of this package is made on a device that somebody named: a model has one, its
caches, masks and tables are on it, and what comes from the host is sent there (`send`).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from p2p.errors import ConfigError
from roles.engines.config import AUTO, Autocast, EngineConfig

CPU: Final = torch.device("cpu")

_WORTH_IT: Final = 10_000_000
"""Least number of parameters for which ``auto`` chooses bfloat16. SmolLM2's 135 M train 2.7
times faster with it; of the demo's 105,088 the casts cost more than the products save."""

_MORE: Final = 4
"""Factor by which a GPU's batches are larger than a CPU's. With 1,024 rows of a model of 135 M
parameters an H100 is two thirds busy, with 256 a fifth; for the rest of a step it waits for the
host."""


def at_once(device: torch.device) -> int:
    """Return the factor by which batches of rows, positions and logits may be larger than on a
    CPU, for which `roles.engines.config` has the sizes."""
    return 1 if device.type in ("cpu", "mps") else _MORE


def find_device(name: str) -> torch.device:
    """Return the device that a machine's owner named: ``auto`` is CUDA where torch sees a GPU,
    then MPS, then the CPU. Raises `ConfigError`, with the remedy, if the device is not
    there."""
    if name == AUTO:
        name = "cuda" if torch.cuda.is_available() else "mps" if _has_mps() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ConfigError(
                f"device = {name!r}, and torch {torch.__version__} sees {count} GPUs: shoal"
                " doctor says what is missing; device = 'cpu' computes without one"
            )
        return torch.device("cuda", device.index or 0)
    if device.type == "mps" and not _has_mps():
        raise ConfigError(
            f"device = {name!r}, and torch {torch.__version__} sees no Apple GPU:"
            " device = 'cpu' computes without one"
        )
    return device


def _has_mps() -> bool:
    return torch.backends.mps.is_available()


def send(values: NDArray[Any], device: torch.device) -> Tensor:
    """Return ``values`` on ``device``: on the CPU the same memory, on CUDA a copy from pinned
    memory, for which the host does not wait."""
    tensor = torch.from_numpy(values)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def send_numbers(values: Any, device: torch.device) -> Tensor:
    """Return integers of the host, a list or nested lists, as a tensor on ``device``."""
    return send(np.asarray(values, dtype=np.int64), device)


def widest(device: torch.device) -> torch.dtype:
    """Return the dtype in which sums are added up: float32 on MPS, which has no float64, else
    float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def uses_bfloat16(config: EngineConfig, device: torch.device = CPU) -> bool:
    """Return True if training runs under autocast on ``device``.

    Nothing that is signed depends on it: who trains says what the next policy is, and no other
    node computes a step again. ``auto`` asks the machine, since without instructions for it
    bfloat16 is slower than float32, not faster.
    """
    if config.autocast is not Autocast.AUTO:
        return config.autocast is Autocast.ON
    if config.shape.parameters < _WORTH_IT:
        return False
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type != "cpu":
        return False
    able = torch.cpu.get_capabilities()
    return any(able.get(name, False) for name in ("avx512_bf16", "amx_bf16", "sve_bf16"))
