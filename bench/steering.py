"""Gain of a worker that takes the token that pays wherever its gap allows.

``python -m bench steering [--model DIR] [--submissions 20] [--caps 1.5 0.2] [--limits FILE]
[--json FILE]``

In bfloat16 honest tokens may score a little below the best, so a worker that knows the answer
may take its next token instead of the one that the seed gives. Its activation proof is right:
the states follow from the tokens. SmolLM2 answers the arithmetic environment's default mix, 8
groups of 16 a submission: as long as an answer is the beginning of the right one, its next
token is the right one if its gap is below the cap. Said of each cap are the reward, beside that
of the same tasks drawn honestly, and how many submissions a validator refuses, by the preset or
by ``--limits``, a file of ``shoal calibrate``. 10 CPU seconds a submission and cap. The exit
status is 1 if a cap gains `GAIN` and none of its submissions is refused.
"""

from __future__ import annotations

import argparse
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import torch
import trio
from numpy.typing import NDArray
from torch import Tensor

from bench.llm_controls import MODEL
from bench.report import Report
from p2p.identity import KeyPair
from p2p.node.tables import load_toml, read_table
from proofs.checks import Evidence, Limits, Verdict, judge, judge_pool
from proofs.draws import draw, replay
from proofs.sampling import DrawRule
from roles.calibrate.measure import make_tasks
from roles.contract.core.shape import Dtype
from roles.engines.base import Group, GroupTask, Sampling
from roles.engines.torch import scorer
from roles.engines.torch.files import load_weights
from roles.engines.torch.model import TransformerModel
from roles.engines.torch.sampler import Sampler
from roles.envs.arithmetic import ArithmeticEnvironment
from roles.envs.text import TextTask
from roles.models.bundle import read_config
from roles.models.ends import read_end_tokens
from roles.models.tokenizer import Tokenizer
from roles.protocol.history import DrawHistory

GROUPS: Final = 8
"""Groups of a submission."""
SAMPLING: Final = Sampling(1.0, 12, 16)
WORKER: Final = KeyPair(bytes(32)).peer_id
GAIN: Final = 0.02
"""Mean reward that may be gained: one answer in fifty."""


class SteeredSampler(Sampler):
    """Draws honestly, but takes the next token of the right answer wherever its gap is small
    enough."""

    answers: Mapping[tuple[int, ...], tuple[int, ...]] = {}
    """Right answers by prompt, without an end token."""
    ends: tuple[int, ...] = ()
    cap = 0.0
    gaps: list[float]
    """Gaps of the tokens that are not the seed's."""

    def _draw_step(self, last: Tensor) -> NDArray[np.intp]:
        live = np.flatnonzero(self._is_live)
        place, length = self._place[live], self._length[live]
        words = self._words[place, length]
        chosen = np.zeros(len(last), dtype=np.intp)
        for start in range(0, len(live), self._slice):
            part = slice(start, start + self._slice)
            logits = self._model.logits(last[torch.from_numpy(live[part])]).numpy()
            tokens = draw(logits, words[part], 1.0, DrawRule.GUMBEL).tokens
            self._steer(live[part], logits, words[part], tokens)
            chosen[live[part]] = tokens
        self._logprobs[place, length] = 0.0  # a worker's own figures are never looked at
        self._record(live, chosen[live], last[torch.from_numpy(live)])
        return chosen

    def _steer(
        self,
        rows: NDArray[np.intp],
        logits: NDArray[np.float32],
        words: NDArray[np.uint64],
        tokens: NDArray[np.intp],
    ) -> None:
        """Put wanted tokens in the place of drawn ones."""
        for index, row in enumerate(rows.tolist()):
            wanted = list(self._wanted(row))
            if not wanted or tokens[index] in wanted:
                continue
            at = slice(index, index + 1)
            gaps = [
                float(replay(logits[at], [token], words[at], 1.0, DrawRule.GUMBEL).gap[0])
                for token in wanted
            ]
            if min(gaps) < self.cap:
                tokens[index] = wanted[int(np.argmin(gaps))]
                self.gaps.append(min(gaps))

    def _wanted(self, row: int) -> Iterator[int]:
        """Tokens by which the answer of a row stays right."""
        group, _ = self._open[int(self._completion[row])]
        answer = self.answers[group.task.prompt]
        length = int(self._length[row])
        so_far = tuple(self._tokens[self._place[row], :length].tolist())
        if so_far == answer[:length]:
            yield from answer[length : length + 1] or self.ends


@dataclass(slots=True)
class Outcome:
    """Outcome of a cap."""

    rewards: list[float] = field(default_factory=list)
    """Mean reward of each submission."""
    refused: Counter[str] = field(default_factory=Counter)
    steered: int = 0
    spent: float = 0.0
    """Sum of the gaps of those tokens."""

    @property
    def reward(self) -> float:
        """Mean reward of all submissions."""
        return sum(self.rewards) / len(self.rewards)


