"""Appeals of workers: a validator that rejects honest work is convicted by its own signature,
and no honest one by numerics near a limit, or by a worker that lies."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from p2p.errors import BadMessage
from p2p.identity import KeyPair, PeerId
from p2p.shardcast.manifest import PolicyVersion
from proofs.checks import Reason, Verdict
from roles.protocol.away import SETTLING, HeardAway
from roles.protocol.core.assignment import validator_among
from roles.protocol.core.away import Away
from roles.protocol.core.findings import (
    STRIKES,
    WINDOW,
    Acceptance,
    Finding,
    Weight,
    decode_lie_untrusted,
    open_lie,
    worst,
)
from roles.protocol.core.groups import LIED, Receipt, SignedVerdict
from roles.protocol.core.refusals import (
    REFUSAL_KIND,
    REFUSALS,
    Appeal,
    Asked,
    Complaint,
    Forewarning,
    Ruled,
    decode_refusal_untrusted,
    encode_asked,
    finding_of,
    is_repeatable,
    open_refusal,
)
from roles.protocol.core.statements import LIE_KIND
from roles.protocol.replay import examine, open_refused, violated
from roles.run.core.proposal import decode_proposal_untrusted
from roles.shared.durable import Durable
from roles.trainer import appeals
from roles.trainer.appeals import APPEALS, AppealDesk
from roles.trainer.core.punctual import AWAY_SECONDS, LONGEST, LOOKS_BACK, Punctuality
from roles.trainer.lots import LotDesk
from roles.trainer.scoring import PolicyScorer, ScoringDesk
from roles.trainer.watch import PROPOSAL, ValidatorWatch
from tests.trainer_bench import JUDGE, WORKER, Bench, open_bench
from tests.unit.test_bans import RUN

OTHER, THIRD = KeyPair(b"o" * 32), KeyPair(b"t" * 32)
DISTANCE = Reason.DRAW_DISTANCE.value


@dataclass
class Court:
    """A trainer's desk for appeals on a bench."""

    bench: Bench
    desk: AppealDesk
    watch: ValidatorWatch

    async def refused(
        self,
        index: int,
        reason: str = DISTANCE,
        times: float = 1000.0,
        *,
        worker: KeyPair = WORKER,
        made_up: bool = False,
        **lies: Any,
    ) -> Appeal:
        """Work of ``worker``, and a verdict that rejects it for ``reason``, said to be so many
        times the limit."""
        make = self.bench.made_up if made_up else None
        if make is not None:
            work = await make(index)
        else:
            groups = await self.bench.draw(index, worker)
            work = await self.bench.verdict_on(groups, index, worker, **lies)
        verdict = SignedVerdict(
            JUDGE.peer_id,
            work.verdict.commitment,
            Verdict.REJECTED,
            reason,
            1e-4 * times,
            1e-4,
            (),
        )
        return Appeal(verdict.signed(JUDGE), work.submission)

    async def hear(self, appeal: Asked, peer: KeyPair = WORKER) -> Ruled:
        ruled, _ = await self.desk.hear(peer.peer_id, encode_asked(appeal))
        return ruled

    @property
    def liars(self) -> dict[Any, str]:
        liars: dict[Any, str] = self.bench.auditor.liars
        return liars


@asynccontextmanager
async def open_court(folder: Path) -> AsyncIterator[Court]:
    async with open_bench(folder, is_drawn=False, appeals=True) as bench:
        bench.admitted += [OTHER.peer_id, THIRD.peer_id]
        court = sit(bench)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(court.desk.work_forever)
            yield court
            nursery.cancel_scope.cancel()


def sit(bench: Bench) -> Court:
    node: Any = bench.intake._node
    watch = ValidatorWatch(node, bench.auditor, Durable(bench.world, "trainer"))
    bench.intake.watch = watch
    environment: Any = bench.environment
    desk = AppealDesk(
        node,
        environment,
        bench.standing,
        bench.auditor,
        watch,
        has_worked=lambda _: True,
        has_room=lambda: True,
    )
    return Court(bench, desk, watch)


