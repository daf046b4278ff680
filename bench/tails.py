"""Honest noise of a real model in bfloat16, and limits fitted to half of it.

``python -m bench tails --store DIR [--groups 1024] [--cheats 64] [--newer DIR] [--seconds 600]
[--model DIR] [--json FILE]``

SmolLM2 answers the arithmetic environment's default mix by the rule Gumbel, in groups of 16
answers of 12 tokens at most, and torch reads what torch wrote. What was seen of a batch of 8
groups, a submission, is a file in the store, so that a bench that ran out of time goes on, and
all of it can be judged again: 7 CPU seconds a submission. Limits are fitted to every other
group; of the others 2,000 submissions are drawn again and again. Cheats are int8 weights,
temperature 0.9 and, with ``--newer``, the base sold as a policy one step younger (a folder of
``bench policies``). The exit status is 1 if an honest submission is refused.
"""

from __future__ import annotations

import argparse
import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import starmap
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Final

import msgpack
import torch

from bench.llm_controls import MODEL
from bench.report import Report
from proofs.checks import LADDER, Evidence, Limits, judge_pool
from proofs.sampling import DrawRule
from roles.calibrate.limits import fit, rejected_groups, rejected_pools, resampled, to_toml
from roles.calibrate.measure import make_tasks
from roles.calibrate.weights import rewrite, to_int8
from roles.contract.core.shape import Dtype
from roles.engines.base import Sampling
from roles.engines.config import EngineConfig
from roles.engines.worker import LocalEngine, draw_all, make_engine
from roles.envs.arithmetic import ArithmeticEnvironment
from roles.models.bundle import read_config
from roles.models.ends import read_end_tokens
from roles.models.tokenizer import Tokenizer

SAMPLING: Final = Sampling(1.0, 12, 16)
SUBMISSION: Final = 8
"""Groups, drawn and read together."""
POOLS: Final = (8, 16)
"""Groups of pools of cheats: a submission, and two or one of a run of short answers."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way to draw, with its weights."""

    name: str
    groups: int
    draws: Path
    """Path of the weights that are drawn from."""
    claims: Path
    """Path of the weights that are claimed."""
    temperature: float = 1.0


class Recorder:
    """Two engines, and the store of one engine's evidence about the other's work."""

    def __init__(self, model: Path, store: Path) -> None:
        config = read_config(model)
        self._tokenizer = Tokenizer.open(model)
        self._config = EngineConfig(
            shape=config.shape,
            dtype=Dtype.BFLOAT16,
            draw=DrawRule.GUMBEL,
            context=config.context,
            end_tokens=read_end_tokens(model, config).of_line,
            environment=None,
        )
        self._store = store
        self._environment = ArithmeticEnvironment()

    def record(self, way: Way, end: float) -> list[Evidence]:
        """Record the evidence of all groups of a way, or of as many as there is time for."""
        folder = self._store / way.name.replace(" ", "-")
        folder.mkdir(parents=True, exist_ok=True)
        engines: tuple[LocalEngine, LocalEngine] | None = None
        for start in range(0, way.groups, SUBMISSION):
            path = folder / f"{start:06}"
            if path.exists() or perf_counter() > end:
                continue
            engines = engines or (self._open(way.draws), self._open(way.claims))
            values = list(map(astuple, self._submit(way, start, *engines)))
            unfinished = path.with_suffix(".tmp")
            unfinished.write_bytes(msgpack.packb(values))
            unfinished.rename(path)
        return list(read(folder))

    def _open(self, weights: Path) -> LocalEngine:
        engine = make_engine(self._config)
        engine.load(str(weights))
        return engine

    def _submit(
        self, way: Way, start: int, writer: LocalEngine, reader: LocalEngine
    ) -> Iterator[Evidence]:
        seeds = [f"{way.name} {start + n}".encode() for n in range(SUBMISSION)]
        asked = [self._environment.task(hashlib.sha256(seed).digest()) for seed in seeds]
        prompts = [self._tokenizer.chat(one.messages, one.prefill) for one in asked]
        tasks = make_tasks(prompts, SAMPLING.group_size, f"{way.name} {start}")
        groups = draw_all(writer, tasks, replace(SAMPLING, temperature=way.temperature))
        return (one.evidence for one in reader.score(tasks, groups, SAMPLING))


