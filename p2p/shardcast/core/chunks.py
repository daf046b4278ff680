"""The life of a chunk at its receiver: a table of states and events."""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

from p2p.errors import LocalProtocolError
from p2p.shardcast.chunkset import EMPTY, ChunkSet


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
# The whole life of a chunk. A pair that is absent is a bug in this process, never in a peer:
# what peers send is judged before it becomes a ChunkEvent. The forest brings chunks that were
# not asked for, hence DIGEST_OK and DIGEST_BAD from MISSING; a chunk may come twice, hence both
# from VERIFIED.
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


class ChunkStates:
    """The state of every chunk of one policy, as two sets: what is in neither is missing."""

    __slots__ = ("all", "left", "requested", "verified")

    def __init__(
        self, count: int, verified: ChunkSet = EMPTY, requested: ChunkSet = EMPTY
    ) -> None:
        self.all = ChunkSet.below(count)
        self.verified = verified
        self.requested = requested
        self.left = count - len(verified)
        """Chunks that are not verified."""

    @property
    def missing(self) -> ChunkSet:
        """Chunks that are neither here nor asked for."""
        return self.all - self.verified - self.requested

    def of(self, chunk: int) -> ChunkState:
        """The state of one chunk."""
        if chunk in self.verified:
            return ChunkState.VERIFIED
        return ChunkState.REQUESTED if chunk in self.requested else ChunkState.MISSING

    def advance(self, chunk: int, event: ChunkEvent) -> ChunkState:
        """Apply `TRANSITIONS` to one chunk; returns its new state."""
        before = self.of(chunk)
        after = TRANSITIONS.get((before, event))
        if after is None:
            raise LocalProtocolError(
                f"chunk {chunk} is {before.name}: {event.name} cannot happen"
            )
        if after is ChunkState.REQUESTED:
            self.requested = self.requested.including(chunk)
        elif before is ChunkState.REQUESTED:
            self.requested = self.requested.excluding(chunk)
        if after is ChunkState.VERIFIED and before is not after:
            self.verified = self.verified.including(chunk)
            self.left -= 1
        return after
