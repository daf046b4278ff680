"""Caches of gossip messages.

`MessageCache` holds the messages that peers can still request by IWANT (gossipsub's mcache).
`SeenCache` holds the message ids that were seen before, bounded against strangers.
"""

from __future__ import annotations

from collections import deque
from itertools import takewhile
from typing import Final

from p2p.gossip.messages import PubsubMessage
from p2p.identity import PeerId
from p2p.wire import MIB

MAX_SEEN: Final = 64 * 1024
"""Maximum number of ids, 10 MiB: 500 messages a second for the 2 minutes that an id is kept. A
run publishes a few a minute; the rest is room for floods."""


class SeenCache:
    """Ids of messages that were seen, with those that the validator rejected.

    Ids are of two kinds. *Accepted* are those of messages that the validator accepted, and our
    own. *Unaccepted* are all others: not validated yet, ignored, or rejected; each is counted
    against the peer that sent it first.

    The two kinds are evicted differently. A stranger can sign any number of messages that no
    validator accepts. With one table in order of time, 66,000 of them pushed out every accepted
    id, and old messages were delivered a second time. So room is made at the cost of the peer
    with most unaccepted ids, and an accepted id goes only when all ids are accepted: then the
    oldest.
    """

    def __init__(self, least: float = 0.0) -> None:
        """Keep each id for two minutes, or for ``least`` seconds if that is longer.

        A message that comes later is delivered twice (seen_ttl). Even a message that waits for
        five seconds in each cache takes twenty hops in less time.
        """
        self._ttl = max(120.0, least)
        self._accepted: dict[bytes, float] = {}
        self._unaccepted: dict[PeerId, dict[bytes, float]] = {}
        self._sender: dict[bytes, PeerId] = {}
        self._rejected: dict[bytes, None] = {}

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._accepted or identity in self._sender

    def __len__(self) -> int:
        return len(self._accepted) + len(self._sender)

    def add(self, identity: bytes, peer: PeerId, now: float) -> None:
        """Note a message from ``peer``; it counts as unaccepted until `accept`."""
        self._make_room()
        self._unaccepted.setdefault(peer, {})[identity] = now + self._ttl
        self._sender[identity] = peer

    def accept(self, identity: bytes, now: float) -> None:
        """Mark a message as accepted, or as published by this node."""
        self._drop_unaccepted(identity)
        self._make_room()
        self._accepted[identity] = now + self._ttl

    def reject(self, identity: bytes) -> None:
        """Mark a message as rejected. Each peer that sends it again is penalised too."""
        if identity in self._sender:
            self._rejected[identity] = None

    def is_rejected(self, identity: bytes) -> bool:
        """Return True if the validator rejected this message."""
        return identity in self._rejected

    def expire(self, now: float) -> None:
        """Forget the expired ids. This is called once in each heartbeat."""
        for identity in _expired(self._accepted, now):
            del self._accepted[identity]
        for expiries in list(self._unaccepted.values()):
            for identity in _expired(expiries, now):
                self._drop_unaccepted(identity)

    def _make_room(self) -> None:
        if len(self) < MAX_SEEN:
            return
        if not self._unaccepted:
            del self._accepted[next(iter(self._accepted))]
            return
        largest = max(self._unaccepted.values(), key=len)
        # Unaccepted ids dropped when there is no room. The peer that holds most of them is
        # found by a walk over all senders; with 256 at a time that walk is paid for once in so
        # many ids. One RPC brings at most 256 messages.
        for identity in list(largest)[:256]:
            self._drop_unaccepted(identity)

    def _drop_unaccepted(self, identity: bytes) -> None:
        sender = self._sender.pop(identity, None)
        if sender is None:
            return
        ids = self._unaccepted[sender]
        del ids[identity]
        if not ids:
            del self._unaccepted[sender]
        self._rejected.pop(identity, None)


def _expired(expiries: dict[bytes, float], now: float) -> list[bytes]:
    """Return the expired ids of a table that is in order of expiry."""
    return list(takewhile(lambda identity: expiries[identity] <= now, expiries))


MAX_CACHE_BYTES: Final = 16 * MIB
"""Maximum bytes of messages kept for IWANT. Further messages are not kept, and spread by the
mesh alone."""


def size_of(message: PubsubMessage) -> int:
    """Return the bytes that a message counts for in limits; never less than on the wire."""
    # 512 for its header, objects and table entries. Without this, any number of empty messages
    # would be kept, and one answer would hold thousands of them.
    return len(message.data or b"") + 512


class MessageCache:
    """Accepted messages of the last five heartbeats, in one window for each (mcache_len). This
    is two more than they are advertised for, so that a late IWANT still finds them."""

    def __init__(self) -> None:
        self._windows: deque[list[PubsubMessage]] = deque([[] for _ in range(5)])
        self._messages: dict[bytes, PubsubMessage] = {}
        self._bytes = 0
        self._bytes_of: dict[bytes, int] = {}

    def put(self, message: PubsubMessage) -> None:
        """Store a message in the newest window if there is room for it and for its author."""
        size = size_of(message)
        share = self._bytes_of.get(message.author, 0) + size
        # Bytes kept of one author: an author that publishes too much leaves room for the
        # others.
        full = self._bytes + size > MAX_CACHE_BYTES or share > MAX_CACHE_BYTES // 4
        if message.id not in self._messages and not full:
            self._messages[message.id] = message
            self._windows[0].append(message)
            self._bytes += size
            self._bytes_of[message.author] = share

    @property
    def topics(self) -> list[str]:
        """Topics of the messages."""
        return list(dict.fromkeys(message.topic for message in self._messages.values()))

    def gossip_ids(self, topic: str) -> list[bytes]:
        """Return the ids of a topic to advertise by IHAVE, oldest first: those of the last
        three heartbeats (mcache_gossip)."""
        recent = list(self._windows)[:3]
        messages = (message for window in reversed(recent) for message in window)
        return [message.id for message in messages if message.topic == topic]

    def get(self, identity: bytes) -> PubsubMessage | None:
        """Return a message that a peer requests, or None if it is not kept."""
        return self._messages.get(identity)

    def shift(self) -> None:
        """Drop the oldest window and begin a new one. This is called once in each heartbeat."""
        for message in self._windows.pop():
            del self._messages[message.id]
            size = size_of(message)
            self._bytes -= size
            self._bytes_of[message.author] -= size
            if not self._bytes_of[message.author]:
                del self._bytes_of[message.author]
        self._windows.appendleft([])
