"""Events of a member's round, and the effects that it asks for."""

from __future__ import annotations

from dataclasses import dataclass

from p2p.identity import PeerId
from roles.diloco.core.messages import Fault, Outcome, Plan, Ready, Record, RoundMessage, Vote


@dataclass(frozen=True, slots=True)
class Received:
    """A message from a peer arrived."""

    peer: PeerId
    message: RoundMessage


@dataclass(frozen=True, slots=True)
class Trained:
    """The inner steps are over, and the contribution lies on disk. Unsigned."""

    ready: Ready


@dataclass(frozen=True, slots=True)
class Reduced:
    """The state after the proposed step is computed, and not in force."""

    view: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class ReduceFailed:
    """The proposed step could not be computed: these peers did not give their pieces."""

    view: int
    suspects: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Held:
    """The state of a record is whole here, and in force."""

    step: int


@dataclass(frozen=True, slots=True)
class Found:
    """Evidence that this member has come upon."""

    fault: Fault


@dataclass(frozen=True, slots=True)
class Leave:
    """The owner of this machine wants it to leave at the next border."""


@dataclass(frozen=True, slots=True)
class Stay:
    """The machine's owner wants this member to stay. If it has left, it joins again at the next
    step."""


@dataclass(frozen=True, slots=True)
class Tick:
    """The time ``next_deadline`` has come."""


Event = Received | Trained | Reduced | ReduceFailed | Held | Found | Leave | Stay | Tick


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message."""

    peer: PeerId
    message: RoundMessage


@dataclass(frozen=True, slots=True)
class Keep:
    """Make these statements durable before any later effect is carried out."""

    step: int
    view: int
    """The view below which this member signs nothing any more."""
    proposed: int
    """The last view in which a proposal was made; -1: none."""
    ready: Ready | None
    vote: Vote | None
    accepted: bytes = b""
    """The plan that is computed in this view, by its id: sums of another would contradict."""


@dataclass(frozen=True, slots=True)
class Reduce:
    """Fetch, sum, and apply tentatively; the result is `Reduced` or `ReduceFailed`."""

    view: int
    plan: Plan
    readys: tuple[Ready, ...]
    carried: Outcome | None
    """The outcome of an earlier view that the step repeats: its voters hold all sums
    already.
    """
    holders: tuple[PeerId, ...]
    """Peers that voted for ``carried``."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Append records to those on disk and put the state of the last in force, computing or
    fetching missing parts; then `Held`."""

    records: tuple[Record, ...]


@dataclass(frozen=True, slots=True)
class Convict:
    """A member is proven to have lied: its membership is over."""

    fault: Fault


@dataclass(frozen=True, slots=True)
class Stalled:
    """Too few members are heard for a majority, so this member stops and waits."""

    heard: int
    members: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """A majority is heard again."""


Effect = Send | Keep | Reduce | Commit | Convict | Stalled | Resumed
