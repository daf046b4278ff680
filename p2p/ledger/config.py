"""The configuration of a ledger, and of exchanging it."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeConfig:
    """Whether and how often nodes tell each other what the run's officers have signed."""

    is_on: bool = False
    """Off unless the run file says otherwise: all nodes of a run must agree."""
    interval: float = 10.0
    """Seconds between two questions of a node. News is everywhere in a swarm of 200 after some
    five of them, and each costs 100 bytes an officer."""

    def __post_init__(self) -> None:
        if not 0.1 <= self.interval <= 600:
            raise ValueError("nodes exchange ledgers every 0.1 to 600 seconds")
