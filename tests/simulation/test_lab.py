"""The lab: one broadcast over virtual streams, over exact sharing, and over real, shaped
links.
"""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import trio
import trio.testing

from sim.lab.link_model.broadcast import TreeBroadcast
from sim.lab.link_model.maxmin import broadcast_times
from sim.lab.link_model.processes import open_lab
from sim.lab.link_model.simulated import simulated_times
from sim.lab.link_model.topologies import TOPOLOGIES, Topology, TreeMember
from sim.lab.namespaces import LabError, reason_to_skip
from sim.net.link import LinkSpec
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


def test_the_same_seed_gives_the_same_times() -> None:
    assert simulated_times(CHAIN, 2, seed=7) == simulated_times(CHAIN, 2, seed=7)


def test_the_six_topologies_are_the_ones_they_are_called() -> None:
    sizes = {topology.name: len(topology.members) for topology in TOPOLOGIES}
    assert sizes == {
        "one flow": 2, "star of 4": 5, "star, one slow": 5,
        "chain of 5": 5, "binary tree 15": 15, "mixed tree 13": 13,
    }  # fmt: skip


@pytest.mark.parametrize("parents", [{}, {"a": None, "b": None}, {"a": "b", "b": None}])
def test_a_topology_is_one_tree_with_parents_first(parents: dict[str, str | None]) -> None:
    members = tuple(
        TreeMember(name=name, parent=parent, link=LinkSpec(up=1, down=1))
        for name, parent in parents.items()
    )
    with pytest.raises(ValueError, match=r"root|parent"):
        Topology(name="odd", caption="", members=members)


async def test_a_stream_that_ends_early_is_no_broadcast() -> None:
    here, there = trio.testing.memory_stream_pair()
    await there.send_all(bytes(100))
    await there.send_eof()
    broadcast = TreeBroadcast(1, 200, lambda: 0.0)
    with pytest.raises(ExceptionGroup) as failure:
        await broadcast.run(here, [])
    assert failure.group_contains(trio.BrokenResourceError)
    assert broadcast.whole_at is None


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
from sim.lab.link_model.processes import open_lab
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


@pytest.mark.usefixtures("shaped_links")
async def test_an_impossible_line_is_reported_and_leaves_nothing_behind() -> None:
    member = TreeMember(name="root", parent=None, link=LinkSpec(up=math.inf, down=1))
    with pytest.raises(LabError, match="infinite"):
        async with open_lab(Topology(name="odd", caption="", members=(member,))):
            raise AssertionError("there is no such line")


def test_without_the_tools_the_lab_says_which_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.lab.namespaces.TOOLS", ("ip", "no-such-tool"))
    assert "no-such-tool" in (reason_to_skip() or "")
