"""Successive policies of a real training run, for benches that need one a step older.

``python -m bench policies --store DIR [--model DIR] [--keep 11 12 23 24] [--seconds 150]``
``[--device cpu]``

SmolLM2-135M-Instruct learns to add by the recipe of ``make demo-llm``; the policies of the
steps to keep are written to DIR/step-N, folders in bfloat16 as they are published.
After so many seconds the learner stops at a checkpoint: the exit status is `UNFINISHED`, and
the same command goes on. 6 CPU seconds and 4 GiB a step.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from time import perf_counter
from typing import Final

import torch

from bench.llm_controls import MODEL, RIGHT, Course, OneProcess
from roles.engines.torch.device import find_device
from roles.rl.recipes import SMALL_MODEL

UNFINISHED: Final = 3
"""Exit status of a bench that goes on when it is run again."""
KEPT: Final = (11, 12, 23, 24)
"""Kept steps: in the middle, where most values change, and at the end, where the rate is
lowest."""


def path_of(store: Path, step: int) -> Path:
    """Return the folder of a step's policy."""
    return store / f"step-{step}"


def run(args: list[str]) -> int:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="python -m bench policies")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--keep", type=int, nargs="+", default=KEPT)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(args)
    torch.set_num_threads(1)
    store: Path = options.store
    store.mkdir(parents=True, exist_ok=True)
    checkpoint, end = store / "checkpoint", perf_counter() + options.seconds
    learning = OneProcess(
        options.model,
        Course(RIGHT, 0),
        SMALL_MODEL.sampling,
        SMALL_MODEL.learner,
        checkpoint=checkpoint,
        questions=1,
        device=find_device(options.device),
    )
    while (done := learning.learner.step_number) < max(options.keep):
        if perf_counter() > end:
            learning.learner.save(checkpoint, None)
            return UNFINISHED
        one = learning.step()
        if one is None:
            print(f"step {done}: no group had spread")
            return 1
        print(
            f"step {one.step}: changed {one.changed:.2%}, k3 {one.k3:.4f}, tokens {one.tokens}",
            flush=True,
        )
        if one.step in options.keep:
            learning.learner.save(None, path_of(store, one.step))
    return 0
