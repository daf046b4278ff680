"""Replaying other nodes' completions by one prefill: hidden states, logits, statistics.

Theory of operation
-------------------
The prompt of a group is read once. Groups that are short enough are one packed row each,
several rows at a time (`roles.engines.torch.packing`). The prompt of a longer group goes into a
cache; its completions are then read behind it, several short ones side by side, a long one in
blocks, and what the cache holds behind the prompt is overwritten by the next.

States leave this module's readers in the order of the tokens, some at a time. Logits are made
for a slice of them, go into the group's statistics (`roles.engines.replay`) and are dropped. So
the memory that scoring takes beyond the weights follows from the longest completion (its keys
and values), and neither from the vocabulary nor from the number of tokens.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Final

import torch
from torch import Tensor

from proofs.sampling import DrawRule
from roles.engines.base import Completion, EngineError, Group, GroupTask, Sampling, Scored
from roles.engines.config import BATCH_TOKENS
from roles.engines.replay import GroupReplay, conclude
from roles.engines.torch.device import at_once, send_numbers
from roles.engines.torch.instruments import Instruments, instruments_for
from roles.engines.torch.model import Cache, TransformerModel, slice_rows
from roles.engines.torch.packing import ROW_TOKENS, PackedBatch, Tokens, pack

BLOCK: Final = 512
"""Tokens of a long group that are read at once. With fewer, products of matrices are slower
(1.4 times with 64). With more, short completions side by side spend more on attention that the
mask then hides, and the mask of a block at the end of 32,768 tokens, 64 MiB here, grows."""


@dataclass(frozen=True, slots=True)
class States:
    """The states from which tokens of one group were drawn, completion after completion."""

    group: int
    parts: tuple[tuple[int, int], ...]
    """The completion and the number of rows of each run of rows."""
    rows: Tensor
    """(tokens, width)."""


@torch.inference_mode()
def score(
    model: TransformerModel,
    tasks: Sequence[GroupTask],
    groups: Sequence[Group],
    sampling: Sampling,
    end_tokens: frozenset[int],
    rule: DrawRule = DrawRule.CDF,
    *,
    instruments: Instruments | None = None,
) -> list[Scored]:
    """Return one `Scored` per group, in order. Tokens and their numbers were checked before."""
    _check_tokens(model.shape.vocabulary, tasks, groups)
    tools = instruments or instruments_for(model.device)
    replays = [
        GroupReplay(
            task,
            group,
            sampling,
            end_tokens,
            rule,
            replay=tools.replay,
            top_values=tools.top_values,
        )
        for task, group in zip(tasks, groups, strict=True)
    ]
    found: dict[int, Scored] = {}
    for batch in read_groups(model, tasks, groups):
        numbers = list[int]()
        for states in batch:
            if states.group not in numbers[-1:]:
                numbers.append(states.group)
            _feed(model, replays[states.group], states, tools)
        # a batch has whole groups: what is kept of their states goes with it
        done = conclude([replays[number] for number in numbers], sampling.proof_values)
        found.update(zip(numbers, done, strict=True))
    return [found[number] for number in range(len(groups))]


def _feed(
    model: TransformerModel, replay: GroupReplay, states: States, tools: Instruments
) -> None:
    start = 0
    for completion, count in states.parts:
        replay.activations[completion].add(tools.view(states.rows[start : start + count]))
        start += count
    size = at_once(model.device) * slice_rows(model.shape.vocabulary)
    for start in range(0, len(states.rows), size):
        replay.add_logits(tools.view(model.logits(states.rows[start : start + size])))


def read_groups(
    model: TransformerModel, tasks: Sequence[GroupTask], groups: Sequence[Group]
) -> Iterator[Iterator[States]]:
    """Yield the states behind every completion token: batches of whole groups, with the states
    of each group in order."""
    asked = [
        (task.prompt, group.completions) for task, group in zip(tasks, groups, strict=True)
    ]
    short, long = list[int](), list[int]()
    for number, (prompt, completions) in enumerate(asked):
        length = len(prompt) + sum(len(one.text[0]) - 1 for one in completions)
        (short if length <= ROW_TOKENS else long).append(number)
    packed = pack(
        [asked[number] for number in short],
        batch_tokens=at_once(model.device) * BATCH_TOKENS,
        device=model.device,
    )
    for batch in packed:
        yield _read_packed(model, batch, short)
    for number in long:
        yield _read_long(model, number, *asked[number])


def _check_tokens(vocabulary: int, tasks: Sequence[GroupTask], groups: Sequence[Group]) -> None:
    texts = (one.text[0] for group in groups for one in group.completions)
    for tokens in chain((task.prompt for task in tasks), texts):
        if not 0 <= min(tokens) <= max(tokens) < vocabulary:
            raise EngineError(
                "a token is outside the vocabulary; shapes are checked before scoring"
            )


def _read_packed(
    model: TransformerModel, batch: PackedBatch, numbers: Sequence[int]
) -> Iterator[States]:
    """Read several groups in one pass, each as a row."""
    hidden, start = batch.hidden(model), 0
    for group, pieces in groupby(batch.pieces, key=lambda piece: piece.group):
        parts = tuple((piece.completion, piece.length) for piece in pieces)
        count = sum(length for _, length in parts)
        yield States(numbers[group], parts, hidden[start : start + count])
        start += count


def _read_long(
    model: TransformerModel, group: int, prompt: Tokens, completions: Sequence[Completion]
) -> Iterator[States]:
    """Read one group in several passes, with its prompt cached."""
    first = len(prompt)
    texts = [one.text for one in completions]
    packs = list(_packs([text for text, _ in texts]))
    longest = max(sum(len(texts[one][0]) - 1 for one in some) for some in packs)
    cache = model.new_cache(1, first + longest)
    (end,) = deque(_read_blocks(model, prompt, 0, cache), maxlen=1)
    last = end[-1:]
    for some in packs:
        cache.used = first
        if len(some) > 1:
            yield _read_beside(model, group, first, last, cache, texts, some)
            continue
        text, drawn = texts[some[0]]
        yield States(group, ((some[0], 1),), last)
        start = 0
        # nothing follows the last token, which is not read
        for rows in _read_blocks(model, text[:-1], first, cache):
            kept = _drawn(rows, text, drawn, start)
            start += len(rows)
            yield States(group, ((some[0], len(kept)),), kept)


def _drawn(rows: Tensor, text: Tokens, drawn: Sequence[int], start: int) -> Tensor:
    """Return the states behind drawn tokens among ``rows``, the states of ``text`` from
    ``start`` on."""
    if len(drawn) == len(text):
        return rows
    some = drawn[bisect(drawn, start) : bisect(drawn, start + len(rows))]
    return rows[[place - 1 - start for place in some]]


def _packs(completions: Sequence[Tokens]) -> Iterator[list[int]]:
    """Yield runs of completions that are read together: up to `BLOCK` tokens, or one
    completion."""
    some, length = list[int](), 0
    for number, tokens in enumerate(completions):
        if some and length + len(tokens) - 1 > BLOCK:
            yield some
            some, length = [], 0
        some.append(number)
        length += len(tokens) - 1
    yield some


def _read_blocks(
    model: TransformerModel, tokens: Tokens, start: int, cache: Cache
) -> Iterator[Tensor]:
    """Yield the states of tokens that follow those in the cache; their positions begin at
    ``start``."""
    for at in range(0, len(tokens), BLOCK):
        block = send_numbers([tokens[at : at + BLOCK]], model.device)
        length, used = block.shape[1], cache.used
        reach = start + at + length
        positions = torch.arange(start + at, reach, device=model.device)[None]
        mask = None
        if used:
            mask = _all_seen(length, used + length, model.device).tril_(used)[None, None]
        yield model(block, positions, mask, cache, reach=reach)[0]


def _all_seen(rows: int, columns: int, device: torch.device) -> Tensor:
    return torch.ones(rows, columns, dtype=torch.bool, device=device)


def _read_beside(
    model: TransformerModel, group: int, first: int, last: Tensor, cache: Cache,
    texts: Sequence[tuple[Tokens, Sequence[int]]], some: Sequence[int],
) -> States:  # fmt: skip
    """Read several completions in one pass, each of which sees the prompt and itself."""
    tokens, positions, owners = list[int](), list[int](), list[int]()
    for number in some:
        more = texts[number][0][:-1]
        tokens.extend(more)
        positions.extend(range(first, first + len(more)))
        owners.extend([number] * len(more))
    if not tokens:  # each is one token long, drawn from the prompt's last state
        return States(group, tuple((one, 1) for one in some), last.expand(len(some), -1))
    device = model.device
    mine = send_numbers(owners, device)
    beside = _all_seen(len(tokens), len(tokens), device).tril_()
    beside &= mine[:, None] == mine
    prompt = _all_seen(len(tokens), first, device)
    mask = torch.cat([prompt, beside], 1)[None, None]
    text, places = send_numbers([tokens], device), send_numbers([positions], device)
    hidden = model(text, places, mask, cache, reach=max(positions) + 1)[0]
    rows, at = list[Tensor](), 0
    for number in some:
        line, drawn = texts[number]
        rows += [last, _drawn(hidden[at : at + len(line) - 1], line, drawn, 0)]
        at += len(line) - 1
    return States(group, tuple((one, len(texts[one][1])) for one in some), torch.cat(rows))
