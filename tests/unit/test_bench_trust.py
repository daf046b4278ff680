"""`python -m bench trust`, an hour of it, holds what docs/trust.md says."""

from __future__ import annotations

from bench.trust import LIARS, Swarm, lines, table


def test_an_hour_of_hostile_populations_holds_each_line() -> None:
    one = Swarm(3)
    one.run(1.0)
    broken = [str(line) for line in lines(one) if not line.holds]
    assert not broken
    assert all(one.sums[kind].made for kind in LIARS)
    assert {judge.kind for judge in one.judges.values() if judge.is_convicted} >= {
        "stamping",
        "refusing",
    }
    assert "fresh cheat" in table(one)
