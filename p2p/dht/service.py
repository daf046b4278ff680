"""The DHT as a node uses it: `open_dht`, and `Dht`, the driver of `DhtCore`.

A message, a change of connections, a caller or the deadline gives the core an event
(`p2p.driver`). The only task keeps the sequence number on disk ahead of what will be signed;
until it is, nothing is signed.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Final

import trio

from p2p.dht.config import DhtConfig
from p2p.dht.core import events as ev
from p2p.dht.core.core import DhtCore
from p2p.dht.core.validation import ADDRESSES, Namespace, RecordValidator
from p2p.dht.messages import BUCKET_SIZE, MAX_DATAGRAM, Contact
from p2p.dht.record import (
    ADDR_NAMESPACE,
    PROTOCOL_ID,
    Record,
    check_content,
    decode_addrs_untrusted,
)
from p2p.dht.stamp import check_stamp, make_stamp, stamp_cost
from p2p.door import check, check_each, check_host, check_world
from p2p.driver import Driver
from p2p.errors import StorageError
from p2p.events import Tick
from p2p.host import AddrSource, Host
from p2p.identity import PeerId
from p2p.multiaddr import Multiaddr, as_multiaddr
from p2p.world import World, first_seqno, lateness

logger = logging.getLogger(__name__)

STAMP_PATH: Final = "stamp"


class Dht:
    """Place of this node in the DHT, open for the length of `open_dht`'s block."""

    def __init__(
        self, world: World, host: Host, core: DhtCore, validator: RecordValidator
    ) -> None:
        self._world = world
        self._host = host
        self._core = core
        self._validator = validator
        self._tokens = count(1)
        self._waiting: dict[int, trio.Event] = {}
        self._outcomes: dict[int, ev.Outcome] = {}
        # Gets and puts under way; more wait their turn. Each has at most 18 requests open: 3
        # keys, 2 paths, alpha 3.
        self._slots = trio.CapacityLimiter(16)
        late = partial(lateness, world, "dht/late tick")
        self._driver: Driver[ev.Event, ev.OwnEffect] = Driver(
            world, core, self._carry_out, self._on_deadline, late
        )
        self._addrs: tuple[Multiaddr, ...] = ()

    def __repr__(self) -> str:
        return f"Dht({self._core.contacts} contacts, {self._core.records} records)"

    @property
    def contact(self) -> Contact:
        """Contact of this node: peer, work stamp and addresses."""
        return self._core.own

    @property
    def contacts(self) -> int:
        """Number of contacts in the routing table."""
        return self._core.contacts

    @property
    def records(self) -> int:
        """Number of records held for the swarm."""
        return self._core.records

    async def bootstrap(self, peers: Sequence[Multiaddr | PeerId | str]) -> int:
        """Join through ``peers`` (ids, addresses or their text) and return the number of
        contacts in the table then, which is 0 if none of them answered.

        The peers are remembered. While this node is alone it asks them again, at growing
        intervals.

        Raises:
            ValueError: An address does not end in ``/p2p/``.
            ConfigError: Text is no address.
        """
        given = check_each("peers", peers, Multiaddr, PeerId, str)
        self._driver.check_running("dht")
        known = [self._introduce(peer) for peer in given]
        self._follow_addrs()
        outcome = await self._ask(lambda token: ev.Join(token, tuple(known)))
        contacts = outcome.contacts if isinstance(outcome, ev.Joined) else 0
        self._world.sometimes("dht/alone", contacts == 0)
        return contacts

    def _introduce(self, peer: Multiaddr | PeerId | str) -> PeerId:
        if isinstance(peer, PeerId):
            return peer
        addr = as_multiaddr(peer, "bootstrap")
        named = addr.peer_id
        if named is None:
            raise ValueError(f"the bootstrap address {addr} must end in /p2p/ and a peer id")
        self._host.add_addrs(named, [addr], AddrSource.OWNER)
        return named

    async def put(self, namespace: str, name: bytes, value: bytes, lifetime: float) -> int:
        """Publish a record for ``lifetime`` seconds, and again while the DHT is open.

        Returns the number of nodes that took it. 0 is no error: the record is published again
        when there is a node to take it.

        Raises:
            ValueError: A part is too large, or the lifetime is out of range.
            LimitExceeded: There are 32 records already (`p2p.dht.core.core.MAX_PUBLICATIONS`).
        """
        check("namespace", namespace, str)
        check("name", name, bytes)
        check("value", value, bytes)
        check("lifetime", lifetime, int, float)
        check_content(namespace, name, value, ValueError)
        longest = self._validator.rules(namespace).max_lifetime
        if not 1 <= lifetime <= longest:
            raise ValueError(
                f"lifetime must be 1 to {longest:.0f} seconds for {namespace} records, not"
                f" {lifetime:g}"
            )
        self._driver.check_running("dht")
        async with self._slots:
            self._follow_addrs()
            wall = self._world.wall()
            outcome = await self._ask(
                lambda token: ev.Put(token, namespace, name, value, lifetime, wall)
            )
        return outcome.copies if isinstance(outcome, ev.Written) else 0

    def forget(self, namespace: str, name: bytes) -> None:
        """Stop publishing a record, which expires at the end of its lifetime."""
        check("namespace", namespace, str)
        check("name", name, bytes)
        self._driver.feed(ev.Forget(namespace, name))

    async def get(self, namespace: str, name: bytes) -> list[Record]:
        """Return the newest valid record of each publisher, ordered by publisher.

        Takes at most `DhtConfig.timeout` seconds.
        """
        check("namespace", namespace, str)
        check("name", name, bytes)
        self._driver.check_running("dht")
        async with self._slots:
            outcome = await self._ask(lambda token: ev.Get(token, namespace, name))
        return list(outcome.records) if isinstance(outcome, ev.Found) else []

    async def find_peer(self, peer: PeerId) -> tuple[Multiaddr, ...]:
        """Look up and return the addresses of ``peer``, and tell the host. Empty if unknown."""
        check("peer", peer, PeerId)
        records = await self.get(ADDR_NAMESPACE, peer.digest)
        values = [record.value for record in records if record.publisher == peer]
        addrs = [addr for value in values for addr in decode_addrs_untrusted(value)]
        signed = tuple(addr.with_peer(peer) for addr in addrs)
        contact = self._core.contact_of(peer)
        said = () if contact is None else tuple(addr.with_peer(peer) for addr in contact.addrs)
        if said:
            self._host.add_addrs(peer, said, AddrSource.HEARSAY)
        if signed:
            self._host.add_addrs(peer, signed, AddrSource.SIGNED)
        return tuple(dict.fromkeys((*signed, *said)))

    async def _ask(self, event: Callable[[int], ev.Event]) -> ev.Outcome | None:
        """Start an operation and wait for its outcome. One whose caller is cancelled ends by
        itself."""
        token = next(self._tokens)
        ended = self._waiting[token] = trio.Event()
        try:
            self._driver.feed(event(token))
            if self._driver.is_running:
                await ended.wait()
        finally:
            del self._waiting[token]
            outcome = self._outcomes.pop(token, None)
        return outcome

    # Driving the core.

    @contextmanager
    def _serving(self) -> Iterator[None]:
        """Drive the core for the length of the block. At its end, callers that still wait get
        no outcome."""
        begin = self._follow_addrs
        try:
            with self._driver.serving(self._host, PROTOCOL_ID, begin, MAX_DATAGRAM):
                yield
        finally:
            for ended in self._waiting.values():
                ended.set()

    def _on_deadline(self) -> None:
        self._follow_addrs()
        self._driver.feed(Tick(self._world.wall()))

    def _carry_out(self, effect: ev.OwnEffect) -> None:
        match effect:
            case ev.SendIfConnected(peer, data):
                if peer in self._host.connected:
                    self._host.send(peer, PROTOCOL_ID, data)
            case ev.Joined(token) | ev.Found(token) | ev.Written(token):
                if token in self._waiting:
                    self._outcomes[token] = effect
                    self._waiting[token].set()

    def _follow_addrs(self) -> None:
        """Tell the core of new addresses of the host."""
        addrs = self._host.addrs
        if addrs != self._addrs or self._world.buggify("dht/says its addresses again"):
            self._addrs = addrs
            self._driver.feed(ev.Moved(tuple(addr.transport for addr in addrs)))


