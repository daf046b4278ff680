"""One policy version as one node knows it: which chunks it has, asked for, and sees at others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from p2p.errors import LocalProtocolError
from p2p.identity import PeerId
from p2p.shardcast.manifest import Index, Manifest
from p2p.shardcast.messages import ChunkHeader
from p2p.wire import MIB

MAX_FETCHES: Final = 2
"""Versions fetched at a time."""
MAX_HOLDERS: Final = 64
"""Peers whose have-lists are kept per policy: 8 neighbours, 16 listeners, and those who were asked."""
MAX_TAKERS: Final = 1024
"""Peers whose taken-lists are kept per policy: the children of the strongest relay of a large roster."""
MAX_LISTENERS: Final = 16
"""Peers outside the neighbourhood that are told what we get. The oldest gives way."""
MAX_INDEXES: Final = 16
"""Times that one peer gets a policy's index, 2.5 MiB at most, for asking: once per life of a node that
restarts all day long."""
MAX_ASKERS: Final = 1024
"""Peers whose requests are counted per policy; as many as hold a connection to us."""
HAVE_DELAY: Final = 0.1
"""Seconds for which have-lists are collected: a fifth of the shortest patience, a tenth of the messages."""
SPARE_ANSWERS: Final = 64
"""Requests beyond twice the chunks: have-lists asked for while a swarm is stuck."""
SLOW_LINK: Final = 1 * MIB
"""Bytes per second of a link that is slow and yet no fault: what a chunk's time is guessed from at first."""
_LATE: Final = 16
"""Chunk times after which a chunk is late: eight parents may each have one under way and one waiting."""
_SPARE: Final = 2
"""Chunk times granted beyond one for each chunk that is still to come."""
_LAST: Final = 8
"""Chunks that are the last ones: one of each stripe."""
_LONGEST: Final = 4
"""Shortest patiences beyond which a pause between two chunks says nothing about the line."""
_LAGS: Final = 2
"""Times the usual lag behind others after which a chunk is late: roots differ in strength by that."""
_SMOOTHING: Final = 0.25


class ChunkState(Enum):
    """Where a chunk is, from this node's point of view."""

    MISSING = auto()
    REQUESTED = auto()
    VERIFIED = auto()


class ChunkEvent(Enum):
    """What happens to a chunk."""

    ASK = auto()
    DIGEST_OK = auto()
    DIGEST_BAD = auto()
    PEER_LOST = auto()
    STALLED = auto()


_S, _E = ChunkState, ChunkEvent
# The whole life of a chunk. A pair that is absent is a bug in this process, never in a peer: whatever
# peers send is judged before it becomes a ChunkEvent. The forest brings chunks that nobody asked for,
# hence DIGEST_OK and DIGEST_BAD from MISSING; a chunk may come twice, hence both from VERIFIED.
TRANSITIONS: Final = {
    (_S.MISSING, _E.ASK): _S.REQUESTED,
    (_S.MISSING, _E.DIGEST_OK): _S.VERIFIED,
    (_S.MISSING, _E.DIGEST_BAD): _S.MISSING,
    (_S.REQUESTED, _E.DIGEST_OK): _S.VERIFIED,
    (_S.REQUESTED, _E.DIGEST_BAD): _S.MISSING,
    (_S.REQUESTED, _E.PEER_LOST): _S.MISSING,
    (_S.REQUESTED, _E.STALLED): _S.MISSING,
    (_S.VERIFIED, _E.DIGEST_OK): _S.VERIFIED,
    (_S.VERIFIED, _E.DIGEST_BAD): _S.VERIFIED,
}


@dataclass(slots=True)
class Request:
    """A chunk that was asked of a peer."""

    peer: PeerId
    asked: float
    deadline: float


@dataclass(frozen=True, slots=True)
class _Sight:
    """When, and at whom, a chunk that we miss was first seen."""

    when: float
    peer: PeerId


