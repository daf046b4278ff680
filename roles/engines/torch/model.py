"""The decoder of three families, Llama, Qwen2 and Qwen3, with Hugging Face's tensor names.

Theory of operation
-------------------
RMSNorm before each block, grouped-query attention with rotary embedding (halves, not pairs),
SwiGLU. The families differ by three flags of `ModelShape`: biases of queries, keys and values
(Qwen2), norms of each head's queries and keys (Qwen3), and a head that is the embedding (tied).

The body computes in the dtype of the run; angles and rotation are float32. The head is held in
float32 and hidden states leave the body as float32, because draws and statistics compare logits
of many tokens: with a bfloat16 head the seeded draw of 2.2 % of honest tokens differs between
two machines, with this one 1.4 %. In a bfloat16 model the head's *values* are bfloat16 all the
same, as they are in engines that keep two bytes of each.

A model is on one device: its weights, and the caches, masks and tables that it makes. A model
is made with weights that nobody has written: `initialise` draws them,
`roles.engines.torch.files.load_weights` reads them.

Torch gives products in float32 to MKL, which on CPUs that are not Intel's leaves half of their
vector units idle. A model that nobody trains takes oneDNN's (`Projection`), and keeps its
weights in the order in which oneDNN reads them (`lay_for_reading`); sums are added up as MKL
does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from roles.contract.core.shape import Dtype, ModelShape, RopeScaling
from roles.engines.torch.device import CPU
from roles.engines.torch.sharding import put

DTYPES: Final = {Dtype.FLOAT32: torch.float32, Dtype.BFLOAT16: torch.bfloat16}
"""Maps our dtypes to torch's."""

_HAS_ONEDNN: Final = hasattr(torch.ops.mkldnn, "_linear_pointwise")
"""True if this build of torch has the operator that `Projection` uses."""

PARTIAL_SUM: Final = 192
"""Products that a float32 sum adds up before it adds them to the others. oneDNN takes all in
one chain, whose rounding errors grow with its length. MKL, and so transformers, takes 192 at a
time, and with as many here logits are the same to the last bit. Error of the logits of 512
tokens of SmolLM2, up to 41, against float64: 1.2e-4 at most, 8.0e-6 in the mean; in one chain
4.1e-4 and 1.3e-5, by 384 1.8e-4 and 9.2e-6, by 96 1.4e-4 and 6.4e-6, not equal to
transformers'. A product of 64 rows takes a tenth (576 inputs) to a third (1,536) longer for it,
of 533 rows a tenth."""

FEW_ROWS: Final = 8
"""Rows below which oneDNN's calls, one for each partial sum, cost more than its arithmetic
saves. 576 x 1,536 weights, CPU us: one row 123 against 56 of MKL, 6 rows 295 against 237, 8
rows 210 against 262."""

CACHE_BLOCK: Final = 64
"""Least number of tokens by which a cache grows. It grows by half of its size when that is
more, so a cache of n tokens is copied about twice over all its life. Answers within one block
are never copied."""

# On an H100 1,024 rows took 78 ms a token in bfloat16 where shapes were new, else 29: cuDNN
# seems to plan its attention for each shape, and each token has one.
torch.backends.cuda.enable_cudnn_sdp(False)

SLICE_VALUES: Final = 1 << 22
"""Number of logits made at once, 4 bytes each: 16 MiB, and 32 MiB for each float64 array that a
draw or a statistic makes of them. That is 85 rows at a vocabulary of 49,152 and 27 at 152,000,
where the product with the head still does more arithmetic than it reads weights."""


@dataclass(frozen=True, slots=True)
class Unpacking:
    """Layout of the sequences of packed rows beside each other, for attention alone: each
    sequence is in a row of its own, padded on the right, and each position sees those up to
    itself."""

    places: Tensor
    """(sequences, longest): index of each position in the packed rows laid end to end."""
    back: Tensor
    """For each position of the packed rows, the index of an equal position among ``places``."""
    band: Tensor | None = None
    """(longest, longest): mask that is added to scores, where a window hides more than later
    positions."""


@dataclass(frozen=True, slots=True)
class RowParts:
    """Masks of rows that read one token each, in consecutive parts of the batch. The rows of a
    part see nothing before its first column, and so read nothing of it."""

    parts: Sequence[tuple[int, int, Tensor]]
    """(rows, first column, mask of (rows, 1, 1, columns from there on))."""


