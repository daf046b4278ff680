"""Connections of a host: dials, accepts, adopts and carries them, and closes some at limits.

Two peers that dial each other at once end up with two connections. Both work; new streams use
the newest (after a restart the oldest may be a ghost that only a time-out will find), and the
peer counts as gone when its last connection is.

What strangers may hold is counted by a `limits.Budget`: it names what must go, and this
module ends that at once. Whom to dial, to refuse and to keep, a `gater.ConnectionGater`
says. Dials that a stranger's word caused (`AddrSource.HEARSAY`) have slots of their own, so
that contacts at silent addresses never hold up a dial that the owner, or a member, asked for.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import trio

from p2p.bounded import RateLimit
from p2p.circuit.network import CircuitNetwork
from p2p.concurrency import Notifier
from p2p.errors import (
    LimitExceeded,
    PeerUnreachable,
    ProtocolNotSupported,
    RemoteProtocolError,
    WrongPeer,
)
from p2p.host import PeerEvent, PeerFinders, PeerState, PeerWatchers
from p2p.identity import PeerId, ProtocolId
from p2p.multiaddr import Multiaddr
from p2p.network import Listener
from p2p.offence import Offence
from p2p.own_time import STALL
from p2p.swarm.core.gater import ConnectionGater
from p2p.swarm.core.limits import (
    Budget,
    DialTargets,
    FadingCounts,
    HeldConnection,
    NetGroup,
    PendingHandshake,
    ResourceLimits,
    Usage,
    group_of,
)
from p2p.transport.connection import (
    CLOSE_TIMEOUT,
    AddressedStream,
    Connection,
    MuxedStream,
    Secured,
    Turns,
    secure,
)
from p2p.transport.core.budget import HostBudget
from p2p.transport.core.noise import StaticKey
from p2p.transport.dial import DIAL_FAILURES, race
from p2p.wire import conforms
from p2p.world import World, dawdle, lateness

HANDSHAKE_TIMEOUT: Final = 10.0
"""Seconds for a handshake: four round trips of half a second, with a busy machine on each
side."""
HANDSHAKE_RATE: Final = 700.0
"""Most incoming handshakes computed in a second. At 1.1 ms each, with all that a connection
brings, they take three quarters of a core."""
logger = logging.getLogger(__name__)

Spawn = Callable[..., None]
"""Starts a task: ``spawn(async_function, *args)``."""


@dataclass(slots=True, eq=False)
class _Dial:
    trusted: bool
    """True if the address is sure or the peer is protected. It decides which slots the dial
    takes."""
    done: trio.Event = field(default_factory=trio.Event)
    error: Exception | None = field(
        default_factory=lambda: PeerUnreachable("the dial was given up")
    )
    """The reason why there is no connection. The first value stands for a dial that a bug
    ended."""


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Callbacks of a `Connector` to its host; none may block."""

    serves: Callable[[ProtocolId], bool]
    """Returns True if incoming streams of the protocol are served."""
    on_stream: Callable[[MuxedStream], None]
    """Called when the protocol of an incoming stream is known."""
    on_connection: Callable[[Connection], None]
    """Called when a connection was adopted."""
    on_lost: Callable[[Connection], None]
    """Called when a connection is over."""
    on_cut: Callable[[PeerId], None]
    """Called when a peer broke a protocol or is refused, so that nothing more is done for
    it."""
    on_sweep: Callable[[], None]
    """Called every 15 s while there is a connection."""
    is_busy: Callable[[PeerId, int], bool]
    """Returns True if a stream to or from the peer is in use, apart from message streams."""


