"""How a trainer is getting on: one snapshot, of which ``--status``, the screen and the
dashboard are views."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from p2p.node.role import Fact
from roles.protocol.core.account import Fates, TrainerDoing
from roles.trainer.session import TrainerSession

WORDS: Final = {
    TrainerDoing.OPENS: "starting the engine",
    TrainerDoing.WARMS_UP: "warming up: the first policy is trained by examples",
    TrainerDoing.EVALUATES: "examining the policy on held-out tasks",
    TrainerDoing.LEARNS: "learning",
    TrainerDoing.OVER: "the run has all its steps: this node only relays",
}
"""What a trainer does, for its own person; it waits and rests in more words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStatus:
    """What there is to know of the role now, beside the learning curve."""

    doing: str
    """One of `TrainerDoing`."""
    now: str
    """What it does or waits for, in a sentence for people."""
    groups: Fates = field(default_factory=Fates)
    """What became of all accepted groups, in all lives."""


def status_of(session: TrainerSession | None, steps: int) -> TrainerStatus:
    """The snapshot; ``steps`` is 0 before the run file was read."""
    if session is None:
        doing = TrainerDoing.OPENS
        return TrainerStatus(doing=doing.value, now=WORDS[doing])
    doing = TrainerDoing.RESTS if session.why_not else session.doing
    return TrainerStatus(
        doing=doing.value,
        now=_now(session, doing, steps),
        groups=session.intake.fates(None),
    )


def _now(session: TrainerSession, doing: TrainerDoing, steps: int) -> str:
    step = session.curve.learnt.step
    if doing is TrainerDoing.RESTS:
        return f"rests: {session.why_not}"
    if session.writes_waiting:
        return "waiting for room on the disk; nothing is lost"
    if doing is TrainerDoing.WAITS:
        here, failure = len(session.intake.buffer), session.desk.scorer.failures.latest
        fails = (
            f"; of what came, the environment failed on the last: {failure}" if failure else ""
        )
        return (
            f"waiting for work: {here:,} of {session.groups:,} groups for step {step + 1:,} of"
            f" {steps:,} are here{fails}"
        )
    if doing is TrainerDoing.LEARNS:
        return f"learning: step {step + 1:,} of {steps:,}"
    return WORDS[doing]


def facts_of(status: TrainerStatus, session: TrainerSession) -> Iterator[Fact]:
    """The lines of a screen, the most wanted first."""
    learnt, fates = session.curve.learnt, status.groups
    yield Fact("now", status.now)
    if session.warning:
        yield Fact("wrong", session.warning)
    others = [
        f"{count:,} {words}"
        for count, words in (
            (fates.no_spread, "scored alike"),
            (fates.stale, "too old"),
            (fates.left_over, "left over"),
        )
        if count
    ]
    share = f" ({fates.learnt / fates.all:.0%})" if fates.all else ""
    rest = f"; not from {', '.join(others)}" if others else ""
    yield Fact(
        "work",
        f"learnt from {fates.learnt:,} of {fates.all:,} groups{share}, {fates.waiting:,}"
        f" waiting{rest}",
    )
    if learnt.greedy is not None and learnt.greedy_start is not None:
        yield Fact(
            "learnt", f"held-out tasks solved {learnt.greedy_start:.0%} -> {learnt.greedy:.0%}"
        )
    if session.desk.liars:
        yield Fact("refused", f"{len(session.desk.liars)} lying validators")
