"""``shoal calibrate``: measure honest noise and cheats, and write limits for a run's draft."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Final

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from p2p.errors import ConfigError, ShoalError
from p2p.node.usage import (
    FAILED,
    WRONG_USAGE,
    CommandParser,
    check_target,
    complain,
    interruptible,
    whole_number,
    write_text,
)
from proofs.checks import Limits
from proofs.sampling import DrawRule
from roles.calibrate.limits import fit, loosest, rejected_groups, rejected_pools, to_toml
from roles.calibrate.measure import PLAIN_CHEATS, Measured, WorkBench, make_tasks
from roles.calibrate.weights import one_step_away, rewrite, to_fp8, to_int4, to_int8
from roles.engines.base import GroupTask, Sampling
from roles.engines.config import Dtype, EngineConfig, MachineLimits
from roles.engines.worker import LocalEngine, make_engine
from roles.envs.base import Ration
from roles.envs.client import setup_of
from roles.envs.mix import EnvironmentPart, EnvironmentSetup, open_mix
from roles.envs.ration import interrupted
from roles.envs.text import TextModel
from roles.models.bundle import end_tokens, read_config
from roles.models.trial import try_tokenizer
from roles.rl.recipe import Recipe
from roles.run import Run, decode_run_untrusted
from roles.run.core.file import MAX_RUN

MIN_SEQUENCES: Final = 64
"""Below it there is no pool of 16 groups in either half."""
MAX_SEQUENCES: Final = 1 << 20
"""A million: a day's work of a small model."""
CHEAT_SHARE: Final = 4
"""A cheat gets one in so many of the sequences: it is either plain, or stays hidden."""
HELD_OUT: Final = "honest, held out"
"""Honest work that limits were not fitted to."""
TASK_SECONDS: Final = 600.0
"""For all prompts. A million sequences in groups of 16 want 65,536, of 0.1 ms each; the slowest
families of reasoning-gym take 10 ms. A stranger's chat template may take for ever."""
STEP_RATE: Final = 2e-5
"""How far weights move in a step of a run that names no rate: that of a model with a base."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, write ``[limits]``.

    Returns 0, or with one sentence on standard error 1, or 2 if the command makes no sense.
    """
    return interruptible(partial(_main, argv))


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
    parser.add_argument("--out", type=Path, help="where [limits] go; - is standard output")
    return parser


def _calibrate(options: argparse.Namespace) -> None:
    if options.policy is not None and not options.policy.exists():
        raise ConfigError(f"--policy {options.policy} is not there")
    config, setup = _from_run(options) if options.run else _from_model(options)
    recipe = config.recipe
    groups = max(32, -(-options.sequences // recipe.group_size))
    prompts = _prompts(setup, groups)
    sampling = Sampling(
        recipe.temperature, recipe.max_new_tokens, recipe.group_size, 0.0, recipe.proof_values
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
        others = _other_weights(options, policy, Path(folder), recipe.rate)
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
        limits, fitted = _fit(benches, tasks[::2], config.draw)
        dishonest = make_tasks(few, recipe.group_size, "cheat")
        ways = _judge(benches, limits, tasks[1::2], dishonest, others)
    rows = [_row(pair, way, limits) for pair, way in ways]
    held_out = (way for _, way in ways if way.name == HELD_OUT)
    tokens = sum(one.tokens for way in (*fitted, *held_out) for one in way.evidence)
    _report(options, config, limits, rows, tokens, console)


def _fit(
    benches: Mapping[str, WorkBench], tasks: Sequence[GroupTask], rule: DrawRule
) -> tuple[Limits, list[Measured]]:
    """Limits for every pair of engines, and the honest work that they come from."""
    fitted = [bench.honest(tasks) for bench in benches.values()]
    return loosest([fit(one.evidence, rule) for one in fitted]), fitted


def _judge(
    benches: Mapping[str, WorkBench],
    limits: Limits,
    honest: Sequence[GroupTask],
    dishonest: Sequence[GroupTask],
    others: Sequence[tuple[str, Path]],
) -> list[tuple[str, Measured]]:
    """Every way to work of every pair. What limits were fitted to says nothing about how often
    they are wrong, so honest work is other work."""
    ways = list[tuple[str, Measured]]()
    for pair, bench in benches.items():
        bench.count_beyond(limits.mismatch_distance)
        ways.append((pair, replace(bench.honest(honest), name=HELD_OUT)))
        ways += [(pair, way) for way in bench.cheats(dishonest, others)]
    return ways


def _prompts(setup: EnvironmentSetup, count: int) -> list[tuple[int, ...]]:
    """Those of so many tasks. Raises `TimeoutError` if a stranger's template takes for ever."""
    if setup.model is not None:
        try_tokenizer(Path(setup.model.folder), setup.model.end_tokens)
    mix = open_mix(setup)
    # Ctrl-C would do as well, but a command in a script has nobody at its keyboard.
    with interrupted(Ration(patience=TASK_SECONDS)):
        return [mix.task(number.to_bytes(32, "big")).prompt for number in range(count)]


def _from_run(options: argparse.Namespace) -> tuple[EngineConfig, EnvironmentSetup]:
    with options.run.open("rb") as file:
        run: Run = decode_run_untrusted(file.read(MAX_RUN + 1))
    run.check_environments()
    if run.terms.model.base and options.model is None:
        raise ConfigError(f"run {run.name!r} has a base: give its folder as --model")
    folder = str(options.model) if run.terms.model.base else None
    return run.engine_config(), setup_of(run, MachineLimits(), folder)


def _from_model(options: argparse.Namespace) -> tuple[EngineConfig, EnvironmentSetup]:
    if options.model is None:
        raise ConfigError("say what to calibrate: --run FILE, or --model DIR")
    model = read_config(options.model)
    recipe = Recipe(
        rate=STEP_RATE, group_size=options.group_size, max_new_tokens=options.tokens
    )
    ends = end_tokens(options.model, model)
    config = EngineConfig(
        environment=options.env,
        shape=model.shape,
        dtype=Dtype(options.dtype or Dtype.FLOAT32),
        draw=DrawRule(options.draw or DrawRule.CDF),
        context=model.context,
        end_tokens=ends,
        recipe=recipe,
    )
    text = TextModel(
        folder=str(options.model),
        end_tokens=ends,
        vocabulary=model.shape.vocabulary,
        context=model.context,
        max_new_tokens=recipe.max_new_tokens,
    )
    return config, EnvironmentSetup(parts=(EnvironmentPart(name=options.env),), model=text)


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


def _report(
    options: argparse.Namespace,
    config: EngineConfig,
    limits: Limits,
    rows: Sequence[dict[str, object]],
    tokens: int,
    console: Console,
) -> None:
    pairs = list(dict.fromkeys(str(row["pair"]) for row in rows))
    what = f"{config.dtype.value}, {config.draw.value}, {config.recipe.proof_values} values"
    if options.json:
        table = {
            "what": what,
            "pairs": pairs,
            "tokens": tokens,
            "limits": asdict(limits),
            "ways": rows,
        }
        write_text("--json", Path("-"), json.dumps(table) + "\n")
    else:
        for pair in pairs:
            console.print(_table([row for row in rows if row["pair"] == pair], pair))
        console.print(f"{what}: {tokens:,} honest tokens.")
        held_out = [row for row in rows if row["way"] == HELD_OUT]
        bound = 100 * max(float(row["groups_bound"]) for row in held_out)  # type: ignore[arg-type]
        console.print(
            f"Of honest groups at most {bound:.2g} % are rejected (95 % confidence,"
            f" {held_out[0]['groups']} groups held out{' of each pair' * (len(pairs) > 1)}).",
            soft_wrap=True,
        )
    if options.out is not None:
        note = f"# shoal calibrate: {', '.join(pairs)}; {what}, {tokens} honest tokens\n"
        write_text("--out", options.out, note + to_toml(limits))


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
        "off": sum(one.draw_mismatches for one in evidence) / tokens,
        "groups_rejected": groups.share,
        "groups_bound": groups.bound,
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