def read(folder: Path) -> Iterator[Evidence]:
    """Return the records of a folder of the store, in order."""
    for path in sorted(folder.glob("[0-9]*[0-9]")):
        yield from starmap(Evidence, msgpack.unpackb(path.read_bytes(), use_list=False))


def run(args: list[str]) -> int:
    """Run the bench; 1 if an honest submission is refused."""
    parser = argparse.ArgumentParser(prog="python -m bench tails")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--groups", type=int, default=1024)
    parser.add_argument("--cheats", type=int, default=64)
    parser.add_argument("--newer", type=Path, help="a policy one step younger than the model")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(args)
    torch.set_num_threads(1)
    recorder, end = Recorder(options.model, options.store), perf_counter() + options.seconds
    report = Report("tails")
    with TemporaryDirectory() as folder:
        int8 = rewrite(options.model, Path(folder) / "int8", to_int8)
        model, few = options.model, options.cheats
        ways = [
            Way("honest", options.groups, model, model),
            Way("int8 weights", few, int8, model),
            Way("temperature 0.9", few, model, model, 0.9),
        ]
        if options.newer is not None:
            ways.append(Way("one step older", few, model, options.newer))
        honest, *cheats = [(way.name, recorder.record(way, end)) for way in ways]
    fitted = fit(honest[1][::2], DrawRule.GUMBEL, SUBMISSION)
    print(to_toml(fitted))
    refused = 0
    for name, limits in (("calibrated", fitted), ("preset", Limits.bf16())):
        again = resampled(honest[1][1::2], limits, SUBMISSION)
        refused += again.rejected
        print(f"{name}: of {again.of} honest submissions {again.rejected} are refused")
        report.add(name, "honest", "refused", "submissions", [float(again.rejected)])
        for way, evidence in cheats:
            describe(way, evidence, limits)
    for way, evidence in (honest, *cheats):
        figures(way, evidence)
    report.write(options.json)
    return 1 if refused else 0


def describe(way: str, evidence: Sequence[Evidence], limits: Limits) -> None:
    """Print how often a cheat is found."""
    if len(evidence) <= max(POOLS):
        return
    shares = [resampled(evidence, limits, size).share for size in POOLS]
    apart = [
        evidence[at : at + SUBMISSION]
        for at in range(0, len(evidence) - SUBMISSION + 1, SUBMISSION)
    ]
    reasons = Counter(judge_pool(pool, limits).reason.value for pool in apart)
    print(
        f"  {way}: refused {rejected_groups(evidence, limits).share:.0%} of groups,"
        f" {rejected_pools(evidence, limits, SUBMISSION).share:.0%} of submissions, of 2,000"
        f" pools of {POOLS[0]} and {POOLS[1]} groups {shares[0]:.1%} and {shares[1]:.1%};"
        f" {dict(reasons)}"
    )


def figures(way: str, evidence: Sequence[Evidence]) -> None:
    if not evidence:
        return
    tokens = sum(one.tokens for one in evidence)
    chunks = sum(one.chunks for one in evidence)
    counts = [sum(one.off[n] for one in evidence) for n in range(len(LADDER))]
    steps = zip(LADDER, counts, strict=True)
    off = ", ".join(f"{count / tokens:.3%} by {step:g}" for step, count in steps)
    pools = [evidence[at : at + SUBMISSION] for at in range(0, len(evidence), SUBMISSION)]
    sums = sorted(sum(one.gap_mean * one.tokens for one in pool) for pool in pools)
    print(
        f"{way}: {len(evidence)} groups, {tokens} tokens; off {off};"
        f" largest gap {max(one.gap_max for one in evidence):.3f}, gaps of a submission"
        f" {sums[len(sums) // 2]:.2f}, most {sums[-1]:.2f}; mantissas"
        f" {sum(one.mantissa_mean * one.chunks for one in evidence) / chunks:.3f}, group"
        f" {max(one.mantissa_mean for one in evidence):.2f} at most, chunk"
        f" {max(one.mantissa_worst for one in evidence):.2f}, exponents"
        f" {max(one.exponent_mismatches for one in evidence)}, surprise"
        f" {max(abs(one.surprise) for one in evidence):.1f}"
    )
