"""What is in an RPC is counted while it is decoded, and one forgery ends it."""

from __future__ import annotations

import pytest

from p2p.errors import BadMessage
from p2p.gossip import messages as msg
from p2p.protobuf import field
from tests.attacks.gossip_node import TOPIC, Victim, said
from tests.counting import calls_at_most
from tests.unit.core_swarm import peer_named

ENEMY = peer_named(10_000)
FRIEND = peer_named(1)
AUTHOR = peer_named(2)
MOST_CALLS = msg.MAX_RPC // 8  # for a largest RPC: somewhat more than the worst below makes


def _full(entry: bytes) -> bytes:
    return entry * (msg.MAX_RPC // len(entry))


def _control(entry: bytes) -> bytes:
    body = entry * ((msg.MAX_RPC - 16) // len(entry))
    return field(3, body)


LARGEST = {
    "unknown fields": _full(field(9, 1)),
    "fixed-width fields": _full(bytes([9 << 3 | 5]) + bytes(4)),
    "subscriptions": _full(field(1, field(1, True) + field(2, "t"))),
    "empty messages": _full(field(2, b"")),
    "empty controls": _full(field(3, b"")),
    "questions": _control(field(2, field(1, b"1"))),
    "ids in one question": field(3, field(2, field(1, b"1") * (msg.MAX_RPC // 3 - 16))),
    "ids in one topic": field(
        3, field(1, field(1, "t") + field(2, b"1") * (msg.MAX_RPC // 3 - 16))
    ),
    "topics told": _control(field(1, field(1, "t"))),
    "grafts": _control(field(3, field(1, "t"))),
    "prunes": _control(field(4, field(1, "t"))),
    "fields of a message": field(2, field(9, 1) * (msg.MAX_RPC // 2 - 16)),
    "peers in a prune": field(
        3, field(4, field(1, "t") + field(2, b"") * (msg.MAX_RPC // 2 - 16))
    ),
}


@pytest.mark.parametrize("name", LARGEST)
def test_the_largest_rpc_does_not_stall_the_loop(name: str) -> None:
    data = LARGEST[name]
    assert 0.99 * msg.MAX_RPC < len(data) <= msg.MAX_RPC
    with calls_at_most(MOST_CALLS), pytest.raises(BadMessage):
        msg.decode_rpc_untrusted(data)


def test_honest_rpcs_are_read_to_their_last_field() -> None:
    """go-libp2p tells of up to 5,000 ids at once; an answer to us has at most 128 messages."""
    rpc = msg.Rpc(
        subscriptions=[(f"topic {number}", True) for number in range(64)],
        messages=[said(AUTHOR, bytes(1000), seqno=number) for number in range(128)],
        ihave=[(TOPIC, [b"%048d" % number for number in range(msg.MAX_IDS - 128)])],
        iwant=[b"%048d" % number for number in range(128)],
        graft=[f"topic {number}" for number in range(64)],
        prune=[(f"topic {number}", 60) for number in range(64)],
    )
    assert msg.decode_rpc_untrusted(msg.encode_rpc(rpc)) == rpc


def test_ids_are_counted_over_all_of_an_rpc() -> None:
    ids = [b"%d" % number for number in range(msg.MAX_IDS // 2)]
    msg.decode_rpc_untrusted(msg.encode_rpc(msg.Rpc(ihave=[(TOPIC, ids)], iwant=ids)))
    for rpc in (
        msg.Rpc(ihave=[(TOPIC, ids), (TOPIC, ids)], iwant=[b"1"]),
        msg.Rpc(iwant=[*ids, *ids, b"1"]),
    ):
        with pytest.raises(BadMessage):
            msg.decode_rpc_untrusted(msg.encode_rpc(rpc))


def test_the_first_forgery_ends_an_rpc() -> None:
    """1,024 forged messages were all verified first: 60 to 120 ms."""
    victim = Victim()
    victim.meet(FRIEND, ENEMY)
    forged = [
        msg.PubsubMessage(AUTHOR.digest, number.to_bytes(8, "big"), TOPIC, b"lies", bytes(64))
        for number in range(msg.MAX_ENTRIES - 1)
    ]
    real = said(AUTHOR, b"true")
    for _ in range(10):
        victim.hear(ENEMY, msg.Rpc(messages=[*forged, real], graft=[TOPIC]))
    assert victim.verified == 4  # 25 points each, and the host refuses the peer
    assert ENEMY in victim.refused
    assert ENEMY not in victim.mesh()
    victim.hear(FRIEND, msg.Rpc(messages=[real]))
    assert victim.delivered == [b"true"]


def test_signatures_are_verified_on_account() -> None:
    victim = Victim()
    victim.meet(ENEMY)
    for number in range(40):
        batch = [said(AUTHOR, b"news", seqno=100 * number + each) for each in range(100)]
        victim.hear(ENEMY, msg.Rpc(messages=batch))
    assert victim.verified <= 1 + 1024 * 1024 // 2048  # what a newcomer has at once
    before = victim.verified
    for number in range(1000):
        victim.later(0.01)
        batch = [
            said(AUTHOR, b"news", seqno=10_000 + 100 * number + each) for each in range(100)
        ]
        victim.hear(ENEMY, msg.Rpc(messages=batch))
    assert victim.verified - before <= 10 * 256 * 1024 // 2048 + 1
    assert victim.points[ENEMY] in (0, 25)
