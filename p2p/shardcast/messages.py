"""SHARDCAST's messages, and the frames of its bulk streams.

A policy is named by its manifest's digest, never by its version alone.

Control messages are msgpack lists that start with a kind, on the host's message stream of
`PROTOCOL_ID`. Kinds are words: they stood on the wire before the services agreed on numbers.
Bulk frames travel on one long-lived stream per (sender, receiver) of `BULK_PROTOCOL_ID`, opened
by the sender: a control message (news must not be overtaken by the chunks it explains), or a
chunk.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from itertools import starmap
from typing import Any, Final

from p2p.errors import BadMessage
from p2p.identity import PEER_ID_BYTES, PeerId, ProtocolId, decode_peer_id_untrusted
from p2p.shardcast.chunkset import Ranges, pack_ranges, unpack_ranges_untrusted
from p2p.shardcast.codec import MAX_WIRE
from p2p.shardcast.index import DIGEST_BYTES, MAX_CHUNKS, MAX_INDEX, Index
from p2p.shardcast.manifest import MAX_MANIFEST, MAX_ROSTER_BYTES, Manifest
from p2p.wire import KI, Codec, MessageTable, fields_untrusted, pack, unpack_untrusted

BULK_PROTOCOL_ID: Final = ProtocolId("/shoal/shardcast-bulk/1.0.0")
"""Protocol of bulk streams, which carry chunks from the peer that opened the stream."""

MAX_WANT: Final = 16
"""Most chunks in one `Want`, and most waiting for one peer: four times what a node asks of one
holder at a time."""
INLINE_INDEX: Final = 16 * KI
"""Bytes of index that travel with a gossiped manifest: 440 spans. A longer one is asked for
once, of a neighbour, instead of crossing every edge of the gossip mesh."""
NO_STRIPE: Final = 0xFFFF
"""Stripe number of a chunk that was requested. Such a chunk is not passed on."""
MAX_CONTROL: Final = MAX_ROSTER_BYTES + 4 * KI
"""Bytes of a control message outside bulk streams: a roster is the largest, a manifest with an
inline index has 20 KiB, a have-list 4."""
MAX_RECEIPT_ROWS: Final = 64
"""Stripes in one `Receipt`: eight epochs of eight stripes, more than a hand-out usually
sees."""
MAX_CONVICTED: Final = 16
"""Publishers that a `Hello` names as convicted, 624 bytes: a run names a handful, and most
convict none."""
_MAX_COUNT: Final = 2**53
_RECEIPT_ROW: Final = struct.Struct(">QHI")
_HEADER: Final = struct.Struct(f">{DIGEST_BYTES}sIQH")
CHUNK_KIND: Final = 0
"""First byte of a bulk frame that carries a chunk."""
MESSAGE_KIND: Final = 1
"""First byte of a bulk frame that carries a control message."""
BULK_OVERHEAD: Final = 1 + _HEADER.size
"""Bytes in front of a chunk's own bytes."""
MAX_BULK: Final = MAX_WIRE + BULK_OVERHEAD
"""Most bytes of a bulk frame with a chunk."""
MAX_BULK_MESSAGE: Final = MAX_INDEX + MAX_MANIFEST + KI
"""Most bytes of a bulk frame with a control message: the longest index has 2.6 MiB."""


def _between(low: int, high: int) -> Codec:
    def decode(number: int) -> int:
        if not low <= number <= high:
            raise BadMessage(f"{number} is not between {low} and {high}")
        return number

    return Codec(int, decode=decode)


def _digest_untrusted(digest: bytes) -> bytes:
    if len(digest) != DIGEST_BYTES:
        raise BadMessage(f"a policy is named by {DIGEST_BYTES} bytes")
    return digest


def _manifest_untrusted(data: bytes) -> bytes:
    if len(data) > MAX_MANIFEST:
        raise BadMessage(f"a manifest of {len(data)} bytes is over the limit of {MAX_MANIFEST}")
    return data


def _names_untrusted(names: bytes) -> tuple[PeerId, ...]:
    count, rest = divmod(len(names), PEER_ID_BYTES)
    if rest or count > MAX_CONVICTED:
        raise BadMessage("a hello's names have the wrong length")
    starts = range(0, len(names), PEER_ID_BYTES)
    return tuple(decode_peer_id_untrusted(names[at : at + PEER_ID_BYTES]) for at in starts)


def _rows_untrusted(packed: bytes) -> tuple[tuple[int, int, int], ...]:
    count, rest = divmod(len(packed), _RECEIPT_ROW.size)
    if rest or count > MAX_RECEIPT_ROWS:
        raise BadMessage(f"a receipt of {len(packed)} bytes of rows")
    rows = tuple(_RECEIPT_ROW.iter_unpack(packed))
    if len({row[:2] for row in rows}) < count:
        raise BadMessage("a receipt names a stripe twice")
    return rows


def _chunks_untrusted(chunks: list[Any]) -> tuple[int, ...]:
    numbers = fields_untrusted(chunks, *[int] * min(len(chunks), MAX_WANT), what="want")
    if not numbers or not all(0 <= number < MAX_CHUNKS for number in numbers):
        raise BadMessage("a want names no chunk, or one that cannot exist")
    return tuple(dict.fromkeys(numbers))


@dataclass(frozen=True, slots=True)
class Hello:
    """Tells, on connecting, what the sender knows. The receiver answers with a newer version
    and with convictions that the sender lacks."""

    newest: int
    """The newest version that the sender knows, -1 if none."""
    convicted: tuple[PeerId, ...] = ()
    """Publishers that the sender knows to have contradicted themselves; at most
    `MAX_CONVICTED`."""


