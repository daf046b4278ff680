"""The driver of `MembershipCore`: feeds it the host's events and the clock, carries out its effects."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final

import trio

from p2p.errors import StorageError
from p2p.host import Host, PeerEvent, PeerState
from p2p.identity import PeerId
from p2p.membership.core import MembershipCore
from p2p.membership.events import (
    AddAddrs,
    Bootstrap,
    Changed,
    Disconnected,
    Effect,
    Event,
    Interest,
    Leave,
    Member,
    MemberEvent,
    MembershipConfig,
    Penalise,
    Received,
    Reserve,
    Send,
    Tick,
    Unreachable,
    Update,
)
from p2p.membership.heartbeat import MAX_SEQNO, PROTOCOL_ID, Profile
from p2p.membership.voice import SEQNO_BLOCK
from p2p.multiaddr import Multiaddr
from p2p.world import Timer, World

logger = logging.getLogger(__name__)

SEQNO_PATH: Final = "membership/seqno"
"""On the node's disk: the highest sequence number it may have used, in decimal."""


class Me:
    """What this node says of itself in its heartbeats."""

    def __init__(self, changed: Callable[[Profile], None]) -> None:
        self._profile = Profile()
        self._changed = changed

    @property
    def profile(self) -> Profile:
        """All of it."""
        return self._profile

    def update(self, **fields: Any) -> None:
        """Change fields of `Profile` by name: roles, run, policy, upload, slots, load, version.

        A change of roles, run or policy is told at once, the others with the next heartbeat. Raises
        `ValueError` if a value is out of range, `TypeError` if there is no such field.
        """
        profile = replace(self._profile, **fields)
        if profile != self._profile:
            self._profile = profile
            self._changed(profile)


class Membership:
    """Who is in the swarm. Open it with `open_membership`."""

    __slots__ = (
        "_closed", "_core", "_host", "_linked", "_listeners", "_reserve", "_timer", "_timer_at", "_world",
        "me",
    )  # fmt: skip

    def __init__(
        self, world: World, host: Host, core: MembershipCore, reserve: Callable[[int], None]
    ) -> None:
        self.me: Final = Me(lambda profile: self._drive(Update(profile)))
        self._world = world
        self._host = host
        self._core = core
        self._reserve = reserve
        self._listeners: list[Callable[[MemberEvent], None]] = []
        self._linked = trio.Event()
        self._timer: Timer | None = None
        self._timer_at = math.inf
        self._closed = False

    def members(self) -> list[Member]:
        """Everybody we know to be alive and admitted, without ourselves, longest known first."""
        return self._core.members()

    def __contains__(self, peer: PeerId) -> bool:
        """Whether ``peer`` is one of the `members`."""
        return peer in self._core

    @property
    def size(self) -> int:
        """How many `members` there are, with some not admitted any more: it costs nothing to ask."""
        return self._core.size

    def find(self, role: str) -> list[Member]:
        """The members that run ``role``."""
        return [member for member in self._core.members() if role in member.roles]

    @property
    def neighbours(self) -> tuple[PeerId, ...]:
        """The peers we exchange heartbeats and digests with."""
        return self._core.neighbours

    @property
    def counters(self) -> Mapping[str, int]:
        """What was dropped, by reason."""
        return self._core.counters

    def on_change(self, listener: Callable[[MemberEvent], None]) -> None:
        """Call ``listener`` (which must not block) on every change in who is a member."""
        self._listeners.append(listener)

    def interest(self, peers: Sequence[PeerId]) -> None:
        """Send our heartbeats directly to ``peers`` too, from now on; replaces the set before."""
        self._drive(Interest(tuple(peers)))

    async def join(self, addrs: Sequence[Multiaddr]) -> None:
        """Join the swarm through ``addrs``, each ending in ``/p2p/``; return with the first neighbour.

        It tries for as long as it takes, ever more slowly: the caller sets the deadline, and the
        attempts go on behind its back. Returns at once if ``addrs`` names nobody but ourselves.
        """
        others = tuple(addr for addr in addrs if addr.peer_id not in (None, self._core.peer))
        if not others:
            return
        self._drive(Bootstrap(others))
        while not self._core.is_linked:
            await self._linked.wait()

    def _open(self) -> None:
        self._host.set_message_handler(PROTOCOL_ID, lambda peer, data: self._drive(Received(peer, data)))
        self._host.on_peer(self._on_peer)
        self._on_timer()

    def _close(self) -> None:
        self._drive(Leave())
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _on_peer(self, event: PeerEvent) -> None:
        if event.state is PeerState.DISCONNECTED:
            self._drive(Disconnected(event.peer))
        elif event.state is PeerState.UNREACHABLE:
            self._drive(Unreachable(event.peer))

    def _on_timer(self) -> None:
        self._timer, self._timer_at = None, math.inf
        addrs = self._host.addrs
        if addrs != self.me.profile.addrs:
            self.me.update(addrs=addrs)
        self._drive(Tick())

    def _drive(self, event: Event) -> None:
        if self._closed:
            return
        now = self._world.now()
        for effect in self._core.handle(event, now):
            if type(effect) is Send:  # nearly all are
                self._host.send(effect.peer, PROTOCOL_ID, effect.data)
            else:
                self._carry_out(effect)
        if self._core.is_linked != self._linked.is_set():
            self._note_link()
        deadline = self._core.next_deadline
        if deadline < self._timer_at and not self._closed:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = deadline
            self._timer = self._world.call_at(max(deadline, now), self._on_timer)

    def _note_link(self) -> None:
        if self._core.is_linked:
            self._linked.set()
        else:
            self._linked = trio.Event()

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case AddAddrs(peer, addrs):
                self._host.add_addrs(peer, addrs)
            case Penalise(peer, points, reason):
                self._host.penalise(peer, points, reason)
            case Reserve(ceiling):
                self._reserve(ceiling)
            case Changed(event):
                self._world.trace(f"member.{event.change.value}", peer=event.member.peer)
                for listener in self._listeners:
                    listener(event)


@asynccontextmanager
async def open_membership(
    world: World, host: Host, config: MembershipConfig, *, may: Callable[[PeerId], bool]
) -> AsyncIterator[Membership]:
    """Take part in the swarm for the length of the block, and say good-bye at its end.

    ``may`` says who is admitted: others are neither listed nor passed on nor listened to.
    """
    first = max(await _read_ceiling(world) + 1, int(world.wall() * 1000))
    await _write_ceiling(world, first + SEQNO_BLOCK)
    core = MembershipCore(
        world.signer,
        config,
        world.rng("membership"),
        verify=world.verify,
        may=may,
        wall=world.wall,
        seqno=first,
    )
    async with trio.open_nursery() as nursery:

        def reserve(ceiling: int) -> None:
            nursery.start_soon(_write_ceiling, world, ceiling)

        membership = Membership(world, host, core, reserve)
        membership._open()
        try:
            yield membership
        finally:
            membership._close()
            nursery.cancel_scope.cancel()


async def _read_ceiling(world: World) -> int:
    """The highest number used before. A file that makes no sense counts as lost: peers will tell us."""
    try:
        text = await world.disk.read(SEQNO_PATH)
    except FileNotFoundError:
        return 0
    return min(int(text), MAX_SEQNO // 2) if text.isdigit() and len(text) < 20 else 0


async def _write_ceiling(world: World, ceiling: int) -> None:
    """On a disk that refuses, only the clock keeps the next life from using a number again."""
    try:
        await world.disk.replace(SEQNO_PATH, str(ceiling).encode())
    except StorageError as error:
        logger.warning("membership.seqno not saved: %s", error)
