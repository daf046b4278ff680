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
from typing import Final

from p2p.errors import BadMessage
from p2p.membership.heartbeat import (
    KEY_BYTES,
    MAX_SEQNO,
    Digest,
    SignedHeartbeat,
    decode_heartbeat_untrusted,
)
from p2p.policy import MAX_POLICY, NO_POLICY
from p2p.wire import KI, Codec, MessageTable, pack, unpack_untrusted

MAX_HEARTBEATS: Final = 32
"""Maximum number of heartbeats in one message, about 7 KiB. One message thus never delays
others by much."""
MAX_KEYS: Final = 64
"""Maximum number of heartbeats requested at once; they come back in two messages. This is four
times what is requested in an interval (`MembershipConfig.refresh`)."""

_DIGEST: Final = struct.Struct(f">{KEY_BYTES}sQi")


@dataclass(frozen=True, slots=True)
class Beat:
    """Carries the sender's own heartbeat and digests of others."""

    is_neighbour: bool
    """True if the sender counts the receiver among its neighbours."""
    heartbeat: SignedHeartbeat
    digests: tuple[Digest, ...] = ()


@dataclass(frozen=True, slots=True)
class Join:
    """Asks the receiver to accept the sender as a newcomer and to tell others."""

    heartbeat: SignedHeartbeat


@dataclass(frozen=True, slots=True)
class ForwardJoin:
    """Carries a newcomer's heartbeat one step along its walk."""

    hops: int
    """Number of steps left."""
    heartbeat: SignedHeartbeat


@dataclass(frozen=True, slots=True)
class Neighbor:
    """Asks the receiver to become the sender's neighbour."""

    urgent: bool
    """True if the sender has no other neighbour, so that the receiver should not refuse."""
    heartbeat: SignedHeartbeat


@dataclass(frozen=True, slots=True)
class NeighborReply:
    """Tells whether the sender accepts the receiver as a neighbour."""

    accepted: bool
    heartbeat: SignedHeartbeat


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Ends being neighbours: the sender is alive but sends the receiver no more heartbeats."""


@dataclass(frozen=True, slots=True)
class Newcomers:
    """Digests of peers that the sender has just learned of."""

    digests: tuple[Digest, ...]


@dataclass(frozen=True, slots=True)
class Want:
    """Asks for the heartbeats that these keys name."""

    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Heartbeats:
    """Carries heartbeats of any peers."""

    heartbeats: tuple[SignedHeartbeat, ...]


@dataclass(frozen=True, slots=True)
class Suspect:
    """Reports that nothing newer came from the authors of these heartbeats."""

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


def decode_message_untrusted(data: bytes) -> Message:
    """Decode a membership message without checking signatures.

    Raises:
        BadMessage: The bytes are not a membership message. Nothing else is raised.
    """
    if len(data) > 44 * KI:  # `MAX_HEARTBEATS` of the longest kind take 42
        raise BadMessage("a membership message has at most 44 KiB")
    # Longer messages are decoded each time: 1,024 messages with what they are decoded to are 4
    # MiB at most.
    return _decode(data) if len(data) > 1024 else _decode_again(data)


def _decode(data: bytes) -> Message:
    value = unpack_untrusted(data)
    if not isinstance(value, list) or not value:
        raise BadMessage("a membership message starts with the number of its kind")
    return _TABLE.decode_untrusted(value[0], value[1:])


# Number of decoded messages remembered. A flood brings the same bytes from every neighbour; in
# a simulation, where nodes share a process, so does every `Beat`.
_decode_again = functools.lru_cache(1024)(_decode)


def _pack_digests(digests: tuple[Digest, ...]) -> bytes:
    return b"".join([_DIGEST.pack(*digest) for digest in digests])


def _digests_untrusted(data: bytes) -> tuple[Digest, ...]:
    size = _DIGEST.size
    # A whole passive view of 200 and an active one of 7 fit one message.
    if len(data) % size or len(data) > 256 * size:
        raise BadMessage(f"digests are at most 256 times {size} bytes")
    starts = range(0, len(data), size)
    return tuple([_digest_untrusted(data[start : start + size]) for start in starts])


# Digests remembered, so that all messages that name one heartbeat share its digest: 0.7 MiB at
# most. The messages remembered name 20 each, mostly the same ones; with digests of their own
# they took 3 MiB.
@functools.lru_cache(2048)
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


def _hops_untrusted(hops: int) -> int:
    if not 0 <= hops <= 8:  # 8 mix a swarm of a million at degree 8
        raise BadMessage(f"a walk has 0 to 8 steps left, not {hops}")
    return hops


_HEARTBEAT: Final = Codec(bytes, lambda signed: signed.wire, decode_heartbeat_untrusted)
_HEARTBEATS: Final = Codec(
    list, lambda heartbeats: [each.wire for each in heartbeats], _heartbeats_untrusted
)
_DIGESTS: Final = Codec(bytes, _pack_digests, _digests_untrusted)

_TABLE: Final = MessageTable[Message](
    "membership message",
    (0, Beat, Codec(bool), _HEARTBEAT, _DIGESTS),
    (1, Join, _HEARTBEAT),
    (2, ForwardJoin, Codec(int, decode=_hops_untrusted), _HEARTBEAT),
    (3, Neighbor, Codec(bool), _HEARTBEAT),
    (4, NeighborReply, Codec(bool), _HEARTBEAT),
    (5, Disconnect),
    (6, Newcomers, _DIGESTS),
    (7, Want, Codec(bytes, b"".join, _keys_untrusted)),
    (8, Heartbeats, _HEARTBEATS),
    (9, Suspect, _HEARTBEATS),
)


def encode_message(message: Message) -> bytes:
    return pack(_TABLE.encode(message))
