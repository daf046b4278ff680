"""The lab: one broadcast over virtual streams, over exact sharing, and over real, shaped
links.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from sim.errors import LabError
from sim.net.link import LinkSpec
from sim.studies.lab.link_model.maxmin import broadcast_times
from sim.studies.lab.link_model.processes import open_lab
from sim.studies.lab.link_model.simulated import simulated_times
from sim.studies.lab.link_model.topologies import TOPOLOGIES, Topology, TreeMember
from sim.studies.lab.namespaces import reason_to_skip
from tests.sweeps import swept

RATE = 10.0
ANY = ""
"""Whatever congestion control this machine has."""
CHAIN = Topology(
    name="chain of 3",
    caption="One relay; small enough for a test suite.",
    members=(
        TreeMember(name="root", parent=None, link=LinkSpec(up=RATE, down=RATE)),
        TreeMember(name="relay", parent="root", link=LinkSpec(up=RATE, down=RATE)),
        TreeMember(name="leaf", parent="relay", link=LinkSpec(up=RATE, down=RATE)),
    ),
    chunks=4,
)


def exact_times(topology: Topology) -> Mapping[str, float]:
    return broadcast_times(
        topology.parents, topology.links, topology.chunks, topology.chunk_bytes
    )


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("topology", swept(TOPOLOGIES, 2), ids=lambda topology: topology.name)
def test_simulated_links_are_as_wide_as_they_should_be(topology: Topology, level: int) -> None:
    """No faster than exact sharing, and slower by what real links are: 15 % where all uplinks
    are full.
    """
    simulated, exact = simulated_times(topology, level), exact_times(topology)
    assert list(simulated) == [
        name for name, parent in topology.parents.items() if parent is not None
    ]
    assert 0.99 < max(simulated.values()) / max(exact.values()) < 1.15


@pytest.fixture(scope="module")
def shaped_links() -> None:
    reason = reason_to_skip()
    if reason is not None:
        pytest.skip(f"level L3, real shaped links: {reason}")


def interfaces() -> list[str]:
    return sorted(path.name for path in Path("/sys/class/net").iterdir())


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@pytest.mark.deep
@pytest.mark.usefixtures("shaped_links")
async def test_real_links_are_as_wide_as_they_should_be() -> None:
    """Never faster than exact sharing allows (a burst of 32 KiB is free), and not far behind
    it.
    """
    before, exact = interfaces(), exact_times(CHAIN)
    async with open_lab(CHAIN, ANY) as lab:
        assert interfaces() == before
        times = await lab.times()
        pids = [machine.pid for machine in lab.machines.values()]
    for name, seconds in times.items():
        assert 0.93 * exact[name] < seconds < 2 * exact[name]
    assert all(map(is_gone, pids))
    assert interfaces() == before


@pytest.mark.deep
@pytest.mark.usefixtures("shaped_links")
async def test_a_machine_that_dies_ends_the_run() -> None:
    async with open_lab(CHAIN, ANY) as lab:
        os.kill(lab.machines["leaf"].pid, signal.SIGKILL)
        with pytest.raises(LabError, match=r"gone|ended"):
            await lab.times()
        pids = [machine.pid for machine in lab.machines.values()]
    assert all(map(is_gone, pids))


ORPHANED = """
import sys, trio
from sim.studies.lab.link_model.processes import open_lab
from tests.simulation.test_lab import ANY, CHAIN

async def main():
    async with open_lab(CHAIN, ANY) as lab:
        print(*(machine.pid for machine in lab.machines.values()), flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


@pytest.mark.usefixtures("shaped_links")
def test_nothing_outlives_a_lab_whose_owner_is_killed() -> None:
    command = [sys.executable, "-c", ORPHANED]
    with subprocess.Popen(
        command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None
        machines = [os.pidfd_open(int(pid)) for pid in owner.stdout.readline().split()]
        owner.kill()
    assert len(machines) == len(CHAIN.members)
    for machine in machines:
        assert select.select([machine], [], [], 10)[0]  # a process that has ended is readable
        os.close(machine)
