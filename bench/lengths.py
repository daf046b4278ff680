"""Answers of mixed lengths: an engine that is kept full, against one that finishes each
submission.

``python -m bench lengths [--limit 512] [--mean 100] [--submissions 4] [--rounds 3]
[--shape tiny|small] [--json FILE]``

Submissions of 16 groups of 16 completions go to a torch engine in its worker process. The
weights are of chance, and so many of the tokens end an answer that lengths are geometric, with
this mean and limit. *One by one*: a submission is drawn to its end before the next is begun.
*Kept full*: as the inference role does it, the next is begun as soon as the engine has room.
Both draw the same tokens, by turns. CPU seconds are those of both processes; wall seconds mean
something only on a quiet machine.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import trio
from rich.console import Console

from bench.report import Report
from p2p.machine import open_world
from p2p.worker_process import ProcessWorker
from roles.contract.core.shape import MAX_END_TOKENS, ModelShape
from roles.engines.base import Engine, Group, GroupTask, Sampling, draw_all
from roles.engines.client import WorkerEngine, open_engine
from roles.engines.config import EngineConfig
from roles.engines.torch.model import TransformerModel
from roles.models import safetensors
from roles.models.safetensors import RawTensor
from roles.rl.recipes import SORTER

SHAPES: Final = {
    "tiny": replace(SORTER, vocabulary=2000),
    "small": ModelShape(
        vocabulary=2000, width=384, layers=6, query_heads=6, key_heads=3, head_width=64,
        feed_forward=1024,
    ),
}  # fmt: skip
"""The demo's 105,088 parameters but for the vocabulary, and 10 million."""
GROUPS: Final = 16
"""Groups of a submission."""
SIZE: Final = 16
PROMPT: Final = 30
_TICKS: Final = os.sysconf("SC_CLK_TCK")

Way = Callable[[Engine, Sequence[Sequence[GroupTask]], Sampling], Awaitable[list[Group]]]


def run(args: list[str]) -> int:
    """Run the bench; 1 if the two ways have drawn other tokens."""
    parser = argparse.ArgumentParser(prog="python -m bench lengths")
    parser.add_argument("--limit", type=int, default=512)
    parser.add_argument("--mean", type=float, default=100.0)
    parser.add_argument("--submissions", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="tiny")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(args)
    report = Report("lengths")
    is_same = trio.run(measure, report, options)
    Console().print(str(report), soft_wrap=True)
    report.write(options.json)
    return 0 if is_same else 1


async def measure(report: Report, options: argparse.Namespace) -> bool:
    """Measure both ways by turns. Return whether they have drawn the same tokens."""
    shape, sampling = SHAPES[options.shape], Sampling(1.0, options.limit, SIZE)
    ends = min(MAX_END_TOKENS, max(1, round(shape.vocabulary / options.mean)))
    config = EngineConfig(
        shape=shape, context=PROMPT + options.limit, end_tokens=tuple(range(ends))
    )
    work = [make_tasks(number) for number in range(options.submissions)]
    ways: dict[str, Way] = {"kept full": keep_full, "one by one": one_by_one}
    rates: dict[tuple[str, str], list[float]] = {}
    drawn: list[set[tuple[int, ...]]] = []
    with TemporaryDirectory() as folder:
        write_chance(shape, Path(folder) / "weights")
        async with open_world(Path(folder)) as world, open_engine(world, config) as engine:
            await engine.load("weights")
            for number in range(options.rounds + 1):  # the first warms up
                for name, way in ways.items():
                    cpu, wall = _cpu_seconds(engine), time.perf_counter()
                    groups = await way(engine, work, sampling)
                    wall, cpu = time.perf_counter() - wall, _cpu_seconds(engine) - cpu
                    answers = [one.tokens for group in groups for one in group.completions]
                    drawn.append(set(answers))
                    tokens = sum(map(len, answers))
                    if number:
                        rates.setdefault((name, "CPU s"), []).append(tokens / cpu)
                        rates.setdefault((name, "s"), []).append(tokens / wall)
                    print(
                        f"round {number}, {name}: {tokens} tokens, {cpu:.2f} CPU s,"
                        f" {wall:.2f} s",
                        flush=True,
                    )
    case = f"{options.shape}, mean {options.mean:.0f} of {options.limit}"
    for (name, unit), values in rates.items():
        report.add(case, name, f"tokens per {unit}", "1/s", values)
    for unit in ("CPU s", "s") if options.rounds else ():
        report.compare(case, f"tokens per {unit}", "kept full", "one by one")
    return all(tokens == drawn[0] for tokens in drawn)


async def one_by_one(
    engine: Engine, work: Sequence[Sequence[GroupTask]], sampling: Sampling
) -> list[Group]:
    """Draw each submission to its end."""
    return [group for tasks in work for group in await draw_all(engine, tasks, sampling)]


async def keep_full(
    engine: Engine, work: Sequence[Sequence[GroupTask]], sampling: Sampling
) -> list[Group]:
    """The next submission whenever there is room."""
    waiting, groups = list(work), list[Group]()
    while len(groups) < sum(map(len, work)):
        if waiting and engine.has_room:
            await engine.submit(waiting.pop(0), sampling)
        else:
            groups += await engine.advance()
    return groups


def make_tasks(submission: int) -> list[GroupTask]:
    """16 groups, the same whenever they are asked for."""
    numbers = range(submission * GROUPS, (submission + 1) * GROUPS)
    return [
        GroupTask(
            group,
            tuple(100 + (7 * group + position) % 50 for position in range(PROMPT)),
            tuple(hashlib.sha256(f"{group} {slot}".encode()).digest() for slot in range(SIZE)),
        )
        for group in numbers
    ]


def write_chance(shape: ModelShape, path: Path) -> None:
    """Weights of a model that has learnt nothing: all tokens are about as likely."""
    model = TransformerModel(shape)
    model.initialise(0)
    weights = {
        name: RawTensor("F32", tuple(weight.shape), weight.detach().numpy().tobytes())
        for name, weight in model.named_parameters()
    }
    path.write_bytes(safetensors.encode(weights))


def _cpu_seconds(engine: Engine) -> float:
    """Return the CPU seconds of this process and the engine's."""
    assert isinstance(engine, WorkerEngine)
    process = engine._remote.process
    assert isinstance(process, ProcessWorker)
    spent = 0
    for pid in process.pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        spent += int(fields[11]) + int(fields[12])
    return time.process_time() + spent / _TICKS
