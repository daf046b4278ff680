"""Who is connected: dials, accepts, adopts and carries connections, and says no where a limit is reached.

Two peers that dial each other at once end up with two connections. Both work; new streams use the
newest (after a restart the oldest may be a ghost that only a time-out will find), and the peer counts as
gone when its last connection is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import trio

from p2p.errors import (
    LimitExceeded,
    PeerUnreachable,
    ProtocolNotSupported,
    RemoteProtocolError,
    WrongPeer,
)
from p2p.host import AddrSource, PeerEvent, PeerState
from p2p.identity import PeerId, ProtocolId
from p2p.multiaddr import Multiaddr
from p2p.network import Listener, Network
from p2p.peers import VIOLATION, AddressBook, Scores
from p2p.transport.connection import Connection, ConnectionConfig
from p2p.transport.dial import race
from p2p.transport.noise import StaticKey
from p2p.transport.stream import MuxedStream
from p2p.transport.upgrade import Secured, secure
from p2p.transport.wakeup import AddressedStream
from p2p.world import World, dawdle, lateness

MAX_CONNECTIONS: Final = 1024
"""Connections in all. 11 KiB each when idle; a node needs about 200 (views, forest, trainers, validators)."""
MAX_PER_PEER: Final = 4
"""Connections to one peer: two from dialling each other at once, two more around a restart."""
MAX_HANDSHAKES: Final = 64
"""Incoming handshakes at a time: 1.3 ms each, so a full house is done in 0.1 s; more is a flood."""
MAX_DIALS: Final = 32
"""Peers dialled at a time; more would fill home routers' tables."""
HANDSHAKE_TIMEOUT: Final = 10.0
"""Seconds for a handshake: four round trips at half a second, with a busy machine on each side."""
DIAL_TIMEOUT: Final = 20.0
"""Seconds for all addresses of a peer together."""
DIAL_BACKOFF: Final = 5.0
"""Seconds after a failed dial in which messages to the peer are dropped at once instead of dialling again."""
ACCEPT_BACKOFF: Final = 0.1
"""Seconds to wait when the machine has no more sockets, which is what trio's own server does."""
CLOSE_TIMEOUT: Final = 2.0
"""Seconds to flush all connections when the host closes."""

logger = logging.getLogger(__name__)

Spawn = Callable[..., None]
"""Starts a task: ``spawn(async_function, *args)``."""


@dataclass(slots=True)
class _Dial:
    done: trio.Event
    error: Exception | None = None


class _Ready(trio.abc.AsyncResource):
    """A secured stream that nobody has adopted yet."""

    def __init__(self, raw: trio.abc.HalfCloseableStream, secured: Secured) -> None:
        self.raw = raw
        self.secured = secured

    async def aclose(self) -> None:
        await self.raw.aclose()


@dataclass(frozen=True, slots=True)
class Callbacks:
    """What a `Connector` tells its host; none may block."""

    serves: Callable[[ProtocolId], bool]
    """Whether an incoming stream of the protocol is welcome."""
    on_stream: Callable[[MuxedStream], None]
    """An incoming stream knows its protocol."""
    on_connection: Callable[[Connection], None]
    """A connection was adopted."""
    on_lost: Callable[[Connection], None]
    """A connection is over."""


