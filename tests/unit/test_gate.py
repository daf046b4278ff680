"""The laws of the gate: whose work may teach, at what price, and who judges that."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, strategies as st

from p2p.errors import BadMessage
from p2p.identity import KeyPair, PeerId, verify
from p2p.shardcast.manifest import PolicyVersion
from proofs.checks import Reason, Verdict
from roles.protocol.core.answer import Refused
from roles.protocol.core.conviction import convict, open_conviction_untrusted
from roles.protocol.core.findings import HEARS_OTHER, Finding, Weight
from roles.protocol.core.verdict import SignedVerdict
from roles.protocol.core.window import Claim, Commitment, SignedWindow
from roles.trainer.core.gate import (
    BAN,
    DUE,
    MAX_AHEAD,
    MAX_OPEN_NEWCOMER,
    Audited,
    Consequence,
    Gate,
    Situation,
    Wish,
)
from roles.trainer.core.records import FORGIVEN_EVERY, Assignment
from tests.unit import work_messages as made

ME = made.key(0, "trainer")
VALIDATORS = tuple(made.key(number, "validator") for number in range(3))
ALIKE = [[Claim.ALIKE] * 2]
LIE = Finding(Reason.MANTISSA_MEAN.value, 20.0, 1.0)
STRIKE = Finding(Reason.MANTISSA_MEAN.value, 3.0, 1.0)


@dataclass(frozen=True)
class Trust:
    share: float = 0.05
    probation: int = 32
    window: int = 16


def gate(secret: bytes = b"s" * 32, **most: int) -> Gate:
    return Gate(ME.peer_id, secret, **most)


def situation(
    served: float = 0.0,
    newest: int = 0,
    *,
    judges: tuple[KeyPair, ...] = (),
    wall: float | None = None,
    terms: bytes = made.TERMS,
    trust: Trust = Trust(),
    load: float = 0.0,
) -> Situation:
    return Situation(
        served=served,
        wall=served if wall is None else wall,
        newest=PolicyVersion(newest),
        terms=terms,
        validators=tuple(one.peer_id for one in judges),
        trust=trust,
        lag=2,
        newcomers_load=load,
    )


NOW = situation()
JUDGED = situation(judges=VALIDATORS)


def commit(
    judge: Gate, signed: SignedWindow, now: Situation = NOW, *, is_listed: bool = False
) -> Assignment:
    given = judge.commit(signed, now, is_listed=is_listed)
    assert isinstance(given, Assignment), given
    return given


def raise_up(judge: Gate, worker: KeyPair, version: int = 0, now: Situation = NOW) -> None:
    """Let ``worker`` serve its probation, scored by the trainer."""
    first = 0
    while not judge.standing(worker.peer_id, now, is_listed=False).is_in_standing:
        signed = made.window(worker, version, first)
        for index in commit(judge, signed, now).wanted:
            assert not judge.stood(signed.window.commitment(index), now)
        first += 16


def audit(
    judge: Gate, verdict: SignedVerdict, finding: Finding | None, now: Situation
) -> Audited:
    submission = made.submission_of(verdict.commitment)
    return judge.audited(verdict, submission, finding, now, verify)


def is_in_standing(judge: Gate, worker: KeyPair, now: Situation = NOW) -> bool:
    return judge.standing(worker.peer_id, now, is_listed=False).is_in_standing


def signer(peer: PeerId) -> KeyPair:
    return next(one for one in VALIDATORS if one.peer_id == peer)


# -- windows ---------------------------------------------------------------------------------


@given(tries=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(1, 16))))
def test_places_are_committed_in_order_without_gaps(tries: list[tuple[int, int, int]]) -> None:
    judge, worker, now = gate(), made.key(1), situation(newest=2)
    due = [0, 0, 0]
    for version, first, places in tries:
        signed = made.window(worker, version, first, places)
        given = judge.commit(signed, now, is_listed=True)
        if isinstance(given, Assignment):
            assert first == due[version]
            due[version] += places
        elif given.retry:
            assert due[version] >= MAX_AHEAD
        else:
            is_repeated = first + places == due[version]
            assert is_repeated or given.next == due[version] != first


def test_a_repeated_window_gets_the_same_answer_and_another_one_no_penalty() -> None:
    judge, worker = gate(), made.key(1)
    signed = made.window(worker, claims=ALIKE * 16)
    given = commit(judge, signed, JUDGED)
    raise_up(judge, made.key(2))
    later = replace(JUDGED, newest=PolicyVersion(1), validators=JUDGED.validators[:1])
    assert commit(judge, signed, later) == given
    judge.take_changed()
    other = judge.commit(made.window(worker, kind="other"), later, is_listed=False)
    assert other == Refused("place 0 is committed already: the next is 16", False, 16)
    assert judge.take_changed() == []


@pytest.mark.parametrize(
    "signed",
    [
        made.window(made.key(1), terms=b"o" * 32),
        made.window(made.key(1), version=10**9),
        made.window(made.key(1), version=2),
        made.window(made.key(1), version=5, first=1),
        made.window(made.key(1), version=5, places=0, claims=[()]),
    ],
)
def test_what_is_refused_or_only_asks_leaves_no_trace(signed: SignedWindow) -> None:
    judge = gate()
    now = situation(newest=5, judges=VALIDATORS)
    for _ in range(3):
        judge.commit(signed, now, is_listed=False)
    assert judge.take_changed() == []
    assert not judge.passed_over(replace(now, served=1e6))


def test_dice_follow_from_the_secret_and_the_window_alone() -> None:
    def wanted(secret: bytes, kind: str = "content") -> list[int]:
        judge, worker = gate(secret), made.key(1)
        windows = (
            made.window(worker, 0, first, claims=ALIKE * 16, kind=kind)
            for first in range(0, 640, 16)
        )
        found: list[int] = []
        for signed in windows:
            given = commit(judge, signed, is_listed=True)
            found += given.wanted
            for index in given.wanted:
                judge.stood(signed.window.commitment(index), NOW)
        return found

    first = wanted(b"s" * 32)
    assert first == wanted(b"s" * 32)
    assert first not in (wanted(b"o" * 32), wanted(b"s" * 32, "other"))
    assert 10 <= len(first) <= 60  # of 640 at a twentieth


def test_all_that_may_teach_is_wanted_and_replayed_and_dice_take_whole_places() -> None:
    judge, worker = gate(), made.key(1)
    claims = [(Claim.SPREAD, Claim.ALIKE), (Claim.ALIKE, Claim.UNKNOWN)] * 8
    given = commit(judge, made.window(worker, claims=claims), is_listed=True)
    assert given.wanted == tuple(range(16))
    others = 0
    for index in given.wanted:
        found = judge.groups_to_replay(
            made.window(worker, claims=claims).window, index, [True, *[False] * 20], NOW
        )
        assert 0 in found
        others += len(found) - 1
    assert 2 <= others <= 40  # of 320 at a twentieth
    alike = made.window(worker, 0, 16, claims=ALIKE * 16)
    commit(judge, alike, is_listed=True)
    assert judge.groups_to_replay(alike.window, 16, [False] * 8, NOW) == tuple(range(8))
    newcomer = made.window(made.key(2))
    commit(judge, newcomer)
    assert judge.groups_to_replay(newcomer.window, 0, [True, False], NOW) == (0, 1)


def test_a_window_belongs_to_the_standing_that_its_name_had_when_it_was_committed() -> None:
    judge, worker = gate(), made.key(1)
    early = [made.window(worker, 0, first) for first in (0, 16, 32)]
    for signed in early:
        commit(judge, signed)
    for signed in early[:2]:
        for index in signed.window.places:
            judge.stood(signed.window.commitment(index), NOW)
    assert is_in_standing(judge, worker)
    assert not judge.stood(early[2].window.commitment(32), NOW)
    signed = made.window(worker, 0, 48)
    assert not commit(judge, signed).is_newcomer
    assert judge.stood(signed.window.commitment(48), NOW)


def test_refusals_for_lack_of_room_blame_nobody() -> None:
    judge, worker = gate(), made.key(1)
    for first in range(0, 16 * MAX_OPEN_NEWCOMER, 16):
        commit(judge, made.window(worker, 0, first))
    raise_up(judge, made.key(2))
    busy = situation(load=0.5)
    judge.take_changed()
    for signed, now in (
        (made.window(worker, 0, 16 * MAX_OPEN_NEWCOMER), NOW),
        (made.window(made.key(3)), busy),
    ):
        given = judge.commit(signed, now, is_listed=False)
        assert isinstance(given, Refused)
        assert given.retry
    assert judge.take_changed() == []
    assert commit(judge, made.window(made.key(2), 0, 32), busy).scorer == ME.peer_id


# -- what follows ----------------------------------------------------------------------------


def test_a_lie_ends_standing_and_drops_its_window_and_one_beyond_doubt_bans() -> None:
    judge, worker = gate(), made.key(1)
    raise_up(judge, worker)
    windows = [made.window(worker, 0, first) for first in (32, 48)]
    for signed in windows:
        commit(judge, signed)
    lie = windows[0].window.commitment(40)
    for _ in range(2):  # told again after a restart
        found = judge.lied(lie, Weight.STRIKE, NOW)
        assert found.is_newcomer_again
        assert found.banned_until is None
        assert {one.index for one in found.drop} == set(range(32, 48))
    assert not judge.stood(windows[0].window.commitment(32), NOW)
    assert judge.stood(windows[1].window.commitment(48), NOW)
    found = judge.lied(windows[1].window.commitment(50), Weight.LIE, NOW)
    assert found.banned_until == BAN
    assert {one.index for one in found.drop} >= set(range(32, 64))
    again = made.window(worker, 0, 64)
    assert isinstance(judge.commit(again, situation(BAN - 1), is_listed=True), Refused)
    assert commit(judge, again, situation(BAN + 1), is_listed=True).is_newcomer


def test_only_served_time_makes_work_overdue() -> None:
    """The trainer was away: versions and wall time went on, the desk did not serve."""
    judge, worker = gate(), made.key(1)
    raise_up(judge, worker)
    signed = made.window(worker, 0, 32)
    commit(judge, signed)
    away = situation(DUE, newest=9, wall=1e9)
    assert judge.expire(away) == []
    assert judge.expire(situation(1e9, newest=2)) == []  # the version is not stale
    assert is_in_standing(judge, worker)
    judge.came(signed.window.commitment(32))
    found = judge.expire(replace(away, served=DUE + 1))
    assert len(found) == 15
    assert is_in_standing(judge, worker) is False
    assert judge.stood(signed.window.commitment(32), away)  # its content was here in time


def test_failures_are_forgiven_once_in_32_windows_and_cost_what_they_may_have_hidden() -> None:
    judge, worker = gate(), made.key(1)
    raise_up(judge, worker)
    first = 32

    def work(windows: int, *, fails: bool = False) -> Consequence | None:
        nonlocal first
        found = None
        for _ in range(windows):
            signed = made.window(worker, 0, first, places=1)
            commit(judge, signed)
            if fails:
                found = judge.inconclusive(signed.window.commitment(first), NOW)
            else:
                judge.stood(signed.window.commitment(first), NOW)
            first += 1
        return found

    forgiven = work(1, fails=True)
    assert forgiven
    assert (forgiven.is_forgiven, forgiven.is_newcomer_again) == (True, False)
    assert judge.standing(worker.peer_id, NOW, is_listed=True).owed == 20  # 1 / share
    work(20)
    assert is_in_standing(judge, worker)
    work(16 * FORGIVEN_EVERY - 22)  # windows of one place: a full one has 16
    again = work(1, fails=True)
    assert again
    assert (again.is_forgiven, again.is_newcomer_again) == (False, True)
    assert judge.standing(worker.peer_id, NOW, is_listed=True).owed == 32
    work(1)
    later = work(1, fails=True)
    assert later
    assert later.is_forgiven


def test_who_keeps_back_what_is_wanted_waits_until_it_is_overdue() -> None:
    judge, worker = gate(), made.key(1)
    commit(judge, made.window(worker), is_listed=True)
    for first in range(16, MAX_AHEAD, 16):
        commit(judge, made.window(worker, 0, first, claims=ALIKE * 16), is_listed=True)
    given = judge.commit(made.window(worker, 0, MAX_AHEAD), NOW, is_listed=True)
    assert isinstance(given, Refused)
    assert given.retry


def gain_of(judge: Gate, now: Situation, *, skips: bool) -> int:
    """What one life of a liar gains, in places of honest work.

    It serves its probation, of which nothing is learnt. Then it commits windows of one place,
    each junk that claims to be alike, until the dice want one. If it ``skips``, it keeps that
    back for as long as it is forgiven.
    """
    worker, gain, place = made.key(1), 0, 0
    while True:
        is_working = not is_in_standing(judge, worker, now)
        signed = made.window(worker, 0, place, 1, None if is_working else ALIKE)
        given, commitment = commit(judge, signed, now), signed.window.commitment(place)
        place += 1
        if not given.wanted:
            gain += 1
        elif is_working:
            judge.stood(commitment, now)
            gain -= 1
        elif not skips:
            judge.lied(commitment, Weight.STRIKE, now)
            return gain - 1
        elif judge.inconclusive(commitment, now).is_newcomer_again:
            return gain - 1


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize(("share", "probation"), [(0.05, 32), (0.25, 8)])
def test_a_name_loses_by_lying_at_best(share: float, probation: int, skips: bool) -> None:
    """The worst case of docs/trust.md, by Monte Carlo against its formula."""
    now = situation(trust=Trust(share, probation, 16))
    lives = 60 if skips else 200
    gains = [gain_of(gate(bytes([n] * 32)), now, skips=skips) for n in range(lives)]
    mean = sum(gains) / lives
    error = 4 * math.sqrt(sum((one - mean) ** 2 for one in gains)) / lives
    assert mean < error
    if not skips:
        assert abs(mean - (1 / share - (probation + 1))) < error + 1


def test_an_edition_with_other_terms_bans_convicts_and_blames_nobody() -> None:
    judge, workers = gate(), [made.key(number) for number in range(8)]
    raise_up(judge, workers[0])
    windows = [made.window(workers[0], 0, 32), *(made.window(one) for one in workers[1:])]
    given = [commit(judge, signed, JUDGED) for signed in windows]
    commitments = [one.window.commitment(one.window.first) for one in windows]
    verdicts = [
        made.verdict(signer(each.scorer), one)
        for each, one in zip(given[1:], commitments[1:], strict=True)
    ]
    asked = [judge.verdict(one, JUDGED, network="n") for one in verdicts]
    before = [judge.standing(one.peer_id, NOW, is_listed=False) for one in workers]
    new = replace(JUDGED, terms=b"o" * 32, served=1e6, newest=PolicyVersion(9))
    assert not judge.lied(commitments[0], Weight.LIE, new).is_newcomer_again
    assert not judge.wrong_claim(commitments[0], new).is_newcomer_again
    for wish, one in zip(asked, verdicts, strict=True):
        said = audit(judge, one, LIE, new) if wish is Wish.SEND else None
        assert said is None or (said.worker is None and not said.is_convicted)
    for found in judge.expire(new):
        assert isinstance(found, Consequence)
        assert (found.is_newcomer_again, found.banned_until) == (False, None)
    for worker, was in zip(workers, before, strict=True):
        then = judge.standing(worker.peer_id, NOW, is_listed=False)
        assert then.is_in_standing == was.is_in_standing
        assert (then.stood >= was.stood, then.owed <= was.owed) == (True, True)
    assert all("silent" in why for why in judge.passed_over(new).values())


# -- tables ----------------------------------------------------------------------------------


def test_tables_are_bounded_and_the_least_makes_room() -> None:
    judge = gate(most_in_standing=2, most_newcomers=3)
    workers = [made.key(number) for number in range(12)]
    rows: dict[PeerId, bytes] = {}

    def note() -> None:
        for row in judge.take_changed():
            if row.data is None:
                del rows[row.peer]
            else:
                rows[row.peer] = row.data

    for number, worker in enumerate(workers[:6]):
        commit(judge, made.window(worker), situation(served=number))
        note()
    assert [*rows] == [one.peer_id for one in workers[3:6]]
    for worker in workers[6:8]:
        raise_up(judge, worker, now=situation(served=9))
        note()
    eager = workers[8]
    for first in range(0, 64, 16):
        signed = made.window(eager, 0, first)
        for index in commit(judge, signed, situation(served=10)).wanted:
            judge.stood(signed.window.commitment(index), NOW)
        note()
        is_above = first >= 32
        assert is_in_standing(judge, eager) is is_above  # 48 places, where others have 32
    assert sum(is_in_standing(judge, one) for one in workers) == 2
    assert len(rows) <= 5


# -- validators ------------------------------------------------------------------------------


def drawn(
    judge: Gate, numbers: range, now: Situation = JUDGED
) -> Iterator[tuple[KeyPair, Commitment]]:
    """Commit to windows of one place under fresh names; yields each scorer and place."""
    for number in numbers:
        signed = made.window(made.key(number), places=1)
        yield signer(commit(judge, signed, now).scorer), signed.window.commitment(0)


def test_a_verdict_counts_for_its_commitment_and_from_the_drawn_scorer_only() -> None:
    """A copies the content of B's honest work: a verdict on one says nothing of the other."""
    judge = gate()
    ((scorer, commitment),) = drawn(judge, range(1, 2))
    copied = replace(commitment, node=made.key(2).peer_id)
    others = [one for one in VALIDATORS if one is not scorer]
    for other in others:
        verdict = made.verdict(other, commitment, Verdict.REJECTED)
        assert judge.verdict(verdict, JUDGED, network="n") is Wish.IGNORE
        assert judge.contest(verdict, JUDGED, network="n") is Wish.IGNORE
    for wrong in (copied, replace(commitment, content=b"c" * 32), replace(commitment, index=1)):
        verdict = made.verdict(scorer, wrong)
        assert judge.verdict(verdict, JUDGED, network="n") is Wish.IGNORE
        found = judge.audited(verdict, made.submission_of(commitment), LIE, JUDGED, verify)
        assert (found.worker, found.weight) == (None, Weight.NOTHING)
    assert judge.verdict(made.verdict(scorer, commitment), JUDGED, network="n") in (
        Wish.TAKE,
        Wish.SEND,
    )


