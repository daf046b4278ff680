"""Tokens a CPU second of each architecture that transformers computes, beside our own decoder.

``python -m bench families [--only NAME ...] [--width 256] [--layers 6] [--new 64]``

Every model has the same sizes and random weights; Llama's are also computed by our decoder. One
thread draws 64 completions with proofs, and scores them. Needs shoal[transformers].
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from random import Random
from time import process_time
from typing import Final

import torch

from roles.contract.core.shape import Dtype
from roles.engines.base import GroupTask, Sampling
from roles.engines.torch import sampler, scorer
from roles.engines.torch.hosted import new_model
from roles.models.bundle import CONFIG
from roles.models.config import HOSTED, read_config_untrusted

VOCABULARY: Final = 8192
HEAD_WIDTH: Final = 64
GROUPS: Final = 8
OWN: Final = "our decoder"


def run(args: list[str]) -> int:
    """Measure the families and print a table."""
    parser = argparse.ArgumentParser(prog="python -m bench families")
    parser.add_argument("--only", nargs="*", choices=HOSTED, default=sorted(HOSTED))
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--new", type=int, default=64)
    options = parser.parse_args(args)
    torch.set_num_threads(1)
    print("| architecture | drawn a CPU second | scored |\n|---|---|---|")
    for name in (OWN, *options.only):
        drawn, scored = measure(name, options)
        print(f"| {name} | {drawn:,.0f} | {scored:,.0f} |", flush=True)
    return 0


def measure(name: str, options: argparse.Namespace) -> tuple[float, float]:
    """Return tokens drawn and scored in a CPU second."""
    architecture = "LlamaForCausalLM" if name == OWN else name
    heads = options.width // HEAD_WIDTH
    table = {
        "model_type": HOSTED[architecture].model_type, "architectures": [architecture],
        "vocab_size": VOCABULARY, "hidden_size": options.width,
        "num_hidden_layers": options.layers, "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2), "head_dim": HEAD_WIDTH,
        "intermediate_size": 3 * options.width, "max_position_embeddings": 1024,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / CONFIG
        path.write_text(json.dumps(table))
        shape = read_config_untrusted(path.read_bytes()).shape
        shape = replace(shape, architecture="" if name == OWN else architecture)
        model = new_model(shape, Dtype.FLOAT32, torch.device("cpu"), Path(folder))
    model.lay_for_reading()
    generator = torch.Generator().manual_seed(0)
    for key, weight in model.named_parameters():
        if weight.dim() > 1:
            weight.normal_(0, 0.02, generator=generator)
        else:
            weight.fill_(float(not key.endswith("bias")))
    rng = Random(0)
    tasks = [
        GroupTask(
            number,
            tuple(rng.randrange(VOCABULARY) for _ in range(32)),
            tuple(hashlib.sha256(bytes([number, one])).digest() for one in range(8)),
        )
        for number in range(GROUPS)
    ]
    sampling = Sampling(temperature=1.0, max_new_tokens=options.new, group_size=8)
    sampler.generate(model, tasks[:1], replace(sampling, max_new_tokens=4), frozenset())
    begun = process_time()
    groups = sampler.generate(model, tasks, sampling, frozenset())
    drawn = process_time()
    scorer.score(model, tasks, groups, sampling, frozenset())
    tokens = GROUPS * 8 * options.new
    return tokens / (drawn - begun), tokens / (process_time() - drawn)
