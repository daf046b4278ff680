"""Bans: who may ban whom, by what evidence, for how long, and how many it takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from p2p.errors import BadMessage
from p2p.identity import KeyPair, Signer, verify
from p2p.ledger.core.chain import EMPTY, Entry, Head, check_link, make_entry
from p2p.policy import PolicyVersion
from proofs.checks import Reason, Verdict
from roles.engines.base import Completion, Group
from roles.protocol.core.bans import (
    AHEAD,
    BAN_KIND,
    MAX_BANNED,
    Ban,
    Bans,
    convicts,
    decode_ban_untrusted,
    quorum,
)
from roles.protocol.core.groups import (
    Commitment,
    Receipt,
    SignedVerdict,
    Submission,
    content_digest,
    encode_groups,
)
from roles.run.core.file import Run, sign_run
from roles.shared import evidence
from roles.shared.bans import bans_of
from roles.shared.evidence import fetch_evidence
from tests.trainer_bench import JUDGE, WORKER as DRAWER, open_bench
from tests.unit.test_run_file import OWNER, TERMS, TRAINER

JUDGES = [KeyPair(bytes([100 + number]) * 32) for number in range(5)]
WORKER, STRANGER = KeyPair(b"w" * 32), KeyPair(b"s" * 32)
TERM, NOW = 3600, 1_000_000.0
RUN = sign_run(
    replace(TERMS, validators=tuple(one.peer_id for one in JUDGES), ban_seconds=TERM), OWNER
)
FOREIGN = sign_run(replace(TERMS, name="another"), OWNER)
GROSS, CLEAR, NEAR = 50.0, 5.0, 1.2
"""Multiples of a limit: beyond doubt, a strike, and what honest work exceeds now and then."""


def rejection(
    excess: float = GROSS,
    *,
    by: Signer = JUDGES[0],
    worker: Signer = WORKER,
    run: Run = RUN,
    index: int = 0,
    version: int = 1,
    reason: str = Reason.DRAW_DISTANCE.value,
    said: Verdict = Verdict.REJECTED,
) -> SignedVerdict:
    content = index.to_bytes(32, "big")
    commitment = Commitment(
        run.id, worker.peer_id, PolicyVersion(version), b"p" * 32, index, content
    )
    return SignedVerdict(by.peer_id, commitment, said, reason, excess, 1.0, ()).signed(by)


def ban(
    by: Signer = JUDGES[0],
    evidence: Sequence[SignedVerdict] | None = None,
    *,
    wall: float = NOW,
    until: float = NOW + TERM,
) -> Entry:
    cited = (rejection(by=by),) if evidence is None else tuple(evidence)
    return make_entry(EMPTY, by, BAN_KIND, Ban(cited, int(until)).to_bytes(), wall)


def holds(
    entries: Sequence[Entry], now: float = NOW, *, run: Run = RUN, own: Signer | None = None,
    forked: Signer | None = None, heard: float = NOW,
) -> int:  # fmt: skip
    """Until when the worker is banned; 0 if it is not."""
    bans = Bans(verify)
    for entry in entries:
        bans.note_untrusted(entry, run, heard)
    held = bans.standing(
        WORKER.peer_id, run, now,
        lambda author: forked is None or author != forked.peer_id,
        None if own is None else own.peer_id,
    )  # fmt: skip
    return 0 if held is None else held.until


def test_one_validator_of_five_bans_nobody_and_two_that_repeat_it_do() -> None:
    one, two = ban(JUDGES[0]), ban(JUDGES[1], wall=NOW + 5, until=NOW + 2 * TERM)
    assert holds([one]) == 0
    assert holds([one, one, ban(JUDGES[0], [rejection(index=7)])]) == 0
    assert holds([one, two]) == NOW + TERM
    assert holds([one], own=JUDGES[0]) == NOW + TERM
    assert holds([one], own=JUDGES[1]) == 0
    assert [quorum(count) for count in (1, 2, 3, 5, 6, 20)] == [1, 2, 2, 2, 3, 7]


def test_a_trainers_word_is_enough_and_that_of_a_liar_is_none() -> None:
    cited = [rejection(by=JUDGES[3])]
    assert holds([ban(TRAINER, cited)]) == NOW + TERM
    pair = [ban(JUDGES[0]), ban(JUDGES[1])]
    assert holds(pair, forked=JUDGES[1]) == 0
    assert holds([ban(TRAINER, cited)], forked=TRAINER) == 0


def test_a_ban_ends_when_the_run_says_and_is_not_prolonged_without_a_new_lie() -> None:
    pair = [ban(JUDGES[0], until=NOW + 10**9), ban(JUDGES[1], until=NOW + 10**9)]
    assert holds(pair) == NOW + TERM
    assert holds(pair, NOW + TERM - 1) == NOW + TERM
    assert holds(pair, NOW + TERM) == 0
    later = [ban(judge, wall=NOW + 10**6, until=NOW + 10**9) for judge in JUDGES[:2]]
    assert holds([*pair, *later]) == NOW + TERM
    assert holds(later) == 0  # not by a clock that is far ahead
    assert holds(later, NOW + 10**6) == NOW + 10**6 + TERM
    no_bans = sign_run(replace(RUN.terms, ban_seconds=0), OWNER)
    assert holds(pair, run=no_bans) == 0


def test_a_ban_ends_at_the_same_second_after_each_restart() -> None:
    """Where validators' clocks are ahead, a ban was counted from when it was heard: each start
    of a node made it longer."""
    ahead = NOW + AHEAD / 2
    pair = [ban(judge, wall=ahead, until=ahead + TERM) for judge in JUDGES[:2]]
    for start in range(5):
        heard = NOW + 100 * start
        assert holds(pair, heard, heard=heard) == ahead + TERM
    assert holds(pair, ahead + TERM, heard=ahead + TERM) == 0


def test_a_ban_of_a_clock_far_ahead_does_not_end_the_one_before_it() -> None:
    later = ban(
        evidence=[rejection(index=5)], wall=NOW + 2 * AHEAD, until=NOW + 2 * AHEAD + TERM
    )
    entries = [ban(), later]
    assert holds(entries, own=JUDGES[0]) == NOW + TERM


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        (ban(STRANGER, [rejection(by=STRANGER)]), "no officer"),
        (ban(WORKER), "no officer"),
        (ban(JUDGES[0], [rejection(by=JUDGES[1])]), "verdicts of its own"),
        (ban(TRAINER, [rejection(by=STRANGER)]), "no validator"),
        (ban(evidence=[rejection(worker=OWNER)]), "not banned"),
        (ban(evidence=[rejection(worker=TRAINER)]), "not banned"),
        (ban(evidence=[rejection(worker=JUDGES[2])]), "not banned"),
        (ban(evidence=[rejection(run=FOREIGN)]), "another run"),
        (ban(evidence=[replace(rejection(), statistic=60.0)]), "signature"),
        (ban(evidence=[rejection(said=Verdict.ACCEPTED)]), "does not convict"),
        (ban(evidence=[rejection(said=Verdict.INCONCLUSIVE)]), "does not convict"),
        (ban(evidence=[rejection(NEAR)]), "does not convict"),
        (ban(evidence=[rejection(math.nan)]), "does not convict"),
        (ban(evidence=[rejection(CLEAR)] * 3), "does not convict"),
        (ban(evidence=[]), "1 to 3 verdicts"),
        (ban(evidence=[rejection(index=number) for number in range(4)]), "1 to 3 verdicts"),
        (ban(until=2**60), "at no time"),
    ],
)  # fmt: skip
def test_void_bans_are_refused_by_name(entry: Entry, complaint: str) -> None:
    with pytest.raises(BadMessage, match=complaint):
        Bans(verify).note_untrusted(entry, RUN, NOW)


@pytest.mark.parametrize(
    "reason",
    [
        "the policy is older than the run uses",
        "places before it in the draw order were left out",
        "this place in the draw order was filled before",
        "not msgpack: incomplete input",
        Reason.MALFORMED_PROOF.value,
        Reason.GROUP_SIZE.value,
        Reason.UNFINISHED.value,
    ],
)
def test_what_an_honest_worker_may_cause_bans_nobody(reason: str) -> None:
    """By a restart, a bad line, a slow machine or an old version of the program."""
    assert not convicts([rejection(10.0**6, reason=reason, index=at) for at in range(3)])


def test_strikes_convict_together_if_they_follow_on_each_other() -> None:
    strikes = [rejection(CLEAR, index=number) for number in range(3)]
    assert convicts(strikes)
    assert not convicts(strikes[:2])
    assert not convicts([*strikes[:2], rejection(CLEAR, index=9, version=9)])
    assert not convicts([*strikes[:2], rejection(CLEAR, index=9, worker=STRANGER)])
    heavy_tailed = Reason.SURPRISE.value
    assert not convicts([rejection(10.0**9, reason=heavy_tailed)])


def test_bytes_that_are_none_are_refused_and_a_ban_reads_as_it_was_written() -> None:
    whole = Ban((rejection(),), 5).to_bytes()
    assert decode_ban_untrusted(whole, verify) == Ban((rejection(),), 5)
    for at in range(len(whole) - 1):  # the last is when it ends, which the entry signs
        with pytest.raises(BadMessage):
            decode_ban_untrusted(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :], verify)


async def test_a_trainer_takes_nothing_of_a_banned_worker_nor_keeps_what_waits(
    tmp_path: Path,
) -> None:
    """And nothing of a validator whose ledger tells two stories."""
    async with open_bench(tmp_path, is_drawn=False, ban_seconds=TERM) as bench:
        for index in range(2):
            receipt, _ = await bench.hand_over(await bench.honest(index))
            assert receipt is Receipt.TAKEN
        assert len(bench.intake.buffer) > 0
        wall = bench.world.wall()
        cited = [rejection(by=JUDGE, worker=DRAWER, run=bench.run)]
        bench.ledgers.take_own(ban(JUDGE, cited, wall=wall, until=wall + TERM))
        receipt, why = await bench.hand_over(await bench.honest(2))
        assert receipt is Receipt.UNWANTED
        assert "banned until" in why
        with trio.move_on_after(0):
            await bench.intake.wait_groups(100)
        assert len(bench.intake.buffer) == 0
        bench.ledgers.take_own(ban(JUDGE, cited, wall=wall + 1, until=wall + TERM))
        assert bench.ledgers.is_forked(JUDGE.peer_id)
        receipt, why = await bench.hand_over(await bench.honest(4))
        assert receipt is Receipt.UNWANTED
        assert "two stories" in why


async def test_whom_a_node_shuns_is_told_by_bans_and_forks_alone(tmp_path: Path) -> None:
    """Each entry of any kind had all bans weighed anew: 4,096 of them for a verdict."""
    async with open_bench(tmp_path, is_drawn=False, ban_seconds=TERM) as bench:
        book, told = bans_of(bench.node), []
        bench.node.shunned.replace = told.append
        wall = bench.world.wall()
        cited = [rejection(by=JUDGE, worker=DRAWER, run=bench.run)]
        first = ban(JUDGE, cited, wall=wall, until=wall + TERM)
        bench.ledgers.take_own(first)
        assert [list(shunned) for shunned in told] == [[DRAWER.peer_id]]
        head = Head(first.seqno, first.digest)
        for number in range(5):
            entry = make_entry(head, JUDGE, "verdict", b"%d" % number, wall)
            bench.ledgers.take_own(entry)
            head = check_link(head, entry)
        bench.ledgers.take_own(make_entry(head, JUDGE, BAN_KIND, first.body, wall))  # not news
        assert len(told) == 1
        bench.ledgers.take_own(ban(JUDGE, cited, wall=wall + 1, until=wall + TERM))
        assert told[1:] == [{}]
        assert book.standing(DRAWER.peer_id) is None


async def test_evidence_that_has_rotted_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so is another's work, well signed."""
    content = encode_groups((Group(0, (Completion((1, 2, 3), proof=b"p"),)),))
    asked = replace(rejection().commitment, content=content_digest(content))
    cited = replace(rejection(), commitment=asked)
    works = [
        Submission.sign(replace(asked, index=index), content, WORKER).to_bytes()
        for index in (asked.index, asked.index + 1)
    ]
    said: list[bytes] = []

    async def answer(*_: object, **__: object) -> bytes:
        return said[-1]

    monkeypatch.setattr(evidence, "ask", answer)
    node: Any = SimpleNamespace(world=SimpleNamespace(verify=verify))
    rotten = [
        bytes([*works[0][:at], works[0][at] ^ 1, *works[0][at + 1 :]])
        for at in range(len(works[0]))
    ]
    for data in (*rotten, works[0][:-1], b"", works[1]):
        said.append(data)
        assert await fetch_evidence(node, JUDGES[0].peer_id, cited) is None
    said.append(works[0])
    found = await fetch_evidence(node, JUDGES[0].peer_id, cited)
    assert found is not None
    assert found.commitment == asked


def test_more_names_than_there_is_room_for_push_out_the_oldest() -> None:
    bans = Bans(lambda *_: True)
    for number in range(MAX_BANNED + 5):
        worker = KeyPair((number + 1).to_bytes(32, "big"))
        entry = ban(evidence=[rejection(worker=worker)]) if number < 3 else None
        entry = entry or make_entry(
            EMPTY, JUDGES[0], BAN_KIND, _unsigned(worker).to_bytes(), NOW
        )
        bans.note_untrusted(entry, RUN, NOW)
    assert len(list(bans)) == MAX_BANNED


def _unsigned(worker: KeyPair) -> Ban:
    verdict = replace(rejection(), commitment=rejection(worker=worker).commitment)
    return Ban((verdict,), int(NOW) + TERM)
