"""One engine checks another's work on a real model: honest groups accepted, cheats found.

``python -m bench engines [--writer vllm] [--reader torch] [--dtype float32] [--draw gumbel]``
``[--device cuda] [--reader-device cpu] [--batch 4] [--share 0/12]``
``[--model DIR] [--tasks topics] [--groups 16] [--cheats 2] [--falsified 2] [--new-tokens 48]``
``[--store DIR] [--seconds 150] [--fitted] [--policies DIR] [--rounds 1] [--json FILE]``

Honest groups of 16 answers; each way to draw otherwise; and what is made of honest work without
drawing (`bench.falsified`). They are judged by group, by submission of 8 and by pool of 16.
Both engines are in this process, so it runs in the environment of the writer:
.venv-vllm/bin/python for vllm. What was written and what was seen of it stay in the store;
after so many seconds the bench stops with the exit status `UNFINISHED`, and the same command
goes on.
Several processes divide the work among them: each gets its ``--share`` of the same command,
which after them, without a share, judges what they have seen. Limits are presets, or, with
``--fitted``, those of half of the honest groups, which are then not judged. Policies are those
of ``bench policies``: with them a way to cheat is to be one step older, and ``--tasks
addition`` asks the trained one what it was trained on. Speed is in tokens per CPU second of one
thread; with ``--rounds`` the reader writes as well, by turns, for the ratio. The exit status is
1 if honest work was refused.
"""

from __future__ import annotations

import argparse
import math
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Final

from bench.engine_work import (
    BATCH,
    SIZE,
    WEIGHTS_MADE,
    Questions,
    Share,
    Side,
    Store,
    Way,
    Workshop,
    make_tasks,
)
from bench.falsified import FALSIFIED
from bench.report import Report
from proofs.checks import Evidence, Limits, Verdict, judge, judge_pool
from proofs.sampling import DrawRule
from roles.calibrate.limits import (
    POOL,
    Rate,
    binomial_bound,
    fit,
    rejected_groups,
    rejected_pools,
    to_toml,
)
from roles.contract.core.shape import Dtype
from roles.engines.base import Sampling
from roles.engines.config import NODE_ENGINES, EngineConfig, VllmOptions
from roles.models.bundle import read_config
from roles.models.ends import read_end_tokens
from roles.models.fetch import MODELS, default_folder

UNFINISHED: Final = 3
"""Exit status when seconds ran out: run it again."""
SUBMISSION: Final = 8
"""Groups of a submission, as the demo has them."""
CACHE: Final = 512 * 1024 * 1024
"""Bytes of vLLM's cache: 11,000 tokens of the model in float32, and a batch has 6,000."""


def run(args: list[str]) -> int:
    """Run the bench; 1 if honest work was refused."""
    options = _parser().parse_args(args)
    os.environ["OMP_NUM_THREADS"] = "1"
    described = read_config(options.model)
    ends = read_end_tokens(options.model, described)
    config = EngineConfig(
        kind=options.writer,
        shape=described.shape,
        dtype=options.dtype,
        draw=options.draw,
        context=1024,
        end_tokens=ends.of_line if options.tasks is Questions.ADDITION else ends.tokens,
        vllm=VllmOptions(cache=CACHE),
    )
    sampling = Sampling(1.0, options.new_tokens, SIZE)
    ways = plan(options)
    with ExitStack() as stack:
        folder = options.store or Path(stack.enter_context(TemporaryDirectory()))
        store = open_store(options, folder)
        sides = (
            Side(options.writer, options.device),
            Side(options.reader, options.reader_device or options.device),
        )
        workshop = Workshop(config, sides, sampling, options.model, options.policies, store)
        end = perf_counter() + options.seconds
        is_done = workshop.advance(ways, options.tasks, end, options.share)
        if options.share.of > 1:
            return 0 if is_done else UNFINISHED
        report = Report("engines")
        is_sound = judge_all(report, options, ways, store)
        if is_done and options.rounds:
            compare(report, workshop, sides, options)
    print(report)
    report.write(options.json)
    if not is_done:
        return UNFINISHED
    return 0 if is_sound else 1


