"""Whatever the bytes: `BadMessage` or a value, and a core that goes on."""

from __future__ import annotations

import contextlib
from random import Random

from hypothesis import given, strategies as st

from p2p.errors import BadMessage
from p2p.events import PeerDown, PeerUp, Received, Send, Tick
from p2p.gossip.config import GossipConfig
from p2p.gossip.core.core import GossipCore
from p2p.gossip.core.events import (
    Event,
    Publish,
    Subscribe,
    Unsubscribe,
    Validate,
    Validated,
    Validity,
)
from p2p.gossip.messages import (
    Rpc,
    decode_message_untrusted,
    decode_rpc_untrusted,
    encode_rpc,
    sign_message,
)
from p2p.identity import KeyPair, verify
from p2p.protobuf import fields_untrusted

KEY = KeyPair(bytes(range(32)))
ENEMY = KeyPair(bytes(32))
HONEST = encode_rpc(
    Rpc(
        subscriptions=[("topic", True)],
        messages=[sign_message(ENEMY, "topic", b"data", 7)],
        ihave=[("topic", [b"one", b"two"])],
        iwant=[b"three"],
        graft=["topic"],
        prune=[("other", 60)],
    )
)
GARBAGE = st.binary(max_size=300)
DAMAGED = st.builds(
    lambda cuts, flips: damage(cuts, flips),
    st.tuples(st.integers(0, len(HONEST)), st.integers(0, len(HONEST))),
    st.lists(st.tuples(st.integers(0, len(HONEST) - 1), st.integers(1, 255)), max_size=4),
)


def damage(cut: tuple[int, int], flips: list[tuple[int, int]]) -> bytes:
    data = bytearray(HONEST)
    for index, mask in flips:
        data[index] ^= mask
    if flips:
        return bytes(data)
    return bytes(data[: min(cut)] + data[max(cut) :])


@given(GARBAGE | DAMAGED)
def test_decoders_raise_bad_message_and_nothing_else(data: bytes) -> None:
    for decode in (
        decode_rpc_untrusted,
        decode_message_untrusted,
        lambda each: list(fields_untrusted(each)),
    ):
        with contextlib.suppress(BadMessage):
            decode(data)


@given(st.lists(GARBAGE | DAMAGED, max_size=5))
def test_no_bytes_break_the_core(messages: list[bytes]) -> None:
    core = GossipCore(KEY, GossipConfig(), Random(1), verify=verify, seqno=1)
    now = 0.0
    for event in (Tick(), Subscribe("topic"), PeerUp(ENEMY.peer_id)):
        core.handle(event, now)
    for data in messages:
        core.handle(Received(ENEMY.peer_id, data), now)
        now = core.next_deadline
        core.handle(Tick(), now)


PEERS = [KeyPair(bytes([number]) * 32).peer_id for number in range(1, 5)]
TOPICS = st.sampled_from(["topic", "other", "third"])
IDS = st.lists(st.sampled_from([b"%d" % number for number in range(6)]), max_size=6)
RPCS = st.builds(
    Rpc,
    subscriptions=st.lists(st.tuples(TOPICS, st.booleans()), max_size=3),
    messages=st.lists(
        st.builds(sign_message, st.just(ENEMY), TOPICS, st.just(b"data"), st.integers(1, 9)),
        max_size=3,
    ),
    ihave=st.lists(st.tuples(TOPICS, IDS), max_size=2),
    iwant=IDS,
    graft=st.lists(TOPICS, max_size=3),
    prune=st.lists(st.tuples(TOPICS, st.integers(0, 4000)), max_size=3),
)
EVENTS = st.one_of(
    st.builds(PeerUp, st.sampled_from(PEERS), st.booleans()),
    st.builds(PeerDown, st.sampled_from(PEERS)),
    st.builds(Received, st.sampled_from(PEERS), RPCS.map(encode_rpc)),
    st.builds(Subscribe, TOPICS),
    st.builds(Unsubscribe, TOPICS),
    st.builds(Publish, TOPICS, st.just(b"mine")),
    st.just(Tick()),
)


@given(st.lists(st.tuples(EVENTS, st.floats(0, 30)), max_size=40))
def test_peers_that_are_gone_leave_nothing_that_holds_them(
    events: list[tuple[Event, float]],
) -> None:
    core = GossipCore(KEY, GossipConfig(), Random(1), verify=lambda *_: True, seqno=1)
    now = 0.0
    for event, later in events:
        now += later
        connected = set(core._mesh.topics_of)
        for effect in core.handle(event, now):
            if isinstance(effect, Send):
                assert effect.peer in connected | set(core._mesh.topics_of)
            elif isinstance(effect, Validate):
                core.handle(Validated(effect.id, Validity.ACCEPT), now)
        assert all(set(mesh) <= set(core._mesh.topics_of) for mesh in core.topics.values())
    for peer in PEERS:
        core.handle(PeerDown(peer), now)
    mesh, promises = core._mesh, core._promises
    assert not any(core.topics.values())
    assert (mesh._subscribers, mesh._outbound) == ({}, {})
    assert (promises._of, promises._requests, len(promises)) == ({}, {}, 0)
    assert (core._quotas._accounts, core._earned._first_deliveries) == ({}, {})
    assert core._pending == {}
