"""Sizes of a model and its number format."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from p2p.node.tables import LATER
from roles.contract.core.bounds import Bounds, check_bounds

_SHAPE: Final[Bounds] = {
    "vocabulary": (2, 1 << 20),  # the largest in use have 262,144
    "width": (1, 1 << 16),  # 16,384 in a model of 405 B parameters
    "layers": (1, 1024),  # 126 there
    "query_heads": (1, 1024),
    "key_heads": (1, 1024),
    "head_width": (2, 4096),
    "feed_forward": (1, 1 << 20),
    "rope_base": (1.0, 1e12),
    "epsilon": (1e-12, 1.0),
}
_SCALING: Final[Bounds] = {
    "factor": (1.0, 1e6),
    "low": (1e-6, 1e6),
    "high": (1e-6, 1e6),
    "context": (1, 1 << 30),
}
_ARCHITECTURE: Final = re.compile(r"([A-Z][A-Za-z0-9]{0,47}ForCausalLM)?")
SEEDS: Final = (-(1 << 63), (1 << 63) - 1)
"""Range of torch's seeds: 64 bits with a sign."""
ENGINES: Final = ("torch", "fake")
"""Engines that a run may name: ``torch`` computes, ``fake`` is for simulations only."""
MAX_END_TOKENS: Final = 64
"""Most tokens that end a completion: chat models have one to three, and a newline may be
another."""
MAX_CONTEXT: Final = 1 << 20
"""Most positions of a context; a million is the longest in use."""


class Family(Enum):
    """Family of the decoder; each differs from the others by one flag of `ModelShape`."""

    QWEN3 = "qwen3"
    """Architecture with norms of queries and keys."""
    QWEN2 = "qwen2"
    """Architecture with biases of queries, keys and values."""
    LLAMA = "llama"
    """Architecture without either."""


class Dtype(Enum):
    """Number format of sampling and scoring; the values are torch's names."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Slower rotary frequencies for a longer context, as Llama 3.1 has them (rope type
    ``llama3`` of transformers)."""

    factor: float
    """Frequencies whose wave is longer than ``context / low`` are divided by it."""

    low: float
    high: float
    """Frequencies whose wave is shorter than ``context / high`` stay; between them lies a
    mixture."""

    context: int
    """Context of the model's first training, in positions."""

    def __post_init__(self) -> None:
        check_bounds(self, _SCALING)
        if self.low >= self.high:
            raise ValueError(f"low ({self.low:g}) must be below high ({self.high:g})")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder of one of the families, or of another architecture."""

    vocabulary: int
    """Token ids are 0 to this, exclusive. The environments' vocabulary must fit."""

    width: int
    """Features of the residual stream."""

    layers: int
    """Blocks of attention and SwiGLU."""

    query_heads: int
    """Attention heads."""

    key_heads: int
    """Heads of keys and values, each shared by query_heads / key_heads queries."""

    head_width: int
    """Features per head; even, because of the rotary halves."""

    feed_forward: int
    """Hidden features of SwiGLU."""

    rope_base: float = 10_000.0
    """Base of the rotary frequencies."""

    epsilon: float = 1e-5
    """Epsilon of every RMSNorm."""

    tied: bool = False
    """True if head and embedding share weights."""

    qkv_bias: bool = False
    """True if queries, keys and values have biases, as in Qwen2."""

    qk_norm: bool = True
    """True if each head's queries and keys are normed, as in Qwen3."""

    rope_scaling: RopeScaling | None = field(default=None, metadata=LATER)
    """Slow-down of the rotary frequencies; None: there is none."""

    architecture: str = field(default="", metadata=LATER)
    """The class of transformers that computes the model, by the base's ``config.json``. What
    is no size above then stands there. Empty: our own decoder computes it."""

    def __post_init__(self) -> None:
        check_bounds(self, _SHAPE)
        if not _ARCHITECTURE.fullmatch(self.architecture):
            raise ValueError(f"{self.architecture!r:.80} is no name of an architecture")
        if self.qkv_bias and self.qk_norm:
            raise ValueError("no family has both biases and norms of queries and keys")
        if self.query_heads % self.key_heads:
            raise ValueError(
                f"{self.query_heads} query heads cannot share {self.key_heads} key heads evenly"
            )
        if self.head_width % 2:
            raise ValueError(f"head_width must be even, not {self.head_width}")

    @property
    def family(self) -> Family:
        if self.qk_norm:
            return Family.QWEN3
        return Family.QWEN2 if self.qkv_bias else Family.LLAMA

    @property
    def parameters(self) -> int:
        """Number of weights, embeddings included, and the head unless it is tied."""
        heads = self.width * self.head_width * 2 * (self.query_heads + self.key_heads)
        biases = self.head_width * (self.query_heads + 2 * self.key_heads)
        layer = (
            heads
            + 3 * self.width * self.feed_forward
            + 2 * self.width
            + 2 * self.head_width * self.qk_norm
            + biases * self.qkv_bias
        )
        tables = 1 if self.tied else 2
        return self.layers * layer + tables * self.vocabulary * self.width + self.width