class _Turns:
    """Order of incoming handshakes when they exceed their CPU time.

    Sixteen may come at once, `HANDSHAKE_RATE` a second for long. The next handshake
    is from the network with the fewest waiting handshakes, then from the host with the fewest,
    so that a flood waits behind itself. Among equals the oldest is next. Under overload (the
    oldest has waited for 0.4 s, or the queue is as long as the limit) the newest is
    next. With the oldest always first, newcomers waited for all earlier dialers: 0.65 s behind
    400 that shook hands again and again, 1.2 s behind 900 that came at once. With the newest
    always first, a small crowd that reconnects at once always goes first.
    """

    def __init__(self, many: int) -> None:
        """Start empty. If more than ``many`` handshakes wait, they count as a crowd."""
        self._many = many
        self.waiting: dict[str, dict[str, dict[trio.Event, PendingHandshake]]] = {}
        """Waiting handshakes by network and host, oldest first."""
        self._networks: Counter[str] = Counter()
        self.calling = False
        """True if a timer is set that calls the next handshake."""
        # Handshakes that may come together, after a quiet time, without waiting: 15 ms of one
        # pass of the scheduler, in which the connected peers have their turn as well.
        self._limit = RateLimit(HANDSHAKE_RATE, 16.0)

    def take(self, now: float) -> float:
        """Take a turn if one is left, and return 0; else return the seconds until there is
        one."""
        if self._limit.allows(1.0, now):
            return 0.0
        return (1.0 - self._limit.level) / HANDSHAKE_RATE + 1e-6

    def wait(self, pending: PendingHandshake) -> trio.Event:
        """Add a handshake to the queue, and return the event that is set at its turn."""
        turn, group = trio.Event(), pending.group
        self.waiting.setdefault(group.network, {}).setdefault(group.host, {})[turn] = pending
        self._networks[group.network] += 1
        return turn

    def leave(self, group: NetGroup, turn: trio.Event) -> None:
        """Remove a handshake from the queue. Nothing happens if it was called already."""
        hosts = self.waiting.get(group.network, {})
        turns = hosts.get(group.host, {})
        if turn in turns:
            del turns[turn]
            self._networks[group.network] -= 1
            if not turns:
                del hosts[group.host]
            if not hosts:
                del self.waiting[group.network], self._networks[group.network]

    def call(self, now: float) -> None:
        """Let the next handshake continue, and those before it whose dialers have gone.
        Otherwise dialers that hang up right after their first message, 2,000 a second, would
        take three turns of four."""
        while self.waiting:
            hosts = self.waiting[min(self.waiting, key=self._networks.__getitem__)]
            turns = min(hosts.values(), key=len)
            turn, pending = next(iter(turns.items()))
            if self._networks.total() > self._many or now - pending.since > 0.4:
                turns = min(reversed(hosts.values()), key=len)
                turn, pending = next(reversed(turns.items()))
            self.leave(pending.group, turn)
            turn.set()
            if not pending.has_gone():
                return


