"""The laws of max-min fairness, and broadcasts whose times are known by hand."""

from __future__ import annotations

import math

from hypothesis import given, strategies as st

from sim.net.link import PAYLOAD_SHARE, LinkSpec
from sim.studies.lab.link_model.maxmin import Flow, broadcast_times, fair_rates

NAMES = "abcdef"
CHUNK = 256 * 1024

capacities = st.fixed_dictionaries({name: st.integers(1, 100).map(float) for name in NAMES})
flow = st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES)).filter(
    lambda ends: ends[0] != ends[1]
)
flow_lists = st.lists(flow.map(lambda ends: Flow(*ends)), max_size=12)


def shares(flows: list[Flow], rates: list[float], name: str, side: str) -> list[float]:
    return [
        rate for flow, rate in zip(flows, rates, strict=True) if getattr(flow, side) == name
    ]


@given(flow_lists, capacities, capacities)
def test_no_link_carries_more_than_it_can(
    flows: list[Flow], up: dict[str, float], down: dict[str, float]
) -> None:
    rates = fair_rates(flows, up, down)
    for name in NAMES:
        assert sum(shares(flows, rates, name, "src")) <= up[name] * (1 + 1e-9)
        assert sum(shares(flows, rates, name, "dst")) <= down[name] * (1 + 1e-9)


@given(flow_lists, capacities, capacities)
def test_every_flow_has_a_full_link_on_which_nobody_gets_more(
    flows: list[Flow], up: dict[str, float], down: dict[str, float]
) -> None:
    """The bottleneck condition: it holds for max-min fair rates and for no others."""
    rates = fair_rates(flows, up, down)
    for flow, rate in zip(flows, rates, strict=True):
        links = [
            (up[flow.src], shares(flows, rates, flow.src, "src")),
            (down[flow.dst], shares(flows, rates, flow.dst, "dst")),
        ]
        assert any(
            math.isclose(sum(on_link), capacity, rel_tol=1e-9)
            and rate >= max(on_link) * (1 - 1e-9)
            for capacity, on_link in links
        )


def line(mbit: float) -> LinkSpec:
    return LinkSpec(up=mbit, down=mbit)


def seconds(size: int, mbit: float) -> float:
    return size * 8 / (mbit * 1e6 * PAYLOAD_SHARE)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 100), st.integers(1, 100)), max_size=6)
)
def test_nobody_is_faster_than_its_own_line_or_than_its_parent(
    shape: list[tuple[int, int, int]],
) -> None:
    parents: dict[str, str | None] = {"0": None}
    links = {"0": line(50)}
    for number, (parent, up, down) in enumerate(shape, start=1):
        parents[str(number)] = str(parent % number)
        links[str(number)] = LinkSpec(up=up, down=down)
    times = broadcast_times(parents, links, 4, CHUNK)
    for name, parent in parents.items():
        if parent is not None:
            assert times[name] >= seconds(4 * CHUNK, links[name].down) * (1 - 1e-9)
            assert times[name] > times[parent]
