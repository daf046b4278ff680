"""The dictionary that evicts its oldest entry, the token bucket and the rate limit."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from p2p.bounded import BoundedDict, KeyedQuotas, RateLimit, TokenBucket
from p2p.identity import PeerId


def test_there_is_no_way_around_the_limit() -> None:
    table: BoundedDict[str, int] = BoundedDict(1)
    with pytest.raises(TypeError):
        table.update({"a": 1, "b": 2})
    with pytest.raises(TypeError):
        table.setdefault("a", 1)
    assert table == {}


@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.booleans(), st.integers(0, 9))),
)
def test_the_limit_holds_and_the_last_key_is_there(
    limit: int, steps: list[tuple[bool, int]]
) -> None:
    table: BoundedDict[int, int] = BoundedDict(limit)
    for renewed, key in steps:
        if renewed:
            table.renew(key, key)
        else:
            table[key] = key
        assert key in table
        assert len(table) <= limit


def test_a_bucket_fills_by_its_rate_up_to_its_capacity() -> None:
    bucket = TokenBucket(200.0, now=10.0)
    bucket.take(230.0)
    assert bucket.level == -30.0
    assert bucket.refill(11.5, 20.0) == 30.0
    assert bucket.level == 0.0
    assert bucket.refill(100.0, 20.0) == 88.5 * 20
    assert bucket.level == 200.0


def test_a_bucket_may_begin_lower_and_a_clock_set_back_fills_nothing() -> None:
    bucket = TokenBucket(200.0, now=10.0, level=5.0)
    assert bucket.refill(9.0, 20.0) == 0.0
    assert bucket.level == 5.0
    assert bucket.refill(10.0, 20.0) == 20.0
    assert bucket.level == 25.0


def test_a_rate_limit_refuses_and_does_not_charge_what_it_refuses() -> None:
    limit = RateLimit(20.0, 200.0)
    assert limit.allows(200.0, 10.0)
    assert not limit.allows(1.0, 10.0)
    assert not limit.allows(1.0, 10.04)
    assert limit.allows(1.0, 10.05)
    assert limit.available(1000.0) == 200.0


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 3))))
def test_a_table_of_rate_limits_has_the_law_of_one(steps: list[tuple[int, int]]) -> None:
    """Times and rates are powers of two, so that both forms count without rounding."""
    peer, now = PeerId.from_public_key(bytes(32)), 0.0
    one, table = RateLimit(0.5, 4.0), KeyedQuotas(0.5, 4.0)
    for quarters, amount in steps:
        now += quarters / 4
        assert one.allows(amount, now) == table.take(peer, now, amount)
