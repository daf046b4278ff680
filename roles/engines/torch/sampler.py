"""Drawing completions from a policy, each token fixed by its completion's seed.

Theory of operation
-------------------
Every completion is a row of one batch. Rows of the same group share their prompt: it is read
once, and its keys and values are then repeated for each of them. All rows end at the same
column of the cache: a row with a shorter past begins further to the right, and attention does
not see what is to the left of it; rows that see about as many columns are attended to together.
So rows need not have begun together, nor have been asked for together: once a quarter of the
batch has ended, or could be filled by rows that wait, the rest is moved together, columns that
no row needs are dropped, and rows that wait are let in. How many rows there are follows from
the bytes that keys and values may have (`CACHE_BYTES`); the cache grows with the longest row,
so that short answers to a high limit cost what short answers cost.

A row whose turn has ended leaves the batch and keeps its place: its tokens, draw words and
unfinished chunk of the proof. When the environment has answered, it is let in again, before
rows that wait to begin, and prompt, drawn and inserted tokens are read together.

One step draws one token for every row, from float32 logits, a slice of rows at a time. The
hidden state from which a token was drawn (final-normed, the head's input) is kept until there
are 32 of its completion, one chunk of the activation proof, or the completion has ended.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from proofs import toploc
from proofs.sampling import DrawRule, draw_words
from roles.engines.base import Completion, EngineError, Group, GroupTask, Row, Sampling, Turn
from roles.engines.config import CACHE_BYTES, ROWS, cache_bytes
from roles.engines.torch.device import CPU, at_once, send, send_numbers
from roles.engines.torch.instruments import Instruments, instruments_for
from roles.engines.torch.model import CACHE_BLOCK, Cache, RowParts, TransformerModel, slice_rows

Keep: TypeAlias = Callable[[int, NDArray[np.float32]], None]
"""Function that takes the next hidden states of a completion, 32 of them or its last, (tokens,
width). Completions are numbered through all tasks."""

_COMPACT_BELOW: Final = 0.75
"""The batch is compacted when less than this share of its rows is unfinished. Measured with 256
answers of 6.6 tokens, CPU to that at 0.75: never 1.40, at 0.5 1.07, at 0.9 1.01, after every
row that ends 1.04: idle rows cost a pass, a compaction copies the cache."""

_PROMPT_TOKENS: Final = 4096
"""Prompt tokens read at once, pads included: products of matrices gain nothing from more, and
at a feed-forward width of 5,000 the activations of so many have some 200 MB."""
_MASK_VALUES: Final = 1 << 24
"""Most values in the mask of the tokens that are read at once, 4 bytes each: 64 MiB. Prompts of
4,096 tokens and more are read in parts because of it."""

_PART_VALUES: Final = 1 << 17
"""Least number of keys and values of a layer, 4 bytes each, that a part of the batch must save
to get a call of its own: half a megabyte, which takes about as long to read as a call. Measured
at the body of 135 M parameters in float32, 64 rows of which 8 see 500 columns, 16 see 300, 20
see 150 and 20 see 70: 0.21 CPU s a step in four parts, 0.29 in one; at 10 M parameters and 48
rows no difference."""

_PAD: Final = 0
"""Token to the left of a short prompt, which attention does not see."""

_WORDS: Final = 64
"""Draw words of a completion that are derived at a time. One position by itself costs six times
as much (`proofs.sampling.draw_words`); all words of a limit of 32,768 for 256 rows take 64
MiB."""

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
    """Return groups with proofs, in the order of the tasks."""
    return _draw_all(Sampler(model, end_tokens, rule, proves=True), tasks, sampling)


def draw(
    model: TransformerModel,
    tasks: Sequence[GroupTask],
    sampling: Sampling,
    end_tokens: frozenset[int],
    rule: DrawRule = DrawRule.CDF,
    keep: Keep | None = None,
) -> list[Group]:
    """Return groups without proofs, in the order of the tasks; ``keep`` gets the hidden
    states."""
    return _draw_all(Sampler(model, end_tokens, rule, keep), tasks, sampling)


def _draw_all(sampler: Sampler, tasks: Sequence[GroupTask], sampling: Sampling) -> list[Group]:
    order = {id(task): number for number, task in enumerate(tasks)}
    ended = list[tuple[GroupTask, Group]]()
    sampler.add(tasks, sampling)
    while sampler.has_work:
        sampler.step()
    ended = sampler.take_ended()
    return [group for _, group in sorted(ended, key=lambda one: order[id(one[0])])]


class _Prover:
    """Commits chunks of hidden states while their completions go on."""

    def __init__(self, instruments: Instruments) -> None:
        self._instruments = instruments
        self._proof_values = 0
        self._proofs: defaultdict[int, bytearray] = defaultdict(bytearray)
        self._waiting: list[tuple[int, Tensor]] = []
        self._values = 0

    def begin(self, proof_values: int) -> None:
        """Start anew, with ``proof_values`` values of each chunk in the proofs."""
        self._proof_values = proof_values

    def add(self, completion: int, rows: Tensor) -> None:
        """Add one chunk. The chunks of a completion come in order."""
        self._waiting.append((completion, rows))
        self._values += rows.numel()
        if self._values >= _PROOF_VALUES:
            self.commit()

    def take(self, completion: int) -> bytes:
        """Return the proof of a completion that has ended and whose chunks are committed."""
        return bytes(self._proofs.pop(completion, b""))

    def commit(self) -> None:
        """Make proofs of the waiting chunks."""
        chunks = [rows for _, rows in self._waiting]
        proofs = self._instruments.commit(chunks, self._proof_values)
        for (completion, _), proof in zip(self._waiting, proofs, strict=True):
            self._proofs[completion] += proof
        self._waiting.clear()
        self._values = 0


@dataclass(slots=True)
class _OpenGroup:
    """A task with completions that have not ended."""

    task: GroupTask
    first: int
    """Number of the task's first completion."""
    completions: list[Completion | None]
    missing: int