class Policy:
    """Chunk states as bit masks (bit i is chunk i), and what is known of other holders."""

    def __init__(self, manifest: Manifest, now: float, stall: float) -> None:
        self.manifest = manifest
        self.count = manifest.anchor.chunks
        self.index: Index | None = None
        self.stored = False
        self.eager = False
        """Nobody will push it to us: pull whatever any holder has."""
        self.verified = self.requested = self.urgent = 0
        self.failed = 0
        """Chunks that somebody was asked for and did not bring."""
        self.unsaid = 0
        """Chunks that we hold and have not told our neighbours of."""
        self.skipped: dict[PeerId, dict[tuple[int, int], int]] = {}
        """Chunks that children were not pushed and have not been told of, by roster epoch and stripe."""
        self.bare: dict[int, tuple[PeerId, ChunkHeader]] = {}
        """Chunks that a parent did not push, and what to pass on once they are here."""
        self.say_at = math.inf
        self.requests: dict[int, Request] = {}
        self.holders: dict[PeerId, int] = {}
        self.taken: dict[PeerId, int] = {}
        self.listeners: dict[PeerId, None] = {}
        self.progress = now
        """When the last chunk came."""
        self.asks = 0
        """How often they were asked since the last chunk came."""
        self.last_resort = False
        """Ask the origin for what nobody else is known to have."""
        self._count_anew()
        self._stall = stall
        self._sights: dict[int, _Sight] = {}
        self._skippers: dict[int, _Sight] = {}
        self._lag = 0.0
        self.chunk_time = manifest.anchor.wire / self.count / SLOW_LINK
        """Seconds between two chunks that come, lately."""
        self._since, self._came, self._tempo = now, 0, self.chunk_time
        self.ask_at = now + self.patience
        """When to ask others what they have, if nothing comes before."""
        self.served: dict[PeerId, int] = {}
        """Chunks and answers that peers had of us for the asking."""
        self.indexed: dict[PeerId, int] = {}
        """How often peers had the index of us for the asking."""

    def _count_anew(self) -> None:
        """The next hand-out of the origin counts from the start."""
        self.fresh = self.granted = 0
        """Chunks that the origin gave us to relay, and how many it may give in all."""
        self.children: tuple[PeerId, ...] = ()
        """To whom we relayed the last of them."""
        self.confirmed = (0, 0)
        """The last `Credit` sent."""

    def __repr__(self) -> str:
        return f"Policy(v{self.manifest.version}, {self.verified.bit_count()} of {self.count} chunks)"

    @property
    def full(self) -> int:
        """The mask of all chunks."""
        return (1 << self.count) - 1

    @property
    def missing(self) -> int:
        """The mask of chunks that are neither here nor asked for."""
        return self.full & ~self.verified & ~self.requested

    @property
    def whole(self) -> bool:
        """Whether every chunk is verified."""
        return self.verified == self.full

    @property
    def patience(self) -> float:
        """Seconds that a chunk may lag behind others' possession of it before it is pulled."""
        if self._left <= _LAST:
            return (
                self.silence
            )  # the last ones are not waited for as long as usual: there is room to pull them
        return max(self.silence, _LAGS * self._lag)

    @property
    def _left(self) -> int:
        return self.count - self.verified.bit_count()

    @property
    def silence(self) -> float:
        """Seconds without any chunk after which all that is missing is pulled."""
        most = min(_LATE, self._left + _SPARE)  # towards the end no more than these could have come
        return max(self._stall, most * min(self.chunk_time, self._tempo))

    def state(self, index: int) -> ChunkState:
        """The state of one chunk."""
        if self.verified >> index & 1:
            return ChunkState.VERIFIED
        return ChunkState.REQUESTED if self.requested >> index & 1 else ChunkState.MISSING

    def advance(self, index: int, event: ChunkEvent) -> ChunkState:
        """Apply `TRANSITIONS` to one chunk; returns its new state."""
        state = self.state(index)
        after = TRANSITIONS.get((state, event))
        if after is None:
            raise LocalProtocolError(f"chunk {index} is {state.name}: {event.name} cannot happen")
        bit = 1 << index
        self.requested = self.requested | bit if after is ChunkState.REQUESTED else self.requested & ~bit
        if after is ChunkState.VERIFIED:
            self.verified |= bit
            self.urgent &= ~bit
        if after is not ChunkState.REQUESTED:
            self.requests.pop(index, None)
        return after

    def arrived(self, index: int, now: float, *, pushed: bool) -> None:
        """A chunk came for the first time: learn how long chunks take."""
        sight = self._sights.pop(index, None)
        self._skippers.pop(index, None)
        if pushed:
            lag = now - sight.when if sight is not None else 0.0
            self._lag += _SMOOTHING * (lag - self._lag)
        self.chunk_time += _SMOOTHING * (min(now - self.progress, _LONGEST * self._stall) - self.chunk_time)
        self._came += 1
        self._tempo = (now - self._since) / self._came  # a pause at the end must not teach patience
        self.progress = now
        self.asks = 0
        self.ask_at = now + self.silence

    def holds(self, peer: PeerId, mask: int, now: float) -> bool:
        """``peer`` says that it has these chunks. False if such chunks do not exist."""
        if mask & ~self.full:
            return False
        if peer not in self.holders and len(self.holders) >= MAX_HOLDERS:
            return self.skips(peer, mask)  # no further source is needed, but neither does it need these
        known = self.holders.get(peer, 0)
        self.holders[peer] = known | mask
        for index in bits(mask & ~known & ~self.verified & ~self.urgent):
            self._sights.setdefault(index, _Sight(now, peer))
        return True

    def skips(self, peer: PeerId, mask: int) -> bool:
        """``peer`` gets these chunks elsewhere. False if such chunks do not exist."""
        if mask & ~self.full:
            return False
        if peer in self.taken or len(self.taken) < MAX_TAKERS:
            self.taken[peer] = self.taken.get(peer, 0) | mask
        return True

    def skip(self, peer: PeerId, header: ChunkHeader, now: float) -> None:
        """``peer`` has to be told that this chunk is not pushed to it."""
        masks = self.skipped.setdefault(peer, {})
        key = header.epoch, header.stripe
        masks[key] = masks.get(key, 0) | 1 << header.index
        self.speak(now)

    def speak(self, now: float) -> None:
        """There is something to say, now or together with what comes within `HAVE_DELAY`."""
        self.say_at = min(self.say_at, now + HAVE_DELAY)

    def abandoned(self, index: int, parent: PeerId, now: float) -> None:
        """``parent`` holds this chunk and will not push it: pull it.

        From ``parent`` only if nobody else has it before long: mostly it has more to send than it can.
        """
        self._sights.pop(index, None)
        self.urgent |= 1 << index
        self._skippers.setdefault(index, _Sight(now, parent))
        if parent in self.holders:
            self.holders[parent] &= ~(1 << index)

    def needs(self, peer: PeerId, index: int) -> bool:
        """Whether ``peer`` may still need this chunk pushed to it, as far as we know."""
        return not (self.holders.get(peer, 0) | self.taken.get(peer, 0)) >> index & 1

    def listen(self, peer: PeerId) -> None:
        """Tell ``peer`` too what we get from now on."""
        self.listeners.pop(peer, None)
        self.listeners[peer] = None
        if len(self.listeners) > MAX_LISTENERS:
            del self.listeners[next(iter(self.listeners))]

    def ripen(self, now: float) -> None:
        """What others have had for longer than `patience` becomes urgent."""
        while self._sights:
            index, sight = next(iter(self._sights.items()))  # they are in the order of time
            if sight.when + self.patience > now:
                break
            del self._sights[index]
            self.urgent |= 1 << index
        while self._skippers:
            index, skipped = next(iter(self._skippers.items()))
            if skipped.when + self.patience > now:
                break
            del self._skippers[index]
            self.holds(skipped.peer, 1 << index, now)

    def late(self, now: float) -> int:
        """The mask of missing chunks to pull now."""
        if self.eager or now >= self.progress + self.silence:
            return self.missing
        return self.urgent & self.missing

    def lose(self, peer: PeerId) -> None:
        """Forget ``peer``; what it was to bring is urgent now."""
        self.holders.pop(peer, None)
        self._skippers = {i: skipped for i, skipped in self._skippers.items() if skipped.peer != peer}
        self.taken.pop(peer, None)
        self.listeners.pop(peer, None)
        if peer == self.manifest.trainer:
            self._count_anew()
        for index in [i for i, request in self.requests.items() if request.peer == peer]:
            self.advance(index, ChunkEvent.PEER_LOST)
            self.urgent |= 1 << index
            self.failed |= 1 << index
        for index, sight in self._sights.items():
            if sight.peer == peer and not self.requested >> index & 1:
                self.urgent |= 1 << index

    def serve(self, peer: PeerId) -> bool:
        """Count what ``peer`` asked for. False beyond all reason: twice the policy, and then some."""
        if peer not in self.served and len(self.served) >= MAX_ASKERS:
            del self.served[next(iter(self.served))]
        self.served[peer] = self.served.get(peer, 0) + 1
        return self.served[peer] <= 2 * self.count + SPARE_ANSWERS

    def serve_index(self, peer: PeerId) -> bool:
        """Count an index that ``peer`` asked for. False after `MAX_INDEXES` of them."""
        if peer not in self.indexed and len(self.indexed) >= MAX_ASKERS:
            del self.indexed[next(iter(self.indexed))]
        self.indexed[peer] = self.indexed.get(peer, 0) + 1
        return self.indexed[peer] <= MAX_INDEXES

    def expire(self, now: float) -> dict[int, Request]:
        """Give up requests that are past their deadline; returns them.

        Whoever did is not taken for a holder of that chunk again until it says so: else a chunk that only
        a silent peer has would be asked of it for ever, and never of the origin.
        """
        overdue = {index: request for index, request in self.requests.items() if request.deadline <= now}
        for index, request in overdue.items():
            self.advance(index, ChunkEvent.STALLED)
            self.urgent |= 1 << index
            self.failed |= 1 << index
            self.holders[request.peer] = self.holders.get(request.peer, 0) & ~(1 << index)
        return overdue

    @property
    def next_deadline(self) -> float:
        """When this policy next needs a `Tick`."""
        due = self.say_at
        if self.whole:
            return due
        due = min(due, self.ask_at)
        due = min([due, *(request.deadline for request in self.requests.values())])
        oldest = [next(iter(seen.values())).when for seen in (self._sights, self._skippers) if seen]
        return min([due, *(when + self.patience for when in oldest)])


def surplus(fetches: Iterable[Policy]) -> list[Policy]:
    """Which of these to give up, so that `MAX_FETCHES` remain.

    The newest stays, and of the others the one that will be whole first: a node slower than the run
    publishes would otherwise give up every version for the next, and never have any.
    """
    ordered = sorted(fetches, key=lambda policy: policy.manifest.version)
    if len(ordered) <= MAX_FETCHES:
        return []
    best = max(ordered[:-1], key=lambda policy: policy.verified.bit_count() / policy.count)
    return [policy for policy in ordered[:-1] if policy is not best]


def bits(mask: int) -> Iterator[int]:
    """The places of the set bits, lowest first."""
    # As text, in one pass: taking bits off a number of 64 Ki of them one by one moves 500 MB, 130 ms.
    text = bin(mask)[:1:-1]
    place = text.find("1")
    while place >= 0:
        yield place
        place = text.find("1", place + 1)
