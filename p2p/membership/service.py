"""The driver of `MembershipCore`: host events and deadlines in, effects carried out."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any, Final

import trio

from p2p.concurrency import Notifier, open_bare_nursery
from p2p.door import check, check_each, check_function, check_host, check_values, check_world
from p2p.driver import Driver
from p2p.errors import StorageError
from p2p.events import Tick
from p2p.host import Host
from p2p.identity import PeerId
from p2p.membership.config import MembershipConfig
from p2p.membership.core import events as ev
from p2p.membership.core.core import MembershipCore
from p2p.membership.heartbeat import PROTOCOL_ID, Profile
from p2p.multiaddr import Multiaddr, as_multiaddr
from p2p.wire import KI
from p2p.world import World, first_seqno

ANCHORS_PATH: Final = "membership/anchors"
"""File with the addresses of the longest-standing neighbours, one a line."""

logger = logging.getLogger(__name__)


class LocalProfile:
    """Profile in this node's heartbeats, which can be updated."""

    def __init__(self, changed: Callable[[Profile], None]) -> None:
        self.profile = Profile()
        self._changed = changed

    def update(self, **fields: Any) -> None:
        """Change fields of `Profile` by name: roles, run, policy, upload, slots, load, version.

        A change of roles, run or policy is told at once, the others with the next heartbeat.
        Raises `ValueError` if a value is out of range, `TypeError` if there is no such field.
        """
        check_values(Profile, fields)
        profile = replace(self.profile, **fields)
        if profile != self.profile:
            self.profile = profile
            self._changed(profile)


class Membership:
    """Membership of the swarm as seen by this node. Open it with `open_membership`."""

    def __init__(
        self,
        world: World,
        host: Host,
        core: MembershipCore,
        write: Callable[[str, bytes], None],
        anchors: tuple[Multiaddr, ...],
    ) -> None:
        self.me: Final = LocalProfile(
            lambda profile: self._driver.feed(ev.UpdateProfile(profile))
        )
        self._world = world
        self._host = host
        self._core = core
        self._driver: Driver[ev.Event, ev.OwnEffect] = Driver(
            world, core, self._carry_out, self._on_deadline
        )
        self._write = write
        self._anchors = anchors
        self._told_clock = False
        self._listeners: list[Callable[[ev.MemberEvent], None]] = []
        self._joined = Notifier()
        self._found = Notifier()
        """Notified of each new member and each new connection."""

    def members(self) -> list[ev.Member]:
        """Return the living, admitted members without ourselves, longest known first."""
        return self._core.members()

    def __contains__(self, peer: PeerId) -> bool:
        """Return True if ``peer`` is one of the `members`."""
        return peer in self._core

    def shown_by(self, peer: PeerId) -> bytes:
        """Return the credential of ``peer`` or this node; empty for a non-member."""
        check("peer", peer, PeerId)
        own = peer == self._host.peer_id
        return self.me.profile.stamp if own else self._core.shown_by(peer)

    @property
    def size(self) -> int:
        """Number of `members`, including some that are no longer admitted. Reading it is
        cheap."""
        return self._core.size

    def find(self, role: str) -> list[ev.Member]:
        """Return the members that run ``role``."""
        check("role", role, str)
        return [member for member in self._core.members() if role in member.roles]

    @property
    def neighbours(self) -> tuple[PeerId, ...]:
        """Peers with which this node exchanges heartbeats and digests."""
        return self._core.neighbours

    @property
    def counters(self) -> Mapping[str, int]:
        """Counts dropped messages by reason."""
        return self._core.counters

    def on_change(self, listener: Callable[[ev.MemberEvent], None]) -> None:
        """Call ``listener`` (which must not block) on every change in who is a member."""
        check_function("listener", listener, 1)
        self._listeners.append(listener)

    @property
    def clock_off(self) -> ev.ClockOff | None:
        """Offset of our wall clock from that of most peers, if they refuse us because of it;
        else None."""
        return self._core.clock_off

    def interest(self, peers: Sequence[PeerId], *, has_audience: bool = True) -> None:
        """Send our heartbeats to ``peers`` as well as the neighbours, replacing the previous
        set.

        ``has_audience`` is True if other peers send their heartbeats to us in this way, so that
        all of them are kept.
        """
        self._driver.feed(ev.Interest(check_each("peers", peers, PeerId), has_audience))

    async def join(self, addrs: Sequence[Multiaddr | str]) -> None:
        """Join the swarm through ``addrs`` (or their text), each ending in ``/p2p/``.

        Returns when there is a first neighbour, or at once if ``addrs`` names no peer but
        ourselves. Attempts go on at growing intervals for as long as it takes, even after the
        caller's deadline. The first call also asks the longest-standing neighbours from before
        this node's restart.
        """
        given = check_each("addrs", addrs, Multiaddr, str)
        self._driver.check_running("membership")
        known = (as_multiaddr(addr, "join") for addr in given)
        others = tuple(addr for addr in known if addr.peer_id not in (None, self._core.peer))
        anchors, self._anchors = self._anchors, ()
        if others or anchors:
            self._driver.feed(ev.Bootstrap(others, anchors))
        if others:
            await self.wait_neighbour()

    async def locate(self, peer: PeerId, among: Iterable[PeerId]) -> None:
        """Ask up to two connected peers ``among`` others for the heartbeat of ``peer``, unless
        it is a member. Return when it has come, or after 2 s.

        The host knows the peer's addresses then (`Host.finding`). The author of a roster has a
        heartbeat of everyone on it, but those on it know few of one another. When a hundred
        nodes fetched 4 MB as soon as it was published, relays could dial half of their children
        after 2 s and never reached a third of them.
        """
        check("peer", peer, PeerId)
        others = (one for one in among if one != peer and one in self._host.connected)
        # Peers asked where another is: trainers, as a rule, who know all their workers. One
        # would do; two, since one may be gone or lie. Each answer has a heartbeat's 250 bytes.
        asked = tuple(islice(others, 2))
        if not asked or peer in self._core:
            return
        self._driver.feed(ev.Seek(peer, asked))
        # A few round trips, and the queue of a busy peer. If none of the asked peers knows the
        # addresses, a dial is this much later.
        with trio.move_on_after(2.0):
            while peer not in self._core and peer not in self._host.connected:
                await self._found.wait()

    async def wait_neighbour(self) -> None:
        """Return when there is a neighbour."""
        while not self._core.neighbours:
            await self._joined.wait()

    @contextmanager
    def _running(self, stamp: bytes) -> Iterator[None]:
        """Take part for the length of the block, and end it with a good-bye."""

        def begin() -> None:
            if stamp:
                self.me.update(stamp=stamp)
            self._on_deadline()

        with (
            self._driver.serving(self._host, PROTOCOL_ID, begin),
            self._host.watching(lambda _: self._found.notify_all()),
        ):
            try:
                yield
            finally:
                self._driver.feed(ev.Leave())

    def _on_deadline(self) -> None:
        addrs = self._host.addrs
        if addrs != self.me.profile.addrs:
            self.me.update(addrs=addrs)
        self._driver.feed(Tick())
        off = self._core.clock_off
        if off is not None and not self._told_clock:
            # Told once each time that our clock goes wrong: nothing else says why a node finds
            # no peers.
            logger.warning("membership.clock %s", off)
            self._world.trace("membership.clock", seconds=round(off.seconds), peers=off.peers)
        self._told_clock = off is not None

    def _carry_out(self, effect: ev.OwnEffect) -> None:
        match effect:  # the most frequent first
            case ev.MemberEvent(change, member):
                self._found.notify_all()
                self._world.trace(f"member.{change.value}", peer=member.peer)
                for listener in self._listeners:
                    listener(effect)
            case ev.SaveAnchors(addrs):
                self._write(ANCHORS_PATH, "\n".join(map(str, addrs)).encode())
            case ev.NeighboursChanged(neighbours):
                self._host.protect("neighbours", neighbours)
                if neighbours:
                    self._joined.notify_all()


