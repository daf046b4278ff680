"""Scenes that a screen must fit: what volunteers meet, and the worst."""

from __future__ import annotations

from typing import Final

from p2p.node.role import Fact, Progress
from p2p.node.screen import facts_of as facts_shown
from roles.inference.status import Doing, InferenceCounts, Life, facts_of

LIFE: Final = Life(
    made=13_312,
    accepted=13_056,
    rejected=256,
    learnt=10_112,
    no_spread=2048,
    stale=512,
    left_over=256,
    waiting=128,
    swarm_accepted=310_857,
    share=0.042,
)


def worker(now: str, life: Life = LIFE, speed: float = 1234.0) -> Progress:
    """As `roles.inference.Inference.progress` makes it."""
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
    "foreign": facts_shown(
        policy="3", peers=1, roles=(Progress(facts=(Fact("now", "“Größe” → ≤ 3 … oder"),)),)
    ),
}
