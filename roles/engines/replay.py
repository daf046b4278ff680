"""Statistics of one group that a scorer collects while it reads the group block by block, for
any engine.

An engine with tensors of its own has hidden states and logits at hand only a slice at a time:
all logits of a group of 16 answers of 32,768 tokens would have 300 GiB at a vocabulary of
152,000. `GroupReplay` takes slices of any size and keeps what the evidence needs: of hidden
states the largest values, of logits sums, and two bytes of log-prob per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, islice
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from proofs import toploc
from proofs.checks import Evidence
from proofs.draws import DrawStatistics, Replay, replay
from proofs.sampling import DrawRule, draw_words
from roles.engines.base import EngineError, Group, GroupTask, Sampling, Scored

LOWEST_FLOAT16: Final = -65504.0
"""Least log-prob that is carried; lower ones are raised to it. No honest token comes near
it."""


class GroupReplay:
    """Statistics of one group with known tokens and seeds, fed while the group is read."""

    def __init__(
        self,
        task: GroupTask,
        group: Group,
        sampling: Sampling,
        end_tokens: frozenset[int],
        rule: DrawRule = DrawRule.CDF,
        *,
        replay: Callable[..., Replay] = replay,
        top_values: Callable[[int], toploc.TopValues] = toploc.TopValues,
    ) -> None:
        self._replay, self._rule, self._temperature = replay, rule, sampling.temperature
        self._completions = [one.tokens for one in group.completions]
        self._lengths = [len(one.tokens) for one in group.completions]
        self._proofs = [one.proof for one in group.completions]
        # Engines index embeddings by them: what is no token was refused before.
        try:
            self._tokens = np.array(
                [token for one in group.completions for token in one.tokens], dtype=np.uint32
            )
        except OverflowError as error:
            raise EngineError(
                "a token is outside the vocabulary; shapes are checked before scoring"
            ) from error
        self._words = np.concatenate(
            [
                draw_words([seed], 0, length)[0]
                for seed, length in zip(task.seeds, self._lengths, strict=True)
            ]
        )
        last = np.cumsum(self._lengths) - 1
        ends = np.isin(self._tokens, list(end_tokens))
        ends[last[np.array(self._lengths) == sampling.max_new_tokens]] = False
        self._ended = np.flatnonzero(ends)
        self._draws = DrawStatistics(sampling.temperature, rule)
        self._logprobs = np.empty(len(self._tokens))
        self.activations = [top_values(sampling.proof_values) for _ in group.completions]
        """Collectors of the largest values, one for each completion. Each takes the hidden
        states behind the completion's tokens (the head's input), in order."""

    def add_logits(self, logits: Any) -> None:
        """Add the next rows of logits, in float32: those behind the tokens of all completions,
        one completion after the other. ``logits`` is an array, or what ``replay`` takes."""
        at = slice(self._draws.tokens, self._draws.tokens + len(logits))
        seen = self._replay(
            logits, self._tokens[at], self._words[at], self._temperature, self._rule
        )
        self._logprobs[at] = self._draws.take(seen)

    def scored(self, activations: toploc.ToplocStats | toploc.Malformed) -> Scored:
        """Return the result of all logits that were added, together with the check of the
        proofs.

        Raises `EngineError` if not every row was fed: our own mistake, and no evidence.
        """
        if self._draws.tokens != len(self._tokens):
            raise EngineError(
                f"{self._draws.tokens} of a group's {len(self._tokens)} tokens were scored"
            )
        malformed = ""
        if isinstance(activations, toploc.Malformed):
            malformed, activations = activations.reason, toploc.ToplocStats(0, 0, 0.0, 0.0)
        chunks, mean = 0.0, 0.0
        if not malformed:
            counts = list(chain.from_iterable(toploc.independence(self._completions)))
            means = zip(counts, activations.means, strict=True)
            chunks = sum(counts)
            if chunks:
                mean = sum(count * one for count, one in means) / chunks
        evidence = Evidence(
            tokens=self._draws.tokens,
            malformed=malformed,
            exponent_mismatches=activations.exponent_mismatches,
            mantissa_mean=mean,
            mantissa_median=activations.mantissa_median,
            draw_distance=self._draws.distance,
            off=self._draws.off,
            gap_mean=self._draws.gap_mean,
            gap_max=self._draws.gap_max,
            end_probability=float(np.exp(self._logprobs[self._ended]).min(initial=1.0)),
            surprise=self._draws.surprise,
            mantissa_worst=activations.mantissa_mean,
            chunks=chunks,
            largest=self._draws.largest,
        )
        return Scored(evidence, pack_logprobs(self._logprobs))

    @property
    def proofs(self) -> list[bytes]:
        """Claimed activation proofs, one for each completion."""
        return self._proofs


def pack_logprobs(logprobs: NDArray[np.floating]) -> bytes:
    """Return log-probs in the form that `Scored` carries."""
    packed: bytes = np.maximum(logprobs, LOWEST_FLOAT16).astype("<f2").tobytes()
    return packed


def conclude(replays: Sequence[GroupReplay], values: int) -> list[Scored]:
    """Return the result of each group's replay. The proofs of all groups are verified together,
    which costs a tenth of verifying them one by one where answers are short. ``values`` is
    `Sampling.proof_values`."""
    proofs = [proof for one in replays for proof in one.proofs]
    activations = [each for one in replays for each in one.activations]
    if activations:
        activations[0].close_all(activations)
    checked = iter(toploc.verify(proofs, activations, values))
    return [one.scored(toploc.worst(list(islice(checked, len(one.proofs))))) for one in replays]
