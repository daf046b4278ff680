"""config.json of the three families, and what is refused by name."""

import json
from dataclasses import replace

import pytest

from p2p.errors import BadMessage
from roles.contract.core.shape import Family, ModelShape
from roles.models.config import (
    ModelConfig,
    read_config_untrusted,
    read_end_tokens_untrusted,
    write_config,
)
from roles.rl.recipes import SORTER
from tests.support.models import QWEN2, QWEN3, SMOLLM2


def read(table: dict[str, object]) -> ModelConfig:
    return read_config_untrusted(json.dumps(table).encode())


def test_published_models_of_each_family() -> None:
    smollm2, qwen2, qwen3 = read(SMOLLM2), read(QWEN2), read(QWEN3)
    assert smollm2.shape == ModelShape(
        vocabulary=49152,
        width=576,
        layers=30,
        query_heads=9,
        key_heads=3,
        head_width=64,
        feed_forward=1536,
        rope_base=100_000.0,
        epsilon=1e-5,
        tied=True,
        qk_norm=False,
    )
    assert (smollm2.context, smollm2.dtype, smollm2.end_tokens) == (8192, "bfloat16", (2,))
    families = [one.shape.family for one in (smollm2, qwen2, qwen3)]
    assert families == [Family.LLAMA, Family.QWEN2, Family.QWEN3]
    # as Hugging Face counts them
    sizes = [one.shape.parameters for one in (smollm2, qwen2, qwen3)]
    assert sizes == [134_515_008, 494_032_768, 596_049_920]
    assert (qwen2.shape.head_width, qwen3.shape.head_width) == (64, 128)
    assert (qwen2.shape.rope_base, qwen3.shape.rope_base) == (1e6, 1e6)
    assert qwen3.end_tokens == (151645, 151643)


@pytest.mark.parametrize("table", [SMOLLM2, QWEN2, QWEN3], ids=["llama", "qwen2", "qwen3"])
def test_what_is_written_is_read_as_the_same(table: dict[str, object]) -> None:
    config = read(table)
    assert read_config_untrusted(write_config(config)) == config


def test_what_a_file_does_not_name_has_transformers_defaults() -> None:
    lean = {
        "model_type": "llama", "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "intermediate_size": 128,
    }  # fmt: skip
    config = read(lean)
    assert config == ModelConfig(
        shape=ModelShape(
            vocabulary=100, width=64, layers=2, query_heads=4, key_heads=4, head_width=16,
            feed_forward=128, rope_base=10_000.0, epsilon=1e-6, qk_norm=False,
        ),
        context=2048,
        dtype="float32",
    )  # fmt: skip
    assert read({**lean, "model_type": "qwen3"}).shape.head_width == 128
    del lean["model_type"]
    assert read({**lean, "architectures": ["LlamaForCausalLM"]}) == config


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"]}, "gpt_neox"),
        ({"model_type": "mistral"}, "llama \\(LlamaForCausalLM\\), qwen2"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "SequenceClassification"),
        ({"model_type": None, "architectures": None}, "none of the families"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_parameters"),
        ({"rope_scaling": {"type": "default", "factor": 2.0}}, "rope_scaling"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}, "auto_map"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8"),
        ({"vocab_size": None}, "vocab_size"),
        ({"vocab_size": "49152"}, "vocab_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": 9 * 10**12}, "width must be"),
        ({"num_hidden_layers": 0}, "layers must be"),
        ({"num_key_value_heads": 2}, "cannot share"),
        ({"num_attention_heads": 7, "num_key_value_heads": 7}, "head_dim"),
        ({"head_dim": 63}, "even"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"rope_theta": "big"}, "rope_theta"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"max_position_embeddings": 0}, "context"),
        ({"eos_token_id": 49152}, "end token 49152"),
        ({"eos_token_id": "2"}, "eos_token_id"),
        ({"eos_token_id": list(range(100))}, "too many"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_we_do_not_compute_is_refused_by_name(
    changes: dict[str, object], said: str
) -> None:
    with pytest.raises(BadMessage, match=said):
        read({**SMOLLM2, **changes})


LLAMA31 = {
    "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3",
}  # fmt: skip
LONG = {"long_factor": [1.0] * 48, "short_factor": [1.1] * 48, "type": "longrope"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_scaling": LLAMA31}, [*LLAMA31, "8192", "'llama3'"]),
        ({"rope_scaling": LONG}, ["48 values", "'longrope'"]),
        ({"quantization_config": dict.fromkeys(map(str, range(50)))}, ["38 more"]),
        ({"architectures": ["x" * 999], "model_type": "y" * 999}, ["xxx…", "yyy…"]),
        ({"model_type": "gemma3"}, ["'gemma3'"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types"]),
        ({"num_local_experts": 8}, ["num_local_experts = 8 "]),
    ],
)
def test_a_refusal_is_a_whole_sentence_that_names_models_that_would_do(
    changes: dict[str, object], words: list[str]
) -> None:
    """A rope table was cut after 60 characters, and no model was named that runs."""
    with pytest.raises(BadMessage) as refused:
        read({**SMOLLM2, **changes})
    sentence = str(refused.value)
    assert all(word in sentence for word in words)
    for opening, closing in ("()", "[]", "{}"):
        assert sentence.count(opening) == sentence.count(closing)
    assert "models that would do are SmolLM2" in sentence
    assert len(sentence) < 900


# As their authors publish them; what they name beside is bookkeeping.
SUITED = {
    "TinyLlama 1.1B": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "hidden_act": "silu",
        "hidden_size": 2048, "intermediate_size": 5632, "max_position_embeddings": 2048,
        "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 22,
        "num_key_value_heads": 4, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "vocab_size": 32000, "bos_token_id": 1, "eos_token_id": 2,
    },
    "Llama 3": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False,
        "bos_token_id": 128000, "eos_token_id": 128009, "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 8192,
        "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 500000.0, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "vocab_size": 128256,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SUITED)
def test_models_that_are_named_would_do(name: str) -> None:
    read(SUITED[name])


def test_a_window_that_qwen_uses_is_refused() -> None:
    with pytest.raises(BadMessage, match="sliding_window"):
        read({**QWEN2, "use_sliding_window": True})
    with pytest.raises(BadMessage, match="attention_bias"):
        read({**QWEN2, "attention_bias": False})


def test_no_family_has_both_bias_and_norm() -> None:
    with pytest.raises(ValueError, match="no family"):
        replace(SORTER, qkv_bias=True, qk_norm=True)


def test_end_tokens_of_the_generation_config() -> None:
    data = json.dumps({"eos_token_id": [2, 0, 2], "temperature": 0.7}).encode()
    assert read_end_tokens_untrusted(data, 10) == (2, 0)
    assert read_end_tokens_untrusted(b"{}", 10) == ()
    with pytest.raises(BadMessage, match="not among the 2"):
        read_end_tokens_untrusted(data, 2)
