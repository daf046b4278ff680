"""The link model against exact max-min sharing, on the six trees that were measured on real
links.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import pytest

from sim.lab.link_model.maxmin import broadcast_times
from sim.lab.link_model.simulated import simulated_times
from sim.lab.link_model.topologies import TOPOLOGIES, Topology
from tests.sweeps import swept


@pytest.fixture(autouse=True)
def even_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact sharing is even; streams as uneven as TCP's are held against real links (bench
    links).
    """
    monkeypatch.setattr("sim.net.stream.WINDOW_PIECES", (4,))


def exact_times(topology: Topology) -> Mapping[str, float]:
    return broadcast_times(
        topology.parents, topology.links, topology.chunks, topology.chunk_bytes
    )


@pytest.mark.parametrize("topology", swept(TOPOLOGIES, 2), ids=lambda topology: topology.name)
def test_the_last_node_is_done_when_exact_sharing_says(topology: Topology) -> None:
    exact, ours = exact_times(topology), simulated_times(topology, level=1)
    assert max(ours.values()) == pytest.approx(max(exact.values()), rel=0.08)


@pytest.mark.deep
def test_over_all_topologies_nodes_are_done_when_exact_sharing_says() -> None:
    errors = []
    for topology in TOPOLOGIES:
        exact, ours = exact_times(topology), simulated_times(topology, level=1)
        errors.append(statistics.fmean(abs(ours[name] / exact[name] - 1) for name in ours))
    assert statistics.fmean(errors) < 0.03
