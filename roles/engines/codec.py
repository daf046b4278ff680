"""Engine values over the pipe between a node and its worker, as msgpack.

Both ends are this project at one version, so nothing here is foreign: a value that does not fit
is a bug and raises TypeError or ValueError. Foreign completions were checked by the node before
they come here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgpack

from roles.engines.base import Completion, Group, GroupTask, TrainingGroup

MAX_FRAME: Final = 64 * 1024 * 1024
"""A step of 64 groups of 16 completions of 4,096 tokens is about 57 MB; the demo's is 0.2
MB."""

LENGTH_BYTES: Final = 4
"""Frames are behind their big-endian length, of four bytes: more than a frame may have
(`MAX_FRAME`)."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception that crosses the pipe: the name of its class and its message."""

    kind: str
    message: str


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


def task_to_wire(task: GroupTask) -> list[object]:
    """As lists."""
    return [task.group, list(task.prompt), list(task.seeds)]


def task_from_wire(value: Sequence[Any]) -> GroupTask:
    """What `task_to_wire` made."""
    group, prompt, seeds = value
    return GroupTask(group, tuple(prompt), tuple(seeds))


def group_to_wire(group: Group) -> list[object]:
    """As lists."""
    completions = [[*_completion_to_wire(one), one.proof] for one in group.completions]
    return [group.group, completions]


def group_from_wire(value: Sequence[Any]) -> Group:
    """What `group_to_wire` made."""
    group, completions = value
    return Group(group, _completions_from_wire(completions))


def training_to_wire(group: TrainingGroup) -> list[object]:
    """As lists; proofs stay behind."""
    completions = [_completion_to_wire(one) for one in group.completions]
    return [list(group.prompt), completions, list(group.rewards)]


def training_from_wire(value: Sequence[Any]) -> TrainingGroup:
    """What `training_to_wire` made."""
    prompt, completions, rewards = value
    return TrainingGroup(tuple(prompt), _completions_from_wire(completions), tuple(rewards))


def _completion_to_wire(completion: Completion) -> list[object]:
    return [list(completion.tokens), list(completion.logprobs)]


def _completions_from_wire(value: Sequence[Any]) -> tuple[Completion, ...]:
    return tuple(
        Completion(tuple(tokens), tuple(logprobs), *proof) for tokens, logprobs, *proof in value
    )


def _pack(value: object) -> bytes:
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed
