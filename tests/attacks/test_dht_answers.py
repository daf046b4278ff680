"""What a DHT node's answers may cost it, and that the honest get all of theirs."""

from __future__ import annotations

from bench.dht import WALL, Node, Swarm
from p2p.dht import messages as msg
from p2p.dht.core.responder import AnswerQuotas
from p2p.dht.messages import MAX_RECORDS
from p2p.events import Received
from p2p.wire import KI, MIB
from tests.attacks.dht import contact, greet, key_pair, place, sent, signed, tell


def holder() -> tuple[Node, bytes]:
    """A node that holds 64 records of 1 KiB under one key."""
    (node,) = Swarm(1, 1).nodes.values()
    key = b""
    for number in range(MAX_RECORDS):
        publisher = key_pair(number, 5)
        record = signed(publisher, b"a name that many publish", value=bytes(850))
        key = place(record)
        answers = sent(tell(node, contact(publisher), msg.Store(key, record.encode()), 0.0))
        assert answers[0][1].body == msg.Stored(True)
    return node, key


def served(
    node: Node, asker: msg.Contact, body: msg.FindValue | msg.FindNode, now: float
) -> tuple[int, int]:
    """Bytes of one question, and of its answers."""
    data = msg.encode(1, asker, body)
    effects = node.core.handle(Received(asker.peer, data, WALL + now), now)
    return len(data), sum(len(each.data) for each, _ in sent(effects))


def test_a_stranger_who_asks_for_full_keys_gets_eight_kib_a_second() -> None:
    """Before: 1.8 KB/s of questions took 1,277 KB/s of answers, for ever."""
    node, key = holder()
    asker = contact(key_pair(1))
    asked = answered = 0
    for step in range(20 * 120):
        question, answer = served(node, asker, msg.FindValue(key), 100 + step / 20)
        asked += question
        answered += answer
    assert asked / 120 > 1000
    assert answered <= (512 + 120 * 8 + 100) * KI
    assert answered >= 512 * KI, "what it may have, it gets"


def test_all_strangers_together_get_a_quarter_of_a_home_upload() -> None:
    """Before: 200 of them, 100 s of work for the stamps, took 256 MB in the first second."""
    node, key = holder()
    askers = [contact(key_pair(number)) for number in range(200)]
    answered = 0
    for step in range(5 * 30):
        for asker in askers:
            answered += served(node, asker, msg.FindValue(key), 100 + step / 5)[1]
    assert 4 * MIB <= answered <= 4 * MIB + (30 * 256 + 100) * KI


def test_newcomers_and_contacts_are_answered_while_the_greedy_ask() -> None:
    """The table's peers draw on another pot."""
    node, key = holder()
    friend = contact(key_pair(999, 6))
    greet(node, friend, 50.0)
    greedy = [contact(key_pair(number)) for number in range(30)]
    newcomers = refused = 0
    for step in range(5 * 60):
        now = 100 + step / 5
        for asker in greedy:
            served(node, asker, msg.FindValue(key), now)
        if step % 5 == 0:
            newcomers += 1
            late = contact(key_pair(step, 8))
            refused += served(node, late, msg.FindNode(bytes(20)), now)[1] == 0
            assert served(node, friend, msg.FindNode(bytes(20)), now)[1] > 0
    assert newcomers == 60
    assert refused == 0


def test_who_mints_names_to_have_its_allowance_forgotten_still_finds_the_pot_empty() -> None:
    """8,192 metered peers are remembered; beyond them the oldest would start afresh."""
    node, key = holder()
    meter = node.core._responder.quotas
    for number in range(9000):
        peer = key_pair(number, 9).peer_id
        if meter.admit(peer, 100.0, known=False):
            meter.charge_answer(peer, 64 * KI, 100.0, known=False)
    assert served(node, contact(key_pair(1)), msg.FindValue(key), 100.0)[1] == 0
    assert served(node, contact(key_pair(1)), msg.FindNode(bytes(20)), 102.0)[1] > 0


def test_an_answer_is_counted_also_if_it_is_small() -> None:
    """Each question costs CPU: all strangers together have 512 a second, 5 % of a core."""
    node, _ = holder()
    answered = 0
    for step in range(20):
        for number in range(1000):
            asker = _cheap(number)
            effects = tell(node, asker, msg.Ping(), 100 + step)
            answered += sum(isinstance(each.body, msg.Pong) for _, each in sent(effects))
    assert answered <= (4 * MIB + 20 * 256 * KI) / 512
    assert not any(
        isinstance(each.body, msg.Nodes)
        for _, each in sent(tell(node, _cheap(1), msg.FindNode(bytes(20)), 119.0))
    )


_CHEAP: dict[int, msg.Contact] = {}


def _cheap(number: int) -> msg.Contact:
    if number not in _CHEAP:
        _CHEAP[number] = contact(key_pair(number, 11))
    return _CHEAP[number]


def test_a_flood_is_answered_slowly_and_no_longer_decoded() -> None:
    meter, peer = AnswerQuotas(), key_pair(1).peer_id
    for now, answered in ((0.0, 200), (1.0, 20)):
        assert not meter.is_flooding(peer, now)
        assert sum(meter.admit(peer, now, known=True) for _ in range(1000)) == answered
        assert meter.is_flooding(peer, now)
