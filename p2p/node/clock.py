"""Wall clock of peers: ``/shoal/clock/1.0.0``.

A node whose clock is hours off is not believed, so it gets no heartbeat that would tell it. A
peer that asks sends an empty frame and gets ``[wall]``, seconds since 1970, which heartbeats
tell everybody else. Nothing is decided by the answer: a node that stays alone asks
(`PeerClocks`), and `shoal doctor`, and each shows it to its person.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Sequence
from typing import Final

import trio

from p2p.bounded import BoundedDict
from p2p.errors import BadMessage
from p2p.host import PEER_TROUBLE, Host, request, serve_requests
from p2p.identity import PeerId, ProtocolId
from p2p.membership import Membership
from p2p.meter import StrangerMeter
from p2p.wire import fields_untrusted, pack, unpack_untrusted
from p2p.world import World

CLOCK_PROTOCOL: Final = ProtocolId("/shoal/clock/1.0.0")

logger = logging.getLogger(__name__)


class PeerClocks:
    """Compares a node's clock with those of its peers, to warn people of a wrong clock."""

    def __init__(self, world: World, host: Host, membership: Membership) -> None:
        self._world = world
        self._host = host
        self._membership = membership
        # Number of peers whose clocks are remembered. Their median is reported, so one liar has
        # no effect.
        self._ahead: BoundedDict[PeerId, float] = BoundedDict(3)
        """Maps each asked peer to the lead of our clock over its own, in seconds."""
        self._told = ""

    @property
    def trouble(self) -> str:
        """Problem of this clock according to peers, in words; empty if there is none."""
        if self._membership.clock_off is not None:
            return str(self._membership.clock_off)
        if self._membership.size or not self._ahead:
            return ""
        ahead = statistics.median(self._ahead.values())
        # Seconds by which clocks may differ, as in signed records.
        if abs(ahead) <= 300.0:
            return ""
        return (
            f"the clock of this machine differs by about {abs(ahead):.0f} s from that of"
            f" {len(self._ahead)} peers that were asked, and no peer believes its heartbeats:"
            " set it by NTP"
        )

    def __str__(self) -> str:
        count = self._membership.size or len(self._ahead)
        if not count:
            return "unknown: no peer has told the time"
        return self.trouble or f"agrees with that of {count} peer{'s' * (count > 1)}"

    async def ask_while_alone(self, peers: Sequence[PeerId]) -> None:
        """Ask known and connected peers for the time while there are no members."""
        # Seconds without members after which a node that knows peers asks them for the time:
        # four heartbeats. It asks again every minute.
        pause = 20.0
        while True:
            await self._world.sleep_until(self._world.now() + pause)
            pause = 60.0
            if self._membership.size:
                continue
            for peer in dict.fromkeys((*self._host.connected, *peers)):
                try:
                    with trio.fail_after(10.0):
                        ahead = await clock_ahead(self._world, self._host, peer)
                        self._ahead.renew(peer, ahead)
                except PEER_TROUBLE as error:
                    logger.info("clock.not_told peer=%s reason=%s", peer, error)
            if self.trouble and self.trouble != self._told:
                self._told = self.trouble
                logger.warning("clock.off %s", self.trouble)


def serve_clock(world: World, host: Host, meter: StrangerMeter) -> None:
    """Serve the time to peers, within the budget of ``meter`` for strangers."""

    async def answer(_: PeerId, __: bytes) -> bytes:
        return pack([world.wall()])

    host.set_handler(
        CLOCK_PROTOCOL, serve_requests(answer, max_request=0, may_have=meter.allows_at_door)
    )


async def clock_ahead(world: World, host: Host, peer: PeerId) -> float:
    """Return the lead of our clock over the peer's in seconds, exact to half a round trip. The
    caller sets the deadline. Raises what `p2p.host.request` raises."""
    before = world.wall()
    # Maximum bytes of a reply. A list of one float has ten.
    reply = await request(host, peer, CLOCK_PROTOCOL, b"", max_reply=16)
    return (before + world.wall()) / 2 - decode_clock_untrusted(reply)


def decode_clock_untrusted(data: bytes) -> float:
    """Decode a peer's wall time.

    Raises:
        BadMessage: The bytes are not a time. Nothing else is raised, whatever the bytes.
    """
    (wall,) = fields_untrusted(unpack_untrusted(data), float, what="clock")
    if not math.isfinite(wall):
        raise BadMessage("a clock that is no number")
    return float(wall)
