"""config.json of the three families, and what is refused by name."""

import json
from dataclasses import replace

import pytest

from p2p.errors import BadMessage
from p2p.node.tables import read_table, write_table
from roles.contract.core.shape import Family, ModelShape, RopeScaling
from roles.models.config import (
    ModelConfig,
    read_config_untrusted,
    read_end_tokens_untrusted,
    write_config,
)
from tests.support.models import QWEN2, QWEN3, SMOLLM2

LLAMA31 = {
    "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3",
}  # fmt: skip


def read(table: dict[str, object]) -> ModelConfig:
    return read_config_untrusted(json.dumps(table).encode())


def test_published_models_of_each_family() -> None:
    smollm2, qwen2, qwen3 = read(SMOLLM2), read(QWEN2), read(QWEN3)
    assert smollm2.shape == ModelShape(
        vocabulary=49152, width=576, layers=30, query_heads=9, key_heads=3, head_width=64,
        feed_forward=1536, rope_base=100_000.0, epsilon=1e-5, tied=True, qk_norm=False,
    )  # fmt: skip
    assert (smollm2.context, smollm2.dtype, smollm2.end_tokens) == (8192, "bfloat16", (2,))
    families = [one.shape.family for one in (smollm2, qwen2, qwen3)]
    assert families == [Family.LLAMA, Family.QWEN2, Family.QWEN3]
    # as Hugging Face counts them
    sizes = [one.shape.parameters for one in (smollm2, qwen2, qwen3)]
    assert sizes == [134_515_008, 494_032_768, 596_049_920]
    assert (qwen2.shape.head_width, qwen3.shape.head_width) == (64, 128)
    assert (qwen2.shape.rope_base, qwen3.shape.rope_base) == (1e6, 1e6)
    assert qwen3.end_tokens == (151645, 151643)


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
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "mamba"),
        ({"model_type": "mistral"}, "llama \\(LlamaForCausalLM\\), qwen2"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "SequenceClassification"),
        ({"model_type": None, "architectures": None}, "none of the families"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": {**LLAMA31, "low_freq_factor": 5.0}}, "low .5. must be below high"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e6}}, "rope_parameters"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"sliding_window": 0}, "sliding_window must be above 0"),
        ({"sliding_window": -4}, "sliding_window must be above 0"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0}}, "factor must be above 0"),
        ({"rope_parameters": {"a": {"rope_theta": 0}}}, "rope_theta must be above 0"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
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


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        (SMOLLM2, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
        (SMOLLM2, {"rope_scaling": {"type": "linear", "factor": 2.0}}),
        (SMOLLM2, {"sliding_window": 4096}),
        (SMOLLM2, {"layer_types": ["sliding_attention"]}),
        (SMOLLM2, {"attention_bias": True}),
        (SMOLLM2, {"mlp_bias": True}),
        (SMOLLM2, {"hidden_act": "gelu"}),
        (QWEN2, {"use_sliding_window": True}),
        (QWEN2, {"attention_bias": False}),
    ],
    ids=str,
)
def test_what_our_decoder_does_not_compute_transformers_does(
    model: dict[str, object], changes: dict[str, object]
) -> None:
    own, hosted = read(model).shape, read({**model, **changes}).shape
    assert [hosted.architecture] == model["architectures"]
    assert hosted.parameters == replace(own, qkv_bias=False).parameters
    assert "architecture" not in write_table(own)


def test_a_model_with_slowed_frequencies_and_a_mistral_without_a_window_are_ours() -> None:
    scaled = read({**SMOLLM2, "rope_scaling": LLAMA31})
    assert scaled.shape.rope_scaling == RopeScaling(factor=8.0, low=1.0, high=4.0, context=8192)
    assert read_config_untrusted(write_config(scaled)) == scaled
    assert read_table(ModelShape, write_table(scaled.shape), "shape") == scaled.shape
    mistral: dict[str, object] = {
        **SMOLLM2, "model_type": "mistral", "architectures": ["MistralForCausalLM"],
        "sliding_window": None,
    }  # fmt: skip
    assert read(mistral).shape == read(SMOLLM2).shape
    del mistral["sliding_window"]  # by default there is one
    assert read(mistral).shape.architecture == "MistralForCausalLM"


def test_end_tokens_of_the_generation_config() -> None:
    data = json.dumps({"eos_token_id": [2, 0, 2], "temperature": 0.7}).encode()
    assert read_end_tokens_untrusted(data, 10) == (2, 0)
    assert read_end_tokens_untrusted(b"{}", 10) == ()
    with pytest.raises(BadMessage, match="not among the 2"):
        read_end_tokens_untrusted(data, 2)
    for nested in (b"[" * 100_000, b"9" * 5000):
        with pytest.raises(BadMessage):
            read_end_tokens_untrusted(nested, 9)
