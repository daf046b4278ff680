"""``shoal models inspect DIR``: the facts of a model's folder, and whether it can be used."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from roles.contract.core.pin import FilePin
from roles.models.bundle import check_weights, pin_folder, read_config
from roles.models.config import ModelConfig
from roles.models.ends import EndTokens, read_end_tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="in Hugging Face's layout")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(options: argparse.Namespace) -> None:
    """Inspect a model's folder and print its facts. Every file is read."""
    config = read_config(options.folder)
    pins = pin_folder(options.folder)
    check_weights(options.folder, config)
    said = describe(config, read_end_tokens(options.folder, config), pins)
    print(json.dumps(said) if options.json else _text(said))  # noqa: T201 - this is the result


def describe(
    config: ModelConfig, ends: EndTokens, pins: tuple[FilePin, ...]
) -> dict[str, object]:
    """Return the facts about a model as plain values; memory is computed, in bytes."""
    shape = config.shape
    return {
        "family": shape.architecture or shape.family.value,
        "parameters": shape.parameters,
        "vocabulary": shape.vocabulary,
        "dtype": config.dtype,
        "context": config.context,
        "end_tokens": list(ends.tokens),
        "notes": [*config.notes, *ends.notes],
        "bytes": sum(pin.size for pin in pins),
        "memory": {
            "weights_bfloat16": 2 * shape.parameters,
            "weights_float32": 4 * shape.parameters,
            "training": 16 * shape.parameters,
            "cache_per_token_float32": 4
            * 2
            * shape.layers
            * shape.key_heads
            * shape.head_width,
        },
        "files": [
            {"name": pin.name, "size": pin.size, "sha256": pin.digest.hex()} for pin in pins
        ],
    }


def _text(said: dict[str, object]) -> str:
    """Return the same facts as text for people."""
    memory, files, notes = said["memory"], said["files"], said["notes"]
    assert isinstance(memory, dict)
    assert isinstance(files, list)
    assert isinstance(notes, list)
    ends = said["end_tokens"]
    return "\n".join(
        [
            f"family      {said['family']}",
            f"parameters  {said['parameters']:,}",
            f"dtype       {said['dtype']}",
            f"context     {said['context']:,} tokens of {said['vocabulary']:,}",
            f"end tokens  {ends}",
            f"disk        {_mb(said['bytes'])}",
            (
                f"memory      weights {_mb(memory['weights_bfloat16'])} (bfloat16) or"
                f" {_mb(memory['weights_float32'])} (float32),"
                f" and {memory['cache_per_token_float32'] / 1000:,.0f} kB a token in a cache;"
                f" to train {_mb(memory['training'])}, and activations"
            ),
            *(f"note        {note}" for note in notes),
            *(f"{one['sha256']}  {one['name']}" for one in files),
        ]
    )


def _mb(amount: object) -> str:
    assert isinstance(amount, int)
    return f"{amount / 1e6:,.0f} MB"
