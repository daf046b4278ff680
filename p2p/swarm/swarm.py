"""The production `Host`: streams and messages over authenticated connections on any `Network`.

Theory of operation
-------------------
Connections are dialled, accepted and carried by `connector`. A task serves one incoming stream
at a time, behind a broad `except` (`SwarmHost._on_behalf`): a bug that one peer triggers costs
that peer its stream and leaves the others connected. Messages travel on lanes (`outbox`): one
long-lived stream per peer and protocol. With every new connection an identify exchange runs in
the background, so that each side learns what the other speaks (streams of known protocols open
without a round trip) and where it listens.

A peer that breaks a protocol loses its connections and gets penalty points; one that has too
many is refused for a while (`gater`). Every task lives in the host's nursery: when the
`open_host` block ends, connections are flushed for a moment, and nothing is left.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import trio

from p2p import door, host as hosts
from p2p.bounded import BoundedDict, TokenBucket
from p2p.circuit.messages import DCUTR_ID, MAX_ADDRS, STOP_ID
from p2p.circuit.network import CircuitNetwork
from p2p.circuit.punch import Puncher
from p2p.concurrency import Notifier, leaves, open_bare_nursery, require_trio
from p2p.errors import (
    BadMessage,
    ConfigError,
    LimitExceeded,
    LocalProtocolError,
    PeerUnreachable,
    ProtocolNotSupported,
    RemoteProtocolError,
    WrongPeer,
)
from p2p.identity import KeyPair, PeerId, ProtocolId
from p2p.multiaddr import Multiaddr, as_multiaddr
from p2p.network import Listener, Network
from p2p.offence import Offence
from p2p.swarm import identify
from p2p.swarm.connector import Callbacks, Connector
from p2p.swarm.core.limits import (
    LOOPBACK,
    PRIVATE,
    PUBLIC,
    UNKNOWN,
    Budget,
    ResourceLimits,
    ServedStream,
    group_of,
    reach_of,
)
from p2p.swarm.outbox import Lane, Outbox, Server
from p2p.transport.connection import KEEPALIVE, Connection, MuxedStream
from p2p.transport.core.budget import HostBudget
from p2p.transport.core.noise import StaticKey
from p2p.transport.tcp import TcpNetwork
from p2p.wire import frame
from p2p.world import World

MESSAGE_RATE: Final = 4000.0
"""Messages a second taken from one stream. A peer that sends more waits, as with any slow
reader. Each costs at least 6 µs however empty it is, so one stream has 2.5 % of a core; ours
carry a few a second."""
FEW_STREAMS: Final = {identify.PING_ID: 3, identify.PROTOCOL_ID: 16, identify.PUSH_ID: 2}
"""Incoming streams of one peer served at a time, for protocols that need few. One more is
reset. Ping's specification asks for two, go-libp2p serves 16 of identify; one may be about to
end."""
PUSH_PAUSE: Final = 5.0
"""Least seconds between two of our identify pushes. Half of it is the least between two pushes
of one peer, since the network may bring them closer together."""
IDENTIFY_TIMEOUT: Final = 10.0
"""Seconds for the peer to identify itself. Without its answer this node just knows less."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmConfig:
    """A host's configuration."""

    announce: tuple[Multiaddr, ...] = ()
    """Addresses to tell others instead of those we listen at; behind a NAT, what the router
    forwards.
    """

    identify: bool = True
    """True to ask every new peer for its protocols and addresses."""

    punch: bool = False
    """True to replace relayed connections by direct ones, from the port at which we listen."""

    strict: bool = False
    """True if a handler's crash ends the host. Tests and simulations say yes."""

    keepalive: float = KEEPALIVE
    """Seconds without a byte from a peer after which this side pings it. After two more such
    intervals the peer counts as gone."""

    limits: ResourceLimits = field(default_factory=ResourceLimits)
    """Limits of what strangers may hold; over TCP less, if the operating system allows fewer
    descriptors."""

    def __post_init__(self) -> None:
        door.check_fields(self)
        if not self.keepalive > 0:
            raise ValueError("keepalive is positive")


