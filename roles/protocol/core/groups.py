"""Encoding of the groups of a submission, and of the log-probs of their tokens.

Wire tables: docs/protocols/work.md.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from functools import cache
from typing import Final

from blake3 import blake3

from p2p.errors import BadMessage
from p2p.wire import fields_untrusted, pack, unpack_untrusted
from roles.contract.core.sizes import (
    HEARD_BYTES,
    LOGPROB_BYTES,
    MAX_COMPLETIONS,
    MAX_GROUPS,
    MAX_TOKEN,
    MAX_TOKENS,
    SHORT_TOKENS,
)
from roles.engines.base import Completion, Group

DECODE_RATE: Final = 40e6
"""Bytes of a submission's content that one core decodes and checks in a second: 3.1 MB, 16
answers of 32,768 tokens, take 0.1 s."""
HASH_RATE: Final = 1e9
"""Bytes of a submission that one core hashes and copies in a second."""
MAX_INDEX: Final = 2**32 - 1
"""The highest number of a group."""
_GROUP_FIELDS: Final = 6
SILENCE: Final = bytes(HEARD_BYTES)
"""Digest of a completion in which nothing was inserted."""
UNHEARD: Final = b"\xff" * HEARD_BYTES
"""Digest that a worker writes if its own environment failed to answer."""


def heard_digest(heard: Sequence[Sequence[int] | None]) -> bytes:
    """Return the digest of what the environment inserts in a completion, turn after turn
    (`roles.envs.turns.Heard`).

    If a worker's digest is not ours, the environment is not deterministic, or one of the two
    machines is broken. Such work cannot be judged, and nobody is accused.
    """
    if not heard:
        return SILENCE
    said = [one for one in heard if one is not None]
    if len(said) < len(heard):
        return UNHEARD
    words = b"".join(struct.pack(f"<{1 + len(one)}I", len(one), *one) for one in said)
    return blake3(words).digest(length=HEARD_BYTES)


def _number_untrusted(value: int, limit: int, what: str) -> int:
    if not 0 <= value <= limit:
        raise BadMessage(f"{what} must be from 0 to {limit}")
    return value


NOTHING: Final = b""
"""Content of a place that its worker could not draw, since the environment made no tasks for
it. It keeps the order of places without gaps."""


def encode_groups(groups: tuple[Group, ...]) -> bytes:
    """Return the content of a submission, from which its digest is computed."""
    return pack([_encode_group(group) for group in groups])


def _encode_group(group: Group) -> list[object]:
    lengths = [len(completion.tokens) for completion in group.completions]
    tokens = [token for completion in group.completions for token in completion.tokens]
    proofs = [completion.proof for completion in group.completions]
    return [
        group.group,
        struct.pack(f"<{len(lengths)}I", *lengths),
        _encode_tokens(tokens),
        struct.pack(f"<{len(proofs)}I", *map(len, proofs)),
        b"".join(proofs),
        b"".join(one.heard or SILENCE for one in group.completions),
    ]


def _encode_tokens(tokens: list[int]) -> bytes:
    """Return two bytes for each token, or three for each if one of them needs it."""
    highest = max(tokens, default=0)
    if highest > MAX_TOKEN:
        raise ValueError(f"a token of {highest} has no form on the wire")
    if highest < SHORT_TOKENS:
        return struct.pack(f"<{len(tokens)}H", *tokens)
    words = struct.pack(f"<{len(tokens)}I", *tokens)
    encoded = bytearray(3 * len(tokens))
    for byte in range(3):
        encoded[byte::3] = words[byte::4]
    return bytes(encoded)


def _decode_tokens_untrusted(data: bytes, count: int) -> tuple[int, ...]:
    """Decode ``count`` tokens. Raises `BadMessage` unless they are in their one form."""
    if len(data) == 2 * count:
        return _shared(struct.unpack(f"<{count}H", data))
    if len(data) != 3 * count:
        raise BadMessage("the lengths of a group do not fit its tokens")
    words = bytearray(4 * count)
    for byte in range(3):
        words[byte::4] = data[byte::3]
    tokens = struct.unpack(f"<{count}I", words)
    if max(tokens, default=0) < SHORT_TOKENS:
        raise BadMessage("tokens that fit two bytes have three")
    return _shared(tokens)


def _shared(tokens: tuple[int, ...]) -> tuple[int, ...]:
    """Return the tokens with one object for equal tokens, which takes 8 bytes a token instead
    of 40. A trainer's buffer holds some ten million."""
    objects: dict[int, int] = {}
    return tuple(map(objects.setdefault, tokens, tokens))


