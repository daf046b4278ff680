"""How much work is asked for, by whom it may be said, and whose turn it is."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, strategies as st
from roles.protocol.core.demand import (
    UNIT,
    Demand,
    HeardShares,
    decode_demand_untrusted,
    is_within,
    lot_of,
    share_for,
)
from roles.protocol.demand import HeardDemand

from p2p.errors import BadMessage
from p2p.gossip import Validity
from p2p.identity import KeyPair, PeerId
from p2p.shardcast.manifest import PolicyVersion
from p2p.wire import pack
from roles.run import sign_run
from roles.trainer.core.demand import DemandRule
from tests.unit.test_run_file import TERMS

RUN = bytes(32)
BATCH, SUBMISSION = 48, 4


def _peer(number: int) -> PeerId:
    return KeyPair(bytes([number]) * 32).peer_id


def demand(version: int, number: int, share: int) -> Demand:
    return Demand(PolicyVersion(version), number, share, 10)


def policy_of(version: int) -> bytes:
    return version.to_bytes(32, "big")


@given(st.integers(1, 500), st.lists(st.integers(0, UNIT - 1), min_size=1, unique=True))
def test_a_share_asks_for_exactly_the_places_that_are_wanted(
    places: int, lots: list[int]
) -> None:
    share = share_for(places, lots)
    asked = sum(is_within(share, lot, index) for lot in lots for index in range(places + 1))
    assert asked == places


@pytest.mark.parametrize(
    "numbers", [[1, 1, 2**63, 1], [1, 1, -1, 1], [2**32, 1, 1, 1], [1, 2**63, 1, 1]]
)
def test_a_demand_beyond_all_bounds_is_no_message(numbers: list[int]) -> None:
    with pytest.raises(BadMessage):
        decode_demand_untrusted(pack(numbers))


def test_only_the_runs_trainer_is_heard() -> None:
    """Another peer's word, however new, changes nothing, and is not passed on; it is not
    rejected either, since a later edition may name it."""
    trainer, other = _peer(1), _peer(2)
    judges: list[Any] = []
    run = sign_run(replace(TERMS, trainers=(trainer,)), KeyPair(b"o" * 32))
    gossip = SimpleNamespace(subscribe=lambda _, judge, __: judges.append(judge))
    world = SimpleNamespace(now=lambda: 0.0)
    node = SimpleNamespace(run=run, gossip=gossip, world=world)
    heard = HeardDemand(cast(Any, node))
    [judge] = judges
    assert judge(other, demand(1, 9, 0).to_bytes()) is Validity.IGNORE
    assert heard.shares.newest is None
    assert judge(trainer, demand(1, 5, UNIT).to_bytes()) is Validity.ACCEPT
    assert judge(trainer, demand(1, 4, 0).to_bytes()) is Validity.IGNORE  # a recording
    assert heard.shares.newest == demand(1, 5, UNIT)


def test_work_beyond_a_share_is_not_asked_for_and_what_was_begun_is_taken() -> None:
    """A share may shrink while a worker draws; what it began when it was asked is judged."""
    worker = _peer(3)
    shares, version = HeardShares(RUN), PolicyVersion(3)
    asked = lambda index: shares.asks_for(worker, version, policy_of(3), index)  # noqa: E731
    assert asked(0) is None
    lot = lot_of(RUN, worker, policy_of(3))
    shares.hear(demand(3, 1, UNIT + lot + 1))
    assert [asked(index) for index in range(4)] == [True, True, False, False]
    shares.hear(demand(3, 2, 0))
    assert asked(0) is False
    commitments = [
        SimpleNamespace(version=version, node=worker, policy=policy_of(3), index=index)
        for index in range(4)
    ]
    taken = [shares.asked_for(cast(Any, one)) for one in commitments]
    assert taken == [True, True, False, False]


def steps_until_satisfied(honest: int, minted: int, policies: int = 40) -> list[int]:
    """Submissions that came under each policy, where the ``minted`` take their share of lots
    and bring nothing. One policy is a minute, and work arrives in half of it."""
    rule, came = DemandRule(BATCH, SUBMISSION, 2), []
    pool, now = 0, 0.0
    names = honest + minted
    for version in map(PolicyVersion, range(policies)):
        rule.publish(version, names, now, waited=0.0 if pool >= BATCH else 30.0, has_lost=False)
        pool -= BATCH if pool >= BATCH else 0
        places = rule.places(version, pool, names, now, is_waiting=False, is_new=True)
        arrived = min(places * honest // names, honest * 4)
        now += 30.0
        for _ in range(arrived):
            rule.arrive(version, SUBMISSION, now)
        pool += SUBMISSION * arrived
        came.append(arrived)
        now += 30.0
    return came


def test_what_is_ordered_is_what_the_steps_need() -> None:
    """Every worker made all it could, whether it was wanted or not: eight times the batch,
    of which 72 % went stale."""
    came = steps_until_satisfied(24, 0)[10:]
    each = BATCH / SUBMISSION
    assert sum(came) / len(came) == pytest.approx(each, rel=0.1)


def test_a_hundred_minted_names_take_the_demand_away_for_a_few_policies_only() -> None:
    came = steps_until_satisfied(24, 100)
    each = BATCH / SUBMISSION
    late = came[12:]
    assert sum(late) / len(late) >= 0.9 * each
