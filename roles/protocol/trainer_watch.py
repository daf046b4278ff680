"""Whether the run's trainer is there, what it does, and what became of this node's work.

Theory of operation
-------------------
A node asks the trainer now and then (`roles.protocol.core.account`), as often as it says. A
trainer that answers, or whose heartbeat the swarm knows, is there. One that does neither is
away, since the last sign of it. One that is there and does not speak the work protocol is of
another version of Shoal. Nothing is decided by it: it is what a person wants to know who sees
that a node does nothing.
"""

from __future__ import annotations

import logging
import re
from datetime import datetime
from typing import Final

from p2p.errors import ProtocolNotSupported
from p2p.identity import PeerId
from p2p.node.node import Node
from roles.contract import run_of
from roles.protocol.core.account import MAX_ACCOUNT, Account, TrainerDoing
from roles.protocol.core.answer import (
    WORK_PROTOCOL,
    WORK_SINCE,
    AccountRequest,
)
from roles.protocol.request import ask
from roles.shared.reasons import printable

logger = logging.getLogger(__name__)

FIRST_PAUSE: Final = 1.0
"""Seconds after the first question without an answer, doubled to"""
PAUSE: Final = 15.0
"""Seconds between questions to a trainer that does not answer: half of what it takes to see
that a peer has died."""
LONGEST_PAUSE: Final = 600
"""Seconds between questions, whatever the trainer says: 12,000 nodes at 20 a second."""
UNSPOKEN: Final = 4
"""Questions in a row that find no work protocol until it is said: a trainer that starts does
not serve it for some seconds."""
DAY: Final = 24 * 3600
"""Seconds after which a time of the day needs its date."""

DOINGS: Final = {
    TrainerDoing.OPENS: "the trainer starts",
    TrainerDoing.WARMS_UP: "the trainer warms up",
    TrainerDoing.EVALUATES: "the trainer examines the policy",
    TrainerDoing.WAITS: "the trainer waits for work",
    TrainerDoing.LEARNS: "the trainer learns",
    TrainerDoing.RESTS: "the trainer rests",
    TrainerDoing.OVER: "the run has all its steps",
}
"""What a trainer says it does, in words."""


class TrainerWatch:
    """What one node knows of its run's trainer."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._heard: float | None = None
        """Wall time of the last sign of it; None if there was none in this life."""
        self._began = node.world.wall()
        self.account: Account | None = None
        """What it answered last."""
        self.is_away = False
        self._unspoken = 0
        """Questions in a row for which the trainer did not speak the work protocol."""

    @property
    def away_since(self) -> float | None:
        """Wall time since which nothing is heard of it; None while it is there."""
        if not self.is_away:
            return None
        return self._began if self._heard is None else self._heard

    def health(self) -> dict[str, object]:
        """What the trainer has told, as plain values."""
        account = self.account or Account(doing=TrainerDoing.OPENS)
        return {
            "trainer": account.doing.value if self.account else "",
            "trainer_away_since": self.away_since,
            "step": account.step,
            "steps": account.steps,
            "run_curve": [[step, reward / 1000] for step, reward in account.curve],
        }

    async def watch(self) -> None:
        """Ask until cancelled."""
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
        """What the trainer does while this node waits, for the end of a sentence; empty if
        unknown."""
        if self.account is None or self.is_away:
            return ""
        return f"; {DOINGS[self.account.doing]}"

    def why_no_policy(self) -> str:
        """What a node without any policy waits for."""
        if self.account is None or self.account.doing is TrainerDoing.OVER:
            return "waiting for the first policy"
        return f"waiting for the first policy: {DOINGS[self.account.doing]}"

    def why_idle(self, kept: str) -> str:
        """That the trainer is away or of another version, and what ``kept`` says of the work;
        empty while it is there."""
        if self._unspoken >= UNSPOKEN and not self.is_away:
            return f"{self.why_other_version()}; {kept}"
        if self.away_since is None:
            return ""
        since = clock(self.away_since, self._node.world.wall())
        what = "no trainer was heard" if self._heard is None else "the trainer is away"
        return f"{what} since {since}; {kept}"

    def why_other_version(self) -> str:
        """That the trainer does not speak the work protocol, and who upgrades to what."""
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
    """A wall time for people, on this machine's clock."""
    local = datetime.fromtimestamp(when).astimezone()
    return local.strftime("%H:%M" if abs(now - when) < DAY else "%d %b %H:%M")
