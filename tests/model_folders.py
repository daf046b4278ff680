"""Folders of small random models, and the real one where it is: for tests of several files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from roles.contract.core.shape import ModelShape
from roles.models.bundle import tensor_shapes
from roles.models.config import ModelConfig, write_config
from roles.models.safetensors import RawTensor, encode
from roles.rl.recipes import SORTER

BLANK = "Ġ"
"""How ByteLevel writes a blank."""
SPECIAL = ("<|im_start|>", "<|im_end|>")
END = 1
"""`<|im_end|>`."""
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA2_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} </s>{% endif %}{% endfor %}"
)
LLAMA = replace(
    SORTER,
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


SENTENCEPIECE = ("prepend", "metaspace", "legacy", "gemma", "unigram", "wordless")
"""Kinds of tokenizers that write a blank as a letter: of Llama 2 as transformers 4.30 and 4.40
converted it, of its legacy mode, of Gemma (no blank before a text, line breaks of its own), of
a unigram model with bytes, and of one that takes line breaks for blanks."""
_BLANK = "\N{LOWER ONE EIGHTH BLOCK}"
_BACK = [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]


def sentencepiece_json(kind: str) -> str:
    """A tokenizer of one of those kinds, whose ``</s>`` is token 2."""
    own = ["<unk>", "<s>", "</s>"]
    bytes_ = [] if kind == "wordless" else [f"<0x{byte:02X}>" for byte in range(256)]
    signs = [chr(sign) for sign in range(33, 127)]
    lines = ["\n", "\n\n"] if kind == "gemma" else []
    merges = [(_BLANK, sign) for sign in "aW"] + ([("\n", "\n")] if lines else [])
    words = [f"{_BLANK}{sign}" for sign in "aW"]
    tokens = [*own, *bytes_, *lines, _BLANK, *signs, *words]
    vocabulary = {token: place for place, token in enumerate(tokens)}
    if kind in ("unigram", "wordless"):
        scores = [(token, -float(place)) for place, token in enumerate(tokens)]
        core = tokenizers.Tokenizer(
            models.Unigram(scores, unk_id=0, byte_fallback=kind == "unigram")
        )
        core.pre_tokenizer = pre_tokenizers.Metaspace()
        core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
        if kind == "wordless":
            core.normalizer = normalizers.Nmt()
    else:
        core = tokenizers.Tokenizer(
            models.BPE(
                vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True,
                byte_fallback=True,
            )
        )  # fmt: skip
        strips = [] if kind == "gemma" else [decoders.Strip(" ", 1, 0)]
        core.decoder = decoders.Sequence([*_BACK, *strips])
        blanks = normalizers.Replace(" ", _BLANK)
        if kind == "gemma":
            core.normalizer = blanks
        elif kind == "prepend":
            core.normalizer = normalizers.Sequence([normalizers.Prepend(_BLANK), blanks])
        else:
            core.pre_tokenizer = pre_tokenizers.Metaspace(
                prepend_scheme="first" if kind == "metaspace" else "always", split=False
            )
    core.add_special_tokens(
        [tokenizers.AddedToken(text, normalized=False, special=True) for text in own]
    )
    return core.to_str()


def make_sentencepiece(folder: Path, kind: str) -> Path:
    """A whole folder whose tokenizer is of this kind, with Llama 2's template."""
    make_folder(folder, replace(LLAMA, vocabulary=400))
    (folder / "tokenizer.json").write_text(sentencepiece_json(kind))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>", "chat_template": LLAMA2_TEMPLATE})
    )
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    edit(folder / "config.json", eos_token_id=2)
    return folder


def edit(path: Path, **changes: object) -> None:
    """Set keys of a JSON file; None removes one."""
    table = json.loads(path.read_text()) if path.exists() else {}
    table = {key: value for key, value in (table | changes).items() if value is not None}
    path.write_text(json.dumps(table))


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
    folder: Path,
    shape: ModelShape = LLAMA,
    *,
    shards: int = 1,
    seed: int = 0,
    context: int = 128,
) -> Path:
    """A whole model's folder: configuration, tokenizer, chat template, random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = ModelConfig(shape=shape, context=context, end_tokens=(END,))
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