class SwarmHost:
    """The local endpoint that owns all connections (a `p2p.host.Host`). `open_host` opens
    it."""

    def __init__(
        self, world: World, network: Network, key: KeyPair, config: SwarmConfig
    ) -> None:
        self.world = world
        """The machine on which this host runs."""
        self._config = config
        self._static = StaticKey.create(key, world.entropy(32))
        self.news = Notifier()
        """Notified when a peer connected, identified itself or left, or when `addrs`
        changed."""
        self.addrs: tuple[Multiaddr, ...] = ()
        """Addresses of this host, the likeliest first, each ending in ``/p2p/``."""
        self._nursery: trio.Nursery | None = None
        self._is_over = False
        self._listeners: list[Listener] = []
        self._mapped: tuple[Multiaddr, ...] = ()
        self._standing: dict[Multiaddr, bool | None] = {}
        self._seen: BoundedDict[PeerId, Multiaddr] = BoundedDict(2)
        """Addresses at which peers see connections from the port at which we listen."""
        self._handlers: dict[ProtocolId, hosts.StreamHandler] = {}
        self._infos: dict[PeerId, identify.PeerInfo] = {}
        self._message_handlers: dict[ProtocolId, hosts.MessageHandler] = {}
        self._pushed: BoundedDict[PeerId, float] = BoundedDict(4096)
        """Maps peers to the time of their last identify push."""
        self._idle_servers: list[Server] = []
        self._outbox = Outbox(self._start_lane)
        self.network = CircuitNetwork(world, self, network)
        """The network on which this host dials and listens."""
        callbacks = Callbacks(
            serves=self._handlers.__contains__,
            on_stream=self._serve_soon,
            on_connection=self._welcome,
            on_lost=self._forget,
            on_cut=self._stop_serving,
            on_sweep=self._sweep,
            is_busy=self._is_busy,
        )
        self._connector = Connector(
            world,
            self.network,
            self._static,
            config.keepalive,
            config.limits,
            callbacks,
            partial(self._spawn, self._on_behalf, None),
        )
        self.set_handler(identify.PROTOCOL_ID, self._serve_identify)
        self.set_handler(identify.PING_ID, identify.serve_ping)
        self.set_handler(identify.PUSH_ID, self._take_push)
        self.set_handler(STOP_ID, self.network.serve_stop)
        self._puncher = Puncher(world, self)
        if config.punch:
            self.set_handler(DCUTR_ID, self._puncher.serve)
        self._renew_addrs()

    # Who and where.

    @property
    def peer_id(self) -> PeerId:
        """This host's own peer id."""
        return self._static.peer_id

    def _renew_addrs(self) -> None:
        """Work out `addrs` again, because something that they follow from has changed."""
        places = list(self._config.announce) or [one.addr for one in self._listeners]
        own = [place.transport for place in (*places, *self._mapped)]
        if not self.is_announced:
            own += [addr for addr, can in self._standing.items() if can]

        def rank(addr: Multiaddr) -> tuple[int, bool, bool]:
            denied = self._standing.get(addr) is False
            return -reach_of(addr), denied, addr.relay is not None

        own = sorted(dict.fromkeys(own), key=rank)
        self.addrs = tuple(place.with_peer(self.peer_id) for place in own)
        self.news.notify_all()

    @property
    def is_announced(self) -> bool:
        """True if the owner sets the announced addresses."""
        return bool(self._config.announce)

    @property
    def listens(self) -> bool:
        """True if this host accepts connections that come without a relay."""
        return any(one.addr.relay is None for one in self._listeners)

    def set_standing(self, standing: Mapping[Multiaddr, bool | None]) -> None:
        """Record which of our addresses others can dial, as far as that is known.

        An address that they can dial is told to others. One that they cannot is moved behind
        the rest, but kept, because lying peers must not be able to take an address from us.
        """
        door.check("standing", standing, Mapping)
        if standing != self._standing:
            self._standing = dict(standing)
            self._renew_addrs()

    def set_mapped(self, addr: Multiaddr | None) -> None:
        """Announce that a router forwards ``addr`` to this host, or that none does any more."""
        if addr is not None:
            door.check("addr", addr, Multiaddr)
        mapped = () if addr is None else (addr,)
        if mapped != self._mapped:
            self._mapped = mapped
            self._renew_addrs()

    @property
    def port_to_map(self) -> int | None:
        """The TCP port that a router would have to forward: that of the first listener at a
        private address. It is None if the owner sets the announced addresses."""
        for addr in () if self._config.announce else [one.addr for one in self._listeners]:
            if addr.relay is None and addr.parts[0][0] == "ip4" and reach_of(addr) == PRIVATE:
                return addr.host_port[1]
        return None

    @property
    def connected(self) -> tuple[PeerId, ...]:
        """Peers with a live connection, oldest first."""
        return self._connector.connected

    def is_direct(self, peer: PeerId) -> bool:
        """Return True if there is a connection to ``peer`` without a relay."""
        door.check("peer", peer, PeerId)
        return self._connector.is_direct(peer)

    def remote_addr(self, peer: PeerId) -> Multiaddr | None:
        """Return the address from which a connected peer comes, or at which we dialled it,
        preferably of a direct connection."""
        door.check("peer", peer, PeerId)
        connection = self._connector.live(peer)
        return None if connection is None else connection.remote_addr

    def has_dialled(self, peer: PeerId) -> bool:
        """Return True if we opened the connection to ``peer``."""
        door.check("peer", peer, PeerId)
        connection = self._connector.live(peer)
        return connection is not None and connection.dialer

    @property
    def observed(self) -> tuple[Multiaddr, ...]:
        """Return our own addresses as others may see them: the hosts at which peers see us,
        with the ports at which we listen, which most routers keep. The address at which peers
        see connections from our listening port comes first, if it is known."""
        ports = [
            listener.addr.host_port[1]
            for listener in self._listeners
            if listener.addr.relay is None and listener.addr.parts[-1][0] == "tcp"
        ]
        seen = [info.observed_addr for info in self._infos.values()]
        hosts = [
            addr.parts[0][1]
            for addr in seen
            if addr is not None and addr.relay is None and addr.parts[-1][0] == "tcp"
        ]
        likeliest = [host for host, _ in Counter(hosts).most_common(2)]
        guesses = [Multiaddr.tcp(host, port) for host in likeliest for port in ports]
        sure = () if self.is_symmetric else tuple(self._seen.values())
        return tuple(dict.fromkeys((*sure, *guesses)))

    @property
    def is_symmetric(self) -> bool:
        """True if a router maps each connection from our port to another port, as far as
        `look_from` has shown. Two such hosts cannot punch."""
        return len(set(self._seen.values())) > 1

    async def look_from(self, peer: PeerId) -> None:
        """Connect to ``peer`` once more for a moment, from the port at which we listen, to
        learn at which address it sees us."""
        door.check("peer", peer, PeerId)
        places = [one for one in self.addrs_of(peer) if one.relay is None]
        with trio.move_on_after(IDENTIFY_TIMEOUT):
            while (before := self.info(peer)) is None:
                await self.news.wait()
            if not places or not await self._connector.dial_from_port(
                peer, max(places, key=reach_of)
            ):
                return
            while (info := self.info(peer)) is before:
                await self.news.wait()
            seen = None if info is None else info.observed_addr
            if seen is not None and seen.relay is None and seen.parts[-1][0] == "tcp":
                self._seen.renew(peer, seen)
                self.news.notify_all()
            if (connection := self._connector.live(peer)) is not None:
                connection.close()

    async def dial_direct(self, peer: PeerId) -> bool:
        """Dial the public addresses that a peer names, beside an existing circuit. Return True
        if there is a direct connection. The caller sets the deadline. No name server is asked
        on a stranger's word."""
        door.check("peer", peer, PeerId)
        info = self.info(peer)
        named = () if info is None else info.listen_addrs
        addrs = [
            one
            for one in named
            if reach_of(one) == PUBLIC
            and one.relay is None
            and not one.parts[0][0].startswith("dns")
        ]
        return await self._connector.dial_direct(peer, addrs[:MAX_ADDRS])

    async def punch(self, peer: PeerId, addrs: Sequence[Multiaddr], *, is_client: bool) -> bool:
        """Try for a few seconds to make a direct connection from the port at which we listen.
        Return True if there is one. No address is dialled that is nearer than our own."""
        door.check("peer", peer, PeerId)
        addrs = door.check_each("addrs", addrs, Multiaddr)
        door.check("is_client", is_client, bool)
        own = self._own_reach()
        near = [addr for addr in addrs if reach_of(addr) >= own]
        return await self._connector.punch(peer, near, is_client=is_client)

    @property
    def protocols(self) -> tuple[ProtocolId, ...]:
        """The protocols that this host serves."""
        return tuple(self._handlers)

    @property
    def budget(self) -> Budget:
        """The account of resources that peers hold on this host."""
        return self._connector.budget

    @property
    def memory(self) -> HostBudget:
        """The account of bytes that peers make this host hold."""
        return self._connector.memory

    def info(self, peer: PeerId) -> identify.PeerInfo | None:
        """Return a connected peer's claims about itself; None until it has sent them."""
        door.check("peer", peer, PeerId)
        return self._infos.get(peer)

    def set_handler(
        self, protocol: str, handler: hosts.StreamHandler, *, replaces: bool = False
    ) -> None:
        """Serve incoming streams of ``protocol``; see `Host.set_handler`."""
        self._check_open()
        checked = hosts.check_handler(protocol, () if replaces else self._handlers, handler)
        self._message_handlers.pop(checked, None)
        self._handlers[checked] = handler

    @contextmanager
    def serving(self, protocol: str, handler: hosts.StreamHandler) -> Iterator[None]:
        """Serve incoming streams of ``protocol`` for the length of the block."""
        self.set_handler(protocol, handler)
        with self._until_end_of_block(ProtocolId(protocol)):
            yield

    @contextmanager
    def receiving(
        self,
        protocol: str,
        handler: hosts.MessageHandler,
        *,
        max_message: int = hosts.MAX_MESSAGE,
    ) -> Iterator[None]:
        """Deliver incoming messages of ``protocol``, of at most ``max_message`` bytes, for the
        length of the block.

        A peer has one stream for them. When it opens another, the newest counts, as in
        go-libp2p-pubsub.
        """
        self._check_open()
        checked = hosts.check_handler(protocol, self._handlers, handler, takes_messages=True)
        door.check_number("max_message", max_message, 0, hosts.MAX_MESSAGE)
        self._handlers[checked] = partial(self._take_messages, max_message)
        self._message_handlers[checked] = handler
        with self._until_end_of_block(ProtocolId(protocol)):
            yield

    @contextmanager
    def watching(self, listener: Callable[[hosts.PeerEvent], None]) -> Iterator[None]:
        """Call ``listener`` whenever a peer connects or disconnects, for the length of the
        block."""
        door.check_function("listener", listener, 1)
        with self._connector.watchers.adding(listener):
            yield

    @contextmanager
    def finding(self, find: hosts.PeerFinder) -> Iterator[None]:
        """Ask ``find`` before dialling a peer without a known address, for the length of the
        block."""
        door.check_function("find", find, 1, is_async=True)
        with self._connector.finders.adding(find):
            yield

    @contextmanager
    def _until_end_of_block(self, protocol: ProtocolId) -> Iterator[None]:
        handler = self._handlers[protocol]
        try:
            yield
        finally:
            if self._handlers.get(protocol) is handler:
                del self._handlers[protocol]
                self._message_handlers.pop(protocol, None)
            for served in self._connector.budget.served_for(protocol):
                served.abort()

    def add_addrs(
        self,
        peer: PeerId,
        addrs: Sequence[Multiaddr],
        source: hosts.AddrSource = hosts.AddrSource.OWNER,
    ) -> None:
        """Remember addresses of ``peer``. Of hearsay, none is kept that is nearer than our
        own."""
        door.check("peer", peer, PeerId)
        addrs = door.check_each("addrs", addrs, Multiaddr)
        self._connector.gater.add_addrs(peer, addrs, source, self._own_reach())

    def addrs_of(self, peer: PeerId) -> tuple[Multiaddr, ...]:
        """Return the last known addresses of ``peer``."""
        door.check("peer", peer, PeerId)
        return self._connector.gater.addrs_of(peer)

    def _own_reach(self) -> int:
        """Return the widest scope of our addresses. A host with public addresses has no
        neighbours at private ones."""
        return min(map(reach_of, self.addrs), default=LOOPBACK)

    # Talking.

    async def connect(self, peer: PeerId) -> None:
        """Connect to ``peer`` if there is no connection. Raise `PeerUnreachable`,
        `WrongPeer`."""
        door.check("peer", peer, PeerId)
        self._check_open()
        await self._connector.connect(peer)

    async def connect_addr(self, addr: Multiaddr | str) -> PeerId:
        """Dial an address (or its text) that ends in ``/p2p/`` and an id. Raise `ConfigError`
        if it does not, or what `connect` raises."""
        addr = as_multiaddr(addr, "dial")
        peer = addr.peer_id
        if peer is None:
            raise ConfigError(f"{addr} must end in /p2p/ and the id of who is to answer")
        self.add_addrs(peer, [addr])
        await self.connect(peer)
        return peer

    async def disconnect(self, peer: PeerId) -> None:
        """Close the connections to ``peer``, if there are any, and wait until they are
        closed."""
        door.check("peer", peer, PeerId)
        for connection in self._connector.drop(peer):
            await connection.wait_closed()
        await trio.lowlevel.checkpoint()

    async def open_stream(self, peer: PeerId, protocol: str) -> hosts.Stream:
        """Connect if need be and open a stream.

        A protocol that the peer is known to speak costs no round trip; if it no longer does,
        the stream breaks. Raises `PeerUnreachable`, `WrongPeer`, `ProtocolNotSupported`,
        `LimitExceeded`.
        """
        _, stream = await self._open(peer, hosts.check_protocol(protocol))
        return stream

    def send(self, peer: PeerId, protocol: str, message: bytes) -> bool:
        """Queue a message, connecting in the background if need be. Return False if it was
        dropped at once."""
        hosts.check_message(peer, protocol, message)
        self._check_open()
        lane = ProtocolId(protocol)
        if not self._outbox.has_lane(peer, lane) and not self._connector.may_send(peer):
            self._outbox.dropped += 1
            return False
        return self._outbox.put(peer, lane, frame(message))

    def protect(self, purpose: str, peers: Iterable[PeerId]) -> None:
        """Keep connections to ``peers``, and room for them, when strangers fill this node."""
        door.check("purpose", purpose, str)
        peers = door.check_each("peers", peers, PeerId)
        self._connector.gater.protect(purpose, peers)

    def network_of(self, peer: PeerId) -> str:
        """Return the network of a connected peer, for limits; empty on loopback, or if it is
        unknown."""
        door.check("peer", peer, PeerId)
        connection = self._connector.live(peer)
        group = UNKNOWN if connection is None else group_of(connection.remote_addr)
        return group.network if group.limited else ""

    def penalise(self, peer: PeerId, points: float, reason: str) -> None:
        """Lower a peer's score; at the limit it is disconnected and refused for a while."""
        door.check("peer", peer, PeerId)
        door.check_number("points", points, 0, math.inf, int, float)
        self._connector.penalise(peer, points, reason)

    def ban(self, peer: PeerId) -> None:
        """Disconnect ``peer``, and refuse it for as long as this host lives."""
        door.check("peer", peer, PeerId)
        self._connector.ban(peer)

    def __repr__(self) -> str:
        return f"SwarmHost({self.peer_id!r}, {len(self.connected)} peers)"

    # Streams.

    async def _open(
        self, peer: PeerId, protocol: ProtocolId, *, lazy: bool = False
    ) -> tuple[Connection, MuxedStream]:
        await self.connect(peer)
        connection = self._connector.live(peer)
        if connection is None:
            raise PeerUnreachable(f"{peer} has just gone")
        try:
            stream = connection.open_stream(protocol)
            self._connector.used(peer, by_us=True)
            if lazy or (
                protocol in connection.spoken and not self.world.buggify("swarm/asks again")
            ):
                return connection, stream
            try:
                await stream.wait_negotiated()
            except BaseException:
                stream.reset()
                raise
        except trio.BrokenResourceError as error:
            raise PeerUnreachable(f"the connection to {peer} was lost: {error}") from error
        connection.learn([protocol])
        return connection, stream

    def _serve_soon(self, stream: MuxedStream) -> None:
        protocol, served_now = stream.protocol, self.budget.served_to(stream.peer)
        others = [one for one in served_now if one.protocol == protocol]
        is_many = len(others) >= FEW_STREAMS.get(protocol, math.inf)
        if is_many or self.world.buggify("swarm/serves too many"):
            stream.reset()
            return
        server = self._idle_servers.pop() if self._idle_servers else Server()
        served = ServedStream(
            stream.peer, partial(server.abort, stream), stream.has_stalled, protocol
        )
        victim = self._connector.budget.serve(served)
        if victim is not None:
            logger.info("%r has too many streams that are served: reset one", victim.peer)
            victim.abort()
        if victim is served:
            stream.reset()
            self._idle_servers.append(server)
            return
        if protocol != identify.PROTOCOL_ID:
            self._connector.used(stream.peer)
        if protocol in self._message_handlers:
            for older in others:
                older.abort()
        if not server.begin(stream, served):
            self._spawn(server.run, self._serve, self._idle_servers)

    def _serve(self, stream: MuxedStream, served: ServedStream) -> Awaitable[None]:
        return self._on_behalf(stream.peer, self._handle, stream, served)

    async def _handle(self, stream: MuxedStream, served: ServedStream) -> None:
        try:
            async with stream:
                handler = self._handlers.get(stream.protocol)
                if handler is None:  # the block that served it has ended
                    stream.reset()
                else:
                    await handler(stream)
        finally:
            self._connector.budget.served_to_end(served)

    def _stop_serving(self, peer: PeerId) -> None:
        for served in self.budget.served_to(peer):
            served.abort()

    async def _on_behalf(
        self, peer: PeerId | None, work: Callable[..., Awaitable[object]], *args: object
    ) -> None:
        """Run work that is done for a peer, or because of it, and handle its errors. No other
        place does.

        An error costs that peer its stream, and a broken protocol its connections. The node
        goes on.
        """
        try:
            await work(*args)
        except* RemoteProtocolError as errors:
            logger.info("%r broke a protocol: %s", peer, errors.exceptions)
            if peer is not None:
                self.penalise(peer, Offence.VIOLATION.points, str(next(leaves(errors))))
                self._connector.cut(peer)
        except* (
            trio.BrokenResourceError,
            PeerUnreachable,
            ProtocolNotSupported,
            LimitExceeded,
        ) as errors:
            logger.debug("a stream of %r ended early: %s", peer, errors.exceptions)
        except* Exception:
            # A bug of ours that one peer can trigger must not take every peer down. One of the
            # few broad `except`s, all named in tests/test_architecture.py; tests and
            # simulations run strict.
            logger.exception(
                "what was done for %r crashed (%s)", peer, getattr(work, "__name__", work)
            )
            if self._config.strict:
                raise

    # Messages.

    async def _take_messages(self, max_message: int, stream: hosts.Stream) -> None:
        """Deliver the messages of one stream, a turn at a time, no faster than
        `MESSAGE_RATE`."""
        receiver = hosts.FrameReceiver(stream, max_message)
        usage = self._connector.usage(stream.peer)
        now = self.world.now
        # A second's worth may come together after a quiet time, 25 ms of a core.
        allowance = TokenBucket(4096.0, now())
        turn_ends, in_turn = now(), 0
        while (message := await receiver.receive()) is not None:
            handler = self._message_handlers.get(stream.protocol)
            if handler is None:
                return  # the block that received them has ended
            handler(stream.peer, message)
            del message  # a lane may be silent for long, and the last one have a megabyte
            moment = now()
            if usage is not None:
                usage.used_at = moment
            in_turn += 1
            if in_turn >= 64 or moment > turn_ends:  # 0.4 ms of the cheapest, 6 µs each
                allowance.take(in_turn)
                allowance.refill(moment, MESSAGE_RATE)
                if allowance.level < 0.0:
                    await self.world.sleep(-allowance.level / MESSAGE_RATE)
                else:
                    await self._connector.turns.wait()
                # Seconds that the messages of one stream are handled in one go; then it is
                # another task's turn.
                turn_ends, in_turn = now() + 0.005, 0

    def _start_lane(self, lane: Lane) -> None:
        self._spawn(self._on_behalf, lane.peer, self._run_lane, lane)

    async def _run_lane(self, lane: Lane) -> None:
        try:
            await lane.run(
                partial(self._open, lazy=True), partial(self._outbox.sent, lane.peer)
            )
        except (PeerUnreachable, WrongPeer) as error:
            logger.debug("messages to %r were lost: %s", lane.peer, error)
            if self._connector.live(lane.peer) is None:  # it may have dialled us meanwhile
                self._connector.tell(lane.peer, hosts.PeerState.UNREACHABLE)
        finally:
            self._outbox.stopped(lane)

    # Connections come and go.

    def _welcome(self, connection: Connection) -> None:
        self.news.notify_all()
        if self._config.identify and not self.world.buggify("swarm/does not identify"):
            self._spawn(self._on_behalf, connection.peer, self._identify, connection)

    def _forget(self, connection: Connection) -> None:
        self.news.notify_all()
        self._outbox.lost(connection)
        if self._connector.usage(connection.peer) is None:
            self._infos.pop(connection.peer, None)

    def _sweep(self) -> None:
        self.budget.end_stalled()
        for peer in self._outbox.sweep():
            self._connector.used(peer)

    def _is_busy(self, peer: PeerId, streams: int) -> bool:
        served = self.budget.served_to(peer)
        is_asked = any(one.protocol not in self._message_handlers for one in served)
        return is_asked or streams > len(served) + self._outbox.count(peer)

    async def _serve_identify(self, stream: hosts.Stream) -> None:
        connection = self._connector.live(stream.peer)
        observed = connection.remote_addr if connection else None
        with trio.move_on_after(IDENTIFY_TIMEOUT):
            await identify.send_info(
                stream, identify.encode_info(self.peer_id, self.protocols, self.addrs, observed)
            )

    async def _identify(self, connection: Connection) -> None:
        with trio.move_on_after(IDENTIFY_TIMEOUT):
            async with connection.open_stream(identify.PROTOCOL_ID) as stream:
                info = await identify.receive_info(stream)
            if not self._learn(connection, info):
                return
            if self._config.punch and connection.is_circuit and not connection.dialer:
                self._spawn(
                    self._on_behalf, connection.peer, self._puncher.upgrade, connection.peer
                )

    def _learn(self, connection: Connection, info: identify.PeerInfo) -> bool:
        """Record a peer's claims about itself. Return False if it has gone meanwhile, in which
        case `_forget` will not be called again."""
        peer, seen = connection.peer, connection.remote_addr
        connection.learn(info.protocols)
        if self._connector.usage(peer) is None:
            return False
        self._infos[peer] = info
        self.news.notify_all()
        reach = self._own_reach() if seen is None else reach_of(seen)
        self._connector.gater.add_addrs(
            peer, info.listen_addrs, hosts.AddrSource.HEARSAY, reach
        )
        return True

    async def _take_push(self, stream: hosts.Stream) -> None:
        """Apply an identify push, with which a peer says what has changed. Missing fields are
        unchanged."""
        with trio.move_on_after(IDENTIFY_TIMEOUT):
            news = await identify.receive_info(stream)
            known, connection = self._infos.get(stream.peer), self._connector.live(stream.peer)
            last = self._pushed.get(stream.peer, -math.inf)
            if connection is None or self.world.now() < last + PUSH_PAUSE / 2:
                return
            self._pushed.renew(stream.peer, self.world.now())
            self._learn(connection, news if known is None else known.updated(news))

    async def _push(self) -> None:
        """Send an identify push to connected peers whenever our addresses change, until
        cancelled."""
        told = self.addrs
        while True:
            while told == self.addrs:
                await self.news.wait()
            told = self.addrs
            for peer in self.connected:
                info = self._infos.get(peer)
                if info is not None and identify.PUSH_ID in info.protocols:
                    self._spawn(self._on_behalf, None, self._push_to, peer)
            await self.world.sleep(PUSH_PAUSE)

    async def _push_to(self, peer: PeerId) -> None:
        with trio.move_on_after(IDENTIFY_TIMEOUT):
            async with await self.open_stream(peer, identify.PUSH_ID) as stream:
                await self._serve_identify(stream)

    # Life.

    async def listen(
        self, addr: Multiaddr, source: hosts.AddrSource = hosts.AddrSource.OWNER
    ) -> Listener:
        """Accept connections at ``addr`` as well, until the listener is closed. Raise
        `ConfigError` if the address cannot be had.

        At ``/…/p2p/RELAY/p2p-circuit`` this is a reservation at a relay, which ends when the
        relay no longer renews it. ``source`` says on whose word the relay is there.
        """
        door.check("addr", addr, Multiaddr)
        door.check("source", source, hosts.AddrSource)
        self._check_open()
        if addr.relay is not None and addr.relay.peer_id is not None:
            self.add_addrs(addr.relay.peer_id, [addr.relay], source)
        listener = await self.network.listen(addr)
        self._listeners.append(listener)
        self._renew_addrs()
        if self._nursery is not None:
            self._spawn(self._accept_from, listener)
        return listener

    async def _accept_from(self, listener: Listener) -> None:
        try:
            await self._connector.accept_from(listener)
        except trio.ClosedResourceError:
            self._listeners.remove(listener)
            self._renew_addrs()

    @asynccontextmanager
    async def running(self, addrs: Sequence[Multiaddr]) -> AsyncIterator[None]:
        """Listen at ``addrs`` and carry everything for the length of the block."""
        try:
            for addr in addrs:
                if addr.relay is None:
                    await self.listen(addr)
            async with open_bare_nursery() as nursery:
                self._nursery = nursery
                for listener in self._listeners:
                    self._spawn(self._accept_from, listener)
                if self._config.identify:
                    self._spawn(self._push)
                try:
                    with self.watching(self.network.on_peer):
                        for addr in addrs:
                            if addr.relay is not None:
                                await self.listen(addr)
                        yield
                finally:
                    await self._connector.wind_down()
                    nursery.cancel_scope.cancel()
        finally:
            self._is_over = True
            with trio.CancelScope(shield=True):
                for listener in self._listeners:
                    await listener.aclose()

    def _check_open(self) -> None:
        if self._is_over:
            raise trio.ClosedResourceError("this host is closed: its open_host block has ended")

    def _spawn(self, function: Callable[..., Awaitable[object]], *args: object) -> None:
        if self._nursery is None:
            raise LocalProtocolError("the host is not running")
        self._nursery.start_soon(function, *args)


