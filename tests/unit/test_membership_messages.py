from __future__ import annotations

import pytest

from p2p.errors import BadMessage
from p2p.identity import SIGNATURE_BYTES, KeyPair, verify
from p2p.membership.heartbeat import (
    PROTOCOL_ID,
    Heartbeat,
    Profile,
    SignedHeartbeat,
    decode_heartbeat_untrusted,
    sign_heartbeat,
)
from p2p.membership.messages import MAX_HEARTBEATS, decode_message_untrusted
from p2p.multiaddr import Multiaddr
from p2p.wire import pack, unpack_untrusted

KEY = KeyPair(bytes(range(32)))


def typical() -> SignedHeartbeat:
    profile = Profile(
        addrs=(
            Multiaddr.parse("/ip4/203.0.113.9/tcp/4001"),
            Multiaddr.parse("/ip6/2001:db8::9/tcp/4001"),
        ),
        roles=("inference",),
        run=bytes(32),
        policy=1234,
        upload=12_500_000,
        slots=3,
        load=0.5,
        version="0.1.0",
    )
    heartbeat = Heartbeat(
        peer=KEY.peer_id,
        seqno=1_700_000_000_000,
        expires=1_700_001_800,
        interval=5.0,
        profile=profile,
    )
    return sign_heartbeat(heartbeat, KEY)


def test_the_signature_covers_every_byte_of_the_body() -> None:
    signed = typical()
    body, signature = signed.wire[:-SIGNATURE_BYTES], signed.wire[-SIGNATURE_BYTES:]
    assert verify(signed.peer, PROTOCOL_ID, body, signature)
    for index in range(len(body)):
        changed = bytearray(body)
        changed[index] ^= 1
        assert not verify(signed.peer, PROTOCOL_ID, bytes(changed), signature)


@pytest.mark.parametrize(
    ("index", "value"),
    [
        (0, b"short"),
        (1, -1),
        (1, 2**63),
        (2, -1),
        (3, 0),
        (3, 10**9),
        (4, 1),
        (5, [b"x"] * 5),
        (5, [b"garbage"]),
        (5, ["text"]),
        (5, [Multiaddr.parse("/ip4/1.2.3.4/tcp/1").with_peer(KEY.peer_id).to_bytes()]),
        (6, ["r"] * 9),
        (6, [""]),
        (6, [b"bytes"]),
        (7, bytes(33)),
        (8, -2),
        (8, 2**31),
        (9, -1),
        (10, True),
        (11, 1001),
        (11, -1),
        (12, "v" * 33),
    ],
)
def test_a_field_out_of_range_is_refused(index: int, value: object) -> None:
    signed = typical()
    fields = unpack_untrusted(signed.wire[:-SIGNATURE_BYTES])
    assert isinstance(fields, list)
    fields[index] = value
    with pytest.raises(BadMessage):
        decode_heartbeat_untrusted(pack(fields) + signed.wire[-SIGNATURE_BYTES:])


def test_limits_of_messages_hold() -> None:
    wire = typical().wire
    too_much = [
        [8, [wire] * (MAX_HEARTBEATS + 1)],
        [2, 9, wire],
        [6, bytes(20 * 257)],
        [6, bytes(21)],
        [6, b"\xff" * 20],
        [7, bytes(9)],
        [7, bytes(8 * 65)],
        [10],
        [True],
        [],
        [5, 1],
    ]
    for message in too_much:
        with pytest.raises(BadMessage):
            decode_message_untrusted(pack(message))
    with pytest.raises(BadMessage):
        decode_message_untrusted(bytes(44 * 1024 + 1))
    assert decode_message_untrusted(pack([8, [wire] * MAX_HEARTBEATS]))