def decode_groups_untrusted(content: bytes) -> tuple[Group, ...]:
    """Decode the content of a submission. Raises `BadMessage`, and nothing else, whatever the
    bytes."""
    listed = unpack_untrusted(
        content, max_items=MAX_GROUPS * (2 + _GROUP_FIELDS), max_list=MAX_GROUPS
    )
    if not isinstance(listed, list) or not 0 < len(listed) <= MAX_GROUPS:
        raise BadMessage(f"a submission has 1 to {MAX_GROUPS} groups")
    return tuple(_decode_group_untrusted(item) for item in listed)


def _decode_group_untrusted(item: object) -> Group:
    number, raw_lengths, raw_tokens, raw_sizes, proofs, heard = fields_untrusted(
        item, int, bytes, bytes, bytes, bytes, bytes, what="group"
    )
    _number_untrusted(number, MAX_INDEX, "a group number")
    if len(raw_lengths) % 4 or not 0 < len(raw_lengths) <= 4 * MAX_COMPLETIONS:
        raise BadMessage(f"a group has 1 to {MAX_COMPLETIONS} completions")
    lengths = struct.unpack(f"<{len(raw_lengths) // 4}I", raw_lengths)
    if max(lengths) > MAX_TOKENS:
        raise BadMessage(f"a completion has at most {MAX_TOKENS} tokens")
    tokens = _decode_tokens_untrusted(raw_tokens, sum(lengths))
    if len(raw_sizes) != len(raw_lengths):
        raise BadMessage("a group has one proof for each completion")
    sizes = struct.unpack(f"<{len(lengths)}I", raw_sizes)
    if len(proofs) != sum(sizes):
        raise BadMessage("the sizes of a group's proofs do not fit them")
    if len(heard) != HEARD_BYTES * len(lengths):
        raise BadMessage(f"a completion has {HEARD_BYTES} bytes for what it heard")
    completions = []
    start = proven = 0
    for at, (length, size) in enumerate(zip(lengths, sizes, strict=True)):
        completions.append(
            Completion(
                tokens=tokens[start : start + length],
                proof=proofs[proven : proven + size],
                heard=heard[HEARD_BYTES * at : HEARD_BYTES * (at + 1)],
            )
        )
        start, proven = start + length, proven + size
    return Group(number, tuple(completions))


@cache
def _logprobs_by_pattern() -> dict[int, float]:
    """Return the value of each pattern of 16 bits that is finite and not above 0. The objects
    are shared, as tokens are (`_shared`)."""
    values = struct.unpack("<65536e", struct.pack("<65536H", *range(65536)))
    # NaN is in no order with any number
    return {pattern: one for pattern, one in enumerate(values) if -math.inf < one <= 0}


def decode_logprobs_untrusted(data: bytes, groups: tuple[Group, ...]) -> tuple[Group, ...]:
    """Return the groups with these log-probs, one for each token. Raises `BadMessage` unless
    their number fits and all are finite and not above 0."""
    count = sum(len(one.tokens) for group in groups for one in group.completions)
    if len(data) != LOGPROB_BYTES * count:
        raise BadMessage(f"{len(data)} bytes of log-probs for {count} tokens")
    patterns, numbers = struct.unpack(f"<{count}H", data), _logprobs_by_pattern()
    if not numbers.keys() >= set(patterns):
        raise BadMessage("a log-prob is not finite, or above 0")
    values = tuple(map(numbers.__getitem__, patterns))
    held = []
    start = 0
    for group in groups:
        completions = []
        for one in group.completions:
            end = start + len(one.tokens)
            completions.append(Completion(one.tokens, values[start:end], one.proof, one.turns))
            start = end
        held.append(Group(group.group, tuple(completions)))
    return tuple(held)
