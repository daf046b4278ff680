"""How an inference node is getting on: one snapshot, of which ``--status``, the screen and the
dashboard are views.

Counts of `Life` are in rollouts (a group of them is one task), over all lives of the node. What
was learnt from them the trainer tells (`roles.protocol.trainer_watch`): that part is as old as
its last answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from p2p.node.role import Fact
from roles.inference.life import LifeBook
from roles.inference.stats import Doing, InferenceCounts
from roles.protocol.core.account import NOT_LEARNT, Account
from roles.protocol.trainer_watch import TrainerWatch, clock
from roles.shared.reasons import because, but_not_from

WORDS = {
    Doing.STARTS: "starting the engine",
    Doing.LOADS: "loading a policy",
    Doing.OVER: "the run has all its steps: this node only relays",
}
"""What an inference node does; it draws and waits in more words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """Rollouts of one node, in all its lives."""

    made: int = 0
    accepted: int = 0
    """Never more than were made."""
    rejected: int = 0
    inconclusive: int = 0
    """Given up by a validator, with no blame."""
    unchecked: int = 0
    """Committed to; no lot fell on them, and nothing was to be learnt."""
    tokens: int = 0
    """Drawn."""
    learnt: int = 0
    """Of those accepted: a step has learnt from them."""
    no_spread: int = 0
    """All rollouts of the task earned the same, from which nothing is learnt."""
    stale: int = 0
    """The policy was too old by then."""
    left_over: int = 0
    """The run had all its steps."""
    waiting: int = 0
    """At the trainer, for a step."""
    swarm_accepted: int = 0
    """Accepted rollouts of all nodes, as the trainer knows them."""
    share: float | None = None
    """This node's part of those; None while the trainer has told nothing."""


def life_of(counts: InferenceCounts, book: LifeBook | None, account: Account | None) -> Life:
    """All lives; what the trainer says of more work than was accepted here is not believed."""
    if book is None:
        return Life()
    each = counts.rollouts
    judged = {kind: each * count for kind, count in book.verdicts.items()}
    life = Life(made=each * book.made, tokens=book.tokens, **judged)
    if account is None or account.own is None or account.total is None:
        return life
    own, everyone = account.own.times(counts.group_size), account.total.all
    fates = ("learnt", *NOT_LEARNT)
    return replace(
        life,
        swarm_accepted=everyone * counts.group_size,
        share=min(1.0, account.own.all / everyone) if everyone else None,
        **{name: min(getattr(own, name), life.accepted) for name in fates},
    )


def now_of(
    counts: InferenceCounts,
    watch: TrainerWatch | None,
    *,
    rests: str = "",
    waits_for_disk: int = 0,
    environment_failure: str = "",
    pending: int = 0,
    wall: float = 0.0,
) -> str:
    """What the node does or waits for: the cause that a person can do most about, first."""
    kept = "your work is kept" if pending else "nothing is lost"
    away = "" if watch is None else watch.why_idle(kept)
    meanwhile = "" if watch is None else watch.meanwhile
    match counts.doing:
        case _ if rests:
            return f"rests: {rests}"
        case _ if waits_for_disk:
            return "waiting for room on the disk; your work is kept"
        case doing if doing in WORDS:
            return WORDS[doing]
        case Doing.WAITS_FOR_POLICY:
            none = "waiting for the first policy"
            return away or (none if watch is None else watch.why_no_policy())
        case Doing.DRAWS:
            fails = environment_failure and f"; the environment fails: {environment_failure}"
            return f"drawing under policy {counts.version}{fails or (away and f'; {away}')}"
        case _ if environment_failure:
            return f"drawing nothing, because the environment fails: {environment_failure}"
        case _ if away:
            return away
        case _ if counts.unanswered_since is not None and pending:
            since = clock(counts.unanswered_since, wall)
            return f"the trainer does not answer since {since}; your work is kept"
        case Doing.WAITS_FOR_NEWER if counts.waits:
            return f"resting: {counts.waits}"
        case Doing.WAITS_FOR_VERDICTS:
            return f"waiting for the verdicts on {pending} submissions{meanwhile}"
    return f"waiting for the next policy{meanwhile}"


def facts_of(now: str, speed: float, life: Life, counts: InferenceCounts) -> Iterator[Fact]:
    """The lines of a screen, the most wanted first."""
    yield Fact("now", now)
    if counts.doing is Doing.STARTS:
        return  # what earlier lives did is not read yet
    made = f"{life.made:,} rollouts made, {life.accepted:,} accepted"
    rejected = f", {life.rejected:,} rejected{because(counts.reasons)}" if life.rejected else ""
    yield Fact("work", made + rejected)
    if counts.owed:
        yield Fact("newcomer", f"{counts.owed} places have to stand before any is learnt from")
    if life.share is not None:
        rest = but_not_from((getattr(life, name), words) for name, words in NOT_LEARNT.items())
        share = f" ({life.learnt / life.accepted:.0%})" if life.accepted else ""
        yield Fact("learnt", f"from {life.learnt:,} of those{share}{rest}")
        yield Fact("share", f"{life.share:.1%} of the swarm's accepted work")
    yield Fact("speed", f"{speed:,.0f} tokens a second")
    if counts.refusal:
        yield Fact("refused", counts.refusal)
