"""Admission of workers' requests: reads their requests and contents, and replies.

Known peers (in standing, or officers) are admitted at once, up to a rate that no honest node
reaches. Strangers wait unread and are admitted in turns (`roles.protocol.core.turnstile`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import trio

from p2p.bounded import BoundedDict, RateLimit
from p2p.host import Stream, send_frame
from p2p.identity import PeerId
from p2p.node.node import Node
from p2p.swarm.core.limits import MAX_SERVED
from p2p.world import decode_off_loop
from roles.protocol.core.answer import (
    MAX_REQUEST,
    Refused,
    Reply,
    Request,
    Word,
    decode_request_untrusted,
    encode_reply,
)
from roles.protocol.core.groups import HASH_RATE
from roles.protocol.core.turnstile import Turnstile
from roles.protocol.core.window import SignedWindow, Submission, bind_untrusted
from roles.protocol.reading import (
    FIRST_BYTE_SECONDS,
    HEAD_SECONDS,
    receive_content,
    receive_frame,
)
from roles.protocol.seats import Seats
from roles.protocol.stats import ScoringStats

HEADS: Final = 32.0
"""Most requests of strangers that are read in a second, all together: at 0.6 ms each 2 % of a
core. A scorer judges fewer."""
HEADS_AT_ONCE: Final = 64.0
OWN_HEADS: Final = 64.0
"""Most requests of one known node in a second; further ones wait among the strangers'."""
AT_DOOR: Final = 1024
"""Most streams of strangers that wait: 128 nodes with eight each, 7 MiB."""
AT_DOOR_PER_NETWORK: Final = AT_DOOR // 8
DOOR_SECONDS: Final = 60.0
"""Most seconds for which such a stream waits: less than its peer waits for an answer."""
REPLY_SECONDS: Final = 10.0


@dataclass(slots=True, eq=False)
class _Turn:
    """A waiting stream."""

    is_over: trio.Event = field(default_factory=trio.Event)
    is_heard: bool = False
    """True if it is the stream's turn; False if the stream was evicted for one of a peer with
    fewer streams."""


class Door:
    """The queue of streams that wait to be read, and the seats of those being read."""

    def __init__(self, node: Node, stats: ScoringStats, strangers: int | None = None) -> None:
        """Make a door; ``strangers`` is the number of seats for contents of all peers without
        accepted work; None: all seats."""
        self._node = node
        self._stats = stats
        self._streams = Seats(in_all=MAX_SERVED)
        self.contents = Seats(strangers=strangers)
        """Seats for contents that are on their way."""
        self._turns: Turnstile[_Turn] = Turnstile(
            HEADS,
            HEADS_AT_ONCE,
            in_all=AT_DOOR,
            per_network=AT_DOOR_PER_NETWORK,
            evict=lambda turn: turn.is_over.set(),
        )
        self._timer_runs = False
        self._heads: BoundedDict[PeerId, RateLimit] = BoundedDict(1024)

    def refuse(self, kind: str, sentence: str = "", *, retry: bool = False) -> Refused:
        """Return a refusal and count it by its kind. Sentences name peers, so they are no keys
        of counts."""
        self._stats.refuse(kind)
        return Refused(sentence or kind, retry)

    async def serve(
        self,
        stream: Stream,
        answer: Callable[[Stream, Request, bytes], Awaitable[Reply | None]],
        *,
        is_known: bool = False,
        refused: Refused | None = None,
    ) -> None:
        """Read a request when it is the peer's turn, and send what ``answer`` says to it.

        ``answer`` gets the bytes that were read beyond the request. A peer for which there is
        ``refused`` is told so at once.
        """
        with self._streams.seat(stream.peer) as seated:
            reply: Reply | None = refused
            if not seated:
                reply = self.refuse("too many streams", retry=True)
            elif refused is None and not await self._enter(stream.peer, is_known=is_known):
                reply = self.refuse("too many newcomers at the door", retry=True)
            elif refused is None:
                first = HEAD_SECONDS if is_known else FIRST_BYTE_SECONDS
                begun = await receive_frame(stream, MAX_REQUEST, first_byte=first)
                if begun is None:
                    return
                reply = await answer(stream, decode_request_untrusted(begun[0]), begun[1])
            if reply is not None:
                with trio.move_on_after(REPLY_SECONDS):
                    await send_frame(stream, encode_reply(reply))

    async def receive(
        self,
        stream: Stream,
        signed: SignedWindow,
        index: int,
        length: int,
        begun: bytes,
        *,
        is_stranger: bool = False,
    ) -> Submission | Refused:
        """Ask for the content of a place, and lend it a seat while it is on its way.

        Raises:
            BadMessage: It is not what the window binds.
        """
        content = None
        with trio.CancelScope() as scope:
            seat = self.contents.take(
                stream.peer,
                self._node.world.now(),
                network=self._node.host.network_of(stream.peer),
                is_stranger=is_stranger,
                evict=scope.cancel,
            )
            if seat is None:
                return self.refuse("no seat", "too much content is on its way", retry=True)
            try:
                await send_frame(stream, encode_reply(Word.SEND))
                content = await receive_content(stream, begun, length, seat)
            finally:
                self.contents.leave(seat)
        if content is None:
            return self.refuse("too slow", "it took too long to arrive", retry=True)
        bind = partial(bind_untrusted, signed, index)
        return await decode_off_loop(self._node.world, bind, content, rate=HASH_RATE)

    async def _enter(self, peer: PeerId, *, is_known: bool) -> bool:
        """Wait for the peer's turn. Return True when it has come, False if it did not come in
        time."""
        world = self._node.world
        if is_known and self._meter(peer):
            return True
        network, turn = self._node.host.network_of(peer), _Turn()
        if not self._turns.add(peer, network, turn, world.now()):
            return False
        self._let_in()
        with trio.move_on_after(DOOR_SECONDS):
            try:
                await turn.is_over.wait()
            finally:
                self._turns.remove(peer, network, turn)
        return turn.is_heard

    def _meter(self, peer: PeerId) -> bool:
        meter = self._heads.get(peer) or RateLimit(OWN_HEADS, OWN_HEADS)
        self._heads.renew(peer, meter)
        return meter.allows(1.0, self._node.world.now())

    def _let_in(self) -> None:
        now = self._node.world.now()
        while (turn := self._turns.next(now)) is not None:
            turn.is_heard = True
            turn.is_over.set()
        if len(self._turns) and not self._timer_runs:
            self._timer_runs = True
            self._node.world.call_at(now + self._turns.seconds_left(now), self._on_timer)

    def _on_timer(self) -> None:
        self._timer_runs = False
        self._let_in()
