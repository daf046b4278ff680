"""``config.json`` of a Hugging Face folder: read as a stranger's bytes, written for others.

Three families differ in three things, and in nothing else that we compute: Llama has neither a
bias nor a norm at queries and keys, Qwen2 has the bias, Qwen3 the norm. A Mistral without a
window is a Llama. The file has some thirty keys more. Where one of them changes what is
computed (windows, biases, other activations), or the architecture is another one, transformers
computes the model, if it is among `HOSTED`. What it would not compute alike in one pass and
token by token (experts, quantised weights, frequencies that follow the length) and code of the
model's author are refused by name: a model that runs and computes something else would fail
every proof, and its owner would look for the fault elsewhere. Keys that are bookkeeping are
passed over.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from p2p.errors import BadMessage
from roles.contract.core.bounds import Bounds, check_bounds
from roles.contract.core.shape import (
    MAX_CONTEXT,
    MAX_END_TOKENS,
    Family,
    ModelShape,
    RopeScaling,
)
from roles.models.files import json_object_untrusted, shown

StoredDtype = Literal["float32", "bfloat16", "float16"]
"""Data type of saved weights. The data type of a run's computation is its own choice
(`Dtype`).
"""

ARCHITECTURES: Final[Mapping[Family, str]] = {
    Family.LLAMA: "LlamaForCausalLM",
    Family.QWEN2: "Qwen2ForCausalLM",
    Family.QWEN3: "Qwen3ForCausalLM",
}
"""transformers' class for each family; vLLM knows it by the same name."""

MAX_CONFIG: Final = 1024 * 1024
"""Bytes of ``config.json`` or ``generation_config.json``: usual ones have one or two
thousand."""

MISTRAL: Final = "MistralForCausalLM"


@dataclass(frozen=True, slots=True)
class Hosted:
    """An architecture that transformers computes, with its defaults for keys that a file may
    omit.
    """

    model_type: str
    tied: bool = False
    key_heads: int | None = None
    """Number of key heads; None: as many as query heads."""

    head_width: int | None = None
    """Width of a head; None: width / heads."""

    is_grouped: bool = True
    """True if there may be fewer key heads than query heads."""


HOSTED: Final[Mapping[str, Hosted]] = {
    "CohereForCausalLM": Hosted("cohere", tied=True),
    "Cohere2ForCausalLM": Hosted("cohere2", tied=True),
    "GPTNeoXForCausalLM": Hosted("gpt_neox", is_grouped=False),
    "Gemma2ForCausalLM": Hosted("gemma2", tied=True, key_heads=4, head_width=256),
    "Gemma3ForCausalLM": Hosted("gemma3_text", tied=True, key_heads=4, head_width=256),
    "GemmaForCausalLM": Hosted("gemma", tied=True, key_heads=16, head_width=256),
    "Glm4ForCausalLM": Hosted("glm4", key_heads=2, head_width=128),
    "GlmForCausalLM": Hosted("glm", key_heads=2, head_width=128),
    "GraniteForCausalLM": Hosted("granite"),
    "HeliumForCausalLM": Hosted("helium", key_heads=20, head_width=128),
    MISTRAL: Hosted("mistral", key_heads=8),
    "NemotronForCausalLM": Hosted("nemotron"),
    "Olmo2ForCausalLM": Hosted("olmo2"),
    "Olmo3ForCausalLM": Hosted("olmo3"),
    "OlmoForCausalLM": Hosted("olmo"),
    "Phi3ForCausalLM": Hosted("phi3"),
    "PhiForCausalLM": Hosted("phi"),
    "SmolLM3ForCausalLM": Hosted("smollm3", tied=True, key_heads=4),
    "StableLmForCausalLM": Hosted("stablelm", key_heads=32),
    "Starcoder2ForCausalLM": Hosted("starcoder2", tied=True, key_heads=2),
    ARCHITECTURES[Family.LLAMA]: Hosted("llama"),
    ARCHITECTURES[Family.QWEN2]: Hosted("qwen2", key_heads=32),
    ARCHITECTURES[Family.QWEN3]: Hosted("qwen3", key_heads=32, head_width=128),
}
"""Maps transformers' class names to architectures. tests/unit/test_hosted_families.py compares
each with transformers: add no architecture without its line there.
"""

