"""A GGUF file of a Llama with a byte-level tokenizer, made into a Hugging Face folder in bf16.

GGUF is llama.cpp's format: weights in blocks of few bits, the tokenizer in the header. Reading
and dequantising is the package `gguf`'s; what remains is names, one permutation, and a
tokenizer written out. llama.cpp turns neighbouring features of a head (its rotary pairs), where
Hugging Face turns halves, so the rows of queries and keys have another order: without undoing
it the model's perplexity is 300, with it 16.

The result depends on nothing but the file: all arithmetic is exact or one rounding per number,
and the tokenizer is written by us, not by a library whose format changes. So the same pins hold
on every machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from roles.contract.core.shape import ModelShape
from roles.models.bundle import CONFIG, GENERATION_CONFIG, WEIGHTS, tensor_shapes
from roles.models.config import ModelConfig, write_config
from roles.models.errors import BadModel
from roles.models.safetensors import encode_head

if TYPE_CHECKING:
    import gguf

_NAMES: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""llama.cpp's names of tensors, and Hugging Face's."""
_CONTROL: Final = 3
"""The type of special tokens. Ordinary tokens have type 1."""
_DIGITS: Final = 6
"""Digits of a number that the header has as float32: 1e-5 is 9.999999747378752e-06 there."""

Progress = Callable[[int, int], None]
"""A callback that is told how many of how many tensors are done."""


def convert(source: Path, folder: Path, template: str, progress: Progress) -> None:
    """Write a folder that transformers and vLLM load; ``template`` is the chat template.

    Tensor by tensor: the embedding in fp32 is the most that is held. Raises `BadModel` if the
    file holds another architecture or tokenizer.
    """
    import gguf

    reader = gguf.GGUFReader(source)
    header = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(header)
    ends = {"eos_token_id": config.end_tokens[0]}
    special = {
        name: header[f"tokenizer.ggml.{key}_token_id"]
        for name, key in (("bos", "bos"), ("pad", "padding"), ("unk", "unknown"))
    }
    generation = {
        "bos_token_id": special["bos"], **ends, "pad_token_id": special["pad"]
    }  # fmt: skip
    _write(folder / CONFIG, write_config(config))
    _write(folder / GENERATION_CONFIG, _json(generation))
    _write(folder / "tokenizer.json", _json(_tokenizer(header)))
    _write(folder / "chat_template.jinja", template.encode())
    tokens = header["tokenizer.ggml.tokens"]
    named = {f"{name}_token": tokens[token] for name, token in special.items()}
    table = {
        **named,
        "eos_token": tokens[config.end_tokens[0]],
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.context,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    _write(folder / "tokenizer_config.json", _json(table))
    _write_weights(reader, config.shape, folder / WEIGHTS, progress)


def _config(header: dict[str, Any]) -> ModelConfig:
    found = (header["general.architecture"], header["tokenizer.ggml.model"])
    if found != ("llama", "gpt2"):
        raise BadModel(f"the GGUF file holds {found}; what is converted is a llama with gpt2's")
    heads, width = header["llama.attention.head_count"], header["llama.embedding_length"]
    shape = ModelShape(
        vocabulary=header["llama.vocab_size"],
        width=width,
        layers=header["llama.block_count"],
        query_heads=heads,
        key_heads=header["llama.attention.head_count_kv"],
        head_width=width // heads,
        feed_forward=header["llama.feed_forward_length"],
        rope_base=_decimal(header["llama.rope.freq_base"]),
        epsilon=_decimal(header["llama.attention.layer_norm_rms_epsilon"]),
        tied=True,
        qk_norm=False,
    )
    return ModelConfig(
        shape=shape,
        context=header["llama.context_length"],
        dtype="bfloat16",
        end_tokens=(header["tokenizer.ggml.eos_token_id"],),
    )


def _decimal(number: float) -> float:
    """Return the decimal number that became this float32."""
    return float(f"{number:.{_DIGITS}g}")


def _tokenizer(header: dict[str, Any]) -> dict[str, object]:
    """Return ``tokenizer.json``: byte-level BPE that splits numbers into digits."""
    tokens: list[str] = header["tokenizer.ggml.tokens"]
    kinds: list[int] = header["tokenizer.ggml.token_type"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    byte_level["use_regex"] = True
    digits = {"type": "Digits", "individual_digits": True}
    special = [
        {
            "id": place, "content": tokens[place], "single_word": False, "lstrip": False,
            "rstrip": False, "normalized": False, "special": True,
        }
        for place, kind in enumerate(kinds) if kind == _CONTROL
    ]  # fmt: skip
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
        "vocab": {token: place for place, token in enumerate(tokens)},
        "merges": header["tokenizer.ggml.merges"],
    }  # fmt: skip
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": model,
    }


def _write_weights(
    reader: gguf.GGUFReader, shape: ModelShape, path: Path, progress: Progress
) -> None:
    tensors = {_name(one.name): one for one in reader.tensors}
    shapes = dict(sorted(tensor_shapes(shape).items()))
    if tensors.keys() != shapes.keys():
        odd = min(tensors.keys() ^ shapes.keys())
        raise BadModel(f"the GGUF file's tensors are not those of its header: {odd}")
    with path.open("wb") as file:
        file.write(encode_head({name: ("BF16", size) for name, size in shapes.items()}))
        for done, (name, size) in enumerate(shapes.items(), 1):
            weights = _dequantised(tensors[name]).reshape(size)
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                weights = _halves(weights, size[0] // shape.head_width)
            file.write(_bf16(weights).tobytes())
            progress(done, len(shapes))
    path.chmod(0o644)


def _name(name: str) -> str:
    """Return Hugging Face's name of a tensor: ``blk.3.attn_q.weight`` is
    ``model.layers.3.self_attn.q_proj.weight``.
    """
    stem, _, kind = name.rpartition(".")
    layer, _, part = stem.rpartition(".")
    place = layer.replace("blk.", "model.layers.") + "." if layer else ""
    return f"{place}{_NAMES.get(part, part)}.{kind}"


def _dequantised(tensor: gguf.ReaderTensor) -> npt.NDArray[np.float32]:
    import gguf

    return gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype("<f4", copy=False)


def _halves(weights: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows of queries or keys, from neighbouring pairs to halves of each head."""
    rows, width = weights.shape
    pairs = weights.reshape(heads, rows // heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(rows, width)


def _bf16(weights: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return the numbers as bfloat16: their upper halves, rounded to the nearest, ties to
    even.
    """
    bits = np.ascontiguousarray(weights).view("<u4")
    rounded: npt.NDArray[np.uint16] = (bits + (0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    return rounded


def _json(table: object) -> bytes:
    return json.dumps(table, ensure_ascii=False, indent=1).encode() + b"\n"


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    path.chmod(0o644)
