"""Does one engine believe what another wrote, and does it find out cheats? On a real model.

``python -m bench engines [--writer vllm] [--reader torch] [--dtype float32] [--draw gumbel]``
``[--model DIR] [--groups 16] [--cheats 2] [--new-tokens 48] [--rounds 1] [--json FILE]``

Honest groups of 16 answers, in batches of four; then each way to cheat. Both engines are in
this process, so it runs in the environment of the writer: .venv-vllm/bin/python for vllm. Speed
is in tokens per CPU second of one thread; with ``--rounds`` the reader writes as well, by
turns, for the ratio. The exit status is 1 if honest work was refused.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from bench.report import Report
from proofs.checks import Evidence, Limits, Reason, Verdict, judge, judge_pool
from proofs.sampling import DrawRule
from roles.engines import safetensors
from roles.engines.base import Group, GroupTask, Sampling
from roles.engines.config import NODE_ENGINES, Dtype, EngineConfig, VllmOptions
from roles.engines.safetensors import RawTensor
from roles.engines.worker import LocalEngine, make_engine
from roles.envs.text import Message
from roles.models.bundle import WEIGHTS, end_tokens, read_config
from roles.models.fetch import MODELS, default_folder
from roles.models.tokenizer import Tokenizer

SIZE: Final = 16
"""Answers of a group."""
BATCH: Final = 4
"""Groups drawn together: 64 rows."""
CHANGED: Final = 0.018
"""Share of bf16 values that a late step of training moves, by one ulp most of them."""
CACHE: Final = 512 * 1024 * 1024
"""Bytes of vLLM's cache: 11,000 tokens of the model in float32, and a batch has 6,000."""
_BF16: Final = "BF16"

Bits: TypeAlias = NDArray[np.uint16]
"""bf16 values."""

