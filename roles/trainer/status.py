"""A trainer's status: one snapshot, from which ``--status``, the screen and the dashboard are
made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from p2p.identity import PeerId
from p2p.node.role import Fact
from roles.protocol.core.account import TrainerDoing
from roles.shared.reasons import but_not_from
from roles.trainer.curve import Learnt
from roles.trainer.session import TrainerSession

WORDS: Final = {
    TrainerDoing.OPENS: "starting the engine",
    TrainerDoing.WARMS_UP: "warming up: the first policy is trained by examples",
    TrainerDoing.EVALUATES: "examining the policy on held-out tasks: minutes, for a large one",
    TrainerDoing.LEARNS: "learning",
    TrainerDoing.OVER: "the run has all its steps: this node only relays",
}
"""Maps what a trainer does to words for its own operator. `now_of` describes waiting and
resting in more words."""


def doing_of(session: TrainerSession | None) -> TrainerDoing:
    """Return the trainer's current activity."""
    if session is None:
        return TrainerDoing.OPENS
    return TrainerDoing.RESTS if session.why_not else session.doing


def now_of(session: TrainerSession | None, steps: int) -> str:
    """Return the trainer's current activity in a sentence for people."""
    doing = doing_of(session)
    if session is None:
        return WORDS[doing]
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


def facts_of(session: TrainerSession, steps: int) -> Iterator[Fact]:
    """Yield the lines of the screen, the most important first."""
    learnt, fates = session.curve.learnt, session.intake.fates(None)
    yield Fact("now", now_of(session, steps))
    if session.warning:
        yield Fact("wrong", session.warning)
    share = f" ({fates.learnt / fates.all:.0%})" if fates.all else ""
    rest = but_not_from(
        [
            (fates.no_spread, "scored alike"),
            (fates.stale, "too old"),
            (fates.left_over, "left over"),
        ]
    )
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
    if session.policy_bytes:
        yield Fact("newest", session.newest)


def tables_of(learnt: Learnt) -> dict[str, object]:
    """Return tables for a page: kinds of tasks and sample answers, before and after
    learning."""
    names = ("before", "sampled_before", "after", "sampled_after")
    both = zip(learnt.samples, learnt.samples_start, strict=False)
    return {
        "by_kind": {
            kind: dict(zip(names, (*first, *learnt.kinds.get(kind, first)), strict=True))
            for kind, first in learnt.kinds_start.items()
        }
        if len(learnt.kinds_start) > 1
        else {},
        "samples": [
            [*now, *before[1:]] if len(learnt.curve) > 1 else list(now) for now, before in both
        ]
        or [list(one) for one in learnt.samples],
    }


def work_of(session: TrainerSession) -> dict[str, dict[str, Any]]:
    """Return the fate of each worker's work."""
    paces, judged, bans = session.workers(), session.desk.stats.records, session.desk.banned
    records = judged.health()
    work = {}
    for peer in dict.fromkeys((*paces, *records, *bans)):
        fates, record = session.intake.fates(PeerId.from_base58(peer)), records.get(peer, {})
        work[peer] = {
            "learnt": fates.learnt,
            "no_spread": fates.no_spread,
            "stale": fates.stale,
            "tokens_per_second": paces.get(peer, {}).get("tokens_per_second"),
            "why": bans[peer]["reason"] if peer in bans else record.get("reasons"),
        }
    return work