class Sampler:
    """Draws completions of groups that come and go, under one policy.

    Arrays with a leading underscore and no other note have one element for each row of the
    batch.
    """

    def __init__(
        self,
        model: TransformerModel,
        end_tokens: frozenset[int],
        rule: DrawRule,
        keep: Keep | None = None,
        *,
        proves: bool = False,
        instruments: Instruments | None = None,
    ) -> None:
        self._model, self._rule, self._keep = model, rule, keep
        self._device = model.device
        self._instruments = instruments or instruments_for(self._device)
        self._prover = _Prover(self._instruments) if proves else None
        self._is_end = np.zeros(model.shape.vocabulary, dtype=np.bool_)
        self._is_end[[end for end in end_tokens if end < model.shape.vocabulary]] = True
        self._slice = at_once(self._device) * slice_rows(model.shape.vocabulary)
        self._row_values = 2 * model.shape.key_heads * model.shape.head_width
        self._sampling: Sampling | None = None
        self._numbers = itertools.count()
        self._open: dict[int, tuple[_OpenGroup, int]] = {}  # by completion, with its slot
        self._waiting = deque[int]()  # completions that have not begun
        self._paused: dict[int, tuple[int, int]] = {}
        """Maps completions that wait for the environment to their place and length."""
        self._resumed: dict[int, tuple[int, int]] = {}
        """Maps completions that the environment has answered, until they are let in, to place
        and length."""
        self._turns: defaultdict[int, list[Turn]] = defaultdict(list)
        self._ended = list[_OpenGroup]()
        self._lay_out(0, 0)

    def _lay_out(self, places: int, limit: int) -> None:
        """Start with an empty batch."""
        # One of each for every place in the batch; a row keeps its place while it lives. What
        # no row has touched takes no memory.
        self._tokens = np.empty((places, limit), dtype=np.int32)
        self._logprobs = np.empty((places, limit), dtype=np.float32)
        self._words = np.empty((places, min(limit, _WORDS)), dtype=np.uint64)
        width, self._chunk = self._model.shape.width, min(limit, toploc.ROWS_PER_CHUNK)
        # of each place the states of its chunk, one place behind the other
        self._hidden = torch.empty(
            places * self._chunk, width, dtype=torch.float32, device=self._device
        )
        self._free = list(reversed(range(places)))

        self._place = np.empty(0, dtype=np.intp)
        self._completion = np.empty(0, dtype=np.intp)
        self._length = np.empty(0, dtype=np.intp)  # tokens drawn
        self._pads = np.empty(0, dtype=np.intp)  # columns of the cache before its first
        self._is_live = np.empty(0, dtype=np.bool_)
        self._cache = self._model.new_cache(0, 0)
        self._last = self._no_states()
        """Hidden states from which the next tokens are drawn."""

    def _no_states(self) -> Tensor:
        return torch.empty(0, self._model.shape.width, device=self._device)

    @property
    def has_work(self) -> bool:
        """True if a completion is under way."""
        return bool(self._open)

    @property
    def can_step(self) -> bool:
        """True if a token can be drawn before the environment answers: completions that wait
        for it keep their places, and others wait for these."""
        return bool(len(self._last) or self._resumed or (self._waiting and self._free))

    def paused(self) -> list[Row]:
        """Return the completions that wait for the environment, with what they have drawn."""
        return [
            Row(group.task.group, slot, tuple(self._tokens[place, :length].tolist()))
            for number, (place, length) in self._paused.items()
            for group, slot in [self._open[number]]
        ]

    def hear(self, answers: Sequence[Row]) -> None:
        """Continue paused completions with the environment's answers, and end those whose
        answer is empty."""
        numbers = {
            (group.task.group, slot): number
            for number in self._paused
            for group, slot in [self._open[number]]
        }
        assert self._sampling is not None
        for row in answers:
            number = numbers.get((row.group, row.slot))
            if number is None:
                raise EngineError(f"group {row.group} has no completion {row.slot} that waits")
            place, length = self._paused.pop(number)
            if not row.tokens:
                self._finish(number, place, length)
                continue
            turns = self._turns[number]
            turns.append(Turn(length, row.tokens))
            if sum(len(turn.inserted) for turn in turns) > self._sampling.heard:
                raise EngineError(f"a completion hears over {self._sampling.heard} tokens")
            self._resumed[number] = place, length

    @property
    def has_room(self) -> bool:
        """True if more completions than are under way could be decoded at once."""
        return not self._open or len(self._open) < self._places()

    def under_way(self) -> dict[int, tuple[int, ...]]:
        """Return the tokens of the completions that go on, by their numbers in order of
        `add`."""
        rows = zip(self._completion.tolist(), self._place, self._length, strict=True)
        return {
            completion: tuple(self._tokens[place, :length].tolist())
            for completion, place, length in rows
            if completion in self._open
        }

    def numbers(self) -> set[int]:
        """Return the numbers of the groups that are under way or have not been taken."""
        open_groups = (group for group, _ in self._open.values())
        return {group.task.group for group in itertools.chain(open_groups, self._ended)}

    def add(self, tasks: Sequence[GroupTask], sampling: Sampling) -> None:
        """Begin these tasks after those under way, which must be sampled alike."""
        if not self._open and sampling != self._sampling:
            self._sampling, limit = sampling, sampling.max_new_tokens
            self._lay_out(self._most_rows(1 + limit), limit)
            if self._prover is not None:
                self._prover.begin(sampling.proof_values)
        if sampling != self._sampling:
            raise EngineError(
                f"groups that are sampled by {self._sampling} are under way: none by {sampling}"
                " can be drawn beside them"
            )
        for task in tasks:
            count = len(task.seeds)
            first = next(self._numbers)
            group = _OpenGroup(task, first, [None] * count, count)
            for slot in range(count):
                number = first if not slot else next(self._numbers)
                self._open[number] = group, slot
                self._waiting.append(number)

    def take_ended(self) -> list[tuple[GroupTask, Group]]:
        """Return the groups that have ended since the last call, in the order in which they
        ended."""
        if self._prover is not None and self._ended:
            self._prover.commit()
        ended = [(group.task, self._whole(group)) for group in self._ended]
        self._ended.clear()
        return ended

    def _whole(self, group: _OpenGroup) -> Group:
        completions = [one for one in group.completions if one is not None]
        if self._prover is not None:
            completions = [
                replace(one, proof=self._prover.take(number))
                for number, one in enumerate(completions, group.first)
            ]
        return Group(group.task.group, tuple(completions))

    @torch.inference_mode()
    def step(self) -> None:
        """Draw the next token of every row, and let others in where rows have ended."""
        if not len(self._last):
            self._last = self._let_in()
        if not len(self._last):
            return  # all that there is waits for an answer
        chosen = self._draw_step(self._last)
        live = np.flatnonzero(self._is_live)
        if self._goes_on(len(live)):
            self._last = self._advance(chosen)
            return
        self._compact(live)
        self._last = self._advance(chosen[live]) if len(live) else self._last[:0]
        if self._waiting or self._resumed:
            self._last = torch.cat([self._last, self._let_in()])

    def _goes_on(self, live: int) -> bool:
        """Return True if the batch may stay as it is: the cache has room, and enough of the
        present or possible rows are live."""
        if self._cache.used == self._cache.capacity:
            return False
        more = len(self._resumed) + min(len(self._waiting), len(self._free))
        could = live + min(more, max(0, self._places() - live))
        return live > _COMPACT_BELOW * max(len(self._is_live), could)

    def _places(self) -> int:
        """Return the number of rows that the batch may have: at least one, whatever memory it
        takes."""
        return self._most_rows(self._reach())

    def _reach(self) -> int:
        """Return the number of columns that the longest row under way may reach."""
        assert self._sampling is not None
        longest = max((len(group.task.prompt) for group, _ in self._open.values()), default=0)
        return longest + self._sampling.max_new_tokens + self._sampling.heard

    def _most_rows(self, columns: int) -> int:
        row = columns * cache_bytes(self._model.shape, self._model.dtype.itemsize)
        return min(at_once(self._device) * ROWS, max(1, CACHE_BYTES // row))

    def _let_in(self) -> Tensor:
        """Read the prompts of as many waiting rows as there are places. Return the state behind
        the last token of each.
        """
        room = max(0, self._places() - int(self._is_live.sum()))
        resumed = list(itertools.islice(self._resumed.items(), room))
        count = min(room - len(resumed), len(self._waiting), len(self._free))
        if not resumed and not count:
            return self._no_states()
        begun = [(self._waiting.popleft(), (self._free.pop(), 0)) for _ in range(count)]
        completions = np.array([number for number, _ in (*resumed, *begun)], dtype=np.intp)
        places, lengths = np.array([at for _, at in (*resumed, *begun)], dtype=np.intp).T
        # rows that begin share the prompt of their group; the others have a text of their own
        texts, numbers = list[Sequence[int]](), list[int]()
        known: dict[tuple[int, bool], int] = {}
        for number, (place, length) in (*resumed, *begun):
            group = self._open[number][0]
            key = (number, True) if length else (group.first, False)
            if key not in known:
                drawn = tuple(self._tokens[place, :length].tolist())
                turns = tuple(self._turns.get(number, ()))
                texts.append((*group.task.prompt, *Completion(drawn, turns=turns).text[0]))
            numbers.append(known.setdefault(key, len(known)))
        for number, _ in resumed:
            del self._resumed[number]
        group_of = send_numbers(numbers, self._device)
        last, read = self._read_prompts(texts)

        due = lengths % _WORDS == 0
        self._derive_due(places[due], completions[due], lengths[due])
        used = max(self._cache.used, read.used)
        pads = used - np.array([len(texts[index]) for index in numbers])
        self._pads = np.concatenate([self._pads + (used - self._cache.used), pads])
        self._place = np.concatenate([self._place, places])
        self._completion = np.concatenate([self._completion, completions])
        self._length = np.concatenate([self._length, lengths])
        self._is_live = np.concatenate([self._is_live, np.ones(len(places), dtype=np.bool_)])
        parts = [(self._cache, None), (read, group_of)]
        self._cache.rearrange(parts, used, self._capacity(used))
        return last[group_of]

    def _read_prompts(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Cache]:
        """Return the state behind each first token, and a cache of the prompts. A pad sees
        itself, since softmax needs at least one position."""
        width = max(len(prompt) for prompt in prompts)
        pads = send_numbers([width - len(prompt) for prompt in prompts], self._device)
        tokens = send_numbers(
            [[_PAD] * (width - len(prompt)) + list(prompt) for prompt in prompts], self._device
        )
        cache = self._model.new_cache(len(prompts), width)
        columns = torch.arange(width, device=self._device)
        step = max(1, min(_PROMPT_TOKENS, _MASK_VALUES // width) // len(prompts))
        hidden = self._no_states()
        for start in range(0, width, step):
            mine, theirs = columns[start : start + step], columns[: start + step]
            positions = (mine - pads[:, None]).clamp(min=0)
            is_own = theirs == mine[:, None]
            seen = (theirs <= mine[:, None]) & ((theirs >= pads[:, None, None]) | is_own)
            part = tokens[:, start : start + step]
            hidden = self._model(part, positions, seen[:, None], cache, reach=width)
        return hidden[:, -1], cache

    def _capacity(self, used: int) -> int:
        """Return the capacity of a cache with ``used`` columns: enough that it grows seldom,
        and none that no row can reach."""
        assert self._sampling is not None
        longest = self._sampling.max_new_tokens - int(self._length.min())
        growth = min(used // 2, self._reach() - used)
        return used + min(longest, max(CACHE_BLOCK, growth))

    def _compact(self, live: NDArray[np.intp]) -> None:
        """Keep only these rows, drop the columns that no row needs, and make room for more."""
        self._place, self._completion = self._place[live], self._completion[live]
        self._length, self._is_live = self._length[live], self._is_live[live]
        self._pads = self._pads[live]
        if len(live):
            unneeded = int(self._pads.min())
            self._pads -= unneeded
            used = self._cache.used - unneeded
            self._cache.rearrange(
                [(self._cache, send(live, self._device))], used, self._capacity(used)
            )
        else:
            self._cache = self._model.new_cache(0, 0)

    def _advance(self, chosen: NDArray[np.intp]) -> Tensor:
        """Read the last token of every row; return the state behind the next."""
        pads = send(self._pads, self._device)[:, None]
        used, row, parts = self._cache.used, 0, []
        columns = torch.arange(used + 1, device=self._device)
        for count, first in self._parts():
            seen = columns[first:] >= pads[row : row + count]
            parts.append((count, first, seen[:, None, None]))
            row += count
        hidden: Tensor = self._model(
            send(chosen, self._device)[:, None],
            used - pads,
            RowParts(parts),
            self._cache,
            reach=used + 1,
        )
        return hidden[:, 0]

    def _parts(self) -> list[tuple[int, int]]:
        """Return the row parts of the batch, each with the first column that one of its rows
        sees. Rows stand in the order in which they were let in, the oldest first, so later rows
        see fewer columns."""
        parts, rows = list[tuple[int, int]](), len(self._pads)
        # of each row, the first column that it or a row behind it sees
        firsts = np.minimum.accumulate(self._pads[::-1])[::-1].tolist()
        begin = 0
        for row in range(1, rows):
            if (rows - row) * (firsts[row] - firsts[begin]) * self._row_values > _PART_VALUES:
                parts.append((row - begin, firsts[begin]))
                begin = row
        return [*parts, (rows - begin, firsts[begin])]

    def _draw_step(self, last: Tensor) -> NDArray[np.intp]:
        """Draw a token for every live row and record it. Other rows get an arbitrary token."""
        live = np.flatnonzero(self._is_live)
        states = last if len(live) == len(last) else last[send(live, self._device)]
        place, length = self._place[live], self._length[live]
        words = self._words[place, length % _WORDS]
        assert self._sampling is not None
        temperature = self._sampling.temperature
        tokens = np.empty(len(live), dtype=np.intp)
        for start in range(0, len(live), self._slice):
            part = slice(start, start + self._slice)
            logits = self._model.logits(states[part])
            drawn = self._instruments.draw(logits, words[part], temperature, self._rule)
            tokens[part] = drawn.tokens
            self._logprobs[place[part], length[part]] = drawn.logprobs
        self._record(live, tokens, states)
        if len(live) == len(last):
            return tokens
        chosen = np.zeros(len(last), dtype=np.intp)
        chosen[live] = tokens
        return chosen

    def _record(self, live: NDArray[np.intp], tokens: NDArray[np.intp], states: Tensor) -> None:
        """Keep the next token of each live row, and the state that it was drawn from."""
        place, length = self._place[live], self._length[live]
        self._tokens[place, length] = tokens
        rows = send(place * self._chunk + length % toploc.ROWS_PER_CHUNK, self._device)
        self._hidden.index_copy_(0, rows, states)
        self._note_drawn(live, tokens)

    def _note_drawn(self, live: NDArray[np.intp], tokens: NDArray[np.intp]) -> None:
        """Hand on whole chunks, finish completions that have ended, and derive more words."""
        assert self._sampling is not None
        self._length[live] += 1
        length = self._length[live]
        is_whole = length == self._sampling.max_new_tokens
        turn_ends = self._is_end[tokens] & ~is_whole
        most, has_ended = self._sampling.turns, turn_ends | is_whole
        pauses = np.zeros_like(has_ended)
        if most > 1:
            for index in np.flatnonzero(turn_ends).tolist():
                pauses[index] = len(self._turns[int(self._completion[live[index]])]) + 1 < most
        self._is_live[live] = ~has_ended
        has_ended &= ~pauses
        rest = length % toploc.ROWS_PER_CHUNK
        for index in np.flatnonzero(has_ended | (rest == 0)).tolist():
            row = live[index]
            count = int(rest[index]) or toploc.ROWS_PER_CHUNK
            self._hand_on(int(self._completion[row]), int(self._place[row]), count)
        for row in live[has_ended].tolist():
            self._end(*(int(of[row]) for of in (self._completion, self._place, self._length)))
        for row in live[pauses].tolist():
            at = int(self._place[row]), int(self._length[row])
            self._paused[int(self._completion[row])] = at
        due = live[~has_ended & ~pauses & (length % _WORDS == 0)]
        self._derive_due(self._place[due], self._completion[due], self._length[due])

    def _hand_on(self, completion: int, place: int, count: int) -> None:
        """Pass on a chunk of ``count`` states."""
        rows = self._hidden[place * self._chunk :][:count]
        if self._prover is not None:
            self._prover.add(completion, rows.clone())
        if self._keep is not None:
            self._keep(completion, rows.to(CPU, copy=True).numpy())

    def _finish(self, completion: int, place: int, count: int) -> None:
        """End a completion that waited, and pass on its last chunk."""
        if rest := count % toploc.ROWS_PER_CHUNK:
            self._hand_on(completion, place, rest)
        self._end(completion, place, count)

    def _end(self, completion: int, place: int, count: int) -> None:
        """Store a completion that has ended and whose chunks were passed on."""
        self._free.append(place)
        group, slot = self._open.pop(completion)
        group.completions[slot] = Completion(
            tuple(self._tokens[place, :count].tolist()),
            tuple(self._logprobs[place, :count].tolist()),
            turns=tuple(self._turns.pop(completion, ())),
        )
        group.missing -= 1
        if not group.missing:
            self._ended.append(group)

    def _derive_due(
        self,
        places: NDArray[np.intp],
        completions: NDArray[np.intp],
        lengths: NDArray[np.intp],
    ) -> None:
        """Derive the next words of rows that have used up theirs."""
        for start in np.unique(lengths).tolist():
            is_there = lengths == start
            self._derive_words(places[is_there], completions[is_there], start)

    def _derive_words(
        self, places: NDArray[np.intp], completions: NDArray[np.intp], start: int
    ) -> None:
        """Derive the words of the next positions, from ``start`` on."""
        at = [self._open[completion] for completion in completions.tolist()]
        seeds = [group.task.seeds[slot] for group, slot in at]
        self._words[places] = draw_words(seeds, start, self._words.shape[1])
