"""Models of other architectures: layers of transformers, attention of ours.

Theory of operation
-------------------
transformers lets a program bring its own attention under a name. Ours (`_attend`) is given
queries, keys and values of a layer, rotated and normed as the architecture wants it, and goes
on as our decoder does: it stores them in the engine's cache and mixes what each position sees.
So sampler, scorer and learner work with such a model as with any other, packed rows and rows of
different lengths included, and transformers makes neither masks nor caches.

What a layer says of its scores (scale, soft cap, window) comes along with the call. Logits are
what the architecture makes of hidden states (a scale, a soft cap): its own class is called with
a body that returns the states it is given.

Weights are float32 or bfloat16 as in `TransformerModel`, and so is the head. ``config.json`` is
that of the folder that is loaded first; its sizes must be those that the run's owner signed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from p2p.errors import BadMessage, MissingDependency
from roles.contract.core.shape import Dtype, ModelShape
from roles.engines.base import EngineError
from roles.engines.torch.model import (
    DTYPES,
    Cache,
    Projection,
    RowParts,
    Scores,
    Seen,
    TransformerModel,
    Unpacking,
    mix,
    store,
)
from roles.models.bundle import CONFIG
from roles.models.config import HOSTED, MAX_CONFIG, read_config_untrusted
from roles.models.errors import BadModel
from roles.models.files import json_object_untrusted, read_bounded

_NAME: Final = "shoal"
"""Name of our attention among transformers' attention functions."""
_UNUSED: Final = (
    *("auto_map", "attn_implementation", "experts_implementation"),
    *("return_dict", "output_attentions", "output_hidden_states"),
)
"""Keys of ``config.json`` that choose code or the form of outputs. Other such keys begin with
an underscore."""
_RENAMED: Final = {"GPTNeoXForCausalLM": ("lm_head.", "embed_out.")}
"""Prefixes that transformers renames when it reads a folder: its own, and that in the
folder."""


def new_model(
    shape: ModelShape, dtype: Dtype, device: torch.device, folder: Path | None
) -> TransformerModel:
    """Return a model of this shape without weights.

    Args:
        folder: Where ``config.json`` lies, of a shape that transformers computes.
    """
    if not shape.architecture:
        return TransformerModel(shape, dtype, device)
    if folder is None or not folder.is_dir():
        raise EngineError(
            f"a {shape.architecture} is computed by its {CONFIG}, and there is no folder with"
            " one: its run begins with a base"
        )
    try:
        data = read_bounded(folder / CONFIG, MAX_CONFIG)
        read_config_untrusted(data)  # refuses what must not come to transformers
        table = json_object_untrusted(data)
    except (BadMessage, BadModel) as error:
        raise EngineError(f"{folder / CONFIG} cannot be used: {error}") from None
    return HostedModel(shape, dtype, device, table)