def open_store(options: argparse.Namespace, folder: Path) -> Store:
    """Open the store of written groups and of this reader's evidence. Its key has every setting
    on which the groups depend."""
    kind = f"{options.dtype.value}-{options.draw.value}-{options.tasks.value}"
    kind = f"{options.writer}-{kind}-{options.new_tokens}"
    if options.batch != BATCH:
        kind += f"-by-{options.batch}"
    reader_device = options.reader_device or options.device
    written, read = (
        "" if device == "cpu" else f"-{device}" for device in (options.device, reader_device)
    )
    return Store(folder, kind + written, options.reader + read)


def judge_all(
    report: Report, options: argparse.Namespace, ways: Sequence[Way], store: Store
) -> bool:
    """Judge each way's evidence; return False if honest work was refused."""
    found = {way: store.evidence(way) for way in ways}
    limits = Limits.fp32() if options.dtype is Dtype.FLOAT32 else Limits.bf16()
    if options.fitted and (seen := found[ways[0]]):
        half = -(-len(seen) // 2)
        limits, found[ways[0]] = fit(seen[:half], options.draw, POOL), seen[half:]
        print(to_toml(limits))
    return all([describe(report, way, found[way], store, limits) for way in ways])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench engines")
    parser.add_argument("--writer", choices=NODE_ENGINES, default="vllm")
    parser.add_argument("--reader", choices=NODE_ENGINES, default="torch")
    parser.add_argument("--dtype", type=Dtype, default=Dtype.FLOAT32)
    parser.add_argument("--draw", type=DrawRule, default=DrawRule.GUMBEL)
    parser.add_argument("--model", type=Path, default=default_folder(MODELS["smollm2"]))
    parser.add_argument("--tasks", type=Questions, default=Questions.TOPICS)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--cheats", type=int, default=2, help="groups of each kind")
    parser.add_argument("--falsified", type=int, default=2, help="groups of each kind")
    parser.add_argument("--batch", type=int, default=BATCH, help="groups drawn together")
    parser.add_argument("--device", default="cpu", help="of the writer: cpu, cuda, cuda:1")
    parser.add_argument("--reader-device", default="", help="if it is another one")
    parser.add_argument(
        "--share", type=Share.parse, default=Share(), help="K/N: the K-th part of N, from 0"
    )
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--store", type=Path, help="where what was measured stays")
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument(
        "--fitted", action="store_true", help="limits from half of the honest groups"
    )
    parser.add_argument("--policies", type=Path, help="of bench policies")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--json", type=Path)
    return parser


def plan(options: argparse.Namespace) -> list[Way]:
    """Yield the ways to measure, honest work first. Ways measured on addition claim the trained
    policy."""
    claims = ""
    if options.tasks is Questions.ADDITION:
        if options.policies is None:
            raise SystemExit("--tasks addition needs the --policies that were trained on it")
        claims = f"step-{max(policy_steps(options.policies))}"
    honest = Way(
        name="honest", groups=options.groups, claims=claims, writes=claims, batch=options.batch
    )
    cheat = replace(honest, groups=options.cheats, is_honest=False)
    ways = [
        honest,
        replace(cheat, name="other seed", salt="other"),
        replace(cheat, name="best of 4", tries=4),
        replace(cheat, name="temperature 0.9", temperature=0.9),
        replace(cheat, name="temperature 0.99", temperature=0.99),
        replace(cheat, name="greedy", temperature=0.0),
        replace(cheat, name="another prompt", shift=1),
        *(replace(cheat, name=f"{name} weights", writes=name) for name in WEIGHTS_MADE),
    ]
    if options.policies is not None:
        steps = policy_steps(options.policies)
        ways += [
            replace(
                cheat,
                name=f"step {step - 1} sold as {step}",
                claims=f"step-{step}",
                writes=f"step-{step - 1}",
            )
            for step in sorted(steps)
            if step - 1 in steps
        ]
    # what is falsified was written, and a group that is sold again is another's
    falsified = min(options.falsified, options.groups, options.cheats)
    if options.groups > 1:
        ways += [
            replace(cheat, name=name, falsifies=name, groups=falsified) for name in FALSIFIED
        ]
    return ways


def policy_steps(folder: Path) -> set[int]:
    """Return the steps of the policies that ``bench policies`` left."""
    return {int(path.name.removeprefix("step-")) for path in folder.glob("step-*[0-9]")}


def describe(
    report: Report, way: Way, found: Sequence[Evidence], store: Store, limits: Limits
) -> bool:
    """Record the evidence; return False if honest work was refused."""
    if not found:
        return True
    tokens = sum(one.tokens for one in found)
    groups, pools = rejected_groups(found, limits), rejected_pools(found, limits)
    submissions = rejected_pools(found, limits, SUBMISSION)
    reasons = Counter(judge(one, limits).reason.value for one in found)
    wrong = groups.rejected if way.is_honest else groups.of - groups.rejected
    bound = binomial_bound(wrong, groups.of)
    print(
        f"{way.name}: {len(found)} groups, {tokens} tokens: {groups.rejected} rejected (at most"
        f" {bound:.2%} judged wrong, 95 %), submissions of {SUBMISSION}:"
        f" {submissions.rejected} of {submissions.of}, pools of {POOL}:"
        f" {pools.rejected} of {pools.of};"
        f" {', '.join(f'{count} {reason}' for reason, count in reasons.items())}"
    )
    report.add(way.name, "of a group", "judged wrong, at most", "95 %", [bound])
    record(report, way.name, found, (groups, submissions, pools))
    written, seconds = store.written(way)
    if way.is_honest and seconds:
        report.add(way.name, "writer", "written", "tokens/CPU s", [written / seconds])
    pool_is_sound = judge_pool(found, limits).verdict is Verdict.ACCEPTED
    refused = groups.rejected + submissions.rejected + pools.rejected
    return not way.is_honest or (not refused and pool_is_sound)


def record(
    report: Report, name: str, found: Sequence[Evidence], rejected: tuple[Rate, Rate, Rate]
) -> None:
    """Record the figures of one way to work; ``rejected`` are groups, submissions, pools."""
    groups, submissions, pools = rejected
    tokens = sum(one.tokens for one in found)
    gap = sum(one.gap_mean * one.tokens for one in found) / tokens
    off = sum(one.off[0] for one in found) / tokens
    for metric, unit, values in (
        ("rejected", "of a group", [groups.share]),
        ("rejected", f"of {SUBMISSION} groups", [submissions.share]),
        ("rejected", f"of {POOL} groups", [pools.share]),
        ("exponents off", "at most", [float(max(one.exponent_mismatches for one in found))]),
        ("mantissa mean", "ulp", [one.mantissa_mean for one in found]),
        ("mantissa mean, worst", "ulp", [max(one.mantissa_mean for one in found)]),
        ("mantissas, worst chunk", "ulp", [max(one.mantissa_worst for one in found)]),
        ("chunks", "of a group", [one.chunks for one in found]),
        ("mantissa mean, least", "ulp", [min(one.mantissa_mean for one in found)]),
        ("draw distance", "at most", [max(one.draw_distance for one in found)]),
        ("gap, mean", "of scores", [gap]),
        ("gap, worst", "of scores", [max(one.gap_max for one in found)]),
        ("tokens off", "share", [off]),
    ):
        report.add(name, unit, metric, unit, [v if math.isfinite(v) else -1.0 for v in values])


def compare(
    report: Report, workshop: Workshop, sides: tuple[Side, Side], options: argparse.Namespace
) -> None:
    """Compare both engines, which write the same batch by turns."""
    tasks = make_tasks(options.model, options.tasks, range(options.batch))
    case = f"{SIZE * options.batch} rows"
    pairs = [[workshop.rate(side, tasks) for side in sides] for _ in range(options.rounds)]
    for side, rates in zip(sides, zip(*pairs, strict=True), strict=True):
        report.add(case, side.kind, "written", "tokens/CPU s", rates)
    report.compare(case, "written", *(side.kind for side in sides))
