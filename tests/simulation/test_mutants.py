"""Every planted bug is found, and what finds it finds nothing where there is no bug."""

from __future__ import annotations

from functools import cache

import pytest

from tests.simulation.hunt import play
from tests.simulation.mutants import MUTANTS
from tests.simulation.storms import load_storm


@cache
def without_bug(storm: str, seed: int) -> str | None:
    return play(load_storm(storm), seed).why


@pytest.mark.parametrize("name", MUTANTS)
def test_the_bug_is_found(name: str) -> None:
    mutant = MUTANTS[name]
    assert play(load_storm(mutant.storm), mutant.seed, mutant.plant).why is not None
    assert without_bug(mutant.storm, mutant.seed) is None


def test_there_are_enough_of_them() -> None:
    assert len(MUTANTS) >= 10
    assert {mutant.storm for mutant in MUTANTS.values()} >= {"gossip", "ledger", "membership", "policies"}
