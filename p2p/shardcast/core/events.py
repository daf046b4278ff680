"""Events and effects of a `ShardcastCore`."""

from __future__ import annotations

from dataclasses import dataclass

from p2p.equivocation import Equivocation
from p2p.identity import PeerId
from p2p.shardcast.chunkset import ChunkSet
from p2p.shardcast.forest import Roster
from p2p.shardcast.index import Index, Span
from p2p.shardcast.manifest import Manifest
from p2p.shardcast.messages import ChunkHeader, Message


@dataclass(frozen=True, slots=True)
class Publish:
    """Our own policy is durable: hand it out, along ``roster`` (None: as the last one)."""

    manifest: Manifest
    index: Index
    roster: Roster | None
    patch: Index | None = None
    """The index of the patch that the manifest names, if it names one."""


@dataclass(frozen=True, slots=True)
class Regrouped:
    """Our new ``roster`` is signed: hand out along it from now on."""

    roster: Roster


@dataclass(frozen=True, slots=True)
class Resumed:
    """The disk holds these spans of a policy, or of a patch; ``stored`` if it is whole and
    durable."""

    manifest: Manifest
    index: Index
    verified: ChunkSet
    stored: bool


@dataclass(frozen=True, slots=True)
class Heard:
    """A control message from ``peer``; ``gossip`` if ``peer`` only wrote it and others passed
    it on."""

    peer: PeerId
    message: Message
    gossip: bool = False


@dataclass(frozen=True, slots=True)
class ChunkCame:
    """A chunk came from ``peer``; if it is right the driver keeps its bytes until the core has
    spoken."""

    peer: PeerId
    header: ChunkHeader
    size: int
    """Bytes on the wire."""
    is_right: bool = True
    """True if it unpacks to the span that the index names."""


@dataclass(frozen=True, slots=True)
class ChunkDiscarded:
    """A chunk from ``peer`` that `ShardcastCore.offer` did not want: its ``size`` bytes were
    thrown away."""

    peer: PeerId
    header: ChunkHeader
    size: int


@dataclass(frozen=True, slots=True)
class ChunkSent:
    """The chunk that was pushed to ``peer`` has left; the next one may be pushed."""

    peer: PeerId
    size: int


@dataclass(frozen=True, slots=True)
class PeerUp:
    """There is a connection to ``peer``."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class PeerLost:
    """``peer`` is disconnected, unreachable, or its bulk stream broke."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Stored:
    """The policy asked for by `Finish` is durable."""

    policy: bytes


@dataclass(frozen=True, slots=True)
class Patched:
    """A patch was applied: the spans ``verified`` are right."""

    patch: bytes
    index: Index
    verified: ChunkSet


@dataclass(frozen=True, slots=True)
class PatchFailed:
    """A patch was of no use: the version must be fetched otherwise."""

    patch: bytes


@dataclass(frozen=True, slots=True)
class Unusable:
    """This policy cannot be whole here: it is not what its manifest says, or there is no room
    for it (until `RoomMade`)."""

    policy: bytes


@dataclass(frozen=True, slots=True)
class RoomMade:
    """There is room now for a version that was `Unusable` for lack of it."""

    policy: bytes
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The disk no longer holds this policy."""

    policy: bytes


@dataclass(frozen=True, slots=True)
class Unwritable:
    """The disk refused chunks. Nothing is fetched until `Writable`; what is held is served."""


@dataclass(frozen=True, slots=True)
class Writable:
    """The disk takes data again."""


@dataclass(frozen=True, slots=True)
class Tick:
    """The core's `next_deadline` has come."""


Event = (
    Publish
    | Regrouped
    | Resumed
    | Heard
    | ChunkCame
    | ChunkDiscarded
    | ChunkSent
    | PeerUp
    | PeerLost
    | Stored
    | Patched
    | PatchFailed
    | Unusable
    | RoomMade
    | Forgotten
    | Unwritable
    | Writable
    | Tick
)


@dataclass(frozen=True, slots=True)
class Accept:
    """The answer to an offered chunk: read it, and compare it with ``span``."""

    span: Span
    is_expected: bool
    """True if it is no surprise: it was asked for, or the roster names its sender."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send a control message."""

    peer: PeerId
    message: Message


@dataclass(frozen=True, slots=True)
class Push:
    """Put a message or a chunk on the bulk stream to ``peer``; report each chunk by
    `ChunkSent`."""

    peer: PeerId
    item: Message | ChunkHeader


@dataclass(frozen=True, slots=True)
class Gossip:
    """Tell every peer that listens to the run's announcements."""

    message: Message


@dataclass(frozen=True, slots=True)
class Regroup:
    """Sign a new roster, if it would differ from the last, and report it by `Regrouped`."""


@dataclass(frozen=True, slots=True)
class RefuseRoster:
    """A roster is for another version of Shoal: tell the operator, as ``reason`` says."""

    reason: str


@dataclass(frozen=True, slots=True)
class Begin:
    """A policy will be fetched: make room for it on disk."""

    manifest: Manifest
    index: Index


@dataclass(frozen=True, slots=True)
class Keep:
    """Write down the chunk that has just come."""

    policy: bytes
    index: int


@dataclass(frozen=True, slots=True)
class Finish:
    """Every chunk is verified: make the policy durable, and report `Stored` or `Unusable`."""

    policy: bytes


@dataclass(frozen=True, slots=True)
class Patch:
    """A patch and the version that it is for are here: make of them what it leads to, and
    report the right spans by `Patched`."""

    patch: bytes


@dataclass(frozen=True, slots=True)
class Abandon:
    """A newer policy made this one pointless before it was whole: remove its chunks."""

    policy: bytes


@dataclass(frozen=True, slots=True)
class Penalise:
    """``peer`` lied or broke the protocol: drop its connection and lower its score."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class Halt:
    """A publisher is convicted: nothing more from it is believed."""

    evidence: Equivocation[Manifest]


@dataclass(frozen=True, slots=True)
class Connect:
    """The next version will probably go to ``peer``: open the bulk stream before it is there.

    To dial and to open a stream take three to five round trips, in which a small policy could
    have been everywhere.
    """

    peer: PeerId


@dataclass(frozen=True, slots=True)
class PassOn:
    """The gossiped message was valid and new here: other peers should hear it."""


Effect = (
    PassOn
    | Connect
    | Send
    | Push
    | Gossip
    | Regroup
    | RefuseRoster
    | Begin
    | Keep
    | Finish
    | Patch
    | Abandon
    | Penalise
    | Halt
)
