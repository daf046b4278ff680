"""A group in one row: its prompt once, its completions side by side.

Theory of operation
-------------------
Completions of one group share their prompt. As rows of their own they repeat it: eight answers
of 7 tokens to a prompt of 26 are 8 x 32 = 256 positions. In one row they are 26 + 8 x 6 = 74:

    tokens      p0 p1 p2 | a0 a1 | b0 b1 b2 | pad
    positions    0  1  2 |  3  4 |  3  4  5 |   6
    segment     -1 -1 -1 |  0  0 |  1  1  1 |   2

Where an environment speaks within a completion, what it said stands in the row like the rest,
and is no answer token: no state counts as behind it.

A position sees what is not after it and is of its own segment or of the prompt, so that a
completion sees what it would see alone, at the positions where it would be alone. The state
from which the first token of every completion was drawn is the prompt's last; nothing follows
the last token of a completion, which is therefore not read at all.

Attention in a packed row costs the square of the row, of which a mask hides the greater part,
the more the longer the answers are. Where it is cheaper, attention alone is taken with the
completions beside each other, prompts repeated, and without a mask (`Unpacking`): eight answers
of 64 tokens to a prompt of 29 are one row of 533 for all other arithmetic and 8 x 92 for
attention, which then takes 4 ms a layer instead of 10. A group whose answers are long is spread
over several rows (`ROW_TOKENS`); a row of one completion is plain causal. Rows of like length
make a batch, padded on the right, up to `BATCH_TOKENS`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from roles.engines.base import Completion
from roles.engines.config import BATCH_TOKENS
from roles.engines.torch.device import CPU, send, send_numbers
from roles.engines.torch.model import Seen, TransformerModel, Unpacking

Tokens = Sequence[int]

ROW_TOKENS: Final = 1024
"""Positions of a row, if more than one completion is in it. The mask of such a row is 4 MiB; in
a model of width 576 masked attention over 1,024 positions is a third of what the layer costs
beside it, and every doubling doubles that. One completion may be as long as it is."""

_LAYING: Final = 30
"""Cost of laying a position beside others and back, in pairs of positions. Measured with 9
heads on 3 of width 64, CPU ms of attention: 0.036 per 1,000 masked pairs, 1.4 per 1,000
positions laid. Answers of 7 tokens (74 positions, 8 x 32 beside each other) stay in their row:
0.3 ms, and 0.6 beside each other."""

_PROMPT: Final = -1
_PAD: Final = 0
"""Token to the right of a short row, which no other position sees."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One completion in a batch."""

    group: int
    """Index of the group among those that were packed."""
    completion: int
    """Index of the completion in the group."""
    length: int
    """Number of drawn tokens."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Rows for one pass through the model. Answer tokens, which are the drawn ones, stand in
    the order of ``pieces``."""

    tokens: Tensor
    """(rows, length)."""
    positions: Tensor
    """(rows, length)."""
    seen: Seen
    """Positions that attention sees; None where attention is causal in each row."""
    behind: Tensor
    """For each answer token, the index in the rows laid end to end of the state that it was
    drawn from."""
    answers: Tensor
    """The answer tokens."""
    pieces: tuple[Piece, ...]
    """Maps consecutive runs of answer tokens to their completions."""
    reach: int
    """Bound that all positions are below."""

    def hidden(self, model: TransformerModel) -> Tensor:
        """Return the state behind each answer token: (answer tokens, width)."""
        states: Tensor = model(self.tokens, self.positions, self.seen, reach=self.reach)
        return states.flatten(0, 1)[self.behind]


@dataclass(slots=True)
class _Row:
    group: int
    prompt: Tokens
    completions: list[tuple[int, Tokens, Sequence[int]]]
    """Completions of the row: number, text, and the indices of drawn tokens in the text."""
    length: int


def pack(
    groups: Sequence[tuple[Tokens, Sequence[Completion]]],
    *,
    batch_tokens: int = BATCH_TOKENS,
    row_tokens: int = ROW_TOKENS,
    device: torch.device = CPU,
) -> list[PackedBatch]:
    """Pack every completion of every group, each a prompt and its completions, into few
    positions.

    No prompt and no completion may be empty. The same groups give the same batches, which are
    in no order that means anything.
    """
    rows = [
        row
        for number, (prompt, completions) in enumerate(groups)
        for row in _rows(number, prompt, completions, row_tokens)
    ]
    rows.sort(key=lambda row: row.length)
    return [_batch(some, device) for some in _batches(rows, batch_tokens)]


