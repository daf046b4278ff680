"""The bulk stream to each peer: chunks under way and waiting, and the capacity of its line.

A line is kept busy by as much as fits on it: its rate times its round trip, and a little to
choose from when the first of that has arrived. Less, and it idles between a word that a chunk
came and the next chunk; more, and what a slow peer hoards a fast one could have carried. Both
factors are measured: the rate by how fast chunks leave, the round trip by the time between an
invitation to send and what it brings, or between a chunk's leaving and word of its coming.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final

from p2p.bounded import BoundedDict
from p2p.identity import PeerId
from p2p.shardcast.core.peers import MAX_REMEMBERED
from p2p.shardcast.core.statements import MAX_ROSTERS
from p2p.shardcast.messages import NO_STRIPE, ChunkHeader

CREDIT: Final = 2
"""Chunks that a root may owe beyond what its line holds. With one it idles for a round trip per
chunk; with more, slow roots hoard what fast ones could carry."""
MAX_CREDIT: Final = 64
"""Most unconfirmed chunks of a root, whatever rate it claims: a third of a second at 50 Mbit/s.
A root that relays nothing wastes this many chunks, once."""


class Line:
    """Round trip and credit of the line to one peer."""

    __slots__ = ("_round_trip",)

    def __init__(self) -> None:
        self._round_trip: float | None = None

    @property
    def round_trip(self) -> float:
        """Seconds of a round trip; 0.1 s before the first measurement."""
        # Seconds that a round trip is taken for before it is measured: within a continent, or
        # across one ocean. It decides how many chunks the first roots get ahead.
        return 0.1 if self._round_trip is None else self._round_trip

    def note_round_trip(self, sample: float) -> None:
        """Note a round trip of ``sample`` seconds, which may include waiting."""
        before = self._round_trip
        if before is None or sample < before:
            self._round_trip = sample
        else:
            self._round_trip = before + (sample - before) / 8

    def credit(self, rate: float) -> int:
        """Return how many unconfirmed chunks a root on this line may have if its children take
        ``rate`` chunks a second."""
        return min(MAX_CREDIT, CREDIT + int(rate * self.round_trip))


class Lines:
    """The `Line` to each peer, kept when the peer leaves."""

    def __init__(self) -> None:
        self._lines: BoundedDict[PeerId, Line] = BoundedDict(MAX_REMEMBERED)

    def to(self, peer: PeerId) -> Line:
        """Return the line to `peer`. It is remembered after the peer leaves."""
        if peer not in self._lines:
            self._lines[peer] = Line()
        return self._lines[peer]


RECENT: Final = 4
"""Chunks lately sent to a peer that may be lost with it: two in the sender's buffers and two in
the receiver's. They are given to others too: a chunk that comes twice costs less than a
wait."""


class SendQueue:
    """The bulk stream to one peer, as the core sees it."""

    def __init__(self) -> None:
        self._stripes: deque[ChunkHeader] = deque()
        self._asked: deque[ChunkHeader] = deque()
        self._current: ChunkHeader | None = None
        self._recent: deque[ChunkHeader] = deque(maxlen=RECENT)
        self._news: BoundedDict[bytes, None] = BoundedDict(2 * MAX_ROSTERS)
        self._started = 0.0
        """Time at which the chunk under way was pushed."""

    def __repr__(self) -> str:
        return f"SendQueue({self.backlog} chunks)"

    @property
    def owed(self) -> int:
        """Number of chunks that the peer asked for and that have not left."""
        return len(self._asked) + self._is_under_way(asked=True)

    @property
    def waits(self) -> bool:
        """True if a chunk that goes along a stripe is waiting."""
        return bool(self._stripes)

    def is_answering(self, since: float) -> bool:
        """Return True if a requested chunk is under way, and was started at ``since`` or
        later."""
        return self._is_under_way(asked=True) and self._started >= since

    @property
    def backlog(self) -> int:
        """Number of stripe chunks that are waiting or under way."""
        return len(self._stripes) + self._is_under_way(asked=False)

    def _is_under_way(self, *, asked: bool) -> bool:
        current = self._current
        return current is not None and (current.stripe == NO_STRIPE) is asked

    @property
    def head(self) -> ChunkHeader | None:
        """The next chunk to start or drop; None while a chunk is under way, or if none
        waits."""
        waiting = self._stripes or self._asked
        return waiting[0] if self._current is None and waiting else None

    def push(self, header: ChunkHeader) -> None:
        """Queue a chunk behind others of its class. A chunk that comes along a stripe replaces
        the same chunk among the answers."""
        if header.stripe == NO_STRIPE:
            self._asked.append(header)
            return
        self._stripes.append(header)
        answer = ChunkHeader(header.policy, header.index)
        if answer in self._asked:
            self._asked.remove(answer)

    def start(self, now: float) -> None:
        """Start to send the head."""
        self._current, self._started = self.drop(), now

    def drop(self) -> ChunkHeader:
        """Remove the head from the queue and return it."""
        return (self._stripes or self._asked).popleft()

    def finish(self) -> ChunkHeader | None:
        """Record that the chunk under way has left, and return it."""
        header, self._current = self._current, None
        if header is not None:
            self._recent.append(header)
        return header

    def note_news(self, news: bytes) -> bool:
        """Return True the first time that ``news`` (a digest) is noted: it must precede its
        chunk."""
        if news in self._news:
            return False
        self._news[news] = None
        return True

    def has(self, policy: bytes, chunk: int) -> bool:
        """Return True if a chunk waits or is under way."""
        under_way = () if self._current is None else (self._current,)
        return any(
            (header.policy, header.index) == (policy, chunk)
            for header in (*under_way, *self._stripes, *self._asked)
        )

    def purge(self, policy: bytes) -> None:
        """Remove the waiting chunks of a policy."""
        self._stripes = deque(one for one in self._stripes if one.policy != policy)
        self._asked = deque(one for one in self._asked if one.policy != policy)

    def unconfirmed(self) -> Iterator[ChunkHeader]:
        """Return the chunks that the peer may not have received or passed on, oldest first."""
        yield from self._recent
        if self._current is not None:
            yield self._current
        yield from self._stripes
        yield from self._asked
