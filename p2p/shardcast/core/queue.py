"""What waits to be sent in bulk, peer by peer: one chunk under way, the rest as names in a queue.

A chunk is chosen when the one before it has really left, not when it was queued: by then the receiver
may have said that it got it elsewhere. The queue holds names only, so it costs nothing to be long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from p2p.shardcast.messages import ChunkHeader

_RECENT: Final = 4
"""Chunks lately sent that may still be under way: lost with the connection. Two in the sender's
buffers and two in the receiver's."""
_SMOOTHING: Final = 0.25
_QUICKEST: Final = 0.001
"""Seconds per chunk below which no lane is taken for faster: those are the sender's own buffers."""
_TOLD: Final = 16
"""News remembered as told: three rosters and more versions than anybody fetches at a time."""


@dataclass(slots=True)
class Lane:
    """The bulk stream to one peer."""

    queue: deque[ChunkHeader] = field(default_factory=deque)
    busy: ChunkHeader | None = None
    recent: deque[ChunkHeader] = field(default_factory=lambda: deque(maxlen=_RECENT))
    owed: int = 0
    """Chunks in the queue that the peer asked for."""
    told: dict[bytes, None] = field(default_factory=dict)
    since: float = 0.0
    """When the chunk under way was pushed."""
    _took: float = 0.0
    rate: float = 0.0
    """Chunks per second while there were any, lately; 0 before the first has left."""

    @property
    def backlog(self) -> int:
        """Chunks queued and under way."""
        return len(self.queue) + (self.busy is not None)

    def tell(self, news: bytes) -> bool:
        """Whether ``news`` (a digest) has to be told before what explains itself by it."""
        if news in self.told:
            return False
        self.told[news] = None
        if len(self.told) > _TOLD:
            del self.told[next(iter(self.told))]
        return True

    def next(
        self, now: float, wanted: Callable[[ChunkHeader], bool], left: Callable[[ChunkHeader], None]
    ) -> bool:
        """Take the next wanted chunk under way; ``left`` hears of those that are passed over."""
        while self.busy is None and self.queue:
            header = self.queue.popleft()
            if wanted(header):
                self.busy, self.since = header, now
                return True
            left(header)
        return False

    def sent(self, now: float) -> ChunkHeader | None:
        """The chunk under way has left."""
        header, self.busy = self.busy, None
        if header is not None:
            self.recent.append(header)
            self._took += _SMOOTHING * (now - self.since - self._took)
            self.rate = 1 / max(self._took, _QUICKEST)
        return header

    def hurry(self, policy: bytes, chunk: int) -> bool:
        """Put a chunk that waits here in front of the others; False if it does not."""
        if self.busy is not None and (self.busy.policy, self.busy.index) == (policy, chunk):
            return True
        for header in self.queue:
            if (header.policy, header.index) == (policy, chunk):
                self.queue.remove(header)
                self.queue.appendleft(header)
                return True
        return False

    def purge(self, policy: bytes) -> None:
        """Forget what is queued of a policy."""
        self.queue = deque(header for header in self.queue if header.policy != policy)
