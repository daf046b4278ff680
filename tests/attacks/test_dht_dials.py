"""Contacts at silent addresses hold the dial slots. Dials to third parties."""

from __future__ import annotations

from bench.dht import WALL, Node, Swarm
from p2p.dht import messages as msg
from p2p.dht.core.events import Effect, Get, Join, SendIfConnected
from p2p.dht.core.lookup import CREDIT
from p2p.events import AddAddrs, PeerUp, Send, Tick
from p2p.identity import PeerId
from tests.attacks.dht import alone, contact, key_pair, meet, sent, tell

VICTIMS = tuple(
    contact(key_pair(number, 7), f"81.{number // 250}.{number % 250}.1")
    for number in range(400)
)
"""Stamped names at addresses of others, none of which knows about it."""

LATER = 1000.0  # by then those who came to us at the start are no visitors any more


def lie(request: msg.Request, call: int) -> msg.Reply:
    """Twenty victims in each answer, others each time."""
    named = VICTIMS[20 * call % 400 :][:20]
    match request:
        case msg.Ping():
            return msg.Pong()
        case msg.FindNode():
            return msg.Nodes(named)
        case msg.FindValue():
            return msg.Values((), named)
        case _:
            return msg.Stored(True)


def play(
    node: Node,
    effects: list[Effect],
    liars: dict[PeerId, msg.Contact],
    *,
    since: float,
    until: float,
) -> list[PeerId]:
    """Let liars answer at once and others never; return each dial to a third party."""
    dialled: list[PeerId] = []
    now, answers = since, 0
    while True:
        questions = [each for each in effects if isinstance(each, Send | SendIfConnected)]
        dialled += [
            each.peer
            for each in effects
            if isinstance(each, AddAddrs) and each.peer not in liars
        ]
        effects = []
        for question in questions:
            liar = liars.get(question.peer)
            asked = msg.decode_untrusted(question.data)
            if liar is not None and isinstance(asked.body, msg.Request):
                reply = lie(asked.body, answers)
                answers += not isinstance(asked.body, msg.Ping)
                effects += tell(node, liar, reply, now, asked.request_id)
        if not effects:
            now = max(now, node.core.next_deadline)
            if now > until:
                return dialled
            effects = node.core.handle(Tick(WALL + now), now)


def test_a_liar_in_the_table_makes_a_lookup_dial_four_victims_not_twenty() -> None:
    """A reading asks the liar under three keys, and each answer names twenty."""
    victim = alone(refresh_interval=1e6)
    liar = contact(key_pair(1))
    meet(victim, liar)
    effects = victim.core.handle(Get(1, "test", b"name"), LATER)
    dialled = play(victim, effects, {liar.peer: liar}, since=LATER, until=LATER + 30)
    assert 0 < len(set(dialled)) <= 3 * CREDIT


def test_a_visiting_stranger_causes_no_dial_to_a_third_party() -> None:
    """Whom a visitor named was dialled: the eight nearest at once, more as they were silent."""
    (victim,) = Swarm(1, 1).nodes.values()
    dialled: list[PeerId] = []
    for number in range(10):
        stranger = contact(key_pair(number))
        effects = victim.core.handle(PeerUp(stranger.peer), 1.0)
        effects += tell(victim, stranger, msg.FindNode(bytes(20)), 1.0)
        dialled += play(victim, effects, {stranger.peer: stranger}, since=1.0, until=60.0)
    assert dialled == []
    assert victim.core.contacts == 10, "those who answer are known all the same"


def test_a_lying_seed_costs_four_dials_a_lookup_and_an_honest_one_is_believed() -> None:
    victim = alone(refresh_interval=1e6)
    seed = contact(key_pair(1))
    effects = victim.core.handle(Join(1, (seed.peer,)), 1.0)
    dialled = play(victim, effects, {seed.peer: seed}, since=1.0, until=4.0)
    assert len(set(dialled)) <= 2 * CREDIT, "we look up ourselves, and then one bucket"

    swarm = Swarm(40, 2)
    swarm.join_all()
    late = swarm.add()
    first, *_ = swarm.nodes.values()
    swarm.give(late, Join(999, (first.peer,)))
    swarm.run(swarm.now + 20)
    assert late.core.contacts >= 30


def test_what_a_liar_says_of_a_peer_in_the_table_is_not_tried() -> None:
    """Else each lookup dials where a liar says that the peer is."""
    victim = alone(refresh_interval=1e6)
    liar, honest = contact(key_pair(1)), contact(key_pair(2))
    meet(victim, liar)
    meet(victim, honest)
    victim.core._neighbours.up.pop(honest.peer, None)
    elsewhere = msg.Contact(honest.peer, honest.nonce, VICTIMS[0].addrs)
    effects = victim.core.handle(Get(1, "test", b"name"), LATER)
    learnt = [each for each in effects if isinstance(each, AddAddrs)]
    for question, asked in sent(effects):
        if question.peer == liar.peer:
            effects = tell(
                victim, liar, msg.Values((), (elsewhere,)), LATER + 0.1, asked.request_id
            )
            learnt += [each for each in effects if isinstance(each, AddAddrs)]
    assert {each.addrs for each in learnt} <= {honest.addrs}


def test_a_stranger_that_has_gone_is_not_dialled_for_an_answer() -> None:
    """It may have named a third party's address, asked, and hung up."""
    victim = alone(refresh_interval=1e6)
    stranger = contact(key_pair(1), "81.2.3.4")
    effects = tell(victim, stranger, msg.FindNode(bytes(20)), 1.0)
    while victim.core.next_deadline < 30:
        now = victim.core.next_deadline
        effects += victim.core.handle(Tick(WALL + now), now)
    said = [type(question.body) for _, question in sent(effects)]
    assert said == [msg.Nodes, msg.Ping, msg.Ping, msg.Ping]
    assert not any(isinstance(each, Send) for each in effects)
    assert not any(isinstance(each, AddAddrs) for each in effects)
