"""The simulated internet: endpoints, the wires between them, and their faults.

Theory of operation
-------------------
An `Endpoint` is a machine with an access link. A `Wire` is one TCP connection between two of
them: two `Direction`s, each reliable and in order. `transmit` charges the sender's line,
schedules the arrival, and the arrival queues at the receiver's line; where that is free, one
heap event carries a whole message.

A cut (partition) does not lose what is on a wire: TCP would send it again. Arrivals are kept
until `repair`; a wire that is cut for `IDLE_TIMEOUT` breaks on both sides. A hold keeps
arrivals without ever breaking. A killed process resets its wires, which peers see a latency
later; a machine that vanishes says nothing, and peers find out by `IDLE_TIMEOUT`. A paused
process says nothing either, but its kernel goes on: it takes what fits into its buffers, and
peers give the connection up after `IDLE_TIMEOUT`, which the process finds out when it goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random
from typing import Any, Final, Protocol

from p2p.identity import PeerId
from p2p.multiaddr import Multiaddr
from p2p.transport.connection import KEEPALIVE
from sim.kernel.queue import SECOND, Owner
from sim.kernel.simulation import Simulation
from sim.net.link import ACK_SHARE, ACKED_FROM, LinkSpec, cost_per_byte

IDLE_TIMEOUT: Final = int(3 * KEEPALIVE * SECOND)
"""Seconds that a connection lives without hearing from the other side: three missed
keep-alives."""
DIAL_TIMEOUT: Final = 10 * SECOND
"""Seconds that a dialer waits for a machine that does not answer. A present machine that
refuses answers after one round trip."""
RETRANSMISSION: Final = SECOND // 5
"""TCP's smallest retransmission timeout, 200 ms on Linux. A lost piece is late by this and a
round trip; nothing is ever lost for good, because every wire here stands for a TCP
connection."""
RESET_BYTES: Final = 40
"""Bytes of a reset: an IP and a TCP header without options, 20 bytes each."""
HOLE: Final = 120 * SECOND
"""Time for which a router lets in what answers an unanswered dial, as Linux does."""
DEFAULT_LATENCY: Final = 0.02
"""Seconds one way, where no latency model says otherwise."""


class Latency(Protocol):
    """A function that gives the latency between two machines."""

    def __call__(self, one: Endpoint, other: Endpoint, /) -> float:
        """Return the seconds that a byte takes one way."""


class LocalHost(Protocol):
    """Interface of the host at an endpoint (`sim.node.host.SimHost`)."""

    @property
    def peer_id(self) -> PeerId:
        """The peer that answers at this machine."""

    def refuses(self, peer: PeerId) -> bool:
        """Return True if it talks to ``peer`` at all."""

    def give_up(self, wire: Wire) -> None:
        """Close the connection over ``wire``, whose other side has been silent for too long."""

    def crash(self) -> None:
        """End the machine's process. Later actions of its tasks must not reach another
        machine."""


class LocalListener(Protocol):
    """Listener for raw streams at an endpoint (`sim.node.network.SimListener`)."""

    @property
    def addr(self) -> Multiaddr:
        """The address at which it listens."""


class Endpoint:
    """A machine on the network, through all lives of its node."""

    __slots__ = (
        "_make_rng", "_rng", "down_cost", "down_free", "holes", "host", "index", "lags",
        "lies", "listeners", "name", "owner", "punches", "received", "region", "repeats",
        "sent", "silent", "spec", "uneven", "up_cost", "up_free", "wires",
    )  # fmt: skip

    def __init__(
        self, index: int, name: str, owner: Owner, region: str, make_rng: Callable[[], Random]
    ) -> None:
        self.index = index
        self.name = name
        self.owner = owner
        self.region = region
        self._make_rng = make_rng
        self._rng: Random | None = None
        self.up_free = 0
        self.down_free = 0
        self.sent = 0
        self.received = 0
        self.silent = False
        """True if the machine is gone: it does not even refuse."""
        self.lies = 0.0
        """Share of its messages and stream segments in which a bit is flipped."""
        self.repeats = 0.0
        """Share of its messages in whose place an older one is sent."""
        self.lags = 0.0
        """Share of its messages whose stream lags behind the others of their connection."""
        self.wires: dict[Wire, None] = {}
        self.host: LocalHost | None = None
        self.listeners: dict[int, LocalListener] = {}
        self.holes: dict[tuple[int, int], int] = {}
        """Maps (machine, port) to the nanosecond until which the router lets in what comes from
        there, because this machine has dialled it from its listening port.
        """
        self.punches: dict[tuple[int, int], Any] = {}
        """Such dials under way (`sim.node.network`)."""
        self.set_link(LinkSpec())

    @property
    def rng(self) -> Random:
        """Generator of the line's faults, made on first use, as it takes 2.5 KiB."""
        if self._rng is None:
            self._rng = self._make_rng()
        return self._rng

    @property
    def ip(self) -> str:
        """The address that other machines see: the machine's own, or its router's."""
        return f"{20 + self.index // 250}.{self.index % 250}.0.1"

    def admits(self, machine: int, port: int, now: int) -> bool:
        """Return True if the machine's router lets in packets from that place to the listening
        port."""
        kind = self.spec.nat
        return not kind or (
            kind != "symmetric"
            and any(
                now < until
                and (
                    kind == "cone"
                    or (kind == "address" and there == machine)
                    or (there, at) == (machine, port)
                )
                for (there, at), until in self.holes.items()
            )
        )

    def set_link(self, spec: LinkSpec) -> None:
        """Set the line of a machine that has sent nothing yet; later see
        `sim.net.relink.relink`.
        """
        self.spec = spec
        self.up_cost = cost_per_byte(spec.up)
        self.down_cost = cost_per_byte(spec.down)
        self.uneven = spec.jitter > 0 or spec.loss > 0

    def __repr__(self) -> str:
        return f"Endpoint({self.name})"


