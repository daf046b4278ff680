"""Whether a learner multiplies in bfloat16: its machine's affair, and its owner's."""

from __future__ import annotations

from typing import Final

import torch

from roles.engines.config import Autocast, EngineConfig

_WORTH_IT: Final = 10_000_000
"""Parameters from which ``auto`` chooses bfloat16. SmolLM2's 135 M train 2.7 times faster with
it; of the demo's 105,088 the casts cost more than the products save."""


def uses_bfloat16(config: EngineConfig) -> bool:
    """Whether training runs under autocast.

    Nothing that is signed depends on it: who trains says what the next policy is, and no other
    node computes a step again. ``auto`` asks the machine, since without instructions for it
    bfloat16 is slower than float32, not faster.
    """
    if config.autocast is not Autocast.AUTO:
        return config.autocast is Autocast.ON
    if config.shape.parameters < _WORTH_IT:
        return False
    able = torch.cpu.get_capabilities()
    return any(able.get(name, False) for name in ("avx512_bf16", "amx_bf16", "sve_bf16"))