async def ping(host: SwarmHost, peer: PeerId) -> float:
    """Return the seconds to ``peer`` and back. The caller sets the deadline.

    Raises `PeerUnreachable`, `ProtocolNotSupported`, or `BadMessage` if the echo differs.
    """
    door.check_host(host)
    async with await host.open_stream(peer, identify.PING_ID) as stream:
        question = host.world.entropy(32)  # as many as the specification says
        start = host.world.now()
        await stream.send_all(question)
        answer = bytearray()
        while len(answer) < len(question):
            data = await stream.receive_some(len(question) - len(answer))
            if not data:
                raise BadMessage("the peer ended a ping without an answer")
            answer += data
        if answer != question:
            raise BadMessage("the peer answered a ping with other bytes")
        return host.world.now() - start


@asynccontextmanager
async def open_host(
    *,
    network: Network | None = None,
    world: World | None = None,
    listen: Sequence[str | Multiaddr] = ("/ip4/127.0.0.1/tcp/0",),
    key: KeyPair | None = None,
    strict: bool = False,
    config: SwarmConfig | None = None,
    nat: bool = False,
) -> AsyncIterator[SwarmHost]:
    """Run a host for the length of the block; nothing outlives the block.

    Without arguments: TCP on a free port of the loopback interface, this machine, a fresh
    identity. ``key`` defaults to the world's. ``strict`` lets a crashing handler end the host,
    as tests want it. ``nat`` makes the host reachable behind a router (`p2p.reach.nat`): it
    asks the router for its port and peers whether they can dial it, keeps reservations at
    relays while they cannot, and punches. Raises `ConfigError` when an address in ``listen``
    cannot be had; with ``nat`` a relay that is away is asked again instead.
    """
    require_trio()
    listen = door.check_each("listen", listen, str, Multiaddr)
    for argument, value, kind in (("key", key, KeyPair), ("config", config, SwarmConfig)):
        if value is not None:
            door.check(argument, value, kind)
    if network is not None:
        door.check_has("network", network, "Network, such as TcpNetwork()", "dial", "listen")
    if world is not None:
        door.check_world(world)
    door.check("strict", strict, bool)
    door.check("nat", nat, bool)
    async with AsyncExitStack() as stack:
        if world is None:
            from p2p.machine import open_world

            world = await stack.enter_async_context(open_world(key=key))
        config = config or SwarmConfig()
        config = replace(config, strict=strict or config.strict, punch=nat or config.punch)
        dials_back = network
        network = network or TcpNetwork()
        if isinstance(network, TcpNetwork):
            config = replace(config, limits=config.limits.within(network.descriptors))
        if key is None:
            if not isinstance(world.signer, KeyPair):
                raise ConfigError(
                    "this world signs without showing its key: pass open_host(key=...)"
                )
            key = world.signer
        host = SwarmHost(world, network, key, config)
        places = [as_multiaddr(addr, "listen") for addr in listen]
        named = [place.relay for place in places if nat and place.relay is not None]
        if named:
            places = [place for place in places if place.relay is None]
        await stack.enter_async_context(host.running(places))
        if nat:
            from p2p.reach.nat import open_nat

            await stack.enter_async_context(
                open_nat(host, key, named=named, network=dials_back)
            )
        yield host
