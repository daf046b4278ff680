"""Appeals as a weapon: against the trainer's engine, against those that appeal honestly, and
against honest validators."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from p2p.identity import KeyPair
from p2p.shardcast.manifest import PolicyVersion
from proofs.checks import Reason, Verdict
from roles.protocol.core.findings import Weight
from roles.protocol.core.groups import (
    Commitment,
    SignedVerdict,
    Submission,
    content_digest,
)
from roles.protocol.core.refusals import Appeal, Complaint, Ruled, accusation, encode_asked
from roles.run.core.file import sign_run
from roles.shared import seats
from roles.trainer import appeals
from roles.trainer.appeals import MAX_WAITING, NEWCOMERS_AT_ONCE, NEWCOMERS_WAITING
from roles.trainer.audit import SETTLING
from tests.trainer_bench import JUDGE, OWNER, POLICY, VERSION, WORKER
from tests.unit.test_appeals import DISTANCE, OTHER, Court, open_court

CROWD = [KeyPair(bytes([number + 60]) * 32) for number in range(64)]
"""Names without accepted work."""


def about_nothing(court: Court, worker: KeyPair) -> bytes:
    """An appeal of a name that costs a key, with a verdict of a validator that is its
    friend."""
    content = b"\x90"
    commitment = Commitment(
        court.bench.run.id, worker.peer_id, VERSION, POLICY, 0, content_digest(content)
    )
    verdict = SignedVerdict(
        JUDGE.peer_id, commitment, Verdict.REJECTED, DISTANCE, 1.0, 1e-4, ()
    )
    submission = Submission.sign(commitment, content, worker)
    return encode_asked(Appeal(verdict.signed(JUDGE), submission))


class Held:
    """The trainer's engine, which is let go on by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.tried = trio.Event(), list[Any]()
        real = appeals.open_refused

        async def held(run: Any, environment: Any, submission: Submission) -> Any:
            self.tried.append(submission.commitment.node)
            await self.go.wait()
            return await real(run, environment, submission)

        monkeypatch.setattr(appeals, "open_refused", held)


def workers_only(court: Court) -> None:
    """Of the names here only `WORKER` has had work accepted."""
    court.desk._has_worked = lambda peer: peer == WORKER.peer_id


