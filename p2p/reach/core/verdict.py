"""Judges whether a host can be dialled from outside, from the results for its addresses."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from p2p.multiaddr import Multiaddr


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
