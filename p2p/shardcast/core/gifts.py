"""The life of a chunk of a hand-out: one record each, and a table of what can happen to it.

A *gift* is one chunk as it was given to one root. Only the latest gift of a chunk counts: a
root that was relieved of a chunk and fails later changes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from p2p.identity import PeerId
from p2p.shardcast.forest import Roster


class GiftStage(Enum):
    """Where a chunk of a hand-out is in its life."""

    FRESH = auto()
    """It was never given."""
    EARLIER = auto()
    """An earlier life of the origin may have given it."""
    GIVEN = auto()
    CONFIRMED = auto()
    LATE = auto()
    """Its root did not confirm it in time: to be given again, unless the root does so yet."""
    AGAIN = auto()
    """To be given again, ahead of all that is new."""
    DOUBTED = auto()
    """To be given again when all else has left."""

    @property
    def is_urgent(self) -> bool:
        """Whether the chunk is given before any new one."""
        return self in {GiftStage.LATE, GiftStage.AGAIN}


class GiftEvent(Enum):
    """What happens to a chunk of a hand-out."""

    GIVE = auto()
    CONFIRM = auto()
    TIME_OUT = auto()
    LOSE = auto()
    """Its root is gone, and may not have relayed it."""
    ASK = auto()
    """Peers ask the origin itself for it."""
    DEMOTE = auto()
    """Its root lost its stripe."""
    LACK = auto()
    """After a restart: most peers do not hold it."""
    HOLD = auto()
    """After a restart: most peers hold it."""


_S, _E = GiftStage, GiftEvent
# The life of a chunk of a hand-out. A pair that is absent changes nothing. All events but GIVE
# and ASK are about the latest gift of the chunk.
TRANSITIONS: Final = {
    **{(stage, _E.GIVE): _S.GIVEN for stage in (_S.FRESH, _S.LATE, _S.AGAIN, _S.DOUBTED)},
    (_S.GIVEN, _E.CONFIRM): _S.CONFIRMED,
    (_S.LATE, _E.CONFIRM): _S.CONFIRMED,
    (_S.GIVEN, _E.TIME_OUT): _S.LATE,
    **{(stage, _E.LOSE): _S.AGAIN for stage in (_S.GIVEN, _S.CONFIRMED, _S.LATE)},
    **{
        (stage, _E.ASK): _S.AGAIN
        for stage in (_S.EARLIER, _S.GIVEN, _S.CONFIRMED, _S.LATE, _S.DOUBTED)
    },
    (_S.GIVEN, _E.DEMOTE): _S.DOUBTED,
    (_S.CONFIRMED, _E.DEMOTE): _S.DOUBTED,
    (_S.EARLIER, _E.LACK): _S.DOUBTED,
    (_S.DOUBTED, _E.HOLD): _S.EARLIER,
}


@dataclass(slots=True, eq=False)
class Gift:
    """One chunk as it was given to one root."""

    chunk: int
    root: PeerId
    roster: Roster
    since: float
    """When it left the origin; until then, when it was queued."""
    has_left: bool = False


@dataclass(slots=True)
class GivenChunk:
    """One chunk of a hand-out."""

    stage: GiftStage
    gift: Gift | None = None
    """The latest."""
    asker: PeerId | None = None
    """The first peer that asked the origin itself for it."""
    repeated: float = -math.inf
    """When peers that miss it last had reason to expect it along another stripe."""

    def advance(self, event: GiftEvent) -> None:
        """Apply `TRANSITIONS`."""
        self.stage = TRANSITIONS.get((self.stage, event), self.stage)
