"""What a push and a pull show on a terminal."""

from __future__ import annotations

from p2p.cast.view import CastState, _done, _drawn, _swarm


def state(**fields: int) -> CastState:
    defaults = {"total": 100, "here": 100, "rate": 0.0, "given": 0, "members": 0, "whole": 0}
    return CastState(**{**defaults, "asked": 0, **fields})  # type: ignore[arg-type]


def test_the_bar_of_a_push_tells_how_many_machines_have_it() -> None:
    assert _drawn(state()) == (None, 0)
    assert _drawn(state(members=4, whole=1)) == (100, 25)
    assert _drawn(state(asked=3, whole=3, members=1)) == (100, 100)


def test_the_bar_of_a_pull_tells_how_much_is_here() -> None:
    assert _drawn(state(here=40, members=3, whole=1)) == (100, 40)
    assert _drawn(state(total=0, here=0)) == (None, 0)


def test_never_are_more_machines_whole_than_there_are() -> None:
    assert _done(state(whole=3)) == "3 of 3 machines"  # they have left since
    assert _done(state(here=40)) == "0.0 of 0.0 MB"
    assert _swarm(state()) == "no other machine yet"
