"""The DHT under death, loss and lies: 200 cores on one heap, against the goals of the design
notes.

``Swarm`` is also what tests/unit/test_dht_swarm.py runs. A first message to a peer costs a dial
of four round trips, as with the real host; after that each message is lost with probability
``loss``.
"""

from __future__ import annotations

import argparse
import heapq
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from typing import Final

from bench.report import Report
from p2p.dht.config import DhtConfig
from p2p.dht.core.core import DhtCore
from p2p.dht.core.events import (
    Effect,
    Event,
    Found,
    Get,
    Join,
    Joined,
    Moved,
    Put,
    SendIfConnected,
    Written,
)
from p2p.dht.core.table import RoutingTable
from p2p.dht.core.validation import ADDRESSES, RecordValidator
from p2p.dht.messages import (
    BUCKET_SIZE,
    Contact,
    FindNode,
    FindValue,
    Nodes,
    Ping,
    Pong,
    Store,
    Stored,
    Values,
    decode_untrusted,
    encode,
)
from p2p.dht.record import Record, sign_record
from p2p.dht.stamp import make_stamp
from p2p.errors import BadMessage
from p2p.events import AddAddrs, PeerDown, PeerUp, Penalise, Received, Send, Tick
from p2p.identity import KeyPair, PeerId, verify
from p2p.multiaddr import Multiaddr

WALL: Final = 1_800_000_000.0
"""The wall clock at virtual time 0."""
DIAL_TIMEOUT: Final = 5.0
"""Seconds after which a host says that a dead peer is unreachable."""


@dataclass(eq=False)
class Node:
    key: KeyPair
    core: DhtCore
    addr: Multiaddr
    alive: bool = True
    lies: Liar | None = None
    tick_at: float = float("inf")
    done: dict[int, tuple[float, Effect]] = field(default_factory=dict)
    penalised: list[Penalise] = field(default_factory=list)

    @property
    def peer(self) -> PeerId:
        return self.key.peer_id


class Liar:
    """Answers requests with harmful content."""

    KINDS: Final = (
        "noise",
        "cut",
        "fake contacts",
        "forgery",
        "wrong kind",
        "silence",
        "empty",
        "impostor",
    )

    def __init__(self, rng: Random, difficulty: int) -> None:
        self._rng = rng
        self._difficulty = difficulty

    def answer(self, node: Node, data: bytes) -> bytes | None:
        """Return the answer to a request, or None for silence.

        Answers to our own questions are left to the core.
        """
        envelope = decode_untrusted(data)
        body, own, request_id = envelope.body, node.core.own, envelope.request_id
        match self._rng.choice(self.KINDS):
            case "noise":
                return self._rng.randbytes(self._rng.randrange(200))
            case "cut":
                return encode(request_id, own, Pong())[:-3]
            case "fake contacts":
                contacts = tuple(self._fake_contact() for _ in range(20))
                found = isinstance(body, FindValue)
                return encode(
                    request_id, own, Values((), contacts) if found else Nodes(contacts)
                )
            case "forgery" if isinstance(body, FindValue):
                return encode(request_id, own, Values((self._forgery(node, body.key),), ()))
            case "wrong kind":
                return encode(request_id, own, Pong())
            case "empty":
                if isinstance(body, FindValue):
                    return encode(request_id, own, Values((), ()))
                return encode(
                    request_id, own, Stored(True) if isinstance(body, Store) else Nodes(())
                )
            case "impostor":
                return encode(request_id, envelope.sender, Pong())
            case _:
                return None

    def _fake_contact(self) -> Contact:
        peer = PeerId.from_public_key(self._rng.randbytes(32))
        return Contact(peer, self._rng.randbytes(8), (Multiaddr.tcp("10.0.0.1", 4001),))

    def _forgery(self, node: Node, key: bytes) -> bytes:
        held = node.core._store.get(key)
        if held:
            real = held[0]
            fake = Record(
                real.namespace,
                real.name,
                real.publisher,
                real.nonce,
                real.seqno + 1,
                real.expires,
                b"lie",
                real.signature,
            )
            return fake.encode()
        own = node.core.own
        bare = Record(
            "test",
            self._rng.randbytes(8),
            own.peer,
            own.nonce,
            1,
            int(WALL) + 3600,
            b"lie",
            b"",
        )
        return sign_record(bare, node.key).encode()