def test_no_validator_judges_its_own_work() -> None:
    judge = gate()
    for validator in VALIDATORS:
        for first in range(0, 8):
            given = commit(judge, made.window(validator, 0, first, 1), JUDGED)
            assert given.scorer not in (validator.peer_id, ME.peer_id)


def audit_all(judge: Gate, numbers: range, finding: Finding | None, word: Verdict) -> Audited:
    """Have verdicts told, repeated where the dice fall, until one validator is convicted."""
    now = replace(JUDGED, validators=JUDGED.validators[:1])
    for scorer, commitment in drawn(judge, numbers, now):
        verdict = made.verdict(scorer, commitment, word, excess=3.0)
        if judge.verdict(verdict, now, network="n") is Wish.SEND:
            assert judge.verdict(verdict, now, network="n") is Wish.SEND
            judge.came(commitment)
            assert judge.verdict(verdict, now, network="n") is Wish.SEND
            found = audit(judge, verdict, finding, now)
            repeated = audit(judge, verdict, finding, now)
            assert (repeated.worker, repeated.weight) == (None, Weight.NOTHING)
            assert found.proof
            assert open_conviction_untrusted(found.proof.to_bytes(), {made.TERMS}, verify)
            if found.is_convicted:
                assert judge.verdict(verdict, now, network="n") is Wish.IGNORE
                assert judge.passed_over(now) != {}
                return found
    raise AssertionError("nobody was convicted")


