"""The origin's side: which of this node's own versions is handed out, and which comes next."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from p2p.identity import PeerId
from p2p.shardcast.config import ShardcastConfig
from p2p.shardcast.core import events as ev
from p2p.shardcast.core.download import Download
from p2p.shardcast.core.handout import HandOut
from p2p.shardcast.core.queue import Lines
from p2p.shardcast.core.receipts import Capacities
from p2p.shardcast.core.statements import Statements
from p2p.shardcast.forest import Roster, RosterEntry, build_forest
from p2p.shardcast.messages import (
    INLINE_INDEX,
    NO_STRIPE,
    Blame,
    ChunkHeader,
    Credit,
    Receipt,
    news_of,
)

_SETTLE: Final = 0.5
"""Time between a newcomer's first message, or a peer's receipt, and the next roster, in
multiples of the shortest wait. Other peers often follow closely, as when a machine room
starts."""


class Origin:
    """Hands out one version at a time. The next starts when the one before has left; versions
    in between are skipped.

    So a run that publishes faster than its links carry still delivers. Example: 40 versions of
    4 MiB in ten seconds over lines that carry one a second give each receiver eight to ten
    whole versions, the last among them, instead of forty parts.
    """

    def __init__(
        self,
        local: PeerId,
        statements: Statements,
        is_gone: Callable[[PeerId], bool],
        lines: Lines,
        config: ShardcastConfig,
    ) -> None:
        self._local = local
        self._statements = statements
        self._lines = lines
        self._is_gone = is_gone
        self._config = config
        self._capacities = Capacities()
        self._handouts: dict[bytes, HandOut] = {}
        self._next: Download | None = None
        self._resumed = False
        self._unfed: Download | None = None
        """A version that was announced while there was no roster; the first roster hands it
        out."""
        self._regroup_at = math.inf
        """Time at which to ask for a new roster because peers came or a root was demoted."""
        self._regrouped_at = -math.inf
        self._reported_at = math.inf
        """Time at which to ask for a new roster because peers have reported on a hand-out."""

    def publish(self, download: Download, *, resumed: bool) -> None:
        """Make `download` the next version to hand out. ``resumed`` is True if its hand-out
        began before a restart."""
        self._next, self._resumed = download, resumed

    @property
    def is_idle(self) -> bool:
        """True if no version waits to start and no chunk is left to give."""
        return self._next is None and not self._handouts

    def start(self, now: float) -> list[ev.Effect]:
        """Announce the next version and start its hand-out, if its turn has come."""
        download = self._next
        if download is None or now < self._turn_at:
            return []
        self._next = None
        announcement = ev.Gossip(news_of(download.manifest, download.index, INLINE_INDEX))
        roster = self._statements.roster(download.manifest.publisher)
        self._unfed = download if roster is None else None
        self._learn()
        self._capacities.note_version()
        if roster is not None:
            self._hand_out(download, roster, now)
        return [announcement]

    def _hand_out(self, download: Download, roster: Roster, now: float) -> None:
        forest = build_forest(roster, download.manifest.version)
        told = download.availability if self._resumed else None
        version, config = download.manifest.version, self._config
        handout = HandOut(
            version, download.encoding, forest, now, config.stall, lines=self._lines, told=told
        )
        for peer in forest.roots:
            if self._is_gone(peer):
                handout.lose(peer)
        self._handouts[download.name] = handout

    @property
    def _turn_at(self) -> float:
        """Latest time at which the next version starts."""
        return max((h.delays_until for h in self._handouts.values()), default=-math.inf)

    def is_resumed(self, policy: bytes) -> bool:
        """Return True if the hand-out of ``policy`` began before this node restarted."""
        handout = self._handouts.get(policy)
        return handout is not None and handout.is_resumed

    # Rosters

    def _learn(self) -> None:
        """Update the peers' believed capacities from the receipts of finished hand-outs."""
        for handout in self._handouts.values():
            for carried in handout.take_receipts() if handout.exhausted else ():
                self._capacities.note_carried(carried.peer, carried.rates, carried.limit)

    def believe(self, entries: Iterable[RosterEntry]) -> list[RosterEntry]:
        """Return the entries with the upload that this origin believes of each peer. A peer
        that is gone is believed to relay nothing."""
        self._learn()
        present = (e if not self._is_gone(e.peer) else RosterEntry(e.peer) for e in entries)
        return self._capacities.believe(present)

    def meet(self, peer: PeerId, now: float) -> None:
        """Feed a peer that has come if it is a root. Schedule a new roster if the present one
        lacks it."""
        if not self._handouts and self._unfed is None:
            return
        for handout in self._handouts.values():
            handout.admit(peer)
        roster = self._statements.roster(self._local)
        if roster is None or peer not in roster.positions:
            due = max(
                now + _SETTLE * self._config.stall,
                self._regrouped_at + self._config.roster_interval,
            )
            self._regroup_at = min(self._regroup_at, due)

    def is_roster_due(self, now: float) -> bool:
        """Return True once if a new roster is due."""
        if now < min(self._regroup_at, self._reported_at):
            return False
        self._regroup_at, self._regrouped_at = math.inf, now
        self._reported_at = math.inf
        return True

    def regroup(self, roster: Roster, now: float) -> None:
        """Hand out along a newly signed roster from now on."""
        download, self._unfed = self._unfed, None
        if download is not None:
            self._hand_out(download, roster, now)
        for handout in self._handouts.values():
            forest = build_forest(roster, handout.version)
            handout.regroup(forest, self._is_gone, now)

    def give(
        self, has_room: Callable[[PeerId], bool], now: float
    ) -> Iterator[tuple[PeerId, ChunkHeader]]:
        """Return chunks for roots with credit. ``has_room`` is called before each chunk."""
        for name, handout in self._handouts.items():
            while (given := handout.give(has_room, now)) is not None:
                peer, stripe, chunk = given
                yield peer, ChunkHeader(name, chunk, handout.epoch, stripe)

    def note_left(self, peer: PeerId, header: ChunkHeader, now: float) -> None:
        """Record that a chunk has left this node for ``peer``."""
        handout = self._handouts.get(header.policy)
        if handout is not None and header.stripe != NO_STRIPE:
            handout.note_left(peer, now)

    def ask(self, policy: bytes, chunk: int, by: PeerId, now: float, lanes: int) -> bool:
        """Return True if the chunk that ``by`` asks for is given along the forest, not to
        ``by`` alone. ``lanes`` peers have something under way."""
        handout = self._handouts.get(policy)
        if handout is None:
            return False
        self._report(handout, handout.suspect(chunk, by, now), by, now)
        return handout.ask(chunk, by, now, lanes)

    def _report(self, handout: HandOut, root: PeerId | None, by: PeerId, now: float) -> None:
        if root is not None and handout.report(root, by):
            self._capacities.note_demoted(root)
            self._regroup_at = now

    def hear(self, peer: PeerId, message: Credit | Blame | Receipt, now: float) -> bool:
        """Handle a message of roots or their children about a hand-out. Return False if it
        cannot be true."""
        handout = self._handouts.get(message.policy)
        if handout is None:
            return True
        if isinstance(message, Credit):
            return handout.confirm(peer, message.received, message.granted, now)
        if isinstance(message, Receipt):
            if handout.note_receipt(peer, message) and handout.exhausted:
                self._reported_at = now + _SETTLE * self._config.stall
        else:
            self._report(handout, message.peer, peer, now)
        return True

    def lose(self, peer: PeerId) -> None:
        """Handle the loss of ``peer``: other roots are given the chunks that it may not have
        forwarded."""
        for handout in self._handouts.values():
            handout.lose(peer)

    def forget(self, policy: bytes) -> None:
        """Forget a version that is no longer held or should not be handed out."""
        self._handouts.pop(policy, None)
        if self._next is not None and self._next.name == policy:
            self._next = None
        if self._unfed is not None and self._unfed.name == policy:
            self._unfed = None

    def expire(self, now: float) -> None:
        """Give again the chunks that roots have not confirmed in time."""
        for handout in self._handouts.values():
            handout.expire(now)

    @property
    def next_deadline(self) -> float:
        """Time at which `expire` or `start` next has something to do."""
        due = [self._regroup_at, self._reported_at]
        due += [handout.next_deadline for handout in self._handouts.values()]
        if self._next is not None and self._turn_at > -math.inf:
            due.append(self._turn_at)
        return min(due)
