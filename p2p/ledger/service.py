"""Driver of `Exchange`: asks peers, answers them, and tells the node of new proofs.

Two nodes that meet exchange in both directions: a node that is asked by a peer with more
entries asks back, at most once in `ASK_BACK`. Anybody may claim to have more, so asking back
comes beside the questions to random peers, never instead of one, and who brought nothing when
it was asked on its own word is not believed for a while. What is answered, and how often, is
bounded per peer; a peer that sends what no author has signed is penalised.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final

import trio

from p2p.bounded import BoundedDict, KeyedQuotas
from p2p.concurrency import AutoResetEvent
from p2p.equivocation import Equivocation
from p2p.errors import BadMessage, RemoteProtocolError, ShoalError
from p2p.host import Host, Stream, request, send_frame
from p2p.identity import PeerId
from p2p.ledger.core.chain import (
    Statement,
    decode_brief_untrusted,
    decode_fork_untrusted,
    sign_head,
)
from p2p.ledger.core.exchange import (
    LEDGER_PROTOCOL,
    MAX_ANSWER,
    MAX_QUESTION,
    Answer,
    Exchange,
    News,
    decode_answer_untrusted,
    decode_question_untrusted,
)
from p2p.ledger.ledger import KeptLedgers, Ledger
from p2p.meter import StrangerMeter
from p2p.offence import Offence
from p2p.wire import FrameReader
from p2p.world import World

logger = logging.getLogger(__name__)

ASK_BACK: Final = 1.0
"""Minimum seconds between two questions, even if a peer has more entries than this node. A
tenth of a swarm's nodes may ask one node in an interval."""
ASK_SECONDS: Final = 20.0
"""Seconds to wait for an answer: 256 KiB at 128 kbit/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeConfig:
    """Configuration of the exchange of trainers' and validators' ledgers between nodes."""

    is_on: bool = False
    """True if ledgers are exchanged. The run file decides this, since all nodes of a run must
    agree."""
    interval: float = 10.0
    """Seconds between two questions of a node. News reaches all of a swarm of 200 after some
    five of them, and each costs 100 bytes an author."""

    def __post_init__(self) -> None:
        if not 0.1 <= self.interval <= 600:
            raise ValueError("nodes exchange ledgers every 0.1 to 600 seconds")


class LedgerExchange:
    """Copies of trainers' and validators' ledgers at this node, which asks others for them
    (`run`) and answers (`serving`)."""

    def __init__(
        self,
        world: World,
        host: Host,
        own: Ledger,
        config: ExchangeConfig,
        peers: Callable[[], Sequence[PeerId]],
        meter: StrangerMeter | None = None,
    ) -> None:
        """Prepare the exchange. ``peers`` are those that may be asked; answers to others are
        charged to ``meter``, by default a meter of its own."""
        self._world = world
        self._host = host
        self._own = own
        self._config = config
        self._peers = peers
        self._meter = meter or StrangerMeter(world, lambda peer: peer in peers())
        self.exchange = Exchange(world.verify)
        """Copies of the followed ledgers, and proofs against their authors."""
        self._kept = KeptLedgers(world, self.exchange)
        # Five questions in the interval in which an honest peer asks one, and eight at once, as
        # for a node that returns after a day.
        self._asking = KeyedQuotas(0.5, 8.0)
        self._due = AutoResetEvent()
        self._next: PeerId | None = None
        """Peer that claims to have more than this node, if any."""
        self._doubted: BoundedDict[PeerId, float] = BoundedDict(1024)  # as are connected
        """Maps each peer to the time until which its claim to have more is ignored."""
        self._finders: list[Callable[[Equivocation[Statement]], None]] = []
        self._followed = AutoResetEvent()

    @property
    def is_on(self) -> bool:
        """True if ledgers are exchanged in this run."""
        return self._config.is_on

    def is_forked(self, author: PeerId) -> bool:
        """Return True if ``author`` has equivocated, so that none of its statements count."""
        return author in self.exchange.forks

    def on_found(self, listener: Callable[[Equivocation[Statement]], None]) -> None:
        """Call ``listener`` with each proof that this node finds itself, not with those from
        others."""
        self._finders.append(listener)

    def follow(self, authors: Sequence[PeerId]) -> None:
        """Keep the ledgers of these authors from now on, and of no others."""
        self.exchange.follow(authors if self._config.is_on else ())
        self._followed.set()

    # What the node hands over.

    def hear_head(self, author: PeerId, brief: bytes) -> None:
        """Process the head of its ledger that ``author`` sent in a heartbeat."""
        if author not in self.exchange.authors or self.is_forked(author):
            return
        try:
            head = decode_brief_untrusted(author, brief)
            news = self.exchange.take_untrusted(head)
        except BadMessage as error:
            # Whoever passed the heartbeat on could not read it: it is its author's own.
            logger.info("ledger.head_refused author=%s reason=%s", author, error)
            return
        if news is not None:
            self._tell(news, is_found=True)
        elif head.seqno > self.exchange.top(author):
            self._hear_claim(author)

    def _hear_claim(self, peer: PeerId) -> bool:
        """Note the claim of ``peer`` to have more than this node. Return False if it is
        ignored."""
        if self._world.now() < self._doubted.get(peer, 0.0):
            return False
        self._next = self._next or peer
        return True

    def hear_fork_untrusted(self, data: bytes) -> bool:
        """Process a proof from gossip and return True if it is news.

        Raises:
            BadMessage: The bytes prove nothing.
        """
        fork = self.exchange.take_fork_untrusted(decode_fork_untrusted(data))
        if fork is not None:
            self._tell(fork)
        return fork is not None

    # The tasks.

    async def run(self, tell_head: Callable[[bytes], None]) -> None:
        """Exchange ledgers until cancelled. ``tell_head`` puts the head of our own ledger into
        our heartbeats."""
        if not self._config.is_on:
            return
        async for one in self._kept.read():
            self.take_own(one)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._state, tell_head)
            nursery.start_soon(self._ask_forever)

    async def _state(self, tell_head: Callable[[bytes], None]) -> None:
        """Add our own new entries to the exchange, if the run names us, until cancelled."""
        me = self._world.signer.peer_id
        while me not in self.exchange.authors:
            await self._followed.wait()
        ledger = await self._own.opened()
        seen = max(self.exchange.top(me), ledger.head.seqno - 1024)
        while True:
            await ledger.wait_grown(seen)
            news: list[News] = []
            async for entry in ledger.entries(start=seen + 1):
                news += [one] if (one := self.take_own(entry)) is not None else []
                seen = entry.seqno
                if len(news) >= 64:
                    break
            if seen == ledger.head.seqno:
                tell_head(sign_head(ledger.head, self._world.signer).brief())
            await self._kept.keep(news)

    async def _ask_forever(self) -> None:
        world, dice, due = self._world, self._world.rng("ledgers"), 0.0
        while True:
            with trio.move_on_after(max(due - world.now(), 0.0)):
                await self._due.wait()
            peers = [one for one in self._peers() if one != world.signer.peer_id]
            claimant, self._next = self._next, None
            if not peers or not self.exchange.authors:
                due = world.now() + ASK_BACK
                continue
            if claimant in peers and not await self._ask_one(claimant):
                # Twelve questions go to others meanwhile.
                self._doubted.renew(claimant, world.now() + 120.0)
            if world.now() >= due:
                await self._ask_one(dice.choice(peers))
                due = world.now() + self._config.interval * dice.uniform(0.75, 1.25)

    async def _ask_one(self, peer: PeerId) -> bool:
        """Ask one peer, then pause. Return True if it answers, and its answer held news."""
        is_news = False
        question = self.exchange.question().to_bytes()
        try:
            with trio.move_on_after(ASK_SECONDS):
                reply = await request(
                    self._host, peer, LEDGER_PROTOCOL, question, max_reply=MAX_ANSWER
                )
                is_news = await self._merge_untrusted(reply)
        except RemoteProtocolError as error:
            self._host.penalise(peer, Offence.NONSENSE.points, str(error))
        except (ShoalError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            logger.debug("ledger.no_answer peer=%s reason=%s", peer, error)
        # If peers have entries of our own log that it lacks, it would sign their numbers again.
        told = self.exchange.top(self._world.signer.peer_id)
        if told >= 0 and told > (await self._own.opened()).head.seqno:
            raise self._own.came_from_backup(told)
        await self._world.sleep_until(self._world.now() + ASK_BACK)
        return is_news

    async def _merge_untrusted(self, reply: bytes) -> bool:
        """Merge an answer and return True if it held news.

        Raises:
            BadMessage: An entry has no valid signature. Earlier entries stay.
        """
        answer = decode_answer_untrusted(reply)
        news: list[News] = []
        try:
            for said in (*answer.forks, *answer.statements):
                one = self._take_untrusted(said)
                if one is not None:
                    self._tell(one, is_found=one is not said)
                    news.append(one)
        finally:
            await self._kept.keep(news)
        return bool(news)

    def serving(self) -> AbstractContextManager[None]:
        """Answer peers' questions for the length of the block, if ledgers are exchanged."""
        on = self._config.is_on
        return self._host.serving(LEDGER_PROTOCOL, self.serve) if on else nullcontext()

    async def serve(self, stream: Stream) -> None:
        """Answer one question on a stream, as a `StreamHandler`. A peer that asks too often
        gets no answer, and a stranger an empty one if strangers' share is used up."""
        if not self._asking.take(stream.peer, self._world.now()):
            return
        with trio.move_on_after(ASK_SECONDS):
            asked = await FrameReader(stream, MAX_QUESTION).receive()
            if asked is None:
                return
            answer = self.exchange.answer(decode_question_untrusted(asked))
            reply = answer.to_bytes()
            if not self._meter.allows(stream.peer, len(reply)):
                reply = Answer().to_bytes()
            await send_frame(stream, reply)
            if answer.is_behind and self._hear_claim(stream.peer):
                self._due.set()

    def take_own(self, one: News) -> News | None:
        """Add a statement or proof from this node's own disk, and return it if it is new."""
        try:
            found = self._take_untrusted(one)
        except BadMessage as error:
            logger.warning("ledger.copy_refused reason=%s", error)
            return None
        if found is not None:
            self._tell(found, is_found=found is not one)
        return found

    def _take_untrusted(self, said: Statement | Equivocation[Statement]) -> News | None:
        if isinstance(said, Equivocation):
            return self.exchange.take_fork_untrusted(said)
        return self.exchange.take_untrusted(said)

    def _tell(self, news: News, *, is_found: bool = False) -> None:
        if isinstance(news, Equivocation):
            for finder in self._finders if is_found else ():
                finder(news)
            logger.warning(
                "%s has signed two stories about entry %d of its ledger: nothing that it states"
                " counts any more; ask the run's owner for an edition that does not name it",
                news.author,
                news.number,
            )
            self._world.trace("ledger.forked", author=news.author)
