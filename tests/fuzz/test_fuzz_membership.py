"""Whatever the bytes: `BadMessage` or a value, and a core that goes on."""

from __future__ import annotations

import contextlib
from random import Random

from hypothesis import given, strategies as st

from p2p.errors import BadMessage
from p2p.events import Received, Tick
from p2p.identity import KeyPair, verify
from p2p.membership.config import MembershipConfig
from p2p.membership.core.core import MembershipCore
from p2p.membership.heartbeat import (
    Digest,
    Heartbeat,
    Profile,
    decode_heartbeat_untrusted,
    sign_heartbeat,
)
from p2p.membership.messages import (
    Beat,
    Disconnect,
    ForwardJoin,
    Heartbeats,
    Join,
    Message,
    Neighbor,
    NeighborReply,
    Newcomers,
    Suspect,
    Want,
    decode_message_untrusted,
    encode_message,
)
from p2p.multiaddr import Multiaddr
from p2p.wire import pack

KEY = KeyPair(bytes(range(32)))
ENEMY = KeyPair(bytes(32))
PROFILE = Profile(
    addrs=(Multiaddr.parse("/ip4/1.2.3.4/tcp/5"),), roles=("liar",), policy=3, version="0.1.0"
)
OWN = sign_heartbeat(
    Heartbeat(peer=ENEMY.peer_id, seqno=7, expires=1000, interval=5.0, profile=PROFILE), ENEMY
)
HONEST: list[Message] = [
    Beat(True, OWN, (Digest(b"8 bytes.", 5, 2),)),
    Join(OWN),
    ForwardJoin(2, OWN),
    Neighbor(True, OWN),
    NeighborReply(True, OWN),
    Disconnect(),
    Newcomers((OWN.digest,)),
    Want((KEY.peer_id.public_key[:8], b"8 bytes.")),
    Heartbeats((OWN,)),
    Suspect((OWN,)),
]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.binary(max_size=50)
    | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=14),
    max_leaves=30,
)
FOREIGN = st.one_of(
    st.binary(max_size=300),
    VALUES.map(pack),
    st.builds(
        lambda kind, rest: pack([kind, *rest]), st.integers(0, 10), st.lists(VALUES, max_size=4)
    ),
    st.builds(
        lambda message, index, mask: flip(encode_message(message), index, mask),
        st.sampled_from(HONEST),
        st.integers(0, 10**6),
        st.integers(0, 255),
    ),
)


def flip(data: bytes, index: int, mask: int) -> bytes:
    changed = bytearray(data)
    changed[index % len(data)] ^= mask
    return bytes(changed)


@given(FOREIGN)
def test_messages_are_decoded_or_refused(data: bytes) -> None:
    with contextlib.suppress(BadMessage):
        message = decode_message_untrusted(data)
        assert decode_message_untrusted(encode_message(message)) == message


@given(
    st.one_of(
        st.binary(max_size=300),
        VALUES.map(lambda value: pack(value) + bytes(64)),
        st.lists(VALUES, min_size=13, max_size=13).map(lambda value: pack(value) + bytes(64)),
        st.builds(
            lambda index, mask: flip(OWN.wire, index, mask),
            st.integers(0, 10**6),
            st.integers(0, 255),
        ),
    )
)
def test_heartbeats_are_decoded_or_refused(data: bytes) -> None:
    with contextlib.suppress(BadMessage):
        signed = decode_heartbeat_untrusted(data)
        assert signed.wire == data


@given(st.lists(FOREIGN, max_size=8))
def test_no_bytes_break_the_core(messages: list[bytes]) -> None:
    core = MembershipCore(
        KEY,
        MembershipConfig(),
        Random(1),
        verify=verify,
        may=lambda peer: True,
        wall=lambda: 900.0,
        seqno=1,
    )
    now = 0.0
    core.handle(Tick(), now)
    for data in messages:
        core.handle(Received(ENEMY.peer_id, data), now)
        now = max(now, core.next_deadline)
        core.handle(Tick(), now)
    assert core.next_deadline > now
