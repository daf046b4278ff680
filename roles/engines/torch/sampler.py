"""Drawing completions from a policy, each token fixed by its completion's seed.

Theory of operation
-------------------
Every completion is a row of one batch. Rows of the same group share their prompt: it is read
once, and its keys and values are then repeated for each of them. All rows end at the same
column of the cache: a row with a shorter past begins further to the right, and attention does
not see what is to the left of it. So rows need not have begun together: once a quarter of the
batch has ended, the rest is moved together, columns that no row needs are dropped, and rows
that wait are let in. How many rows there are follows from the bytes that keys and values may
have (`CACHE_BYTES`); the cache grows with the longest row, so that short answers to a high
limit cost what short answers cost.

One step draws one token for every row, from float32 logits, a slice of rows at a time. The
hidden state from which a token was drawn (final-normed, the head's input) is kept until there
are 32 of its completion, one chunk of the activation proof, or the completion has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from proofs import draws, toploc
from proofs.sampling import DrawRule, draw_words
from roles.engines.base import Completion, Group, GroupTask, Sampling
from roles.engines.config import CACHE_BYTES, ROWS, cache_bytes
from roles.engines.torch.model import CACHE_BLOCK, Cache, TransformerModel, slice_rows

Keep: TypeAlias = Callable[[int, NDArray[np.float32]], None]
"""Takes the next hidden states of a completion, 32 of them or its last, (tokens, width);
completions are numbered through all tasks."""

_COMPACT_BELOW: Final = 0.75
"""The batch is compacted when less than this share of its rows is unfinished. Measured with 256
answers of 6.6 tokens, CPU to that at 0.75: never 1.40, at 0.5 1.07, at 0.9 1.01, after every
row that ends 1.04: idle rows cost a pass, a compaction copies the cache."""

_PROMPT_TOKENS: Final = 4096
"""Prompt tokens read at once, pads included: products of matrices gain nothing from more, and
at a feed-forward width of 5,000 the activations of so many have some 200 MB."""
_MASK_VALUES: Final = 1 << 24
"""Values of the mask of what is read at once, 4 bytes each: 64 MiB. Binds from prompts of 4,096
tokens on, which are read a part at a time."""

_PAD: Final = 0
"""The token to the left of a short prompt: attention does not see it."""

_WORDS: Final = 64
"""Draw words of a completion derived at a time: one position by itself costs six times as
much (`proofs.sampling.draw_words`), those of a limit of 32,768 for 256 rows take 64 MiB."""

_PROOF_VALUES: Final = 4 << 20
"""Hidden values that wait for their proofs, 4 bytes each: 16 MiB. Chunks of 32 tokens are
committed together, which is four to ten times cheaper than one by one: these are 2,048 chunks
at the demo's width of 64 and 25 at 5,120."""


def generate(
    model: TransformerModel,
    tasks: Sequence[GroupTask],
    sampling: Sampling,
    end_tokens: frozenset[int],
    rule: DrawRule = DrawRule.CDF,
) -> list[Group]:
    """Groups with proofs, in the order of the tasks."""
    prover = _Prover(sum(len(task.seeds) for task in tasks), sampling.proof_values)
    groups = draw(model, tasks, sampling, end_tokens, rule, prover.add)
    proofs = iter(prover.proofs())
    return [
        replace(
            group,
            completions=tuple(replace(one, proof=next(proofs)) for one in group.completions),
        )
        for group in groups
    ]


@torch.inference_mode()
def draw(
    model: TransformerModel,
    tasks: Sequence[GroupTask],
    sampling: Sampling,
    end_tokens: frozenset[int],
    rule: DrawRule = DrawRule.CDF,
    keep: Keep | None = None,
) -> list[Group]:
    """Groups without proofs, in the order of the tasks; ``keep`` gets the hidden states."""
    decoding = _Decoding(model, tasks, sampling, end_tokens, rule, keep)
    completions = iter(decoding.completions())
    return [Group(task.group, tuple(next(completions) for _ in task.seeds)) for task in tasks]


class _Prover:
    """Commits chunks of hidden states while their completions go on."""

    def __init__(self, completions: int, proof_values: int) -> None:
        self._proof_values = proof_values
        self._proofs = [bytearray() for _ in range(completions)]
        self._waiting: list[tuple[int, NDArray[np.float32]]] = []
        self._values = 0

    def add(self, completion: int, rows: NDArray[np.float32]) -> None:
        """One chunk; those of one completion in order."""
        self._waiting.append((completion, rows))
        self._values += rows.size
        if self._values >= _PROOF_VALUES:
            self._commit()

    def proofs(self) -> list[bytes]:
        """Of every completion, all its chunks."""
        self._commit()
        return [bytes(proof) for proof in self._proofs]

    def _commit(self) -> None:
        proofs = toploc.commit([rows for _, rows in self._waiting], self._proof_values)
        for (completion, _), proof in zip(self._waiting, proofs, strict=True):
            self._proofs[completion] += proof
        self._waiting.clear()
        self._values = 0


