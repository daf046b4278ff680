"""Whole nodes as processes on a street of shaped lines (L3): ``python -m p2p.node``, one a machine."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio

from p2p.errors import ConfigError
from p2p.identity import SEED_BYTES
from sim.kernel.keys import KeyRing, derive
from sim.lab.faults import is_final, play_faults
from sim.lab.machines import House, Street
from sim.lab.namespaces import LabError
from sim.run.scenario import Scenario
from sim.workloads.nodes.deployment import Cast
from sim.workloads.nodes.metrics import Tale, measure
from sim.workloads.participants import ORIGIN

PORT: Final = 4001
STATUS: Final = 0.5
"""Seconds between two healths of a node."""
LINGER: Final = 2.0
"""Seconds after the end for the last healths to come in; for latecomers among the bytes, on all levels."""
START_SECONDS: Final = 60.0
SECONDS_A_NODE: Final = 5.0
"""To import everything takes a second of CPU; a busy machine of two cores gives less than half of one."""


class Company:
    """All nodes of one run, as processes."""

    def __init__(self, street: Street, scenario: Scenario) -> None:
        """Raises `ConfigError` if the scenario needs what no street has."""
        self._street = street
        self._scenario = scenario
        self._cast = cast = Cast(scenario, street.seed, KeyRing(street.seed, hashed=False))
        if any(part.link.nat for part in cast.parts.values()):
            raise ConfigError(f"scenario {scenario.name}: level 3 has no NAT")
        self._tales = {name: Tale() for name in cast.parts}
        self._news = trio.Event()

    async def play(self) -> dict[str, float | int | str]:
        """Start everybody, play until everybody holds the last policy, or the duration is over, and measure.

        Raises `LabError` if the nodes do not come up or one ends unasked.
        """
        cast, street, scenario = self._cast, self._street, self._scenario
        (street.folder / "run.shoal").write_bytes(cast.run.document)
        for name, part in cast.parts.items():
            street.tell(0.0, f"laying lines ({len(street.houses) + 1} of {len(cast.parts)})")
            await street.add(name, part.link, partial(self._furnish, name))
            (street.folder / f"{name}.toml").write_text(toml_of(cast.table(name)), encoding="utf-8")
        zero = await self._start_all()
        street.begin(zero)
        for name in self._latecomers():
            street.nursery.start_soon(self._start_late, name)
        play_faults(street, scenario.faults)
        while street.now() < scenario.duration and not self._is_over():
            await self._wait_news()
            street.tell(max(0.0, street.now()), f"{len(self._holders())} of {len(cast.parts)} hold the last")
        await street.world.sleep(LINGER)
        for name, sent in (await street.sent_bytes()).items():
            self._tales[name].line_bytes = sent
        return measure(cast, self._tales, [house.name for house in street.houses.values() if house.alive])

    def _latecomers(self) -> list[str]:
        return [name for name, part in self._cast.parts.items() if part.joins > 0]

    # Starting

    async def _start_all(self) -> float:
        """Start who is there from the beginning; the wall clock time of second 0, once it is known."""
        first = [name for name, part in self._cast.parts.items() if part.joins == 0]
        try:
            with trio.fail_after(START_SECONDS + SECONDS_A_NODE * len(first)):
                for name in first:
                    await self._start(name)
                while (zero := self._tales[ORIGIN].zero) is None:
                    up = sum(tale.is_told for tale in self._tales.values())
                    self._street.tell(0.0, f"starting ({up} of {len(first)} are up)")
                    await self._wait_news()
        except trio.TooSlowError:
            raise LabError(
                f"not all of {len(first)} nodes had joined in time; is the machine busy?"
            ) from None
        return zero

    async def _start_late(self, name: str) -> None:
        await self._street.sleep_until(self._cast.part(name).joins)
        await self._start(name)

    async def _start(self, name: str) -> None:
        await self._street.houses[name].start(self._command(name), partial(self._hear, self._tales[name]))

    def _command(self, name: str) -> list[str]:
        street = self._street
        house = street.houses[name]
        command = [sys.executable, "-m", "p2p.node", "--json", "--status", str(STATUS), "--die-with-parent"]
        command += ["--data", str(house.folder), "--config", str(street.folder / f"{name}.toml")]
        command += ["--run", str(street.folder / "run.shoal"), "--listen", _multiaddr(house)]
        for role in self._cast.roles(name):
            command += ["--role", role]
        for other in list(street.houses.values())[:2]:
            if other is not house:
                command += ["--bootstrap", f"{_multiaddr(other)}/p2p/{self._cast.peer(other.name)}"]
        return command

    def _furnish(self, name: str, folder: Path) -> None:
        """What a new machine has on its disk: the key that the node has on all levels."""
        key = folder / "key"
        key.write_bytes(derive(SEED_BYTES, "key", self._street.seed, name))
        key.chmod(0o600)

    # Watching

    def _hear(self, tale: Tale, report: Mapping[str, Any]) -> None:
        match report.get("event"):
            case "started":
                tale.begin_life()
            case None:
                tale.hear(report)
        self._news.set()

    async def _wait_news(self) -> None:
        """Return when some node has said something, or when one should have."""
        self._news = trio.Event()
        with trio.move_on_after(STATUS):
            await self._news.wait()

    def _holders(self) -> list[str]:
        houses = self._street.houses
        return [
            name
            for name, tale in self._tales.items()
            if houses[name].alive and tale.newest >= self._cast.versions
        ]

    def _is_over(self) -> bool:
        return self._street.now() >= self._cast.busy_until and self._survivors <= set(self._holders())

    @property
    def _survivors(self) -> set[str]:
        """Everybody but those whom a fault kills for good."""
        lost = [word for fault in self._scenario.faults if is_final(fault) for word in fault.who]
        return {name for name in self._cast.parts if not any(fnmatchcase(name, word) for word in lost)}


def _multiaddr(house: House) -> str:
    return f"/ip4/{house.address}/tcp/{PORT}"


def toml_of(table: Mapping[str, Any], name: str = "") -> str:
    """A table of numbers and tables as TOML."""
    plain = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    lines = [f"[{name}]"] if plain and name else []
    lines += [f"{key} = {value!r}" for key, value in plain.items()]
    inner = [
        toml_of(value, f"{name}.{key}" if name else key)
        for key, value in table.items()
        if isinstance(value, Mapping)
    ]
    return "\n".join([*lines, *inner]) + "\n"
