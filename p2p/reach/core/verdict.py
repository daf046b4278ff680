"""Judges an address, and a host, by the answers of peers that tried to dial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Final

from p2p.multiaddr import Multiaddr

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


class Reach(Enum):
    """Reachability of a host."""

    UNKNOWN = "unknown"
    OPEN = "open"
    CLOSED = "closed"


def judge_reach(
    standing: Mapping[Multiaddr, bool | None], *, is_announced: bool, has_public: bool
) -> Reach:
    """Return a host's reach.

    Args:
        standing: AutoNAT's word on each address; None where it is unknown.
        is_announced: Whether the owner says which addresses to announce. The owner knows.
        has_public: Whether the host listens at a public address, or a router maps one to it.
    """
    if is_announced or True in standing.values():
        return Reach.OPEN
    if False in standing.values():
        return Reach.CLOSED
    return Reach.UNKNOWN if has_public else Reach.CLOSED
