"""What time it is at a peer: ``/shoal/clock/1.0.0``.

A node whose clock is hours off is not believed, so it gets no heartbeat that would tell it. A
peer that asks sends an empty frame and gets ``[wall]``, seconds since 1970, which heartbeats
tell everybody else. Nothing is decided by the answer: `shoal doctor` shows it to a person.
"""

from __future__ import annotations

import math
from typing import Final

from p2p.errors import BadMessage
from p2p.host import Host, request, serve_requests
from p2p.identity import PeerId, ProtocolId
from p2p.meter import StrangerMeter
from p2p.wire import fields_untrusted, pack, unpack_untrusted
from p2p.world import World

CLOCK_PROTOCOL: Final = ProtocolId("/shoal/clock/1.0.0")
MAX_REPLY: Final = 16
"""Bytes: a list of one float has ten."""


def serve_clock(world: World, host: Host, meter: StrangerMeter | None = None) -> None:
    """Tell whoever asks, within what ``meter`` leaves for strangers."""
    meter = meter or StrangerMeter(world)

    async def answer(_: PeerId, __: bytes) -> bytes:
        return pack([world.wall()])

    host.set_handler(
        CLOCK_PROTOCOL,
        serve_requests(answer, max_request=0, may_have=meter.allows_at_door),
    )


async def clock_ahead(world: World, host: Host, peer: PeerId) -> float:
    """By how many seconds our clock is ahead of the peer's, give or take half of the way there
    and back. The caller sets the deadline. Raises what `p2p.host.request` raises."""
    before = world.wall()
    reply = await request(host, peer, CLOCK_PROTOCOL, b"", max_reply=MAX_REPLY)
    return (before + world.wall()) / 2 - decode_clock_untrusted(reply)


def decode_clock_untrusted(data: bytes) -> float:
    """Raise `BadMessage`, and nothing else, whatever the bytes."""
    (wall,) = fields_untrusted(unpack_untrusted(data), float, what="clock")
    if not math.isfinite(wall):
        raise BadMessage("a clock that is no number")
    return float(wall)
