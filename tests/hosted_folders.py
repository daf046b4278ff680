"""Tiny random models of every architecture that transformers computes for us."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from roles.models.config import HOSTED
from tests.model_folders import SPECIAL, TEMPLATE, tokenizer_json

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}
SLIDES: dict[str, Any] = {"sliding_window": 16}
"""Shorter than what is drawn: a window shows."""
OWN: dict[str, dict[str, Any]] = {
    "Cohere2ForCausalLM": {**SLIDES, "sliding_window_pattern": 2, "logit_scale": 0.5},
    "Gemma2ForCausalLM": {
        **SLIDES,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 6.0,
    },
    "Gemma3ForCausalLM": {**SLIDES, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16},
    "GraniteForCausalLM": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
        "logits_scaling": 2.0,
    },
    "LlamaForCausalLM": {"attention_bias": True},
    "MistralForCausalLM": SLIDES,
    "Olmo3ForCausalLM": SLIDES,
    "Phi3ForCausalLM": SLIDES,
    "Qwen2ForCausalLM": {**SLIDES, "use_sliding_window": True, "max_window_layers": 1},
    "Qwen3ForCausalLM": {"attention_bias": True},
    "Starcoder2ForCausalLM": SLIDES,
}
"""What an architecture is known for, beside `SIZES`."""


def make_theirs(architecture: str, seed: int = 0, **sizes: Any) -> Any:
    """Return transformers' own model, with weights so large that tokens differ."""
    from transformers import AutoConfig, AutoModelForCausalLM

    keys = {**SIZES, **OWN.get(architecture, {}), **sizes}
    config = AutoConfig.for_model(HOSTED[architecture].model_type, **keys)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(4.0)
            weight.copy_(weight.bfloat16())
    return model


def save_theirs(model: Any, folder: Path) -> Path:
    """Write a whole folder as transformers does."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer_json())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": SPECIAL[1], "chat_template": TEMPLATE})
    )
    return folder
