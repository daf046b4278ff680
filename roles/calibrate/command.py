"""``shoal calibrate``: measure honest noise and cheats, and write limits for a run's draft."""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Final

import trio
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from p2p.concurrency import leaves
from p2p.errors import ConfigError, ShoalError
from p2p.machine import open_world
from p2p.node.tables import load_toml
from p2p.node.usage import (
    BEGINS_AGAIN,
    FAILED,
    WRONG_USAGE,
    CommandParser,
    check_target,
    complain,
    interruptible,
    whole_number,
    write_text,
)
from proofs.checks import FALSE_REJECTIONS, Limits
from roles.calibrate.limits import (
    check_enough,
    fit,
    loosest,
    record_to_toml,
    rejected_groups,
    rejected_pools,
    resampled,
    sum_rates,
    to_toml,
)
from roles.calibrate.measure import PLAIN_CHEATS, Measured, WorkBench, make_tasks
from roles.calibrate.weights import one_step_away, rewrite, to_fp8, to_int4, to_int8
from roles.contract import decode_run_untrusted
from roles.contract.core.file import MAX_RUN, Calibration
from roles.engines.base import Sampling
from roles.engines.config import MachineLimits, engine_of
from roles.engines.worker import make_engine
from roles.envs.base import Ration, check_pins
from roles.envs.client import WorkerEnvironment, setup_of
from roles.envs.mix import EnvironmentSetup
from roles.models.trial import try_tokenizer
from roles.rl.recipes import read_learner

MIN_SEQUENCES: Final = 64
"""Least number of sequences: with fewer, neither half has a pool of 16 groups. Limits that are
written take more: `roles.calibrate.limits.MIN_TOKENS`.
"""
MAX_SEQUENCES: Final = 1 << 20
"""Most sequences: a day's work of a small model."""
CHEAT_SHARE: Final = 4
"""Each cheat gets one in this many of the sequences: it is either plain, or stays hidden."""
HELD_OUT: Final = "honest, held out"
"""Honest work that limits were not fitted to."""
TASK_SECONDS: Final = 600.0
"""Most seconds for making all prompts. A million sequences in groups of 16 need 65,536 prompts,
of 0.1 ms each; the slowest families of reasoning-gym take 10 ms. A stranger's chat template may
take for ever.
"""
ASKED: Final = 64
"""Tasks that an environment makes in one call, which may take 30 s."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure how far honest machines differ, to set a run's limits.

    Returns 0, or with one sentence on standard error 1, or 2 if the command makes no sense.
    """
    return interruptible(partial(_main, argv), BEGINS_AGAIN)


def _main(argv: Sequence[str] | None) -> int:
    options = _parser().parse_args(argv)
    try:
        check_target("--out", options.out)
        _calibrate(options)
    except ConfigError as error:
        complain(error)
        return WRONG_USAGE
    except (ShoalError, OSError, ValueError) as error:
        complain(error)
        return FAILED
    return 0


# fmt: off
def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="shoal calibrate", description=main.__doc__)
    add = parser.add_argument
    add("--run", type=Path, required=True, help="a signed run file: its model, sampling, tasks")
    add("--learner", type=Path, help="of a run without a base: its learner.toml")
    add("--model", type=Path, help="weights: a model's folder, or a file")
    add("--policy", type=Path, help="an older policy, as a cheat")
    for option, does in (("--generator", "draw"), ("--validator", "score")):
        add(option, nargs="+", default=["torch"],
            help=f"engines that {does}; of several the limits hold for each pair")
    add("--sequences", type=whole_number(MIN_SEQUENCES, MAX_SEQUENCES), default=1024)
    add("--json", action="store_true", help="figures for machines")
    add("--out", type=Path, help="where [limits] and [calibration] go; - is standard output")
    return parser
# fmt: on