_CONTEXTS: Final[Mapping[Family, int]] = {
    Family.LLAMA: 2048,
    Family.QWEN2: 32_768,
    Family.QWEN3: 32_768,
}
"""``max_position_embeddings`` if the file does not name it: transformers' own defaults."""
_QWEN3_HEAD: Final = 128
"""``head_dim`` of a Qwen3 if the file does not name it: transformers' default."""
_ROPE_BASE: Final = 10_000.0
_EPSILON: Final = 1e-6
"""``rope_theta`` and ``rms_norm_eps`` if the file does not name them: transformers'
defaults.
"""
_BOUNDS: Final[Bounds] = {"context": (1, MAX_CONTEXT)}
_LARGEST: Final = 1e300
"""Bound of numbers in the file: a larger integer may have no float. The bounds of `ModelShape`
are far below."""

_FIXED_ROPE: Final = ("default", "linear", "llama3", "yarn")
"""Rope types whose frequencies do not follow from how long a text is: others would give a token
another state when it is drawn than when it is replayed."""

_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "partial_rotary_factor": (1,),
    "rope_interleaved": (False,),
    "no_rope_layers": ([],),
    "use_qk_norm": (False,),
    "clip_qkv": (),
}
"""Keys that change what is computed, each with the values with which it changes nothing;
``null`` and absence never do."""
_NEVER: Final[Mapping[str, tuple[object, ...]]] = {
    "num_experts": (0,),
    "num_local_experts": (0,),
    "n_routed_experts": (0,),
    "quantization_config": (),
    "compression_config": (),
    "auto_map": (),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
}
"""Such keys that transformers is not asked to follow either, each with its neutral values."""
SUITABLE: Final = (
    "; models that would do are SmolLM2, TinyLlama, Llama, Qwen2.5, Qwen3 and Mistral without"
    " experts, what was trained from them, and the architectures that transformers"
    " computes (docs/runs.md): shoal models fetch smollm2 makes the smallest"
)
"""End of a refusal of an architecture."""
_BIASED: Final[Mapping[Family, bool]] = {
    Family.LLAMA: False,
    Family.QWEN2: True,
    Family.QWEN3: False,
}
"""The only ``attention_bias`` that we compute. Llama's and Qwen3's true one puts a bias on the
output projection, too; Qwen2 has one on queries, keys and values whatever the key says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The content of a folder's ``config.json``."""

    shape: ModelShape
    """Architecture and sizes, as an engine needs them."""

    context: int
    """Tokens of prompt and completion together."""

    dtype: StoredDtype = "bfloat16"
    """Data type in which the weights were saved."""

    end_tokens: tuple[int, ...] = ()
    """The tokens that end an answer, as far as this file names them: others may name more
    (`roles.models.ends`)."""

    notes: tuple[str, ...] = field(default=(), compare=False)
    """Contradictions between the folder and its ``config.json``, for people."""

    def __post_init__(self) -> None:
        check_bounds(self, _BOUNDS)
        if self.dtype not in get_args(StoredDtype):
            raise ValueError(f"weights of dtype {self.dtype!r:.40} are not among those we read")
        check_end_tokens(self.end_tokens, self.shape.vocabulary)


def check_end_tokens(tokens: tuple[int, ...], vocabulary: int) -> None:
    """Check that the end tokens are few, and in the vocabulary.

    Raises:
        ValueError: They are not.
    """
    if len(tokens) > MAX_END_TOKENS:
        raise ValueError(f"{len(tokens)} end tokens are too many (at most {MAX_END_TOKENS})")
    for token in tokens:
        if not 0 <= token < vocabulary:
            raise ValueError(f"the end token {token!r:.40} is not among the {vocabulary:,}")