def test_one_lie_beyond_doubt_or_three_strikes_convict() -> None:
    found = audit_all(gate(), range(1, 400), LIE, Verdict.ACCEPTED)
    assert (found.weight, len(found.strikes)) == (Weight.LIE, 1)
    assert found.worker
    assert found.worker.banned_until == BAN
    for finding, word in (
        (STRIKE, Verdict.ACCEPTED),
        (None, Verdict.REJECTED),
        (Finding(HEARS_OTHER, 1.0, 0.0), Verdict.ACCEPTED),
    ):
        found = audit_all(gate(), range(1, 400), finding, word)
        assert (found.weight, len(found.strikes)) == (Weight.STRIKE, 3)
    assert found.worker is None, "nobody is blamed for what was heard nowhere"


def test_places_count_only_once_the_audit_of_their_window_is_over() -> None:
    for word, finding, stood in (
        (Verdict.ACCEPTED, None, 16),
        (Verdict.ACCEPTED, STRIKE, 0),
        (Verdict.REJECTED, None, 16),  # the rejection was false
        (Verdict.REJECTED, STRIKE, 0),
    ):
        for number in range(1, 200):
            judge, worker = gate(number.to_bytes(32, "big")), made.key(number)
            signed = made.window(worker)
            scorer = signer(commit(judge, signed, JUDGED).scorer)
            verdicts = [
                made.verdict(scorer, signed.window.commitment(index), word if index == 7 else
                             Verdict.ACCEPTED, excess=3.0)
                for index in range(16)
            ]  # fmt: skip
            wishes = [judge.verdict(one, JUDGED, network="n") for one in verdicts]
            if wishes.index(Wish.SEND) == 7 if wishes.count(Wish.SEND) == 1 else False:
                break
        assert judge.standing(worker.peer_id, NOW, is_listed=False).stood == 0
        audit(judge, verdicts[7], finding, JUDGED)
        assert judge.standing(worker.peer_id, NOW, is_listed=False).stood == stood


