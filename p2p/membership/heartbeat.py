"""The signed heartbeat: a peer's description of itself, in about 210 bytes.

A heartbeat is a msgpack list followed by 64 bytes of signature over it, under the protocol id
as domain. Its ``seqno`` only grows, restarts included; its ``expires`` keeps last month's
heartbeat from being shown to a newcomer. Neither says whether the peer lives: that each
receiver judges on its own monotonic clock.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from p2p.errors import BadMessage
from p2p.identity import PEER_ID_BYTES, SIGNATURE_BYTES, PeerId, ProtocolId, Signer
from p2p.multiaddr import Multiaddr, decode_multiaddr_untrusted
from p2p.policy import MAX_POLICY, NO_POLICY
from p2p.wire import fields_untrusted, pack, unpack_untrusted

PROTOCOL_ID: Final = ProtocolId("/shoal/heartbeat/1.0.0")
"""Protocol id, also the domain of heartbeat signatures."""
MAX_HEARTBEAT: Final = 1344
"""Maximum bytes of a heartbeat. All fields at their limits take 1,334; an honest heartbeat has
180 to 250, or 450 with an invite."""
MAX_ADDRS: Final = 4
"""Maximum number of addresses: a public and a private one, each for IPv4 and IPv6."""
MAX_ADDR: Final = 96
"""Maximum bytes of one address: a DNS name of 80 with its port. IPv6 with a port takes 20."""
MAX_NAME: Final = 32
"""Maximum characters of a role's name and of the software version."""
MAX_SEQNO: Final = 2**63 - 1
"""Maximum sequence number of a heartbeat. At one each 50 ms it lasts for 14 billion years."""
MIN_INTERVAL: Final = 0.05
"""Minimum seconds between heartbeats; twenty a second are for tests on loopback."""
MAX_INTERVAL: Final = 120.0
"""Maximum seconds between heartbeats. A peer with a longer interval could be dead and stay
listed for minutes."""
KEY_BYTES: Final = 8
"""Number of bytes that name a peer in digests: the first of its public key. Finding a second
key with the same bytes takes 2**63 tries; making two such keys takes 2**32, and the second is
refused (`MemberList.has_key_of_another`)."""
KEY: Final = slice(PEER_ID_BYTES - 32, PEER_ID_BYTES - 32 + KEY_BYTES)
"""Position of these bytes in a PeerId, which ends with the public key."""