async def test_a_validator_that_rejects_honest_work_is_convicted_by_its_signature(
    tmp_path: Path,
) -> None:
    """It was believed: a worker that it did not like earned nothing under its policies."""
    async with open_court(tmp_path) as court:
        bench = court.bench
        appeal = await court.refused(0)
        assert await court.hear(appeal) is Ruled.UPHELD
        assert JUDGE.peer_id in court.liars
        receipt, reason = await bench.hand_over(await bench.honest(1))
        assert receipt is Receipt.UNWANTED
        assert reason.startswith(LIED)
        (entry,) = [one.body async for one in bench.ledger.entries(REFUSAL_KIND)]
        verify = bench.world.verify
        kept = await bench.world.disk.read(decode_refusal_untrusted(entry, verify).path)
        opened = open_refusal(entry, kept, verify)
        assert opened == appeal
        # a bystander repeats it
        environment: Any = bench.environment
        tasks, groups = await open_refused(bench.run, environment, opened.submission)
        assert await violated(bench.run, bench.engine, tasks, groups) == []
        for damaged in (entry[:-1], kept):
            with pytest.raises(BadMessage):
                open_refusal(damaged, kept, verify)
        # and it is known after a restart
        await bench.world.disk.replace(f"{REFUSALS}/stray", b"a strike of an earlier life")
        bench.open_trainer()
        await bench.intake.recall()
        assert JUDGE.peer_id in bench.auditor.liars
        assert len(await bench.world.disk.list(REFUSALS)) == 1


@pytest.mark.parametrize(
    ("reason", "times", "weight"),
    [
        (DISTANCE, 1.2, Weight.BORDERLINE),
        (DISTANCE, 2.0, Weight.STRIKE),
        (DISTANCE, 500.0, Weight.LIE),
        (Reason.SURPRISE.value, 500.0, Weight.STRIKE),  # heavy tails never convict alone
        (Reason.MALFORMED_PROOF.value, 0.0, Weight.LIE),
        (Reason.TOKEN.value, 0.0, Weight.LIE),
        (Reason.DRAW_MISMATCHES.value, 500.0, Weight.BORDERLINE),  # of a history, perhaps
        ("places before it were left out", 0.0, Weight.BORDERLINE),
    ],
)
def test_what_a_rejection_weighs_is_what_an_acceptance_does(
    reason: str, times: float, weight: Weight
) -> None:
    verdict: Any = SimpleNamespace(reason=reason, statistic=1e-4 * times, limit=1e-4)
    assert finding_of(verdict).weight is weight


async def test_numerics_near_a_limit_convict_nobody_and_strikes_do_when_they_are_many(
    tmp_path: Path,
) -> None:
    async with open_court(tmp_path) as court:
        workers = (WORKER, OTHER, THIRD)
        for index in range(6):
            appeal = await court.refused(index, times=1.4, worker=workers[index % 3])
            assert await court.hear(appeal, workers[index % 3]) is Ruled.UPHELD
        assert court.liars == {}
        for index in range(STRIKES - 1):
            strike = await court.refused(10 + index, times=3.0, worker=OTHER)
            assert await court.hear(strike, OTHER) is Ruled.UPHELD
        for index in range(WINDOW):  # honest verdicts between them push strikes out
            verdict = replace((await court.bench.honest(0)).verdict)
            commitment = replace(verdict.commitment, content=index.to_bytes(32, "big"))
            court.watch.note_taken(replace(verdict, commitment=commitment))
        strike = await court.refused(20, times=3.0, worker=THIRD)
        await court.hear(strike, THIRD)
        assert court.liars == {}
        for index in range(STRIKES - 1):
            await court.watch.uphold(await court.refused(30 + index, times=3.0))
        assert JUDGE.peer_id in court.liars