class Swarm:
    """Nodes on one heap of (time, order, action)."""

    def __init__(
        self,
        size: int,
        seed: int,
        *,
        loss: float = 0.0,
        liars: float = 0.0,
        config: DhtConfig | None = None,
    ) -> None:
        self.rng = Random(seed)
        self.config = config or DhtConfig(difficulty=4)
        self.loss = loss
        self.now = 0.0
        self.messages = 0
        self.blocked: Callable[[PeerId, PeerId], bool] = lambda _a, _b: False
        self.tapped: Callable[[PeerId, PeerId, bytes], None] = lambda _a, _b, _data: None
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._tokens = count(1)
        self._links: dict[tuple[PeerId, PeerId], float] = {}
        self.nodes: dict[PeerId, Node] = {}
        for _ in range(size):
            self.add()
        for node in self.rng.sample(list(self.nodes.values())[3:], round(size * liars)):
            node.lies = Liar(Random(self.rng.random()), self.config.difficulty)

    def add(self) -> Node:
        """Return a new node that has not joined yet."""
        key = KeyPair(self.rng.randbytes(32))
        number = len(self.nodes) + 1
        addr = Multiaddr.tcp(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", 4001)
        nonce = make_stamp(key.peer_id, self.config.difficulty)
        own = Contact(key.peer_id, nonce, ())
        judge = RecordValidator(verify, self.config.difficulty, {ADDRESSES.name: ADDRESSES})
        table = RoutingTable(own, BUCKET_SIZE)
        core = DhtCore(own, key, judge, table, self.config, Random(self.rng.random()))
        node = Node(key, core, addr)
        self.nodes[node.peer] = node
        self.give(node, Moved((addr,)))
        return node

    # Driving.

    def at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (when, next(self._order), action))

    def run(self, until: float) -> None:
        """Process all events up to ``until``."""
        while self._heap and self._heap[0][0] <= until:
            self.now, _, action = heapq.heappop(self._heap)
            action()
        self.now = until

    def run_until(self, done: Callable[[], bool], limit: float) -> None:
        """Let things happen until ``done`` or for ``limit`` seconds."""
        end = self.now + limit
        while not done() and self._heap and self._heap[0][0] <= end:
            self.now, _, action = heapq.heappop(self._heap)
            action()

    def give(self, node: Node, event: Event) -> None:
        """Give an event to a core and carry out its effects."""
        for effect in node.core.handle(event, self.now):
            match effect:
                case Send(peer, data) | SendIfConnected(peer, data):
                    self._send(node, peer, data)
                case Joined(token) | Found(token) | Written(token):
                    node.done[token] = (self.now, effect)
                case Penalise():
                    node.penalised.append(effect)
                case AddAddrs():
                    pass
        due = max(node.core.next_deadline, self.now)
        if due < node.tick_at or node.tick_at <= self.now:
            node.tick_at = due
            if due < float("inf"):
                self.at(due, lambda: self._tick(node, due))

    def _tick(self, node: Node, due: float) -> None:
        if node.alive and node.tick_at == due:
            node.tick_at = float("inf")
            if node.core.next_deadline <= self.now:
                self.give(node, Tick(WALL + self.now))
            else:
                node.tick_at = node.core.next_deadline
                self.at(node.tick_at, lambda when=node.tick_at: self._tick(node, when))  # type: ignore[misc]

    def latency(self, a: PeerId, b: PeerId) -> float:
        """Seconds one way: 10 to 110 ms, fixed per pair, and a fifth of jitter."""
        pair = a.digest[-1] ^ b.digest[-1]
        return (0.01 + 0.1 * pair / 255) * self.rng.uniform(1.0, 1.2)

    def _send(self, node: Node, peer: PeerId, data: bytes) -> None:
        self.messages += 1
        self.tapped(node.peer, peer, data)
        other = self.nodes.get(peer)
        one_way = self.latency(node.peer, peer)
        up = self._links.get((node.peer, peer))
        if up is None:
            if other is None or not other.alive or self.blocked(node.peer, peer):
                self.at(self.now + DIAL_TIMEOUT, lambda: self._unreachable(node, peer))
                return
            up = self.now + 8 * one_way
            self._links[node.peer, peer] = self._links[peer, node.peer] = up
            self.at(up, lambda: self._connected(node, other))
        lost = self.rng.random() < self.loss
        if other is not None and not lost and not self.blocked(node.peer, peer):
            self.at(max(up, self.now) + one_way, lambda: self._deliver(node, other, data))

    def _connected(self, a: Node, b: Node) -> None:
        for node, other in ((a, b), (b, a)):
            if node.alive:
                self.give(node, PeerUp(other.peer))

    def _unreachable(self, node: Node, peer: PeerId) -> None:
        if node.alive:
            self.give(node, PeerDown(peer, unreachable=True))

    def _deliver(self, sender: Node, node: Node, data: bytes) -> None:
        if not node.alive or not sender.alive:
            return
        if node.lies is not None and _is_request(data):
            answer = node.lies.answer(node, data)
            if answer is not None:
                self._send(node, sender.peer, answer)
            return
        self.give(node, Received(sender.peer, data, WALL + self.now))

    # What people do.

    def kill(self, node: Node) -> None:
        node.alive = False

    def join_all(self, *, every: float = 0.1, until: float | None = None) -> None:
        """Let every node join through one of the first three, one after another."""
        nodes = list(self.nodes.values())
        for index, node in enumerate(nodes):
            seeds = tuple(seed.peer for seed in nodes[: min(3, index)])
            if seeds:
                self.at(
                    self.now + index * every,
                    lambda node=node, seeds=seeds: self.give(
                        node, Join(next(self._tokens), seeds)
                    ),  # type: ignore[misc]
                )
        self.run(until if until is not None else self.now + len(nodes) * every + 20)

    def put(
        self, node: Node, name: bytes, value: bytes, *, lifetime: float = 3600.0
    ) -> Written | None:
        token = next(self._tokens)
        self.give(node, Put(token, "test", name, value, lifetime, WALL + self.now))
        effect = self._wait(node, token)[1]
        return effect if isinstance(effect, Written) else None

    def get(
        self, node: Node, name: bytes, namespace: str = "test"
    ) -> tuple[float, tuple[Record, ...]]:
        """Seconds it took, and the records."""
        start, token = self.now, next(self._tokens)
        self.give(node, Get(token, namespace, name))
        end, effect = self._wait(node, token)
        return end - start, effect.records if isinstance(effect, Found) else ()

    def _wait(self, node: Node, token: int) -> tuple[float, Effect | None]:
        self.run_until(lambda: token in node.done, 30)
        return node.done.pop(token, (self.now, None))

    def honest(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.alive and node.lies is None]


