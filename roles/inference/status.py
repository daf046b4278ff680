"""Status of an inference node: counts, and their words for ``--status``, the screen and the
dashboard.

Counts of `Life` are in rollouts (a group of them is one task), over all lives of the node. What
was learnt from them the trainer tells (`roles.protocol.trainer_watch`): that part is as old as
its last answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

from p2p.naming import printable
from p2p.node.role import Fact
from p2p.shardcast.manifest import NO_POLICY, PolicyVersion
from proofs.checks import Verdict
from roles.inference.life import LifeBook
from roles.protocol.core.account import NOT_LEARNT, Account
from roles.protocol.core.answer import Answer
from roles.protocol.trainer_watch import TrainerWatch, clock
from roles.shared.reasons import because, but_not_from, tally

RATE_SECONDS: Final = 60.0
"""Seconds over which a rate is measured: longer than a submission takes, shorter than a person
watches."""


SHOWN: Final = (
    *("version", "submitted", "policies_loaded", "policies_skipped", "retries", "uploads"),
    *("unanswered_since", "refusal", "waits", "stood", "owed", "idle"),
)
"""Counts that a status shows under their own names."""


class Doing(Enum):
    """The activity of an inference node."""

    STARTS = "starts"
    WAITS_FOR_POLICY = "waits for the first policy"
    LOADS = "loads"
    DRAWS = "draws"
    WAITS_FOR_VERDICTS = "waits for verdicts"
    WAITS_FOR_NEWER = "waits for the next policy"
    OVER = "over"


@dataclass(slots=True)
class Rate:
    """A rate per second over the last `RATE_SECONDS`."""

    _came: deque[tuple[float, int]] = field(default_factory=deque)
    _began: float | None = None

    def note(self, count: int, now: float) -> None:
        """Add ``count`` items that have come since the last call."""
        if self._began is None:
            self._began = now
            return  # what it took is not known
        self._came.append((now, count))

    def per_second(self, now: float) -> float:
        """Return the rate; 0 before anything was noted."""
        while self._came and self._came[0][0] <= now - RATE_SECONDS:
            self._came.popleft()
        if self._began is None or now <= self._began:
            return 0.0
        return sum(count for _, count in self._came) / min(RATE_SECONDS, now - self._began)


@dataclass(slots=True)
class InferenceCounts:
    """Counts of the work of this process."""

    submitted: int = 0
    rollouts: int = 0
    """Completions per submission, the unit in which people count."""
    group_size: int = 0
    """Completions per group, the unit in which a trainer counts."""
    verdicts: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    """Number of rejected submissions by the validator's reason."""
    policies_loaded: int = 0
    policies_skipped: int = 0
    retries: int = 0
    uploads: int = 0
    """Number of times that a validator has requested a submission."""
    idle: bool = False
    """True if the run has all its steps."""
    version: PolicyVersion = NO_POLICY
    """Version of the policy in the engine."""
    refusal: str = ""
    """Last refusal of a validator that repeating the request will not change."""
    doing: Doing = Doing.STARTS
    drawn: Rate = field(default_factory=Rate)
    """Rate of tokens drawn."""
    unanswered_since: float | None = None
    """Wall time since which the trainer does not answer; None while it does."""
    bytes_committed: int = 0
    """Bytes of windows and their answers that this process has sent and received."""
    stood: int = 0
    """Number of places that stood, as the trainer last said."""
    owed: int = 0
    """Number of places that have to stand before anything is learnt from; 0 in standing."""
    waits: str = ""
    """Reason why no work is begun although there is a policy; empty if work is begun."""

    def count(self, kind: str, reason: str) -> None:
        """Count a submission by its result, which is usually a verdict."""
        self.verdicts[kind] = self.verdicts.get(kind, 0) + 1
        if kind == Verdict.REJECTED.value:
            tally(self.reasons, printable(reason))

    def note_upload(self) -> None:
        """Count a place that a validator or the trainer has requested."""
        self.uploads += 1

    def note_answer(self, answer: Answer) -> None:
        """Record this node's standing from the trainer's answer."""
        self.stood, self.owed = answer.stood, answer.owed

    def note_policy(self, version: PolicyVersion) -> None:
        """Note that the engine runs ``version`` from now on."""
        if version != self.version:
            self.policies_loaded += 1
            self.policies_skipped += max(0, version - self.version - 1)
            self.version = version

    def health(self) -> dict[str, object]:
        """Return the counts as plain values."""
        return {
            **{name: getattr(self, name) for name in SHOWN},
            "doing": self.doing.value,
            "committed_bytes": self.bytes_committed,
            **{verdict.value: self.verdicts.get(verdict.value, 0) for verdict in Verdict},
        }


WORDS = {
    Doing.STARTS: "starting the engine",
    Doing.LOADS: "loading a policy",
    Doing.OVER: "the run has all its steps: this node only relays",
}
"""Maps what an inference node does to words. `now_of` describes drawing and waiting in more
words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """Counts of the rollouts of one node over all its processes."""

    made: int = 0
    accepted: int = 0
    """Rollouts accepted by a validator; never more than were made."""
    rejected: int = 0
    inconclusive: int = 0
    """Rollouts on which a validator gave no decision, without blame."""
    unchecked: int = 0
    """Rollouts that were committed to and never checked: they were not chosen by the dice and
    would have taught nothing."""
    tokens: int = 0
    """Tokens drawn."""
    learnt: int = 0
    """Accepted rollouts that a step has learnt from."""
    no_spread: int = 0
    """Accepted rollouts of a task whose rollouts all earned the same, so that nothing is
    learnt."""
    stale: int = 0
    """Accepted rollouts whose policy was too old when they could have been learnt from."""
    left_over: int = 0
    """Accepted rollouts that were left when the run had all its steps."""
    waiting: int = 0
    """Accepted rollouts that wait at the trainer for a step."""
    swarm_accepted: int = 0
    """Accepted rollouts of all nodes, as the trainer knows them."""
    share: float | None = None
    """This node's share of `swarm_accepted`; None while the trainer has told nothing."""


def life_of(counts: InferenceCounts, book: LifeBook | None, account: Account | None) -> Life:
    """Return the counts over all processes. If the trainer reports more work than was accepted
    here, the surplus is ignored."""
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
    """Return the node's current activity in words. If there are several causes, the one that a
    person can do most about comes first."""
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
    """Yield the lines of the screen, the most important first."""
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
