"""Tokens a second on a GPU: drawing with proofs, replaying, and a step of GRPO.

``python -m bench devices [--device cuda] [--shapes smollm2 1.5b 7b] [--learn smollm2 1.5b]``
``[--rows 256 1024] [--new 64] [--rounds 3] [--json FILE]``

Weights are random, in bfloat16, drawn on the device: nothing is read from disk. Where this
Python has transformers, it generates as many tokens with the same shape by turns, with its own
sampling and without proofs. A device computes while the host goes on, so these are seconds of a
clock, unlike those of other benches: run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any, Final

import torch

from bench.llm import PROMPT, random_tasks
from bench.report import Report
from proofs.sampling import DrawRule
from roles.contract.core.sampling import SamplingTerms
from roles.contract.core.shape import Dtype, ModelShape
from roles.engines.base import GroupTask, Sampling, TrainingGroup
from roles.engines.config import EngineConfig
from roles.engines.torch import sampler, scorer
from roles.engines.torch.device import find_device
from roles.engines.torch.learner import TorchLearner
from roles.engines.torch.model import TransformerModel
from roles.models.config import ModelConfig, write_config
from roles.rl.learner import LearnerConfig
from roles.rl.recipes import SORTER

GROUP: Final = 16
"""Completions of a group."""
LEARNT: Final = 16
"""Groups of a step."""
SPREAD: Final = 0.02
"""Spread of the drawn weights, as initialisers have it."""

_qwen2 = partial(ModelShape, qkv_bias=True, qk_norm=False, head_width=128, rope_base=1e6)
SHAPES: Final = {
    "tiny": replace(SORTER, vocabulary=300, qk_norm=False, tied=True),
    "smollm2": ModelShape(
        vocabulary=49_152, width=576, layers=30, query_heads=9, key_heads=3, head_width=64,
        feed_forward=1536, rope_base=1e5, tied=True, qk_norm=False,
    ),
    "1.5b": _qwen2(
        vocabulary=151_936, width=1536, layers=28, query_heads=12, key_heads=2,
        feed_forward=8960, tied=True,
    ),
    "7b": _qwen2(
        vocabulary=152_064, width=3584, layers=28, query_heads=28, key_heads=4,
        feed_forward=18_944,
    ),
}  # fmt: skip
"""SmolLM2-135M, and Qwen2.5 of 1.5 and 7 billion parameters."""


@dataclass(slots=True)
class Spent:
    """Wall seconds, and peak memory of the device."""

    seconds: float = 0.0
    gib: float = 0.0


Generate = Callable[[Sequence[GroupTask], Sampling], None]


def run(args: list[str]) -> int:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="python -m bench devices")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--shapes", nargs="*", choices=SHAPES, default=["smollm2", "1.5b", "7b"]
    )
    parser.add_argument("--learn", nargs="*", choices=SHAPES, default=["smollm2", "1.5b"])
    parser.add_argument("--rows", type=int, nargs="+", default=[256])
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(args)
    device = find_device(options.device)
    report = Report("devices")
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    print(f"{card}, torch {torch.__version__}")
    for name in options.shapes:
        generate(report, name, device, options)
    for name in options.learn:
        learn(report, name, device, options)
        report.write(options.json)
    print(report)
    return 0


def generate(
    report: Report, name: str, device: torch.device, options: argparse.Namespace
) -> None:
    """Draw, replay, and let transformers generate, by turns."""
    shape = SHAPES[name]
    model = TransformerModel(shape, Dtype.BFLOAT16, device)
    model.lay_for_reading()
    fill(model)
    other = open_transformers(shape, device)
    sampling = Sampling(1.0, options.new, GROUP)
    for rows in options.rows:
        case, tokens = f"{name}, {rows} rows of {options.new}", rows * options.new
        rounds = [
            take_turns(
                model,
                other,
                random_tasks(number, rows // GROUP, shape.vocabulary, GROUP),
                sampling,
            )
            for number in range(options.rounds + 1)  # the first warms up
        ][1:]
        for subject in rounds[0]:
            rates = [tokens / one[subject].seconds for one in rounds]
            report.add(case, subject, "tokens", "1/s", rates)
            report.add(case, subject, "memory", "GiB", [one[subject].gib for one in rounds])
            print(f"{case}: {subject} {max(rates):.0f} tokens a second", flush=True)
        report.write(options.json)
        if other is not None:
            report.compare(case, "tokens", "draw and prove", "transformers")
        report.compare(case, "tokens", "replay", "draw and prove")


def take_turns(
    model: TransformerModel,
    other: Generate | None,
    tasks: Sequence[GroupTask],
    sampling: Sampling,
) -> dict[str, Spent]:
    """Return the times of each subject, taken by turns."""
    ends, rule = frozenset[int](), DrawRule.GUMBEL
    with measured(model.device) as drawing:
        groups = sampler.generate(model, tasks, sampling, ends, rule)
    with measured(model.device) as replaying:
        scorer.score(model, tasks, groups, sampling, ends, rule)
    found = {"draw and prove": drawing, "replay": replaying}
    if other is not None:
        torch.backends.cuda.enable_cudnn_sdp(True)  # transformers' own choice
        with measured(model.device) as generating:
            other(tasks, sampling)
        torch.backends.cuda.enable_cudnn_sdp(False)
        found["transformers"] = generating
    return found


def learn(report: Report, name: str, device: torch.device, options: argparse.Namespace) -> None:
    """Measure steps of GRPO on random answers."""
    shape = SHAPES[name]
    sampling = SamplingTerms(steps=1, group_size=GROUP, max_new_tokens=options.new)
    rules = LearnerConfig(groups=LEARNT, rate=8e-4)
    config = EngineConfig(shape=shape, sampling=sampling, learner=rules)
    learner = TorchLearner(config, device)
    fill(learner.model)
    rng, seconds, peaks = Random(0), list[float](), list[float]()
    model = TransformerModel(shape, Dtype.BFLOAT16, device)
    fill(model)
    tasks = random_tasks(0, LEARNT, shape.vocabulary, GROUP)
    asked = Sampling(1.0, options.new, GROUP)
    drawn = sampler.draw(model, tasks, asked, frozenset(), DrawRule.GUMBEL)
    del model
    groups = [
        TrainingGroup(task.prompt, one.completions, tuple(rng.random() for _ in range(GROUP)))
        for task, one in zip(tasks, drawn, strict=True)
    ]
    for number in range(options.rounds + 1):
        with measured(device) as spent:
            learner.step(groups)
        if number:
            seconds.append(spent.seconds)
            peaks.append(spent.gib)
    case, tokens = f"{name}, a step of {LEARNT} x {GROUP} x {options.new}", LEARNT * GROUP
    report.add(case, "GRPO", "tokens", "1/s", [tokens * options.new / one for one in seconds])
    report.add(case, "GRPO", "step", "s", seconds)
    report.add(case, "GRPO", "memory", "GiB", peaks)


@torch.no_grad()
def fill(model: TransformerModel) -> None:
    """Random weights, drawn where they lie; norms are 1."""
    for weight in model.parameters():
        weight.normal_(0.0, SPREAD) if weight.dim() > 1 else weight.fill_(1.0)


@contextmanager
def measured(device: torch.device) -> Iterator[Spent]:
    """Measure the time and the peak memory of a block."""
    spent, on_gpu = Spent(), device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    start = perf_counter()
    yield spent
    if on_gpu:
        torch.cuda.synchronize(device)
    spent.seconds = perf_counter() - start
    spent.gib = torch.cuda.max_memory_allocated(device) / 2**30 if on_gpu else 0.0


def open_transformers(shape: ModelShape, device: torch.device) -> Generate | None:
    """Return a model of this shape; None if transformers is not installed."""
    if importlib.util.find_spec("transformers") is None:
        return None
    from transformers import AutoConfig, AutoModelForCausalLM

    table = json.loads(write_config(ModelConfig(shape=shape, context=4096)))
    config = AutoConfig.for_model(table.pop("model_type"), **table)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to(device)

    def generate(tasks: Sequence[GroupTask], sampling: Sampling) -> None:
        prompts = [task.prompt for task in tasks for _ in task.seeds]
        tokens, new = torch.tensor(prompts, device=device), sampling.max_new_tokens
        with torch.inference_mode():
            found = model.generate(
                tokens, attention_mask=torch.ones_like(tokens), do_sample=True, top_k=0,
                min_new_tokens=new, max_new_tokens=new, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        assert found.shape[1] == PROMPT + new

    return generate