def test_audited_content_that_does_not_come_is_a_strike_once() -> None:
    judge = gate()
    now = replace(JUDGED, validators=JUDGED.validators[:1])
    strikes = 0
    for scorer, commitment in drawn(judge, range(1, 200), now):
        verdict = made.verdict(scorer, commitment)
        if judge.verdict(verdict, now, network="n") is Wish.SEND:
            assert judge.expire(replace(now, served=now.served + DUE)) == []
            now = replace(now, served=now.served + DUE + 1)
            found = [one for one in judge.expire(now) if isinstance(one, Audited)]
            assert [one.weight for one in found] == [Weight.STRIKE]
            assert judge.expire(now) == []
            strikes += 1
            if found[0].is_convicted:
                break
    assert strikes == 3


def test_audits_are_a_twentieth_whatever_is_contested_and_fair_by_network() -> None:
    """999 names of one network contest each rejection, one name of another does so once."""
    judge, asked, audits = gate(), 0, 0
    waits: SignedVerdict | None = None
    for number, (scorer, commitment) in enumerate(drawn(judge, range(1, 1001))):
        verdict = made.verdict(scorer, commitment, Verdict.REJECTED, excess=3.0)
        wish = judge.verdict(verdict, JUDGED, network="crowd")
        if number == 500:
            waits = verdict
        if wish is Wish.TAKE:
            if waits and judge.contest(waits, JUDGED, network="alone") is Wish.SEND:
                asked, waits = number, None
                audits += 1
            if verdict is not waits:
                wish = judge.contest(verdict, JUDGED, network="crowd")
        if wish is Wish.SEND:
            audits += 1
            audit(judge, verdict, STRIKE, JUDGED)
    assert 500 <= asked < 600  # at most some forty verdicts pay for one
    assert 25 <= audits <= 75  # a twentieth of 1,000, and two


