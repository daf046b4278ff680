from __future__ import annotations

import pytest

from p2p.errors import BadMessage
from p2p.gossip.messages import (
    MAX_DATA,
    MAX_ENTRIES,
    MAX_IDS,
    MAX_RPC,
    PubsubMessage,
    Rpc,
    author_of,
    decode_rpc_untrusted,
    encode_rpc,
    sign_message,
)
from p2p.identity import FOREIGN, KeyPair, verify
from p2p.protobuf import field

KEY = KeyPair(bytes(range(32)))


def test_the_bytes_are_those_of_the_specification() -> None:
    assert encode_rpc(Rpc(subscriptions=[("t", True)])).hex() == "0a0508011201" + "74"
    assert encode_rpc(Rpc(subscriptions=[("t", False)])).hex() == "0a0508001201" + "74"
    message = PubsubMessage(b"me", bytes(7) + b"\x01", "t", b"hi", b"sig")
    wire = "0a026d65" + "12026869" + "1a080000000000000001" + "220174" + "2a03736967"
    assert message.wire().hex() == wire
    assert encode_rpc(Rpc(messages=[message])).hex() == "121a" + wire
    assert encode_rpc(Rpc(graft=["t"])).hex() == "1a05" + "1a030a0174"
    assert encode_rpc(Rpc(prune=[("t", 60)])).hex() == "1a07" + "22050a0174" + "183c"
    assert encode_rpc(Rpc(ihave=[("t", [b"id"])])).hex() == "1a09" + "0a070a0174" + "12026964"
    assert encode_rpc(Rpc(iwant=[b"id"])).hex() == "1a06" + "12040a026964"
    assert encode_rpc(Rpc()) == b""


def test_a_signature_is_libp2ps() -> None:
    message = sign_message(KEY, "t", b"hi", 1)
    signed = b"libp2p-pubsub:" + message.unsigned()
    assert author_of(message) == KEY.peer_id
    assert verify(KEY.peer_id, FOREIGN, signed, message.signature)
    assert not verify(KEY.peer_id, "libp2p-pubsub:", message.unsigned(), message.signature)


def test_a_key_that_comes_along_must_be_the_authors() -> None:
    message = sign_message(KEY, "t", b"hi", 1)
    inline = KEY.peer_id.digest[2:]
    for key, good in [(inline, True), (b"", True), (inline[:-1] + b"x", False)]:
        again = PubsubMessage(message.author, message.seqno, "t", b"hi", message.signature, key)
        assert (author_of(again) == KEY.peer_id) == good
    assert author_of(PubsubMessage(b"\x12\x20" + bytes(32), bytes(8), "t", b"")) is None


def test_unknown_fields_are_read_over() -> None:
    extra = (
        field(9, b"later") + bytes([10 << 3 | 1]) + bytes(8) + bytes([11 << 3 | 5]) + bytes(4)
    )
    rpc = Rpc(graft=["t"])
    assert decode_rpc_untrusted(extra + encode_rpc(rpc)) == rpc
    px = field(4, field(1, "t") + field(2, field(1, b"peer")) + field(3, 10**6))
    assert decode_rpc_untrusted(field(3, px + field(5, b"idontwant"))) == Rpc(
        prune=[("t", 3600)]
    )


@pytest.mark.parametrize(
    "data",
    [
        b"\x00",
        b"\x0b",
        b"\x0a\x05ab",
        field(1, field(1, True)),
        field(1, field(2, "t" * 129)),
        field(1, field(2, b"\xff\xff")),
        field(1, field(2, "t") + field(1, b"yes")),
        field(1, 7),
        field(2, field(1, b"me") + field(4, "t")),
        field(2, field(1, b"me") + field(3, bytes(9)) + field(4, "t")),
        field(2, field(3, bytes(8)) + field(4, "t")),
        field(2, PubsubMessage(b"m" * 57, bytes(8), "t", b"").wire()),
        field(2, PubsubMessage(b"me", bytes(8), "t", bytes(MAX_DATA + 1)).wire()),
        field(3, field(2, field(1, b""))),
        field(3, field(1, field(1, "t") + field(2, bytes(65)))),
        field(3, field(3, b"")),
        field(1, field(2, "t")) * (MAX_ENTRIES + 1),
        field(3, field(2, field(1, b"i") * (MAX_IDS + 1))),
        field(3, field(3, field(1, "t")) * 257),
        bytes(MAX_RPC + 1),
    ],
)
def test_what_breaks_the_rules_is_a_bad_message(data: bytes) -> None:
    with pytest.raises(BadMessage):
        decode_rpc_untrusted(data)
