"""What lying, selecting, grinding and minting are worth, by the rules of the product."""

from __future__ import annotations

from bench.trust import lines, swarm
from roles.run.core.trust import TrustTerms, leak


def test_no_cheat_pays_and_no_honest_worker_is_banned() -> None:
    """250 machines, 20 validators, six hours: every line of what trust promises."""
    one = swarm(TrustTerms(), seed=1)
    one.run(hours=6)
    assert [str(line) for line in lines(one) if not line.holds] == []
    assert sum(each.leaked for each in one.sums.values()) > 100, "turncoats lie, and some pass"
    assert sum(1 + each.names for each in one.machines if each.kind == "minting") > 250


def test_without_probation_more_leaks_than_is_stated() -> None:
    """Of a name that costs nothing there is always another one."""
    one = swarm(TrustTerms(probation=1), seed=1)
    one.run(hours=3)
    leaked = sum(each.leaked for each in one.sums.values())
    assert leaked / sum(each.learnt for each in one.sums.values()) > leak(TrustTerms(), 0.06)
