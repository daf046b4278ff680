"""SHARDCAST's messages, and the frames of its bulk streams.

A policy is named by its manifest's digest, never by its version alone.

Control messages are msgpack lists that start with a kind, on the host's message stream of
`PROTOCOL_ID`. Bulk frames travel on one long-lived stream per (sender, receiver) of
`BULK_PROTOCOL_ID`, opened by the sender: a control message (news must not be overtaken by the
chunks it explains), or a chunk.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from typing import Any, Final

from p2p.errors import BadMessage
from p2p.identity import PeerId, ProtocolId, decode_peer_id_untrusted
from p2p.shardcast.chunkset import Ranges, pack_ranges, unpack_ranges_untrusted
from p2p.shardcast.codec import MAX_WIRE
from p2p.shardcast.index import DIGEST_BYTES, MAX_CHUNKS, MAX_INDEX, Index
from p2p.shardcast.manifest import MAX_MANIFEST, MAX_ROSTER_BYTES, Manifest
from p2p.wire import KI, fields_untrusted, pack, unpack_untrusted

BULK_PROTOCOL_ID: Final = ProtocolId("/shoal/shardcast-bulk/1.0.0")
"""Chunks, from the sender that opened the stream."""

MAX_WANT: Final = 16
"""Chunks in one `Want`: as many as a holder owes one peer at most (`core.upload.MAX_OWED`)."""
INLINE_INDEX: Final = 16 * KI
"""Bytes of index that travel with a gossiped manifest: 440 spans. A longer one is asked for
once, of a neighbour, instead of crossing every edge of the gossip mesh."""
NO_STRIPE: Final = 0xFFFF
"""The stripe of a chunk that was asked for: it is not passed on."""
MAX_CONTROL: Final = MAX_ROSTER_BYTES + 4 * KI
"""Bytes of a control message outside bulk streams: a roster is the largest, a manifest with an
inline index has 20 KiB, a have-list 4."""
_MAX_COUNT: Final = 2**53
_HEADER: Final = struct.Struct(f">{DIGEST_BYTES}sIQH")
CHUNK_KIND: Final = 0
"""First byte of a bulk frame with a chunk."""
MESSAGE_KIND: Final = 1
"""First byte of a bulk frame with a control message."""
BULK_OVERHEAD: Final = 1 + _HEADER.size
"""Bytes in front of a chunk's own."""
MAX_BULK: Final = MAX_WIRE + BULK_OVERHEAD
"""Bytes of a bulk frame with a chunk."""
MAX_BULK_MESSAGE: Final = MAX_INDEX + MAX_MANIFEST + KI
"""Bytes of a bulk frame with a control message: the longest index has 2.6 MiB."""


@dataclass(frozen=True, slots=True)
class Hello:
    """On connecting: the newest version that the sender knows, -1 if none. A node that knows a
    newer one answers with news of it."""

    newest: int


@dataclass(frozen=True, slots=True)
class PolicyNews:
    """A signed manifest, with its index if that is short or was asked for (else empty)."""

    manifest: bytes = field(repr=False)
    index: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class RosterNews:
    """A signed roster."""

    roster: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Evidence:
    """Two signed manifests that convict their trainer."""

    first: bytes = field(repr=False)
    second: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Ask:
    """Asks what the receiver has of this policy, now and while it gets more; and for its
    index."""

    policy: bytes
    index: bool


@dataclass(frozen=True, slots=True)
class Have:
    """Chunks that the sender now holds."""

    policy: bytes
    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Taken:
    """Chunks that the sender has asked another peer for: the receiver need not send them."""

    policy: bytes
    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Skipped:
    """Chunks of a stripe that the sender holds and does not push, since the receiver's line is
    behind or it gets them elsewhere. The receiver fetches what it lacks, and passes all of them
    on along the stripe."""

    policy: bytes
    epoch: int
    stripe: int
    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Want:
    """Asks for these chunks."""

    policy: bytes
    chunks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Credit:
    """To the origin: the sender has got ``received`` chunks of its hand-out in all, and may be
    given ``granted``."""

    policy: bytes
    received: int
    granted: int


@dataclass(frozen=True, slots=True)
class Blame:
    """To the origin: ``peer`` sent the sender a wrong chunk of this policy."""

    policy: bytes
    peer: PeerId


Message = (
    Blame
    | Hello
    | PolicyNews
    | RosterNews
    | Evidence
    | Ask
    | Have
    | Taken
    | Skipped
    | Want
    | Credit
)


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """In front of a chunk's bytes: what it is, and along which stripe of which roster it
    travels."""

    policy: bytes
    index: int
    epoch: int = 0
    stripe: int = NO_STRIPE


def news_of(manifest: Manifest, index: Index | None, max_index: float = math.inf) -> PolicyNews:
    """A manifest with its index, unless that is unknown or longer than ``max_index`` bytes."""
    data = index.data if index is not None else b""
    return PolicyNews(manifest.encode(), data if len(data) <= max_index else b"")


