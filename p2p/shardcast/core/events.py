"""Events and effects of a `ShardcastCore`."""

from __future__ import annotations

from dataclasses import dataclass

from p2p.equivocation import Equivocation
from p2p.events import (
    PeerDown as PeerDown,
    PeerUp as PeerUp,
    Penalise as Penalise,
    Tick as Tick,
)
from p2p.identity import PeerId
from p2p.shardcast.chunkset import EMPTY, ChunkSet
from p2p.shardcast.forest import Roster
from p2p.shardcast.index import Index, Span
from p2p.shardcast.manifest import Manifest
from p2p.shardcast.messages import ChunkHeader, Message


@dataclass(frozen=True, slots=True)
class Publish:
    """This node's own policy is durable and is handed out along ``roster``, or along the last
    roster if that is None."""

    manifest: Manifest
    index: Index
    roster: Roster | None
    patch: Index | None = None
    """The index of the patch that the manifest names, if it names one."""


@dataclass(frozen=True, slots=True)
class Regrouped:
    """This node has signed a new ``roster``, which its hand-outs follow from now on."""

    roster: Roster


@dataclass(frozen=True, slots=True)
class Resumed:
    """The disk holds these spans of a policy or patch. ``stored`` is True if it is complete and
    durable."""

    manifest: Manifest
    index: Index
    verified: ChunkSet
    stored: bool


@dataclass(frozen=True, slots=True)
class Heard:
    """A control message arrived. With ``gossip``, ``peer`` is only its author and other peers
    passed it on."""

    peer: PeerId
    message: Message
    gossip: bool = False


@dataclass(frozen=True, slots=True)
class ChunkCame:
    """A chunk came from ``peer``. The driver keeps the bytes of a right chunk until the core
    has returned its effects."""

    peer: PeerId
    header: ChunkHeader
    size: int
    """Bytes on the wire."""
    is_right: bool | None = True
    """True if the chunk unpacks to the span that the index names; None if it was not wanted
    (`ShardcastCore.offer`), and its bytes were thrown away."""


@dataclass(frozen=True, slots=True)
class ChunkSent:
    """The chunk that was pushed to ``peer`` has left; the next one may be pushed."""

    peer: PeerId
    size: int


@dataclass(frozen=True, slots=True)
class Stored:
    """The policy asked for by `Finish` is durable."""

    policy: bytes


@dataclass(frozen=True, slots=True)
class Patched:
    """A patch was applied, and the spans ``verified`` came out right. Without an index it could
    not be applied, so the version must be fetched another way."""

    patch: bytes
    index: Index | None = None
    verified: ChunkSet = EMPTY


@dataclass(frozen=True, slots=True)
class Unusable:
    """This policy cannot be completed on this node: its content contradicts its manifest, or
    the disk has no room for it. Or the disk no longer holds it."""

    policy: bytes
    until_room: bool = False
    """True if it can be fetched once the disk is `Writable`."""


@dataclass(frozen=True, slots=True)
class Unwritable:
    """The disk refused chunks. Nothing is fetched until `Writable`; what is held is served."""


@dataclass(frozen=True, slots=True)
class Writable:
    """The disk takes data again, or has room for what was `Unusable` for lack of it."""


Event = (
    Publish | Regrouped | Resumed | Heard | ChunkCame | ChunkSent | PeerUp | PeerDown | Stored
    | Patched | Unusable | Unwritable | Writable | Tick
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Accept:
    """The answer to an offered chunk: read it, and compare it with ``span``."""

    span: Span
    is_expected: bool
    """True if this node requested the chunk, or the roster makes ``peer`` its sender."""


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
    """Sign a new roster if it would differ from the last, and report it by `Regrouped`."""


@dataclass(frozen=True, slots=True)
class RefuseRoster:
    """Tell the operator that a roster is for another version of Shoal; ``reason`` has the
    details."""

    reason: str


@dataclass(frozen=True, slots=True)
class Begin:
    """Make room on disk for a policy that will be fetched."""

    manifest: Manifest
    index: Index


@dataclass(frozen=True, slots=True)
class Keep:
    """Write the chunk that has just arrived to disk."""

    policy: bytes
    index: int


@dataclass(frozen=True, slots=True)
class Finish:
    """Make a policy durable of which every chunk is verified, and report `Stored` or
    `Unusable`."""

    policy: bytes


@dataclass(frozen=True, slots=True)
class Patch:
    """Apply a patch whose bytes and base are both here, and report the right spans by
    `Patched`."""

    patch: bytes


@dataclass(frozen=True, slots=True)
class Abandon:
    """Remove the chunks of an incomplete policy that is no longer fetched."""

    policy: bytes


@dataclass(frozen=True, slots=True)
class Halt:
    """Believe nothing more from a publisher that is convicted of equivocation."""

    evidence: Equivocation[Manifest]


@dataclass(frozen=True, slots=True)
class Connect:
    """Open the bulk stream to ``peer``, which this node will probably feed in the next version.

    Dialling and opening a stream take three to five round trips, in which a small policy could
    already have reached every node.
    """

    peer: PeerId


@dataclass(frozen=True, slots=True)
class PassOn:
    """The gossiped message is valid and new, so other peers should receive it."""


Effect = (
    PassOn | Connect | Send | Push | Gossip | Regroup | RefuseRoster | Begin | Keep | Finish
    | Patch | Abandon | Penalise | Halt
)  # fmt: skip
