"""What peers can make a validator hold is bounded, and told apart by kinds that have an end."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from roles.validator.core.sequence import MAX_MISPLACED, DrawSequences, PlaceState
from roles.validator.judge import GAP, Judge
from roles.validator.reception import Reception

from p2p.errors import ConfigError
from p2p.identity import KeyPair
from p2p.ledger import open_ledger
from p2p.machine import open_world
from p2p.node.node import Node
from p2p.node.tables import read_table
from p2p.shardcast.manifest import PolicyVersion
from p2p.wire import KI
from proofs.checks import Verdict
from proofs.toploc import proof_size
from roles.protocol.core.assignment import REORDER_WINDOW, validator_of
from roles.protocol.core.groups import (
    Commitment,
    SignedVerdict,
)
from roles.protocol.core.statements import VERDICT_KIND
from roles.protocol.stats import Records, ScoringStats
from roles.rl.recipe import Recipe
from roles.run import Run, sign_run
from roles.shared.reasons import MAX_REASONS, OTHER
from roles.shared.seats import Seats
from roles.shared.sizes import MAX_SUBMISSION, WorkSize
from roles.trainer import TrainerConfig
from roles.validator.session import ValidatorSession
from tests.unit.test_run_file import OWNER, TERMS

NODE = KeyPair(b"n" * 32).peer_id
OTHER_NODE = KeyPair(b"m" * 32).peer_id
V1, V2 = PolicyVersion(1), PolicyVersion(2)


def verdict(kind: Verdict, reason: str = "", node: bytes = b"n") -> SignedVerdict:
    peer = KeyPair(node * 32).peer_id
    commitment = Commitment(bytes(32), peer, V1, bytes(32), 0, bytes(32))
    return SignedVerdict(peer, commitment, kind, reason, 0.0, 0.0, ())


def test_places_far_ahead_are_not_kept_and_not_counted_as_left_out() -> None:
    book = DrawSequences()
    for index in range(2**32 - 100, 2**32):
        assert book.judge(NODE, V1, index) is PlaceState.GAP
        book.fill(NODE, V1, index, b"")
    assert book.judge(NODE, V1, 0) is PlaceState.FRESH
    assert book.forget_below(V2) == 0


def test_a_replay_leaves_no_trace_but_a_count() -> None:
    book = DrawSequences()
    for index in range(5):
        book.fill(NODE, V1, index, b"")
    book.fill(NODE, V1, 0, b"again")
    assert book.judge(NODE, V1, 5) is PlaceState.FRESH
    assert book.forget_below(V2) == 0


def test_who_keeps_sending_out_of_place_gets_no_more_verdicts() -> None:
    book = DrawSequences()
    for number in range(MAX_MISPLACED):
        assert not book.has_strayed(NODE, V1)
        book.fill(NODE, V1, REORDER_WINDOW + 1 + number, b"")
    assert book.has_strayed(NODE, V1)
    assert not book.has_strayed(NODE, V2)
    assert not book.has_strayed(OTHER_NODE, V1)


async def test_after_a_restart_a_place_that_was_nobodys_fault_is_no_gap(tmp_path: Path) -> None:
    judge = KeyPair(b"j" * 32)
    # 3 was `INCONCLUSIVE`
    places = [(index, Verdict.ACCEPTED, "") for index in range(30) if index != 3]
    places.append((1000, Verdict.REJECTED, GAP))
    async with open_world(tmp_path, key=judge) as world, open_ledger(world, "ledger") as ledger:
        for index, kind, reason in places:
            commitment = Commitment(bytes(32), NODE, V1, bytes(32), index, bytes(32))
            judged = SignedVerdict(
                judge.peer_id, commitment, kind, reason, 0.0, 0.0, ()
            ).signed(judge)
            await ledger.append(VERDICT_KIND, judged.to_bytes())
        node, nothing = cast(Node, SimpleNamespace(world=world)), cast(Any, None)
        stats = ScoringStats()
        judge_of_places = Judge(node, nothing, nothing, stats)
        run = sign_run(TERMS, OWNER)
        session = ValidatorSession(node, run, judge_of_places, ledger, nothing, stats)
        await session.recall()
    book = judge_of_places._sequences
    assert book.judge(NODE, V1, 30) is PlaceState.FRESH
    assert book.judge(NODE, V1, 29) is book.judge(NODE, V1, 3) is PlaceState.REPLAYED
    assert book.judge(NODE, V1, 1000) is PlaceState.GAP
    assert book._seen[V1, NODE].misplaced == 1


async def test_a_submission_of_a_stranger_is_not_read() -> None:
    class Heavy:
        peer = OTHER_NODE
        said = b""

        async def receive_some(self, max_bytes: int | None = None) -> bytes:
            raise AssertionError("a byte of it was asked for")

        async def send_all(self, data: bytes) -> None:
            self.said += data

    stream = Heavy()
    book = SimpleNamespace(why_not=lambda *_: "it may not generate in this run")
    node: Any = SimpleNamespace(may=lambda *_: False, world=None, book=book)
    standing: Any = SimpleNamespace(why_not="")
    nothing: Any = None
    stats = ScoringStats()
    judge = Judge(node, nothing, nothing, stats)
    reception = Reception(node, judge, nothing, nothing, standing, stats, lambda: None)
    await reception.serve(cast(Any, stream))
    assert b"may not generate" in stream.said


def test_what_a_run_lets_a_submission_hold_is_what_its_recipe_needs() -> None:
    """The demo's are a four-hundredth of what any may have: so much less can be held by
    strangers that each begin one."""
    size = WorkSize(groups=8, completions=16, tokens=12, vocabulary=50, proof_values=62)
    assert size.max_submission < 22 * KI < MAX_SUBMISSION / 300
    group = 16 * (8 + 12 * 2 + proof_size(12, 64, 62))
    assert 8 * group < size.max_submission < 8 * group + 2 * KI


def test_reasons_that_quote_the_sender_have_an_end() -> None:
    records = Records()
    for number in range(10 * MAX_REASONS):
        records.count(verdict(Verdict.REJECTED, f"not msgpack: at {number}"))
    reasons = records.of(NODE).reasons
    assert len(reasons) == MAX_REASONS + 1
    assert sum(reasons.values()) == records.rejected == 10 * MAX_REASONS
    assert reasons[OTHER] == 9 * MAX_REASONS


def test_identities_have_an_end_and_totals_stay() -> None:
    records = Records(max_nodes=3)
    for node in (b"a", b"b", b"c", b"a", b"d"):
        records.count(verdict(Verdict.ACCEPTED, node=node))
    assert len(records) == 3
    assert records.accepted == 5
    assert records.of(KeyPair(b"a" * 32).peer_id).accepted == 2
    assert records.of(KeyPair(b"b" * 32).peer_id).accepted == 0


def test_an_inconclusive_verdict_is_no_mark_against_anybody() -> None:
    records = Records()
    records.count(verdict(Verdict.INCONCLUSIVE, "the policy is gone"))
    assert (records.accepted, records.rejected, records.of(NODE).reasons) == (0, 0, {})


def test_seats_are_bounded_by_peer_and_in_all_and_come_back() -> None:
    seats = Seats(per_peer=2, in_all=3)
    with seats.seat(NODE) as first, seats.seat(NODE) as second, seats.seat(NODE) as third:
        assert (first, second, third) == (True, True, False)
        with seats.seat(OTHER_NODE) as theirs, seats.seat(OTHER_NODE) as one_too_many:
            assert (theirs, one_too_many) == (True, False)
    with pytest.raises(ZeroDivisionError), seats.seat(NODE):
        raise ZeroDivisionError
    with seats.seat(NODE) as first, seats.seat(NODE) as second:
        assert (first, second) == (True, True)


def test_each_node_has_one_judge_under_a_policy_and_all_judges_have_work() -> None:
    judges = tuple(KeyPair(bytes([number]) * 32).peer_id for number in range(3))
    run: Run = sign_run(replace(TERMS, validators=judges), OWNER)
    counts = dict.fromkeys(judges, 0)
    for version in range(300):
        counts[validator_of(run, NODE, PolicyVersion(version))] += 1
    assert min(counts.values()) > 60
    assert validator_of(run, NODE, V1) == validator_of(run, NODE, V1)


@pytest.mark.parametrize(
    "change",
    [
        {"groups": 0},
        {"submission": 0},
        {"submission": 257},
        {"submission": 256, "group_size": 64},
        {"lag": -1},
    ],
)
def test_recipes_that_no_node_could_work_by_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be from|at most"):
        replace(Recipe(), **change)


def test_a_pool_smaller_than_a_step_is_refused() -> None:
    with pytest.raises(ConfigError, match="pool_steps"):
        read_table(TrainerConfig, {"pool_steps": 0.5}, "[role.trainer]")
    with pytest.raises(ConfigError, match="not a number"):
        read_table(TrainerConfig, {"pool_steps": math.nan}, "[role.trainer]")


def test_a_store_too_small_for_the_runs_lag_is_named() -> None:
    run = sign_run(replace(TERMS, recipe=replace(TERMS.recipe, lag=4)), OWNER)
    run.check_store(5, 2**40)
    with pytest.raises(ConfigError, match=r"keep_versions in .shardcast. to at least 5"):
        run.check_store(4, 2**40)
    size = 4 * run.terms.model.shape.parameters
    run.check_store(5, 5 * size)
    with pytest.raises(ConfigError, match=r"disk in \[share\]"):
        run.check_store(5, 5 * size - 1)


def test_a_job_that_a_node_cannot_do_is_named_before_it_waits_for_ever() -> None:
    trainer, judge, worker = (KeyPair(bytes([number]) * 32).peer_id for number in (1, 2, 3))
    run = sign_run(replace(TERMS, trainers=(trainer,), validators=(judge,)), OWNER)
    for peer, job in (
        (trainer, "trainer"),
        (judge, "validator"),
        (worker, "inference"),
        (trainer, "inference"),
    ):
        run.check_job(peer, job)
    for peer, job in (
        (worker, "trainer"),
        (worker, "validator"),
        (trainer, "validator"),
        (judge, "inference"),
    ):
        with pytest.raises(ConfigError, match="--data"):
            run.check_job(peer, job)
    both = sign_run(replace(TERMS, trainers=(trainer,), validators=(trainer,)), OWNER)
    with pytest.raises(ConfigError, match="cannot hand work to itself"):
        both.check_job(trainer, "validator")