def _is_request(data: bytes) -> bool:
    try:
        return isinstance(decode_untrusted(data).body, Ping | FindNode | FindValue | Store)
    except BadMessage:
        return False


# The benchmark.


@dataclass(frozen=True)
class Case:
    """A setting of the swarm: the faults and their extent."""

    name: str
    dead: float
    loss: float
    liars: float


CASES: Final = (
    Case("calm", 0.0, 0.0, 0.0),
    Case("30 % dead", 0.3, 0.0, 0.0),
    Case("30 % dead, 5 % loss, 20 % liars", 0.3, 0.05, 0.2),
)
NAMES: Final = 40
"""Records published before the deaths; each is read many times over."""


def measure(case: Case, size: int, reads: int, seed: int) -> dict[tuple[str, str], float]:
    """Run one swarm: join, publish, kill, read. Latencies are virtual seconds."""
    began = time.process_time()
    swarm = Swarm(size, seed, loss=case.loss, liars=case.liars)
    swarm.join_all()
    for index in range(NAMES):
        swarm.put(swarm.rng.choice(swarm.honest()), b"name %d" % index, b"value %d" % index)
    for node in swarm.rng.sample(list(swarm.nodes.values())[3:], round(size * case.dead)):
        swarm.kill(node)
    before = swarm.messages
    right = wrong = 0
    seconds = []
    for index in range(reads):
        expected = b"value %d" % (index % NAMES)
        took, records = swarm.get(
            swarm.rng.choice(swarm.honest()), b"name %d" % (index % NAMES)
        )
        values = [record.value for record in records]
        seconds.append(took)
        right += values == [expected]
        wrong += any(value != expected for value in values)
    seconds.sort()
    return {
        ("reads right", "%"): 100 * right / reads,
        ("wrong values", "1"): wrong,
        ("read p50", "virtual s"): seconds[reads // 2],
        ("read p99", "virtual s"): seconds[reads * 99 // 100],
        ("messages per read", "1"): (swarm.messages - before) / reads,
        ("throughput", "messages/CPU s"): swarm.messages / (time.process_time() - began),
    }


GOALS: Final[dict[str, Callable[[float], bool]]] = {
    "reads right": lambda value: value >= 99,
    "wrong values": lambda value: value == 0,
    "read p99": lambda value: value < 3,
    "throughput": lambda value: value >= 4000,
}
"""Goals of the last case; the others are for comparison."""


def run(args: Sequence[str]) -> int:
    """Run ``python -m bench dht [--size N] [--reads N] [--rounds N] [--json FILE]``; 1 if a
    goal is missed.
    """
    parser = argparse.ArgumentParser(prog="bench dht", description=__doc__)
    parser.add_argument("--size", type=int, default=200)
    parser.add_argument("--reads", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args(args)
    report = Report("dht")
    for case in CASES:
        rounds = [
            measure(case, options.size, options.reads, seed)
            for seed in range(1, options.rounds + 1)
        ]
        for metric, unit in rounds[0]:
            report.add(
                case.name, "shoal", metric, unit, [figures[metric, unit] for figures in rounds]
            )
    print(report)
    report.write(options.json)
    missed = [
        row.metric
        for row in report.rows
        if row.case == CASES[-1].name
        and row.metric in GOALS
        and not GOALS[row.metric](row.median)
    ]
    print(f"missed: {', '.join(missed)}" if missed else "all goals met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
