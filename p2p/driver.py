"""Driver of a core: events in, effects carried out in order, one timer.

Theory of operation
-------------------
A core is a state machine: ``handle(event, now)`` returns effects, and ``next_deadline`` says
when it wants to be told the time. A `Driver` is all that stands between one and the world. It
calls `handle` for one event at a time: what an effect causes (a host that reports a lost peer
while a message is being sent, a caller's callback that publishes) waits in a queue until the
effects of the event before are all carried out. So a core is never entered while it runs, and
its effects leave in the order in which it returned them.

The timer is set when the deadline comes nearer and left alone when it moves away: most events
move it a little, and to cancel a timer and set another costs a simulation as much as an event.
A timer that rings before the deadline is set again, and the core not told.

How a service uses it
---------------------
A service carries out its own effects in a method. `Driver.serving` carries out those that all
services share (`p2p.events`), and feeds the core what the host says. It is entered inside the
scope of the tasks that effects start::

    driver = Driver(world, core, own_effect, on_deadline)
    async with trio.open_nursery() as nursery:
        with driver.serving(host, PROTOCOL_ID, on_deadline):
            yield service

Effects are carried out before `Driver.feed` returns, so what one of them notes can be read
behind it. Only an event that the carrying out of another feeds waits: what a caller may have
done wrong is therefore checked when an event is made, not when it is handled.

A caller that needs the core's word at once, whatever is under way, calls `Driver.ask`. Gossip
asks SHARDCAST whether to pass an announcement on, and can be in the middle of carrying out what
SHARDCAST itself announced. The core is not running then (it runs in `handle` alone), so it
judges at once; only the effects wait for those before them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar, cast

import trio

from p2p.events import (
    AddAddrs,
    HostEffect,
    HostEvent,
    PeerDown,
    PeerUp,
    Penalise,
    Received,
    Send,
)  # fmt: skip
from p2p.host import MAX_MESSAGE, Host, PeerEvent, PeerState
from p2p.identity import PeerId, ProtocolId
from p2p.world import Timer, World

Event = TypeVar("Event")
EventIn = TypeVar("EventIn", contravariant=True)
Effect = TypeVar("Effect")
EffectOut = TypeVar("EffectOut", covariant=True)


class MessageCore(Protocol[EventIn, EffectOut]):
    """A state machine without I/O."""

    @property
    def next_deadline(self) -> float:
        """Time of the next tick that the core needs; infinite if it needs none."""

    def handle(self, event: EventIn, now: float, /) -> Sequence[EffectOut]:
        """Advance by one event and return what to do about it."""


class Driver(Generic[Event, Effect]):
    """Feeds one core for the length of the block `running`. Before and after it, events are
    dropped."""

    def __init__(
        self,
        world: World,
        core: MessageCore[Event, Effect | HostEffect],
        carry_out: Callable[[Effect], None],
        on_deadline: Callable[[], None],
        lateness: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Drive a core.

        ``on_deadline`` is called when the core's deadline comes, and feeds its tick.
        ``lateness`` returns the seconds by which a deadline is missed on purpose; it is a
        `World.buggify` site.
        """
        self._world = world
        self._core = core
        self._handle = core.handle
        self._now = world.now
        self._carry_out = cast("Callable[[Effect | HostEffect], None]", carry_out)
        self._on_deadline = on_deadline
        self._lateness = lateness
        self._waiting: deque[Event] = deque()
        self._asked: deque[Effect | HostEffect] = deque()
        """Effects of events that were handled while those of another were carried out."""
        self._is_running = False
        self._is_handling = False
        self._timer: Timer | None = None
        self._timer_at = math.inf

    @contextmanager
    def running(self) -> Iterator[None]:
        """Handle events for the length of the block."""
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False
            self._waiting.clear()
            self._asked.clear()
            if self._timer is not None:
                self._timer.cancel()

    @contextmanager
    def serving(
        self,
        host: Host,
        protocol: ProtocolId,
        begin: Callable[[], None],
        max_message: int = MAX_MESSAGE,
    ) -> Iterator[None]:
        """Handle events for the length of the block, including those of ``host``: messages of
        ``protocol``, and peers that come and go.

        Effects of `p2p.events` go to ``host``. ``begin`` feeds the events that the core needs
        before it hears of peers.
        """
        feed = cast("Callable[[HostEvent], None]", self.feed)
        wall = self._world.wall
        own_effect, send = self._carry_out, host.send

        def carry_out(effect: Effect | HostEffect) -> None:
            if isinstance(effect, Send):  # nearly all are
                send(effect.peer, protocol, effect.data)
            elif isinstance(effect, AddAddrs):
                host.add_addrs(effect.peer, effect.addrs, effect.source)
            elif isinstance(effect, Penalise):
                self._world.sometimes("driver/penalised a peer", True)
                host.penalise(effect.peer, effect.offence.points, effect.reason)
            else:
                own_effect(effect)

        def on_message(peer: PeerId, data: bytes) -> None:
            feed(Received(peer, data, wall()))

        def on_peer(event: PeerEvent) -> None:
            if event.state is PeerState.CONNECTED:
                feed(PeerUp(event.peer, event.dialled))
            else:
                feed(PeerDown(event.peer, event.state is PeerState.UNREACHABLE))

        self._carry_out = carry_out
        with (
            self.running(),
            host.receiving(protocol, on_message, max_message=max_message),
            host.watching(on_peer),
        ):
            begin()
            for peer in host.connected:
                feed(PeerUp(peer))
            yield

    @property
    def is_running(self) -> bool:
        return self._is_running

    def check_running(self, what: str) -> None:
        """Raise `trio.ClosedResourceError` once the block of ``open_<what>`` has ended."""
        if not self._is_running:
            raise trio.ClosedResourceError(
                f"this {what} is closed: its open_{what} block has ended"
            )

    def feed(self, event: Event) -> None:
        """Let the core handle `event` and carry out its effects, at once or after the event
        under way.

        Raises what the core raises: `BadMessage` where a peer is at fault. Events that waited
        behind such a one are handled with the next that is fed.
        """
        waiting = self._waiting
        if self._is_handling:
            waiting.append(event)
            return
        if not self._is_running:
            return
        if waiting:
            waiting.append(event)
            event = waiting.popleft()
        self._is_handling = True
        carry_out, asked = self._carry_out, self._asked
        try:
            while True:
                for effect in self._handle(event, self._now()):
                    carry_out(effect)
                while asked:
                    carry_out(asked.popleft())
                if not waiting:
                    break
                event = waiting.popleft()
        finally:
            self._is_handling = False
            if self._core.next_deadline < self._timer_at:
                self.set_timer()

    def ask(self, event: Event) -> Sequence[Effect | HostEffect]:
        """Let the core handle ``event`` at once, ahead of events that wait, and return its
        effects.

        They are carried out before this returns, or behind those of the event under way. Raises
        what the core raises. Returns nothing if the driver is not running.
        """
        if not self._is_running:
            return ()
        effects = self._handle(event, self._now())
        asked, waiting = self._asked, self._waiting
        asked.extend(effects)
        if not self._is_handling:
            self._is_handling = True
            try:
                while True:
                    while asked:
                        self._carry_out(asked.popleft())
                    if not waiting:
                        break
                    asked.extend(self._handle(waiting.popleft(), self._now()))
            finally:
                self._is_handling = False
                if self._core.next_deadline < self._timer_at:
                    self.set_timer()
        return effects

    def set_timer(self) -> None:
        """Ask for a call at the core's deadline. `feed` does this by itself."""
        due = self._core.next_deadline
        if due < self._timer_at and self._is_running:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = due
            when = max(due, self._now()) + self._lateness()
            self._timer = self._world.call_at(when, self._ring)

    def _ring(self) -> None:
        self._timer, self._timer_at = None, math.inf
        if self._core.next_deadline <= self._now():
            self._on_deadline()
        else:
            self.set_timer()