class Connector:
    """The connections of one host."""

    def __init__(
        self,
        world: World,
        network: CircuitNetwork,
        static: StaticKey,
        keepalive: float,
        limits: ResourceLimits,
        callbacks: Callbacks,
        spawn: Spawn,
    ) -> None:
        self.gater = ConnectionGater(static.peer_id, lambda peer: peer in self._connections)
        self.watchers = PeerWatchers()
        self.finders = PeerFinders()
        self.budget = Budget(limits, self.gater.is_protected, world.entropy(16))
        self.turns = Turns()
        self.closing = False
        self._world = world
        self._network = network
        self._static = static
        self._keepalive = keepalive
        self._callbacks = callbacks
        self._spawn = spawn
        self._connections: dict[PeerId, list[Connection]] = {}
        self._usage: dict[PeerId, Usage] = {}
        self._dials: dict[PeerId, _Dial] = {}
        # Concurrent dials to sure addresses; more would fill the tables of home routers.
        self._dial_slots = trio.CapacityLimiter(32)
        # Peers dialled at a time on hearsay alone. At 8 s each, contacts at silent addresses
        # make us dial two a second, and at most 64 addresses at once; each counts for its host
        # and network (`DialTargets`).
        self._hearsay_slots = trio.CapacityLimiter(16)
        self._targets = DialTargets()
        # Seconds; as long as a peer is refused (`peers.REFUSAL`).
        self._offences: FadingCounts[str] = FadingCounts(300.0)
        # Halved every minute, so with a limit of 16 an identity may replace 11 connections a
        # minute for ever: what fades of 16 in a minute is 16 ln 2.
        self._replaced: FadingCounts[PeerId] = FadingCounts(60.0)
        self._adopted = Notifier()
        self._punched: dict[str, list[PeerId]] = {}
        """Hosts to which this node punches a hole as a client, each with the peer that is to
        come through it, once for each connection that may come."""
        self._turns = _Turns(limits.handshakes // 4)
        self._sweep_due = math.inf
        self.memory = HostBudget(world.now, protected=self.gater.is_protected)

    @property
    def connected(self) -> tuple[PeerId, ...]:
        """Peers with a connection, oldest first."""
        return tuple(self._connections)

    def live(self, peer: PeerId) -> Connection | None:
        """Return the newest connection to ``peer`` that takes streams, preferably a direct one;
        None if there is none."""
        found = None
        for connection in reversed(self._connections.get(peer, ())):
            if connection.is_open:
                if not connection.is_circuit:
                    return connection
                found = found or connection
        return found

    def tell(self, peer: PeerId, state: PeerState, *, dialled: bool = False) -> None:
        """Call the watchers, unless the host is closing."""
        self._world.sometimes("connector/lost messages", state is PeerState.UNREACHABLE)
        if not self.closing:
            self.watchers.tell(PeerEvent(peer, state, dialled))

    def drop(self, peer: PeerId) -> list[Connection]:
        """Begin to close all connections of ``peer``, and return them."""
        connections = list(self._connections.get(peer, ()))
        for connection in connections:
            connection.close()
        return connections

    def penalise(self, peer: PeerId, points: float, reason: str) -> None:
        """Add penalty points to a peer, which is dropped at the limit."""
        logger.info("%r gets %s penalty points: %s", peer, points, reason)
        if self.gater.scores.penalise(peer, points, self._world.now()):
            self._refuse(peer)

    def ban(self, peer: PeerId) -> None:
        """Refuse ``peer`` for as long as this host lives."""
        self.gater.scores.ban(peer)
        self._refuse(peer)

    def cut(self, peer: PeerId) -> list[Connection]:
        """End at once all work for ``peer``, begin to close its connections, and return
        them."""
        self._callbacks.on_cut(peer)
        return self.drop(peer)

    def _refuse(self, peer: PeerId) -> None:
        """End all work for a peer that is refused from now on, and remember its host."""
        groups = [group_of(connection.remote_addr) for connection in self.cut(peer)]
        for host in dict.fromkeys(group.host for group in groups if group.limited):
            self._offences.add(host, self._world.now())

    def is_refused(self, peer: PeerId) -> bool:
        """Return True if this node refuses to deal with ``peer`` for now."""
        return self.gater.scores.is_refused(peer, self._world.now())

    def may_send(self, peer: PeerId) -> bool:
        """Return True if a message to ``peer`` may leave, over an existing connection or a new
        one."""
        if self.closing:
            return False
        if self.live(peer) is not None:
            return not self.is_refused(peer)
        return self.gater.may_send(peer, self._world.now()) and not self._world.buggify(
            "connector/takes it for gone"
        )

    def usage(self, peer: PeerId) -> Usage | None:
        """Return how useful a connected peer has been."""
        return self._usage.get(peer)

    def used(self, peer: PeerId, *, by_us: bool = False) -> None:
        """Record that a stream to ``peer`` was opened, or that messages came or went."""
        usage = self._usage.get(peer)
        if usage is not None:
            usage.used_at = self._world.now()
            usage.was_used = True
            if by_us:
                usage.useful_at = usage.used_at

    # Dialling.

    async def connect(self, peer: PeerId) -> None:
        """Connect to ``peer`` if there is no connection. Raise `PeerUnreachable`,
        `WrongPeer`."""
        await trio.lowlevel.checkpoint()
        if self.live(peer):
            return
        self.gater.check_dial(peer, self._world.now())
        dial = self._dials.get(peer)
        self._world.sometimes("connector/shared a dial", dial is not None)
        trusted = self.gater.is_sure(peer)
        if dial is None or (trusted and not dial.trusted):
            dial = self._dials[peer] = _Dial(trusted)
            self._spawn(self._dial, peer, dial)
        await dial.done.wait()
        # it may have dialled us meanwhile
        if dial.error is not None and self.live(peer) is None:
            raise type(dial.error)(*dial.error.args) from dial.error

    async def _dial(self, peer: PeerId, dial: _Dial) -> None:
        try:
            if not self.gater.book.of(peer):
                await self.finders.find(peer, lambda: bool(self.gater.book.of(peer)))
                if self.live(peer) is not None:
                    dial.error = None  # it has dialled us meanwhile
                    return
                dial.trusted = self.gater.is_sure(peer)
            slots = self._dial_slots if dial.trusted else self._hearsay_slots
            # Two minutes' worth of silent addresses.
            if not dial.trusted and slots.statistics().tasks_waiting >= 256:
                raise PeerUnreachable("256 dials on hearsay wait already")
            async with slots:
                await dawdle(self._world, "connector/slow dial")
                # For all addresses together. An address that takes all of its time (a
                # connection 5, a handshake 10) leaves 5 s for others, which are tried beside
                # it. The many addresses of a peer known by hearsay may all be silent.
                timeout = 20.0 if dial.trusted else 8.0
                with trio.fail_after(timeout):
                    places = self.gater.places_to_dial(peer, self._world.now())
                    secured, addr = await race(peer, places, partial(self._dial_addr, peer))
            self.gater.addr_answered(peer, addr)
            place = _named(peer, addr)
            if not self._adopt(secured, dialer=True, addr=place):
                await trio.aclose_forcefully(secured)
                raise PeerUnreachable(f"{peer} is not wanted any more")
            dial.error = None
        except trio.TooSlowError:
            dial.error = PeerUnreachable(f"{peer} did not answer within {timeout:.0f} s")
        except (PeerUnreachable, WrongPeer) as error:
            dial.error = error
        finally:
            if self._dials.get(peer) is dial:
                del self._dials[peer]
            if dial.error is not None:
                longer = lateness(self._world, "connector/long backoff")
                self.gater.dial_failed(peer, self._world.now(), longer)
            dial.done.set()

    async def _dial_addr(self, peer: PeerId, addr: Multiaddr) -> Secured:
        group = group_of(_named(peer, addr))
        is_hearsay = addr not in self.gater.book.certain(peer)
        answered = False
        try:
            if not is_hearsay:
                return await self._dial_place(peer, addr)
            if not self._targets.begin(group, self._world.now()):
                raise PeerUnreachable(f"{addr} was named too often and did not answer")
            try:
                secured = await self._dial_place(peer, addr)
                answered = True
            finally:
                self._targets.end(group, self._world.now(), answered=answered)
            return secured
        except DIAL_FAILURES:
            self.gater.addr_failed(peer, addr, self._world.now())
            raise

    async def _dial_place(self, peer: PeerId, addr: Multiaddr) -> Secured:
        # Seconds for a TCP connection: the first packet and two repetitions, after one and
        # three seconds.
        with trio.fail_after(5.0) as patience:
            raw = await self._network.dial(_named(peer, addr))
            patience.deadline += HANDSHAKE_TIMEOUT  # and what the connection left over
            try:
                return await secure(
                    raw, self._static, self._world.entropy, dialer=True, expected=peer
                )
            except BaseException as error:
                if isinstance(error, WrongPeer):
                    self.gater.book.forget(peer, addr)
                await trio.aclose_forcefully(raw)
                raise

    async def dial_direct(self, peer: PeerId, addrs: Sequence[Multiaddr]) -> bool:
        """Dial ``addrs`` beside an existing circuit. Return True if there is a direct
        connection. The caller sets the deadline."""
        try:
            secured, addr = await race(peer, addrs, partial(self._dial_addr, peer))
        except (*DIAL_FAILURES, WrongPeer) as error:
            logger.debug("a plain dial failed: %s", error)
            return self.is_direct(peer)
        if not self._adopt(secured, dialer=True, addr=_named(peer, addr)):
            await trio.aclose_forcefully(secured)
        return self.is_direct(peer)

    # Punching.

    async def punch(self, peer: PeerId, addrs: Sequence[Multiaddr], *, is_client: bool) -> bool:
        """Dial ``addrs`` from our listener's port until there is a direct connection, or
        five seconds are over. Return True if there is one.

        Either side's packet may arrive at the other's listener. The client then begins the
        handshake on what it accepts, as if it had dialled.
        """
        hosts = [group_of(addr).host for addr in addrs] if is_client else []
        self._punched.update((host, [peer] * 4) for host in hosts)
        try:
            # Seconds of one attempt to punch: a packet and its repetitions after one and three
            # seconds.
            with trio.move_on_after(5.0):
                async with trio.open_nursery() as nursery:
                    for addr in addrs:
                        nursery.start_soon(self.dial_from_port, peer, addr, is_client)
                    while not self.is_direct(peer):
                        await self._adopted.wait()
                    nursery.cancel_scope.cancel()
        finally:
            for host in hosts:
                self._punched.pop(host, None)
        return self.is_direct(peer)

    async def dial_from_port(
        self, peer: PeerId, addr: Multiaddr, is_client: bool = True
    ) -> bool:
        """Dial ``peer`` from the port at which we listen. Return True if there is a
        connection."""
        group = group_of(addr)
        if not self._targets.begin(group, self._world.now()):
            return False
        answered = False
        try:
            raw = await self._network.punch(addr)
            answered = True
            return await self._secure_punched(raw, peer, addr, is_client)
        except DIAL_FAILURES as error:
            logger.debug("a punch to %s failed: %s", addr, error)
            return False
        finally:
            self._targets.end(group, self._world.now(), answered=answered)

    async def _secure_punched(
        self,
        raw: trio.abc.HalfCloseableStream,
        peer: PeerId,
        addr: Multiaddr | None,
        is_client: bool,
    ) -> bool:
        adopted = False
        try:
            with trio.fail_after(HANDSHAKE_TIMEOUT):
                secured = await secure(
                    raw,
                    self._static,
                    self._world.entropy,
                    dialer=is_client,
                    expected=peer if is_client else None,
                )
            if secured.peer == peer:
                adopted = self._adopt(secured, dialer=is_client, addr=addr)
            return adopted
        finally:
            if not adopted:
                await trio.aclose_forcefully(raw)

    async def _greet_punched(
        self, raw: trio.abc.HalfCloseableStream, peer: PeerId, addr: Multiaddr | None
    ) -> None:
        try:
            await self._secure_punched(raw, peer, addr, True)
        except DIAL_FAILURES as error:
            logger.debug("an accepted punch failed: %s", error)

    def is_direct(self, peer: PeerId) -> bool:
        """Return True if there is a connection to ``peer`` without a relay."""
        connection = self.live(peer)
        return connection is not None and not connection.is_circuit

    # Accepting.

    async def accept_from(self, listener: Listener) -> None:
        """Accept connections and start their handshakes for as long as we listen."""
        while True:
            try:
                raw = await listener.accept()
            except LimitExceeded as error:
                logger.warning("cannot accept a connection: %s", error)
                if (oldest := self.budget.oldest_handshake()) is not None:
                    oldest.abort()
                # Seconds to wait when the machine has no more sockets, which is what trio's own
                # server does.
                await self._world.sleep(0.1)
                continue
            if self._world.buggify("connector/full"):
                await trio.aclose_forcefully(raw)
                continue
            addr: Multiaddr | None = None
            has_gone: Callable[[], bool] = bool
            heard = False
            if conforms(raw, AddressedStream):
                # Of a batch that was accepted in one pass none was read yet.
                addr, has_gone, heard = raw.remote_addr, raw.has_gone, raw.has_spoken()
            # Refused peers of one host, halved every five minutes, after which its connections
            # are not accepted: a new identity costs 16 µs and would wash off every penalty.
            # Eight, because a laboratory may share one address.
            if self._offences.count(group_of(addr).host, self._world.now()) >= 8.0:
                await trio.aclose_forcefully(raw)
                continue
            if punched := self._punched.get(group_of(addr).host):
                # If it is another peer of that host, the handshake fails: it dials again.
                self._spawn(self._greet_punched, raw, punched.pop(), addr)
                continue
            scope = trio.move_on_after(HANDSHAKE_TIMEOUT)
            pending = PendingHandshake(
                group_of(addr), self._world.now(), scope.cancel, has_gone, heard
            )
            victim = self.budget.begin_handshake(pending)
            if victim is not None:
                logger.debug(
                    "gave up a handshake with %s for another", victim.group.host or "a stranger"
                )
                victim.abort()
            self._spawn(self._greet, raw, addr, pending, scope)

    async def _greet(
        self,
        raw: trio.abc.HalfCloseableStream,
        addr: Multiaddr | None,
        pending: PendingHandshake,
        scope: trio.CancelScope,
    ) -> None:
        adopted = False
        try:
            with scope:
                # A dialer speaks first. Until it does, a silent socket costs us a task and no
                # cryptography.
                first = await raw.receive_some(4096)  # a whole handshake has about 500
                if not first or not await self._wait_turn(pending):
                    return
                pending.begun = True
                secured = await secure(
                    raw, self._static, self._world.entropy, dialer=False, first=first
                )
                await dawdle(self._world, "connector/slow greeting")
                if self._replaced.count(secured.peer, self._world.now()) >= 16.0:
                    # Closed at once it would come again at once, for one more handshake. So it
                    # is kept waiting until it goes, its time ends, or it makes room.
                    pending.heard = False
                    while await raw.receive_some(4096):
                        # Seconds between two reads from a dialer that gets nothing: to see that
                        # it has gone is worth that much, what it says is not.
                        await self._world.sleep(1.0)
                    return
                self.budget.end_handshake(pending)
                adopted = self._adopt(secured, dialer=False, addr=addr)
        except (RemoteProtocolError, ProtocolNotSupported, trio.BrokenResourceError) as error:
            logger.info("a handshake failed: %s", error)
        finally:
            self.budget.end_handshake(pending)
            if scope.cancelled_caught:
                logger.debug(
                    "gave up a handshake: it took %s s, or made room", HANDSHAKE_TIMEOUT
                )
            if not adopted:
                await trio.aclose_forcefully(raw)

    async def _wait_turn(self, pending: PendingHandshake) -> bool:
        """Wait for CPU time for one more incoming handshake. Return True if its dialer is still
        there."""
        pending.heard = True
        if pending.has_gone():
            return False
        delay = 0.0
        if not self._turns.waiting:
            delay = self._turns.take(self._world.now())
            if not delay:
                return True
        turn = self._turns.wait(pending)
        if not self._turns.calling:
            self._turns.calling = True
            self._call_turn(delay)
        try:
            await turn.wait()
        finally:
            self._turns.leave(pending.group, turn)
        return not pending.has_gone()

    def _call_turn(self, delay: float) -> None:
        self._world.call_at(self._world.now() + delay, self._next_turn)

    def _next_turn(self) -> None:
        # Handshakes begun in one scheduler pass while others wait. A newcomer takes ten passes,
        # and a connection can cost several times its handshake.
        for _ in range(8):
            if not self._turns.waiting:
                break
            delay = self._turns.take(self._world.now())
            if delay:
                self._call_turn(delay)
                return
            self._turns.call(self._world.now())
        if self._turns.waiting:
            self._call_turn(1.0 / HANDSHAKE_RATE)
        else:
            self._turns.calling = False

    # Carrying.

    def _adopt(self, secured: Secured, *, dialer: bool, addr: Multiaddr | None) -> bool:
        """Make a secured stream one of our connections, unless that is unwelcome."""
        peer = secured.peer
        if self.closing or self.is_refused(peer):
            return False
        now = self._world.now()
        connection = Connection(
            self._world,
            secured,
            dialer=dialer,
            serves=self._callbacks.serves,
            on_stream=self._callbacks.on_stream,
            keepalive=self._keepalive,
            budget=self.memory,
            turns=self.turns,
        )
        connection.remote_addr = addr
        connection.is_circuit = addr is not None and addr.relay is not None
        usage = self._usage.get(peer) or Usage(now, now)
        held = HeldConnection(peer, group_of(addr), not dialer, usage, connection.abort)
        victims = self.budget.admit(held)
        for victim in victims:
            logger.debug("gave up a connection to %r for another", victim.peer)
            victim.abort()
            if victim.peer == peer and victim is not held:
                self._replaced.add(peer, now)
        if held in victims:
            return False
        self._usage[peer] = usage
        siblings = self._connections.setdefault(peer, [])
        siblings.append(connection)
        self._world.sometimes("connector/both dialled", len(siblings) > 1)
        self.gater.connected(peer)
        if not connection.is_circuit:
            for sibling in siblings:
                if sibling.is_circuit and not sibling.is_replaced:
                    sibling.is_replaced = True
                    self._retire_later(sibling, now + 60.0)  # the longest that it lives on
        self._adopted.notify_all()
        self._spawn(self._carry, connection, held)
        if self._sweep_due == math.inf:
            self._sweep_later()
        self._callbacks.on_connection(connection)
        if len(siblings) == 1:
            self.tell(peer, PeerState.CONNECTED, dialled=dialer)
        return True

    def _retire_later(self, circuit: Connection, end: float) -> None:
        # Seconds between two looks at a circuit beside a new direct connection: it is closed
        # when no stream is left on it.
        due = self._world.now() + 5.0
        self._world.call_at(due, partial(self._retire, circuit, end))

    def _retire(self, circuit: Connection, end: float) -> None:
        """Close a circuit that a direct connection replaces, once its streams have ended."""
        if circuit.is_open and circuit.streams and self._world.now() < end:
            self._retire_later(circuit, end)
        else:
            circuit.close()

    async def _carry(self, connection: Connection, held: HeldConnection) -> None:
        peer = connection.peer
        try:
            await connection.run()
        finally:
            self.budget.release(held)
            siblings = self._connections[peer]
            siblings.remove(connection)
            if not siblings:
                del self._connections[peer]
                self._usage.pop(peer, None)
            self._callbacks.on_lost(connection)
            self._world.sometimes(
                "connector/saw a protocol broken", connection.failure is not None
            )
            if connection.failure is not None and not connection.is_circuit:
                # a relay can break what it carries: that is no fault of the peer
                self.penalise(peer, Offence.VIOLATION.points, str(connection.failure))
            if not siblings:
                self.tell(peer, PeerState.DISCONNECTED)  # at last: a watcher may raise

    def _sweep_later(self) -> None:
        is_needed = self._connections and not self.closing
        # An unused connection goes after 30 to 45 s. A sweep costs a pass over all connections;
        # a timer for each of 1,024 would cost more.
        self._sweep_due = self._world.now() + 15.0 if is_needed else math.inf
        if is_needed:
            self._world.call_at(self._sweep_due, self._sweep)

    def _sweep(self) -> None:
        """Close connections that are of no use."""
        self._callbacks.on_sweep()
        now = self._world.now()
        # We stood still: what came over these connections meanwhile is yet to be read.
        is_late = now > self._sweep_due + STALL
        for peer, usage in list(self._usage.items()):
            # A peer that connects has a reason, and shows it in the next round trips: go-libp2p
            # gives 20 s of grace, rust-libp2p 10. Everything that a node does regularly with a
            # peer happens more often than every 300 s; the next message opens the connection
            # again, for four round trips.
            patience = 300.0 if usage.was_used else 30.0
            idle = now - usage.used_at > patience
            streams = sum(len(connection.streams) for connection in self._connections[peer])
            if (
                idle
                and not is_late
                and not self.gater.is_protected(peer)
                and not self._callbacks.is_busy(peer, streams)
            ):
                logger.debug("closed the idle connection to %r", peer)
                self.drop(peer)
        self._sweep_later()

    async def wind_down(self) -> None:
        """Close every connection, flushing for a moment."""
        self.closing = True
        connections = [connection for peer in self.connected for connection in self.drop(peer)]
        with trio.move_on_after(CLOSE_TIMEOUT, shield=True):
            for connection in connections:
                await connection.wait_closed()


def _named(peer: PeerId, addr: Multiaddr) -> Multiaddr:
    """Return the address with the peer's id, which a relay needs, and which a name of many
    peers needs."""
    is_whole = addr.relay is None and addr.parts[0][0] != "dnsaddr"
    return addr if is_whole else addr.with_peer(peer)