class Direction:
    """One direction of a wire."""

    __slots__ = ("dst", "held", "last", "latency", "open", "sent", "src")

    def __init__(self, src: Endpoint, dst: Endpoint, latency: int) -> None:
        self.src = src
        self.dst = dst
        self.latency = latency
        self.last = 0
        """Nanosecond before which nothing sent later arrives."""
        self.open = True
        """True if the receiving side still listens."""
        self.held: list[tuple[Any, ...]] | None = None
        """Arrivals that wait for a repair or a release; None while nothing is cut."""
        self.sent = 0


class Wire:
    """A connection between two machines. Side 0 dialled, side 1 listened."""

    __slots__ = ("_fabric", "directions", "on_broken")

    def __init__(self, fabric: Fabric, dialer: Endpoint, listener: Endpoint) -> None:
        latency = fabric.latency_of(dialer, listener)
        self._fabric = fabric
        self.directions = (
            Direction(dialer, listener, latency),
            Direction(listener, dialer, latency),
        )
        self.on_broken: list[Callable[[], None]] = [_ignore, _ignore]

    def close(self, side: int) -> None:
        """Close ``side``. It receives nothing more, and the other side learns of the end in
        order.
        """
        inward, outward = self.directions[1 - side], self.directions[side]
        if inward.open:
            inward.open = False
            if outward.open:
                self._fabric.transmit(outward, RESET_BYTES, "reset", self.lose, 1 - side)
            self._forget_if_over()

    def lose(self, side: int) -> None:
        """Tell ``side`` that the wire is broken."""
        inward = self.directions[1 - side]
        if inward.open:
            inward.open = False
            self._forget_if_over()
            self.on_broken[side]()

    def _forget_if_over(self) -> None:
        if not (self.directions[0].open or self.directions[1].open):
            self.forget()

    def forget(self) -> None:
        """Forget the wire: both sides are done with it."""
        for direction in self.directions:
            direction.src.wires.pop(self, None)


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """Traffic that does not get through, from any of ``sources`` to any of ``targets``."""

    sources: frozenset[str]
    targets: frozenset[str]
    breaks: bool
    """True if wires break after `IDLE_TIMEOUT` (a partition) or wait for ever (a hold)."""

    def covers(self, direction: Direction) -> bool:
        """Return True if ``direction`` is cut."""
        return direction.src.name in self.sources and direction.dst.name in self.targets


