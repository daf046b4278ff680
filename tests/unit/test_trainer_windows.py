"""What a trainer makes of windows: silence, bad luck, and what is left out."""

from __future__ import annotations

import pytest

from p2p.identity import PeerId
from p2p.shardcast.manifest import PolicyVersion
from proofs.checks import Verdict
from roles.protocol.core.lots import SignedWindow, WitnessedWindow
from roles.trainer.core.windows import (
    BLOCKS,
    DUE,
    PROMPT,
    Ending,
    WindowBook,
    WindowRecord,
    WindowState,
)
from tests.unit.test_lots import (
    DELAY,
    VALIDATORS,
    WITNESS,
    WORKER,
    heard_up_to,
    window,
)

FALLS = heard_up_to(window().link + DELAY)
LAG = 2
AWAY: tuple[PeerId, ...] = ()


def opened(book: WindowBook, share: float = 0.5, first: int = 32) -> WindowRecord:
    """A window that the book knows, whose lot falls at second 100."""
    signed = SignedWindow.sign(window(first=first), WORKER)
    record = WindowRecord(WitnessedWindow.sign(signed, share, WITNESS), True, 90.0)
    book.add(record)
    book.fall(heard_up_to(window().link), 95.0)
    assert record.lot is None
    book.fall(FALLS, 100.0)
    assert record.lot is not None
    assert 0 < len(record.drawn) <= len(window().places)
    return record


def endings(book: WindowBook, newest: int, now: float) -> list[Ending]:
    return [one for _, one in book.take_overdue(PolicyVersion(newest), LAG, now)]


def test_a_window_is_settled_by_all_judges_that_are_there_and_one_at_least() -> None:
    record = opened(WindowBook())
    for place in record.drawn:
        first, _ = record.judges(place, VALIDATORS, 2)
        assert record.why_unsettled(VALIDATORS, 2, VALIDATORS).endswith(f"on place {place}")
        record.verdicts[place, first] = Verdict.ACCEPTED
    _, silent = record.judges(record.drawn[0], VALIDATORS, 2)
    assert str(silent) in record.why_unsettled(VALIDATORS, 2, AWAY)
    assert not record.why_unsettled(VALIDATORS, 2, VALIDATORS)
    assert not record.doubtful
    record.verdicts = {key: Verdict.INCONCLUSIVE for key in record.verdicts}
    assert record.doubtful


def test_turns_of_a_judge_that_is_passed_over_fall_to_another() -> None:
    """A window waited for two judges of which both were away, until its worker lost its
    standing."""
    record = opened(WindowBook())
    place = record.drawn[0]
    first, second = record.judges(place, VALIDATORS, 2)
    now = record.judges(place, VALIDATORS, 2, passed=[first, second])
    assert not {first, second} & {*now}
    assert len(now) == 2
    assert record.judges(place, VALIDATORS, 2, passed=VALIDATORS) == [first, second]
    for one in record.drawn:
        for judge in record.judges(one, VALIDATORS, 2, passed=[second]):
            record.verdicts[one, judge] = Verdict.ACCEPTED
    assert not record.why_unsettled(VALIDATORS, 2, [second], [second])
    assert str(second) in record.why_unsettled(VALIDATORS, 2, AWAY)


def test_windows_that_wait_for_a_judge_neither_block_each_other_nor_end_standing() -> None:
    """A silent validator had each window of a worker wait for all others, and in the end it was
    the worker that was to blame."""
    book = WindowBook()
    both = opened(book), opened(book, first=48)
    for record in both:
        for place in record.drawn:
            record.verdicts[place, record.judges(place, VALIDATORS, 2)[0]] = Verdict.ACCEPTED
    for record in both:
        assert not book.is_blocked(record, 100 + BLOCKS + 1)
        assert record.why_unsettled(VALIDATORS, 2, AWAY)
    assert endings(book, 5, 100 + DUE + 1) == [Ending.NOTHING, Ending.NOTHING]


@pytest.mark.parametrize(
    ("newest", "now", "ending"),
    [
        (5, 100 + DUE, []),
        (5, 100 + DUE + 1, [Ending.SILENT]),
        (6, 100 + PROMPT + 1, [Ending.SILENT]),
        (6, 100 + PROMPT - 1, [Ending.NOTHING]),
    ],
)
def test_a_drawn_place_that_nobody_was_shown_is_a_lie_unless_there_was_no_time(
    newest: int, now: float, ending: list[Ending]
) -> None:
    """A worker that sees what was drawn could keep it back until its policy was stale."""
    opened(book := WindowBook())
    assert endings(book, newest, now) == ending
    assert len(book) == (0 if ending else 1)


def test_places_that_are_owed_and_never_come_are_told() -> None:
    """Who brings only what earns much selects."""
    record = opened(book := WindowBook())
    record.state, record.settled_at = WindowState.SETTLED, 110.0
    record.owed = {35: None}
    assert endings(book, 5, 10_000.0) == []
    assert endings(book, 6, 110 + PROMPT + 1) == [Ending.LEFT_OUT]
    record = opened(book)
    record.state, record.settled_at = WindowState.SETTLED, 110.0
    assert endings(book, 6, 10_000.0) == [Ending.NOTHING]


def test_a_witness_that_signs_twice_ends_nobodys_standing() -> None:
    """It refuses a window as late, its worker commits anew, and it tells of the first."""
    opened(book := WindowBook())
    record = opened(book, first=40)
    assert not book.is_blocked(record, 100.0)
    assert book.is_blocked(record, 100 + BLOCKS + 1)
    record.state = WindowState.SETTLED
    assert endings(book, 6, 10_000.0) == [Ending.NOTHING, Ending.NOTHING]
    opened(book)
    opened(book, first=64).state = WindowState.SETTLED
    assert endings(book, 6, 10_000.0) == [Ending.SILENT, Ending.NOTHING]
