"""Whatever bytes come, the messages of rounds are read or `BadMessage`, and read as written."""

from __future__ import annotations

import contextlib

from hypothesis import given, strategies as st

from p2p.errors import BadMessage
from p2p.wire import pack
from roles.diloco.core.messages import (
    BadPart,
    BadSum,
    Beat,
    Chain,
    Doubled,
    Outcome,
    Plan,
    Promise,
    Propose,
    Ready,
    Record,
    RoundMessage,
    Sum,
    Unreadable,
    Vote,
    decode_message_untrusted,
    encode_message,
    fits,
)
from tests.unit.core_swarm import FakeSigner, peer_named
from tests.unit.diloco_swarm import RUN, digest

PEERS = tuple(sorted(peer_named(n) for n in range(64)))
PREVIOUS = digest(b"before")


def signed(said):  # type: ignore[no-untyped-def]
    return said.signed(RUN, FakeSigner(said.author))


def plan(count: int) -> Plan:
    return Plan(3, PREVIOUS, tuple((p, digest(p)) for p in PEERS[:count]), PEERS[:count])


def everything(count: int) -> list[RoundMessage]:
    outcome = Outcome(plan(count), digest(b"s"), digest(b"t"))
    me = PEERS[0]
    ready = signed(Ready(3, 0, PREVIOUS, 9, 1.5, (1.0, 2.0), (digest(b"a"),) * 2, author=me))
    votes = [signed(Vote(3, 1, outcome, author=peer)) for peer in PEERS[:count]]
    promises = tuple(
        signed(Promise(3, 2, PREVIOUS, vote, PEERS[:1], author=vote.author)) for vote in votes
    )
    total = signed(Sum(3, 1, plan(count).id, 0, (digest(b"p"),), author=me))
    other = signed(Sum(3, 1, plan(count).id, 0, (digest(b"q"),), author=me))
    record = Record(1, outcome, tuple((vote.author, vote.signature) for vote in votes))
    return [
        ready, votes[0], promises[0], total, record,
        signed(Propose(3, 2, plan(count), outcome, promises, author=me)),
        signed(Propose(3, 0, plan(count), None, (), author=me)),
        Beat(5, PREVIOUS, 4, 2, 2**63, 1, 0, is_planned=True, is_leaving=False, faults=1),
        Chain((record,) * 3),
        Doubled(total, other),
        BadPart(ready, 1, b"piece"),
        Unreadable(total, 0, b"piece"),
        BadSum(total, plan(count), (ready,) * count, 0, (b"x",) * count),
    ]  # fmt: skip


def test_every_message_is_read_as_it_was_written() -> None:
    """With the most members there may be, too: what a node may send, its peers can read."""
    for count in (1, 14, 64):
        for message in everything(count):
            assert fits(message)
            assert decode_message_untrusted(encode_message(message)) == message


values = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary(max_size=40)
    | st.just(PREVIOUS) | st.just(PEERS[0].digest) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=8),
    max_leaves=12,
)  # fmt: skip
bodies = st.lists(values, max_size=10)
kinds = st.integers(0, 16)


@given(
    data=st.binary(max_size=300) | st.tuples(kinds, bodies).map(lambda x: pack([x[0], *x[1]]))
)
def test_whatever_the_bytes(data: bytes) -> None:
    with contextlib.suppress(BadMessage):
        decode_message_untrusted(data)


@given(
    which=st.integers(0, 12), at=st.integers(0, 2**16), byte=st.integers(0, 255),
    cut=st.integers(0, 400),
)  # fmt: skip
def test_a_message_with_another_byte_or_cut_off(
    which: int, at: int, byte: int, cut: int
) -> None:
    data = bytearray(encode_message(everything(3)[which]))
    data[at % len(data)] = byte
    for changed in (bytes(data), bytes(data[:-cut])):
        with contextlib.suppress(BadMessage):
            decode_message_untrusted(changed)
