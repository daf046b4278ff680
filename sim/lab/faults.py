"""Faults that real processes and lines can have: the kinds of `sim.faults.plan` that level 3 knows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Final

from p2p.errors import ConfigError
from sim.faults.overlapping_faults import OverlappingChanges
from sim.faults.plan import Fault
from sim.lab.machines import House, Street
from sim.net.link import LinkSpec

Undo = Callable[[], Awaitable[None]]
Act = Callable[["Director", House, Fault], Awaitable[Undo]]


class Director:
    """Lets the faults of a plan happen on a street."""

    def __init__(self, street: Street) -> None:
        self._street = street
        self.lines: OverlappingChanges[LinkSpec] = OverlappingChanges()

    async def play(self, fault: Fault) -> None:
        """One fault: wait for it, do it, undo it."""
        await self._street.sleep_until(fault.at)
        undone = [
            await KINDS[fault.kind](self, house, fault)
            for house in self._street.houses.values()
            if any(fnmatchcase(house.name, word) for word in fault.who)
        ]
        if fault.seconds > 0:
            await self._street.sleep_until(fault.at + fault.seconds)
            for undo in undone:
                await undo()


def play_faults(street: Street, plan: Sequence[Fault]) -> None:
    """Let all faults happen at their times, in tasks of the street."""
    director = Director(street)
    for fault in plan:
        street.nursery.start_soon(director.play, fault)


def check_faults(plan: Sequence[Fault]) -> None:
    """Raises `ConfigError` naming the first fault that level 3 does not know."""
    for fault in plan:
        if fault.kind not in KINDS:
            raise ConfigError(f"level 3 has no fault {fault.kind!r}, only {', '.join(KINDS)}")
        if any(word.endswith("%") or word.startswith("zone:") for word in fault.who):
            raise ConfigError("at level 3 a fault names nodes or patterns, no shares or zones")


def is_final(fault: Fault) -> bool:
    """Whether whoever it hits is dead for the rest of the run."""
    return fault.kind in ("kill", "wipe") and not fault.seconds


async def _kill(director: Director, house: House, fault: Fault) -> Undo:
    if house.alive:
        await house.kill()
    return house.restart


async def _wipe(director: Director, house: House, fault: Fault) -> Undo:
    await _kill(director, house, fault)
    house.wipe()
    return house.restart


async def _pause(director: Director, house: House, fault: Fault) -> Undo:
    house.pause()

    async def resume() -> None:
        house.resume()

    return resume


async def _throttle(director: Director, house: House, fault: Fault) -> Undo:
    return await _change_line(
        director, house, lambda link: replace(link, up=link.up * fault.value, down=link.down * fault.value)
    )


async def _drip(director: Director, house: House, fault: Fault) -> Undo:
    return await _change_line(director, house, lambda link: replace(link, up=fault.value))


async def _change_line(director: Director, house: House, change: Callable[[LinkSpec], LinkSpec]) -> Undo:
    lines = director.lines
    await house.reshape(lines.begin(house.name, house.link, change))

    async def restore() -> None:
        await house.reshape(lines.end(house.name, change))

    return restore


KINDS: Final[Mapping[str, Act]] = {
    "kill": _kill,  # kill -9; the kernel tells its peers; it comes back on its disk after `seconds`
    "wipe": _wipe,  # comes back with an empty disk
    "pause": _pause,  # SIGSTOP, SIGCONT: its kernel goes on to acknowledge
    "throttle": _throttle,  # value: share of the bandwidth that is left
    "drip": _drip,  # value: Mbit/s of upload
}