async def test_a_storm_of_fresh_names_keeps_no_worker_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen names that cost a key each shut the desk: no liar was convicted any more."""
    engine = Held(monkeypatch)
    async with open_court(tmp_path) as court:
        workers_only(court)
        honest = await court.refused(0)
        said: dict[Any, Ruled] = {}

        async def ask(worker: KeyPair, asked: bytes) -> None:
            said[worker.peer_id], _ = await court.desk.hear(worker.peer_id, asked)

        async with trio.open_nursery() as nursery:
            for one in CROWD[: 2 * MAX_WAITING]:
                nursery.start_soon(ask, one, about_nothing(court, one))
            while len(said) < 2 * MAX_WAITING - NEWCOMERS_WAITING:
                await trio.lowlevel.checkpoint()
            assert set(said.values()) == {Ruled.LATER}
            nursery.start_soon(ask, WORKER, encode_asked(honest))
            while len(court.desk._waiting) <= NEWCOMERS_WAITING:
                await trio.lowlevel.checkpoint()
            engine.go.set()
        assert said[WORKER.peer_id] is Ruled.UPHELD
        assert engine.tried.index(WORKER.peer_id) == 1  # behind the one that was being tried
        assert JUDGE.peer_id in court.liars


async def test_names_without_accepted_work_take_a_pass_a_minute_of_the_engine(
    tmp_path: Path,
) -> None:
    """Each fresh name had four an hour."""
    async with open_court(tmp_path) as court:
        workers_only(court)
        ruled = [
            (await court.desk.hear(one.peer_id, about_nothing(court, one)))[0] for one in CROWD
        ]
        assert ruled.count(Ruled.IN_VAIN) == NEWCOMERS_AT_ONCE
        assert ruled.count(Ruled.LATER) == len(CROWD) - NEWCOMERS_AT_ONCE


class Silent:
    """A stream on which nothing comes."""

    def __init__(self, peer: Any) -> None:
        self.peer, self.sent = peer, b""

    async def receive_some(self, _: int | None = None) -> bytes:
        await trio.sleep_forever()
        raise AssertionError

    async def send_all(self, data: bytes) -> None:
        self.sent += data


async def test_silent_streams_of_fresh_names_hold_no_worker_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen names with eight streams each held all seats for 90 s, again and again."""
    async with open_court(tmp_path) as court:
        workers_only(court)
        desk: Any = court.desk
        court.bench.admitted += [one.peer_id for one in CROWD]
        async with trio.open_nursery() as nursery:
            for one in CROWD[: seats.IN_ALL // seats.PER_PEER]:
                for _ in range(seats.PER_PEER):
                    nursery.start_soon(desk.serve, Silent(one.peer_id))
            await trio.testing.wait_all_tasks_blocked()
            assert len(desk._seats) == seats.STRANGERS
            mine = Silent(WORKER.peer_id)
            nursery.start_soon(desk.serve, mine)
            await trio.testing.wait_all_tasks_blocked()
            assert mine.sent == b""  # it is read
            nursery.cancel_scope.cancel()


async def test_who_lacks_the_work_stamp_of_the_run_is_not_read(tmp_path: Path) -> None:
    async with open_court(tmp_path) as court:
        desk: Any = court.desk
        desk._node.lacks_work = lambda _: True
        stream = Silent(WORKER.peer_id)
        await desk.serve(stream)
        assert b"work stamp" in stream.sent


async def test_work_that_a_later_edition_allows_convicts_nobody_of_the_one_before(
    tmp_path: Path,
) -> None:
    """A worker kept a rejection, honest by the limits of then, until the owner had loosened
    them and ten minutes were over: its validator was refused for good."""
    async with open_court(tmp_path) as court:
        bench = court.bench
        strict = bench.run.terms.limits
        appeal = await court.refused(0, times=20.0)
        loose = replace(strict, draw_distance=100 * strict.draw_distance)
        newer = sign_run(replace(bench.run.terms, epoch=2, limits=loose), OWNER)
        bench.standing.run = court.desk._node.run = newer
        bench.auditor.may_accuse()
        bench.auditor._accuses_from -= SETTLING
        assert bench.auditor.may_accuse()
        assert await court.hear(appeal) is Ruled.UPHELD
        assert court.liars == {}
        # what no limits of then or now allow a validator to say convicts as before
        assert await court.hear(await court.refused(1, times=5000.0)) is Ruled.UPHELD
        assert JUDGE.peer_id in court.liars


def test_a_shape_of_another_edition_accuses_nobody(tmp_path: Path) -> None:
    run = SimpleNamespace(group_size=4, max_new_tokens=64, vocabulary=100)
    shape: Any = run
    limits: Any = None
    for reason, limit, weight in (
        (Reason.LENGTH, 64.0, Weight.LIE),
        (Reason.LENGTH, 32.0, Weight.BORDERLINE),
        (Reason.GROUP_SIZE, 4.0, Weight.LIE),
        (Reason.GROUP_SIZE, 8.0, Weight.BORDERLINE),
        (Reason.TOKEN, 100.0, Weight.LIE),
        (Reason.AFTER_END, 3.0, Weight.LIE),
    ):
        verdict: Any = SimpleNamespace(reason=reason.value, statistic=9.0, limit=limit)
        assert accusation(verdict, limits, shape).weight is weight


@pytest.mark.parametrize("version", [10**6, 1])
async def test_complaints_are_of_work_that_can_be_used(tmp_path: Path, version: int) -> None:
    """A worker named the version, of a million, whose judge was the validator that it did not
    like: two of them could pass over any validator that had little to do."""
    async with open_court(tmp_path) as court:
        court.desk._node.shardcast.newest = PolicyVersion(2)
        lag = court.bench.run.terms.recipe.lag
        commitment = Commitment(
            court.bench.run.id, OTHER.peer_id, PolicyVersion(version), POLICY, 0, bytes(32)
        )
        asked = encode_asked(Complaint(JUDGE.peer_id, commitment))
        ruled, _ = await court.desk.hear(OTHER.peer_id, asked)
        is_of_now = 0 <= 2 - version <= lag
        assert (ruled is Ruled.HEARD) is is_of_now
        assert is_of_now is (version == 1)