def test_a_first_rejection_beyond_doubt_is_repeated_once_a_network_in_ten_minutes() -> None:
    judge, sent = gate(), []
    for scorer, commitment in drawn(judge, range(1, 100)):
        verdict = made.verdict(scorer, commitment, Verdict.REJECTED)
        network = f"n{commitment.content[0] % 2}"
        if judge.verdict(verdict, JUDGED, network=network) is Wish.SEND:
            sent.append((network, verdict))
    firsts = {network: verdict for network, verdict in reversed(sent)}
    assert len(firsts) == 2
    assert len(sent) < 20  # the others fell to the dice
    found = audit(judge, firsts["n0"], LIE, JUDGED)
    assert found.worker
    assert found.worker.banned_until == BAN
    assert found.weight is Weight.NOTHING
    convicted = audit(judge, firsts["n1"], None, JUDGED)
    assert convicted.is_convicted


def test_a_silent_validator_is_passed_over_and_comes_back_when_it_speaks() -> None:
    judge, silent = gate(), VALIDATORS[0]
    now, number, late = JUDGED, 1, None
    for _ in range(40):
        for scorer, commitment in drawn(judge, range(number, number + 5), now):
            if scorer is silent:
                late = commitment
            else:
                verdict = made.verdict(scorer, commitment)
                judge.verdict(verdict, now, network="n")
                audit(judge, verdict, None, now)
        number += 5
        now = replace(now, served=now.served + 50)
        judge.expire(now)
    assert [*judge.passed_over(now)] == [silent.peer_id]
    scorers = {scorer for scorer, _ in drawn(judge, range(number, number + 30), now)}
    assert scorers == set(VALIDATORS[1:])
    assert late
    assert judge.verdict(made.verdict(silent, late), now, network="n") is Wish.IGNORE
    assert judge.passed_over(now) == {}


