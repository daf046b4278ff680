"""Recording of requests: draws with proofs, or hidden states.

Theory of operation
-------------------
A slot is one completion; its request carries the slot's number. In a step vLLM computes a span
of a request's tokens: a prompt or a piece of it, or one token more. It may put a request back
when memory is short, and then computes its tokens again. So a token is drawn from a row only if
the row's position is the one behind the slot's next token; all others lead to no token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from proofs import toploc
from proofs.sampling import DrawRule, Words, draw_words
from roles.engines.base import Completion, EngineError, Sampling
from roles.engines.torch.instruments import instruments_for


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Tokens of one request that one step computed."""

    slot: int
    first: int
    """Position of the first of them."""
    count: int
    row: int
    """Index of the first of them among the rows of the step."""

    @property
    def last(self) -> int:
        """Position of the span's last token. The next token follows it."""
        return self.first + self.count - 1


@dataclass(slots=True)
class _Track:
    """A completion as drawn so far."""

    start: int
    """Position of the prompt's last token, after which the first token is drawn."""
    words: Words
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    pending: list[NDArray[np.float32]] = field(default_factory=list)
    """Rows that do not fill a chunk of the proof yet."""
    proof: bytearray = field(default_factory=bytearray)


class Drawing:
    """Seeded draws of completions that come and go, and their proofs. At most 32 rows of a
    completion wait for their proof, however long it is."""

    def __init__(self, sampling: Sampling, rule: DrawRule, *, proves: bool) -> None:
        self.sampling = sampling
        self._rule = rule
        self._proves = proves
        self._tracks: dict[int, _Track] = {}

    def add(self, slots: Sequence[int], starts: Sequence[int], seeds: Sequence[bytes]) -> None:
        """Begin completions: the first token of each stands behind its position ``start``."""
        words = draw_words(seeds, 0, self.sampling.max_new_tokens)
        for slot, start, mine in zip(slots, starts, words, strict=True):
            self._tracks[slot] = _Track(start, mine)

    def wanted(self, spans: Sequence[RowSpan]) -> list[int]:
        """Return the indices of the spans after which a token is drawn."""
        return [
            number
            for number, span in enumerate(spans)
            if span.last - self._tracks[span.slot].start == len(self._tracks[span.slot].tokens)
        ]

    def draw(
        self,
        slots: Sequence[int],
        hidden: Tensor,
        logits: Tensor,
    ) -> NDArray[np.intp]:
        """Draw the next token of each slot, in float32. Raises `ValueError` for logits that are
        no numbers."""
        tracks = [self._tracks[slot] for slot in slots]
        words = np.array([track.words[len(track.tokens)] for track in tracks])
        temperature = self.sampling.temperature
        tools = instruments_for(logits.device)
        drawn = tools.draw(logits, words, temperature, self._rule)
        states = hidden.cpu().numpy()
        for track, state, token, logprob in zip(
            tracks, states, drawn.tokens, drawn.logprobs, strict=True
        ):
            track.tokens.append(int(token))
            track.logprobs.append(float(logprob))
            track.pending.append(state)
        self._commit([one for one in tracks if len(one.pending) == toploc.ROWS_PER_CHUNK])
        return drawn.tokens

    def take(self, slots: Sequence[int]) -> list[Completion]:
        """Remove and return these completions, which have ended, in this order."""
        tracks = [self._tracks.pop(slot) for slot in slots]
        self._commit([track for track in tracks if track.pending])
        return [
            Completion(tuple(track.tokens), tuple(track.logprobs), bytes(track.proof))
            for track in tracks
        ]

    def _commit(self, tracks: Sequence[_Track]) -> None:
        """Make proofs of the pending rows, at most a chunk each."""
        if self._proves and tracks:
            proofs = toploc.commit(
                [np.stack(track.pending) for track in tracks], self.sampling.proof_values
            )
            for track, proof in zip(tracks, proofs, strict=True):
                track.proof += proof
        for track in tracks:
            track.pending.clear()


class Replaying:
    """The hidden states from which the tokens of given completions would be drawn."""

    def __init__(self, starts: Sequence[int], counts: Sequence[int], width: int) -> None:
        self._starts = starts
        self._states = [torch.empty(count, width) for count in counts]
        self._found = [0] * len(counts)

    def take(self, spans: Sequence[RowSpan], states: Tensor) -> None:
        """Keep the states of the given completions that this step computed."""
        for span in spans:
            start, found = self._starts[span.slot], self._found[span.slot]
            skipped = max(start + found - span.first, 0)
            rows = states[span.row + skipped : span.row + span.count]
            if len(rows):
                self._states[span.slot][found : found + len(rows)] = rows
                self._found[span.slot] = found + len(rows)

    def states(self) -> list[Tensor]:
        """Return the hidden states (tokens, width) by slot, in float32."""
        for slot, (found, states) in enumerate(zip(self._found, self._states, strict=True)):
            if found != len(states):
                raise EngineError(
                    f"vLLM computed {found} of the {len(states)} states of request {slot}"
                )
        return self._states