Seen: TypeAlias = Tensor | Unpacking | RowParts | None
"""Positions that attention sees. A tensor is a mask (rows, 1, length, keys), True is seen.
`Unpacking`: up to the position in its sequence. None: up to the position in its row."""


def slice_rows(vocabulary: int) -> int:
    """Return the number of rows of logits that are made at once."""
    return max(1, SLICE_VALUES // vocabulary)


@dataclass(slots=True)
class Cache:
    """Keys and values of the tokens read so far, a pair per layer: (rows, key heads, capacity,
    head width). The first ``used`` columns of the capacity are filled."""

    layers: list[tuple[Tensor, Tensor]]
    used: int

    @classmethod
    def empty(
        cls,
        shape: ModelShape,
        rows: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device = CPU,
    ) -> Cache:
        """Return an empty cache with room for ``capacity`` tokens in each row."""
        size = (rows, shape.key_heads, capacity, shape.head_width)

        def room() -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        return cls([(room(), room()) for _ in range(shape.layers)], 0)

    @property
    def capacity(self) -> int:
        """Number of allocated columns."""
        return self.layers[0][0].shape[2]

    def rearrange(
        self, parts: Sequence[tuple[Cache, Tensor | None]], used: int, capacity: int
    ) -> None:
        """Take over the last ``used`` columns of these rows of these caches (None: all rows),
        in this order; this cache may be among them.

        A cache with fewer columns is put at the right, after zeros, since attention needs
        finite numbers even in masked columns. Layers are copied one by one, so that only one is
        in memory twice.
        """
        for index, (keys, values) in enumerate(self.layers):
            kept = [
                _right_aligned(
                    [(cache.layers[index][which], rows, cache.used) for cache, rows in parts],
                    like, used, capacity,
                )
                for which, like in enumerate((keys, values))
            ]  # fmt: skip
            self.layers[index] = (kept[0], kept[1])
        self.used = used


def _right_aligned(
    parts: Sequence[tuple[Tensor, Tensor | None, int]], like: Tensor, used: int, capacity: int
) -> Tensor:
    """Return the cached rows of ``parts`` in one tensor, moved so that all end at column
    ``used``."""
    count = sum(len(part) if rows is None else len(rows) for part, rows, _ in parts)
    _, heads, _, width = like.shape
    joined = like.new_empty(count, heads, capacity, width)
    row = 0
    for part, rows, filled in parts:
        taken = min(filled, used)
        kept = part[:, :, filled - taken : filled]
        kept = kept if rows is None else kept[rows]
        joined[row : row + len(kept), :, : used - taken] = 0
        joined[row : row + len(kept), :, used - taken : used] = kept
        row += len(kept)
    return joined


class Rotary:
    """Cosines and sines of every position, as far as needed. The CPU computes them, so they are
    the same on every device."""

    def __init__(self, shape: ModelShape, device: torch.device = CPU) -> None:
        # rounded as transformers does it: other orders differ in the last bit, and that is all
        # that logits then differ by
        places = torch.arange(0, shape.head_width, 2, dtype=torch.float32, device=CPU)
        self._frequencies = 1.0 / shape.rope_base ** (places / shape.head_width)
        if shape.rope_scaling is not None:
            self._frequencies = _slowed(self._frequencies, shape.rope_scaling)
        self._table = torch.empty(0, 2, shape.head_width, device=device)
        self._device = device

    def at(self, positions: Tensor, reach: int) -> Tensor:
        """Return (2, rows, 1, length, head width) for positions (rows, length) below ``reach``:
        cosines, signed sines."""
        if reach > len(self._table):
            places = torch.arange(2 * reach, dtype=torch.float32, device=CPU)
            angles = torch.outer(places, self._frequencies)
            cosine, sine = angles.cos(), angles.sin()
            table = torch.stack(
                [torch.cat([cosine, cosine], -1), torch.cat([-sine, sine], -1)], 1
            )
            self._table = table.to(self._device)
        return self._table[positions].permute(2, 0, 1, 3).unsqueeze(2)


def _slowed(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Return the frequencies of Llama 3.1, rounded as transformers does it."""
    waves = 2 * math.pi / frequencies
    share = (scaling.context / waves - scaling.low) / (scaling.high - scaling.low)
    mixed = (1 - share) * frequencies / scaling.factor + share * frequencies
    is_long = waves > scaling.context / scaling.low
    is_short = waves < scaling.context / scaling.high
    slowed = torch.where(is_long, frequencies / scaling.factor, mixed)
    return torch.where(is_short, frequencies, slowed)


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotate the halves of each head, in float32: (a, b) -> (a cos - b sin, b cos + a sin)."""
    rotated = x * rotary[0] + x.roll(x.shape[-1] // 2, -1) * rotary[1]
    return rotated.to(x.dtype)


class Projection(nn.Linear):
    """A linear layer: a product with weights, plus a bias if there is one."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., inputs) to (..., outputs).

        oneDNN's operator is the one that torch's own compiler puts into frozen models; it has
        no gradient, autocast does not know it, and a part of weights that lie row by row takes
        it 700 times as long. CPU us per row of 576 x 1,536 weights at 533 rows, on an EPYC with
        AVX-512: MKL 19.2, oneDNN 8.6, and 9.5 in partial sums; at 64 rows 19.8, 8.3 and 9.4.
        """
        if (
            torch.is_grad_enabled()
            or not x.is_cpu
            or x.dtype is not torch.float32
            or torch.is_autocast_enabled("cpu")
            or self.weight.stride(0) != 1
            or x.numel() < FEW_ROWS * self.in_features
            or not _HAS_ONEDNN
        ):
            rows: Tensor = F.linear(x, self.weight, self.bias)
            return rows
        product = torch.ops.mkldnn._linear_pointwise
        parts = zip(
            torch.split(x.flatten(0, -2), PARTIAL_SUM, 1),
            torch.split(self.weight, PARTIAL_SUM, 1),
            strict=True,
        )
        rows = product(*next(parts), self.bias, "none", [], "")
        for factors in parts:
            rows.add_(product(*factors, None, "none", [], ""))
        return rows.view(*x.shape[:-1], self.out_features)


class Attention(nn.Module):
    """Grouped-query attention."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self._heads = (shape.query_heads, shape.key_heads, shape.head_width)
        queries, keys = shape.query_heads * shape.head_width, shape.key_heads * shape.head_width
        self.q_proj = Projection(shape.width, queries, bias=shape.qkv_bias)
        self.k_proj = Projection(shape.width, keys, bias=shape.qkv_bias)
        self.v_proj = Projection(shape.width, keys, bias=shape.qkv_bias)
        self.o_proj = Projection(queries, shape.width, bias=False)
        self._has_norms = shape.qk_norm
        if shape.qk_norm:
            self.q_norm = nn.RMSNorm(shape.head_width, eps=shape.epsilon)
            self.k_norm = nn.RMSNorm(shape.head_width, eps=shape.epsilon)

    def forward(
        self,
        x: Tensor,
        rotary: Tensor,
        seen: Seen,
        layer: tuple[Tensor, Tensor] | None,
        used: int,
    ) -> Tensor:
        """Compute attention for (rows, length, width). ``layer`` holds the cached keys and
        values, and takes the new ones.
        """
        rows, length, _ = x.shape
        query_heads, key_heads, width = self._heads
        queries = self.q_proj(x).view(rows, length, query_heads, width)
        keys = self.k_proj(x).view(rows, length, key_heads, width)
        values = self.v_proj(x).view(rows, length, key_heads, width).transpose(1, 2)
        if self._has_norms:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries = rotate(queries.transpose(1, 2), rotary)
        keys = rotate(keys.transpose(1, 2), rotary)
        if layer is not None:
            keys, values = store(layer, used, keys, values)
        out: Tensor = self.o_proj(mix(queries, keys, values, seen))
        return out


def store(
    layer: tuple[Tensor, Tensor], used: int, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """Put keys and values behind the first ``used`` of a cache's layer; return all of them."""
    stored_keys, stored_values = layer
    end = used + keys.shape[2]
    stored_keys[:, :, used:end] = keys
    stored_values[:, :, used:end] = values
    return stored_keys[:, :, :end], stored_values[:, :, :end]


@dataclass(frozen=True, slots=True)
class Scores:
    """Changes that an architecture makes to the scores of attention."""

    scale: float | None = None
    """Factor of the products; None: one over the root of the head's width."""
    softcap: float | None = None
    """Bound of the scores by a tanh, as in Gemma 2; None: no bound."""

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None = None,
        *,
        is_causal: bool = False,
    ) -> Tensor:
        """Return the result of attention: (rows, heads, length, head width)."""
        share = queries.shape[1] // keys.shape[1]
        if self.softcap is None:
            return F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, is_causal=is_causal,
                scale=self.scale, enable_gqa=share > 1,
            )  # fmt: skip
        if share > 1:
            keys, values = (x.repeat_interleave(share, 1) for x in (keys, values))
        scale = queries.shape[-1] ** -0.5 if self.scale is None else self.scale
        scores = queries @ keys.transpose(2, 3) * scale
        scores = self.softcap * torch.tanh(scores / self.softcap)
        if is_causal:
            length = scores.shape[-1]
            unseen = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(unseen, -math.inf)
        elif mask is not None:
            scores = scores + mask
        return scores.softmax(-1, dtype=torch.float32).to(values.dtype) @ values


PLAIN: Final = Scores()


def mix(
    queries: Tensor, keys: Tensor, values: Tensor, seen: Seen, scores: Scores = PLAIN
) -> Tensor:
    """Return the result of attention for (rows, heads, length, head width), with fewer heads of
    keys and values: (rows, length, width)."""
    rows, _, length, width = queries.shape
    if isinstance(seen, Unpacking):
        return _mixed_apart(queries, keys, values, seen, scores)
    if isinstance(seen, RowParts) or length == 1:
        # The queries that share keys as rows of one product: with `enable_gqa` torch reads
        # the keys again for each, which takes five times as long in bfloat16.
        queries = queries.reshape(rows, keys.shape[1], -1, width)
        if isinstance(seen, RowParts):
            mixed = _mixed_by_parts(queries, keys, values, seen, scores)
        else:
            mixed = scores.attend(queries, keys, values, seen)
        return mixed.reshape(rows, 1, -1)
    mixed = scores.attend(queries, keys, values, seen, is_causal=seen is None)
    return mixed.transpose(1, 2).reshape(rows, length, -1)


def _mixed_by_parts(
    queries: Tensor, keys: Tensor, values: Tensor, parts: RowParts, scores: Scores
) -> Tensor:
    """Return the result of attention for one token a row: (rows, key heads, queries of each,
    width)."""
    mixed, row = [], 0
    for count, first, mask in parts.parts:
        mine = slice(row, row + count)
        mixed.append(
            scores.attend(queries[mine], keys[mine, :, first:], values[mine, :, first:], mask)
        )
        row += count
    return torch.cat(mixed)


def _mixed_apart(
    queries: Tensor, keys: Tensor, values: Tensor, unpacking: Unpacking, scores: Scores
) -> Tensor:
    """Return attention over packed rows, with each sequence in a row of its own: from (rows,
    heads, length, head width) to (rows, length, width)."""
    rows, _, length, _ = queries.shape
    sequences, longest = unpacking.places.shape

    def beside(x: Tensor) -> Tensor:
        laid = x.transpose(1, 2).flatten(0, 1).index_select(0, unpacking.places.flatten())
        return laid.view(sequences, longest, *laid.shape[1:]).transpose(1, 2)

    band = unpacking.band
    mixed = scores.attend(
        beside(queries), beside(keys), beside(values), band, is_causal=band is None
    )
    back = mixed.transpose(1, 2).flatten(0, 1).flatten(1).index_select(0, unpacking.back)
    return back.view(rows, length, -1)


class FeedForward(nn.Module):
    """SwiGLU feed-forward layer."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = Projection(shape.width, shape.feed_forward, bias=False)
        self.up_proj = Projection(shape.width, shape.feed_forward, bias=False)
        self.down_proj = Projection(shape.feed_forward, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
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
        seen: Seen,
        layer: tuple[Tensor, Tensor] | None,
        used: int,
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary, seen, layer, used)
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
    """A decoder that maps tokens to final-normed hidden states. `logits` maps these states to
    logits."""

    def __init__(
        self,
        shape: ModelShape,
        dtype: Dtype = Dtype.FLOAT32,
        device: torch.device = CPU,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.dtype = DTYPES[dtype]
        self.device = device
        """Device that computes, which may differ from where the weights are kept."""
        self.recomputes = False
        """If True, the activations of each block are computed again for the gradient."""
        with torch.device("meta"):
            self.model = Decoder(shape).to(self.dtype)
            self.lm_head = Projection(shape.width, shape.vocabulary, bias=False)
            if shape.tied:
                self.model.embed_tokens.to(torch.float32)
        self.to_empty(device=device)
        if shape.tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        self._rotary = Rotary(shape, device)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (tokens, vocabulary), in float32, of hidden states (tokens, width).

        States and head of a bfloat16 model hold bfloat16 values. Their products are exact in
        float32, so a CPU that multiplies bfloat16 and adds up in float32 gives the same sums as
        float32 arithmetic, in two fifths of its time: torch is told that it may round both
        factors. (A product of bfloat16 tensors would round the logits as well.) On other
        devices it is a product of float32.
        """
        if self.dtype is torch.float32 or self.device.type != "cpu":
            rows: Tensor = self.lm_head(hidden)
            return rows
        products = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
        precision, products.fp32_precision = products.fp32_precision, "bf16"
        try:
            rows = F.linear(hidden, self.lm_head.weight)
        finally:
            products.fp32_precision = precision
        return rows

    def lay_for_reading(self) -> None:
        """Prepare for reading only, without training: lay float32 weights out column by column,
        as oneDNN's kernels take them.

        So does the head, whose product is a twelfth slower for it than in rows, but which can
        then be taken in partial sums; where it is tied, 4,264 embeddings are read from it in 37
        ms, and scoring them takes nine seconds. In a bfloat16 model all stays as it is: there
        torch uses oneDNN already; so it does on other devices. Names, shapes and values are the
        same, and `load_weights` writes into them as before.
        """
        self.requires_grad_(False)
        is_for_mkldnn = self.dtype is torch.float32 and self.device.type == "cpu"
        for layer in self.modules():
            if is_for_mkldnn and isinstance(layer, Projection):
                layer.weight.data = layer.weight.data.t().contiguous().t()

    def move_to(self, device: torch.device) -> None:
        """Compute on ``device``, to which the weights have been moved already."""
        self.device = device
        self._rotary = Rotary(self.shape, device)

    def like(self, dtype: Dtype, device: torch.device) -> TransformerModel:
        """Return another model of this kind with uninitialised weights."""
        return TransformerModel(self.shape, dtype, device)

    def new_cache(self, rows: int, capacity: int) -> Cache:
        """Return a cache for ``capacity`` tokens in each row."""
        return Cache.empty(self.shape, rows, capacity, self.dtype, self.device)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        seen: Seen = None,
        cache: Cache | None = None,
        *,
        reach: int | None = None,
    ) -> Tensor:
        """Return the hidden states (rows, length, width), in float32, of tokens (rows, length).

        All positions are below ``reach``; who does not say so makes the host wait for them.

        Attention that is causal in a row suits rows padded on the right. With ``cache`` the
        tokens come after those that it holds, and ``seen`` is a mask, unless that is one token
        which sees them all, or the cache is empty.
        """
        if positions is None:
            reach = tokens.shape[1]
            positions = torch.arange(reach, device=self.device).unsqueeze(0)
        elif reach is None:
            reach = int(positions.max()) + 1
        rotary = self._rotary.at(positions, reach)
        seen = self.with_scores(seen)  # once here, and not in every layer
        x = self.model.embed_tokens(tokens).to(self.dtype)
        used = 0 if cache is None else cache.used
        again = self.recomputes and torch.is_grad_enabled()
        for index, block in enumerate(self.model.layers):
            inputs = (x, rotary, seen, None if cache is None else cache.layers[index], used)
            if again:
                x = checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(*inputs)
        if cache is not None:
            cache.used += tokens.shape[1]
        hidden: Tensor = self.model.norm(x)
        return hidden.float()

    def with_scores(self, seen: Seen) -> Seen:
        """Return ``seen`` with each mask in the form that is added to scores."""
        if isinstance(seen, Tensor):
            return self.as_scores(seen)
        if isinstance(seen, RowParts):
            return RowParts(
                [(rows, first, self.as_scores(mask)) for rows, first, mask in seen.parts]
            )
        return seen

    def as_scores(self, seen: Tensor) -> Tensor:
        """Return a mask in the form that is added to scores."""
        unseen = torch.zeros(seen.shape, dtype=self.dtype, device=seen.device)
        return unseen.masked_fill_(seen.logical_not(), -math.inf)

    def initialise(self, seed: int) -> None:
        """Draw weights: embedding and head N(0, 0.02), others N(0, 1/fan-in), outputs over
        sqrt(2 layers); norms 1, biases 0.
        """
        # on the CPU, so that a seed is the same weights on every device
        generator = torch.Generator(device=CPU).manual_seed(seed)
        for name, weight in self.named_parameters():
            shape = tuple(weight.shape)
            if len(shape) < 2:
                put(weight, torch.full(shape, float(not name.endswith("bias")), device=CPU))
                continue
            scale = 0.02 if "embed" in name or "head" in name else 1 / math.sqrt(shape[1])
            if "o_proj" in name or "down_proj" in name:
                scale /= math.sqrt(2 * self.shape.layers)
            drawn = torch.empty(shape, device=CPU).normal_(0.0, scale, generator=generator)
            put(weight, drawn)
