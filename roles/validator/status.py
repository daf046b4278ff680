"""How a validator is getting on: one snapshot, of which ``--status``, the screen and the
dashboard are views."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from p2p.node.role import Fact
from p2p.shardcast.manifest import NO_POLICY
from roles.protocol.stats import ScoringStats
from roles.protocol.trainer_watch import TrainerWatch
from roles.shared.reasons import because
from roles.validator.session import ValidatorSession


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidatorStatus:
    """What there is to know of the role now, beside its records."""

    now: str
    """What it does or waits for, in a sentence for people."""
    queue: int = 0
    """Submissions that wait for the scorer."""
    undelivered: int = 0
    """Verdicts that the trainer has not taken yet; they are on disk."""
    trainer: str = ""
    """What the trainer does (`roles.protocol.core.account.TrainerDoing`); empty if unknown."""
    trainer_away_since: float | None = None
    """Wall time of the last sign of the trainer; None while it is there."""


def status_of(session: ValidatorSession | None, watch: TrainerWatch | None) -> ValidatorStatus:
    """The snapshot."""
    if session is None or watch is None:
        return ValidatorStatus(now="starting the engine")
    return ValidatorStatus(
        now=_now(session, watch),
        queue=session.waiting,
        undelivered=session.undelivered,
        trainer="" if watch.account is None else watch.account.doing.value,
        trainer_away_since=watch.away_since,
    )


def _now(session: ValidatorSession, watch: TrainerWatch) -> str:
    kept = session.undelivered
    what = f"{kept} verdicts are kept for it" if kept else "nothing is lost"
    away = watch.why_idle(what)
    if session.why_not:
        return f"rests: {session.why_not}"
    if session.writes_waiting:
        return "waiting for room on the disk; nothing is lost"
    if session.is_over:
        return "the run has all its steps: nothing is left to score"
    if session.environment_failure:
        failure = session.environment_failure
        return f"undecided on the last place, because the environment fails: {failure}"
    if session.is_judging:
        return f"scoring under policy {session.loaded}{away and f'; {away}'}"
    if away:
        return away
    if session.node.shardcast.newest == NO_POLICY:
        return watch.why_no_policy()
    if session.is_held_up:
        return f"waiting for the trainer to take {kept} verdicts"
    return "waiting for newcomers' work"


def facts_of(status: ValidatorStatus, stats: ScoringStats) -> Iterator[Fact]:
    """The lines of a screen, the most wanted first."""
    records, undecided = stats.records, sum(stats.inconclusive.values())
    parts = [
        f"{records.accepted + records.rejected + undecided:,} submissions judged",
        f"{records.accepted:,} accepted",
        f"{records.rejected:,} rejected{because(records.reasons)}",
        *([f"{undecided:,} undecided{because(stats.inconclusive)}"] if undecided else []),
    ]
    yield Fact("now", status.now)
    yield Fact("work", ", ".join(parts))
    yield Fact(
        "queue",
        f"{status.queue:,} to be scored, {status.undelivered:,} verdicts for the trainer",
    )
