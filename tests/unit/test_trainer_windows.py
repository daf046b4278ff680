"""What a trainer makes of windows: silence, bad luck, and what is left out."""

from __future__ import annotations

from typing import Any

import pytest

from p2p.identity import PeerId
from p2p.shardcast.manifest import PolicyVersion
from proofs.checks import Verdict
from roles.protocol.core.lots import UNIT, SignedWindow, WitnessedWindow
from roles.trainer.core import windows
from roles.trainer.core.windows import (
    BLOCKS,
    DUE,
    MAX_GUESTS,
    MAX_OF_WORKER,
    MAX_WINDOWS,
    PROMPT,
    Bench,
    Ending,
    WindowBook,
    WindowRecord,
    WindowState,
)
from tests.unit.test_lots import (
    DELAY,
    KEYS,
    VALIDATORS,
    WITNESS,
    WORKER,
    heard_up_to,
    window,
)

FALLS = heard_up_to(window().link + DELAY)
LAG = 2
AWAY: tuple[PeerId, ...] = ()


BENCH = Bench(VALIDATORS, 2)


def opened(
    book: WindowBook, share: float = 0.5, first: int = 32, **changes: Any
) -> WindowRecord:
    """A window that the book knows, whose lot falls at second 100, when all judges have been
    there for long."""
    signed = SignedWindow.sign(window(first=first, **changes), WORKER)
    record = WindowRecord(WitnessedWindow.sign(signed, share, WITNESS), True, 90.0)
    book.add(record)
    book.note_here(VALIDATORS, 0.0)
    book.fall(heard_up_to(window().link), 95.0)
    assert record.lot is None
    book.fall(FALLS, 100.0)
    assert record.lot is not None
    assert 0 < len(record.drawn) <= len(window().places)
    return record


def endings(book: WindowBook, newest: int, now: float) -> list[Ending]:
    return [one for _, one in book.take_overdue(PolicyVersion(newest), LAG, BENCH, now)]


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
        assert not book.is_blocked(record, BENCH, 100 + BLOCKS + 1)
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


def test_a_judge_that_is_away_or_hides_what_it_got_costs_nobody_its_standing() -> None:
    """A worker whose places lay with a dead or hostile validator was a newcomer again."""
    record = opened(book := WindowBook())
    book.note_here([], 101.0)
    assert endings(book, 6, 10_000.0) == [Ending.NOTHING], "nobody was there"
    record = opened(book)
    judges = {one for place in record.drawn for one in record.judges(place, VALIDATORS, 2)}
    book.note_here([one for one in VALIDATORS if one not in judges], 101.0)
    book.note_here(VALIDATORS, 200.0)
    assert not book.is_hidden(record, BENCH, 200 + PROMPT)
    assert endings(book, 6, 200 + PROMPT) == [Ending.NOTHING], "they have just come"
    record = opened(book)
    for place in record.drawn:
        _, speaks = record.judges(place, VALIDATORS, 2)
        record.verdicts[place, speaks] = Verdict.INCONCLUSIVE
    assert record.why_unsettled(VALIDATORS, 2, AWAY)
    assert not book.is_blocked(opened(book, first=64), BENCH, 10_000.0)
    book.forget(next(one for one in book.of(WORKER.peer_id) if one is not record))
    del record.verdicts[place, speaks]
    assert book.is_hidden(record, BENCH, 10_000.0), "one place was shown to neither"
    assert endings(book, 6, 10_000.0) == [Ending.SILENT]


def test_a_witness_that_signs_twice_ends_nobodys_standing() -> None:
    """It refuses a window as late, its worker commits anew, and it tells of the first."""
    opened(book := WindowBook(), link=4)
    record = opened(book)
    assert not book.is_blocked(record, BENCH, 100.0)
    assert book.is_blocked(record, BENCH, 100 + BLOCKS + 1)
    record.state = WindowState.SETTLED
    assert endings(book, 6, 10_000.0) == [Ending.NOTHING, Ending.NOTHING]
    opened(book)
    opened(book, first=64).state = WindowState.SETTLED
    assert endings(book, 6, 10_000.0) == [Ending.SILENT, Ending.NOTHING]


def test_the_same_place_with_other_contents_excuses_nothing() -> None:
    """Two windows over the same places, of which the one is shown that no lie is drawn in."""
    opened(book := WindowBook())
    others = tuple(bytes([place + 100]) * 32 for place in range(16))
    opened(book, contents=others).state = WindowState.SETTLED
    assert endings(book, 6, 10_000.0) == [Ending.SILENT, Ending.NOTHING]


def test_windows_of_others_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """To look for doubles among all windows took a second for each link."""
    book, looked = WindowBook(), []
    plain = WindowRecord.contents.fget
    assert plain is not None
    monkeypatch.setattr(
        WindowRecord, "contents", property(lambda one: (looked.append(one), plain(one))[1])
    )
    for number in range(60):
        node = KEYS.signer(f"worker-{number}")
        signed = SignedWindow.sign(window(node=node.peer_id), node)
        record = WindowRecord(WitnessedWindow.sign(signed, 0.5, WITNESS), True, 90.0)
        record.state = WindowState.SETTLED if number % 2 else WindowState.OPEN
        book.add(record)
    book.note_here(VALIDATORS, 0.0)
    book.fall(FALLS, 100.0)
    assert Ending.SILENT in endings(book, 6, 10_000.0)
    assert len(looked) <= 60
    assert len(book) == 0
    assert not book.of(node.peer_id)


def guest(book: WindowBook, number: int, *, is_proven: bool = False) -> bool:
    """Whether a window of worker ``number`` found room."""
    signer = KEYS.signer(f"guest-{number}")
    if not book.has_room(signer.peer_id, is_proven=is_proven):
        return False
    signed = SignedWindow(window(node=signer.peer_id, first=len(book)), b"")
    record = WindowRecord(WitnessedWindow(signed, WITNESS.peer_id, UNIT, b""), is_proven, 0.0)
    book.add(record)
    return True


def test_minted_names_leave_half_of_the_room_to_workers_in_standing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thousand names filled the book, and nobody's windows were settled any more."""
    monkeypatch.setattr(windows, "MAX_WINDOWS", 40)
    monkeypatch.setattr(windows, "MAX_GUESTS", 20)
    monkeypatch.setattr(windows, "MAX_OF_WORKER", 5)
    assert MAX_WINDOWS == 2 * MAX_GUESTS > 100 * MAX_OF_WORKER
    book = WindowBook()
    assert all(guest(book, number) for number in range(100)), "the newest newcomer has room"
    assert len(book) == 20
    assert [guest(book, 100, is_proven=True) for _ in range(6)] == 5 * [True] + [False]
    assert all(guest(book, 101 + number // 5, is_proven=True) for number in range(15))
    assert not guest(book, 200, is_proven=True), "it is full of work in standing"
    for record in [*book.of(KEYS.signer("guest-99").peer_id)]:
        record.state = WindowState.SETTLED
    book.forget(next(iter(book.of(KEYS.signer("guest-100").peer_id))))
    assert guest(book, 300)
    assert book.of(KEYS.signer("guest-99").peer_id), "what was settled once is not again"
    assert not book.of(KEYS.signer("guest-80").peer_id)
