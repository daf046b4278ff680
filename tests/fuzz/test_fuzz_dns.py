"""Whatever the bytes, the parsers of DNS raise `BadMessage` or nothing, and end."""

from __future__ import annotations

import contextlib
import struct

from hypothesis import given, strategies as st

from p2p.errors import BadMessage
from p2p.transport.dns import (
    MAX_FOUND,
    PTR,
    TXT,
    decode_dns_untrusted,
    dnsaddrs_untrusted,
    encode_question,
    encode_record,
)
from tests.fuzz.test_fuzz_transport import ALICE, mutated

NAME = "a.example"
PLACE = f"dnsaddr=/ip4/1.2.3.4/tcp/5/p2p/{ALICE.peer_id}"
HEAD = struct.pack(">HHHHHH", 7, 0x8400, 1, 2, 0, 0)
QUESTION = encode_question(NAME, TXT)[12:]
TEXT = encode_record(NAME, TXT, 9, bytes([len(PLACE)]) + PLACE.encode() + b"\1x")
BACK = b"\xc0\x0c" + TEXT[len(NAME) + 2 :]
"""The same record, whose name is a pointer to the question's."""
ANSWER = HEAD + QUESTION + TEXT + BACK


@given(mutated(ANSWER))
def test_messages(data: bytes) -> None:
    with contextlib.suppress(BadMessage):
        message = decode_dns_untrusted(data)
        assert sum(len(text) for _, texts in message.texts for text in texts) <= len(data)


@given(
    st.lists(st.text(max_size=50) | mutated(PLACE.encode()).map(lambda b: b.decode("latin-1")))
)
def test_texts(texts: list[str]) -> None:
    assert len(dnsaddrs_untrusted(texts)) <= MAX_FOUND


def test_valid_messages_are_understood() -> None:
    message = decode_dns_untrusted(ANSWER)
    assert message.questions == ((NAME, TXT),)
    assert message.texts == ((NAME, (PLACE, "x")),) * 2
    assert [str(addr) for addr in dnsaddrs_untrusted([PLACE, "x"])] == [PLACE[8:]]
    assert decode_dns_untrusted(encode_question(NAME, PTR, 3)).id == 3
