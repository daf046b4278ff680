"""Every planted bug is found, and what finds it finds nothing where there is no bug."""

from __future__ import annotations

import pytest

from tests.simulation.hunt import hunt
from tests.simulation.mutants import MUTANTS
from tests.sweeps import DEEP

PROMISED = range(1, 201 if DEEP else 21)  # seeds within which each is found
ONE_OF_EACH_STORM = {mutant.storm: name for name, mutant in MUTANTS.items()}.values()


@pytest.mark.parametrize("name", MUTANTS if DEEP else ONE_OF_EACH_STORM)
def test_the_bug_is_found(name: str) -> None:
    """The seed that found the bug last is the first to be tried: other traces, other seeds."""
    mutant = MUTANTS[name]
    assert hunt(mutant.storm, (mutant.seed, *PROMISED), mutant.plant) is not None, (
        f"hunt with more seeds: python -m tests.simulation.hunt '{name}'"
    )
