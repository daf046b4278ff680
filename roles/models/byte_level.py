"""The tokenizer of a model whose tokens are bytes, as files that transformers and vLLM open."""

from __future__ import annotations

import json
from typing import Final

_SHOWN: Final = (*range(33, 127), *range(161, 173), *range(174, 256))
"""Bytes that GPT-2's tokenizer writes as themselves; the others are written from U+0100 on."""


def byte_files(context: int, end_tokens: tuple[int, ...]) -> dict[str, str]:
    """Return the files beside ``config.json``, by name: token id = byte, nothing merged.

    Args:
        context: Most tokens that the model reads.
        end_tokens: Ids that end a text.
    """
    hidden = [byte for byte in range(256) if byte not in _SHOWN]
    letters = {chr(256 + place): byte for place, byte in enumerate(hidden)}
    letters |= {chr(byte): byte for byte in _SHOWN}
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    tokenizer: dict[str, object] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
        "normalizer": None, "pre_tokenizer": level, "post_processor": None, "decoder": level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None,
            "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False,
            "byte_fallback": False, "ignore_merges": False,
            "vocab": dict(sorted(letters.items(), key=lambda one: one[1])), "merges": [],
        },
    }  # fmt: skip
    configuration = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    }
    files = {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": configuration,
        "generation_config.json": {"eos_token_id": list(end_tokens)},
    }
    return {
        name: json.dumps(table, ensure_ascii=False, indent=1) for name, table in files.items()
    }
