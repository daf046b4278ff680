"""Judges one of our addresses by the answers of peers that were asked to dial it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

MIN_ANSWERS: Final = 2
"""Answers that must agree."""


def judge(answers: Sequence[bool | None]) -> bool | None:
    """Judge one address by the servers' answers.

    Args:
        answers: True or False from each server that tried to dial, None from one that did not.

    Returns:
        True if others can dial the address, False if not, None if that is unknown.
    """
    yes, no = answers.count(True), answers.count(False)
    return None if max(yes, no) < MIN_ANSWERS or yes == no else yes > no
