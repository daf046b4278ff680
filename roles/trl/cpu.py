"""Changes that let TRL 1.16, and no later version, run on a machine without GPUs.

TRL asks CUDA for the name of its device (since 1.15), and its packed attention is a kernel of
flash-attn3, fetched from the Hub at the first forward (since 1.16). Each release of TRL moves
these places, so another version is refused rather than half mended.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import trl
from torch import Tensor
from torch.nn import functional as F
from trl.experimental.async_grpo import async_grpo_trainer, packing

LAST: Final = "1.16"
"""The version of TRL that these patches are of, and end with."""


def run_on_cpu() -> None:
    """Let `AsyncGRPOTrainer` run here.

    Raises:
        RuntimeError: TRL has another version.
    """
    if not trl.__version__.startswith(f"{LAST}."):
        raise RuntimeError(
            f"TRL {trl.__version__} is not {LAST}, which roles.trl.cpu mends for machines"
            f" without GPUs: pip install 'trl=={LAST}.0'"
        )
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    packing._flash_attn = _Attention


class _Attention:
    @staticmethod
    def flash_attn_varlen_func(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        starts_q: Tensor,
        starts_k: Tensor,
        *_: int,
        softmax_scale: float | None = None,
        **options: Any,
    ) -> Tensor:
        """Attend segment by segment. Query is (tokens, heads, width); a segment's queries are
        the last of its keys, and causal."""
        if options.get("window_size", (-1, -1)) != (-1, -1) or options.get("softcap"):
            raise RuntimeError("sliding windows and soft caps need a GPU")
        made = []
        pairs = [(one.tolist()[:-1], one.tolist()[1:]) for one in (starts_q, starts_k)]
        for first_q, end_q, first_k, end_k in zip(*pairs[0], *pairs[1], strict=True):
            queries, keys = end_q - first_q, end_k - first_k
            mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device)
            attended = F.scaled_dot_product_attention(
                query[first_q:end_q].transpose(0, 1).unsqueeze(0),
                key[first_k:end_k].transpose(0, 1).unsqueeze(0),
                value[first_k:end_k].transpose(0, 1).unsqueeze(0),
                attn_mask=mask.tril(keys - queries),
                scale=softmax_scale,
                enable_gqa=True,
            )
            made.append(attended[0].transpose(0, 1))
        return torch.cat(made)