class Worker:
    """A model, the questions that it is asked, and a validator's judgement."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        config = read_config(folder)
        self._tokenizer = Tokenizer.open(folder)
        self._ends = read_end_tokens(folder, config).of_line
        self._model = TransformerModel(config.shape, Dtype.BFLOAT16)
        self._model.lay_for_reading()
        load_weights(self._model, folder)
        self._environment = ArithmeticEnvironment()
        self._limits = limits
        self.history = DrawHistory()
        """History of this worker, as a validator has it."""

    def submit(self, number: int, cap: float, outcome: Outcome) -> None:
        """Draw and judge one submission."""
        seeds = [f"steering {number} {place}".encode() for place in range(GROUPS)]
        asked = [self._environment.task(hashlib.sha256(seed).digest()) for seed in seeds]
        prompts = [self._tokenizer.chat(one.messages, one.prefill) for one in asked]
        tasks = make_tasks(prompts, SAMPLING.group_size, f"steering {number}")
        sampler = SteeredSampler(
            self._model, frozenset(self._ends), DrawRule.GUMBEL, proves=True
        )
        sampler.answers = {
            prompt: self._answer(one) for prompt, one in zip(prompts, asked, strict=True)
        }
        sampler.ends, sampler.cap, sampler.gaps = self._ends, cap, []
        groups = _draw(sampler, tasks)
        rewards = [
            trio.run(self._environment.reward, one, *self._said(answer.tokens))
            for one, group in zip(asked, groups, strict=True)
            for answer in group.completions
        ]
        scored = scorer.score(
            self._model, tasks, groups, SAMPLING, frozenset(self._ends), DrawRule.GUMBEL
        )
        outcome.rewards.append(sum(rewards) / len(rewards))
        outcome.refused[self._verdict([one.evidence for one in scored])] += 1
        outcome.steered += len(sampler.gaps)
        outcome.spent += sum(sampler.gaps)

    def _answer(self, task: TextTask) -> tuple[int, ...]:
        return self._tokenizer.encode_behind(task.prefill, f" {task.answer}")

    def _said(self, tokens: Sequence[int]) -> tuple[str, bool]:
        has_ended = tokens[-1] in self._ends
        return self._tokenizer.decode(tokens[:-1] if has_ended else tokens), has_ended

    def _verdict(self, pool: Sequence[Evidence]) -> str:
        """Return the reason why a submission is refused; empty if it is accepted."""
        judged = [*(judge(one, self._limits) for one in pool), judge_pool(pool, self._limits)]
        if all(one.verdict is Verdict.ACCEPTED for one in judged):
            judged.append(self.history.judge(WORKER, pool, self._limits))
        return next((j.reason.value for j in judged if j.verdict is Verdict.REJECTED), "")


def _draw(sampler: Sampler, tasks: Sequence[GroupTask]) -> list[Group]:
    sampler.add(tasks, SAMPLING)
    while sampler.has_work:
        sampler.step()
    return sorted((group for _, group in sampler.take_ended()), key=lambda one: one.group)


def run(args: list[str]) -> int:
    """Run the bench; 1 if steering pays and is not refused."""
    parser = argparse.ArgumentParser(prog="python -m bench steering")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--submissions", type=int, default=20)
    parser.add_argument("--caps", type=float, nargs="+", default=[1.5, 0.2])
    parser.add_argument("--limits", type=Path, help="of shoal calibrate; left out: the preset")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(args)
    torch.set_num_threads(1)
    limits = Limits.bf16()
    if options.limits is not None:
        limits = read_table(Limits, load_toml(options.limits)["limits"], str(options.limits))
    worker, report, pays = Worker(options.model, limits), Report("steering"), []
    outcomes = {cap: Outcome() for cap in (0.0, *options.caps)}
    for cap, outcome in outcomes.items():
        worker.history = DrawHistory()
        for number in range(options.submissions):
            worker.submit(number, cap, outcome)
        gain = outcome.reward - outcomes[0.0].reward
        refused = options.submissions - outcome.refused[""]
        tokens, nats = (
            total / options.submissions for total in (outcome.steered, outcome.spent)
        )
        print(
            f"cap {cap:g}: reward {outcome.reward:.4f} ({gain:+.4f}), steered {tokens:.1f}"
            f" tokens by {nats:.2f} nats a submission, refused {refused} of"
            f" {options.submissions}: {dict(outcome.refused)}",
            flush=True,
        )
        pays.append(gain >= GAIN and not refused)
        report.add(f"cap {cap:g}", "steered", "reward", "mean", outcome.rewards)
        report.add(f"cap {cap:g}", "steered", "refused", "submissions", [float(refused)])
    report.write(options.json)
    return 1 if any(pays) else 0