@dataclass(frozen=True, slots=True)
class PolicyNews:
    """A signed manifest. Its index follows if it is short or was asked for; otherwise that is
    empty."""

    manifest: bytes = field(repr=False)
    index: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class RosterNews:
    """A signed roster."""

    roster: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Evidence:
    """Two signed manifests that convict their publisher."""

    first: bytes = field(repr=False)
    second: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Ask:
    """Asks which chunks of this policy the receiver has, now and later, and for its index."""

    policy: bytes
    index: bool


@dataclass(frozen=True, slots=True)
class Have:
    """Names chunks that the sender now holds."""

    policy: bytes
    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Taken:
    """Names chunks that the sender has requested from another peer, so that the receiver need
    not send them."""

    policy: bytes
    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Skipped:
    """Names chunks of a stripe that the sender holds and does not push, because the receiver's
    line is behind or the receiver gets them elsewhere.

    The receiver fetches those that it lacks, and passes all of them on along the stripe.
    """

    policy: bytes
    epoch: int
    stripe: int
    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Want:
    """Asks the receiver to send these chunks."""

    policy: bytes
    chunks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Credit:
    """Tells the origin that the sender received ``received`` chunks of its hand-out, and may be
    given ``granted`` in all."""

    policy: bytes
    received: int
    granted: int


@dataclass(frozen=True, slots=True)
class Blame:
    """Tells the origin that `peer` sent the sender a wrong chunk of this policy."""

    policy: bytes
    peer: PeerId


@dataclass(frozen=True, slots=True)
class Receipt:
    """Tells the origin that the sender has the whole policy, and how many milliseconds passed
    from the first chunk to the last. ``rows`` count chunks by (roster epoch, stripe)."""

    policy: bytes
    milliseconds: int
    rows: tuple[tuple[int, int, int], ...]


ChunkMessage = Ask | Have | Taken | Skipped | Want
"""What peers tell each other of the chunks of a version."""
HandOutMessage = Credit | Blame | Receipt
"""What peers tell the origin of its hand-out."""
Message = Hello | PolicyNews | RosterNews | Evidence | ChunkMessage | HandOutMessage


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """Precedes a chunk's bytes with its policy, its number, and the stripe and roster along
    which it travels."""

    policy: bytes
    index: int
    epoch: int = 0
    stripe: int = NO_STRIPE


def news_of(manifest: Manifest, index: Index | None, max_index: float = math.inf) -> PolicyNews:
    """Return the message for a manifest. The index is included if it is known and has at most
    ``max_index`` bytes."""
    data = index.data if index is not None else b""
    return PolicyNews(manifest.encode(), data if len(data) <= max_index else b"")


_POLICY: Final = Codec(bytes, decode=_digest_untrusted)
_SIGNED: Final = Codec(bytes, decode=_manifest_untrusted)
_RANGES: Final = Codec(bytes, pack_ranges, unpack_ranges_untrusted)
_TABLE: Final = MessageTable[Message](
    "shardcast message",
    (
        "hello", Hello, _between(-1, _MAX_COUNT),
        Codec(bytes, lambda peers: b"".join(one.digest for one in peers), _names_untrusted),
    ),
    ("policy", PolicyNews, _SIGNED, Codec(bytes)),
    ("roster", RosterNews, Codec(bytes)),
    ("evidence", Evidence, _SIGNED, _SIGNED),
    ("ask", Ask, _POLICY, Codec(bool)),
    ("have", Have, _POLICY, _RANGES),
    ("taken", Taken, _POLICY, _RANGES),
    ("skipped", Skipped, _POLICY, _between(0, _MAX_COUNT), _between(0, NO_STRIPE - 1), _RANGES),
    ("want", Want, _POLICY, Codec(list, list, _chunks_untrusted)),
    ("credit", Credit, _POLICY, _between(0, MAX_CHUNKS), _between(0, 2 * MAX_CHUNKS)),
    ("blame", Blame, _POLICY, Codec(bytes, lambda peer: peer.digest, decode_peer_id_untrusted)),
    (
        "receipt", Receipt, _POLICY, _between(1, _MAX_COUNT),
        Codec(bytes, lambda rows: b"".join(starmap(_RECEIPT_ROW.pack, rows)), _rows_untrusted),
    ),
)  # fmt: skip


def encode_message(message: Message) -> bytes:
    """Return the wire bytes of a control message."""
    return pack(_TABLE.encode(message))


def decode_message_untrusted(data: bytes | memoryview) -> Message:
    """Decode a control message. Raise `BadMessage`, and nothing else, whatever the bytes."""
    value = unpack_untrusted(data)
    if not isinstance(value, list) or not value:
        raise BadMessage("a shardcast message is a list that starts with its kind")
    return _TABLE.decode_untrusted(value[0], value[1:])


def encode_chunk_header(header: ChunkHeader) -> bytes:
    """Return the header that precedes a chunk's bytes in its frame."""
    return bytes((CHUNK_KIND,)) + _HEADER.pack(
        header.policy, header.index, header.epoch, header.stripe
    )


def encode_bulk_message(message: Message) -> bytes:
    """Return a control message as a bulk frame."""
    return bytes((MESSAGE_KIND,)) + encode_message(message)


def decode_chunk_header_untrusted(data: bytes) -> ChunkHeader:
    """Decode the header of a chunk: `BULK_OVERHEAD` bytes, the kind included. Raise
    `BadMessage` if it is malformed."""
    if len(data) != BULK_OVERHEAD or data[0] != CHUNK_KIND:
        raise BadMessage("not the head of a chunk")
    policy, index, epoch, stripe = _HEADER.unpack_from(data, 1)
    return ChunkHeader(policy, _between(0, MAX_CHUNKS - 1).decode(index), epoch, stripe)
