"""A live node under attack serves an honest newcomer, lives on, and keeps its memory.

The cheapest kinds of `bench.hostile.kinds`, for a second each; all of them, with the gate in
seconds, are ``python -m bench attacks``. Nothing here asserts how long something took: machines
are busy.
"""

from __future__ import annotations

import math

import pytest

from bench.hostile.live import HERE, MOST_MIB, attack_live
from tests.sweeps import swept

CHEAP = ("silent-64", "identify-own-id", "never-read", "empty-rpcs")
"""One for each of the worst findings: the door shut, the node ended, the loop filled twice."""
PATIENCE = 15.0  # seconds for a newcomer, and for what was held: a busy machine is no failure


@pytest.mark.parametrize("name", swept(CHEAP, 1))
async def test_a_node_under_attack_serves_a_newcomer(name: str) -> None:
    outcome = await attack_live(name, HERE, seconds=1.0, settle=PATIENCE, patience=PATIENCE)
    assert outcome.alive, outcome.said
    assert outcome.served, outcome
    assert not outcome.failures, outcome
    assert outcome.mib_most < MOST_MIB, outcome
    assert outcome.freed_after < math.inf, outcome  # at all, before nobody waits any more
    assert not outcome.crashes, outcome
