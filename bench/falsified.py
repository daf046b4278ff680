"""Falsified honest work for ``bench engines``: groups that were changed after they were drawn.

No model is run for any of these. They are what costs a cheat nothing: the tokens, the proofs or
the place of somebody's honest work, handed in as one's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Final, TypeAlias

from proofs.toploc import ROWS_PER_CHUNK
from roles.engines.base import Completion, Group


@dataclass(frozen=True, slots=True)
class Recorded:
    """A batch of honest groups, and the data that falsifications need beside them."""

    honest: Sequence[Group]
    foreign: Sequence[Group]
    """Groups that another model answered to the same tasks by the same seeds."""
    ends: Sequence[int]
    """The tokens that end an answer."""
    vocabulary: int
    proof_values: int
    """Number of values in a chunk of a proof."""
    rng: Random


Falsify: TypeAlias = Callable[[Recorded], list[Group]]


def alter_token(recorded: Recorded) -> list[Group]:
    """Change one token of one answer of each group and keep the proof."""
    altered = list[Group]()
    for group in recorded.honest:
        answers = list(group.completions)
        slot = recorded.rng.randrange(len(answers))
        tokens = list(answers[slot].tokens)
        place = recorded.rng.randrange(len(tokens))
        tokens[place] = _another(recorded, tokens[place])
        answers[slot] = replace(answers[slot], tokens=tuple(tokens))
        altered.append(Group(group.group, tuple(answers)))
    return altered


def _another(recorded: Recorded, token: int) -> int:
    while True:
        found = recorded.rng.randrange(recorded.vocabulary)
        if found != token and found not in recorded.ends:
            return found


def truncate(recorded: Recorded) -> list[Group]:
    """Cut every answer of more than one token in half."""
    end, size = recorded.ends[0], 2 + 2 * recorded.proof_values

    def halve(answer: Completion) -> Completion:
        kept = max(1, len(answer.tokens) // 2)
        if kept == len(answer.tokens):
            return answer
        chunks = -(-kept // ROWS_PER_CHUNK)
        return Completion(
            (*answer.tokens[: kept - 1], end),
            answer.logprobs[:kept],
            answer.proof[: chunks * size],
        )

    return [Group(one.group, tuple(map(halve, one.completions))) for one in recorded.honest]


def sell_again(recorded: Recorded) -> list[Group]:
    """Give each group the tokens and proofs of the next place."""
    following = (*recorded.honest[1:], recorded.honest[0])
    return [
        Group(one.group, other.completions)
        for one, other in zip(recorded.honest, following, strict=True)
    ]


def copy_proofs(recorded: Recorded) -> list[Group]:
    """Give each answer the proof of the next one of its group."""
    copied = list[Group]()
    for group in recorded.honest:
        following = (*group.completions[1:], group.completions[0])
        answers = zip(group.completions, following, strict=True)
        copied.append(
            Group(group.group, tuple(replace(one, proof=other.proof) for one, other in answers))
        )
    return copied


def take_foreign_tokens(recorded: Recorded) -> list[Group]:
    """Return the tokens of another model, with the proofs of the answers that were due."""
    return [
        Group(
            one.group,
            tuple(
                replace(theirs, proof=mine.proof)
                for mine, theirs in zip(one.completions, other.completions, strict=True)
            ),
        )
        for one, other in zip(recorded.honest, recorded.foreign, strict=False)
    ]


FALSIFIED: Final[dict[str, Falsify]] = {
    "altered token": alter_token,
    "truncated": truncate,
    "another model's tokens": take_foreign_tokens,
    "replay": sell_again,
    "copied proof": copy_proofs,
}
"""Falsifications by the name of the way."""
