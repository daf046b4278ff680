"""Judges an address of ours by what peers that were asked to dial it say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

MIN_ANSWERS: Final = 2
"""Answers that must agree."""


def judge(answers: Sequence[bool | None]) -> bool | None:
    """Return whether an address can be dialled, by what servers say; None if that is unknown.

    None is a server that did not try.
    """
    yes, no = answers.count(True), answers.count(False)
    return None if max(yes, no) < MIN_ANSWERS or yes == no else yes > no
