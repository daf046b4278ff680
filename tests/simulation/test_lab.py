"""The lab: one broadcast over virtual streams, exact sharing, and real, shaped links."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from sim.net.link import LinkSpec
from sim.studies.lab.link_model.maxmin import broadcast_times
from sim.studies.lab.link_model.real import real_times
from sim.studies.lab.link_model.simulated import simulated_times
from sim.studies.lab.link_model.topologies import TOPOLOGIES, Topology, TreeMember
from sim.studies.lab.namespaces import reason_to_skip
from tests.sweeps import swept

RATE = 10.0
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
@pytest.mark.parametrize("topology", swept(TOPOLOGIES, 3), ids=lambda topology: topology.name)
def test_simulated_links_are_as_wide_as_they_should_be(topology: Topology, level: int) -> None:
    """No faster than exact sharing, and 15 % slower where all uplinks are full."""
    simulated, exact = simulated_times(topology, level), exact_times(topology)
    assert list(simulated) == [
        name for name, parent in topology.parents.items() if parent is not None
    ]
    assert 0.99 < max(simulated.values()) / max(exact.values()) < 1.15


@pytest.mark.deep
@pytest.mark.skipif(reason_to_skip() is not None, reason=reason_to_skip() or "")
async def test_real_lines_are_as_wide_as_they_should_be() -> None:
    """A burst of 32 KiB is free."""
    exact = exact_times(CHAIN)
    for name, seconds in (await real_times(CHAIN)).items():
        assert 0.93 * exact[name] < seconds < 2 * exact[name]
