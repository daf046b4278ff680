"""Cost of a training step with a group in one row, and with a row for each completion.

``python -m bench packing [--json FILE] [--rounds 5] [--model tiny|small|base]``

A step of 16 groups of 8 answers of 7 tokens to prompts of 26 tokens, by turns both ways; CPU
seconds of gradients alone, and the median of the ratios round by round. ``tiny`` is the demo's
model, ``small`` has 12 M parameters and a vocabulary of 16,384 (10 CPU seconds a round),
``base`` the shape of SmolLM2's 135 M with drawn weights (40 a round, 5 GB).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from random import Random
from typing import Final

import numpy as np
import torch
from rich.console import Console

from bench.report import Report
from roles.contract.core.shape import ModelShape
from roles.engines.base import Completion, TrainingGroup
from roles.engines.config import Autocast, EngineConfig
from roles.engines.torch.device import uses_bfloat16
from roles.engines.torch.gradient import Aim, add_gradient, learning_batches
from roles.engines.torch.model import TransformerModel
from roles.engines.torch.packing import ROW_TOKENS
from roles.rl.algorithms.find import find_algorithm
from roles.rl.recipes import SORTER

SHAPES: Final = {
    "tiny": SORTER,
    "small": ModelShape(
        vocabulary=16_384, width=256, layers=6, query_heads=4, key_heads=2, head_width=64,
        feed_forward=768, qk_norm=False, tied=True,
    ),
    "base": ModelShape(
        vocabulary=49_152, width=576, layers=30, query_heads=9, key_heads=3, head_width=64,
        feed_forward=1536, rope_base=1e5, qk_norm=False, tied=True,
    ),
}  # fmt: skip
GROUPS, SIZE, PROMPT, ANSWER = 16, 8, 26, 7
PACKED, ROWS = "packed", "a row each"


def run(args: list[str]) -> int:
    """Run the benchmark. Return 1 if packing does not halve the cost for a model of some
    size."""
    parser = argparse.ArgumentParser(prog="python -m bench packing")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", choices=SHAPES, default="small")
    parser.add_argument("--autocast", choices=[one.value for one in Autocast], default="off")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(args)
    torch.set_num_threads(1)
    shape = SHAPES[options.model]
    model = TransformerModel(shape)
    model.initialise(0)
    bf16 = uses_bfloat16(EngineConfig(shape=shape, autocast=Autocast(options.autocast)))
    groups = draw_groups(shape.vocabulary)
    seconds: dict[str, list[float]] = {PACKED: [], ROWS: []}
    for _ in range(options.rounds):
        for subject, taken in seconds.items():
            taken.append(cost(model, groups, subject, bf16))
    report = Report("packing")
    case = f"{options.model}, {'bfloat16' if bf16 else 'float32'}"
    for subject, taken in seconds.items():
        report.add(case, subject, "gradients of a step", "CPU seconds", taken)
    report.compare(case, "gradients of a step", ROWS, PACKED)
    ratio = report.ratios[-1].median
    Console().print(
        f"{case}: {ROWS} {min(seconds[ROWS]):.2f}, {PACKED} {min(seconds[PACKED]):.2f} CPU s;"
        f" {ratio:.2f} times cheaper",
        highlight=False,
    )
    report.write(options.json)
    return 0 if ratio >= 2 or options.model == "tiny" else 1


def draw_groups(vocabulary: int) -> list[TrainingGroup]:
    rng = Random(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocabulary) for _ in range(count))

    return [
        TrainingGroup(
            tokens(PROMPT),
            tuple(Completion(tokens(ANSWER), (-9.0,) * ANSWER) for _ in range(SIZE)),
            tuple(float(one % 2) for one in range(SIZE)),
        )
        for _ in range(GROUPS)
    ]


def cost(
    model: TransformerModel, groups: list[TrainingGroup], subject: str, bf16: bool
) -> float:
    """Return the CPU seconds of one step's gradients."""
    advantages = [np.array([1.0 - 2 * (one % 2) for one in range(SIZE)], np.float32)] * GROUPS
    aim = Aim(
        objective=find_algorithm("grpo"),
        temperature=1.0,
        limit=ANSWER,
        tokens=GROUPS * SIZE * ANSWER,
        sequences=GROUPS * SIZE,
    )
    model.zero_grad()
    start = time.process_time()
    limit = ROW_TOKENS if subject == PACKED else 1
    for batch in learning_batches(groups, advantages, row_tokens=limit):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            add_gradient(model, batch, aim)
    return time.process_time() - start


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