async def test_a_worker_that_lies_in_its_appeal_gets_no_other(tmp_path: Path) -> None:
    async with open_court(tmp_path) as court:
        made_up = await court.refused(0, made_up=True)
        assert await court.hear(made_up) is Ruled.IN_VAIN
        stream: Any = SimpleNamespace(peer=WORKER.peer_id, sent=b"")

        async def send_all(data: bytes) -> None:
            stream.sent += data

        stream.send_all = send_all
        await court.desk.serve(stream)  # not a byte is read
        assert b"in vain" in stream.sent
        assert court.liars == {}


async def test_what_is_forged_altered_or_of_others_is_no_appeal(tmp_path: Path) -> None:
    async with open_court(tmp_path) as court:
        honest, other = await court.refused(0), await court.refused(1)
        forged = replace(honest.verdict, statistic=1.0)
        accepting = (await court.bench.honest(0)).verdict
        for appeal in (
            Appeal(forged, honest.submission),
            Appeal(honest.verdict, other.submission),
            Appeal(accepting, honest.submission),
            Appeal(honest.verdict, replace(honest.submission, content=b"\x90")),
            Appeal(replace(forged, validator=OTHER.peer_id).signed(OTHER), other.submission),
        ):
            with pytest.raises(BadMessage):
                await court.hear(appeal)
        with pytest.raises(BadMessage, match="its own work"):
            await court.hear(honest, OTHER)
        assert await court.hear(await court.refused(0, run=b"r" * 32)) is Ruled.UNSURE
        stranger = replace(honest.verdict, validator=OTHER.peer_id).signed(OTHER)
        assert await court.hear(Appeal(stranger, honest.submission)) is Ruled.UNSURE
        court.bench.held.clear()
        assert await court.hear(honest) is Ruled.UNSURE
        assert court.liars == {}


async def test_appeals_are_rationed_and_one_that_is_repeated_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[bytes] = []
    real = appeals.open_refused

    async def counted(run: Any, environment: Any, submission: Any) -> Any:
        tried.append(submission.commitment.content)
        return await real(run, environment, submission)

    monkeypatch.setattr(appeals, "open_refused", counted)
    async with open_court(tmp_path) as court:
        first = await court.refused(0, times=1.2)
        for _ in range(3):
            assert await court.hear(first) is Ruled.UPHELD
        assert len(tried) == 1
        for index in range(1, int(APPEALS)):
            assert await court.hear(await court.refused(index, times=1.2)) is Ruled.UPHELD
        assert await court.hear(await court.refused(9, times=1.2)) is Ruled.LATER
        assert len(tried) == int(APPEALS)
        # another worker has its own; and what no replay repeats costs none
        assert await court.hear(await court.refused(0, times=1.2, worker=OTHER), OTHER) is (
            Ruled.UPHELD
        )
        assert not is_repeatable("left out")
        assert await court.hear(await court.refused(8, "left out")) is Ruled.HEARD


async def test_a_validator_in_whose_verdicts_there_is_much_doubt_is_named_to_the_owner(
    tmp_path: Path,
) -> None:
    """It keeps just above the limits with what it makes up, and is convicted of nothing."""
    async with open_court(tmp_path) as court:
        for index in range(6):
            worker = (WORKER, OTHER)[index % 2]
            await court.watch.uphold(await court.refused(index, times=1.1, worker=worker))
        await court.watch._look()
        data = await court.bench.world.disk.read(PROPOSAL)
        proposal = decode_proposal_untrusted(data)
        assert [who for who, _ in proposal.drop] == [JUDGE.peer_id]
        assert (proposal.run, proposal.epoch) == (court.bench.run.id, 1)
        assert court.liars == {}


# Acceptances that are false: confessions, and what the trainer's own pass finds.


