"""The configuration of a ledger."""

from __future__ import annotations

from dataclasses import dataclass

from p2p.wire import MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerConfig:
    """How a node's log lies on its disk."""

    segment_bytes: int = 4 * MIB
    """A segment is closed when it is longer. Recovery rewrites at most one of them: 4 MiB, some
    50 ms of disk."""

    def __post_init__(self) -> None:
        if self.segment_bytes < 1:
            raise ValueError("a segment holds at least one entry")