_FIELDS: Final = (bytes, int, int, int, bool, list, list, bytes, int, int, int, int, str)
"""Types of a heartbeat's fields. A stamp may follow, and then the head of a ledger."""
_PEERS: Final = 4096
"""Number of peers and profiles remembered, 4 MiB at most. Heartbeats with the same content
share them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Content of a node's own heartbeats."""

    addrs: tuple[Multiaddr, ...] = ()
    """Addresses of the node, with or without ``/p2p/``; the first `MAX_ADDRS` are sent."""
    roles: tuple[str, ...] = ()
    """Names of the roles it runs."""
    run: bytes = b""
    """Id of the run it takes part in; empty if none."""
    policy: int = NO_POLICY
    """Newest policy version it holds whole; `NO_POLICY` if none."""
    upload: int = 0
    """Measured upload in bytes per second; 0 while nothing was measured."""
    slots: int = 0
    """Peers for which it would relay (`p2p.circuit`): 0 unless others can dial it."""
    load: float = 0.0
    """Share of its capacity in use, 0 to 1; sent in thousandths."""
    version: str = ""
    """Software version."""
    stamp: bytes = b""
    """Credential of this identity, such as the nonce of its work stamp; empty if none is
    needed. Sent only if there is one."""
    ledger: bytes = b""
    """Signed head of the author's ledger, opaque here; empty if there is none or no room for
    it."""

    def __post_init__(self) -> None:
        # There are three kinds of roles, and plug-ins. A run id is a digest. A stamp is a nonce
        # of `p2p.dht.stamp`, or a credential of `p2p.node.admission`.
        most = {"roles": 8, "run": 32, "version": MAX_NAME, "stamp": 320, "ledger": 112}
        for name, limit in most.items():
            if len(getattr(self, name)) > limit:
                raise ValueError(f"the {name} of a profile has a length of {limit} at most")
        if not all(0 < len(role) <= MAX_NAME for role in self.roles):
            raise ValueError(f"the name of a role has 1 to {MAX_NAME} characters")
        if not NO_POLICY <= self.policy <= MAX_POLICY:
            raise ValueError(
                f"a policy version is {NO_POLICY} to {MAX_POLICY}, not {self.policy}"
            )
        is_capacity = 0 <= self.upload < 2**53 and 0 <= self.slots < 2**31
        if not is_capacity or not 0 <= self.load <= 1:
            raise ValueError("upload and slots cannot be negative, and load is 0 to 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Sign of life of a peer, with its profile."""

    peer: PeerId
    seqno: int
    expires: int
    """Wall time, in seconds since 1970, after which the heartbeat is invalid."""
    interval: float
    """Seconds until the next heartbeat. Receivers measure silence in this unit. Sent in
    milliseconds."""
    leaving: bool = False
    """True in the last heartbeat of a peer, its good-bye."""
    profile: Profile

    def __post_init__(self) -> None:
        if not 0 <= self.seqno <= MAX_SEQNO or not 0 <= self.expires <= MAX_SEQNO:
            raise ValueError("a sequence number or expiry is out of range")
        if not MIN_INTERVAL <= self.interval <= MAX_INTERVAL:
            raise ValueError(f"a heartbeat interval is {MIN_INTERVAL} to {MAX_INTERVAL} s")


@functools.lru_cache(_PEERS)
def key_of(peer: PeerId) -> bytes:
    """Return the key that names a peer in digests."""
    return peer[KEY]


_peer_of = functools.lru_cache(_PEERS)(PeerId.from_public_key)


class Digest(NamedTuple):
    """Announcement of a newer heartbeat in 20 bytes. It is unsigned: a reason to ask, never a
    fact."""

    key: bytes
    seqno: int
    policy: int


@dataclass(frozen=True, slots=True)
class SignedHeartbeat:
    """A heartbeat with the bytes that were signed. The core verifies the signature."""

    heartbeat: Heartbeat
    wire: bytes
    """Wire form: the signed bytes and the signature."""
    digest: Digest = field(init=False, repr=False, compare=False)
    """Digest by which others announce this heartbeat. It is cached, since many messages carry
    it."""

    def __post_init__(self) -> None:
        heartbeat = self.heartbeat
        digest = Digest(key_of(heartbeat.peer), heartbeat.seqno, heartbeat.profile.policy)
        object.__setattr__(self, "digest", digest)

    @property
    def peer(self) -> PeerId:
        """Author of the heartbeat."""
        return self.heartbeat.peer

    @property
    def seqno(self) -> int:
        return self.heartbeat.seqno


def sign_heartbeat(heartbeat: Heartbeat, signer: Signer) -> SignedHeartbeat:
    """Sign ``heartbeat``. Addresses beyond `MAX_ADDRS` or `MAX_ADDR` are left out, and so is
    the ledger's head if there is no room for it."""
    profile = heartbeat.profile
    addrs = _wire_addrs(profile.addrs)
    fields = [
        heartbeat.peer.public_key,
        heartbeat.seqno,
        heartbeat.expires,
        round(heartbeat.interval * 1000),
        heartbeat.leaving,
        addrs,
        list(profile.roles),
        profile.run,
        profile.policy,
        profile.upload,
        profile.slots,
        round(profile.load * 1000),
        profile.version,
    ]
    if profile.stamp or profile.ledger:
        fields.append(profile.stamp)
    body = pack([*fields, profile.ledger] if profile.ledger else fields)
    if len(body) + SIGNATURE_BYTES > MAX_HEARTBEAT and profile.ledger:
        body = pack(fields if profile.stamp else fields[:-1])
    return SignedHeartbeat(heartbeat, body + signer.sign(PROTOCOL_ID, body))


@functools.lru_cache(2048)
def _wire_addrs(addrs: tuple[Multiaddr, ...]) -> tuple[bytes, ...]:
    encoded = (addr.transport.to_bytes() for addr in addrs)
    return tuple(addr for addr in encoded if len(addr) <= MAX_ADDR)[:MAX_ADDRS]


def decode_heartbeat_untrusted(data: object) -> SignedHeartbeat:
    """Decode a heartbeat without checking its signature.

    Raises:
        BadMessage: The bytes are not a heartbeat. Nothing else is raised, whatever the bytes.
    """
    if not isinstance(data, bytes) or not SIGNATURE_BYTES < len(data) <= MAX_HEARTBEAT:
        raise BadMessage(f"a heartbeat is {SIGNATURE_BYTES + 1} to {MAX_HEARTBEAT} bytes")
    return _decode(data)


# Each heartbeat arrives about eight times, once per neighbour. The cache has 2 MiB at most.
@functools.lru_cache(2048)
def _decode(data: bytes) -> SignedHeartbeat:
    body = data[:-SIGNATURE_BYTES]
    value = unpack_untrusted(body)
    more = min(2, len(value) - len(_FIELDS)) if isinstance(value, list) else 0
    kinds = (*_FIELDS, *(bytes,) * more)
    fields = fields_untrusted(value, *kinds, what="heartbeat")
    key, seqno, expires, interval, leaving, addrs, roles, *rest = fields
    if len(addrs) > MAX_ADDRS or any(not isinstance(role, str) for role in roles):
        raise BadMessage("a heartbeat has too many addresses or a role that is no text")
    if any(not isinstance(addr, bytes) or len(addr) > MAX_ADDR for addr in addrs):
        raise BadMessage(f"an address in a heartbeat has at most {MAX_ADDR} bytes")
    try:
        peer = _peer_of(key)
        heartbeat = Heartbeat(
            peer=peer,
            seqno=seqno,
            expires=expires,
            interval=interval / 1000 if interval < 2**31 else -1,
            leaving=leaving,
            profile=_profile_untrusted(peer, tuple(addrs), (tuple(roles), *rest)),
        )
    except ValueError as error:
        raise BadMessage(f"a heartbeat makes no sense: {error}") from None
    return SignedHeartbeat(heartbeat, data)


@functools.lru_cache(_PEERS)
def _profile_untrusted(
    peer: PeerId, addrs: tuple[bytes, ...], said: tuple[Any, ...]
) -> Profile:
    roles, run, policy, upload, slots, load, version, *more = said
    stamp, ledger = (*more, b"", b"")[:2]
    return Profile(
        addrs=tuple(_addr_untrusted(addr, peer) for addr in addrs),
        roles=roles,
        run=run,
        policy=policy,
        upload=upload,
        slots=slots,
        load=load / 1000 if 0 <= load <= 1000 else -1,
        version=version,
        stamp=stamp,
        ledger=ledger,
    )


def _addr_untrusted(data: bytes, peer: PeerId) -> Multiaddr:
    """Decode an address, which has no /p2p/ on the wire, and add the heartbeat's peer to it."""
    addr = decode_multiaddr_untrusted(data)
    if addr.parts[-1][0] == "p2p":
        raise BadMessage("an address in a heartbeat has no /p2p/")
    return addr.with_peer(peer)
