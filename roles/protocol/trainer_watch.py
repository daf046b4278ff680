"""Presence and activity of the run's trainer, and the fates of this node's work.

Theory of operation
-------------------
A node asks the trainer at intervals that the trainer sets (`roles.protocol.core.account`). A
trainer that answers, or whose heartbeat the swarm knows, is present. A trainer that does
neither is away since its last sign of life. A trainer that is present and does not speak the
work protocol runs another version of Shoal. No decision depends on this: it tells people why a
node does nothing.
"""

from __future__ import annotations

import logging
import re
from datetime import datetime
from typing import Final

from p2p.errors import ProtocolNotSupported
from p2p.identity import PeerId
from p2p.naming import printable
from p2p.node.node import Node
from roles.contract import run_of
from roles.protocol.core.account import MAX_ACCOUNT, Account, TrainerDoing
from roles.protocol.core.answer import (
    WORK_PROTOCOL,
    WORK_SINCE,
    AccountRequest,
)
from roles.protocol.request import ask

logger = logging.getLogger(__name__)

FIRST_PAUSE: Final = 1.0
"""Seconds of pause after the first question without an answer. The pause doubles up to
`PAUSE`."""
PAUSE: Final = 15.0
"""Most seconds between questions to a trainer that does not answer: half of the time in which a
peer is found to be dead."""
LONGEST_PAUSE: Final = 600
"""Most seconds between questions, whatever the trainer says: 12,000 nodes at 20 a second."""
UNSPOKEN: Final = 4
"""Number of consecutive questions without the work protocol until that is reported. A trainer
that starts does not serve it for some seconds."""
DAY: Final = 24 * 3600
"""Seconds after which a time of day is shown with its date."""

DOINGS: Final = {
    TrainerDoing.OPENS: "the trainer starts",
    TrainerDoing.WARMS_UP: "the trainer warms up",
    TrainerDoing.EVALUATES: "the trainer examines the policy",
    TrainerDoing.WAITS: "the trainer waits for work",
    TrainerDoing.LEARNS: "the trainer learns",
    TrainerDoing.RESTS: "the trainer rests",
    TrainerDoing.OVER: "the run has all its steps",
}
"""Maps what a trainer says it does to words."""


class TrainerWatch:
    """One node's knowledge of its run's trainer."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._heard: float | None = None
        """Wall time of the trainer's last sign of life; None if this process has seen none."""
        self._began = node.world.wall()
        self.account: Account | None = None
        """The trainer's last answer; None before the first."""
        self.is_away = False
        self._unspoken = 0
        """Number of consecutive questions for which the trainer did not speak the work
        protocol."""

    @property
    def away_since(self) -> float | None:
        """Wall time since which the trainer has shown no sign of life; None while it is
        present."""
        if not self.is_away:
            return None
        return self._began if self._heard is None else self._heard

    def health(self) -> dict[str, object]:
        """Return the trainer's answers as plain values."""
        account = self.account or Account(doing=TrainerDoing.OPENS)
        return {
            "trainer": account.doing.value if self.account else "",
            "trainer_away_since": self.away_since,
            "step": account.step,
            "steps": account.steps,
            "run_curve": [[step, reward / 1000] for step, reward in account.curve],
        }

    async def watch(self) -> None:
        """Ask the trainer at intervals until cancelled."""
        world, pause = self._node.world, FIRST_PAUSE
        while True:
            trainer = run_of(self._node).terms.trainers[0]
            account = await self._ask(trainer)
            if account is not None or trainer in self._node.membership:
                self._heard = world.wall()
            self.account = account or self.account
            is_missed = account is None and trainer not in self._node.membership
            # a node that has just begun knows nobody yet
            is_new = self._heard is None and world.wall() - self._began < PAUSE
            self.is_away = is_missed and not is_new
            if account is None:
                pause = min(2 * pause, PAUSE)
            else:
                pause = min(max(account.pause, FIRST_PAUSE), LONGEST_PAUSE)
            await world.sleep_until(world.now() + pause)

    async def _ask(self, trainer: PeerId) -> Account | None:
        try:
            reply = await ask(
                *(self._node, trainer, AccountRequest(with_curve=True), lambda reply: reply),
                max_reply=MAX_ACCOUNT,
                raises_unsupported=True,
            )
        except ProtocolNotSupported:
            self._unspoken += 1
            if self._unspoken == UNSPOKEN:
                logger.warning("other_version %s", self.why_other_version())
            return None
        if reply is None:
            return None
        self._unspoken = 0
        return reply if isinstance(reply, Account) else None

    @property
    def meanwhile(self) -> str:
        """Activity of the trainer while this node waits, as the end of a sentence; empty if
        unknown."""
        if self.account is None or self.is_away:
            return ""
        return f"; {DOINGS[self.account.doing]}"

    def why_no_policy(self) -> str:
        """Return a sentence that says why a node has no policy yet."""
        if self.account is None or self.account.doing is TrainerDoing.OVER:
            return "waiting for the first policy"
        return f"waiting for the first policy: {DOINGS[self.account.doing]}"

    def why_idle(self, kept: str) -> str:
        """Return a sentence that says that the trainer is away or of another version, followed
        by ``kept``; empty while the trainer is present."""
        if self._unspoken >= UNSPOKEN and not self.is_away:
            return f"{self.why_other_version()}; {kept}"
        if self.away_since is None:
            return ""
        since = clock(self.away_since, self._node.world.wall())
        what = "no trainer was heard" if self._heard is None else "the trainer is away"
        return f"{what} since {since}; {kept}"

    def why_other_version(self) -> str:
        """Return a sentence that says that the trainer does not speak the work protocol, and
        which side needs another version."""
        trainer = run_of(self._node).terms.trainers[0]
        members = self._node.membership.members()
        said = next((one.version for one in members if one.peer == trainer), "")
        theirs = f"Shoal {printable(said)}" if said else "another version of Shoal"
        unspoken = f"the trainer runs {theirs}, which does not speak {WORK_PROTOCOL}"
        if _numbers(said) >= _numbers(WORK_SINCE):
            return f"{unspoken}: this node needs that version (git pull in its checkout)"
        return f"{unspoken}: it needs Shoal {WORK_SINCE} or newer (git pull in its checkout)"


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, to compare it by."""
    found = re.match(r"[0-9]{1,9}(?:\.[0-9]{1,9}){0,2}", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def clock(when: float, now: float) -> str:
    """Return a wall time for people, on this machine's clock."""
    local = datetime.fromtimestamp(when).astimezone()
    return local.strftime("%H:%M" if abs(now - when) < DAY else "%d %b %H:%M")
