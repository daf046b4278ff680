"""How often an honest update counts as harm in a trial, and how often a harmful one does.

``python -m bench gauntlet [--json FILE] [--steps 600] [--inner 25] [--seed 0]``

Four members pre-train one model in one process on Python's own library, with the product's
inner steps, encoding and outer step. After each round every update is tried as the product
tries it: alone, at its share of the mean, on `TRIED` windows that nobody learns from. So are
updates that were turned round, whole or by a tenth, and noise of the same norm. For each kind:
the share of trials that count as harm, and as help, and the gain beside an honest update's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from rich.console import Console

from bench.report import Report
from roles.contract.core.diloco import DilocoTerms
from roles.demo.pretraining import SHAPE
from roles.diloco.core.algorithm import algorithm_of
from roles.diloco.core.gauntlet import PARTS, TRIED, bounds
from roles.diloco.core.outer import OuterState
from roles.diloco.core.pieces import PieceGrid
from roles.diloco.core.quant import Values
from roles.diloco.core.windows import windows
from roles.diloco.corpus import open_corpora
from roles.engines.config import EngineConfig
from roles.engines.torch.pretrain import Pretrainer

MEMBERS = 4
SHARES = (4, 14)
"""Members of the runs whose means are assumed."""


def run(args: list[str]) -> int:
    """Run the bench; 1 if an honest update in a hundred counts as harm."""
    parser = argparse.ArgumentParser(prog="python -m bench gauntlet")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--inner", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(args)
    terms = DilocoTerms(
        outer_steps=options.steps // options.inner, inner_steps=options.inner, warmup=100
    )
    gains = course(terms, options.seed)
    report, console = Report("gauntlet"), Console(file=sys.stdout)
    for (members, kind), found in gains.items():
        case = f"{kind}, 1 of {members}"
        usual = statistics.median(map(statistics.fmean, gains[members, "honest"]))
        limits = [bounds(one) for one in found]
        report.add(case, "trials", "counts as harm", "", [_share(h < 0 for _, h in limits)])
        report.add(case, "trials", "counts as help", "", [_share(low > 0 for low, _ in limits)])
        middle = statistics.median(map(statistics.fmean, found)) / usual
        report.add(case, "trials", "gain beside an honest one's", "", [middle])
        report.add(case, "trials", "number", "", [float(len(found))])
    console.print(str(report), highlight=False, soft_wrap=True)
    report.write(options.json)
    honest = [one for count in SHARES for one in gains[count, "honest"]]
    return 1 if _share(bounds(one)[1] < 0 for one in honest) >= 0.01 else 0


def _share(those: Iterable[bool]) -> float:
    return statistics.fmean(those)


def course(terms: DilocoTerms, seed: int) -> dict[tuple[int, str], list[list[float]]]:
    """Gains of all trials of a course, by the members of the mean and the kind of update."""
    corpus = open_corpora(
        terms.corpora, {}, str.encode, end=0, vocabulary=256, window=terms.window,
        held_out=terms.held_out,
    )  # fmt: skip
    config = EngineConfig(shape=SHAPE, environment=None, seed=seed)
    members = [Pretrainer(config, terms, None) for _ in range(MEMBERS)]
    state = OuterState.begin(members[0].vector())
    grid = PieceGrid.of(state.weights.size, terms.codec)
    tried = [corpus.read(one) for one in np.array_split(corpus.held_out[:TRIED], PARTS)]
    dice = np.random.default_rng(seed)
    found: dict[tuple[int, str], list[list[float]]] = {}
    for outer in range(terms.outer_steps):
        updates: list[Values] = []
        for rank, member in enumerate(members):
            member.load(state.weights)
            first = (outer * MEMBERS + rank) * terms.phase_windows
            numbers = windows(seed, first, terms.phase_windows, corpus.starts.size)
            rows = corpus.read(corpus.starts[numbers])
            batches = list(rows.reshape(terms.inner_steps, terms.sequences, corpus.width))
            member.train(batches, outer * terms.inner_steps)
            updates.append(grid.join(grid.encode_all(member.update())))
        for count in SHARES:
            kinds = [*(("honest", one) for one in updates), *harmful(updates[0], dice)]
            vectors = np.stack([one / np.float32(count) for _, one in kinds])
            gains = members[0].gains(state.weights, vectors, tried)
            for (kind, _), gain in zip(kinds, gains, strict=True):
                found.setdefault((count, kind), []).append(gain)
        mean = np.stack(updates).mean(0, dtype=np.float32)
        state = algorithm_of(terms).after(state, mean, outer + 1)
    return found


def harmful(update: Values, dice: np.random.Generator) -> list[tuple[str, Values]]:
    """Updates that make a model worse, or do nothing for it."""
    noise = dice.standard_normal(update.size).astype(np.float32)
    noise *= np.linalg.norm(update) / np.linalg.norm(noise)
    return [
        ("turned round", -update),
        ("a tenth, turned round", update * np.float32(-0.1)),
        ("noise", noise),
    ]