def read_config_untrusted(data: bytes) -> ModelConfig:
    """Return the content of ``config.json``.

    Raises:
        BadMessage: We cannot follow a key. The message names it.
    """
    table = json_object_untrusted(data)
    family, architecture = _family_untrusted(table)
    _refuse_untrusted(table, _NEVER)
    try:
        if family is not None:
            with suppress(_Foreign):
                return _read_native_untrusted(table, family)
        return _read_hosted_untrusted(table, architecture)
    except ValueError as error:
        raise BadMessage(f"it describes no model: {error}") from None


class _Foreign(Exception):
    """Our decoder does not compute this model of one of its families."""


def _read_native_untrusted(table: Mapping[str, Any], family: Family) -> ModelConfig:
    is_mistral = table.get("model_type") == HOSTED[MISTRAL].model_type
    if is_mistral and "sliding_window" not in table:
        raise _Foreign  # its default is a window
    try:
        _refuse_untrusted(table, _features(table, family))
    except BadMessage as error:
        raise _Foreign from error
    rope_base, rope_scaling = _rope_untrusted(table)
    key_heads = HOSTED[MISTRAL].key_heads if is_mistral else None
    heads = _whole(table, "num_attention_heads")
    width = _whole(table, "hidden_size")
    shape = ModelShape(
        vocabulary=_whole(table, "vocab_size"),
        width=width,
        layers=_whole(table, "num_hidden_layers"),
        query_heads=heads,
        key_heads=_whole(table, "num_key_value_heads", key_heads or heads),
        head_width=_whole(table, "head_dim", _default_head(family, width, heads)),
        feed_forward=_whole(table, "intermediate_size"),
        rope_base=rope_base,
        epsilon=_number(table, "rms_norm_eps", _EPSILON),
        tied=_flag(table, "tie_word_embeddings"),
        qkv_bias=family is Family.QWEN2,
        qk_norm=family is Family.QWEN3,
        rope_scaling=rope_scaling,
    )
    return ModelConfig(
        shape=shape,
        context=_whole(table, "max_position_embeddings", _CONTEXTS[family]),
        dtype=_dtype_untrusted(table),
        end_tokens=_end_tokens_untrusted(table),
    )


def _read_hosted_untrusted(table: Mapping[str, Any], architecture: str) -> ModelConfig:
    """Return the sizes of a model that transformers computes. The engine compares them with the
    configuration that transformers reads from the file."""
    defaults = HOSTED[architecture]
    _check_rotary_untrusted(table)
    for key in ("rope_scaling", "rope_parameters"):
        _check_fixed_untrusted(key, table.get(key))
    heads, width = _whole(table, "num_attention_heads"), _whole(table, "hidden_size")
    divided = width // heads if heads > 0 else None
    key_heads = _whole(table, "num_key_value_heads", defaults.key_heads or heads)
    shape = ModelShape(
        vocabulary=_whole(table, "vocab_size"),
        width=width,
        layers=_whole(table, "num_hidden_layers"),
        query_heads=heads,
        key_heads=key_heads if defaults.is_grouped else heads,
        head_width=_whole(table, "head_dim", defaults.head_width or divided),
        feed_forward=_whole(table, "intermediate_size"),
        tied=_flag(table, "tie_word_embeddings", default=defaults.tied),
        qk_norm=False,
        architecture=architecture,
    )
    return ModelConfig(
        shape=shape,
        context=_whole(table, "max_position_embeddings"),
        dtype=_dtype_untrusted(table),
        end_tokens=_end_tokens_untrusted(table),
        notes=("transformers computes it: each node needs pip install 'shoal[transformers]'",),
    )


def _check_fixed_untrusted(where: str, value: object) -> None:
    """Check that rotary frequencies do not follow the length of a text.

    Newer files have a table for each kind of layer.

    Raises:
        BadMessage: They do.
    """
    if value is None:
        return
    if not isinstance(value, dict):
        raise BadMessage(f"{where} is not a table")
    kind = value.get("rope_type") or value.get("type") or "default"
    if kind not in _FIXED_ROPE:
        raise BadMessage(
            f"{where} = {shown(value)} asks for rotary frequencies of the type {shown(kind)},"
            f" which we do not compute{SUITABLE}"
        )
    for name, inner in value.items():
        if isinstance(inner, dict):
            _check_fixed_untrusted(f"{where}.{name}", inner)


