"""DHT nodes for attacks: cores on the heap of `bench.dht.Swarm`, at places of our choice."""

from __future__ import annotations

from bench.dht import WALL, Node, Swarm
from p2p.dht import messages as msg
from p2p.dht.config import DhtConfig
from p2p.dht.core.events import Effect, Moved, SendIfConnected
from p2p.dht.record import Record, record_key, sign_record
from p2p.dht.stamp import make_stamp
from p2p.events import Received, Send
from p2p.identity import KeyPair
from p2p.multiaddr import Multiaddr

DIFFICULTY = 4  # bits of work, as in `bench.dht`: these attackers have paid for their stamps


def key_pair(number: int, tens: int = 0) -> KeyPair:
    return KeyPair(tens.to_bytes(16, "big") + number.to_bytes(16, "big"))


def contact(key: KeyPair, host: str = "10.9.9.9") -> msg.Contact:
    """A stamped contact."""
    nonce = make_stamp(key.peer_id, DIFFICULTY)
    return msg.Contact(key.peer_id, nonce, (Multiaddr.tcp(host, 4001),))


def add_at(swarm: Swarm, leading: int, bits: int) -> Node:
    """A node whose DHT id begins with the ``bits`` bits of ``leading``."""
    while True:
        node = swarm.add()
        if node.core.own.number >> (160 - bits) == leading:
            return node
        del swarm.nodes[node.peer]


def alone(**changes: float) -> Node:
    """A node that publishes nothing, so that all its lookups are a test's."""
    config = DhtConfig(difficulty=DIFFICULTY, **changes)  # type: ignore[arg-type]
    (node,) = Swarm(1, 1, config=config).nodes.values()
    node.core.handle(Moved(()), 0.0)
    return node


def greet(node: Node, visitor: msg.Contact, now: float = 0.5) -> None:
    """``visitor`` asks, and answers the ping."""
    for _, question in sent(tell(node, visitor, msg.FindNode(bytes(20)), now)):
        if isinstance(question.body, msg.Ping):
            tell(node, visitor, msg.Pong(), now + 0.1, question.request_id)


def meet(node: Node, visitor: msg.Contact) -> None:
    """``visitor`` has a place in the node's table, since long ago."""
    greet(node, visitor)
    assert node.core.contact_of(visitor.peer) is not None


def tell(
    node: Node,
    sender: msg.Contact,
    body: msg.Request | msg.Reply,
    now: float,
    request_id: int = 1,
) -> list[Effect]:
    """Hand one message to a core; what it wants done."""
    return node.core.handle(
        Received(sender.peer, msg.encode(request_id, sender, body), WALL + now), now
    )


def sent(effects: list[Effect]) -> list[tuple[Send | SendIfConnected, msg.Envelope]]:
    """The messages among ``effects``."""
    return [
        (each, msg.decode_untrusted(each.data))
        for each in effects
        if isinstance(each, Send | SendIfConnected)
    ]


def signed(
    key: KeyPair,
    name: bytes,
    *,
    namespace: str = "test",
    seqno: int = 1,
    lifetime: float = 3600.0,
    value: bytes = b"value",
) -> Record:
    nonce = make_stamp(key.peer_id, DIFFICULTY)
    bare = Record(namespace, name, key.peer_id, nonce, seqno, int(WALL + lifetime), value, b"")
    return sign_record(bare, key)


def place(record: Record, salt: int = 0) -> bytes:
    return record_key(record.namespace, record.name, salt)
