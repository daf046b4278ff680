"""What was seen, and what can still be asked for. Both forget by time, and both are bounded."""

from __future__ import annotations

from collections import deque
from typing import Final

from p2p.gossip.messages import PubsubMessage
from p2p.identity import PeerId
from p2p.wire import MIB

MAX_SEEN: Final = 64 * 1024
"""Ids: 500 messages a second for 2 minutes, 10 MiB."""
MAX_CACHE_BYTES: Final = 16 * MIB
"""Bytes of messages kept for IWANT; beyond it the newest are not kept, and go by the mesh alone."""
MAX_RETRANSMISSIONS: Final = 3
"""Times one peer gets one message by IWANT."""


class SeenCache:
    """Ids that need not be looked at again, and whether what they name was a lie."""

    def __init__(self, ttl: float) -> None:
        self._ttl = ttl
        self._seen: dict[bytes, float] = {}
        self._lies: dict[bytes, None] = {}

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._seen

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, identity: bytes, now: float) -> None:
        """Remember an id."""
        if len(self._seen) >= MAX_SEEN:
            self._drop_oldest()
        self._seen[identity] = now + self._ttl

    def condemn(self, identity: bytes) -> None:
        """What a seen id names was rejected: whoever sends it again is at fault too."""
        if identity in self._seen:
            self._lies[identity] = None

    def is_lie(self, identity: bytes) -> bool:
        """Whether what it names was rejected."""
        return identity in self._lies

    def expire(self, now: float) -> None:
        """Forget what is old."""
        while self._seen and next(iter(self._seen.values())) <= now:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        oldest = next(iter(self._seen))
        del self._seen[oldest]
        self._lies.pop(oldest, None)


class MessageCache:
    """The messages of the last few intervals (gossipsub's mcache)."""

    def __init__(self, history: int, history_gossip: int) -> None:
        self._windows: deque[list[PubsubMessage]] = deque([[] for _ in range(history)])
        self._gossip = history_gossip
        self._messages: dict[bytes, PubsubMessage] = {}
        self._asked: dict[bytes, dict[PeerId, int]] = {}
        self._bytes = 0

    def put(self, message: PubsubMessage) -> None:
        """Keep a message for the time of the history."""
        size = len(message.data or b"")
        if message.id not in self._messages and self._bytes + size <= MAX_CACHE_BYTES:
            self._messages[message.id] = message
            self._windows[0].append(message)
            self._bytes += size

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
        asked[peer] = asked.get(peer, 0) + 1
        return message if asked[peer] <= MAX_RETRANSMISSIONS else None

    def shift(self) -> None:
        """An interval has gone by."""
        for message in self._windows.pop():
            del self._messages[message.id]
            self._asked.pop(message.id, None)
            self._bytes -= len(message.data or b"")
        self._windows.appendleft([])