def _check_rotary_untrusted(table: Mapping[str, Any]) -> None:
    """Raise `BadMessage` for more rotary features than a head has, which would fill the memory,
    and for numbers that must be above 0. They may stand in a table within the table, too."""
    for key, value in table.items():
        if key in _ROTARY and value is not None and not 0 < _number(table, key) <= 1:
            raise BadMessage(f"{key} must be from 0 to 1, not {shown(value)}")
        if key in _POSITIVE and value is not None and not _number(table, key) > 0:
            raise BadMessage(f"{key} must be above 0, not {shown(value)}")
        if isinstance(value, dict):
            _check_rotary_untrusted(value)


_ROTARY: Final = ("partial_rotary_factor", "rotary_pct")
"""Keys with the share of a head's features that is rotated."""
_POSITIVE: Final = (
    "rope_theta", "rope_local_base_freq", "rotary_emb_base", "default_theta", "factor",
    "original_max_position_embeddings", "sliding_window",
)  # fmt: skip
"""Keys that divide or bound: with 0 or less, frequencies are no numbers, or nothing is seen."""


def read_end_tokens_untrusted(data: bytes, vocabulary: int) -> tuple[int, ...]:
    """Return the end tokens that ``generation_config.json`` names.

    Raises:
        BadMessage: The file cannot be read.
    """
    tokens = _end_tokens_untrusted(json_object_untrusted(data))
    try:
        check_end_tokens(tokens, vocabulary)
    except ValueError as error:
        raise BadMessage(str(error)) from None
    return tokens


def write_config(config: ModelConfig) -> bytes:
    """Return ``config.json`` of a model that our decoder computes, as transformers and vLLM
    load it.
    """
    shape, family = config.shape, config.shape.family
    ends = list(config.end_tokens)
    table: dict[str, object] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family.value,
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.query_heads,
        "num_key_value_heads": shape.key_heads,
        "head_dim": shape.head_width,
        "intermediate_size": shape.feed_forward,
        "hidden_act": "silu",
        "rope_theta": shape.rope_base,
        "rms_norm_eps": shape.epsilon,
        "attention_bias": _BIASED[family],
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": config.context,
        # both classes have defaults of their own, which an absent key would mean
        "bos_token_id": None,
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "torch_dtype": config.dtype,
    }
    if shape.rope_scaling is not None:
        table["rope_scaling"] = _written(shape.rope_scaling)
    return json.dumps(table, indent=2).encode() + b"\n"


def _family_untrusted(table: Mapping[str, Any]) -> tuple[Family | None, str]:
    """Return the family that our decoder may compute, if any, and the architecture."""
    kind, classes = table.get("model_type"), table.get("architectures")
    families = {name: family for family, name in ARCHITECTURES.items()}
    families[MISTRAL] = Family.LLAMA
    for architecture, hosted in HOSTED.items():
        if kind == hosted.model_type and classes in (None, [], [architecture]):
            return families.get(architecture), architecture
        if kind is None and classes == [architecture]:
            return families.get(architecture), architecture
    known = ", ".join(f"{one.value} ({name})" for one, name in ARCHITECTURES.items())
    raise BadMessage(
        f"model_type {shown(kind)} with architectures {shown(classes)} is none of the families"
        f" we compute, {known}{SUITABLE}"
    )


def _features(table: Mapping[str, Any], family: Family) -> dict[str, tuple[object, ...]]:
    """Return the keys that our decoder does not support, with the values at which they have no
    effect."""
    neutral = {**_NEUTRAL, "attention_bias": (_BIASED[family],)}
    if family is Family.LLAMA or table.get("use_sliding_window"):
        # Qwen's files name a window and say beside it that it is not used
        neutral |= {"use_sliding_window": (False,), "sliding_window": ()}
    layers = table.get("layer_types")
    if not isinstance(layers, list) or any(one != "full_attention" for one in layers):
        neutral["layer_types"] = ()
    return neutral


