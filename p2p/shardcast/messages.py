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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Final, get_args, get_type_hints

from p2p.errors import BadMessage
from p2p.identity import PEER_ID_BYTES, PeerId, ProtocolId, decode_peer_id_untrusted
from p2p.shardcast.chunkset import Ranges, pack_ranges, unpack_ranges_untrusted
from p2p.shardcast.codec import MAX_WIRE
from p2p.shardcast.index import DIGEST_BYTES, MAX_CHUNKS, MAX_INDEX, Index
from p2p.shardcast.manifest import MAX_MANIFEST, MAX_ROSTER_BYTES, Manifest
from p2p.wire import (
    KI,
    fields_untrusted,
    pack,
    unpack_untrusted,
)

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


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class _Field:
    """Encoding of a message's field."""

    kind: type
    """Type of the field in msgpack."""
    decode: Callable[[Any], Any] = _same
    """Converts the msgpack value to the field's value; may raise `BadMessage`."""
    encode: Callable[[Any], Any] = _same


def _between(low: int, high: int) -> _Field:
    def decode(number: int) -> int:
        if not low <= number <= high:
            raise BadMessage(f"{number} is not between {low} and {high}")
        return number

    return _Field(int, decode)


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


_Policy = Annotated[bytes, _Field(bytes, _digest_untrusted)]
_Signed = Annotated[bytes, _Field(bytes, _manifest_untrusted)]
_Ranges = Annotated[Ranges, _Field(bytes, unpack_ranges_untrusted, pack_ranges)]
_Count = Annotated[int, _between(0, _MAX_COUNT)]
_Peer = Annotated[PeerId, _Field(bytes, decode_peer_id_untrusted, lambda peer: peer.digest)]
_Peers = Annotated[
    tuple[PeerId, ...],
    _Field(bytes, _names_untrusted, lambda peers: b"".join(peer.digest for peer in peers)),
]
_Rows = Annotated[
    tuple[tuple[int, int, int], ...],
    _Field(bytes, _rows_untrusted, lambda rows: b"".join(_RECEIPT_ROW.pack(*r) for r in rows)),
]


@dataclass(frozen=True, slots=True)
class Hello:
    """Tells, on connecting, what the sender knows. The receiver answers with a newer version
    and with convictions that the sender lacks."""

    KIND: ClassVar = "hello"
    newest: Annotated[int, _between(-1, _MAX_COUNT)]
    """The newest version that the sender knows, -1 if none."""
    convicted: _Peers = ()
    """Publishers that the sender knows to have contradicted themselves; at most
    `MAX_CONVICTED`."""


@dataclass(frozen=True, slots=True)
class PolicyNews:
    """A signed manifest. Its index follows if it is short or was asked for; otherwise that is
    empty."""

    KIND: ClassVar = "policy"
    manifest: _Signed = field(repr=False)
    index: Annotated[bytes, _Field(bytes)] = field(repr=False)


@dataclass(frozen=True, slots=True)
class RosterNews:
    """A signed roster."""

    KIND: ClassVar = "roster"
    roster: Annotated[bytes, _Field(bytes)] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Evidence:
    """Two signed manifests that convict their publisher."""

    KIND: ClassVar = "evidence"
    first: _Signed = field(repr=False)
    second: _Signed = field(repr=False)


@dataclass(frozen=True, slots=True)
class Ask:
    """Asks which chunks of this policy the receiver has, now and later, and for its index."""

    KIND: ClassVar = "ask"
    policy: _Policy
    index: Annotated[bool, _Field(bool)]


@dataclass(frozen=True, slots=True)
class Have:
    """Names chunks that the sender now holds."""

    KIND: ClassVar = "have"
    policy: _Policy
    ranges: _Ranges


@dataclass(frozen=True, slots=True)
class Taken:
    """Names chunks that the sender has requested from another peer, so that the receiver need
    not send them."""

    KIND: ClassVar = "taken"
    policy: _Policy
    ranges: _Ranges


