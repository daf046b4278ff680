"""Whole nodes as processes on the shaped lines of an emulation (L3).

Each machine runs one ``python -m p2p.node``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio

from p2p.concurrency import Notifier
from p2p.errors import ConfigError
from p2p.identity import SEED_BYTES
from sim.errors import LabError
from sim.kernel.keys import KeyRing, derive
from sim.run.scenario import Scenario
from sim.studies.lab.faults import is_final, play_faults
from sim.studies.lab.machines import Emulation, LabMachine
from sim.workloads.nodes.deployment import LINGER, Deployment
from sim.workloads.nodes.metrics import HealthLog, measure
from sim.workloads.participants import ORIGIN

PORT: Final = 4001
"""The port of every machine: each has an address of its own."""
STATUS: Final = 0.5
"""Seconds between two healths of a node."""
START_SECONDS: Final = 60.0
"""Seconds for the nodes to start and find each other, plus `SECONDS_A_NODE` for each."""
SECONDS_A_NODE: Final = 5.0
"""Additional seconds for each node: importing takes a second of CPU, and a busy machine of two
cores gives less than half of one.
"""


class NodeProcesses:
    """All nodes of a run, as processes."""

    def __init__(self, emulation: Emulation, scenario: Scenario) -> None:
        """Prepare the processes of a scenario's nodes.

        Raises:
            ConfigError: The scenario needs what no emulation has.
        """
        self._emulation = emulation
        self._scenario = scenario
        self._deployment = deployment = Deployment(
            scenario, emulation.seed, KeyRing(emulation.seed, hashed=False)
        )
        if any(participant.link.nat for participant in deployment.participants.values()):
            raise ConfigError(f"scenario {scenario.name}: level 3 has no NAT")
        self._logs = {name: HealthLog() for name in deployment.participants}
        self._news = Notifier()

    async def play(self) -> dict[str, float | int | str]:
        """Start all nodes, play until all hold the last policy, or the duration is over, and
        measure.

        Raises `LabError` if the nodes do not come up or one ends unasked.
        """
        deployment, emulation, scenario = self._deployment, self._emulation, self._scenario
        (emulation.folder / "run.shoal").write_bytes(deployment.run.document)
        for name, participant in deployment.participants.items():
            emulation.tell(
                0.0,
                f"laying lines ({len(emulation.machines) + 1} of"
                f" {len(deployment.participants)})",
            )
            await emulation.add(name, participant.link, partial(self._furnish, name))
            (emulation.folder / f"{name}.toml").write_text(
                toml_of(deployment.table(name)), encoding="utf-8"
            )
        zero = await self._start_all()
        emulation.begin(zero)
        for name in self._latecomers():
            emulation.nursery.start_soon(self._start_late, name)
        play_faults(emulation, scenario.faults)
        while emulation.now() < scenario.duration and not self._is_over():
            await self._wait_news()
            emulation.tell(
                max(0.0, emulation.now()),
                f"{len(self._holders())} of {len(deployment.participants)} hold the last",
            )
        await emulation.world.sleep(LINGER)
        for name, sent in (await emulation.sent_bytes()).items():
            self._logs[name].line_bytes = sent
        return measure(
            deployment,
            self._logs,
            [machine.name for machine in emulation.machines.values() if machine.alive],
        )

    def _latecomers(self) -> list[str]:
        return [
            name
            for name, participant in self._deployment.participants.items()
            if participant.joins > 0
        ]

    # Starting

    async def _start_all(self) -> float:
        """Start the nodes that are present from the beginning. Return the wall clock time of
        second 0, once it is known."""
        first = [
            name
            for name, participant in self._deployment.participants.items()
            if participant.joins == 0
        ]
        try:
            with trio.fail_after(START_SECONDS + SECONDS_A_NODE * len(first)):
                for name in first:
                    await self._start(name)
                while (zero := self._logs[ORIGIN].zero) is None:
                    up = sum(log.is_told for log in self._logs.values())
                    self._emulation.tell(0.0, f"starting ({up} of {len(first)} are up)")
                    await self._wait_news()
        except trio.TooSlowError:
            raise LabError(
                f"not all of {len(first)} nodes had joined in time; is the machine busy?"
            ) from None
        return zero

    async def _start_late(self, name: str) -> None:
        await self._emulation.sleep_until(self._deployment.participant(name).joins)
        await self._start(name)

    async def _start(self, name: str) -> None:
        await self._emulation.machines[name].start(
            self._command(name), partial(self._hear, self._logs[name])
        )

    def _command(self, name: str) -> list[str]:
        emulation = self._emulation
        machine = emulation.machines[name]
        command = [
            sys.executable,
            "-m",
            "p2p.node",
            "--json",
            "--status",
            str(STATUS),
            "--die-with-parent",
        ]
        command += [
            "--data",
            str(machine.folder),
            "--config",
            str(emulation.folder / f"{name}.toml"),
        ]
        command += [
            "--run",
            str(emulation.folder / "run.shoal"),
            "--listen",
            _multiaddr(machine),
        ]
        for role in self._deployment.roles(name):
            command += ["--role", role]
        for other in list(emulation.machines.values())[:2]:
            if other is not machine:
                command += [
                    "--bootstrap",
                    f"{_multiaddr(other)}/p2p/{self._deployment.peer(other.name)}",
                ]
        return command

    def _furnish(self, name: str, folder: Path) -> None:
        """Put a node's key, the same on all levels, on its new disk."""
        key = folder / "key"
        key.write_bytes(derive(SEED_BYTES, "key", self._emulation.seed, name))
        key.chmod(0o600)

    # Watching

    def _hear(self, log: HealthLog, report: Mapping[str, Any]) -> None:
        match report.get("event"):
            case "started":
                log.begin_life()
            case None:
                log.hear(report)
        self._news.notify_all()

    async def _wait_news(self) -> None:
        """Return when some node has said something, or when one should have."""
        with trio.move_on_after(STATUS):
            await self._news.wait()

    def _holders(self) -> list[str]:
        machines = self._emulation.machines
        return [
            name
            for name, log in self._logs.items()
            if machines[name].alive and log.newest >= self._deployment.versions
        ]

    def _is_over(self) -> bool:
        return self._emulation.now() >= self._deployment.busy_until and self._survivors <= set(
            self._holders()
        )

    @property
    def _survivors(self) -> set[str]:
        """Return all nodes except those that a fault kills for good."""
        lost = [
            word for fault in self._scenario.faults if is_final(fault) for word in fault.who
        ]
        return {
            name
            for name in self._deployment.participants
            if not any(fnmatchcase(name, word) for word in lost)
        }


def _multiaddr(machine: LabMachine) -> str:
    return f"/ip4/{machine.address}/tcp/{PORT}"


def toml_of(table: Mapping[str, Any], name: str = "") -> str:
    """Return a table of numbers and tables as TOML."""
    plain = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    lines = [f"[{name}]"] if plain and name else []
    lines += [f"{key} = {value!r}" for key, value in plain.items()]
    inner = [
        toml_of(value, f"{name}.{key}" if name else key)
        for key, value in table.items()
        if isinstance(value, Mapping)
    ]
    return "\n".join([*lines, *inner]) + "\n"
