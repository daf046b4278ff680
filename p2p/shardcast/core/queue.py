"""What waits to be sent in bulk to one peer: one chunk under way, the rest as names in a queue.

A chunk is chosen when the one before it has really left, not when it was queued: by then the
receiver may have said that it got it elsewhere. The queue holds names only, so it costs nothing
to be long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final

from p2p.bounded import BoundedDict
from p2p.shardcast.chunkset import ChunkSet
from p2p.shardcast.core.average import SmoothedAverage
from p2p.shardcast.messages import NO_STRIPE, ChunkHeader

_RECENT: Final = 4
"""Chunks lately sent that may still be under way, and are lost with the connection: two in the
sender's buffers and two in the receiver's. When a peer dies its children are given these as
well, though the peer may have forwarded them: a chunk that comes twice costs less than one that
is waited for."""
_UNCONFIRMED: Final = 16
"""Chunks whose leaving is remembered until the peer says that they came. More than that come
within a have-list's delay only on the widest lines, where one sample in a while will do."""
_QUICKEST: Final = 0.001
"""Seconds per chunk below which no peer is taken for faster: those are the sender's own
buffers, which take the first chunks at once however slow the line behind them is."""
_MAX_NEWS: Final = 16
"""News remembered as sent: three rosters and more versions than any node fetches at a time."""


class SendQueue:
    """The bulk stream to one peer, as the core sees it."""

    __slots__ = (
        "_current",
        "_left",
        "_news",
        "_recent",
        "_started",
        "_time",
        "_waiting",
        "owed",
        "rate",
    )

    def __init__(self) -> None:
        self.owed = 0
        """Chunks that the peer asked for and that have not left."""
        self.rate = 0.0
        """Chunks per second while there were any, lately; 0 before the first has left."""
        self._waiting: deque[ChunkHeader] = deque()
        self._current: ChunkHeader | None = None
        self._recent: deque[ChunkHeader] = deque(maxlen=_RECENT)
        self._left: BoundedDict[tuple[bytes, int], float] = BoundedDict(_UNCONFIRMED)
        """When chunks left of which the peer has not said yet that they came."""
        self._news: BoundedDict[bytes, None] = BoundedDict(_MAX_NEWS)
        self._started = 0.0
        """When the chunk under way was pushed."""
        self._time = SmoothedAverage()

    def __repr__(self) -> str:
        return f"SendQueue({self.backlog} chunks, {self.rate:.1f}/s)"

    @property
    def backlog(self) -> int:
        """Chunks waiting and under way."""
        return len(self._waiting) + (self._current is not None)

    @property
    def stripe_backlog(self) -> int:
        """Of these the chunks that go along a stripe: all that were not asked for."""
        return self.backlog - self.owed

    @property
    def head(self) -> ChunkHeader | None:
        """The next chunk to decide about; None while one is under way, or none waits."""
        return self._waiting[0] if self._current is None and self._waiting else None

    def push(self, header: ChunkHeader) -> None:
        """Queue a chunk."""
        self._waiting.append(header)
        self.owed += header.stripe == NO_STRIPE

    def put_stripes_first(self) -> bool:
        """Put the first chunk that goes along a stripe in front of the others; False if none
        waits."""
        for header in self._waiting:
            if header.stripe != NO_STRIPE:
                self._waiting.remove(header)
                self._waiting.appendleft(header)
                return True
        return False

    def start(self, now: float) -> None:
        """Put the head under way."""
        self._current, self._started = self._waiting.popleft(), now

    def drop(self) -> None:
        """The head is not sent: its receiver got it elsewhere."""
        self._settle(self._waiting.popleft())

    def finish(self, now: float) -> ChunkHeader | None:
        """The chunk under way has left; returns it."""
        header, self._current = self._current, None
        if header is not None:
            self._settle(header)
            self._recent.append(header)
            self._left[header.policy, header.index] = now
            self._time.observe(now - self._started)
            self.rate = 1 / max(self._time.value, _QUICKEST)
        return header

    def acknowledge(self, policy: bytes, chunks: ChunkSet, now: float) -> float | None:
        """The peer holds ``chunks``. Seconds that the last of those which left here took to
        come and to be told of; None if there is none."""
        came = [name for name in self._left if name[0] == policy and name[1] in chunks]
        if not came:
            return None
        return min(now - self._left.pop(name) for name in came)

    def _settle(self, header: ChunkHeader) -> None:
        self.owed -= header.stripe == NO_STRIPE

    def note_news(self, news: bytes) -> bool:
        """Whether ``news`` (a digest) has to go ahead of the chunk that it explains: once."""
        if news in self._news:
            return False
        self._news[news] = None
        return True

    def promote(self, policy: bytes, chunk: int) -> bool:
        """Put a chunk that waits here in front of the others; False if it does not."""
        current = self._current
        if current is not None and (current.policy, current.index) == (policy, chunk):
            return True
        for header in self._waiting:
            if (header.policy, header.index) == (policy, chunk):
                self._waiting.remove(header)
                self._waiting.appendleft(header)
                return True
        return False

    def purge(self, policy: bytes) -> None:
        """Forget what waits of a policy."""
        for header in self._waiting:
            if header.policy == policy:
                self._settle(header)
        self._waiting = deque(header for header in self._waiting if header.policy != policy)

    def unconfirmed(self) -> Iterator[ChunkHeader]:
        """Chunks that the peer has perhaps not got, or not passed on, oldest first."""
        yield from self._recent
        if self._current is not None:
            yield self._current
        yield from self._waiting
