"""How an inference node is getting on: one snapshot, of which ``--status``, the screen and the
dashboard are views.

Counts of `Life` are in rollouts (a group of them is one task), over all lives of the node. What
was learnt from them the trainer tells (`roles.protocol.trainer_watch`): that part is as old as
its last answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from p2p.node.role import Fact
from proofs.checks import Verdict
from roles.inference.life import LifeBook
from roles.inference.stats import Doing, InferenceCounts
from roles.protocol.core.account import Account, Fates
from roles.protocol.trainer_watch import TrainerWatch, clock
from roles.shared.reasons import because

NOT_LEARNT = {
    "no_spread": "scored alike",
    "stale": "too old",
    "left_over": "left over",
    "waiting": "waiting",
}
"""Why accepted work was not learnt from, in two words."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceStatus:
    """What there is to know of the role now, beside the counts of this life."""

    doing: str
    """One of `Doing`."""
    now: str
    """What it does or waits for, in a sentence for people."""
    tokens_per_second: float = 0.0
    """Over the last minute."""
    waits_for_disk: int = 0
    """Writes that the disk has refused so far."""
    unanswered_since: float | None = None
    """Wall time since which the trainer does not answer."""
    trainer: str = ""
    """What the trainer does (`roles.protocol.core.account.TrainerDoing`); empty if unknown."""
    trainer_away_since: float | None = None
    """Wall time of the last sign of the trainer; None while it is there."""
    step: int = 0
    """The run's, as the trainer told; 0 before."""
    steps: int = 0
    life: Life = Life()


def life_of(counts: InferenceCounts, book: LifeBook | None, account: Account | None) -> Life:
    """All lives; what the trainer says of more work than was accepted here is not believed."""
    if book is None:
        return Life()
    each, verdicts = counts.rollouts, book.verdicts
    accepted = each * verdicts[Verdict.ACCEPTED.value]
    own, share, in_all = Fates(), None, 0
    if account is not None and account.own is not None and account.total is not None:
        own = account.own.times(counts.group_size)
        in_all = account.total.all * counts.group_size
        share = min(1.0, account.own.all / account.total.all) if in_all else None
    return Life(
        made=each * book.made,
        accepted=accepted,
        rejected=each * verdicts[Verdict.REJECTED.value],
        inconclusive=each * verdicts[Verdict.INCONCLUSIVE.value],
        unchecked=each * verdicts.get("unchecked", 0),
        tokens=book.tokens,
        learnt=min(own.learnt, accepted),
        no_spread=min(own.no_spread, accepted),
        stale=min(own.stale, accepted),
        left_over=min(own.left_over, accepted),
        waiting=min(own.waiting, accepted),
        swarm_accepted=in_all,
        share=share,
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


def facts_of(status: InferenceStatus, counts: InferenceCounts) -> Iterator[Fact]:
    """The lines of a screen, the most wanted first."""
    life = status.life
    yield Fact("now", status.now)
    if status.doing == Doing.STARTS.value:
        return  # what earlier lives did is not read yet
    made = f"{life.made:,} rollouts made, {life.accepted:,} accepted"
    rejected = f", {life.rejected:,} rejected{because(counts.reasons)}" if life.rejected else ""
    yield Fact("work", made + rejected)
    if counts.owed:
        yield Fact("newcomer", f"{counts.owed} places have to stand before any is learnt from")
    if life.share is not None:
        yield Fact("learnt", learnt_words(life))
        yield Fact("share", f"{life.share:.1%} of the swarm's accepted work")
    yield Fact("speed", f"{status.tokens_per_second:,.0f} tokens a second")
    if counts.refusal:
        yield Fact("refused", counts.refusal)


def learnt_words(life: Life) -> str:
    """How many of the accepted rollouts were learnt from, and why the others were not."""
    share = f" ({life.learnt / life.accepted:.0%})" if life.accepted else ""
    others = [
        f"{count:,} {words}"
        for name, words in NOT_LEARNT.items()
        if (count := getattr(life, name))
    ]
    rest = f"; not from {', '.join(others)}" if others else ""
    return f"from {life.learnt:,} of those{share}{rest}"
