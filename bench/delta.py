"""Size of the difference between two policies, and the cost to find and apply it.

``python -m bench delta [--json FILE] [--seeds 0 1 2]``

On policies as reinforcement learning makes them (`bench.rl_like`), after the optimizer has
settled for 16 steps: single updates at learning rates of 1e-6 and 1e-5, and at 1e-6 what a
receiver needs that is 2, 4, 8 or 16 versions behind. Against a coder in the manner of PULSE
(arXiv 2602.03839: rows and columns of changed values as differences in 8 and 16 bits, the new
values themselves, zstd level 1; written here from its description) and XOR, byte planes, zstd.
Every delta is decoded and compared. Sizes are sums over the single updates of a case; rates are
bytes of policy per CPU second, medians of rounds in which all coders take turns. About 70 CPU
seconds per seed, of which the coders take five.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Final

import numpy as np
import torch
import zstandard
from rich.console import Console
from rich.table import Table

from bench.report import Report
from bench.rl_like import Policy, course, pretrain, shapes
from p2p.shardcast.delta import decode_delta_untrusted, encode_delta

SETTLED: Final = 16
"""Steps after which the optimizer's first, larger updates are over."""
BEHIND: Final = (2, 4, 8, 16)
SINGLES: Final = {1e-6: 8, 1e-5: 2}
"""Single updates whose sizes are added up, by learning rate."""
ROUNDS: Final = 7
BF16: Final = 2

FAST: Final = "gap + ulp"
PULSE: Final = "PULSE-like"
XOR: Final = "XOR planes + zstd"

Encode = Callable[[Policy, Policy], bytes]
Decode = Callable[[Policy, bytes], Policy]


@dataclass(frozen=True, slots=True)
class Coder:
    """An encoder of the changes between two policies, and its decoder."""

    name: str
    encode: Encode
    decode: Decode


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure that bench/README.md promises."""

    case: str
    subject: str
    metric: str
    limit: float


def case_of(rate: float, behind: int = 1) -> str:
    return f"lr {rate:g}, {'single' if behind == 1 else f'{behind} behind'}"


SINGLE: Final = case_of(1e-6)
RATIO: Final = "times smaller"
SHARE: Final = "of the policy"
ENCODE: Final = "encode"
DECODE: Final = "decode"

GOALS: Final = (
    Goal(SINGLE, FAST, RATIO, 90),
    Goal(SINGLE, FAST, ENCODE, 600e6),
    Goal(SINGLE, FAST, DECODE, 900e6),
    Goal(case_of(1e-5), FAST, RATIO, 20),
)
SMALLER_THAN_PULSE: Final = 2.3


def run(args: list[str]) -> int:
    """Run the bench; 1 if a goal is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench delta")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(args)
    torch.set_num_threads(1)
    found: dict[tuple[str, str, str], list[float]] = {}
    terminal = Console()
    console = terminal if terminal.is_terminal else Console(width=118)
    for seed in options.seeds:
        with console.status(f"seed {seed}: training"):
            courses = train(seed)
        with console.status(f"seed {seed}: coding"):
            for key, value in measure(courses).items():
                found.setdefault(key, []).append(value)
    report = Report("delta")
    for (case, subject, metric), values in found.items():
        report.add(case, subject, metric, UNITS[metric], values)
    for subject in (PULSE, XOR):
        report.compare(SINGLE, "wire", subject, FAST)
    report.write(options.json)
    console.print(table(report))
    return 0 if judge(report, console) else 1


def train(seed: int) -> dict[float, list[Policy]]:
    """Return the policies of two courses, from step `SETTLED` on."""
    start = pretrain(seed)
    last = {1e-6: SETTLED + max(BEHIND), 1e-5: SETTLED + SINGLES[1e-5]}
    return {
        rate: list(islice(course(start, rate), SETTLED, end + 1)) for rate, end in last.items()
    }


UNITS: Final = {
    "changed": "share of values",
    "wire": "bytes",
    RATIO: "x",
    SHARE: "share",
    ENCODE: "B per CPU second",
    DECODE: "B per CPU second",
}


def measure(courses: dict[float, list[Policy]]) -> dict[tuple[str, str, str], float]:
    """Return every figure of one seed, by case, subject and metric."""
    found: dict[tuple[str, str, str], float] = {}
    for rate, policies in courses.items():
        updates = list(pairwise(policies))[: SINGLES[rate]]
        note_sizes(found, case_of(rate), updates)
        note_rates(found, case_of(rate), *updates[0])
    policies = courses[1e-6]
    for behind in BEHIND:
        pair = (policies[0], policies[behind])
        note_sizes(found, case_of(1e-6, behind), [pair])
        note_rates(found, case_of(1e-6, behind), *pair)
    return found


def note_sizes(
    found: dict[tuple[str, str, str], float], case: str, pairs: Sequence[tuple[Policy, Policy]]
) -> None:
    """Bytes of some deltas, each decoded again."""
    changed = [float(np.mean(old != new)) for old, new in pairs]
    found[case, "all", "changed"] = statistics.mean(changed)
    raw = sum(new.nbytes for _, new in pairs)
    for coder in CODERS:
        wire = 0
        for old, new in pairs:
            delta = coder.encode(old, new)
            if not np.array_equal(coder.decode(old, delta), new):
                raise AssertionError(f"{coder.name} does not give back the policy")
            wire += len(delta)
        found[case, coder.name, "wire"] = wire / len(pairs)
        found[case, coder.name, RATIO] = raw / wire
        found[case, coder.name, SHARE] = wire / raw