async def test_a_worker_that_confesses_convicts_who_accepted_its_lie(tmp_path: Path) -> None:
    """Both of two judges stamped, and nothing but a replay of the trainer's own knew."""
    async with open_court(tmp_path) as court:
        bench, other = court.bench, OTHER
        confessed: list[Any] = []
        court.desk.on_confessed = confessed.append
        lie = await bench.made_up(0)
        also = replace(lie.verdict, validator=other.peer_id).signed(other)
        await court.desk.crosscheck.note_verdict(also)  # as it came with a settlement
        said = Acceptance(lie.verdict, lie.submission)
        assert await court.hear(said) is Ruled.UPHELD
        assert set(court.liars) == {JUDGE.peer_id, other.peer_id}
        assert confessed == [WORKER.peer_id]
        # a bystander repeats both
        entries = [one.body async for one in bench.ledger.entries(LIE_KIND)]
        assert len(entries) == 2
        verify = bench.world.verify
        for entry in entries:
            kept = await bench.world.disk.read(decode_lie_untrusted(entry, verify).path)
            opened = open_lie(entry, kept, verify)
            assert opened.submission == lie.submission
            found = worst(await examine(bench.run, bench.environment, bench.engine, opened))
            assert found is not None
            assert found.weight is Weight.LIE


async def test_a_confession_of_honest_work_accuses_nobody_and_is_the_last(
    tmp_path: Path,
) -> None:
    async with open_court(tmp_path) as court:
        work = await court.bench.honest(0)
        assert await court.hear(Acceptance(work.verdict, work.submission)) is Ruled.IN_VAIN
        assert court.liars == {}
        assert WORKER.peer_id in court.desk._barred
        rejecting = (await court.refused(1)).verdict
        for said in (
            Acceptance(rejecting, (await court.bench.honest(1)).submission),
            Acceptance(replace(work.verdict, statistic=1.0), work.submission),
            Acceptance(work.verdict, (await court.bench.honest(1)).submission),
        ):
            with pytest.raises(BadMessage):
                await court.hear(said)


async def test_content_that_is_no_answer_to_its_place_convicts_who_accepted_it(
    tmp_path: Path,
) -> None:
    """A truncated answer, or another place's, needs no engine to be found."""
    async with open_court(tmp_path) as court:
        bench = court.bench
        groups = await bench.draw(0)
        replayed = await bench.verdict_on(groups, 0, place=1)
        assert await court.hear(Acceptance(replayed.verdict, replayed.submission)) is (
            Ruled.UPHELD
        )
        assert JUDGE.peer_id in court.liars
        opened = Acceptance(replayed.verdict, replayed.submission)
        found = worst(await examine(bench.run, bench.environment, bench.engine, opened))
        assert found is not None
        assert found.weight is Weight.LIE


async def test_what_an_appeal_in_vain_shows_is_held_against_who_accepted(
    tmp_path: Path,
) -> None:
    """A cheat appeals against the judge that saw it, and brings the verdict of the one that did
    not look."""
    async with open_court(tmp_path) as court:
        appeal = await court.refused(0, made_up=True)
        accepting = (await court.bench.made_up(0, judge=OTHER)).verdict
        assert await court.hear(appeal) is Ruled.IN_VAIN
        assert court.liars == {}
        await court.desk.crosscheck.note_verdict(accepting)
        assert list(court.liars) == [OTHER.peer_id]


async def test_what_the_trainer_scores_to_learn_from_it_is_held_against_its_judges(
    tmp_path: Path,
) -> None:
    """It rejected what two judges had accepted, and asked neither why."""
    async with open_court(tmp_path) as court, trio.open_nursery() as nursery:
        bench, check = court.bench, court.bench.intake._check
        node: Any = bench.intake._node
        check.scoring = ScoringDesk(node, PolicyScorer(node, bench.engine))
        check.on_found = court.desk.crosscheck.note_found
        nursery.start_soon(check.scoring.work_forever)
        for index, judge in enumerate((JUDGE, OTHER)):
            lie = await bench.made_up(index, judge=judge)
            if judge is OTHER:  # of another place
                lie = await bench.verdict_on(await bench.draw(0), 5, judge=OTHER)
            await court.desk.crosscheck.note_verdict(lie.verdict)
            work, groups = await check.groups_of_worker(lie.submission)
            assert work.verdict.verdict is Verdict.REJECTED
            assert groups == []
            assert judge.peer_id in court.liars
        nursery.cancel_scope.cancel()


