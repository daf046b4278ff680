"""What people see of a node: it fits, it is true, and a machine gets JSON and nothing else."""

from __future__ import annotations

import io
import logging
import sys
import unicodedata
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Final

import pytest

from p2p.node.process import Warnings
from p2p.node.role import Fact, Progress
from p2p.node.screen import Terminal, block, facts_of as facts_shown, height, line
from proofs.checks import Verdict
from roles.inference.status import Doing, InferenceCounts, Life, Rate, facts_of, life_of
from roles.protocol.core.account import Account, Fates, TrainerDoing
from roles.shared.reasons import MAX_REASONS, OTHER
from roles.trainer.account import Row
from roles.trainer.status import now_of as trainer_now

LIFE: Final = Life(
    made=13_312, accepted=13_056, rejected=256, learnt=10_112, no_spread=2048, stale=512,
    left_over=256, waiting=128, swarm_accepted=310_857, share=0.042,
)  # fmt: skip


def worker(now: str, life: Life = LIFE, speed: float = 1234.0) -> Progress:
    counts = InferenceCounts(doing=Doing.DRAWS, reasons={"activation exponents differ": 2})
    return Progress(facts=tuple(facts_of(now, speed, life, counts)))


HUGE: Final = Life(
    made=9_876_543_210, accepted=9_876_543_210, rejected=10**9, learnt=9_000_000_000,
    no_spread=10**8, stale=10**8, left_over=10**8, waiting=10**8, swarm_accepted=10**11,
    share=0.0987,
)  # fmt: skip
SCENES: Final = {
    "bare": facts_shown(policy="none yet", peers=0),
    "warm-up": facts_shown(
        policy="none yet",
        peers=3,
        roles=(worker("waiting for the first policy: the trainer warms up", Life(), 0.0),),
    ),
    "worker": facts_shown(
        policy="17, 43% of 18 (the swarm has 18)",
        peers=9,
        roles=(worker("the trainer is away since 14:02; your work is kept"),),
    ),
    "huge": facts_shown(
        policy="123456, 43% of 123457 (the swarm has 123457)",
        peers=12_345,
        roles=(worker("drawing under policy 123456", HUGE, 123_456.0),),
    ),
    "wide": facts_shown(
        policy="3",
        peers=1,
        roles=(
            Progress(
                facts=(Fact("refused", "\U0001f41f\u9b5a\uff21e\u0301\u0301\u200d" * 20),)
            ),
        ),
    ),
    "foreign": facts_shown(
        policy="3", peers=1, roles=(Progress(facts=(Fact("now", "“Größe” → ≤ 3 … oder"),)),)
    ),
}


@pytest.mark.parametrize(
    ("columns", "rows", "encoding"),
    [(c, r, e) for c in (10, 24, 40, 80, 200) for r in (3, 24) for e in ("utf-8", "ascii")],
)
@pytest.mark.parametrize("name", SCENES)
def test_a_screen_fits_its_terminal(name: str, columns: int, rows: int, encoding: str) -> None:
    """The line was cut at 120 columns, and a wrapped one cannot be redrawn."""
    lines = block(SCENES[name], columns, rows, encoding)
    assert 0 < len(lines) < rows
    for one in lines:  # signs of two columns, or of none, would add rows
        wide = sum(unicodedata.east_asian_width(sign) in "WF" for sign in one)
        assert len(one) + wide <= min(columns - 1, 80)
        assert not any(map(unicodedata.combining, one))
        assert one.isprintable(), "nothing moves a cursor"
    "\n".join(lines).encode(encoding)
    if columns >= 80 and rows >= 24:
        assert all(fact.label in "\n".join(lines) for fact in SCENES[name])
        assert not any(one.endswith(" ...") for one in lines), "nothing is left out"


def test_a_journal_gets_one_line_that_no_width_cuts() -> None:
    said = line(SCENES["worker"], "ascii")
    assert "\n" not in said
    assert "the trainer is away since 14:02; your work is kept" in said
    assert "not from 2,048 scored alike, 512 too old, 256 left over, 128 waiting" in said


