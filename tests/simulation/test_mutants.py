"""Every planted bug is found, and what finds it finds nothing where there is no bug."""

from __future__ import annotations

import pytest

from tests.simulation.hunt import hunt
from tests.simulation.mutants import MUTANTS

PROMISED = range(1, 201)
"""Seeds within which each is found."""


@pytest.mark.parametrize("name", MUTANTS)
def test_the_bug_is_found(name: str) -> None:
    """At once with the seed that found it last; when traces have changed since, after a
    search.
    """
    mutant = MUTANTS[name]
    assert hunt(mutant.storm, (mutant.seed, *PROMISED), mutant.plant) is not None


def test_there_are_enough_of_them() -> None:
    assert len(MUTANTS) >= 20
    storms = {mutant.storm for mutant in MUTANTS.values()}
    assert storms >= {"dht", "gossip", "ledger", "membership", "policies", "transport"}