def _rows(
    group: int, prompt: Tokens, completions: Sequence[Completion], limit: int
) -> Iterator[_Row]:
    """Yield the rows of one group, each with as many completions as fit."""
    if not prompt or not all(one.tokens for one in completions):
        raise ValueError("a prompt or a completion is empty: shapes are checked before packing")
    row: _Row | None = None
    for number, completion in enumerate(completions):
        text, drawn = completion.text
        more = len(text) - 1
        if row is None or row.length + more > limit:
            if row is not None:
                yield row
            row = _Row(group, prompt, [], len(prompt))
        row.completions.append((number, text, drawn))
        row.length += more
    if row is not None:
        yield row


def _batches(rows: Sequence[_Row], limit: int) -> Iterator[list[_Row]]:
    """Yield batches of rows, short rows first, of at most ``limit`` positions (a single row may
    have more)."""
    some: list[_Row] = []
    for row in rows:
        if some and (len(some) + 1) * row.length > limit:
            yield some
            some = []
        some.append(row)
    if some:
        yield some


def _batch(rows: Sequence[_Row], device: torch.device) -> PackedBatch:
    width = max(row.length for row in rows)
    tokens, positions, segments = [], [], []
    behind, answers, pieces = list[int](), list[int](), list[Piece]()
    for number, row in enumerate(rows):
        start, first = number * width, len(row.prompt)
        line, places, owners = list(row.prompt), list(range(first)), [_PROMPT] * first
        for segment, (completion, text, drawn) in enumerate(row.completions):
            more, own = len(text) - 1, start + len(line)
            # the first token was drawn behind the prompt, each other behind the one before it
            behind.extend(own + place - 1 if place else start + first - 1 for place in drawn)
            answers.extend(text[place] for place in drawn)
            line.extend(text[:-1])
            places.extend(range(first, first + more))
            owners.extend([segment] * more)
            pieces.append(Piece(row.group, completion, len(drawn)))
        pads = width - len(line)
        tokens.append(line + [_PAD] * pads)
        positions.append(places + [0] * pads)
        segments.append(owners + [len(row.completions)] * pads)
    return PackedBatch(
        send_numbers(tokens, device),
        send_numbers(positions, device),
        _seen(rows, width, segments, device),
        send_numbers(behind, device),
        send_numbers(answers, device),
        tuple(pieces),
        _longest(rows),
    )


def _longest(rows: Sequence[_Row]) -> int:
    """Return the length of the longest prompt with one of its completions."""
    return max(
        len(row.prompt) + len(text) - 1 for row in rows for _, text, _ in row.completions
    )


def _seen(
    rows: Sequence[_Row], width: int, segments: list[list[int]], device: torch.device
) -> Seen:
    """Return the cheapest representation of the attention mask."""
    if all(len(row.completions) == 1 for row in rows):
        return None
    sequences = sum(len(row.completions) for row in rows)
    longest = _longest(rows)
    if sequences * longest * (longest + _LAYING) < len(rows) * width**2:
        places, back = _unpacking(rows, width, sequences, longest)
        return Unpacking(send(places, device), send(back, device))
    return _mask(send_numbers(segments, device))


def _unpacking(
    rows: Sequence[_Row], width: int, sequences: int, longest: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices that lay each completion after its prompt. Pads are given any index,
    since no counted position sees them."""
    places = np.zeros((sequences, longest), dtype=np.int64)
    back = np.zeros(len(rows) * width, dtype=np.int64)
    sequence = 0
    for number, row in enumerate(rows):
        first = len(row.prompt)
        prompt = np.arange(number * width, number * width + first)
        start = number * width + first
        for _, text, _ in row.completions:
            own = np.arange(start, start + len(text) - 1)
            line = np.concatenate([prompt, own])
            places[sequence, : len(line)] = line
            back[line] = np.arange(len(line)) + sequence * longest
            start += len(own)
            sequence += 1
    return places, back


def _mask(segments: Tensor) -> Tensor:
    """Return the attention mask: (rows, 1, length, length). A pad sees the prompt, itself and
    the pads before it, since softmax needs at least one position."""
    mine, theirs = segments[:, :, None], segments[:, None, :]
    size, device = segments.shape[1], segments.device
    causal = torch.ones(size, size, dtype=torch.bool, device=device).tril()
    return (causal & ((mine == theirs) | (theirs == _PROMPT)))[:, None]
