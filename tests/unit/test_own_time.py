"""A core's own time: the world's, without that for which the process was stopped."""

from __future__ import annotations

import math

from hypothesis import given, strategies as st

from p2p.own_time import STALL, OwnTime

SECONDS = st.floats(0, 1e6, allow_subnormal=False)


@given(st.lists(st.tuples(SECONDS, SECONDS, st.booleans()), max_size=30))
def test_own_time_counts_all_but_the_stops(steps: list[tuple[float, float, bool]]) -> None:
    """It never goes back, keeps up with the world where no deadline is missed, and an event
    that comes at its deadline finds that it is due."""
    resumed: list[float] = []
    own, now, lived = OwnTime(resumed.append), 100.0, 0.0
    before = own.at(now, math.inf)
    for wait, more, is_stopped in steps:
        due = own.deadline(before + wait)
        assert due >= now - 1e-6
        now = due + STALL + more + 1 if is_stopped else due + min(more, STALL / 2)
        stops = len(resumed)
        at = own.at(now, before + wait)
        assert len(resumed) - stops == is_stopped
        lived += 0 if is_stopped else min(more, STALL / 2) + wait
        assert at == before if is_stopped else at >= before + wait
        assert abs(at - 100 - lived) < 1e-6 * max(1.0, now)
        before = at
