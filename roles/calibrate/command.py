"""``shoal calibrate``: measure honest noise and cheats, and write limits for a run's draft."""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
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
from p2p.node.toml import load_toml
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
from proofs.sampling import DrawRule
from roles.calibrate.limits import (
    Rate,
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
from roles.contract import Run, decode_run_untrusted
from roles.contract.core.file import MAX_RUN, Calibration, Model
from roles.contract.core.sampling import SamplingTerms
from roles.contract.core.shape import Dtype
from roles.engines.base import GroupTask, Sampling
from roles.engines.config import EngineConfig, MachineLimits, engine_of
from roles.engines.worker import LocalEngine, make_engine
from roles.envs.base import Ration, check_pins
from roles.envs.client import WorkerEnvironment, setup_of
from roles.envs.mix import EnvironmentPart, EnvironmentSetup
from roles.envs.text import TextModel
from roles.models.bundle import pin_folder, read_config
from roles.models.ends import need_end_tokens
from roles.models.trial import try_tokenizer
from roles.rl.learner import LearnerConfig
from roles.rl.recipes import read_learner

MIN_SEQUENCES: Final = 64
"""Below it there is no pool of 16 groups in either half. Limits that are written take more:
`roles.calibrate.limits.MIN_TOKENS`."""
MAX_SEQUENCES: Final = 1 << 20
"""A million: a day's work of a small model."""
CHEAT_SHARE: Final = 4
"""A cheat gets one in so many of the sequences: it is either plain, or stays hidden."""
HELD_OUT: Final = "honest, held out"
"""Honest work that limits were not fitted to."""
TASK_SECONDS: Final = 600.0
"""For all prompts. A million sequences in groups of 16 want 65,536, of 0.1 ms each; the slowest
families of reasoning-gym take 10 ms. A stranger's chat template may take for ever."""
ASKED: Final = 64
"""Tasks that an environment makes in one call, which may take 30 s."""
STEP_RATE: Final = 2e-5
"""How far weights move in a step of a run that names no rate: that of a model with a base."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, write ``[limits]`` and ``[calibration]``.

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


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="shoal calibrate", description=__doc__)
    parser.add_argument("--run", type=Path, help="a signed run file: its model, recipe, tasks")
    parser.add_argument(
        "--learner", type=Path, help="of a run without a base: its learner.toml"
    )
    parser.add_argument("--model", type=Path, help="weights: a model's folder, or a file")
    parser.add_argument("--env", default="arithmetic", help="tasks, without --run")
    parser.add_argument("--dtype", choices=[one.value for one in Dtype], help="without --run")
    parser.add_argument("--draw", choices=[one.value for one in DrawRule], help="without --run")
    parser.add_argument(
        "--group-size", type=whole_number(2, 1024), default=16, help="without --run"
    )
    parser.add_argument(
        "--tokens",
        type=whole_number(1, 1 << 17),
        default=64,
        help="of an answer, without --run",
    )
    parser.add_argument("--policy", type=Path, help="an older policy, as a cheat")
    for option, does in (("--generator", "draw"), ("--validator", "score")):
        parser.add_argument(
            option,
            nargs="+",
            default=["torch"],
            help=f"engines that {does}; of several the limits hold for each pair",
        )
    parser.add_argument(
        "--sequences", type=whole_number(MIN_SEQUENCES, MAX_SEQUENCES), default=1024
    )
    parser.add_argument("--json", action="store_true", help="figures for machines")
    parser.add_argument(
        "--out", type=Path, help="where [limits] and [calibration] go; - is standard output"
    )
    return parser


@dataclass(frozen=True, slots=True)
class Subject:
    """What is calibrated."""

    model: Model
    """As the run has it, or would."""
    config: EngineConfig
    setup: EnvironmentSetup
    learner: LearnerConfig

    def record(self, options: argparse.Namespace, tokens: int, held_out: Rate) -> Calibration:
        """What the run file will say of it. ``held_out`` are honest submissions."""
        today = datetime.datetime.now(datetime.UTC).date()
        return Calibration(
            model=self.model.digest,
            dtype=self.config.dtype,
            draw=self.config.draw,
            generators=tuple(options.generator),
            validators=tuple(options.validator),
            environments={part.name: part.weight for part in self.setup.parts},
            tokens=tokens,
            submissions=held_out.of,
            rejected=held_out.rejected,
            date=today.isoformat(),
        )


def _calibrate(options: argparse.Namespace) -> None:
    if options.policy is not None and not options.policy.exists():
        raise ConfigError(f"--policy {options.policy} is not there")
    subject = _from_run(options) if options.run else _from_model(options)
    config = subject.config
    recipe = config.sampling
    groups = max(32, -(-options.sequences // recipe.group_size))
    prompts = _prompts(subject.setup, groups)
    sampling = Sampling(
        recipe.temperature, recipe.max_new_tokens, recipe.group_size, recipe.proof_values
    )
    console = Console(stderr=options.json or str(options.out) == "-")
    with tempfile.TemporaryDirectory() as folder, Progress(console=console) as bar:
        pairs = list(product(options.generator, options.validator))
        # vLLM sets up the process before torch is there
        kinds = sorted({*options.generator, *options.validator}, reverse=True)
        engines = {kind: make_engine(replace(config, kind=kind)) for kind in kinds}
        policy = options.model or _warmed_up(
            engines.get(config.kind) or make_engine(config), Path(folder)
        )
        others = _other_weights(options, policy, Path(folder), subject.learner.rate)
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
        limits = _fit(fitted, config, is_written=options.out is not None)
        dishonest = make_tasks(few, recipe.group_size, "cheat")
        ways = _judge(benches, tasks[1::2], dishonest, others)
    rows = [_row(pair, way, limits) for pair, way in ways]
    held_out = [way for _, way in ways if way.name == HELD_OUT]
    tokens = sum(one.tokens for way in (*fitted, *held_out) for one in way.evidence)
    honest = _honest(held_out, limits, recipe.submission, tokens)
    _report(options, subject, limits, rows, honest, console)


def _fit(fitted: Sequence[Measured], config: EngineConfig, *, is_written: bool) -> Limits:
    """Limits for every pair of engines. Raises `ConfigError` if they are to be written, and
    this is too little work to fit them to."""
    if is_written:
        for one in fitted:
            check_enough(one.evidence)
    groups = config.sampling.submission
    return loosest([fit(one.evidence, config.draw, groups) for one in fitted])


def _judge(
    benches: Mapping[str, WorkBench],
    honest: Sequence[GroupTask],
    dishonest: Sequence[GroupTask],
    others: Sequence[tuple[str, Path]],
) -> list[tuple[str, Measured]]:
    """Every way to work of every pair. What limits were fitted to says nothing about how often
    they are wrong, so honest work is other work."""
    ways = list[tuple[str, Measured]]()
    for pair, bench in benches.items():
        ways.append((pair, replace(bench.honest(honest), name=HELD_OUT)))
        ways += [(pair, way) for way in bench.cheats(dishonest, others)]
    return ways


def _prompts(setup: EnvironmentSetup, count: int) -> list[tuple[int, ...]]:
    """Those of so many tasks. Raises `TimeoutError` if a stranger's template takes for ever."""
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
    """In the process of an environment, as nodes have it: a stranger's template may want all of
    a machine's memory."""
    async with open_world() as world, AsyncExitStack() as stack:
        environment = WorkerEnvironment(world, setup, Ration(), stack, required=False)
        await environment.open()
        with trio.move_on_after(TASK_SECONDS):
            while len(prompts) < count:
                numbers = range(len(prompts), min(count, len(prompts) + ASKED))
                seeds = [number.to_bytes(32, "big") for number in numbers]
                prompts += [task.prompt for task in await environment.tasks(seeds)]


def _from_run(options: argparse.Namespace) -> Subject:
    with options.run.open("rb") as file:
        run: Run = decode_run_untrusted(file.read(MAX_RUN + 1))
    check_pins(run)
    if run.terms.model.base and options.model is None:
        raise ConfigError(f"run {run.name!r} has a base: give its folder as --model")
    folder = str(options.model) if run.terms.model.base else None
    given: Path | None = options.learner
    table = None if given is None else load_toml(given)
    learner = read_learner(table, str(given or "--learner"), run.name, run.terms.model)
    config = engine_of(run, learner=learner)
    return Subject(run.terms.model, config, setup_of(run, MachineLimits(), folder), learner)


def _from_model(options: argparse.Namespace) -> Subject:
    if options.model is None:
        raise ConfigError("say what to calibrate: --run FILE, or --model DIR")
    model = read_config(options.model)
    sampling = SamplingTerms(
        steps=0, group_size=options.group_size, max_new_tokens=options.tokens
    )
    ends = need_end_tokens(options.model, model).tokens
    config = EngineConfig(
        environment=options.env,
        shape=model.shape,
        dtype=Dtype(options.dtype or Dtype.FLOAT32),
        draw=DrawRule(options.draw or DrawRule.CDF),
        context=model.context,
        end_tokens=ends,
        sampling=sampling,
    )
    text = TextModel(
        folder=str(options.model),
        end_tokens=ends,
        vocabulary=model.shape.vocabulary,
        context=model.context,
        max_new_tokens=sampling.max_new_tokens,
    )
    pinned = Model(
        shape=model.shape,
        base=pin_folder(options.model),
        end_tokens=ends,
        context=model.context,
    )
    setup = EnvironmentSetup(parts=(EnvironmentPart(name=options.env),), model=text)
    return Subject(pinned, config, setup, LearnerConfig(rate=STEP_RATE))


def _warmed_up(engine: LocalEngine, folder: Path) -> Path:
    """The first policy of a run without a base."""
    weights = folder / "policy.safetensors"
    engine.open(str(folder / "checkpoint"))
    engine.save("", str(weights))
    return weights


def _other_weights(
    options: argparse.Namespace, policy: Path, folder: Path, rate: float
) -> list[tuple[str, Path]]:
    older = [] if options.policy is None else [("older policy", options.policy)]
    step = one_step_away(rate)
    made = [
        (f"one step of {rate:g}", step),
        ("int8 weights", to_int8),
        ("fp8 weights", to_fp8),
        ("int4 weights", to_int4),
    ]
    return older + [
        (name, rewrite(policy, folder / f"{number}{policy.suffix}", change))
        for number, (name, change) in enumerate(made)
    ]


@dataclass(frozen=True, slots=True)
class Honest:
    """How often the limits refuse honest work that they were not fitted to."""

    tokens: int
    """Honest ones, with those that limits were fitted to."""
    apart: Rate
    """Submissions that share no group."""
    again: Rate
    """Submissions drawn from all groups again and again."""

    def lines(self, groups: int) -> Iterator[str]:
        """For people."""
        yield (
            f"{self.tokens:,} honest tokens. Of {self.again.of:,} submissions of {groups}"
            f" groups, drawn again and again from those held out, {self.again.rejected} are"
            f" refused; of {self.apart.of} that share no group {self.apart.rejected}: at most"
            f" {100 * self.apart.bound:.2g} % of submissions are (95 % confidence)."
        )
        yield f"By the fit it is 1 honest submission in {1 / FALSE_REJECTIONS:,.0f}."


def _honest(ways: Sequence[Measured], limits: Limits, groups: int, tokens: int) -> Honest:
    apart = [rejected_pools(way.evidence, limits, groups) for way in ways]
    again = [resampled(way.evidence, limits, groups) for way in ways]
    return Honest(tokens, sum_rates(apart), sum_rates(again))


def _report(
    options: argparse.Namespace,
    subject: Subject,
    limits: Limits,
    rows: Sequence[dict[str, object]],
    honest: Honest,
    console: Console,
) -> None:
    config = subject.config
    pairs = list(dict.fromkeys(str(row["pair"]) for row in rows))
    what = f"{config.dtype.value}, {config.draw.value}, {config.sampling.proof_values} values"
    if options.json:
        table = {
            "what": what,
            "pairs": pairs,
            "tokens": honest.tokens,
            "limits": asdict(limits),
            "submissions": {
                "groups": config.sampling.submission,
                "apart": asdict(honest.apart),
                "drawn_again": asdict(honest.again),
                "rejected_at_most": honest.apart.bound,
                "promised": FALSE_REJECTIONS,
            },
            "ways": rows,
        }
        write_text("--json", Path("-"), json.dumps(table) + "\n")
    else:
        for pair in pairs:
            console.print(_table([row for row in rows if row["pair"] == pair], pair))
        for line in (f"{what}.", *honest.lines(config.sampling.submission)):
            console.print(line, soft_wrap=True, highlight=False)
    if options.out is not None:
        record = subject.record(options, honest.tokens, honest.apart)
        write_text("--out", options.out, f"{to_toml(limits)}\n{record_to_toml(record)}")


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