class _Decoding:
    """All completions of some tasks. Arrays with a leading underscore and no other note have
    one element for each row of the batch.
    """

    def __init__(
        self,
        model: TransformerModel,
        tasks: Sequence[GroupTask],
        sampling: Sampling,
        end_tokens: frozenset[int],
        rule: DrawRule,
        keep: Keep | None,
    ) -> None:
        self._model, self._tasks, self._sampling, self._rule = model, tasks, sampling, rule
        self._keep = keep
        self._seeds = [seed for task in tasks for seed in task.seeds]
        self._waiting = deque(
            (number, completion)
            for completion, number in enumerate(
                number for number, task in enumerate(tasks) for _ in task.seeds
            )
        )
        self._done: list[Completion | None] = [None] * len(self._seeds)
        self._is_end = np.zeros(model.shape.vocabulary, dtype=np.bool_)
        self._is_end[[end for end in end_tokens if end < model.shape.vocabulary]] = True
        self._slice = slice_rows(model.shape.vocabulary)

        # One of each for every place in the batch; a row keeps its place while it lives.
        limit, places = sampling.max_new_tokens, self._places()
        self._tokens = np.empty((places, limit), dtype=np.int32)
        self._logprobs = np.empty((places, limit), dtype=np.float32)
        self._words = np.empty((places, min(limit, _WORDS)), dtype=np.uint64)
        states = (places, min(limit, toploc.ROWS_PER_CHUNK), model.shape.width)
        self._hidden = np.empty(states, dtype=np.float32)
        self._free = list(reversed(range(places)))

        self._place = np.empty(0, dtype=np.intp)
        self._completion = np.empty(0, dtype=np.intp)
        self._length = np.empty(0, dtype=np.intp)  # tokens drawn
        self._pads = np.empty(0, dtype=np.intp)  # columns of the cache before its first
        self._is_live = np.empty(0, dtype=np.bool_)
        self._cache = model.new_cache(0, 0)

    def _places(self) -> int:
        """Rows that the batch may have: at least one, whatever it takes."""
        longest = max((len(task.prompt) for task in self._tasks), default=0)
        row = (longest + self._sampling.max_new_tokens) * cache_bytes(
            self._model.shape, self._model.dtype.itemsize
        )
        return min(len(self._seeds), ROWS, max(1, CACHE_BYTES // row))

    def completions(self) -> list[Completion]:
        """Decode until every row has ended."""
        last = self._let_in()
        while len(last):
            chosen = self._draw_step(last)
            live = np.flatnonzero(self._is_live)
            is_full = self._cache.used == self._cache.capacity
            if not is_full and len(live) > _COMPACT_BELOW * len(self._is_live):
                last = self._advance(chosen)
                continue
            self._compact(live)
            last = self._advance(chosen[live]) if len(live) else last[:0]
            if self._waiting and self._free:
                last = torch.cat([last, self._let_in()])
        return [one for one in self._done if one is not None]

    def _let_in(self) -> Tensor:
        """Read the prompts of as many waiting rows as there are places; return the state behind
        the first token of each.
        """
        count = min(len(self._free), len(self._waiting))
        rows = [self._waiting.popleft() for _ in range(count)]
        if not rows:
            return torch.empty(0, self._model.shape.width)
        numbers = list(dict.fromkeys(number for number, _ in rows))
        at = {number: index for index, number in enumerate(numbers)}
        group = torch.tensor([at[number] for number, _ in rows])
        prompts = [self._tasks[number].prompt for number in numbers]
        last, read = self._read_prompts(prompts)

        places = np.array([self._free.pop() for _ in rows])
        completions = np.array([completion for _, completion in rows])
        self._derive_words(places, completions, 0)
        used = max(self._cache.used, read.used)
        pads = used - np.array([len(prompts[index]) for index in group])
        self._pads = np.concatenate([self._pads + (used - self._cache.used), pads])
        self._place = np.concatenate([self._place, places])
        self._completion = np.concatenate([self._completion, completions])
        self._length = np.concatenate([self._length, np.zeros_like(places)])
        self._is_live = np.concatenate([self._is_live, np.ones(count, dtype=np.bool_)])
        self._cache.rearrange([(self._cache, None), (read, group)], used, self._capacity(used))
        return last[group]

    def _read_prompts(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Cache]:
        """The state behind each first token, and a cache of the prompts. A pad sees itself, for
        softmax must see something.
        """
        width = max(len(prompt) for prompt in prompts)
        pads = torch.tensor([width - len(prompt) for prompt in prompts])
        tokens = torch.tensor(
            [[_PAD] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        )
        cache = self._model.new_cache(len(prompts), width)
        columns = torch.arange(width)
        step = max(1, min(_PROMPT_TOKENS, _MASK_VALUES // width) // len(prompts))
        hidden = torch.empty(0)
        for start in range(0, width, step):
            mine, theirs = columns[start : start + step], columns[: start + step]
            positions = (mine - pads[:, None]).clamp(min=0)
            is_own = theirs == mine[:, None]
            seen = (theirs <= mine[:, None]) & ((theirs >= pads[:, None, None]) | is_own)
            hidden = self._model(
                tokens[:, start : start + step], positions, seen[:, None], cache
            )
        return hidden[:, -1], cache

    def _capacity(self, used: int) -> int:
        """Columns of a cache of which ``used`` are taken: so many more that it need not grow
        often, and none that no row can reach.
        """
        longest = self._sampling.max_new_tokens - int(self._length.min())
        return used + min(longest, max(CACHE_BLOCK, used // 2))

    def _compact(self, live: NDArray[np.intp]) -> None:
        """Go on with these rows, without the columns that none of them needs, and with room for
        more.
        """
        self._place, self._completion = self._place[live], self._completion[live]
        self._length, self._is_live = self._length[live], self._is_live[live]
        self._pads = self._pads[live]
        if len(live):
            unneeded = int(self._pads.min())
            self._pads -= unneeded
            used = self._cache.used - unneeded
            self._cache.rearrange(
                [(self._cache, torch.from_numpy(live))], used, self._capacity(used)
            )
        else:
            self._cache = self._model.new_cache(0, 0)

    def _advance(self, chosen: NDArray[np.intp]) -> Tensor:
        """Read the last token of every row; return the state behind the next."""
        pads = torch.from_numpy(self._pads)[:, None]
        visible = torch.arange(self._cache.used + 1) >= pads
        hidden: Tensor = self._model(
            torch.from_numpy(chosen)[:, None],
            self._cache.used - pads,
            visible[:, None, None],
            self._cache,
        )
        return hidden[:, 0]

    def _draw_step(self, last: Tensor) -> NDArray[np.intp]:
        """Draw a token for every live row, and record it; the others get any token."""
        live = np.flatnonzero(self._is_live)
        states = last if len(live) == len(last) else last[torch.from_numpy(live)]
        place, length = self._place[live], self._length[live]
        words = self._words[place, length % _WORDS]
        temperature = self._sampling.temperature
        tokens = np.empty(len(live), dtype=np.intp)
        for start in range(0, len(live), self._slice):
            part = slice(start, start + self._slice)
            logits = self._model.logits(states[part])
            drawn = draws.draw(logits.numpy(), words[part], temperature, self._rule)
            tokens[part] = drawn.tokens
            self._logprobs[place[part], length[part]] = drawn.logprobs
        self._tokens[place, length] = tokens
        self._hidden[place, length % toploc.ROWS_PER_CHUNK] = states.numpy()
        self._note_drawn(live, tokens)
        if len(live) == len(last):
            return tokens
        chosen = np.zeros(len(last), dtype=np.intp)
        chosen[live] = tokens
        return chosen

    def _note_drawn(self, live: NDArray[np.intp], tokens: NDArray[np.intp]) -> None:
        """Hand on whole chunks, finish what has ended, derive more words."""
        self._length[live] += 1
        length = self._length[live]
        has_ended = self._is_end[tokens] | (length == self._sampling.max_new_tokens)
        self._is_live[live] = ~has_ended
        rest = length % toploc.ROWS_PER_CHUNK
        if self._keep is not None:
            for index in np.flatnonzero(has_ended | (rest == 0)).tolist():
                row = live[index]
                count = int(rest[index]) or toploc.ROWS_PER_CHUNK
                rows = self._hidden[self._place[row], :count].copy()
                self._keep(int(self._completion[row]), rows)
        for row in live[has_ended].tolist():
            place, count = int(self._place[row]), int(self._length[row])
            self._done[self._completion[row]] = Completion(
                tuple(self._tokens[place, :count].tolist()),
                tuple(self._logprobs[place, :count].tolist()),
            )
            self._free.append(place)
        due = live[~has_ended & (length % _WORDS == 0)]
        for start in np.unique(self._length[due]).tolist():
            rows = due[self._length[due] == start]
            self._derive_words(self._place[rows], self._completion[rows], start)

    def _derive_words(
        self, places: NDArray[np.intp], completions: NDArray[np.intp], start: int
    ) -> None:
        """Those of the next positions, from ``start`` on."""
        seeds = [self._seeds[completion] for completion in completions]
        self._words[places] = draw_words(seeds, start, self._words.shape[1])
