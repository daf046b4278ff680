"""Faults that real processes and lines can have: those kinds of a plan that level 3 knows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Final

from p2p.errors import ConfigError
from sim.faults.overlapping_faults import OverlappingChanges
from sim.faults.plan import Fault
from sim.net.link import LinkSpec
from sim.studies.lab.machines import Emulation, LabMachine

Undo = Callable[[], Awaitable[None]]
Act = Callable[["EmulationFaults", LabMachine, Fault], Awaitable[Undo]]


class EmulationFaults:
    """Lets the faults of a plan happen on an emulation."""

    def __init__(self, emulation: Emulation) -> None:
        self._emulation = emulation
        self.lines: OverlappingChanges[LinkSpec] = OverlappingChanges()

    async def play(self, fault: Fault) -> None:
        """Wait for a fault, do it, undo it."""
        await self._emulation.sleep_until(fault.at)
        undone = [
            await KINDS[fault.kind](self, machine, fault)
            for machine in self._emulation.machines.values()
            if any(fnmatchcase(machine.name, word) for word in fault.who)
        ]
        if fault.seconds > 0:
            await self._emulation.sleep_until(fault.at + fault.seconds)
            for undo in undone:
                await undo()


def play_faults(emulation: Emulation, plan: Sequence[Fault]) -> None:
    """Let all faults happen at their times, in tasks of the emulation."""
    faults = EmulationFaults(emulation)
    for fault in plan:
        emulation.nursery.start_soon(faults.play, fault)


def check_faults(plan: Sequence[Fault]) -> None:
    """Check that level 3 knows all faults of a plan.

    Raises:
        ConfigError: It does not. The message names the first unknown fault.
    """
    for fault in plan:
        if fault.kind not in KINDS:
            raise ConfigError(f"level 3 has no fault {fault.kind!r}, only {', '.join(KINDS)}")
        if any(word.endswith("%") or word.startswith("zone:") for word in fault.who):
            raise ConfigError("at level 3 a fault names nodes or patterns, no shares or zones")


def is_final(fault: Fault) -> bool:
    """Return True if the nodes that it hits are dead for the rest of the run."""
    return fault.kind in ("kill", "wipe") and not fault.seconds


async def _kill(faults: EmulationFaults, machine: LabMachine, fault: Fault) -> Undo:
    if machine.alive:
        await machine.kill()
    return machine.restart


async def _wipe(faults: EmulationFaults, machine: LabMachine, fault: Fault) -> Undo:
    await _kill(faults, machine, fault)
    machine.wipe()
    return machine.restart


async def _pause(faults: EmulationFaults, machine: LabMachine, fault: Fault) -> Undo:
    machine.pause()

    async def resume() -> None:
        machine.resume()

    return resume


async def _throttle(faults: EmulationFaults, machine: LabMachine, fault: Fault) -> Undo:
    return await _change_line(
        faults,
        machine,
        lambda link: replace(link, up=link.up * fault.value, down=link.down * fault.value),
    )


async def _drip(faults: EmulationFaults, machine: LabMachine, fault: Fault) -> Undo:
    return await _change_line(faults, machine, lambda link: replace(link, up=fault.value))


async def _change_line(
    faults: EmulationFaults, machine: LabMachine, change: Callable[[LinkSpec], LinkSpec]
) -> Undo:
    lines = faults.lines
    await machine.reshape(lines.begin(machine.name, machine.link, change))

    async def restore() -> None:
        await machine.reshape(lines.end(machine.name, change))

    return restore


KINDS: Final[Mapping[str, Act]] = {
    # kill -9; the kernel tells its peers; it comes back on its disk after `seconds`
    "kill": _kill,
    "wipe": _wipe,  # comes back with an empty disk
    "pause": _pause,  # SIGSTOP, SIGCONT: its kernel goes on to acknowledge
    "throttle": _throttle,  # value: share of the bandwidth that is left
    "drip": _drip,  # value: Mbit/s of upload
}