def _refuse_untrusted(
    table: Mapping[str, Any], neutral: Mapping[str, tuple[object, ...]]
) -> None:
    """Check that no key asks for an unsupported feature.

    Raises:
        BadMessage: A key does. The message names the first.
    """
    for key, values in neutral.items():
        value = table.get(key)
        if value is not None and value not in values:
            raise BadMessage(
                f"{key} = {shown(value)} asks for what we do not compute{SUITABLE}"
            )


def _rope_untrusted(table: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Return ``rope_theta``, which transformers 5 moved into ``rope_parameters``, and Llama
    3.1's scaling.

    Raises:
        _Foreign: The scaling is another one.
    """
    base: float | None = None
    scaling: RopeScaling | None = None
    for key in ("rope_scaling", "rope_parameters"):
        value = table.get(key)
        if value is None:
            continue
        if not isinstance(value, dict):
            raise BadMessage(f"{key} is not a table")
        kind = value.get("rope_type", value.get("type", "default"))
        beside = value.keys() - {"rope_type", "type", "rope_theta"}
        if kind == "llama3" and beside <= set(_SCALING.values()):
            scaling = RopeScaling(
                factor=_number(value, _SCALING["factor"]),
                low=_number(value, _SCALING["low"]),
                high=_number(value, _SCALING["high"]),
                context=_whole(value, _SCALING["context"]),
            )
        elif kind != "default" or beside:
            raise _Foreign
        if value.get("rope_theta") is not None:
            base = _number(value, "rope_theta")
    return _number(table, "rope_theta", _ROPE_BASE) if base is None else base, scaling


_SCALING: Final = {
    "factor": "factor",
    "low": "low_freq_factor",
    "high": "high_freq_factor",
    "context": "original_max_position_embeddings",
}
"""Fields of `RopeScaling` by their names in the file."""


def _written(scaling: RopeScaling | None) -> dict[str, object] | None:
    if scaling is None:
        return None
    numbers = {written: getattr(scaling, name) for name, written in _SCALING.items()}
    return {"rope_type": "llama3", **numbers}


def _dtype_untrusted(table: Mapping[str, Any]) -> StoredDtype:
    """Return ``dtype``, called ``torch_dtype`` before transformers 5; float32 if it is not
    named.
    """
    named = table.get("dtype") or table.get("torch_dtype") or "float32"
    for dtype in get_args(StoredDtype):
        if named == dtype:
            known: StoredDtype = dtype
            return known
    raise BadMessage(f"dtype {shown(named)} is none of {', '.join(get_args(StoredDtype))}")


def _end_tokens_untrusted(table: Mapping[str, Any]) -> tuple[int, ...]:
    """Return ``eos_token_id``: a token, several, or none."""
    value = table.get("eos_token_id")
    tokens = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token) is int for token in tokens):
        raise BadMessage(f"eos_token_id is {shown(value)}, no token or list of tokens")
    return tuple(dict.fromkeys(tokens))


def _default_head(family: Family, width: int, heads: int) -> int | None:
    """Return ``head_dim`` for a file that does not name it; None if the file must name it."""
    if family is Family.QWEN3:
        return _QWEN3_HEAD
    return width // heads if heads > 0 and width % heads == 0 else None


def _whole(table: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = table.get(key)
    value = default if value is None else value
    if type(value) is not int:
        raise BadMessage(f"{key} must be a whole number, not {shown(value)}")
    return value


def _number(table: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value: Any = table.get(key)
    value = default if value is None else value
    if type(value) not in (int, float) or not abs(value) < _LARGEST:
        raise BadMessage(f"{key} must be a number, not {shown(value)}")
    return float(value)


def _flag(table: Mapping[str, Any], key: str, *, default: bool = False) -> bool:
    value = table.get(key)
    if value is not None and type(value) is not bool:
        raise BadMessage(f"{key} must be true or false, not {shown(value)}")
    return default if value is None else bool(value)