async def test_acceptances_that_are_borne_out_count_as_looks_and_convict_nobody(
    tmp_path: Path,
) -> None:
    async with open_court(tmp_path) as court:
        work = await court.bench.honest(0)
        await court.desk.crosscheck.note_verdict(work.verdict)
        await court.desk.crosscheck.note_found(work.submission, None)
        near = Finding(DISTANCE, 1.4e-4, 1e-4)
        other = await court.bench.honest(1)
        await court.desk.crosscheck.note_verdict(other.verdict)
        await court.desk.crosscheck.note_found(other.submission, near)
        looks = court.bench.auditor._strikes._looks[JUDGE.peer_id, "replay"]
        assert list(looks.values()) == [None, None]
        for index in range(STRIKES):
            assert court.liars == {}
            work = await court.bench.honest(2 + index)
            await court.desk.crosscheck.note_verdict(work.verdict)
            strike = Finding(DISTANCE, 3e-4, 1e-4)
            await court.desk.crosscheck.note_found(work.submission, strike)
        assert JUDGE.peer_id in court.liars


async def test_content_that_was_called_a_lie_beforehand_is_not_learnt_from(
    tmp_path: Path,
) -> None:
    """The lot falls on it as well, so that who delivers it is judged by it."""
    async with open_court(tmp_path) as court:
        bench = court.bench
        court.desk.disown = bench.intake.disown
        works = await bench.honest(0), await bench.made_up(1)
        for work in works:
            said = Forewarning(work.verdict.commitment)
            assert await court.hear(said) is Ruled.HEARD
        with pytest.raises(BadMessage, match="its own work"):
            await court.hear(said, OTHER)
        assert (await bench.hand_over(works[0]))[0] is Receipt.TAKEN
        assert len(bench.intake.buffer) == 0
        assert (await bench.hand_over(works[1]))[0] is Receipt.UNWANTED
        assert JUDGE.peer_id in court.liars


async def test_what_a_false_rejection_took_a_worker_has_again_and_nothing_else(
    tmp_path: Path,
) -> None:
    """A validator that refuses honest work ended the standing of whom it liked: 64 places."""
    async with open_court(tmp_path) as court:
        bench = court.bench
        node: Any = bench.intake._node
        scoring = ScoringDesk(node, PolicyScorer(node, bench.engine))
        lots = LotDesk(node, bench.intake, scoring, Durable(bench.world, "trainer"))
        court.desk.on_upheld = lots.restore
        worker, wall = WORKER.peer_id, bench.world.wall()
        record: Any = SimpleNamespace(node=worker, was_proven=False, state=None)
        for index, is_false in enumerate((True, False)):
            lots.standings.note_accepted(worker, 70, wall)
            appeal = await court.refused(index, times=1.2, made_up=not is_false)
            await lots._void(record, DISTANCE, appeal.verdict.commitment.content)
            assert not lots.standings.is_proven(worker, wall)
            assert await court.hear(appeal) is (Ruled.UPHELD if is_false else Ruled.IN_VAIN)
            assert lots.standings.is_proven(worker, wall) is is_false
        # what has ended it since is not undone
        lots.standings.note_accepted(worker, 70, wall)
        first = await court.refused(2, times=1.2)
        await lots._void(record, DISTANCE, first.verdict.commitment.content)
        await lots._void(record, "a drawn place was shown to nobody in time")
        lots.restore(first.verdict.commitment)
        lots.standings.note_accepted(worker, 70, wall)
        await lots._void(record, DISTANCE, b"another rejection")
        lots.restore(first.verdict.commitment)
        assert not lots.standings.is_proven(worker, wall)


# Who is passed over.

ONE, TWO = JUDGE.peer_id, OTHER.peer_id
CROWD = [KeyPair(bytes([number]) * 32).peer_id for number in range(50, 62)]


