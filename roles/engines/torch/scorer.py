"""Replaying other nodes' completions by one prefill: hidden states, logits and log-probs.

Rows of all groups are read in chunks of similar length, padded on the right, where causal
attention needs no mask. The statistics are then taken group by group, from float32 logits of a
slice of rows at a time (`roles.engines.replay`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from proofs.sampling import DrawRule
from roles.engines.base import EngineError, Group, GroupTask, Sampling, Scored
from roles.engines.replay import GroupReplay, conclude
from roles.engines.torch.model import TransformerModel

CHUNK: Final = 64
"""Rows read at once. Measured with 256 answers, CPU to that at 64: 16 rows 1.39, 32 1.12, 128
1.01, 256 1.26: with fewer the dispatch of torch's calls dominates, with more the activations
leave the cache and rows are padded to the longest."""

_LOGITS: Final = 1 << 22
"""Logits at a time, of 4 bytes: 16 MiB, 85 rows of a vocabulary of 49,152."""


@torch.inference_mode()
def score(
    model: TransformerModel,
    tasks: Sequence[GroupTask],
    groups: Sequence[Group],
    sampling: Sampling,
    end_tokens: frozenset[int],
    rule: DrawRule = DrawRule.CDF,
) -> list[Scored]:
    """One `Scored` per group, in order. Tokens and their numbers were checked before."""
    hidden = replay_hidden(model, tasks, groups)
    replays = []
    for task, group, states in zip(tasks, groups, hidden, strict=True):
        replay = GroupReplay(task, group, sampling, end_tokens, rule)
        for values, mine in zip(replay.activations, states, strict=True):
            values.add(mine.numpy())
        rows = torch.cat(states)
        size = max(1, _LOGITS // model.shape.vocabulary)
        for start in range(0, len(rows), size):
            replay.add_logits(model.lm_head(rows[start : start + size]).numpy())
        replays.append(replay)
    return conclude(replays, sampling.proof_values)


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
