"""What changed between two pictures, as a JSON merge patch (RFC 7386)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The patch that makes ``new`` of ``old``: tables are gone into, all else is replaced, and
    what is gone is null. Pictures hold no null of their own."""
    patch: dict[str, Any] = {key: None for key in old if key not in new}
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            inner = difference(before, value)
            if inner:
                patch[key] = inner
        elif value != before:
            patch[key] = value
    return patch


def apply(document: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """``document`` with the changes of ``patch``."""
    changed = {key: value for key, value in document.items() if patch.get(key, 0) is not None}
    for key, value in patch.items():
        before = changed.get(key)
        if isinstance(value, Mapping):
            changed[key] = apply(before if isinstance(before, Mapping) else {}, value)
        elif value is not None:
            changed[key] = value
    return changed
