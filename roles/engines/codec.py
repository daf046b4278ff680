"""Values that grow with the recipe, as records of the files between a node and its engine.

A record is one task, group or answer (`roles.workers.files`): msgpack, whose long columns are
numbers as the machine has them. Both ends are this project at one version on one machine, so
nothing here is foreign: a value that does not fit is a bug and raises TypeError or ValueError.
Foreign completions were checked by the node before they come here.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any, Final

import msgpack

from proofs.checks import Evidence
from roles.engines.base import (
    Answers,
    Completion,
    Group,
    GroupTask,
    Row,
    Scored,
    TrainingGroup,
    Turn,
)

TOKEN: Final = "I"
"""Array type code of tokens: four bytes, in the machine's order, with which embeddings are
indexed."""
LOGPROB: Final = "f"
"""Array type code of log-probs: four bytes, as every engine computes them."""


def encode_task(task: GroupTask) -> bytes:
    return _pack([task.group, _numbers(TOKEN, task.prompt), list(task.seeds)])


def decode_task(record: bytes) -> GroupTask:
    group, prompt, seeds = msgpack.unpackb(record)
    return GroupTask(group, _tokens(prompt), tuple(seeds))


def encode_group(group: Group) -> bytes:
    return _pack([group.group, _columns(group.completions)])


def decode_group(record: bytes) -> Group:
    group, completions = msgpack.unpackb(record)
    return Group(group, _completions(completions))


def encode_training(group: TrainingGroup) -> bytes:
    return _pack([_numbers(TOKEN, group.prompt), _columns(group.completions), group.rewards])


def decode_training(record: bytes) -> TrainingGroup:
    prompt, completions, rewards = msgpack.unpackb(record)
    return TrainingGroup(_tokens(prompt), _completions(completions), tuple(rewards))


def encode_scored(scored: Scored) -> bytes:
    return _pack([astuple(scored.evidence), scored.logprobs])


def decode_scored(record: bytes) -> Scored:
    evidence, logprobs = msgpack.unpackb(record, use_list=False)
    return Scored(Evidence(*evidence), logprobs)


def encode_answers(answers: Answers) -> bytes:
    return _pack([_numbers(TOKEN, tokens) for tokens in answers])


def decode_answers(record: bytes) -> Answers:
    return tuple(map(_tokens, msgpack.unpackb(record)))


def encode_turns(groups: Sequence[Sequence[Sequence[Turn]]]) -> bytes:
    """Encode the environment's insertions in each completion of some groups."""
    return _pack([[_turns(one) for one in completions] for completions in groups])


def decode_turns(data: bytes) -> tuple[tuple[tuple[Turn, ...], ...], ...]:
    """Decode the output of `encode_turns`. Raises ValueError or TypeError if ``data`` is
    something else."""
    groups = msgpack.unpackb(data)
    return tuple(tuple(map(_read_turns, completions)) for completions in groups)


def rows_to_wire(rows: Sequence[Row]) -> list[object]:
    return [[row.group, row.slot, _numbers(TOKEN, row.tokens)] for row in rows]


def rows_from_wire(values: Sequence[Any]) -> list[Row]:
    return [Row(group, slot, _tokens(tokens)) for group, slot, tokens in values]


def _columns(completions: Sequence[Completion]) -> list[list[object]]:
    return [
        [
            _numbers(TOKEN, one.tokens),
            _numbers(LOGPROB, one.logprobs),
            one.proof,
            _turns(one.turns),
        ]
        for one in completions
    ]


def _turns(turns: Sequence[Turn]) -> list[list[object]]:
    return [[turn.after, _numbers(TOKEN, turn.inserted)] for turn in turns]


def _read_turns(values: Sequence[Any]) -> tuple[Turn, ...]:
    return tuple(Turn(after, _tokens(inserted)) for after, inserted in values)


def _completions(columns: Sequence[Sequence[Any]]) -> tuple[Completion, ...]:
    return tuple(
        Completion(
            _tokens(tokens),
            tuple(array(LOGPROB, logprobs)),
            proof,
            _read_turns(turns),
        )
        for tokens, logprobs, proof, turns in columns
    )


def _numbers(kind: str, values: Sequence[float]) -> bytes:
    return array(kind, values).tobytes()


def _tokens(data: bytes) -> tuple[int, ...]:
    return tuple(array(TOKEN, data))


def _pack(value: object) -> bytes:
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed
