"""The messages that peers can still ask for by IWANT (gossipsub's mcache)."""

from __future__ import annotations

from collections import deque
from typing import Final

from p2p.gossip.messages import PubsubMessage
from p2p.identity import PeerId
from p2p.wire import MIB

MAX_CACHE_BYTES: Final = 16 * MIB
"""Bytes of messages kept for IWANT. Beyond it new ones are not kept, and spread by the mesh
alone."""
MAX_CACHE_OF_AUTHOR: Final = MAX_CACHE_BYTES // 4
"""Bytes kept of one author: an author that publishes too much leaves room for the others."""
MESSAGE_COST: Final = 512
"""Bytes that a message counts for besides its data: its header, its objects, its place in the
tables. Without it messages with no data would be kept without a limit, and one answer would
hold thousands of them."""
MAX_RETRANSMISSIONS: Final = 3
"""Times one peer gets one message by IWANT (gossip_retransmission). gossipsub's 3: an answer
may be lost, and an id of 48 bytes that asks for 256 KiB is an amplifier."""


def size_of(message: PubsubMessage) -> int:
    """Bytes that a message counts for where bytes are limited; never less than it has on the
    wire."""
    return len(message.data or b"") + MESSAGE_COST


class MessageCache:
    """The accepted messages of the last heartbeats, one window for each."""

    def __init__(self, history: int, history_gossip: int) -> None:
        """``history`` windows are kept, the newest ``history_gossip`` of them are
        advertised."""
        self._windows: deque[list[PubsubMessage]] = deque([[] for _ in range(history)])
        self._history_gossip = history_gossip
        self._messages: dict[bytes, PubsubMessage] = {}
        self._transmissions: dict[bytes, dict[PeerId, int]] = {}
        self._bytes = 0
        self._bytes_of: dict[bytes, int] = {}

    def put(self, message: PubsubMessage) -> None:
        """Keep a message in the newest window, if there is room for it and for its author."""
        size = size_of(message)
        share = self._bytes_of.get(message.author, 0) + size
        full = self._bytes + size > MAX_CACHE_BYTES or share > MAX_CACHE_OF_AUTHOR
        if message.id not in self._messages and not full:
            self._messages[message.id] = message
            self._windows[0].append(message)
            self._bytes += size
            self._bytes_of[message.author] = share

    def gossip_ids(self, topic: str) -> list[bytes]:
        """Ids of a topic to advertise by IHAVE, oldest first."""
        recent = list(self._windows)[: self._history_gossip]
        messages = (message for window in reversed(recent) for message in window)
        return [message.id for message in messages if message.topic == topic]

    def get_for_peer(self, identity: bytes, peer: PeerId) -> PubsubMessage | None:
        """The message that ``peer`` asks for, and one transmission more on its count; None if
        it is not kept, or ``peer`` has had it `MAX_RETRANSMISSIONS` times."""
        message = self._messages.get(identity)
        if message is None:
            return None
        sent = self._transmissions.setdefault(identity, {})
        if sent.get(peer, 0) >= MAX_RETRANSMISSIONS:
            return None
        sent[peer] = sent.get(peer, 0) + 1
        return message

    def shift(self) -> None:
        """A heartbeat has passed: drop the oldest window and begin a new one."""
        for message in self._windows.pop():
            del self._messages[message.id]
            self._transmissions.pop(message.id, None)
            size = size_of(message)
            self._bytes -= size
            self._bytes_of[message.author] -= size
            if not self._bytes_of[message.author]:
                del self._bytes_of[message.author]
        self._windows.appendleft([])
