"""What a push and a pull show on a terminal."""

from __future__ import annotations

from p2p.cast.view import CastState, _done, _drawn, _line, _rate, _swarm


def state(**fields: int) -> CastState:
    defaults = {"total": 100, "here": 100, "rate": 0.0, "given": 0, "members": 0, "whole": 0}
    return CastState(**{**defaults, "asked": 0, **fields})  # type: ignore[arg-type]


def test_the_bar_of_a_push_counts_machines_and_that_of_a_pull_bytes() -> None:
    assert _drawn(state()) == (None, 0)
    assert _drawn(state(members=4, whole=1)) == (100, 25)
    assert _drawn(state(here=40, members=3, whole=1)) == (100, 40)
    assert _done(state(whole=3)) == "3 of 3 machines", "they have left since"
    assert _swarm(state()) == "no other machine yet"


def test_a_time_is_foretold_while_bytes_come_and_a_cause_is_named_while_none_do() -> None:
    pull = CastState(total=100_000_000, here=40_000_000, rate=2e6, members=1)
    assert _rate(pull) == "2.0 MB/s  0:00:30 left  "
    pull.update(rate=1.0)
    assert _rate(pull) == "0.0 MB/s  ", "what is nearly still ends at no time"
    pull.update(waits_for="waits for the pusher, which is away")
    assert _line(pull) == "40%  waits for the pusher, which is away"