def test_a_validator_that_is_gone_for_good_stops_nothing() -> None:
    """The only one, with every window of a newcomer assigned to it and no new version."""
    judge, worker = gate(), made.key(1)
    now = replace(JUDGED, validators=JUDGED.validators[:1])
    for number in range(MAX_OPEN_NEWCOMER):
        commit(judge, made.window(worker, 0, 16 * number), now)
    now = replace(now, served=DUE + 1)
    assert judge.expire(now) == []
    fresh = 16 * MAX_OPEN_NEWCOMER
    for first in range(fresh, fresh + 32, 16):
        signed = made.window(worker, 0, first)
        assert commit(judge, signed, now).scorer == ME.peer_id
        for index in signed.window.places:
            judge.stood(signed.window.commitment(index), now)
    assert is_in_standing(judge, worker)


def test_an_audit_whose_proof_does_not_open_accuses_nobody() -> None:
    judge = gate()
    for scorer, commitment in drawn(judge, range(1, 400)):
        verdict = made.verdict(scorer, commitment)
        if judge.verdict(verdict, JUDGED, network="n") is Wish.SEND:
            other = made.submission_of(
                made.window(made.key(500), places=1).window.commitment(0)
            )
            found = judge.audited(verdict, other, LIE, JUDGED, verify)
            assert (found.worker, found.weight, found.proof) == (None, Weight.NOTHING, None)
    assert judge.passed_over(JUDGED) == {}


# -- proofs ----------------------------------------------------------------------------------


