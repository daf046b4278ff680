"""Issue 9: a live node under attack serves an honest newcomer, lives on, and keeps its memory.

The cheapest kinds of `tests.attacks.kinds`, for a second and a half each; all of them, with the gate in
seconds, are ``python -m bench attacks``. Nothing here asserts how long something took: machines are busy.
"""

from __future__ import annotations

import pytest

from tests.attacks.kinds import KINDS
from tests.attacks.live import HERE, MOST_MIB, attack_live

CHEAP = ("silent-64", "identify-own-id", "syn-rst-syn", "empty-rpcs")
"""One for each of the worst findings: the door shut, the node ended, the streams used up, the loop filled."""


def test_there_are_more_kinds_than_the_reviewers_keep() -> None:
    assert len(KINDS) >= 60
    assert all(kind.about for kind in KINDS.values())


@pytest.mark.parametrize("name", CHEAP)
async def test_a_node_under_attack_serves_a_newcomer(name: str) -> None:
    outcome = await attack_live(name, HERE, seconds=1.5, settle=0.0)
    assert outcome.alive, outcome.said
    assert outcome.failures < len(outcome.served), outcome
    assert outcome.mib_most < MOST_MIB, outcome
    assert not outcome.crashes, outcome
