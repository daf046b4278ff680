"""Amount of work in a submission: tokens, and the FLOPs that they take in a run's model.

A worker claims nothing here: the validator that replays a submission counts it, and signs the
counts with its verdict. INTELLECT-2's work units are the FLOPs of the output, which
its workers claim themselves; ours are the same arithmetic, on counts that can be repeated. Four
sums say all that the arithmetic needs, so counts of submissions are added before it is done.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Final

from p2p.errors import BadMessage
from p2p.wire import fields_untrusted
from roles.contract.core.shape import ModelShape

MAX_COUNT: Final = 2**62
"""Highest value of a sum: a month of a large swarm is below 2**50, and two of them can be
added."""
_PER_MULTIPLICATION: Final = 2
"""FLOPs per weight and token: a product and a sum."""


@dataclass(frozen=True, slots=True)
class Work:
    """Sums over completions, each counted with its prompt."""

    prompt: int = 0
    """Tokens of the prompts."""
    tokens: int = 0
    """Number of drawn tokens."""
    prompt_reach: int = 0
    """Number of pairs of a prompt's token and a token that it attends to: itself and those
    before."""
    reach: int = 0
    """Number of such pairs of the drawn tokens."""

    def __add__(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def flops(self, shape: ModelShape) -> tuple[int, int]:
        """Return the FLOPs of the prompts and of the drawn tokens, in a model of this
        ``shape``."""
        width, heads = shape.width, shape.head_width
        queries, keys = shape.query_heads * heads, shape.key_heads * heads
        layer = 2 * width * queries + 2 * width * keys + 3 * width * shape.feed_forward
        token = _PER_MULTIPLICATION * (shape.layers * layer + shape.vocabulary * width)
        pair = 2 * _PER_MULTIPLICATION * shape.layers * queries
        return (
            token * self.prompt + pair * self.prompt_reach,
            token * self.tokens + pair * self.reach,
        )


def work_of(lengths: Iterable[tuple[int, int]]) -> Work:
    """Return the work of completions, given the lengths of the prompt and the completion of
    each."""
    prompt = tokens = prompt_reach = reach = 0
    for asked, drawn in lengths:
        prompt, tokens = prompt + asked, tokens + drawn
        prompt_reach += asked * (asked + 1) // 2
        reach += (drawn + 2 * asked + 1) * drawn // 2
    return Work(prompt, tokens, prompt_reach, reach)


def decode_work_untrusted(value: object) -> Work:
    """Decode a work. Raises `BadMessage`, and nothing else, whatever ``value`` is."""
    counts = fields_untrusted(value, int, int, int, int, what="count of work")
    if not all(0 <= count <= MAX_COUNT for count in counts):
        raise BadMessage(f"a count of work is 0 to {MAX_COUNT}")
    return Work(*counts)