class Connector:
    """The connections of one host."""

    def __init__(
        self,
        world: World,
        network: Network,
        static: StaticKey,
        config: ConnectionConfig,
        callbacks: Callbacks,
        spawn: Spawn,
    ) -> None:
        self.book = AddressBook()
        self.scores = Scores()
        self.closing = False
        self._world = world
        self._network = network
        self._static = static
        self._config = config
        self._callbacks = callbacks
        self._spawn = spawn
        self._connections: dict[PeerId, list[Connection]] = {}
        self._watchers: list[Callable[[PeerEvent], None]] = []
        self._dials: dict[PeerId, _Dial] = {}
        self._dial_slots = trio.CapacityLimiter(MAX_DIALS)
        self._unreachable: dict[PeerId, float] = {}
        self._handshakes = 0
        self._protected: dict[str, frozenset[PeerId]] = {}

    @property
    def connected(self) -> tuple[PeerId, ...]:
        """Peers with a connection, oldest first."""
        return tuple(self._connections)

    def live(self, peer: PeerId) -> Connection | None:
        """The newest connection that takes streams."""
        return next((c for c in reversed(self._connections.get(peer, ())) if c.is_open), None)

    def watch(self, watcher: Callable[[PeerEvent], None]) -> None:
        """Call ``watcher`` on every change."""
        self._watchers.append(watcher)

    def tell(self, peer: PeerId, state: PeerState, *, dialled: bool = False) -> None:
        """Call the watchers, unless the host is closing."""
        self._world.sometimes("connector/lost messages", state is PeerState.UNREACHABLE)
        if not self.closing:
            for watcher in self._watchers:
                watcher(PeerEvent(peer, state, dialled))

    def drop(self, peer: PeerId) -> list[Connection]:
        """Begin to close all connections of ``peer``; returns them."""
        connections = list(self._connections.get(peer, ()))
        for connection in connections:
            connection.close()
        return connections

    def penalise(self, peer: PeerId, points: float, reason: str) -> None:
        """Add penalty points; at the limit the peer is dropped."""
        logger.info("%r gets %s penalty points: %s", peer, points, reason)
        if self.scores.penalise(peer, points, self._world.now()):
            self.drop(peer)

    def is_refused(self, peer: PeerId) -> bool:
        """Whether we want nothing to do with ``peer`` for now."""
        return self.scores.is_refused(peer, self._world.now())

    def is_unreachable(self, peer: PeerId) -> bool:
        """Whether a dial failed moments ago."""
        now = self._world.now()
        return self._unreachable.get(peer, now) > now or self._world.buggify("connector/takes it for gone")

    def protect(self, purpose: str, peers: Iterable[PeerId]) -> None:
        """Keep connections to ``peers``; replaces what was protected for the same ``purpose``."""
        self._protected[purpose] = frozenset(peers)

    def add_addrs(self, peer: PeerId, addrs: Sequence[Multiaddr], source: AddrSource) -> None:
        """Remember where ``peer`` may be dialled; news makes an unreachable peer worth a try."""
        if peer != self._static.peer_id and self.book.add(peer, addrs):
            self._unreachable.pop(peer, None)

    # Dialling.

    async def connect(self, peer: PeerId) -> None:
        """Make sure there is a connection. Raises `PeerUnreachable`, `WrongPeer`."""
        await trio.lowlevel.checkpoint()
        if self.live(peer):
            return
        if peer == self._static.peer_id:
            raise PeerUnreachable("we do not dial ourselves")
        if self.is_refused(peer):
            raise PeerUnreachable(f"{peer} is refused for what it did")
        dial = self._dials.get(peer)
        self._world.sometimes("connector/shared a dial", dial is not None)
        if dial is None:
            dial = self._dials[peer] = _Dial(trio.Event())
            self._spawn(self._dial, peer, dial)
        await dial.done.wait()
        if dial.error is not None:
            raise type(dial.error)(*dial.error.args) from dial.error

    async def _dial(self, peer: PeerId, dial: _Dial) -> None:
        try:
            async with self._dial_slots:
                await dawdle(self._world, "connector/slow dial")
                with trio.fail_after(DIAL_TIMEOUT):
                    ready, addr = await race(peer, self.book.of(peer), partial(self._dial_addr, peer))
            if not self._adopt(ready.raw, ready.secured, dialer=True, addr=addr):
                await trio.aclose_forcefully(ready)
                dial.error = PeerUnreachable(f"{MAX_CONNECTIONS} connections are open, no more are made")
        except trio.TooSlowError:
            dial.error = PeerUnreachable(f"{peer} did not answer within {DIAL_TIMEOUT:.0f} s")
        except (PeerUnreachable, WrongPeer) as error:
            dial.error = error
        finally:
            del self._dials[peer]
            if dial.error is not None:
                self._remember_unreachable(peer)
            dial.done.set()

    async def _dial_addr(self, peer: PeerId, addr: Multiaddr) -> _Ready:
        raw = await self._network.dial(addr)
        try:
            with trio.fail_after(HANDSHAKE_TIMEOUT):
                secured = await secure(raw, self._static, self._world.entropy, dialer=True, expected=peer)
        except BaseException as error:
            if isinstance(error, WrongPeer):
                self.book.forget(peer, addr)
            await trio.aclose_forcefully(raw)
            raise
        return _Ready(raw, secured)

    def _remember_unreachable(self, peer: PeerId) -> None:
        now = self._world.now()
        for other in [other for other, until in self._unreachable.items() if until <= now]:
            del self._unreachable[other]
        self._unreachable[peer] = now + DIAL_BACKOFF + lateness(self._world, "connector/long backoff")

    # Accepting.

    async def accept_from(self, listener: Listener) -> None:
        """Greet whoever connects, for as long as we listen."""
        while True:
            try:
                raw = await listener.accept()
            except LimitExceeded as error:
                logger.warning("cannot accept a connection: %s", error)
                await self._world.sleep(ACCEPT_BACKOFF)
                continue
            if self._handshakes >= MAX_HANDSHAKES or self._is_full():
                logger.info("refused a connection: too many")
                await trio.aclose_forcefully(raw)
                continue
            self._handshakes += 1
            self._spawn(self._greet, raw)

    async def _greet(self, raw: trio.abc.HalfCloseableStream) -> None:
        adopted = False
        try:
            with trio.fail_after(HANDSHAKE_TIMEOUT):
                secured = await secure(raw, self._static, self._world.entropy, dialer=False)
            await dawdle(self._world, "connector/slow greeting")
            addr = raw.remote_addr if isinstance(raw, AddressedStream) else None
            adopted = self._adopt(raw, secured, dialer=False, addr=addr)
        except (RemoteProtocolError, ProtocolNotSupported, trio.BrokenResourceError) as error:
            logger.info("a handshake failed: %s", error)
        except trio.TooSlowError:
            logger.info("a handshake took longer than %s s", HANDSHAKE_TIMEOUT)
        finally:
            self._handshakes -= 1
            if not adopted:
                await trio.aclose_forcefully(raw)

    # Carrying.

    def _is_full(self) -> bool:
        count = sum(map(len, self._connections.values()))
        return count >= MAX_CONNECTIONS or self._world.buggify("connector/full")

    def _adopt(
        self, raw: trio.abc.HalfCloseableStream, secured: Secured, *, dialer: bool, addr: Multiaddr | None
    ) -> bool:
        """Make a secured stream one of our connections, unless that is unwelcome."""
        peer = secured.peer
        if self.closing or self.is_refused(peer) or self._is_full():
            return False
        connection = Connection(
            self._world,
            raw,
            secured,
            dialer=dialer,
            serves=self._callbacks.serves,
            on_stream=self._callbacks.on_stream,
            config=self._config,
        )
        connection.remote_addr = addr
        siblings = self._connections.setdefault(peer, [])
        siblings.append(connection)
        self._world.sometimes("connector/both dialled", len(siblings) > 1)
        if len(siblings) > MAX_PER_PEER:
            siblings[0].close()
        self._unreachable.pop(peer, None)
        self._spawn(self._carry, connection)
        if len(siblings) == 1:
            self.tell(peer, PeerState.CONNECTED, dialled=dialer)
        self._callbacks.on_connection(connection)
        return True

    async def _carry(self, connection: Connection) -> None:
        peer = connection.peer
        try:
            await connection.run()
        finally:
            siblings = self._connections[peer]
            siblings.remove(connection)
            if not siblings:
                del self._connections[peer]
            self._callbacks.on_lost(connection)
            if not siblings:
                self.tell(peer, PeerState.DISCONNECTED)
        self._world.sometimes("connector/saw a protocol broken", connection.failure is not None)
        if connection.failure is not None:
            self.penalise(peer, VIOLATION, str(connection.failure))

    async def wind_down(self) -> None:
        """Close every connection, flushing for a moment."""
        self.closing = True
        connections = [connection for peer in self.connected for connection in self.drop(peer)]
        with trio.move_on_after(CLOSE_TIMEOUT, shield=True):
            for connection in connections:
                await connection.wait_closed()
