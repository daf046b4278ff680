"""How a validator is getting on: one snapshot, of which ``--status``, the screen and the
dashboard are views."""

from __future__ import annotations

from collections.abc import Iterator

from p2p.node.role import Fact
from p2p.shardcast.manifest import NO_POLICY
from roles.protocol.stats import ScoringStats
from roles.protocol.trainer_watch import TrainerWatch
from roles.shared.reasons import because
from roles.validator.session import ValidatorSession


def now_of(session: ValidatorSession | None, watch: TrainerWatch | None) -> str:
    """What it does or waits for, in a sentence for people."""
    if session is None or watch is None:
        return "starting the engine"
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


def facts_of(now: str, queue: int, undelivered: int, stats: ScoringStats) -> Iterator[Fact]:
    """The lines of a screen, the most wanted first."""
    records, undecided = stats.records, sum(stats.inconclusive.values())
    parts = [
        f"{records.accepted + records.rejected + undecided:,} submissions judged",
        f"{records.accepted:,} accepted",
        f"{records.rejected:,} rejected{because(records.reasons)}",
        *([f"{undecided:,} undecided{because(stats.inconclusive)}"] if undecided else []),
    ]
    yield Fact("now", now)
    yield Fact("work", ", ".join(parts))
    yield Fact(
        "queue",
        f"{queue:,} to be scored, {undelivered:,} verdicts for the trainer",
    )
