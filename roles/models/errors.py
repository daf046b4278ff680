"""Errors about the folder of a model."""

from __future__ import annotations

from typing import Final

from p2p.errors import ShoalError

NO_TEMPLATE: Final = (
    "this model has no chat template (chat_template.jinja, or chat_template in"
    " tokenizer_config.json): take the instruction-tuned sibling of a base model"
)
"""Error about a model that cannot be asked anything."""


class BadModel(ShoalError):
    """A model's folder cannot be used. The message names the file, the fault and, if possible,
    the remedy."""
