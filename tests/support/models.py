"""Models of the families: configurations as published, and shapes of small ones."""

from __future__ import annotations

from dataclasses import replace

from roles.contract.core.shape import Family
from roles.rl.recipes import SORTER
from tests.model_folders import LLAMA

# as published, bookkeeping included
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576,
    "initializer_range": 0.041666666666666664, "intermediate_size": 1536,
    "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False,
    "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30,
    "num_key_value_heads": 3, "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 49152,
}  # fmt: skip
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 896, "intermediate_size": 4864,
    "max_position_embeddings": 32768, "max_window_layers": 21, "model_type": "qwen2",
    "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False,
    "eos_token_id": [151645, 151643], "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 1024, "intermediate_size": 3072, "layer_types": ["full_attention"] * 28,
    "max_position_embeddings": 40960, "model_type": "qwen3", "num_attention_heads": 16,
    "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000}, "sliding_window": None,
    "tie_word_embeddings": True, "dtype": "bfloat16", "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip

FAMILIES = {
    "llama": LLAMA,
    "qwen2": replace(LLAMA, qkv_bias=True),
    "qwen3": replace(LLAMA, qk_norm=True, tied=False),
}
SHAPES = {
    Family.QWEN3: replace(SORTER, vocabulary=97),
    Family.QWEN2: replace(SORTER, vocabulary=97, qk_norm=False, qkv_bias=True),
    Family.LLAMA: replace(SORTER, vocabulary=97, qk_norm=False, tied=True),
}