class Fabric:
    """All endpoints of a simulation and the traffic between them."""

    def __init__(self, simulation: Simulation, latency: Latency | None = None) -> None:
        self.simulation = simulation
        self.endpoints: list[Endpoint] = []
        self.by_name: dict[str, Endpoint] = {}
        self.latency: Latency = latency or _default_latency
        self._queue = simulation.queue
        self._cuts: dict[Cut, None] = {}
        self._clogs: dict[tuple[str, str], int] = {}
        self.detours: dict[int, int] = {}
        """Impostors: machine numbers, by the machine that they answer for."""

    def add(
        self, name: str, owner: Owner, link: LinkSpec | None = None, region: str = ""
    ) -> Endpoint:
        """Connect a new machine; its number is its address, ``/memory/<number>``."""
        if name in self.by_name:
            raise ValueError(f"there is a machine called {name} already")
        endpoint = Endpoint(
            len(self.endpoints) + 1,
            name,
            owner,
            region,
            lambda: self.simulation.rng(name, "link"),
        )
        if link is not None:
            endpoint.set_link(link)
        self.endpoints.append(endpoint)
        self.by_name[name] = endpoint
        return endpoint

    def at(self, index: int) -> Endpoint | None:
        """Return the machine with the address ``/memory/<index>``, or None."""
        index = self.detours.get(index, index)
        return self.endpoints[index - 1] if 1 <= index <= len(self.endpoints) else None

    def latency_of(self, one: Endpoint, other: Endpoint) -> int:
        """Return the latency one way, in nanoseconds."""
        return int(self.latency(one, other) * SECOND)

    def reachable(self, src: Endpoint, dst: Endpoint) -> bool:
        """Return True if a dial from ``src`` gets any answer at all from ``dst``'s machine."""
        return dst.admits(src.index, 0, self._queue.now) and self.has_path(src, dst)

    def has_path(self, src: Endpoint, dst: Endpoint) -> bool:
        """Return True if packets come from ``src`` to ``dst``'s machine, or its router, and
        back."""
        if dst.silent:
            return False
        there, back = Direction(src, dst, 0), Direction(dst, src, 0)
        return not any(cut.covers(there) or cut.covers(back) for cut in self._cuts)

    def connect(self, dialer: Endpoint, listener: Endpoint) -> Wire:
        """Return a new wire at once; the dialer has already waited for the round trips."""
        wire = Wire(self, dialer, listener)
        dialer.wires[wire] = None
        listener.wires[wire] = None
        return wire

    def transmit(
        self,
        direction: Direction,
        size: int,
        label: str,
        deliver: Callable[..., None],
        *args: Any,
    ) -> int:
        """Send ``size`` bytes; call ``deliver``, in the receiver's name, when they are there.

        Returns the nanosecond at which the last of them leaves the sender's line.
        """
        src, dst = direction.src, direction.dst
        now = self._queue.now
        free = src.up_free
        sent = (free if free > now else now) + int(size * src.up_cost)
        src.up_free = sent
        src.sent += size
        direction.sent += size
        arrival = sent + direction.latency + int(size * dst.down_cost)
        if src.uneven or dst.uneven or self._clogs:
            arrival += self._mishap(direction)
        if arrival < direction.last:
            arrival = direction.last
        direction.last = arrival
        self._queue.schedule(
            arrival, dst.owner, label, self.arrive, direction, size, label, deliver, args
        )
        return sent

    def _mishap(self, direction: Direction) -> int:
        """Return the nanoseconds lost to jitter, retransmission and clogs."""
        delay = self._clogs.get((direction.src.name, direction.dst.name), 0)
        rng = direction.src.rng
        for spec in (direction.src.spec, direction.dst.spec):
            if spec.jitter > 0:
                delay += int(rng.random() * spec.jitter * SECOND)
            if spec.loss > 0 and rng.random() < spec.loss:
                delay += RETRANSMISSION + 2 * direction.latency
        return delay

    def arrive(
        self,
        direction: Direction,
        size: int,
        label: str,
        deliver: Callable[..., None],
        args: tuple[Any, ...],
    ) -> None:
        """Pass a transfer through the receiver's line, or keep it while it is held."""
        if not direction.open:
            return
        if direction.held is not None:
            direction.held.append((direction, size, label, deliver, args))
            return
        src, dst, now = direction.src, direction.dst, self._queue.now
        took = int(size * dst.down_cost)
        dst.received += size
        if size >= ACKED_FROM:
            dst.up_free = max(dst.up_free, now) + int(ACK_SHARE * size * dst.up_cost)
            src.down_free = max(src.down_free, now) + int(ACK_SHARE * size * src.down_cost)
        if dst.down_free > now - took:
            dst.down_free += took
            self._queue.schedule(
                dst.down_free, dst.owner, label, deliver_if_open, direction, deliver, args
            )
        else:
            dst.down_free = now
            deliver(*args)

    def wake(self, endpoint: Endpoint, callback: Callable[[], None]) -> None:
        """Call ``callback``, which lets a task of ``endpoint`` go on: now, or when the pause of
        its process is over."""
        if endpoint.owner.paused_until > self._queue.now:
            self._queue.schedule(self._queue.now, endpoint.owner, "wake", callback)
        else:
            callback()

    # What may go wrong.

    def cut(
        self, sources: Iterable[str], targets: Iterable[str], *, breaks: bool = True
    ) -> Cut:
        """Stop traffic from ``sources`` to ``targets`` until `repair`."""
        cut = Cut(frozenset(sources), frozenset(targets), breaks)
        self._cuts[cut] = None
        for wire in self._wires():
            if any(cut.covers(direction) for direction in wire.directions):
                for direction in wire.directions:
                    if cut.covers(direction) and direction.held is None:
                        direction.held = []
                if breaks:
                    due = self._queue.now + IDLE_TIMEOUT
                    self._queue.schedule(
                        due, self._queue.kernel, "idle", self._time_out, cut, wire
                    )
        return cut

    def repair(self, cut: Cut) -> None:
        """Let traffic through again. Held traffic arrives now, in order."""
        self._cuts.pop(cut, None)
        for wire in self._wires():
            for direction in wire.directions:
                if direction.held is not None and not any(
                    other.covers(direction) for other in self._cuts
                ):
                    held, direction.held = direction.held, None
                    direction.last = max(direction.last, self._queue.now)
                    for item in held:
                        self._queue.schedule(
                            self._queue.now, direction.dst.owner, item[2], self.arrive, *item
                        )

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """Partitions and holds that last."""
        return tuple(self._cuts)

    def clog(self, src: str, dst: str, seconds: float) -> None:
        """Delay everything from ``src`` to ``dst`` by ``seconds`` more; 0 ends it."""
        if seconds > 0:
            self._clogs[src, dst] = int(seconds * SECOND)
        else:
            self._clogs.pop((src, dst), None)

    def kill(self, endpoint: Endpoint, *, silent: bool) -> None:
        """End the process and reset its wires; if ``silent``, the machine vanishes without
        resets.
        """
        endpoint.silent = silent
        if endpoint.host is not None:
            endpoint.host.crash()
        for wire in list(endpoint.wires):
            side = 0 if wire.directions[0].src is endpoint else 1
            wire.on_broken[side]()
            if silent:
                wire.directions[1 - side].open = False
                other = wire.directions[side].dst
                due = self._queue.now + IDLE_TIMEOUT
                self._queue.schedule(due, other.owner, "idle", wire.lose, 1 - side)
                endpoint.wires.pop(wire, None)
            else:
                wire.close(side)
        endpoint.listeners.clear()
        endpoint.host = None

    def silence(self, endpoint: Endpoint) -> None:
        """Let hosts give up their connections to a process that was just paused.

        Below a host the transport must notice the silence itself.
        """
        due = self._queue.now + IDLE_TIMEOUT
        for wire in endpoint.wires:
            self._queue.schedule(
                due, self._queue.kernel, "idle", self._give_up, wire, endpoint, endpoint.owner
            )

    def _give_up(self, wire: Wire, endpoint: Endpoint, paused: Owner) -> None:
        host = next(one.dst for one in wire.directions if one.dst is not endpoint).host
        now = self._queue.now
        is_silent = paused.paused_until > now >= paused.paused_since + IDLE_TIMEOUT
        if paused.alive and is_silent and host is not None:
            host.give_up(wire)

    def revive(self, endpoint: Endpoint, owner: Owner) -> None:
        """Begin a new life on the same machine, with a new owner and an idle line."""
        endpoint.owner = owner
        endpoint.silent = False
        endpoint.up_free = endpoint.down_free = self._queue.now

    def _wires(self) -> list[Wire]:
        wires: dict[Wire, None] = {}
        for endpoint in self.endpoints:
            wires.update(endpoint.wires)
        return list(wires)

    def _time_out(self, cut: Cut, wire: Wire) -> None:
        if cut in self._cuts:
            for side in (0, 1):
                owner = wire.directions[side].src.owner
                self._queue.schedule(self._queue.now, owner, "idle", wire.lose, side)


def tampered(src: Endpoint, data: bytes) -> bytes:
    """Return the ``data`` of a lying machine: mostly the same, sometimes with one bit
    flipped."""
    if not data or src.rng.random() >= src.lies:
        return data
    flipped = bytearray(data)
    flipped[src.rng.randrange(len(flipped))] ^= 1 << src.rng.randrange(8)
    return bytes(flipped)


def deliver_if_open(
    direction: Direction, deliver: Callable[..., None], args: tuple[Any, ...]
) -> None:
    """Deliver a transfer that has come through the receiver's line, if the wire is still
    open.
    """
    if direction.open:
        deliver(*args)


def _default_latency(one: Endpoint, other: Endpoint) -> float:
    return DEFAULT_LATENCY


def _ignore() -> None:
    """Do nothing. It stands for the callback of a stream or host that has none."""
