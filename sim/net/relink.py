"""New times for the bytes that wait on a line whose speed changes.

What waits is events, which were given their times when their bytes were sent. A queue in front
of a real line drains at the pace that the line has now: so these times are stretched, from now
on, by as much as the line has become slower, at the sender's end and at the receiver's.
"""

from __future__ import annotations

from sim.kernel.queue import EventQueue, SimTimer
from sim.net.fabric import Direction, Endpoint, Fabric, deliver_if_open
from sim.net.link import LinkSpec


def relink(queue: EventQueue, endpoint: Endpoint, spec: LinkSpec) -> None:
    """Change a machine's line. Bytes that still wait for the line go at the new pace."""
    now, up_before, down_before = queue.now, endpoint.up_cost, endpoint.down_cost
    endpoint.set_link(spec)
    up, down = _ratio(endpoint.up_cost, up_before), _ratio(endpoint.down_cost, down_before)
    endpoint.up_free = _stretch(endpoint.up_free, now, up)
    endpoint.down_free = _stretch(endpoint.down_free, now, down)
    last: dict[Direction, int] = {}

    def due(when: int, timer: SimTimer) -> int:
        if timer.callback is deliver_if_open:
            return _stretch(when, now, down) if timer.args[0].dst is endpoint else when
        if getattr(timer.callback, "__func__", None) is not Fabric.arrive:
            return when
        direction: Direction = timer.args[0]
        size: int = timer.args[1]
        if direction.src is endpoint:
            behind = direction.latency + int(size * direction.dst.down_cost)
            when = _stretch(when - behind, now, up) + behind
        elif direction.dst is endpoint:
            begun = when - int(size * down_before)
            when = (
                begun + int(size * endpoint.down_cost)
                if begun > now
                else _stretch(when, now, down)
            )
        else:
            return when
        last[direction] = direction.last = max(when, last.get(direction, 0))
        return direction.last

    queue.rearrange(due)


def _ratio(after: float, before: float) -> float:
    return after / before if before > 0 else 1.0


def _stretch(moment: int, now: int, factor: float) -> int:
    """Return a future moment with its distance from ``now`` multiplied by ``factor``."""
    return now + int((moment - now) * factor) if moment > now else moment
