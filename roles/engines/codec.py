"""Calls between a node and its worker, and the values in the files beside them, as msgpack.

What grows with the recipe is a column of numbers as the machine has them, within a record of a
content file (`roles.engines.content`). Both ends are this project at one version on one
machine, so nothing here is foreign: a value that does not fit is a bug and raises TypeError or
ValueError. Foreign completions were checked by the node before they come here.
"""

from __future__ import annotations

import errno
from array import array
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, Final

import msgpack

from proofs.checks import Evidence
from roles.engines.base import (
    Answers,
    Completion,
    Group,
    GroupTask,
    Scored,
    TrainingGroup,
    Turn,
)

MAX_FRAME: Final = 64 * 1024 * 1024
"""The longest is a submission whose answers an environment rewards: 8 MiB as it travels
(`roles.contract.core.sizes`), up to 5 bytes a token instead of 2 here. An engine's
frames name files, and have some kilobytes."""

TOKEN: Final = "I"
"""Four bytes, in the machine's order: what embeddings are indexed by."""
LOGPROB: Final = "f"
"""Four bytes: what every engine computes log-probs in."""

DISK_REFUSES: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO})
"""A disk that is full, over a quota, mounted read-only after an error, or failing: it may be
mended while the node waits."""

MAX_SAID: Final = 2000
"""Characters of an error that cross the pipe: it may quote what an owner or a trainer wrote
into a file, of any length, and characters that no encoding has."""

LENGTH_BYTES: Final = 4
"""Frames are behind their big-endian length, of four bytes: more than a frame may have
(`MAX_FRAME`)."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception that crosses the pipe: the name of its class and its message."""

    kind: str
    message: str


def failure_of(error: Exception) -> Failure:
    """What crosses the pipe of ``error``. Of what the operating system refuses, only a disk
    that takes no data is worth trying again for as long as it takes."""
    is_disk = isinstance(error, OSError) and error.errno in DISK_REFUSES
    said = str(error)[:MAX_SAID].encode(errors="backslashreplace").decode()
    return Failure("StorageError" if is_disk else type(error).__name__, said)


def encode_request(method: str, *arguments: object) -> bytes:
    """A call."""
    return _pack([method, *arguments])


def decode_request(data: bytes) -> tuple[str, list[Any]]:
    """The name of the method and its arguments."""
    method, *arguments = msgpack.unpackb(data)
    return method, arguments


def encode_reply(value: object) -> bytes:
    """What a call returned."""
    return _pack([True, value])


def encode_failure(failure: Failure) -> bytes:
    """What a call raised."""
    return _pack([False, [failure.kind, failure.message]])


def decode_reply(data: bytes) -> Any:
    """The value, or a `Failure`."""
    succeeded, value = msgpack.unpackb(data)
    return value if succeeded else Failure(*value)


def encode_task(task: GroupTask) -> bytes:
    """A record of a content file."""
    return _pack([task.group, _numbers(TOKEN, task.prompt), list(task.seeds)])


def decode_task(record: bytes) -> GroupTask:
    """What `encode_task` made."""
    group, prompt, seeds = msgpack.unpackb(record)
    return GroupTask(group, _tokens(prompt), tuple(seeds))


def encode_group(group: Group) -> bytes:
    """A record of a content file."""
    completions = [[*_columns(one), _turns(one), one.proof] for one in group.completions]
    return _pack([group.group, completions])


def decode_group(record: bytes) -> Group:
    """What `encode_group` made."""
    group, completions = msgpack.unpackb(record)
    return Group(
        group,
        tuple(
            _completion(tokens, logprobs, turns, proof)
            for tokens, logprobs, turns, proof in completions
        ),
    )


def encode_training(group: TrainingGroup) -> bytes:
    """A record of a content file; proofs stay behind."""
    completions = [[*_columns(one), _turns(one)] for one in group.completions]
    return _pack([_numbers(TOKEN, group.prompt), completions, list(group.rewards)])


def decode_training(record: bytes) -> TrainingGroup:
    """What `encode_training` made."""
    prompt, completions, rewards = msgpack.unpackb(record)
    return TrainingGroup(
        _tokens(prompt),
        tuple(_completion(*columns) for columns in completions),
        tuple(rewards),
    )


def encode_scored(scored: Scored) -> bytes:
    """A record of a content file."""
    return _pack([evidence_to_wire(scored.evidence), scored.logprobs])


def decode_scored(record: bytes) -> Scored:
    """What `encode_scored` made."""
    evidence, logprobs = msgpack.unpackb(record)
    return Scored(evidence_from_wire(evidence), logprobs)


def evidence_to_wire(evidence: Evidence) -> list[object]:
    """Its fields, in order."""
    return list(astuple(evidence))


def evidence_from_wire(values: Sequence[Any]) -> Evidence:
    """What `evidence_to_wire` made, lists where there were tuples."""
    fields: list[Any] = [tuple(one) if isinstance(one, list) else one for one in values]
    return Evidence(*fields)


def encode_answers(answers: Answers) -> bytes:
    """A record of a content file."""
    return _pack([_numbers(TOKEN, tokens) for tokens in answers])


def decode_answers(record: bytes) -> Answers:
    """What `encode_answers` made."""
    return tuple(map(_tokens, msgpack.unpackb(record)))


def _columns(completion: Completion) -> list[bytes]:
    return [_numbers(TOKEN, completion.tokens), _numbers(LOGPROB, completion.logprobs)]


def _turns(completion: Completion) -> list[list[object]]:
    return [[turn.after, _numbers(TOKEN, turn.inserted)] for turn in completion.turns]


def _completion(
    tokens: bytes, logprobs: bytes, turns: list[tuple[int, bytes]], proof: bytes = b""
) -> Completion:
    return Completion(
        _tokens(tokens),
        tuple(array(LOGPROB, logprobs)),
        proof,
        tuple(Turn(after, _tokens(inserted)) for after, inserted in turns),
    )


def _numbers(kind: str, values: Sequence[float]) -> bytes:
    return array(kind, values).tobytes()


def _tokens(data: bytes) -> tuple[int, ...]:
    return tuple(array(TOKEN, data))


def _pack(value: object) -> bytes:
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed
