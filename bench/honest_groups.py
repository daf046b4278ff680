"""The rate at which honest work is refused: groups of the demo's own early policies, drawn,
committed and replayed.

``python -m bench honest-groups [--groups 20000] [--seeds 0 1] [--steps 6] [--json FILE]``

Decoding and prefill compute the same hidden states with other kernels, so they differ in the
last bits of float32; whatever the verifier makes of that difference, honest workers pay for it.
Every policy from the warm-up to step ``--steps`` gets the same share of the groups. The exit
status is 1 if a group has a mismatch. As a control, the same groups are judged against weights
one step older: how many the limits refuse.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

from rich.console import Console
from rich.progress import track

from bench.alone import Alone, sorting
from bench.report import Report
from proofs.checks import Evidence
from roles.engines.base import GroupTask, Sampling
from roles.engines.config import EngineConfig
from roles.engines.torch import sampler, scorer
from roles.engines.torch.model import TransformerModel
from roles.envs.base import open_teaching

BATCH: Final = 64
"""Groups drawn and replayed together: 1,024 completions."""
STALE: Final = 16
"""Groups of each batch that are also judged against weights one step old."""


@dataclass(slots=True)
class Tally:
    """Counts over many groups."""

    groups: int = 0
    mismatched: int = 0
    worst_mismatches: int = 0
    worst_mean: float = 0.0
    stale_means: list[float] = field(default_factory=list)

    def add(self, evidence: Evidence) -> None:
        """Add one honest group."""
        self.groups += 1
        self.mismatched += evidence.exponent_mismatches > 0
        self.worst_mismatches = max(self.worst_mismatches, evidence.exponent_mismatches)
        self.worst_mean = max(self.worst_mean, evidence.mantissa_mean)


def run(args: list[str]) -> int:
    """Run the bench; 1 if an honest group has a mismatch."""
    parser = argparse.ArgumentParser(prog="python -m bench honest-groups")
    parser.add_argument("--groups", type=int, default=20_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(args)
    tally = Tally()
    policies = len(options.seeds) * (options.steps + 1)
    for seed in options.seeds:
        measure(seed, options.steps, -(-options.groups // policies), tally)
    console = Console()
    stale = sorted(tally.stale_means)
    console.print(
        f"{tally.groups} honest groups of {policies} policies: {tally.mismatched} with a"
        f" mismatch (worst {tally.worst_mismatches}), mantissa mean at most"
        f" {tally.worst_mean:.4f}; weights one step old: {len(stale)} groups, median of the"
        f" mean {stale[len(stale) // 2]:.2f}",
        soft_wrap=True,
    )
    report = Report("honest-groups")
    report.add("honest", "shoal", "groups with a mismatch", "count", [float(tally.mismatched)])
    report.add("honest", "shoal", "groups", "count", [float(tally.groups)])
    report.add("honest", "shoal", "largest mantissa mean", "units", [tally.worst_mean])
    report.add("one step old", "shoal", "mantissa mean", "units", stale)
    report.write(options.json)
    return 1 if tally.mismatched else 0


def measure(seed: int, steps: int, groups: int, tally: Tally) -> None:
    """Count the mismatches of ``groups`` honest groups of each policy of one course."""
    alone = Alone(sorting(seed))
    alone.warm_up()
    before: TransformerModel | None = None
    for step in track(range(steps + 1), description=f"seed {seed}"):
        policy = _copy(alone.learner.model)
        judge_policy(policy, before, Random(seed << 16 | step), groups, tally)
        before = policy
        alone.step()


def judge_policy(
    policy: TransformerModel,
    before: TransformerModel | None,
    rng: Random,
    groups: int,
    tally: Tally,
) -> None:
    """Draw ``groups`` with ``policy``, replay them with it, and a few with its predecessor."""
    config = EngineConfig()
    environment, recipe = open_teaching(config.environment), config.sampling
    sampling = Sampling(recipe.temperature, recipe.max_new_tokens, recipe.group_size)
    end = frozenset(config.end_tokens)
    for first in range(0, groups, BATCH):
        tasks = [
            GroupTask(
                number,
                environment.task(rng.randbytes(32)).prompt,
                tuple(rng.randbytes(32) for _ in range(recipe.group_size)),
            )
            for number in range(min(BATCH, groups - first))
        ]
        drawn = sampler.generate(policy, tasks, sampling, end)
        for scored in scorer.score(policy, tasks, drawn, sampling, end):
            tally.add(scored.evidence)
        if before is not None:
            stale = scorer.score(before, tasks[:STALE], drawn[:STALE], sampling, end)
            tally.stale_means += [scored.evidence.mantissa_mean for scored in stale]


def _copy(model: TransformerModel) -> TransformerModel:
    copy = TransformerModel(model.shape)
    copy.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    return copy.requires_grad_(False)