async def _load_stamp(world: World, difficulty: int) -> bytes:
    """Load the stamp from disk, or make it if it is missing or too weak."""
    peer = world.signer.peer_id
    try:
        nonce = await world.disk.read(STAMP_PATH)
    except FileNotFoundError:
        nonce = b""
    if check_stamp(peer, nonce, difficulty):
        return nonce
    nonce = await world.run_blocking(make_stamp, peer, difficulty, cost=stamp_cost(difficulty))
    try:
        await world.disk.replace(STAMP_PATH, nonce)
    except StorageError as error:
        logger.warning("dht.stamp not saved, to be made again by the next process: %s", error)
    return nonce


@asynccontextmanager
async def open_dht(
    world: World,
    host: Host,
    config: DhtConfig | None = None,
    *,
    namespaces: Sequence[Namespace] = (),
) -> AsyncIterator[Dht]:
    """Take part in the DHT for the length of the block.

    ``namespaces`` describe the records that this node accepts; address records are built in.

    Raises:
        MissingDependency: The package kademlia is not installed.
    """
    check_world(world)
    check_host(host)
    if config is not None:
        check("config", config, DhtConfig)
    namespaces = check_each("namespaces", namespaces, Namespace)
    # Imported here: with kademlia comes asyncio, which a node without a DHT need not load.
    from p2p.dht.core.table import RoutingTable

    config = config or DhtConfig()
    if world.buggify("dht/asks one by one"):
        config = replace(config, alpha=1)
    known = {namespace.name: namespace for namespace in (ADDRESSES, *namespaces)}
    own = Contact(world.signer.peer_id, await _load_stamp(world, config.difficulty), ())
    seqno = await first_seqno(world, "dht/seqno")
    validator = RecordValidator(world.verify, config.difficulty, known)
    table = RoutingTable(own, BUCKET_SIZE)
    core = DhtCore(own, world.signer, validator, table, config, world.rng("dht"), seqno)
    dht = Dht(world, host, core, validator)
    with dht._serving():
        yield dht