def test_convictions_open_and_what_does_not_fit_convicts_nobody() -> None:
    worker, validator, other = made.key(1), VALIDATORS[0], made.key(2)
    signed = made.window(worker)
    submission = made.submission_of(signed.window.commitment(3))
    commitment = submission.commitment
    accepted = made.verdict(validator, commitment)
    rejected = made.verdict(validator, commitment, Verdict.REJECTED)
    for verdict, finding, accused in (
        (accepted, LIE, validator),
        (accepted, STRIKE, validator),
        (rejected, None, validator),
        (rejected, LIE, worker),
    ):
        found = convict(commitment, made.TERMS, verdict, submission, finding, verify)
        assert found.accused == accused.peer_id
        assert open_conviction_untrusted(found.to_bytes(), {made.TERMS}, verify) == found
        with pytest.raises(BadMessage, match="terms"):
            open_conviction_untrusted(found.to_bytes(), {b"o" * 32}, verify)
    borderline = Finding(Reason.MANTISSA_MEAN.value, 1.2, 1.0)
    unsure = made.verdict(validator, commitment, Verdict.INCONCLUSIVE)
    copy = replace(commitment, node=other.peer_id)
    elsewhere = made.submission_of(signed.window.commitment(4))
    forged = replace(submission, signed=replace(signed, signature=bytes(64)))
    five = partial(
        convict, commitment=commitment, terms=made.TERMS, verdict=accepted,
        submission=submission, finding=LIE, verify=verify,
    )  # fmt: skip
    assert five().weight is Weight.LIE
    wrong: list[dict[str, Any]] = [
        {"commitment": copy},
        {"commitment": elsewhere.commitment},
        {"terms": b"o" * 32},
        {"verdict": made.verdict(validator, copy)},
        {"verdict": unsure},
        {"verdict": replace(accepted, validator=other.peer_id)},
        {"verdict": replace(accepted, limit=2.0)},
        {"submission": elsewhere},
        {"submission": replace(submission, content=b"other")},
        {"submission": forged},
        {"finding": None},
        {"finding": borderline},
    ]
    for one in wrong:
        with pytest.raises(BadMessage):
            five(**one)


# -- kills -----------------------------------------------------------------------------------


class Disk:
    """What a driver keeps: rows, written one at a time, with a kill before any of them."""

    def __init__(self, kill_at: int | None) -> None:
        self.rows: dict[tuple[str, PeerId], bytes] = {}
        self.writes = 0
        self._kill_at = kill_at

    def save(self, judge: Gate) -> bool:
        """Write what changed; False if the trainer dies meanwhile."""
        for row in judge.take_changed():
            self.writes += 1
            if self.writes - 1 == self._kill_at:
                return False
            if row.data is None:
                self.rows.pop((row.kind, row.peer), None)
            else:
                self.rows[row.kind, row.peer] = row.data
        return True

    def load(self) -> Gate:
        judge = gate()
        for (kind, peer), data in self.rows.items():
            judge.restore_untrusted(kind, peer, data)
        return judge


def script() -> list[Callable[[Gate], object]]:
    """A life: probation by validators and by the trainer, a lie, failures, audits."""
    workers = [made.key(number) for number in range(1, 4)]
    windows = [made.window(one, 0, first) for first in (0, 16) for one in workers]
    steps: list[Callable[[Gate], object]] = []

    def expire(judge: Gate) -> None:
        judge.expire(situation(DUE + 1, newest=3))

    def committed(signed: SignedWindow, now: Situation) -> Callable[[Gate], object]:
        return lambda judge: commit(judge, signed, now)

    def judged(signed: SignedWindow) -> Callable[[Gate], object]:
        def step(judge: Gate) -> object:
            scorer = signer(commit(judge, signed, JUDGED).scorer)
            for index in signed.window.places:
                verdict = made.verdict(scorer, signed.window.commitment(index))
                wish = judge.verdict(verdict, JUDGED, network="n")
                if wish is Wish.SEND:
                    audit(judge, verdict, None, JUDGED)
            return judge.standing(signed.window.node, JUDGED, is_listed=False)

        return step

    for signed in windows:
        steps += [committed(signed, JUDGED), judged(signed)]
    claims = ALIKE * 8 + [[Claim.SPREAD, Claim.ALIKE]] * 8
    teaching = [made.window(one, 0, 32, claims=claims) for one in workers]
    steps += [committed(one, NOW) for one in teaching]
    steps += [
        lambda judge: judge.stood(teaching[0].window.commitment(40), NOW),
        lambda judge: judge.lied(teaching[1].window.commitment(41), Weight.LIE, NOW),
        lambda judge: judge.inconclusive(teaching[2].window.commitment(42), NOW).node,
        lambda judge: judge.came(teaching[0].window.commitment(41)),
        expire,
    ]
    return steps


