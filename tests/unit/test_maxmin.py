"""The laws of max-min fairness, and broadcasts whose times are known by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings, strategies as st

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


def test_what_a_slow_receiver_leaves_is_shared_by_the_others() -> None:
    flows = [Flow("a", "b"), Flow("a", "c"), Flow("a", "d")]
    down = {"b": 1.0, "c": 100.0, "d": 100.0}
    assert fair_rates(flows, {"a": 10.0}, down) == [1.0, 4.5, 4.5]


def test_without_flows_there_are_no_rates() -> None:
    assert fair_rates([], {}, {}) == []


def line(mbit: float) -> LinkSpec:
    return LinkSpec(up=mbit, down=mbit)


def seconds(size: int, mbit: float) -> float:
    return size * 8 / (mbit * 1e6 * PAYLOAD_SHARE)


def test_one_flow_takes_its_bytes_over_the_narrower_end() -> None:
    links = {"a": line(40), "b": line(10)}
    times = broadcast_times({"a": None, "b": "a"}, links, 8, CHUNK)
    assert times == pytest.approx({"a": 0.0, "b": seconds(8 * CHUNK, 10)})


def test_each_hop_of_a_chain_adds_one_chunk() -> None:
    names = ["a", "b", "c", "d"]
    parents = dict(zip(names, [None, *names], strict=False))
    times = broadcast_times(parents, dict.fromkeys(names, line(10)), 8, CHUNK)
    assert [times[name] for name in names[1:]] == pytest.approx(
        [seconds((8 + hop) * CHUNK, 10) for hop in range(3)]
    )


def test_receivers_that_are_done_leave_their_share_to_the_rest() -> None:
    """Two receivers share 10 Mbit/s; the narrow one takes 2 of it, to the end of the other and
    beyond.
    """
    links = {"root": line(10), "wide": line(100), "narrow": line(2)}
    times = broadcast_times({"root": None, "wide": "root", "narrow": "root"}, links, 8, CHUNK)
    assert times["wide"] == pytest.approx(seconds(8 * CHUNK, 8))
    assert times["narrow"] == pytest.approx(seconds(8 * CHUNK, 2))


@settings(max_examples=30)
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