@asynccontextmanager
async def open_membership(
    world: World,
    host: Host,
    config: MembershipConfig | None = None,
    *,
    may: Callable[[PeerId], bool] = lambda _: True,
    stamp: bytes = b"",
    is_stamped: Callable[[PeerId, bytes], bool] | None = None,
) -> AsyncIterator[Membership]:
    """Take part in the swarm for the length of the block, and say good-bye at its end.

    ``may`` tells whether a peer is admitted; by default every peer is. Heartbeats of others are
    ignored. ``stamp`` is the proof of our own work. ``is_stamped`` tells whether another peer's
    stamp suffices; without it no peer needs one.
    """
    check_world(world)
    check_host(host)
    if config is not None:
        check("config", config, MembershipConfig)
    check_function("may", may, 1)
    check("stamp", stamp, bytes)
    if is_stamped is not None:
        check_function("is_stamped", is_stamped, 2)
    config = config or MembershipConfig()
    core = MembershipCore(
        world.signer,
        config,
        world.rng("membership"),
        verify=world.verify,
        may=may,
        wall=world.wall,
        seqno=await first_seqno(world, "membership/seqno"),
        is_stamped=is_stamped,
    )
    anchors = await _read_anchors(world)
    async with open_bare_nursery() as nursery:

        def write(path: str, data: bytes) -> None:
            nursery.start_soon(_write, world, path, data)

        membership = Membership(world, host, core, write, anchors)
        with membership._running(stamp):
            yield membership
        nursery.cancel_scope.cancel()


async def _write(world: World, path: str, data: bytes) -> None:
    """Write a file whose loss does no harm. A full disk is logged and does not end
    membership."""
    try:
        await world.disk.replace(path, data)
    except StorageError as error:
        logger.warning("membership.not_written path=%s reason=%s", path, error)


async def _read_anchors(world: World) -> tuple[Multiaddr, ...]:
    """Return the addresses of the anchors. A malformed file counts as lost."""
    try:
        # Two addresses have 1 KiB at most.
        data = await world.disk.read(ANCHORS_PATH, 0, 4 * KI)
        addrs = [Multiaddr.parse(line) for line in data.decode().splitlines()]
    except (FileNotFoundError, ValueError):
        return ()
    return tuple(addr for addr in addrs if addr.peer_id is not None)