def _calibrate(options: argparse.Namespace) -> None:
    if options.policy is not None and not options.policy.exists():
        raise ConfigError(f"--policy {options.policy} is not there")
    with options.run.open("rb") as file:
        run = decode_run_untrusted(file.read(MAX_RUN + 1))
    check_pins(run)
    if run.terms.model.base and options.model is None:
        raise ConfigError(f"run {run.name!r} has a base: give its folder as --model")
    given: Path | None = options.learner
    table = None if given is None else load_toml(given)
    learner = read_learner(table, str(given or "--learner"), run.name, run.terms.model)
    config = engine_of(run, learner=learner)
    setup = setup_of(run, MachineLimits(), str(options.model) if run.terms.model.base else None)
    recipe = config.sampling
    groups = max(32, -(-options.sequences // recipe.group_size))
    prompts = _prompts(setup, groups)
    sampling = Sampling(
        recipe.temperature, recipe.max_new_tokens, recipe.group_size, recipe.proof_values
    )
    console = Console(stderr=options.json or str(options.out) == "-")
    with tempfile.TemporaryDirectory() as folder, Progress(console=console) as bar:
        pairs = list(product(options.generator, options.validator))
        # vLLM sets up the process before torch is there
        kinds = sorted({*options.generator, *options.validator}, reverse=True)
        engines = {kind: make_engine(replace(config, kind=kind)) for kind in kinds}
        policy = options.model
        if policy is None:  # the first one of a run without a base
            policy = Path(folder) / "policy.safetensors"
            engine = engines.get(config.kind) or make_engine(config)
            engine.open(str(Path(folder) / "checkpoint"))
            engine.save("", str(policy))
        rate = learner.rate
        others = [] if options.policy is None else [("older policy", options.policy)]
        for name, change in (
            (f"one step of {rate:g}", one_step_away(rate)),
            ("int8 weights", to_int8),
            ("fp8 weights", to_fp8),
            ("int4 weights", to_int4),
        ):
            made = Path(folder) / f"{len(others)}{policy.suffix}"
            others.append((name, rewrite(policy, made, change)))
        few = prompts[: max(16, groups // CHEAT_SHARE)]
        bar_of = bar.add_task(
            "", total=len(pairs) * (groups + (len(others) + PLAIN_CHEATS) * len(few))
        )

        def progress(name: str, count: int) -> None:
            bar.update(bar_of, advance=count, description=name)

        benches = {
            f"{generator} -> {validator}": WorkBench(
                engines[generator], engines[validator], sampling, policy, progress
            )
            for generator, validator in pairs
        }
        tasks = make_tasks(prompts, recipe.group_size, "honest")
        fitted = [bench.honest(tasks[::2]) for bench in benches.values()]
        if options.out is not None:
            for one in fitted:
                check_enough(one.evidence)
        size = recipe.submission
        limits = loosest([fit(one.evidence, config.draw, size) for one in fitted])
        dishonest = make_tasks(few, recipe.group_size, "cheat")
        ways = list[tuple[str, Measured]]()
        for pair, bench in benches.items():
            # What limits were fitted to says nothing about how often they are wrong.
            ways.append((pair, replace(bench.honest(tasks[1::2]), name=HELD_OUT)))
            ways += [(pair, way) for way in bench.cheats(dishonest, others)]
    held_out = [way.evidence for _, way in ways if way.name == HELD_OUT]
    honest = (*(one.evidence for one in fitted), *held_out)
    tokens = sum(one.tokens for evidence in honest for one in evidence)
    apart = sum_rates([rejected_pools(evidence, limits, size) for evidence in held_out])
    again = sum_rates([resampled(evidence, limits, size) for evidence in held_out])
    what = f"{config.dtype.value}, {config.draw.value}, {recipe.proof_values} values"
    rows = [_row(pair, way, limits) for pair, way in ways]
    if options.json:
        figures = {
            "what": what,
            "pairs": list(benches),
            "tokens": tokens,
            "limits": asdict(limits),
            "submissions": {
                "groups": size,
                "apart": asdict(apart),
                "drawn_again": asdict(again),
                "rejected_at_most": apart.bound,
                "promised": FALSE_REJECTIONS,
            },
            "ways": rows,
        }
        write_text("--json", Path("-"), json.dumps(figures) + "\n")
    else:
        for pair in benches:
            console.print(_table([row for row in rows if row["pair"] == pair], pair))
        for line in (
            f"{what}.",
            f"{tokens:,} honest tokens. Of {again.of:,} submissions of {size} groups, drawn"
            f" again and again from those held out, {again.rejected} are refused; of {apart.of}"
            f" that share no group {apart.rejected}: at most {100 * apart.bound:.2g} % of"
            " submissions are (95 % confidence).",
            f"By the fit it is 1 honest submission in {1 / FALSE_REJECTIONS:,.0f}.",
        ):
            console.print(line, soft_wrap=True, highlight=False)
    if options.out is not None:
        record = Calibration(
            model=run.terms.model.digest,
            dtype=config.dtype,
            draw=config.draw,
            generators=tuple(options.generator),
            validators=tuple(options.validator),
            environments={part.name: part.weight for part in setup.parts},
            tokens=tokens,
            submissions=apart.of,
            rejected=apart.rejected,
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        )
        write_text("--out", options.out, f"{to_toml(limits)}\n{record_to_toml(record)}")


def _prompts(setup: EnvironmentSetup, count: int) -> list[tuple[int, ...]]:
    """Return the prompts of ``count`` tasks.

    Raises:
        TimeoutError: A stranger's template takes for ever.
    """
    if setup.model is not None:
        try_tokenizer(Path(setup.model.folder), setup.model.end_tokens)
    trouble: list[BaseException] = []
    prompts: list[tuple[int, ...]] = []
    try:
        trio.run(_ask_prompts, setup, count, prompts)
    except* ShoalError as errors:
        trouble.extend(leaves(errors))
    if trouble:
        raise trouble[0]
    if len(prompts) < count:
        raise TimeoutError(f"{count:,} tasks are not made within {TASK_SECONDS:g} s")
    return prompts


async def _ask_prompts(
    setup: EnvironmentSetup, count: int, prompts: list[tuple[int, ...]]
) -> None:
    """Make prompts in the process of an environment, as nodes do.

    A stranger's template may want all of a machine's memory.
    """
    async with open_world() as world, AsyncExitStack() as stack:
        environment = WorkerEnvironment(world, setup, Ration(), stack, required=False)
        await environment.open()
        with trio.move_on_after(TASK_SECONDS):
            while len(prompts) < count:
                numbers = range(len(prompts), min(count, len(prompts) + ASKED))
                seeds = [number.to_bytes(32, "big") for number in numbers]
                prompts += [task.prompt for task in await environment.tasks(seeds)]


def _row(pair: str, way: Measured, limits: Limits) -> dict[str, object]:
    evidence = way.evidence
    groups, pools = rejected_groups(evidence, limits), rejected_pools(evidence, limits)
    means = sorted(one.mantissa_mean for one in evidence)
    tokens = sum(one.tokens for one in evidence)
    return {
        "pair": pair,
        "way": way.name,
        "groups": len(evidence),
        "exponents": max(one.exponent_mismatches for one in evidence),
        "mantissa_mean": means[len(means) // 2],
        "mantissa_max": means[-1],
        "distance": max(one.draw_distance for one in evidence),
        "gap": max(one.gap_max for one in evidence),
        "gap_mean": sum(one.gap_mean * one.tokens for one in evidence) / tokens,
        "off": sum(one.off[0] for one in evidence) / tokens,
        "groups_rejected": groups.share,
        "pools_rejected": pools.share,
        "pools": pools.of,
    }


_COLUMNS: Final[tuple[tuple[str, Callable[[dict[str, object]], str]], ...]] = (
    ("exp.", lambda row: f"{row['exponents']}"),
    ("mantissas", lambda row: f"{row['mantissa_mean']:.2f} {row['mantissa_max']:.2f}"),
    ("off", lambda row: f"{row['off']:.1%}"),
    ("by", lambda row: f"{row['distance'] or row['gap']:.1g}"),
    ("groups", lambda row: f"{row['groups_rejected']:.0%} of {row['groups']}"),
    ("of 16", lambda row: f"{row['pools_rejected']:.0%} of {row['pools']}"),
)
"""Largest count; median and largest mean; share of tokens; largest distance or gap; rejected,
by itself and 16 together. Narrow enough for 80 columns."""


def _table(rows: Sequence[dict[str, object]], title: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("way", no_wrap=True)
    for name, _ in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(str(row["way"]), *(form(row) for _, form in _COLUMNS))
    return table
