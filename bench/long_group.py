"""A group of very long answers, drawn, scored and learnt from by the engines.

``python -m bench long-group [--tokens 32768] [--answers 16] [--json FILE]``

A model as small as one may be (one layer, width 32, 64 tokens), so that what remains is what
grows with the length: the cache, the proofs, the content files, attention. Worker, validator
and trainer are processes of their own, one after the other, with the files that an engine gets;
the figures are each one's CPU seconds and its peak of memory, libraries (some 250 MiB)
included. The trainer's log-probs are the validator's. The exit status is 1 if the honest group
is refused, or the step that was learnt leaves the policy as it was.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
import torch
from rich.console import Console

from bench.report import Report
from proofs.checks import Limits, Verdict, judge
from roles.contract.core.sampling import SamplingTerms
from roles.engines import codec
from roles.engines.base import Completion, GroupTask, Sampling, TrainingGroup
from roles.engines.config import EngineConfig
from roles.engines.worker import LocalEngine, draw_all, make_engine
from roles.rl.learner import LearnerConfig
from roles.rl.recipes import SORTER

SHAPE: Final = replace(
    SORTER, vocabulary=64, width=32, layers=1, query_heads=1, key_heads=1, head_width=32
)
PROMPT: Final = 16
"""Tokens of the prompt."""
_SUBJECT: Final = "shoal"


def run(args: list[str]) -> int:
    """Run the benchmark. Return 1 if honest work is refused or nothing is learnt."""
    parser = argparse.ArgumentParser(prog="python -m bench long-group")
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--answers", type=int, default=16)
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(args)
    if options.part:
        torch.set_num_threads(1)
        sampling = Sampling(1.0, options.tokens, options.answers)
        found = measure(PARTS[options.part], options.folder, sampling)
        print(json.dumps(found), file=sys.__stdout__)
        return 0
    report = Report("long-group")
    case = f"{options.answers} x {options.tokens} tokens"
    is_sound = True
    with TemporaryDirectory() as folder:
        for part in PARTS:
            for metric, value in _process(part, folder, options).items():
                unit = _UNITS.get(metric, "count")
                report.add(f"{case}, {part}", _SUBJECT, metric, unit, [value])
                is_sound &= metric not in ("refused", "unchanged") or not value
            print(f"{case}: {part} done", flush=True)
    Console().print(str(report), soft_wrap=True)
    report.write(options.json)
    return 0 if is_sound else 1


_UNITS: Final = {"CPU": "s", "peak": "MiB", "file": "MiB", "bytes a token": "B"}


def _process(part: str, folder: str, options: argparse.Namespace) -> dict[str, float]:
    sizes = ["--tokens", str(options.tokens), "--answers", str(options.answers)]
    command = ["long-group", "--part", part, "--folder", folder, *sizes]
    done = subprocess.run(
        [sys.executable, "-m", "bench", *command], check=True, stdout=subprocess.PIPE, text=True
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def measure(
    part: Callable[[LocalEngine, Path, Sampling], dict[str, float]],
    folder: Path,
    sampling: Sampling,
) -> dict[str, float]:
    """Return the figures of one process."""
    config = EngineConfig(
        shape=SHAPE,
        context=PROMPT + sampling.max_new_tokens,
        end_tokens=(),
        sampling=SamplingTerms(
            steps=1,
            max_new_tokens=sampling.max_new_tokens,
            group_size=sampling.group_size,
        ),
        learner=LearnerConfig(groups=1, rate=8e-4),
    )
    engine = make_engine(config)
    before = time.process_time()
    found = part(engine, folder, sampling)
    found["CPU"] = time.process_time() - before
    found["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return found


def _task(sampling: Sampling) -> GroupTask:
    rng = Random(0)
    return GroupTask(
        0,
        tuple(rng.randrange(SHAPE.vocabulary) for _ in range(PROMPT)),
        tuple(rng.randbytes(32) for _ in range(sampling.group_size)),
    )


def publish(engine: LocalEngine, folder: Path, _: Sampling) -> dict[str, float]:
    """Write the policy from the trainer's own weights."""
    engine.open(str(folder / "checkpoint"))
    engine.save(str(folder / "checkpoint"), str(folder / "policy.safetensors"))
    return {}


def draw(engine: LocalEngine, folder: Path, sampling: Sampling) -> dict[str, float]:
    """Do a worker's part: draw the group."""
    engine.load(str(folder / "policy.safetensors"))
    [group] = draw_all(engine, [_task(sampling)], sampling)
    record = codec.encode_group(group)
    (folder / "group").write_bytes(record)
    tokens = sum(len(one.tokens) for one in group.completions)
    proofs = sum(len(one.proof) for one in group.completions)
    return {
        "tokens": tokens,
        "file": len(record) / 2**20,
        # on the wire a token has three, and its proof
        "bytes a token": 3 + proofs / tokens,
    }


def score(engine: LocalEngine, folder: Path, sampling: Sampling) -> dict[str, float]:
    """Do a validator's part: score the group."""
    engine.load(str(folder / "policy.safetensors"))
    group = codec.decode_group((folder / "group").read_bytes())
    [scored] = engine.score([_task(sampling)], [group], sampling)
    verdict = judge(scored.evidence, Limits.fp32()).verdict
    (folder / "logprobs").write_bytes(scored.logprobs)
    return {
        "refused": float(verdict is not Verdict.ACCEPTED),
        "chunks": scored.evidence.chunks,
    }


def learn(engine: LocalEngine, folder: Path, sampling: Sampling) -> dict[str, float]:
    """Do a trainer's part: one step, in which half of the answers are rewarded."""
    engine.open(str(folder / "checkpoint"))
    group = codec.decode_group((folder / "group").read_bytes())
    logprobs = np.frombuffer((folder / "logprobs").read_bytes(), dtype="<f2").astype(float)
    completions, start = list[Completion](), 0
    for one in group.completions:
        end = start + len(one.tokens)
        completions.append(Completion(one.tokens, tuple(logprobs[start:end].tolist())))
        start = end
    rewards = tuple(float(number % 2) for number in range(len(completions)))
    training = TrainingGroup(_task(sampling).prompt, tuple(completions), rewards)
    record = codec.encode_training(training)
    report = engine.step([codec.decode_training(record)])
    changed = folder / "after.safetensors"
    engine.save("", str(changed))
    is_same = changed.read_bytes() == (folder / "policy.safetensors").read_bytes()
    return {
        "file": len(record) / 2**20,
        "unchanged": float(is_same),
        "step": float(report.step),
    }


PARTS: Final[Mapping[str, Callable[[LocalEngine, Path, Sampling], dict[str, float]]]] = {
    "publish": publish,
    "draw": draw,
    "score": score,
    "learn": learn,
}


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