TOPICS: Final = (
    "the sea", "how bread is baked", "a lost dog", "the moon", "a train ride", "rain",
    "an old clock", "prime numbers", "tea", "birds in winter", "a school", "soup",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Work:
    """Groups, the tasks that they are sold as answers to, and what writing them took."""

    tasks: list[GroupTask]
    groups: list[Group]
    seconds: float

    @property
    def tokens(self) -> int:
        """Of all answers."""
        return sum(len(one.tokens) for group in self.groups for one in group.completions)


def run(args: list[str]) -> int:
    """Run the bench; 1 if honest work was refused."""
    parser = argparse.ArgumentParser(prog="python -m bench engines")
    parser.add_argument("--writer", choices=NODE_ENGINES, default="vllm")
    parser.add_argument("--reader", choices=NODE_ENGINES, default="torch")
    parser.add_argument("--dtype", type=Dtype, default=Dtype.FLOAT32)
    parser.add_argument("--draw", type=DrawRule, default=DrawRule.GUMBEL)
    parser.add_argument("--model", type=Path, default=default_folder(MODELS["smollm2"]))
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--cheats", type=int, default=2, help="groups of each kind")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(args)
    if not 0 < options.cheats < options.groups:
        parser.error("--cheats is at least 1, and below --groups")
    os.environ["OMP_NUM_THREADS"] = "1"
    described = read_config(options.model)
    config = EngineConfig(
        kind=options.writer,
        shape=described.shape,
        dtype=options.dtype,
        draw=options.draw,
        context=1024,
        end_tokens=end_tokens(options.model, described),
        vllm=VllmOptions(cache=CACHE),
    )
    sampling = Sampling(1.0, options.new_tokens, SIZE)
    writer = make_engine(config)  # vLLM sets up the process before torch is there
    reader = make_engine(replace(config, kind=options.reader))
    for engine in (writer, reader):
        engine.load(str(options.model))
    report = Report("engines")
    tasks = make_tasks(options.model, options.groups)
    honest = write(writer, tasks, sampling)
    limits = Limits.fp32() if options.dtype is Dtype.FLOAT32 else Limits.bf16()
    is_sound = describe(report, "honest", read(reader, honest, sampling), limits)
    report.add("honest", options.writer, "written", "tokens/CPU s", [rate(honest)])
    for name, work in cheats(writer, tasks[: options.cheats], honest, sampling, options.model):
        describe(report, name, read(reader, work, sampling), limits)
    writer.load(str(options.model))
    compare(report, writer, reader, tasks[:BATCH], sampling, options)
    print(report)
    report.write(options.json)
    return 0 if is_sound else 1


def make_tasks(folder: Path, count: int, salt: str = "") -> list[GroupTask]:
    """Questions in the model's chat template, with 16 seeds each."""
    tokenizer = Tokenizer.open(folder)
    return [
        GroupTask(
            group,
            tokenizer.chat(
                [Message("user", f"Tell me {group + 3} things about {TOPICS[group % 12]}.")]
            ),
            tuple(
                hashlib.sha256(f"{salt} {group} {slot}".encode()).digest()
                for slot in range(SIZE)
            ),
        )
        for group in range(count)
    ]


def write(engine: LocalEngine, tasks: Sequence[GroupTask], sampling: Sampling) -> Work:
    """Draw the groups of these tasks, a batch at a time."""
    groups: list[Group] = []
    before = process_time()
    for start in range(0, len(tasks), BATCH):
        groups += engine.generate(tasks[start : start + BATCH], sampling)
    return Work(list(tasks), groups, process_time() - before)


def read(engine: LocalEngine, work: Work, sampling: Sampling) -> list[Evidence]:
    """What the reader sees in it."""
    found = engine.score(work.tasks, work.groups, sampling)
    return [scored.evidence for scored in found]


def rate(work: Work) -> float:
    """Tokens per CPU second."""
    return work.tokens / work.seconds


def cheats(
    writer: LocalEngine,
    tasks: list[GroupTask],
    honest: Work,
    sampling: Sampling,
    model: Path,
) -> Iterator[tuple[str, Work]]:
    """Each kind of work that is not what it is sold as. Changes the writer's weights."""
    others = make_tasks(model, len(tasks), "another draw")
    yield "best of n (other seeds)", replace(write(writer, others, sampling), tasks=tasks)
    for temperature in (0.9, 0.0):
        cooler = replace(sampling, temperature=temperature)
        yield f"temperature {temperature}", write(writer, tasks, cooler)
    swapped = [
        replace(task, prompt=other.prompt)
        for task, other in zip(honest.tasks, honest.tasks[1:], strict=False)
    ][: len(tasks)]
    yield "another prompt", Work(swapped, honest.groups[: len(swapped)], 0.0)
    for name, change in CHANGES.items():
        with TemporaryDirectory(prefix="shoal-bench-") as folder:
            path = Path(folder) / WEIGHTS
            path.write_bytes(altered((model / WEIGHTS).read_bytes(), change))
            writer.load(str(path))
            yield name, write(writer, tasks, sampling)


def altered(weights: bytes, change: Callable[[Bits], Bits]) -> bytes:
    """A weights file with its matrices changed. They must be bf16."""
    tensors = safetensors.decode_untrusted(weights)
    for name, raw in tensors.items():
        if raw.dtype == _BF16 and len(raw.shape) == 2:
            bits = np.frombuffer(raw.data, dtype=np.uint16).reshape(raw.shape)
            tensors[name] = RawTensor(_BF16, raw.shape, change(bits).tobytes())
    return safetensors.encode(tensors)


def one_step(bits: Bits) -> Bits:
    """Values moved by one ulp towards zero, as many as one late step of training changes."""
    moved = np.random.default_rng(bits.size).random(bits.shape, dtype=np.float32) < CHANGED
    return np.where(moved & (bits & 0x7FFF != 0), bits - 1, bits).astype(np.uint16)


def rounded(steps: int) -> Callable[[Bits], Bits]:
    """Values as integers of so many steps to either side of 0, with a scale for each row."""

    def change(bits: Bits) -> Bits:
        values = (bits.astype(np.uint32) << 16).view(np.float32)
        scale = np.maximum(np.abs(values).max(axis=1, keepdims=True) / steps, 1e-30)
        found = (np.rint(values / scale) * scale).astype(np.float32).view(np.uint32)
        nearest: Bits = ((found + 0x7FFF + (found >> 16 & 1)) >> 16).astype(np.uint16)
        return nearest

    return change


CHANGES: Final = {
    "one step older": one_step,
    "int8 weights": rounded(127),
    "int4 weights": rounded(7),
}


def describe(report: Report, name: str, found: Sequence[Evidence], limits: Limits) -> bool:
    """Record what was seen; whether all of it was accepted."""
    tokens = sum(one.tokens for one in found)
    reasons = Counter(judge(one, limits).reason for one in found)
    pool = judge_pool(found, limits)
    reasons_text = ", ".join(f"{count} {reason.value}" for reason, count in reasons.items())
    print(f"{name}: {len(found)} groups, {tokens} tokens: {reasons_text}; pooled: {pool}")
    rejected = len(found) - reasons[Reason.WITHIN_LIMITS]
    gap = sum(one.gap_mean * one.tokens for one in found) / tokens
    off = sum(one.draw_mismatches for one in found) / tokens
    for metric, unit, values in (
        ("rejected", "of a group", [rejected / len(found)]),
        ("exponents off", "at most", [float(max(one.exponent_mismatches for one in found))]),
        ("mantissa mean", "ulp", [one.mantissa_mean for one in found]),
        ("mantissa mean, worst", "ulp", [max(one.mantissa_mean for one in found)]),
        ("draw distance", "at most", [max(one.draw_distance for one in found)]),
        ("gap, mean", "of scores", [gap]),
        ("gap, worst", "of scores", [max(one.gap_max for one in found)]),
        ("tokens off", "share", [off]),
    ):
        report.add(name, "all", metric, unit, [v if math.isfinite(v) else -1.0 for v in values])
    return not rejected and pool.verdict is Verdict.ACCEPTED


def compare(
    report: Report,
    writer: LocalEngine,
    reader: LocalEngine,
    tasks: list[GroupTask],
    sampling: Sampling,
    options: argparse.Namespace,
) -> None:
    """Both engines write the same batch, by turns."""
    if not options.rounds:
        return
    pairs = [
        [rate(write(engine, tasks, sampling)) for engine in (writer, reader)]
        for _ in range(options.rounds)
    ]
    for engine, rates in zip(
        (options.writer, options.reader), zip(*pairs, strict=True), strict=True
    ):
        report.add("64 rows", engine, "written", "tokens/CPU s", rates)
    report.compare("64 rows", "written", options.writer, options.reader)