def play(disk: Disk, *, is_repeated: bool = False) -> tuple[list[object], Gate]:
    """Play the script; after a kill the trainer is started again and the peer asks again."""
    judge, said = disk.load(), []
    for step in script():
        reply = step(judge)
        if not disk.save(judge):
            judge = disk.load()
            reply = step(judge)
            assert disk.save(judge)
        if is_repeated:  # the reply was lost
            assert step(judge) == reply
            assert disk.save(judge)
        said.append(reply)
    return said, disk.load()


def test_a_kill_at_any_write_throws_no_dice_twice_and_counts_no_place_twice() -> None:
    quiet = Disk(None)
    said, judge = play(quiet)
    standings = [
        judge.standing(made.key(number).peer_id, NOW, is_listed=False) for number in range(1, 4)
    ]
    assert [one.stood for one in standings] == [32, 32, 32]
    assert quiet.writes > 20
    for kill_at in (None, *range(quiet.writes)):
        again, judge = play(Disk(kill_at), is_repeated=kill_at is None)
        assert again == said, kill_at
        assert [
            judge.standing(made.key(number).peer_id, NOW, is_listed=False)
            for number in range(1, 4)
        ] == standings, kill_at


def test_rows_are_read_as_they_were_written_and_others_are_refused() -> None:
    disk = Disk(None)
    play(disk)
    dice = random.Random(1)
    for (kind, peer), data in disk.rows.items():
        again = gate()
        again.restore_untrusted(kind, peer, data)
        assert again.take_changed() == []
        for _ in range(300):
            at = dice.randrange(len(data))
            broken = data[:at] + bytes([dice.randrange(256)]) + data[at + 1 :]
            for altered in (broken, data[:at]):
                try:
                    gate().restore_untrusted(kind, peer, altered)
                except BadMessage:
                    continue


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_told_in_whatever_order_rows_say_all_and_tables_stay_bounded(
    seed: int,
) -> None:
    dice, disk = random.Random(seed), Disk(None)
    most = {"most_in_standing": 3, "most_newcomers": 5}
    judge, workers = gate(**most), [made.key(number) for number in range(9)]
    places: list[Commitment] = []
    due: dict[tuple[int, int], int] = {}
    served = newest = 0
    for _ in range(250):
        now = situation(served, newest, judges=VALIDATORS[: dice.choice([0, 1, 3])])
        one = dice.choice([*places[-40:], None])
        scorer, network = dice.choice(VALIDATORS), str(dice.randrange(3))
        match dice.randrange(10), one:
            case (0, Commitment()):
                judge.stood(one, now)
            case (1, Commitment()):
                judge.lied(one, dice.choice([*Weight][1:]), now)
            case (2, Commitment()):
                judge.inconclusive(one, now)
            case (3, Commitment()):
                judge.came(one)
            case (4 | 5, Commitment()):
                word, excess = dice.choice([*Verdict]), dice.choice([1.2, 3.0, 20.0])
                verdict = made.verdict(scorer, one, word, excess=excess)
                judge.verdict(verdict, now, network=network)
                if judge.contest(verdict, now, network=network) is not Wish.TAKE:
                    audit(judge, verdict, dice.choice([None, STRIKE, LIE]), now)
            case (6, _):
                judge.expire(now)
                served, newest = served + dice.choice([1, 700]), newest + dice.randrange(2)
            case _:
                number = dice.randrange(9)
                first = due.get((number, newest), 0)
                claims = ALIKE * 4 if dice.random() < 0.3 else None
                signed = made.window(workers[number], newest, first, 4, claims)
                given = judge.commit(signed, now, is_listed=dice.random() < 0.2)
                if isinstance(given, Assignment):
                    due[number, newest] = first + 4
                    places += map(signed.window.commitment, given.wanted)
                else:
                    due[number, newest] = max(first, given.next)
        assert disk.save(judge)
        assert sum(kind == "name" for kind, _ in disk.rows) <= 8
    again = gate(**most)
    for (kind, peer), data in disk.rows.items():
        again.restore_untrusted(kind, peer, data)
    now = situation(served, newest, judges=VALIDATORS)
    assert again.passed_over(now) == judge.passed_over(now)
    for place in places:
        assert again.expects(place, now) == judge.expects(place, now)