def encode_message(message: Message) -> bytes:
    """The wire bytes of a control message."""
    match message:
        case Hello(newest):
            return pack(["hello", newest])
        case PolicyNews(manifest, index):
            return pack(["policy", manifest, index])
        case RosterNews(roster):
            return pack(["roster", roster])
        case Evidence(first, second):
            return pack(["evidence", first, second])
        case Ask(policy, index):
            return pack(["ask", policy, index])
        case Have(policy, ranges):
            return pack(["have", policy, pack_ranges(ranges)])
        case Taken(policy, ranges):
            return pack(["taken", policy, pack_ranges(ranges)])
        case Skipped(policy, epoch, stripe, ranges):
            return pack(["skipped", policy, epoch, stripe, pack_ranges(ranges)])
        case Want(policy, chunks):
            return pack(["want", policy, list(chunks)])
        case Credit(policy, received, granted):
            return pack(["credit", policy, received, granted])
        case Blame(policy, peer):
            return pack(["blame", policy, peer.digest])


def decode_message_untrusted(data: bytes | memoryview) -> Message:
    """Raise `BadMessage`, and nothing else, whatever the bytes."""
    value = unpack_untrusted(data)
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise BadMessage("a shardcast message is a list that starts with its kind")
    kind, *rest = value
    match kind:
        case "hello":
            (newest,) = fields_untrusted(rest, int, what=kind)
            return Hello(_bounded(newest, -1, _MAX_COUNT))
        case "policy":
            manifest, index = fields_untrusted(rest, bytes, bytes, what=kind)
            return PolicyNews(_manifest(manifest), index)
        case "roster":
            return RosterNews(*fields_untrusted(rest, bytes, what=kind))
        case "evidence":
            first, second = fields_untrusted(rest, bytes, bytes, what=kind)
            return Evidence(_manifest(first), _manifest(second))
        case "ask":
            policy, wants_index = fields_untrusted(rest, bytes, bool, what=kind)
            return Ask(_policy(policy), wants_index)
        case "have" | "taken":
            policy, ranges = fields_untrusted(rest, bytes, bytes, what=kind)
            return (Have if kind == "have" else Taken)(
                _policy(policy), unpack_ranges_untrusted(ranges)
            )
        case "skipped":
            policy, epoch, stripe, ranges = fields_untrusted(
                rest, bytes, int, int, bytes, what=kind
            )
            epoch, stripe = _bounded(epoch, 0, _MAX_COUNT), _bounded(stripe, 0, NO_STRIPE - 1)
            return Skipped(_policy(policy), epoch, stripe, unpack_ranges_untrusted(ranges))
        case "want":
            policy, chunks = fields_untrusted(rest, bytes, list, what=kind)
            return Want(_policy(policy), _chunks_untrusted(chunks))
        case "credit":
            policy, received, granted = fields_untrusted(rest, bytes, int, int, what=kind)
            received, granted = (
                _bounded(received, 0, MAX_CHUNKS),
                _bounded(granted, 0, 2 * MAX_CHUNKS),
            )
            return Credit(_policy(policy), received, granted)
        case "blame":
            policy, peer = fields_untrusted(rest, bytes, bytes, what=kind)
            return Blame(_policy(policy), decode_peer_id_untrusted(peer))
    raise BadMessage("a shardcast message of an unknown kind")


def _policy(digest: bytes) -> bytes:
    if len(digest) != DIGEST_BYTES:
        raise BadMessage(f"a policy is named by {DIGEST_BYTES} bytes")
    return digest


def _manifest(data: bytes) -> bytes:
    if len(data) > MAX_MANIFEST:
        raise BadMessage(f"a manifest of {len(data)} bytes is over the limit of {MAX_MANIFEST}")
    return data


def _bounded(number: int, low: int, high: int) -> int:
    if not low <= number <= high:
        raise BadMessage(f"{number} is not between {low} and {high}")
    return number


def _chunks_untrusted(chunks: list[Any]) -> tuple[int, ...]:
    numbers = fields_untrusted(chunks, *[int] * min(len(chunks), MAX_WANT), what="want")
    if not numbers or not all(0 <= number < MAX_CHUNKS for number in numbers):
        raise BadMessage("a want names no chunk, or one that cannot exist")
    return tuple(dict.fromkeys(numbers))


def encode_chunk_header(header: ChunkHeader) -> bytes:
    """What precedes a chunk's bytes in its frame."""
    return bytes((CHUNK_KIND,)) + _HEADER.pack(
        header.policy, header.index, header.epoch, header.stripe
    )


def encode_bulk_message(message: Message) -> bytes:
    """A control message as a bulk frame."""
    return bytes((MESSAGE_KIND,)) + encode_message(message)


def decode_chunk_header_untrusted(data: bytes) -> ChunkHeader:
    """What comes in front of a chunk: `BULK_OVERHEAD` bytes, the kind included. Raise
    `BadMessage`."""
    if len(data) != BULK_OVERHEAD or data[0] != CHUNK_KIND:
        raise BadMessage("not the head of a chunk")
    policy, index, epoch, stripe = _HEADER.unpack_from(data, 1)
    return ChunkHeader(policy, _bounded(index, 0, MAX_CHUNKS - 1), epoch, stripe)


def decode_bulk_untrusted(data: bytes) -> Message | tuple[ChunkHeader, bytes]:
    """A whole frame: a message, or a chunk's header and bytes. Raise `BadMessage`, and nothing
    else."""
    if not data:
        raise BadMessage("an empty bulk frame")
    if data[0] == MESSAGE_KIND:
        return decode_message_untrusted(memoryview(data)[1:])
    if len(data) <= BULK_OVERHEAD:
        raise BadMessage("a bulk frame of an unknown kind, or without a chunk")
    return decode_chunk_header_untrusted(data[:BULK_OVERHEAD]), data[BULK_OVERHEAD:]
