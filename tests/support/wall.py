"""A world whose wall clock the test sets."""

from __future__ import annotations

from pathlib import Path

from p2p.identity import KeyPair
from p2p.machine import RealWorld

ENDS = 1_900_000_000


class Wall(RealWorld):
    def __init__(self, folder: Path, at: float = ENDS - 1000) -> None:
        super().__init__(KeyPair(b"k" * 32), folder)
        self.at = at

    def wall(self) -> float:
        return self.at
