"""Whatever the bytes, a core goes on, and peers that are gone leave nothing behind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, strategies as st

from bench.dht import WALL, Swarm
from p2p.dht.messages import decode_untrusted
from p2p.errors import BadMessage
from p2p.events import PeerDown, PeerUp, Penalise, Received, Send, Tick
from p2p.gossip.config import GossipConfig
from p2p.gossip.core import events as ge
from p2p.gossip.core.core import GossipCore
from p2p.gossip.messages import Rpc, encode_rpc, sign_message
from p2p.identity import KeyPair, verify
from p2p.ledger.core.chain import Place
from p2p.ledger.core.inspection import Inspector
from p2p.machine import RealWorld
from p2p.membership.config import MembershipConfig
from p2p.membership.core.core import MembershipCore
from p2p.node.rundoc import RunBook
from p2p.shardcast import messages as shardcast
from p2p.shardcast.config import ShardcastConfig
from p2p.shardcast.core import events as ev
from p2p.shardcast.core.core import ShardcastCore
from p2p.shardcast.core.statements import Statements
from roles.contract.core.file import open_run
from tests.fuzz.test_parsers import ALICE, BOB, MALLORY, MANIFEST, NEWS, SERVICES
from tests.support.foreign import damaged, foreign

KEY, ENEMY = KeyPair(bytes(range(32))), ALICE


def make_gossip(verify: Callable[..., bool] = verify) -> GossipCore:
    return GossipCore(KEY, GossipConfig(), Random(1), verify=verify, seqno=1)


def make_membership() -> MembershipCore:
    return MembershipCore(
        KEY,
        MembershipConfig(),
        Random(1),
        verify=verify,
        may=lambda peer: True,
        wall=lambda: 900.0,
        seqno=1,
    )


CORES: dict[str, tuple[Callable[[], Any], list[object]]] = {
    "gossip": (make_gossip, [Tick(), ge.Subscribe("topic"), PeerUp(ENEMY.peer_id)]),
    "membership": (make_membership, [Tick()]),
}


def said_of(name: str) -> st.SearchStrategy[list[bytes]]:
    return st.lists(st.sampled_from(SERVICES[name].valid).flatmap(damaged), max_size=6)


@pytest.mark.parametrize("name", CORES)
@given(data=st.data())
def test_no_bytes_break_a_core(name: str, data: st.DataObject) -> None:
    make, first = CORES[name]
    core, now = make(), 0.0
    for event in first:
        core.handle(event, now)
    for said in data.draw(said_of(name)):
        core.handle(Received(ENEMY.peer_id, said), now)
        now = max(now, core.next_deadline)
        core.handle(Tick(), now)
        assert core.next_deadline > now


@given(st.sampled_from(SERVICES["dht"].valid).flatmap(damaged), st.integers(0, 3))
def test_a_core_of_the_dht_punishes_garbage_and_keeps_none(data: bytes, seed: int) -> None:
    victim, other = Swarm(2, seed).nodes.values()
    held = victim.core.records
    effects = victim.core.handle(Received(other.peer, data, WALL), 1.0)
    is_punished = any(isinstance(effect, Penalise) for effect in effects)
    try:
        assert is_punished or decode_untrusted(data).sender.peer == other.peer
    except BadMessage:
        assert is_punished
    assert victim.core.records == held


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
    st.builds(ge.Subscribe, TOPICS),
    st.builds(ge.Unsubscribe, TOPICS),
    st.builds(ge.Publish, TOPICS, st.just(b"mine")),
    st.just(Tick()),
)


@given(st.lists(st.tuples(EVENTS, st.floats(0, 30)), max_size=40))
def test_peers_that_are_gone_leave_nothing_that_holds_them(
    events: list[tuple[ge.Event, float]],
) -> None:
    core = make_gossip(lambda *_: True)
    now = 0.0
    for event, later in events:
        now += later
        connected = set(core._mesh.topics_of)
        for effect in core.handle(event, now):
            if isinstance(effect, Send):
                assert effect.peer in connected | set(core._mesh.topics_of)
            elif isinstance(effect, ge.Validate):
                core.handle(ge.Validated(effect, ge.Validity.ACCEPT), now)
        assert all(set(mesh) <= set(core._mesh.topics_of) for mesh in core.topics.values())
    for peer in PEERS:
        core.handle(PeerDown(peer), now)
    mesh, promises = core._mesh, core._promises
    assert not any(core.topics.values())
    assert (mesh._subscribers, mesh._outbound) == ({}, {})
    assert (promises._of, promises._requests, len(promises)) == ({}, {}, 0)
    assert (core._quotas._accounts, core._earned._first_deliveries) == ({}, {})


OTHERS = [one.peer_id for one in (BOB, MALLORY, KEY)]
STEPS = st.lists(
    st.tuples(st.sampled_from(OTHERS), st.sampled_from(NEWS) | st.integers(0, 8)), max_size=25
)


@given(STEPS)
def test_no_order_of_messages_breaks_a_core_of_shardcast(course: list[Any]) -> None:
    statements = Statements(b"run", ALICE.peer_id.__eq__, lambda *_: True)
    core = ShardcastCore(OTHERS[0], ShardcastConfig(), statements, Random(1))
    now = 0.0
    for peer, step in course:
        now += 0.3
        with contextlib.suppress(BadMessage):
            if isinstance(step, int):
                header = shardcast.ChunkHeader(MANIFEST.digest, step, 1, step % 3)
                core.handle(ev.ChunkCame(peer, header, 10), now)
            else:
                core.handle(ev.Heard(peer, about_manifest(step), gossip=peer == OTHERS[2]), now)
        if core.next_deadline <= now:
            core.handle(ev.Tick(), now)
            assert core.next_deadline > now


def about_manifest(message: shardcast.Message) -> shardcast.Message:
    """The same about the policy that the core may know."""
    if isinstance(
        message,
        shardcast.Ask
        | shardcast.Have
        | shardcast.Taken
        | shardcast.Skipped
        | shardcast.Want
        | shardcast.Credit
        | shardcast.Blame,
    ):
        return type(message)(
            MANIFEST.digest, *[getattr(message, name) for name in message.__slots__[1:]]
        )
    return message


@given(st.binary(max_size=400))
def test_a_segment_of_a_ledger_never_raises(data: bytes) -> None:
    places: list[Place] = []
    take = lambda _, place: places.append(place)  # noqa: E731
    Inspector(["00000000.seg"], None, lambda *_: True, take).read("00000000.seg", data)
    assert all(place.offset + place.length <= len(data) for place in places)


@given(foreign)
def test_questions_about_runs_are_answered_or_refused_at_once(question: bytes) -> None:
    book = RunBook(RealWorld(ALICE, Path("/nowhere")), open_run)
    for answer in (book._answer, book._answer_rival):
        with pytest.raises((BadMessage, StopIteration)):
            answer(ALICE.peer_id, question).send(None)
