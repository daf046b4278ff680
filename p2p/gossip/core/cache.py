"""What was seen, and what can still be asked for. Both forget by time, and both are bounded."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final

from p2p.gossip.messages import PubsubMessage
from p2p.identity import PeerId
from p2p.wire import MIB

MAX_SEEN: Final = 64 * 1024
"""Ids: 500 messages a second for 2 minutes, 10 MiB."""
SPILL: Final = 256
"""Noise dropped at once when there is no room: the search for the largest holder is paid for once in so
many ids. An RPC brings as many messages at most."""
MAX_CACHE_BYTES: Final = 16 * MIB
"""Bytes of messages kept for IWANT; beyond it the newest are not kept, and go by the mesh alone."""
MAX_CACHE_OF_AUTHOR: Final = MAX_CACHE_BYTES // 4
"""Bytes kept of one author: an author that says too much leaves room for what others say."""
MESSAGE_COST: Final = 512
"""Bytes that a message counts for besides its data: its head, its objects, and its place in the tables.
Without it messages without data would be kept without a limit, and fit an answer by the thousand."""
MAX_RETRANSMISSIONS: Final = 3
"""Times one peer gets one message by IWANT."""


def size_of(message: PubsubMessage) -> int:
    """What a message counts for where bytes are limited; never less than it has on the wire."""
    return len(message.data or b"") + MESSAGE_COST


class SeenCache:
    """Ids that need not be looked at again, and whether what they name was a lie.

    What was accepted, and what we said ourselves, is *news*. All else (not judged yet, ignored, rejected) is
    *noise*, and stands against the peer that sent it. A stranger makes any number of signed messages that are
    no news to anybody: they push out noise, of the peer that has sent most of it, and never news. Else a
    flood would make us take old messages for new ones.
    """

    def __init__(self, ttl: float) -> None:
        self._ttl = ttl
        self._news: dict[bytes, float] = {}
        self._noise: dict[PeerId, dict[bytes, float]] = {}
        self._sender: dict[bytes, PeerId] = {}
        self._lies: dict[bytes, None] = {}

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._news or identity in self._sender

    def __len__(self) -> int:
        return len(self._news) + len(self._sender)

    def noise_of(self, peer: PeerId) -> int:
        """How many ids stand against ``peer``."""
        return len(self._noise.get(peer, ()))

    def add(self, identity: bytes, peer: PeerId, now: float) -> None:
        """Remember what ``peer`` sent: noise, until it is accepted."""
        self._make_room()
        self._noise.setdefault(peer, {})[identity] = now + self._ttl
        self._sender[identity] = peer

    def accept(self, identity: bytes, now: float) -> None:
        """Remember news."""
        self._forget(identity)
        self._make_room()
        self._news[identity] = now + self._ttl

    def condemn(self, identity: bytes) -> None:
        """What a seen id names was rejected: a peer that sends it again is at fault too."""
        if identity in self._sender:
            self._lies[identity] = None

    def is_lie(self, identity: bytes) -> bool:
        """Whether what it names was rejected."""
        return identity in self._lies

    def expire(self, now: float) -> None:
        """Forget what is old."""
        for identity in _ended(self._news, now):
            del self._news[identity]
        for noise in list(self._noise.values()):
            for identity in _ended(noise, now):
                self._forget(identity)

    def _make_room(self) -> None:
        if len(self) < MAX_SEEN:
            return
        if not self._noise:
            del self._news[next(iter(self._news))]
            return
        largest = max(self._noise.values(), key=len)
        for identity in list(largest)[:SPILL]:
            self._forget(identity)

    def _forget(self, identity: bytes) -> None:
        """Forget noise."""
        sender = self._sender.pop(identity, None)
        if sender is None:
            return
        noise = self._noise[sender]
        del noise[identity]
        if not noise:
            del self._noise[sender]
        self._lies.pop(identity, None)


def _ended(until: dict[bytes, float], now: float) -> list[bytes]:
    """The keys whose time is over, of a table in the order of time."""

    def take() -> Iterator[bytes]:
        for identity, end in until.items():
            if end > now:
                return
            yield identity

    return list(take())


class MessageCache:
    """The messages of the last few intervals (gossipsub's mcache)."""

    def __init__(self, history: int, history_gossip: int) -> None:
        self._windows: deque[list[PubsubMessage]] = deque([[] for _ in range(history)])
        self._gossip = history_gossip
        self._messages: dict[bytes, PubsubMessage] = {}
        self._asked: dict[bytes, dict[PeerId, int]] = {}
        self._bytes = 0
        self._bytes_of: dict[bytes, int] = {}

    def put(self, message: PubsubMessage) -> None:
        """Keep a message for the time of the history, if there is room for it and for its author."""
        size = size_of(message)
        share = self._bytes_of.get(message.author, 0) + size
        full = self._bytes + size > MAX_CACHE_BYTES or share > MAX_CACHE_OF_AUTHOR
        if message.id not in self._messages and not full:
            self._messages[message.id] = message
            self._windows[0].append(message)
            self._bytes += size
            self._bytes_of[message.author] = share

    def ids(self, topic: str) -> list[bytes]:
        """Ids of a topic that are news to tell of, oldest first."""
        recent = list(self._windows)[: self._gossip]
        return [message.id for window in reversed(recent) for message in window if message.topic == topic]

    def take(self, identity: bytes, peer: PeerId) -> PubsubMessage | None:
        """The message for a peer that asks for it; None if it is gone or was asked for too often."""
        message = self._messages.get(identity)
        if message is None:
            return None
        asked = self._asked.setdefault(identity, {})
        if asked.get(peer, 0) >= MAX_RETRANSMISSIONS:
            return None
        asked[peer] = asked.get(peer, 0) + 1
        return message

    def shift(self) -> None:
        """An interval has gone by."""
        for message in self._windows.pop():
            del self._messages[message.id]
            self._asked.pop(message.id, None)
            size = size_of(message)
            self._bytes -= size
            self._bytes_of[message.author] -= size
            if not self._bytes_of[message.author]:
                del self._bytes_of[message.author]
        self._windows.appendleft([])
