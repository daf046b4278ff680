"""Drawing completions from a policy, each token fixed by its completion's seed.

Theory of operation
-------------------
The completions of a group share their prompt: it is read once, padded on the left, and its keys
and values are then repeated for every completion. One decode step draws one token for every row
by inverse CDF with the row's next uniform. Rows that have ended are dropped from the batch once
a quarter of it has. The hidden state from which a token was drawn (final-normed, the head's
input) is kept for the activation proof.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from proofs import draws, toploc
from proofs.sampling import DrawRule, draw_words
from roles.engines.base import Completion, Group, GroupTask, Sampling
from roles.engines.config import ROWS
from roles.engines.torch.model import Cache, TransformerModel
from roles.rl.losses import token_logprobs

_COMPACT_BELOW: Final = 0.75
"""The batch is compacted when less than this share of its rows is unfinished. Measured with 256
answers of 6.6 tokens, CPU to that at 0.75: never 1.40, at 0.5 1.07, at 0.9 1.01, after every
row that ends 1.04: idle rows cost a pass, a compaction copies the cache."""

_PAD: Final = 0
"""The token to the left of a short prompt: attention does not see it."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Completions of one group, without proofs, and the hidden states behind the tokens of
    each: (tokens, width).
    """

    completions: tuple[Completion, ...]
    activations: tuple[NDArray[np.float32], ...]


def generate(
    model: TransformerModel,
    tasks: Sequence[GroupTask],
    sampling: Sampling,
    end_tokens: frozenset[int],
    rule: DrawRule = DrawRule.CDF,
) -> list[Group]:
    """Groups with proofs, in the order of the tasks."""
    drawn = draw(model, tasks, sampling, end_tokens, rule)
    activations = [rows for one in drawn for rows in one.activations]
    proofs = iter(toploc.commit(activations, sampling.proof_values))
    return [
        Group(
            task.group,
            tuple(replace(each, proof=next(proofs)) for each in one.completions),
        )
        for task, one in zip(tasks, drawn, strict=True)
    ]


@torch.inference_mode()
def draw(
    model: TransformerModel,
    tasks: Sequence[GroupTask],
    sampling: Sampling,
    end_tokens: frozenset[int],
    rule: DrawRule = DrawRule.CDF,
) -> list[Drawn]:
    """Completions without proofs, in the order of the tasks."""
    return [
        group
        for batch in _batches(tasks)
        for group in _Batch(model, batch, sampling, end_tokens, rule).groups()
    ]


def _batches(tasks: Sequence[GroupTask]) -> Iterator[list[GroupTask]]:
    """Runs of tasks with at most `ROWS` completions together (one task may have more)."""
    batch: list[GroupTask] = []
    rows = 0
    for task in tasks:
        if batch and rows + len(task.seeds) > ROWS:
            yield batch
            batch, rows = [], 0
        batch.append(task)
        rows += len(task.seeds)
    if batch:
        yield batch


class _Batch:
    """One left-padded batch from its prompts to the end of its last completion."""

    def __init__(
        self,
        model: TransformerModel,
        tasks: Sequence[GroupTask],
        sampling: Sampling,
        end_tokens: frozenset[int],
        rule: DrawRule,
    ) -> None:
        self._model = model
        self._tasks = tasks
        self._sampling = sampling
        self._rule = rule
        self._ends = torch.tensor(sorted(end_tokens))
        self._sizes = [len(task.seeds) for task in tasks]
        rows, limit = sum(self._sizes), sampling.max_new_tokens
        self._tokens = torch.zeros(rows, limit, dtype=torch.long)
        self._lengths = torch.zeros(rows, dtype=torch.long)
        self._hidden = torch.zeros(rows, limit, model.shape.width)
        self._unfinished = torch.ones(rows, dtype=torch.bool)
        seeds = [seed for task in tasks for seed in task.seeds]
        self._words = draw_words(seeds, 0, limit)

    def groups(self) -> list[Drawn]:
        """Decode until every row has ended."""
        self._decode()
        drawn = torch.arange(self._sampling.max_new_tokens) < self._lengths[:, None]
        hidden = self._hidden[drawn]
        # greedy tokens are reported as at T = 1
        temperature = self._sampling.temperature or 1.0
        logprobs = token_logprobs(
            self._model.lm_head(hidden), self._tokens[drawn], temperature
        ).tolist()
        ends = self._lengths.cumsum(0).tolist()
        tokens = self._tokens[drawn].tolist()
        completions = [
            Completion(tuple(tokens[end - length : end]), tuple(logprobs[end - length : end]))
            for end, length in zip(ends, self._lengths.tolist(), strict=True)
        ]
        return list(self._by_group(completions, hidden.numpy()))

    def _by_group(
        self, completions: list[Completion], hidden: NDArray[np.float32]
    ) -> Iterator[Drawn]:
        row = at = 0
        for size in self._sizes:
            mine = tuple(completions[row : row + size])
            ends = list(accumulate((len(one.tokens) for one in mine), initial=at))
            yield Drawn(mine, tuple(hidden[start:end] for start, end in pairwise(ends)))
            row, at = row + size, ends[-1]

    def _decode(self) -> None:
        prompts, pads = self._padded_prompts()
        width = prompts.shape[1]
        cache = Cache.empty(
            self._model.shape, len(prompts), width + self._sampling.max_new_tokens
        )
        last = self._read_prompts(prompts, pads, cache)
        active = torch.arange(len(self._tokens))
        group = torch.repeat_interleave(torch.arange(len(prompts)), torch.tensor(self._sizes))
        cache, last, pads = cache.select(group), last[group], pads[group]
        for step in range(self._sampling.max_new_tokens):
            chosen = self._draw_step(last, active, step)
            continuing = self._unfinished[active].nonzero().squeeze(1)
            if step + 1 == self._sampling.max_new_tokens or not len(continuing):
                return
            if len(continuing) <= _COMPACT_BELOW * len(active):
                active, chosen, pads, cache = (
                    active[continuing],
                    chosen[continuing],
                    pads[continuing],
                    cache.select(continuing),
                )
            visible = torch.arange(width + step + 1) >= pads[:, None]
            positions = (width + step - pads)[:, None]
            last = self._model(chosen[:, None], positions, visible[:, None, None], cache)[:, 0]

    def _padded_prompts(self) -> tuple[Tensor, Tensor]:
        """(prompts, width), padded on the left, and how many pads each has."""
        width = max(len(task.prompt) for task in self._tasks)
        pads = [width - len(task.prompt) for task in self._tasks]
        rows = [
            [_PAD] * pad + list(task.prompt)
            for pad, task in zip(pads, self._tasks, strict=True)
        ]
        return torch.tensor(rows), torch.tensor(pads)

    def _read_prompts(self, prompts: Tensor, pads: Tensor, cache: Cache) -> Tensor:
        """Fill the cache; return the hidden state behind each first token. Pads see, and show,
        nothing.
        """
        columns = torch.arange(prompts.shape[1])
        positions = (columns - pads[:, None]).clamp(min=0)
        seen = (columns <= columns[:, None]) & (columns >= pads[:, None, None])
        hidden: Tensor = self._model(prompts, positions, seen[:, None], cache)
        return hidden[:, -1]

    def _draw_step(self, last: Tensor, active: Tensor, step: int) -> Tensor:
        """Draw one token for every row of ``active``; those of rows that have ended are not
        recorded.
        """
        logits = self._model.lm_head(last).numpy()
        words = self._words[active.numpy(), step]
        drawn = draws.draw(logits, words, self._sampling.temperature, self._rule)
        chosen = torch.from_numpy(drawn.tokens).long()
        unfinished = self._unfinished[active]
        at = active[unfinished]
        self._tokens[at, step] = chosen[unfinished]
        self._hidden[at, step] = last[unfinished]
        self._lengths[at] = step + 1
        self._unfinished[at] = ~torch.isin(chosen[unfinished], self._ends)
        return chosen
