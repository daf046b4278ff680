"""Replaying other nodes' completions by one prefill: hidden states, logits and log-probs.

Rows of all groups are read in chunks of similar length, padded on the right, where causal
attention needs no mask. The statistics are then taken group by group from float32 logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from proofs import sampling as draws, toploc
from proofs.checks import Evidence
from roles.engines.base import EngineError, Group, GroupTask, Sampling
from roles.engines.torch.model import TransformerModel

CHUNK: Final = 64
"""Rows read at once. Measured with 256 answers, CPU to that at 64: 16 rows 1.39, 32 1.12, 128
1.01, 256 1.26: with fewer the dispatch of torch's calls dominates, with more the activations
leave the cache and rows are padded to the longest."""


@torch.inference_mode()
def score(
    model: TransformerModel,
    tasks: Sequence[GroupTask],
    groups: Sequence[Group],
    sampling: Sampling,
    end_tokens: frozenset[int],
) -> list[Evidence]:
    """One `Evidence` per group, in order. Tokens and their numbers were checked before."""
    hidden = replay_hidden(model, tasks, groups)
    checked = iter(
        toploc.verify(
            [one.proof for group in groups for one in group.completions],
            [rows.numpy() for states in hidden for rows in states],
        )
    )
    return [
        _evidence(
            task,
            group,
            model.lm_head(torch.cat(states)).numpy(),
            toploc.worst(list(islice(checked, len(states)))),
            sampling,
            end_tokens,
        )
        for task, group, states in zip(tasks, groups, hidden, strict=True)
    ]


def replay_hidden(
    model: TransformerModel, tasks: Sequence[GroupTask], groups: Sequence[Group]
) -> list[list[Tensor]]:
    """The hidden states behind every completion token: group by group, and in a group one
    (tokens, width) tensor per completion.
    """
    rows = [
        (task.prompt, one.tokens)
        for task, group in zip(tasks, groups, strict=True)
        for one in group.completions
    ]
    if any(not 0 <= token < model.shape.vocabulary for _, tokens in rows for token in tokens):
        raise EngineError(
            "a token is outside the vocabulary; shapes are checked before scoring"
        )
    order = sorted(range(len(rows)), key=lambda row: len(rows[row][0]) + len(rows[row][1]))
    found: list[Tensor] = [torch.empty(0)] * len(rows)
    for start in range(0, len(order), CHUNK):
        chunk = order[start : start + CHUNK]
        # nothing follows the last token
        texts = [rows[row][0] + rows[row][1][:-1] for row in chunk]
        width = len(texts[-1])
        hidden = model(torch.tensor([list(text) + [0] * (width - len(text)) for text in texts]))
        for row, text, states in zip(chunk, texts, hidden, strict=True):
            found[row] = states[len(rows[row][0]) - 1 : len(text)]
    ends = np.cumsum([len(group.completions) for group in groups])
    return [
        found[end - len(group.completions) : end]
        for end, group in zip(ends, groups, strict=True)
    ]


def _evidence(
    task: GroupTask,
    group: Group,
    logits: NDArray[np.float32],
    stats: toploc.ToplocStats | toploc.Malformed,
    sampling: Sampling,
    end_tokens: frozenset[int],
) -> Evidence:
    temperature = sampling.temperature
    lengths = [len(one.tokens) for one in group.completions]
    tokens = np.array([token for one in group.completions for token in one.tokens])
    claimed = np.array([logprob for one in group.completions for logprob in one.logprobs])
    uniforms = draws.uniforms(task.seeds, 0, sampling.max_new_tokens)
    taken = np.arange(sampling.max_new_tokens) < np.array(lengths)[:, None]
    replay = draws.replay(logits, tokens.tolist(), uniforms[taken], temperature)
    last = np.cumsum(lengths) - 1
    early = (np.array(lengths) < sampling.max_new_tokens) & np.isin(
        tokens[last], list(end_tokens)
    )
    measured = (
        stats if isinstance(stats, toploc.ToplocStats) else toploc.ToplocStats(0, 0, 0.0, 0.0)
    )
    return Evidence(
        tokens=len(tokens),
        malformed="" if isinstance(stats, toploc.ToplocStats) else stats.reason,
        exponent_mismatches=measured.exponent_mismatches,
        mantissa_mean=measured.mantissa_mean,
        mantissa_median=measured.mantissa_median,
        draw_distance=float(replay.distance.max()),
        draw_mismatches=int(replay.mismatch.sum()),
        end_probability=float(np.exp(replay.logprob[last[early]]).min(initial=1.0)),
        surprise=draws.surprise(logits, tokens, temperature),
        logprob_error=float(np.abs(claimed - replay.logprob).max()),
    )