@dataclass(slots=True)
class _Pass:
    """The state of the current pass that attention needs."""

    model: TransformerModel
    cache: Cache | None = None
    positions: Tensor = field(default_factory=lambda: torch.empty(0))
    seen: Seen = None
    reach: int = 0
    within: dict[int | None, Seen] = field(default_factory=dict)
    """Maps each window to what positions see, as a mask that is added to scores."""

    @property
    def used(self) -> int:
        return 0 if self.cache is None else self.cache.used

    def seen_within(self, window: int | None) -> Seen:
        """Return the mask of positions that see only the last ``window`` positions, themselves
        included."""
        if window is not None and self.reach <= window:
            window = None
        if window not in self.within:
            seen = self.seen if window is None else self._narrowed(window)
            self.within[window] = self.model.with_scores(seen)
        return self.within[window]

    def _narrowed(self, window: int) -> Seen:
        seen, used, length = self.seen, self.used, self.positions.shape[1]
        device = self.positions.device
        if isinstance(seen, RowParts):
            columns = torch.arange(used + 1, device=device)
            near = columns > used - window
            return RowParts([(n, first, mask & near[first:]) for n, first, mask in seen.parts])
        if isinstance(seen, Unpacking):
            longest = seen.places.shape[1]
            band = torch.ones(longest, longest, dtype=torch.bool, device=device)
            return replace(seen, band=self.model.as_scores(band.tril().triu(1 - window)))
        first = self.positions[:, :1]
        # the columns of a cache follow each other, up to the first position that is new
        past = torch.arange(-used, 0, device=device) + first
        keys = torch.cat([past, self.positions], 1)
        near = (self.positions[:, :, None] - keys[:, None, :] < window)[:, None]
        if seen is None:
            seen = torch.ones(length, used + length, dtype=torch.bool, device=device).tril(used)
        return seen & near


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attend by transformers' interface: (rows, heads, length, head width), with fewer heads of
    keys and values, to (rows, length, heads, head width)."""
    current: _Pass = module._shoal_pass  # type: ignore[assignment]
    rows, heads, length, width = query.shape
    if current.cache is not None:
        layer = current.cache.layers[module.layer_idx]  # type: ignore[index]
        key, value = store(layer, current.used, key, value)
    seen = current.seen_within(sliding_window)
    mixed = mix(query, key, value, seen, Scores(scaling, softcap))
    return mixed.view(rows, length, heads, width), None


class HostedModel(TransformerModel):
    """A model computed by modules of transformers: tokens to final-normed hidden states, and
    those to logits."""

    def __init__(
        self, shape: ModelShape, dtype: Dtype, device: torch.device, table: dict[str, Any]
    ) -> None:
        nn.Module.__init__(self)
        self.shape, self.dtype, self.device = shape, DTYPES[dtype], device
        self.recomputes = False
        self._table = table
        self.causal = _open_causal(shape, table)
        self._renamed = _RENAMED.get(shape.architecture, ("", ""))
        head = self.causal.get_output_embeddings()
        for module in self.causal.modules():
            if type(module) is nn.Linear:
                module.__class__ = Projection
            for weight in module.parameters(recurse=False):
                is_float32 = module is head or weight is head.weight
                kind = torch.float32 if is_float32 else self.dtype
                if weight.dtype is not kind or weight.device != device:
                    weight.data = torch.empty(weight.shape, dtype=kind, device=device)
        self.causal.to(device)  # numbers that follow from the configuration
        self._pass = _Pass(self)
        for module in self.causal.modules():
            if hasattr(module, "layer_idx"):
                module._shoal_pass = self._pass
        self._body = (self.causal.base_model,)  # a tuple: each weight is there once
        self._head = (_without_body(self.causal),)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the weights under the names that they have in a folder."""
        own, stored = self._renamed
        for name, weight in self.causal.named_parameters(prefix, recurse, remove_duplicate):
            yield name.replace(own, stored, 1) if own and name.startswith(own) else name, weight

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (tokens, vocabulary), in float32, of hidden states (tokens,
        width)."""
        rows: Tensor = self._head[0](inputs_embeds=hidden[None], use_cache=False).logits[0]
        return rows

    def move_to(self, device: torch.device) -> None:
        """Raise an error: several processes cannot share such a model."""
        raise EngineError(f"a {self.shape.architecture} cannot be moved")

    def like(self, dtype: Dtype, device: torch.device) -> TransformerModel:
        return HostedModel(self.shape, dtype, device, self._table)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        seen: Seen = None,
        cache: Cache | None = None,
        *,
        reach: int | None = None,
    ) -> Tensor:
        rows, length = tokens.shape
        if positions is None:
            reach = length
            positions = torch.arange(reach, device=self.device).unsqueeze(0)
        elif reach is None:
            reach = int(positions.max()) + 1
        current = self._pass
        current.cache, current.positions, current.seen = cache, positions, seen
        current.reach, current.within = reach, {}
        embedded = self.causal.get_input_embeddings()(tokens).to(self.dtype)
        hidden: Tensor = self._body[0](
            inputs_embeds=embedded, position_ids=positions.expand(rows, -1), use_cache=False
        ).last_hidden_state
        if cache is not None:
            cache.used += length
        current.cache, current.seen, current.within = None, None, {}
        return hidden.float()


class _Given(nn.Module):
    """A body that returns the states it is given."""

    def forward(self, *_: object, inputs_embeds: Tensor, **__: object) -> object:
        """Return the given states in the form in which transformers' bodies do."""
        from transformers.modeling_outputs import BaseModelOutputWithPast

        return BaseModelOutputWithPast(last_hidden_state=inputs_embeds)


def _without_body(causal: Any) -> Any:
    head = copy.copy(causal)
    head._modules = {**causal._modules, causal.base_model_prefix: _Given()}
    return head


def _open_causal(shape: ModelShape, table: dict[str, Any]) -> Any:
    """Return transformers' model, with weights that nobody has written."""
    try:
        from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
        from transformers.initialization import no_init_weights
        from transformers.utils import logging
    except ImportError as error:
        raise MissingDependency(
            f"this run's model is a {shape.architecture}, which transformers computes: pip"
            f" install 'shoal[transformers]' ({error})"
        ) from None
    logging.set_verbosity_error()
    AttentionInterface.register(_NAME, _attend)
    kept = {
        key: value
        for key, value in table.items()
        if not key.startswith("_") and key not in (*_UNUSED, "model_type", "architectures")
    }
    try:
        config = AutoConfig.for_model(HOSTED[shape.architecture].model_type, **kept)
        config.tie_word_embeddings = shape.tied
        _check_sizes(shape, config)
        with no_init_weights():
            causal = AutoModelForCausalLM.from_config(
                config, attn_implementation=_NAME, dtype=torch.float32, trust_remote_code=False
            )
    except Exception as error:  # whatever a stranger's file brings about there
        raise EngineError(
            f"transformers makes no {shape.architecture} of its {CONFIG}: {error}"
        ) from error
    if type(causal).__name__ != shape.architecture:
        raise EngineError(f"transformers makes a {type(causal).__name__} of the {CONFIG}")
    causal.tie_weights()
    return causal.eval()


def _check_sizes(shape: ModelShape, config: Any) -> None:
    """Raise `ValueError` unless the sizes in the run file, from which memory follows, equal
    those in ``config.json``."""
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    found = {
        "vocabulary": config.vocab_size,
        "width": config.hidden_size,
        "layers": config.num_hidden_layers,
        "query_heads": heads,
        "key_heads": key_heads if HOSTED[shape.architecture].is_grouped else heads,
        "head_width": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "feed_forward": config.intermediate_size,
    }
    for name, size in found.items():
        if size != getattr(shape, name):
            raise ValueError(f"{name} is {size!r:.40} there, {getattr(shape, name)} in the run")