@dataclass(frozen=True, slots=True)
class Skipped:
    """Names chunks of a stripe that the sender holds and does not push, because the receiver's
    line is behind or the receiver gets them elsewhere.

    The receiver fetches those that it lacks, and passes all of them on along the stripe.
    """

    KIND: ClassVar = "skipped"
    policy: _Policy
    epoch: _Count
    stripe: Annotated[int, _between(0, NO_STRIPE - 1)]
    ranges: _Ranges


@dataclass(frozen=True, slots=True)
class Want:
    """Asks the receiver to send these chunks."""

    KIND: ClassVar = "want"
    policy: _Policy
    chunks: Annotated[tuple[int, ...], _Field(list, _chunks_untrusted, list)]


@dataclass(frozen=True, slots=True)
class Credit:
    """Tells the origin that the sender received ``received`` chunks of its hand-out, and may be
    given ``granted`` in all."""

    KIND: ClassVar = "credit"
    policy: _Policy
    received: Annotated[int, _between(0, MAX_CHUNKS)]
    granted: Annotated[int, _between(0, 2 * MAX_CHUNKS)]


@dataclass(frozen=True, slots=True)
class Blame:
    """Tells the origin that `peer` sent the sender a wrong chunk of this policy."""

    KIND: ClassVar = "blame"
    policy: _Policy
    peer: Annotated[PeerId, _Field(bytes, decode_peer_id_untrusted, lambda peer: peer.digest)]


@dataclass(frozen=True, slots=True)
class Receipt:
    """Tells the origin that the sender has the whole policy, and how many milliseconds passed
    from the first chunk to the last. ``rows`` count chunks by (roster epoch, stripe)."""

    KIND: ClassVar = "receipt"
    policy: _Policy
    milliseconds: Annotated[int, _between(1, _MAX_COUNT)]
    rows: _Rows


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
    | Receipt
)


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


_FIELDS: Final[Mapping[type[Message], dict[str, _Field]]] = {
    kind: {one.name: hints[one.name].__metadata__[0] for one in fields(kind)}
    for kind in get_args(Message)
    for hints in [get_type_hints(kind, include_extras=True)]
}
_KINDS: Final[Mapping[str, type[Message]]] = {kind.KIND: kind for kind in get_args(Message)}


def encode_message(message: Message) -> bytes:
    """Return the wire bytes of a control message."""
    parts = _FIELDS[type(message)].items()
    return pack([message.KIND, *(part.encode(getattr(message, name)) for name, part in parts)])


def decode_message_untrusted(data: bytes | memoryview) -> Message:
    """Decode a control message. Raise `BadMessage`, and nothing else, whatever the bytes."""
    value = unpack_untrusted(data)
    if not isinstance(value, list) or not value:
        raise BadMessage("a shardcast message is a list that starts with its kind")
    kind = _KINDS.get(value[0]) if isinstance(value[0], str) else None
    if kind is None:
        raise BadMessage(f"a shardcast message has no kind {value[0]!r:.20}")
    parts = _FIELDS[kind].values()
    found = fields_untrusted(
        value[1:], *(part.kind for part in parts), what="shardcast message"
    )
    return kind(*(part.decode(one) for part, one in zip(parts, found, strict=True)))


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


def decode_bulk_untrusted(data: bytes) -> Message | tuple[ChunkHeader, bytes]:
    """Decode a whole bulk frame into a message, or a chunk's header and bytes. Raise
    `BadMessage`, and nothing else."""
    if not data:
        raise BadMessage("an empty bulk frame")
    if data[0] == MESSAGE_KIND:
        return decode_message_untrusted(memoryview(data)[1:])
    if len(data) <= BULK_OVERHEAD:
        raise BadMessage("a bulk frame of an unknown kind, or without a chunk")
    return decode_chunk_header_untrusted(data[:BULK_OVERHEAD]), data[BULK_OVERHEAD:]