def test_a_silent_validator_is_passed_over_for_a_while_and_longer_each_time() -> None:
    watch, both, now, found = Punctuality(), (ONE, TWO), 0.0, []
    for _ in range(5):
        for worker in CROWD[:2]:
            watch.note_served(TWO, worker, now)
        for worker in CROWD[:2]:
            assert ONE not in watch.look(both, now)
            watch.note_complaint(ONE, worker, now)
        assert list(watch.look(both, now)) == [ONE]
        began = now
        while ONE in watch.look(both, now):
            now += 10.0
        found.append(now - began)
    assert found[:3] == [AWAY_SECONDS, 2 * AWAY_SECONDS, 4 * AWAY_SECONDS]
    assert max(found) == LONGEST
    assert watch.look((TWO,), now) == {}


def test_a_validator_that_serves_its_workers_keeps_its_lots_whoever_complains() -> None:
    watch, both = Punctuality(), (ONE, TWO)
    for now in range(0, 3600, 30):
        for worker in CROWD[:4]:
            watch.note_served(ONE, worker, now)
        for worker in CROWD[:8]:  # twice as many as it serves
            watch.note_complaint(ONE, worker, now)
        assert watch.look(both, now) == {}
    watch.note_complaint(TWO, CROWD[0], now)  # one alone may have a bad line
    assert watch.look(both, now) == {}
    assert watch.look(both, now + LOOKS_BACK + 1) == {}


def test_only_lots_of_those_that_are_away_change_hands() -> None:
    validators = tuple(KeyPair(bytes([number]) * 32).peer_id for number in range(70, 75))
    gone = set(validators[:2])
    moved = 0
    for version in range(200):
        for node in CROWD[:3]:
            before = validator_among(validators, bytes(32), node, PolicyVersion(version))
            after = validator_among(validators, bytes(32), node, PolicyVersion(version), gone)
            assert after not in gone
            assert (after == before) is (before not in gone)
            moved += after != before
            everyone = set(validators)
            version_ = PolicyVersion(version)
            assert validator_among(validators, bytes(32), node, version_, everyone) == before
    assert pytest.approx(moved, rel=0.2) == 600 * 2 / 5


async def test_complaints_count_of_who_has_worked_against_its_own_judge(
    tmp_path: Path,
) -> None:
    async with open_court(tmp_path) as court:
        appeal = await court.refused(0)
        mine = Complaint(JUDGE.peer_id, appeal.verdict.commitment)

        async def ruled(complaint: Complaint) -> Ruled:
            said, _ = await court.desk.hear(WORKER.peer_id, encode_asked(complaint))
            return said

        assert await ruled(mine) is Ruled.HEARD
        assert await ruled(replace(mine, validator=OTHER.peer_id)) is Ruled.UNSURE
        court.desk._has_room = lambda: False
        assert await ruled(mine) is Ruled.UNSURE
        court.desk._has_room, court.desk._has_worked = lambda: True, lambda _: False
        assert await ruled(mine) is Ruled.UNSURE


def test_a_trainer_that_has_just_started_takes_nobody_for_away() -> None:
    """It had heard no heartbeat yet, so one verdict settled what takes those of two."""
    now, here = [1000.0], list[PeerId]()
    world = SimpleNamespace(now=lambda: now[0])
    membership = SimpleNamespace(find=lambda _: [SimpleNamespace(peer=one) for one in here])
    gossip = SimpleNamespace(subscribe=lambda *_: None)
    ledgers = SimpleNamespace(forks={}, on_news=lambda _: None)
    node: Any = SimpleNamespace(
        world=world, membership=membership, gossip=gossip, run=RUN, ledgers=ledgers
    )
    heard, judges = HeardAway(node), RUN.terms.validators
    assert heard.absent(judges) == []
    now[0] += SETTLING
    assert heard.absent(judges) == list(judges)
    here += judges[1:]
    assert heard.absent(judges) == list(judges[:1])
    heard.hear(RUN.terms.trainers[0], Away(1, judges[1:2]))
    assert heard.absent(judges) == list(judges[:2])
