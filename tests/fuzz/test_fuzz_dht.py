"""Foreign bytes of the DHT raise `BadMessage` or nothing, and never change a core's mind."""

from __future__ import annotations

import contextlib

from hypothesis import example, given, strategies as st

from bench.dht import WALL, Swarm
from p2p.dht.messages import (
    FindNode,
    FindValue,
    Nodes,
    Ping,
    Pong,
    Store,
    Stored,
    Values,
    decode_contact_untrusted,
    decode_untrusted,
    encode,
)
from p2p.dht.record import decode_addrs_untrusted, decode_record_untrusted
from p2p.errors import BadMessage
from p2p.events import Penalise, Received
from p2p.wire import pack

SWARM = Swarm(3, 1)
ONE, TWO, THREE = SWARM.nodes.values()
BODIES = [
    Ping(),
    FindNode(bytes(20)),
    FindValue(bytes(20)),
    Store(bytes(20), b"record"),
    Pong(),
    Nodes((TWO.core.own, THREE.core.own)),
    Values((b"record",), (TWO.core.own,)),
    Stored(True),
]
VALID = [encode(7, ONE.core.own, body) for body in BODIES]
INTEGERS = st.integers(-(2**63), 2**64 - 1)
ANYTHING = st.recursive(
    st.none() | st.booleans() | INTEGERS | st.floats() | st.binary(max_size=60) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=20,
)  # fmt: skip


@st.composite
def mangled(draw: st.DrawFn) -> bytes:
    data = bytearray(draw(st.sampled_from(VALID)))
    for _ in range(draw(st.integers(1, 4))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return (
        bytes(data[: draw(st.integers(0, len(data)))]) if draw(st.booleans()) else bytes(data)
    )


FOREIGN = st.binary(max_size=300) | ANYTHING.map(pack) | mangled()


@given(FOREIGN)
@example(b"")
@example(pack([[]] * 5))
def test_messages(data: bytes) -> None:
    with contextlib.suppress(BadMessage):
        envelope = decode_untrusted(data)
        again = encode(envelope.request_id, envelope.sender, envelope.body)
        assert decode_untrusted(again) == envelope


@given(FOREIGN | ANYTHING)
def test_contacts_and_records(data: object) -> None:
    with contextlib.suppress(BadMessage):
        decode_contact_untrusted(data)
    with contextlib.suppress(BadMessage):
        decode_record_untrusted(data)
    if isinstance(data, bytes):
        with contextlib.suppress(BadMessage):
            decode_addrs_untrusted(data)


@given(ANYTHING.map(pack), ANYTHING.map(pack))
def test_records_within_records(payload: bytes, signature: bytes) -> None:
    with contextlib.suppress(BadMessage):
        decode_record_untrusted(pack([payload, signature]))


@given(FOREIGN, st.integers(0, 2**32))
def test_a_core_punishes_garbage_and_holds_none_of_it(data: bytes, seed: int) -> None:
    swarm = Swarm(2, seed % 4)
    victim, other = swarm.nodes.values()
    held = victim.core.records
    effects = victim.core.handle(Received(other.peer, data, WALL), 1.0)
    try:
        sender = decode_untrusted(data).sender
    except BadMessage:
        assert any(isinstance(effect, Penalise) for effect in effects)
    else:
        assert sender.peer == other.peer or any(
            isinstance(effect, Penalise) for effect in effects
        )
    assert victim.core.records == held
