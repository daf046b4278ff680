"""Planted bugs: each must be found by a storm, so that a real one of its kind would be.

A mutant patches one thing of one production class or module for the length of a block.
`Mutant.seed` is the seed that found it when it was last hunted; tests/simulation/hunt.py looks
for it, and shrinks what it finds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final
from unittest.mock import patch

from tests.simulation.mutants import dht, gossip, ledger, membership, outbox, policies


@dataclass(frozen=True, slots=True)
class Mutant:
    """One planted bug."""

    storm: str  # which storm is to find it

    seed: int  # the first of its seeds that did

    target: Any  # a class or a module

    method: str
    instead: Callable[..., Any]  # what the method does with the bug

    def plant(self) -> AbstractContextManager[object]:
        """The bug is there for the length of the block."""
        return patch.object(self.target, self.method, self.instead)


MUTANTS: Final[Mapping[str, Mutant]] = {
    name: Mutant(storm, seed, *change)
    for storm, module in (
        ("membership", membership),
        ("policies", policies),
        ("gossip", gossip),
        ("ledger", ledger),
        ("dht", dht),
        ("transport", outbox),
    )
    for name, (seed, *change) in module.BUGS.items()
}