def test_a_screen_is_redrawn_in_place_and_what_is_said_meanwhile_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A warning was written into the live line."""
    out = Tty()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    terminal = Terminal()
    assert terminal.is_redrawn
    warnings = Warnings(terminal.above)
    for scene in (SCENES["worker"], SCENES["bare"], SCENES["worker"]):
        terminal.redraw(scene)
        warnings.emit(logging.LogRecord("w", logging.WARNING, "", 0, "mind", (), None))
    terminal.end()
    terminal.say("ended")
    shown = list(played(out.getvalue()))
    assert shown == [*["WARNING w mind"] * 3, *block(SCENES["worker"], 80, 24), "ended"]
    assert height(["x" * 100, ""], 40) == 4, "a terminal may have become narrower"


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def played(text: str) -> Iterator[str]:
    """The lines that a terminal shows after ``text``: it knows CR, LF, CUU and ED."""
    lines, row = [""], 0
    while text:
        if text.startswith("\x1b["):
            code, text = text[2:].split("J" if text[2] == "J" else "A", 1)
            row, lines = (row - int(code), lines) if code else (row, [*lines[:row], ""])
        elif text[0] == "\n":
            row, text = row + 1, text[1:]
            lines += [""] * (row + 1 - len(lines))
        else:
            lines[row] += text[0] if text[0] != "\r" else ""
            text = text[1:]
    yield from lines[:-1] if not lines[-1] else lines


def test_a_worker_says_what_became_of_its_work() -> None:
    """It said made and accepted of one life, and nothing of what was learnt."""
    counts = InferenceCounts(rollouts=128, group_size=16, doing=Doing.DRAWS)
    for reason in ["tokens implausible", *["activation exponents differ"] * 2]:
        counts.count(Verdict.REJECTED.value, reason)
    book: Any = SimpleNamespace(
        made=104, verdicts={"accepted": 100, "rejected": 3, "inconclusive": 1}, tokens=9
    )
    own = Fates(learnt=600, no_spread=100, stale=60, left_over=8, waiting=32)
    account = Account(
        doing=TrainerDoing.LEARNS, own=own, total=Fates(learnt=8000), step=3, steps=60, pause=5
    )
    life = life_of(counts, book, account)
    said = [fact.text for fact in facts_of("x", 0.0, life, counts)]
    assert said == [
        "x",
        "13,312 rollouts made, 12,800 accepted, 384 rejected (activation exponents differ,"
        " tokens implausible)",
        "from 9,600 of those (75%); not from 1,600 scored alike, 960 too old, 128 left over,"
        " 512 waiting",
        "10.0% of the swarm's accepted work",
        "0 tokens a second",
    ]
    counts.owed = 12
    said = [fact.text for fact in facts_of("x", 0.0, life, counts)]
    assert said[2] == "12 places have to stand before any is learnt from"
    lying = Account(doing=TrainerDoing.LEARNS, own=Fates(learnt=10**6), total=Fates())
    assert life_of(counts, book, lying).learnt == life.accepted, "no trainer makes it more"
    for number in range(MAX_REASONS + 5):
        counts.count(Verdict.REJECTED.value, f"\x1b[2J{number}")
    assert (len(counts.reasons), counts.reasons[OTHER]) == (MAX_REASONS + 1, 7)


def verdict(kind: Verdict, reason: str) -> Any:
    return SimpleNamespace(
        verdict=kind, reason=reason, commitment=SimpleNamespace(node=b"worker")
    )


def test_the_rate_is_that_of_the_last_minute() -> None:
    rate = Rate()
    assert rate.per_second(5.0) == 0
    for second in range(10, 201):
        rate.note(300, float(second))
    assert rate.per_second(200.0) == pytest.approx(300)
    assert rate.per_second(230.0) == pytest.approx(150)
    assert rate.per_second(300.0) == 0


def test_each_group_that_came_has_one_fate() -> None:
    row = Row(taken=100, learnt=40, no_spread=10, late=4, unneeded=3)
    fates = row.fates(20, is_over=False)
    assert fates.to_list() == [40, 10, 34, 3, 20]
    assert fates.all == 100 + 4 + 3
    assert row.fates(20, is_over=True).to_list() == [40, 10, 34, 23, 0]
    assert Row(taken=1, learnt=5).fates(0, is_over=False).stale == 0


def test_a_trainer_says_what_it_waits_for() -> None:
    assert trainer_now(None, 0) == "starting the engine"
    failures = SimpleNamespace(latest="")
    session: Any = SimpleNamespace(
        why_not="",
        writes_waiting=0,
        doing=TrainerDoing.WAITS,
        groups=32,
        curve=SimpleNamespace(learnt=SimpleNamespace(step=16)),
        intake=SimpleNamespace(buffer=[1] * 12, fates=lambda _: Fates()),
        desk=SimpleNamespace(scorer=SimpleNamespace(failures=failures)),
    )
    waits = "waiting for work: 12 of 32 groups for step 17 of 60 are here"
    assert trainer_now(session, 60) == waits
    failures.latest = "no such file"
    assert trainer_now(session, 60) == (
        f"{waits}; of what came, the environment failed on the last: no such file"
    )
