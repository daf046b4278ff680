"""Folders of small random models, and the real one where it is: for tests of several files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from roles.engines.config import ModelShape
from roles.engines.safetensors import RawTensor, encode
from roles.models.bundle import tensor_shapes
from roles.models.config import ModelConfig, write_config

BLANK = "Ġ"
"""How ByteLevel writes a blank."""
SPECIAL = ("<|im_start|>", "<|im_end|>")
END = 1
"""`<|im_end|>`."""
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = ModelShape(
    vocabulary=320,
    width=32,
    head_width=8,
    query_heads=4,
    key_heads=2,
    feed_forward=48,
    tied=True,
    qk_norm=False,
)


def tokenizer_json() -> str:
    """A byte-level tokenizer of 258 tokens and a few merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), (BLANK, "w")]
    tokens = [*SPECIAL, *alphabet, *("".join(pair) for pair in merges)]
    core = tokenizers.Tokenizer(
        models.BPE(vocab={token: place for place, token in enumerate(tokens)}, merges=merges)
    )
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(
        [tokenizers.AddedToken(text, normalized=False, special=True) for text in SPECIAL]
    )
    return core.to_str()


def random_weights(shape: ModelShape, seed: int = 0) -> dict[str, RawTensor]:
    """Random bf16 numbers of a model's tensors, by Hugging Face's names."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, size in sorted(tensor_shapes(shape).items()):
        numbers = rng.normal(0, 0.05, size).astype("<f4")
        rounded = (numbers.view("<u4") >> 16).astype("<u2")
        tensors[name] = RawTensor("BF16", size, rounded.tobytes())
    return tensors


def make_folder(
    folder: Path, shape: ModelShape = LLAMA, *, shards: int = 1, seed: int = 0
) -> Path:
    """A whole model's folder: configuration, tokenizer, chat template, random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = ModelConfig(shape=shape, context=128, end_tokens=(END,))
    (folder / "config.json").write_bytes(write_config(config))
    (folder / "tokenizer.json").write_text(tokenizer_json())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": SPECIAL[1], "chat_template": TEMPLATE})
    )
    write_weights(folder, random_weights(shape, seed), shards)
    return folder


def write_weights(folder: Path, tensors: Mapping[str, RawTensor], shards: int = 1) -> None:
    """The tensors as one file, or as shards with an index."""
    if shards == 1:
        (folder / "model.safetensors").write_bytes(encode(tensors))
        return
    names = list(tensors)
    places = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        places |= dict.fromkeys(part, file)
        (folder / file).write_bytes(encode(part))
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
