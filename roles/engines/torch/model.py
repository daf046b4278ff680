"""A Qwen3-style decoder with Hugging Face's tensor names, which transformers and vLLM load too.

RMSNorm before each block, grouped-query attention with per-head RMSNorm of queries and keys
before the rotary embedding (halves, not pairs), SwiGLU, no biases, an untied head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from roles.engines.config import ModelShape


@dataclass(slots=True)
class Cache:
    """Keys and values of what was read, a pair per layer: (rows, key heads, capacity, head
    width).
    """

    layers: list[tuple[Tensor, Tensor]]
    used: int

    @classmethod
    def empty(cls, shape: ModelShape, rows: int, capacity: int) -> Cache:
        """Room for ``capacity`` tokens in each row."""
        size = (rows, shape.key_heads, capacity, shape.head_width)
        return cls([(torch.empty(size), torch.empty(size)) for _ in range(shape.layers)], 0)

    def select(self, rows: Tensor) -> Cache:
        """Only these rows, in this order; repetition is allowed."""
        return Cache([(keys[rows], values[rows]) for keys, values in self.layers], self.used)


class Rotary:
    """Cosines and sines of every position, as far as was needed."""

    def __init__(self, shape: ModelShape) -> None:
        half = torch.arange(shape.head_width // 2, dtype=torch.float32) * 2 / shape.head_width
        self._frequencies = shape.rope_base**-half
        self._table = torch.empty(0, 2, shape.head_width)

    def at(self, positions: Tensor) -> Tensor:
        """(2, rows, 1, length, head width) for positions (rows, length): cosines, signed
        sines.
        """
        needed = int(positions.max()) + 1
        if needed > len(self._table):
            angles = torch.outer(
                torch.arange(2 * needed, dtype=torch.float32), self._frequencies
            )
            cosine, sine = angles.cos(), angles.sin()
            self._table = torch.stack(
                [torch.cat([cosine, cosine], -1), torch.cat([-sine, sine], -1)], 1
            )
        return self._table[positions].permute(2, 0, 1, 3).unsqueeze(2)


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotate the halves of each head: (a, b) -> (a cos - b sin, b cos + a sin)."""
    return x * rotary[0] + x.roll(x.shape[-1] // 2, -1) * rotary[1]


class Attention(nn.Module):
    """Grouped-query attention with normalised queries and keys."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self._heads = (shape.query_heads, shape.key_heads, shape.head_width)
        queries, keys = shape.query_heads * shape.head_width, shape.key_heads * shape.head_width
        self.q_proj = nn.Linear(shape.width, queries, bias=False)
        self.k_proj = nn.Linear(shape.width, keys, bias=False)
        self.v_proj = nn.Linear(shape.width, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.width, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_width, eps=shape.epsilon)
        self.k_norm = nn.RMSNorm(shape.head_width, eps=shape.epsilon)

    def forward(
        self,
        x: Tensor,
        rotary: Tensor,
        mask: Tensor | None,
        layer: tuple[Tensor, Tensor] | None,
        used: int,
    ) -> Tensor:
        """Mix (rows, length, width) over what is seen; ``layer`` holds, and takes, keys and
        values.
        """
        rows, length, _ = x.shape
        query_heads, key_heads, width = self._heads
        queries = self.q_norm(self.q_proj(x).view(rows, length, query_heads, width)).transpose(
            1, 2
        )
        keys = self.k_norm(self.k_proj(x).view(rows, length, key_heads, width)).transpose(1, 2)
        values = self.v_proj(x).view(rows, length, key_heads, width).transpose(1, 2)
        queries, keys = rotate(queries, rotary), rotate(keys, rotary)
        if layer is not None:
            stored_keys, stored_values = layer
            stored_keys[:, :, used : used + length] = keys
            stored_values[:, :, used : used + length] = values
            keys, values = (
                stored_keys[:, :, : used + length],
                stored_values[:, :, : used + length],
            )
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        out: Tensor = self.o_proj(
            mixed.transpose(1, 2).reshape(rows, length, query_heads * width)
        )
        return out


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.feed_forward, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.feed_forward, bias=False)
        self.down_proj = nn.Linear(shape.feed_forward, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Each position by itself."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """Attention, then feed-forward, each on a normalised input and added to the residual
    stream.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.width, eps=shape.epsilon)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.width, eps=shape.epsilon)
        self.mlp = FeedForward(shape)

    def forward(
        self,
        x: Tensor,
        rotary: Tensor,
        mask: Tensor | None,
        layer: tuple[Tensor, Tensor] | None,
        used: int,
    ) -> Tensor:
        """See `Attention.forward`."""
        x = x + self.self_attn(self.input_layernorm(x), rotary, mask, layer, used)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """Embedding, blocks and the final norm."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=shape.epsilon)


class TransformerModel(nn.Module):
    """Tokens to final-normed hidden states; `lm_head` turns those into logits."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        self.lm_head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self._rotary = Rotary(shape)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Hidden states (rows, length, width) of tokens (rows, length).

        Without ``mask`` attention is causal, which suits rows padded on the right; with it
        (rows, 1, length, keys), True is seen. With ``cache`` the tokens come after those that
        it holds.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1]).unsqueeze(0)
        rotary = self._rotary.at(positions)
        x = self.model.embed_tokens(tokens)
        used = 0 if cache is None else cache.used
        for index, block in enumerate(self.model.layers):
            x = block(x, rotary, mask, None if cache is None else cache.layers[index], used)
        if cache is not None:
            cache.used += tokens.shape[1]
        hidden: Tensor = self.model.norm(x)
        return hidden

    def initialise(self, seed: int) -> None:
        """Draw weights: embedding and head N(0, 0.02), others N(0, 1/fan-in), outputs over
        sqrt(2 layers).
        """
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if weight.dim() < 2:
                    weight.fill_(1.0)
                    continue
                scale = (
                    0.02
                    if "embed" in name or "head" in name
                    else 1 / math.sqrt(weight.shape[1])
                )
                if "o_proj" in name or "down_proj" in name:
                    scale /= math.sqrt(2 * self.shape.layers)
                weight.normal_(0.0, scale, generator=generator)
