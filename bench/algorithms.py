"""Ten steps of each learning algorithm with SmolLM2 on two-digit addition.

``python -m bench algorithms [--json FILE] [--model DIR] [--steps 10] [--only NAME ...]``

The setup is that of ``llm-controls``, with 6 groups of 8 answers a step in two minibatches, so
that the second one is off its policy: at a ratio of 1 most algorithms are the same. 64
held-out questions before and after. The distance to the base is the mean of k3 over the tokens
of answers that the last policy, as it would be published, draws to these questions. The table
says how algorithms differ in one setting and one seed, and not which is best.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Final

import numpy as np
import torch
from rich.console import Console

from bench.llm_controls import MODEL, Course, OneProcess, learner_of, sampling_of
from bench.report import Report
from roles.engines.torch.files import load_weights
from roles.engines.torch.gradient import learning_batches, old_log_probs
from roles.engines.torch.model import TransformerModel
from roles.rl.algorithms.base import k3

SUBJECTS: Final[dict[str, tuple[str, dict[str, float]]]] = {
    "grpo": ("grpo", {}),
    "dapo": ("dapo", {}),
    "cispo": ("cispo", {}),
    "gspo": ("gspo", {}),
    "grpo, kl_reference 0.05": ("grpo", {"kl_reference": 0.05}),
    "grpo, entropy 0.01": ("grpo", {"entropy": 0.01}),
}
RATE: Final = 4e-5


def run(args: list[str]) -> int:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="python -m bench algorithms")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--questions", type=int, default=64)
    parser.add_argument("--only", nargs="+", default=list(SUBJECTS), choices=SUBJECTS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(args)
    torch.set_num_threads(1)
    report, console = Report("algorithms"), Console(highlight=False)
    console.print(
        "| algorithm | greedy | sampled | entropy | clipped | k3 to the base | CPU s |\n"
        "|---|---|---|---|---|---|---|",
        soft_wrap=True,
    )
    for subject in options.only:
        name, own = SUBJECTS[subject]
        learner = replace(
            learner_of(RATE), algorithm=name, options=own, groups=6, minibatches=2
        )
        start, course = time.process_time(), Course(subject, 0)
        learning = OneProcess(
            options.model,
            course,
            sampling_of(options.steps),
            learner,
            questions=options.questions,
            drawn=12,
        )
        learning.evaluate()
        for _ in range(options.steps):
            learning.step()
        learning.evaluate()
        away = distance(learning, options.model)
        steps, spent = course.reports, time.process_time() - start
        clipped = math.fsum(one.clipped for one in steps) / len(steps)
        console.print(
            f"| {subject} | {course.greedy[0]:.2f} to {course.greedy[1]:.2f}"
            f" | {course.sampled[0]:.2f} to {course.sampled[1]:.2f}"
            f" | {steps[0].entropy:.3f} to {steps[-1].entropy:.3f}"
            f" | {clipped:.1%} | {away:.3f} | {spent:.0f} |",
            soft_wrap=True,
        )
        report.add("addition", subject, "greedy rise", "share", [course.rise])
        report.add("addition", subject, "entropy", "nats", [one.entropy for one in steps])
        report.add("addition", subject, "k3 to the base", "nats", [away])
        report.add("addition", subject, "cost", "CPU seconds", [spent])
    report.write(options.json)
    return 0


def distance(learning: OneProcess, model: Path) -> float:
    """Return the mean of k3 to the base over the tokens of answers to held-out questions."""
    groups = list(learning.held_out(Random(2)))
    trained = learning.learner.model
    base, published = TransformerModel(trained.shape), TransformerModel(trained.shape)
    load_weights(base, model)
    weights = {name: one.bfloat16() for name, one in trained.state_dict().items()}
    published.load_state_dict(weights)
    found = []
    for batch in learning_batches(groups, [np.zeros(1, np.float32)] * len(groups)):
        theirs, mine = (old_log_probs(one, batch, 1.0) for one in (base, published))
        found.append(k3(theirs, mine))
    return float(torch.cat(found).mean())
