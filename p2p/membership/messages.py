"""Messages of ``/shoal/heartbeat/1.0.0``: msgpack lists that start with the kind's number.

| kind | message | fields | sent |
|---|---|---|---|
| 0 | `Beat` | is neighbour, heartbeat, digests | each interval, to neighbours and others |
| 1 | `Join` | heartbeat | by a newcomer, to its bootstrap |
| 2 | `ForwardJoin` | hops, heartbeat | walks on behalf of a newcomer |
| 3 | `Neighbor` | urgent, heartbeat | asks to become neighbours |
| 4 | `NeighborReply` | accepted, heartbeat | answers `Neighbor` and `Join` |
| 5 | `Disconnect` | | ends being neighbours; the sender lives on |
| 6 | `Newcomers` | digests | of peers just learned of |
| 7 | `Want` | keys | asks for the heartbeats behind digests |
| 8 | `Heartbeats` | heartbeats | answers `Want`; also refutes a suspicion, or says good-bye |
| 9 | `Suspect` | heartbeats | "nothing newer came": the last heartbeat of each suspected peer |

Digests and keys travel as one packed byte string each: 20 and 8 bytes an entry.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from typing import ClassVar, Final

from p2p.errors import BadMessage
from p2p.membership.heartbeat import (
    KEY_BYTES,
    MAX_SEQNO,
    PROTOCOL_ID,
    Digest,
    SignedHeartbeat,
    decode_heartbeat_untrusted,
)
from p2p.policy import MAX_POLICY, NO_POLICY
from p2p.wire import KI, Layout, message_untrusted, pack, unpack_untrusted

__all__ = [
    "MAX_HEARTBEATS",
    "MAX_HOPS",
    "MAX_KEYS",
    "MAX_MEMBERSHIP_MESSAGE",
    "PROTOCOL_ID",
    "Beat",
    "Digest",
    "Disconnect",
    "ForwardJoin",
    "Heartbeats",
    "Join",
    "Message",
    "Neighbor",
    "NeighborReply",
    "Newcomers",
    "Suspect",
    "Want",
    "decode_message_untrusted",
    "encode_message",
]

MAX_HEARTBEATS: Final = 32
"""Heartbeats in one message: about 7 KiB, so that one message never delays others by much."""
MAX_KEYS: Final = 64
"""Heartbeats asked for at once; they come back in two messages. Four times what is asked for in
an interval (`MembershipConfig.refresh`)."""
MAX_DIGESTS: Final = 256
"""Digests in one message: a whole passive view of 200 and an active one of 7 fit."""
MAX_HOPS: Final = 8
"""Steps of a forward-join walk; ours take 3, and 8 mix a swarm of a million at degree 8."""
MAX_MEMBERSHIP_MESSAGE: Final = 44 * KI
"""Bytes: `MAX_HEARTBEATS` of the longest kind, 42 KiB, with their headers."""

_MEMO: Final = 1024
"""Decoded messages remembered. A flood brings the same bytes from every neighbour; in a
simulation, where nodes share a process, so does every beat."""
_MEMO_BYTES: Final = 1024
"""Longer messages are decoded each time: 1,024 messages with what they are decoded to are 4 MiB
at most."""
_DIGESTS: Final = 2048
"""Digests remembered, so that all messages that name one heartbeat share its digest: 0.7 MiB at
most. The messages remembered name 20 each, mostly the same ones; with digests of their own they
took 3 MiB."""
_DIGEST: Final = struct.Struct(f">{KEY_BYTES}sQi")


@dataclass(frozen=True, slots=True)
class Beat:
    """The sender's own heartbeat, and digests of others'."""

    KIND: ClassVar = 0
    is_neighbour: bool
    """Whether the sender counts the receiver among its neighbours."""
    heartbeat: SignedHeartbeat
    digests: tuple[Digest, ...] = ()


@dataclass(frozen=True, slots=True)
class Join:
    """Take me in, and tell others."""

    KIND: ClassVar = 1
    heartbeat: SignedHeartbeat


@dataclass(frozen=True, slots=True)
class ForwardJoin:
    """A newcomer, on its walk."""

    KIND: ClassVar = 2
    hops: int
    """Steps left."""
    heartbeat: SignedHeartbeat


@dataclass(frozen=True, slots=True)
class Neighbor:
    """Be my neighbour."""

    KIND: ClassVar = 3
    urgent: bool
    """The sender has no other neighbour: do not refuse."""
    heartbeat: SignedHeartbeat


@dataclass(frozen=True, slots=True)
class NeighborReply:
    """We are neighbours now; or, not accepted, there is no room."""

    KIND: ClassVar = 4
    accepted: bool
    heartbeat: SignedHeartbeat


@dataclass(frozen=True, slots=True)
class Disconnect:
    """We are no neighbours any more, and I shall send you no more heartbeats; I live."""

    KIND: ClassVar = 5


@dataclass(frozen=True, slots=True)
class Newcomers:
    """Digests of peers that the sender has just learned of."""

    KIND: ClassVar = 6
    digests: tuple[Digest, ...]


@dataclass(frozen=True, slots=True)
class Want:
    """Send me the heartbeats of these."""

    KIND: ClassVar = 7
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Heartbeats:
    """Heartbeats of others."""

    KIND: ClassVar = 8
    heartbeats: tuple[SignedHeartbeat, ...]


@dataclass(frozen=True, slots=True)
class Suspect:
    """After these, nothing came: who knows better?"""

    KIND: ClassVar = 9
    heartbeats: tuple[SignedHeartbeat, ...]


Message = (
    Beat
    | Join
    | ForwardJoin
    | Neighbor
    | NeighborReply
    | Disconnect
    | Newcomers
    | Want
    | Heartbeats
    | Suspect
)


def encode_message(message: Message) -> bytes:
    """The bytes of ``message``."""
    match message:
        case Beat(is_neighbour, heartbeat, digests):
            return pack([Beat.KIND, is_neighbour, heartbeat.wire, _pack_digests(digests)])
        case Join(heartbeat):
            return pack([Join.KIND, heartbeat.wire])
        case ForwardJoin(hops, heartbeat):
            return pack([ForwardJoin.KIND, hops, heartbeat.wire])
        case Neighbor(urgent, heartbeat):
            return pack([Neighbor.KIND, urgent, heartbeat.wire])
        case NeighborReply(accepted, heartbeat):
            return pack([NeighborReply.KIND, accepted, heartbeat.wire])
        case Disconnect():
            return pack([Disconnect.KIND])
        case Newcomers(digests):
            return pack([Newcomers.KIND, _pack_digests(digests)])
        case Want(keys):
            return pack([Want.KIND, b"".join(keys)])
        case Heartbeats(heartbeats):
            return pack([Heartbeats.KIND, [heartbeat.wire for heartbeat in heartbeats]])
        case Suspect(heartbeats):
            return pack([Suspect.KIND, [heartbeat.wire for heartbeat in heartbeats]])


def decode_message_untrusted(data: bytes) -> Message:
    """Raise `BadMessage`, and nothing else, whatever the bytes. Signatures are *not*
    checked."""
    if len(data) > MAX_MEMBERSHIP_MESSAGE:
        raise BadMessage(f"a membership message has at most {MAX_MEMBERSHIP_MESSAGE} bytes")
    return _decode(data) if len(data) > _MEMO_BYTES else _decode_again(data)


def _decode(data: bytes) -> Message:
    value = unpack_untrusted(data)
    if not isinstance(value, list) or not value:
        raise BadMessage("a membership message starts with the number of its kind")
    return message_untrusted(_LAYOUTS, value[0], value[1:], what="membership message")


_decode_again = functools.lru_cache(_MEMO)(_decode)


def _pack_digests(digests: tuple[Digest, ...]) -> bytes:
    return b"".join([_DIGEST.pack(*digest) for digest in digests])


def _digests_untrusted(data: bytes) -> tuple[Digest, ...]:
    if len(data) % _DIGEST.size or len(data) > MAX_DIGESTS * _DIGEST.size:
        raise BadMessage(f"digests are at most {MAX_DIGESTS} times {_DIGEST.size} bytes")
    size = _DIGEST.size
    starts = range(0, len(data), size)
    return tuple([_digest_untrusted(data[start : start + size]) for start in starts])


@functools.lru_cache(_DIGESTS)
def _digest_untrusted(data: bytes) -> Digest:
    digest = Digest._make(_DIGEST.unpack(data))
    if digest.seqno > MAX_SEQNO or not NO_POLICY <= digest.policy <= MAX_POLICY:
        raise BadMessage("a digest is out of range")
    return digest


def _keys_untrusted(data: bytes) -> tuple[bytes, ...]:
    if len(data) % KEY_BYTES or len(data) > MAX_KEYS * KEY_BYTES:
        raise BadMessage(f"keys are at most {MAX_KEYS} times {KEY_BYTES} bytes")
    return tuple(data[start : start + KEY_BYTES] for start in range(0, len(data), KEY_BYTES))


def _heartbeats_untrusted(items: list[object]) -> tuple[SignedHeartbeat, ...]:
    if len(items) > MAX_HEARTBEATS:
        raise BadMessage(f"at most {MAX_HEARTBEATS} heartbeats come in one message")
    return tuple(decode_heartbeat_untrusted(item) for item in items)


def _forward_join_untrusted(hops: int, heartbeat: bytes) -> ForwardJoin:
    if not 0 <= hops <= MAX_HOPS:
        raise BadMessage(f"a walk has 0 to {MAX_HOPS} steps left, not {hops}")
    return ForwardJoin(hops, decode_heartbeat_untrusted(heartbeat))


_LAYOUTS: Final[dict[int, Layout[Message]]] = {
    Beat.KIND: (
        (bool, bytes, bytes),
        lambda is_neighbour, heartbeat, digests: Beat(
            is_neighbour, decode_heartbeat_untrusted(heartbeat), _digests_untrusted(digests)
        ),
    ),
    Join.KIND: ((bytes,), lambda heartbeat: Join(decode_heartbeat_untrusted(heartbeat))),
    ForwardJoin.KIND: ((int, bytes), _forward_join_untrusted),
    Neighbor.KIND: (
        (bool, bytes),
        lambda urgent, wire: Neighbor(urgent, decode_heartbeat_untrusted(wire)),
    ),
    NeighborReply.KIND: (
        (bool, bytes),
        lambda accepted, wire: NeighborReply(accepted, decode_heartbeat_untrusted(wire)),
    ),
    Disconnect.KIND: ((), Disconnect),
    Newcomers.KIND: ((bytes,), lambda digests: Newcomers(_digests_untrusted(digests))),
    Want.KIND: ((bytes,), lambda keys: Want(_keys_untrusted(keys))),
    Heartbeats.KIND: ((list,), lambda items: Heartbeats(_heartbeats_untrusted(items))),
    Suspect.KIND: ((list,), lambda items: Suspect(_heartbeats_untrusted(items))),
}
