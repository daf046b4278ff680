"""What waits to be sent in bulk to one peer: one chunk under way, the rest as names in a queue.

A chunk is chosen when the one before it has really left, not when it was queued: by then the
receiver may have said that it got it elsewhere. The queue holds names only, so it costs nothing
to be long. It has two classes: what goes along a stripe comes before what the peer asked for,
since others wait for the peer to relay it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final

from p2p.bounded import BoundedDict
from p2p.shardcast.chunkset import ChunkSet
from p2p.shardcast.core.patience import SmoothedAverage
from p2p.shardcast.core.statements import MAX_ROSTERS
from p2p.shardcast.messages import NO_STRIPE, ChunkHeader

RECENT: Final = 4
"""Chunks lately sent to a peer that may be lost with it: two in the sender's buffers and two in
the receiver's. They are given to others too: a chunk that comes twice costs less than a
wait."""
QUICKEST: Final = 0.001
"""Seconds per chunk below which no line is taken for faster: the sender's own buffers take the
first chunks at once, however slow the line behind them is."""


class SendQueue:
    """The bulk stream to one peer, as the core sees it."""

    __slots__ = (
        "_asked",
        "_current",
        "_left",
        "_news",
        "_recent",
        "_started",
        "_stripes",
        "_time",
        "rate",
    )

    def __init__(self) -> None:
        self.rate = 0.0
        """Chunks per second while there were any, lately; 0 before the first has left."""
        self._stripes: deque[ChunkHeader] = deque()
        self._asked: deque[ChunkHeader] = deque()
        self._current: ChunkHeader | None = None
        self._recent: deque[ChunkHeader] = deque(maxlen=RECENT)
        self._left: BoundedDict[tuple[bytes, int], float] = BoundedDict(RECENT)
        """When chunks left of which the peer has not said yet that they came."""
        self._news: BoundedDict[bytes, None] = BoundedDict(2 * MAX_ROSTERS)
        self._started = 0.0
        """When the chunk under way was pushed."""
        self._time = SmoothedAverage()

    def __repr__(self) -> str:
        return f"SendQueue({self.backlog} chunks, {self.rate:.1f}/s)"

    @property
    def owed(self) -> int:
        """Chunks that the peer asked for and that have not left."""
        return len(self._asked) + self._is_under_way(asked=True)

    @property
    def waits(self) -> bool:
        """Whether a chunk waits that goes along a stripe."""
        return bool(self._stripes)

    def is_answering(self, since: float) -> bool:
        """Whether a chunk that the peer asked for is under way since then, or later."""
        return self._is_under_way(asked=True) and self._started >= since

    @property
    def backlog(self) -> int:
        """Chunks along stripes, waiting and under way."""
        return len(self._stripes) + self._is_under_way(asked=False)

    def _is_under_way(self, *, asked: bool) -> bool:
        current = self._current
        return current is not None and (current.stripe == NO_STRIPE) is asked

    @property
    def head(self) -> ChunkHeader | None:
        """The next chunk to decide about; None while one is under way, or none waits."""
        waiting = self._stripes or self._asked
        return waiting[0] if self._current is None and waiting else None

    def push(self, header: ChunkHeader) -> None:
        """Queue a chunk, in its class. What comes along a stripe need not come as an answer."""
        if header.stripe == NO_STRIPE:
            self._asked.append(header)
            return
        self._stripes.append(header)
        answer = ChunkHeader(header.policy, header.index)
        if answer in self._asked:
            self._asked.remove(answer)

    def start(self, now: float) -> None:
        """Put the head under way."""
        self._current, self._started = self.drop(), now

    def drop(self) -> ChunkHeader:
        """Take the head out: it is sent, or its receiver got it elsewhere."""
        return (self._stripes or self._asked).popleft()

    def finish(self, now: float) -> ChunkHeader | None:
        """The chunk under way has left; returns it."""
        header, self._current = self._current, None
        if header is not None:
            self._recent.append(header)
            self._left[header.policy, header.index] = now
            self._time.observe(now - self._started)
            self.rate = 1 / max(self._time.value, QUICKEST)
        return header

    def acknowledge(self, policy: bytes, chunks: ChunkSet, now: float) -> float | None:
        """The peer holds ``chunks``. Seconds that the last of those which left here took to
        come and to be told of; None if there is none."""
        came = [name for name in self._left if name[0] == policy and name[1] in chunks]
        if not came:
            return None
        return min(now - self._left.pop(name) for name in came)

    def note_news(self, news: bytes) -> bool:
        """Whether ``news`` (a digest) has to go ahead of the chunk that it explains: once."""
        if news in self._news:
            return False
        self._news[news] = None
        return True

    def promote(self, policy: bytes, chunk: int) -> bool:
        """Put a chunk that waits here in front of its class; False if it does not."""
        current = self._current
        if current is not None and (current.policy, current.index) == (policy, chunk):
            return True
        for waiting in (self._stripes, self._asked):
            for header in waiting:
                if (header.policy, header.index) == (policy, chunk):
                    waiting.remove(header)
                    waiting.appendleft(header)
                    return True
        return False

    def purge(self, policy: bytes) -> None:
        """Forget what waits of a policy."""
        self._stripes = deque(one for one in self._stripes if one.policy != policy)
        self._asked = deque(one for one in self._asked if one.policy != policy)

    def unconfirmed(self) -> Iterator[ChunkHeader]:
        """Chunks that the peer has perhaps not got, or not passed on, oldest first."""
        yield from self._recent
        if self._current is not None:
            yield self._current
        yield from self._stripes
        yield from self._asked