def note_rates(
    found: dict[tuple[str, str, str], float], case: str, old: Policy, new: Policy
) -> None:
    """Bytes of policy per CPU second, coders by turns."""
    deltas = {coder: coder.encode(old, new) for coder in CODERS}
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(ROUNDS):
        for coder in CODERS:
            encoding = cpu_seconds(partial(coder.encode, old, new))
            decoding = cpu_seconds(partial(coder.decode, old, deltas[coder]))
            times.setdefault((coder.name, ENCODE), []).append(encoding)
            times.setdefault((coder.name, DECODE), []).append(decoding)
    for (name, metric), seconds in times.items():
        found[case, name, metric] = new.nbytes / statistics.median(seconds)


def cpu_seconds(call: Callable[[], object]) -> float:
    before = time.process_time()
    call()
    return time.process_time() - before


def table(report: Report) -> Table:
    """Return a table with a line for each case and coder, medians over the seeds."""
    columns = ("changed", RATIO, SHARE, ENCODE, DECODE)
    lines = Table("case", "coder", *columns, box=None)
    rows = {(row.case, row.subject, row.metric): row for row in report.rows}
    for case in dict.fromkeys(row.case for row in report.rows):
        for subject in (FAST, XOR, PULSE):
            lines.add_row(
                case,
                subject,
                f"{rows[case, 'all', 'changed'].median:.2%}",
                " ".join(f"{value:.1f}" for value in rows[case, subject, RATIO].values),
                f"{rows[case, subject, SHARE].median:.2%}",
                f"{rows[case, subject, ENCODE].median / 1e6:,.0f} MB/s",
                f"{rows[case, subject, DECODE].median / 1e6:,.0f} MB/s",
            )
    return lines


def judge(report: Report, console: Console) -> bool:
    """Print for each goal whether every seed reaches it; for rates, whether the median does."""
    rows = {(row.case, row.subject, row.metric): row for row in report.rows}
    verdicts = []
    for goal in GOALS:
        row = rows[goal.case, goal.subject, goal.metric]
        values = [row.median] if goal.metric in (ENCODE, DECODE) else row.values
        ok = min(values) >= goal.limit
        verdicts.append(ok)
        console.print(
            f"{'ok  ' if ok else 'MISS'} {goal.case}, {goal.subject}: {goal.metric}"
            f" {min(values):.4g} >= {goal.limit:.4g}",
            highlight=False,
        )
    pulse, ours = rows[SINGLE, PULSE, "wire"].values, rows[SINGLE, FAST, "wire"].values
    least = min(theirs / mine for theirs, mine in zip(pulse, ours, strict=True))
    verdicts.append(least >= SMALLER_THAN_PULSE)
    console.print(
        f"{'ok  ' if verdicts[-1] else 'MISS'} {SINGLE}, {PULSE}: {least:.2f} times our bytes"
        f" >= {SMALLER_THAN_PULSE}",
        highlight=False,
    )
    return all(verdicts)


# Coders


def encode(old: Policy, new: Policy) -> bytes:
    return encode_delta(old.data.cast("B"), new.data.cast("B"), BF16)


def decode(old: Policy, wire: bytes) -> Policy:
    base = old.data.cast("B")
    return np.frombuffer(decode_delta_untrusted(base, wire, old.nbytes, BF16), np.uint16)


def xor_encode(old: Policy, new: Policy) -> bytes:
    planes = (old ^ new).view(np.uint8).reshape(-1, 2)
    return zstd(planes[:, 0].tobytes() + planes[:, 1].tobytes())


def xor_decode(old: Policy, wire: bytes) -> Policy:
    planes = np.frombuffer(zstandard.decompress(wire), np.uint8).reshape(2, -1)
    return np.ascontiguousarray(planes.T).reshape(-1).view(np.uint16) ^ old


def pulse_encode(old: Policy, new: Policy) -> bytes:
    """Encode a patch as PULSE does. Per tensor it has, for each changed value, the distance of
    its row from the last value's row, its column (relative to the last value in the same row),
    and the value."""
    parts: list[bytes] = []
    start = 0
    for rows, columns in shapes():
        end = start + rows * columns
        places = np.flatnonzero(old[start:end] != new[start:end])
        row, column = np.divmod(places, columns)
        row_steps = np.diff(row, prepend=0)
        column_steps = np.where(row_steps == 0, np.diff(column, prepend=0), column)
        parts += [
            np.array([len(places)], np.uint32).tobytes(),
            row_steps.astype(np.uint8 if rows <= 256 else np.uint16).tobytes(),
            column_steps.astype(np.uint16).tobytes(),
            new[start:end][places].tobytes(),
        ]
        start = end
    return zstd(b"".join(parts))


def pulse_decode(old: Policy, wire: bytes) -> Policy:
    raw, at, start = zstandard.decompress(wire), 0, 0
    new = old.copy()

    def take(count: int, dtype: type[np.unsignedinteger]) -> np.ndarray:
        nonlocal at
        part = np.frombuffer(raw, dtype, count, at)
        at += part.nbytes
        return part

    for rows, columns in shapes():
        (count,) = take(1, np.uint32)
        row_steps = take(count, np.uint8 if rows <= 256 else np.uint16).astype(np.int64)
        column_steps = take(count, np.uint16).astype(np.int64)
        moved = row_steps != 0
        moved[:1] = True
        sums = np.cumsum(column_steps)
        firsts = np.flatnonzero(moved)
        before = sums[firsts] - column_steps[firsts]
        column = sums - np.repeat(before, np.diff(firsts, append=count))
        places = np.cumsum(row_steps) * columns + column
        new[start : start + rows * columns][places] = take(count, np.uint16)
        start += rows * columns
    return new


def zstd(raw: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(raw)


CODERS: Final = (
    Coder(FAST, encode, decode),
    Coder(XOR, xor_encode, xor_decode),
    Coder(PULSE, pulse_encode, pulse_decode),
)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
