"""Whom a node's roles shut out, and why: the bans that it has signed, and those of others.

One for a node, whichever of its roles asks for it. It hears what officers of the run state
(`p2p.ledger.LedgerExchange`), and is asked before work is taken. In a run that bans nobody it
does nothing.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Iterator, Sequence
from typing import Final
from weakref import WeakKeyDictionary

from p2p.bounded import BoundedDict
from p2p.concurrency import Notifier
from p2p.errors import BadMessage
from p2p.identity import PeerId
from p2p.ledger import Entry, LedgerExchange, LedgerFork
from p2p.node.node import Node
from roles.protocol.core.bans import BAN_KIND, MAX_BANNED, Ban, Bans, HeldBan
from roles.protocol.core.messages import SignedVerdict
from roles.run import run_of

logger = logging.getLogger(__name__)

NAMED: Final = 3
"""Officers that a sentence names: it must fit a line (`MAX_REASON`)."""
SHOWN: Final = 64
"""Banned workers that a node's health lists, the latest: 300 bytes each."""


class BanBook:
    """The bans that one node knows of."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._bans = Bans(node.world.verify)
        self._changed = Notifier()
        self._times: BoundedDict[PeerId, int] = BoundedDict(MAX_BANNED)
        self._unexamined: BoundedDict[tuple[PeerId, PeerId], Ban] = BoundedDict(MAX_BANNED)
        """What others have signed, by author and culprit."""
        node.ledgers.on_news(self._hear)
        for officer in node.run.officers:
            for entry in node.ledgers.statements(officer, BAN_KIND):
                self._hear(entry)

    @property
    def is_on(self) -> bool:
        """Whether anybody is banned in this run."""
        return run_of(self._node).terms.ban_seconds > 0

    def standing(self, peer: PeerId) -> HeldBan | None:
        """The ban of ``peer`` that holds for this node now."""
        now, own = self._node.world.wall(), self._node.peer_id
        return self._bans.standing(peer, run_of(self._node), now, self._counts, own)

    def why_banned(self, peer: PeerId) -> str:
        """Why nothing of ``peer`` is taken, and until when; empty if something is."""
        held = self.standing(peer)
        if held is None:
            return ""
        until = datetime.datetime.fromtimestamp(held.until, datetime.UTC)
        who = ", ".join(one.short for one in held.by[:NAMED])
        reason = held.ban.gravest.reason
        return f"banned until {until:%Y-%m-%d %H:%M:%S} UTC ({reason}), as proven by {who}"

    @property
    def banned(self) -> Iterator[tuple[PeerId, HeldBan]]:
        """Who is shut out now, and by whose word."""
        for peer in self._bans:
            held = self.standing(peer)
            if held is not None:
                yield peer, held

    def health(self) -> dict[str, dict[str, object]]:
        """Who has been banned of late, as plain values: how often, by whom, and, while it is
        shut out, why and until when."""
        found: dict[str, dict[str, object]] = {}
        for peer, times in [*self._times.items()][-SHOWN:]:
            held = self.standing(peer)
            found[str(peer)] = {
                "times": times,
                "until": 0 if held is None else held.until,
                "by": [str(one) for one in self._bans.authors(peer)],
                "reason": "" if held is None else held.ban.gravest.reason,
            }
        return found

    async def sign(self, verdicts: Sequence[SignedVerdict]) -> None:
        """Ban their worker in this node's name. Raises `StorageError`."""
        world, run = self._node.world, run_of(self._node)
        ban = Ban(tuple(verdicts), int(world.wall()) + run.terms.ban_seconds)
        ledger = await self._node.ledger.opened()
        self._hear(await ledger.append(BAN_KIND, ban.to_bytes()))
        world.trace("worker.banned", worker=ban.culprit)

    async def recall(self) -> None:
        """Take up what this node has signed in earlier lives."""
        ledger = await self._node.ledger.opened()
        async for entry in ledger.entries(BAN_KIND):
            self._hear(entry)

    async def wait_news(self) -> None:
        """Return when the next ban of another officer comes, whose evidence may be
        repeated."""
        await self._changed.wait()

    def take_unexamined(self) -> list[tuple[PeerId, Ban]]:
        """Those that have come since, each with who signed it."""
        found = [(author, ban) for (author, _), ban in self._unexamined.items()]
        self._unexamined.clear()
        return found

    def is_open(self, author: PeerId, ban: Ban) -> bool:
        """Whether it matters to repeat ``ban``: it would shut somebody out that is not yet."""
        is_over = ban.until <= self._node.world.wall()
        return not is_over and self._counts(author) and self.standing(ban.culprit) is None

    def _counts(self, author: PeerId) -> bool:
        return not self._node.ledgers.is_forked(author)

    def _hear(self, news: Entry | LedgerFork) -> None:
        run = run_of(self._node)
        if isinstance(news, Entry) and news.kind == BAN_KIND and run.terms.ban_seconds:
            try:
                ban = self._bans.note_untrusted(news, run, self._node.world.wall())
            except BadMessage as error:
                logger.warning("ban_void author=%s: %s", news.author, error)
                return
            if ban is not None:
                self._note(news.author, ban)
                self._tell_shunned()
        elif isinstance(news, LedgerFork):
            self._tell_shunned()

    def _note(self, author: PeerId, ban: Ban) -> None:
        self._times.renew(ban.culprit, self._times.get(ban.culprit, 0) + 1)
        logger.info(
            "%s bans %s: %s (%g, limit %g)",
            author.short,
            ban.culprit,
            ban.gravest.reason,
            ban.gravest.statistic,
            ban.gravest.limit,
        )
        if author != self._node.peer_id and ban.until > self._node.world.wall():
            self._unexamined.renew((author, ban.culprit), ban)
            self._changed.notify_all()

    def _tell_shunned(self) -> None:
        self._node.shunned.replace({peer: float(held.until) for peer, held in self.banned})


_BOOKS: Final[WeakKeyDictionary[LedgerExchange, BanBook]] = WeakKeyDictionary()
"""By the ledgers of a node, so that its roles share one."""


def bans_of(node: Node) -> BanBook:
    """The bans that ``node`` knows of; it listens from the first call on."""
    book = _BOOKS.get(node.ledgers)
    if book is None:
        book = _BOOKS[node.ledgers] = BanBook(node)
    return book
