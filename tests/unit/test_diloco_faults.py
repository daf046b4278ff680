"""Evidence against members: what proves a lie, and what proves nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from p2p.errors import BadMessage
from p2p.identity import PeerId
from roles.contract.core.diloco import Codec, RoundConfig
from roles.diloco.core import events as ev
from roles.diloco.core.messages import (
    NO_DIGEST,
    BadPart,
    BadSum,
    Beat,
    Doubled,
    Fault,
    Outcome,
    Plan,
    Propose,
    Ready,
    Statement,
    Sum,
    Unreadable,
    Vote,
)
from roles.diloco.core.pieces import PieceGrid, digest_of, norm_of, sum_piece
from roles.diloco.core.round import RoundCore, genesis, owners_of, shares_of
from tests.support.pieces import encode_all
from tests.unit.core_swarm import FakeSigner, fake_verify, peer_named
from tests.unit.diloco_swarm import RUN, digest

GRID = PieceGrid.of(4096, Codec.INT4)
PEERS = sorted(peer_named(n) for n in range(4))
ME, LIAR = PEERS[1], PEERS[3]
BEFORE = genesis(RUN, PEERS)
CONFIG = RoundConfig(max_tokens=1000)


def core() -> RoundCore:
    made = RoundCore(
        FakeSigner(ME), CONFIG, GRID, run=RUN, records=[BEFORE], held=0, kept=None,
        verify=fake_verify, may_join=lambda peer: peer in PEERS, anchor=None, now=0.0,
    )  # fmt: skip
    for peer in (PEERS[0], *PEERS[2:]):
        made.handle(ev.Received(peer, Beat(0, BEFORE.digest, 0, 0)), 0.0)
    return made


def pieces_of(seed: int) -> list[bytes]:
    return encode_all(
        GRID, np.random.default_rng(seed).standard_normal(4096).astype(np.float32)
    )


def ready(peer: PeerId, pieces: list[bytes], **changes: object) -> Ready:
    norms = tuple(
        float(np.float32(norm_of(GRID.decode_untrusted(at, one))))
        for at, one in enumerate(pieces)
    )
    made = Ready(
        1, 0, BEFORE.digest, 500, 0.0, norms, tuple(map(digest_of, pieces)), author=peer
    )
    return signed(replace(made, **changes))


def signed(said):  # type: ignore[no-untyped-def]
    return said.signed(RUN, FakeSigner(said.author))


def convicts(fault: Fault, *, sender: PeerId = PEERS[0]) -> bool:
    made = core()
    effects = made.handle(ev.Received(sender, fault), 1.0)
    named = any(isinstance(one, ev.Convict) for one in effects)
    assert named == (fault.culprit in made.convicted)
    if named:  # and all others hear of it
        told = {
            one.peer for one in effects if isinstance(one, ev.Send) and one.message == fault
        }
        assert told == {peer for peer in PEERS if peer not in (ME, fault.culprit)}
    return named


HONEST = {peer: pieces_of(place) for place, peer in enumerate(PEERS)}
READYS = tuple(ready(peer, HONEST[peer]) for peer in PEERS)
PLAN = Plan(1, BEFORE.digest, tuple((one.author, one.digest) for one in READYS), tuple(PEERS))
OWNED = [at for at, peer in enumerate(owners_of(GRID, READYS)) if peer == LIAR]


def summed(pieces: list[bytes]) -> Sum:
    return signed(Sum(1, 0, PLAN.id, OWNED[0], tuple(map(digest_of, pieces)), author=LIAR))


def column(index: int) -> tuple[bytes, ...]:
    return tuple(HONEST[peer][index] for peer in PEERS)


SHARES = shares_of(READYS).values()
RIGHT = [
    sum_piece(GRID, at, [GRID.decode_untrusted(at, one) for one in column(at)], SHARES)
    for at in OWNED
]


def test_a_wrong_sum_convicts_its_owner_and_a_right_one_does_not() -> None:
    wrong = [RIGHT[0][:-1] + bytes((RIGHT[0][-1] ^ 0x11,)), *RIGHT[1:]]
    index = OWNED[0]
    assert convicts(BadSum(summed(wrong), PLAN, READYS, index, column(index)))
    assert not convicts(BadSum(summed(RIGHT), PLAN, READYS, index, column(index)))
    assert not convicts(BadSum(summed(wrong), PLAN, READYS, OWNED[1], column(OWNED[1])))


def test_evidence_of_a_sum_with_other_parts_or_signatures_proves_nothing() -> None:
    wrong = summed([RIGHT[0][:-1] + bytes((RIGHT[0][-1] ^ 0x11,)), *RIGHT[1:]])
    index = OWNED[0]
    fault = BadSum(wrong, PLAN, READYS, index, column(index))
    assert not convicts(replace(fault, parts=column(index + 1)))
    assert not convicts(replace(fault, told=replace(wrong, signature=bytes(64))))
    forged = (replace(READYS[0], signature=bytes(64)), *READYS[1:])
    assert not convicts(replace(fault, readys=forged))
    other = replace(PLAN, members=tuple(PEERS[:2]))
    assert not convicts(replace(fault, plan=other))


def nan(piece: bytes) -> bytes:
    return b"\xc0\x7f" + piece[2:]


@pytest.mark.parametrize("spoil", [nan, lambda piece: piece[:-1], lambda piece: piece + b"\0"])
def test_a_piece_that_was_signed_and_is_none_convicts(spoil) -> None:  # type: ignore[no-untyped-def]
    """NaN of one member became NaN of all: here it is that member's end."""
    piece = spoil(HONEST[LIAR][0])
    digests = (digest_of(piece), *READYS[3].digests[1:])
    head = ready(LIAR, HONEST[LIAR], digests=digests)
    assert convicts(BadPart(head, 0, piece))
    assert not convicts(BadPart(head, 1, HONEST[LIAR][1]))
    assert not convicts(BadPart(replace(head, signature=bytes(64)), 0, piece))
    assert not convicts(BadPart(READYS[3], 0, piece))  # it did not sign this one


def test_a_sum_that_was_signed_and_cannot_be_read_convicts() -> None:
    piece = nan(RIGHT[0])
    assert convicts(Unreadable(summed([piece, *RIGHT[1:]]), OWNED[0], piece))
    assert not convicts(Unreadable(summed(RIGHT), OWNED[0], RIGHT[0]))
    assert not convicts(Unreadable(summed(RIGHT), OWNED[0], piece))
    forged = replace(summed([piece, *RIGHT[1:]]), signature=bytes(64))
    assert not convicts(Unreadable(forged, OWNED[0], piece))


def test_small_norms_signed_for_large_pieces_convict() -> None:
    head = ready(LIAR, HONEST[LIAR], norms=(0.01, *READYS[3].norms[1:]))
    assert convicts(BadPart(head, 0, HONEST[LIAR][0]))


def outcome(name: bytes) -> Outcome:
    return Outcome(PLAN, digest(name), digest(name))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (READYS[3], ready(LIAR, pieces_of(9))),
        (summed(RIGHT), summed([*RIGHT[:-1], b"x"])),
        (
            signed(Vote(1, 0, outcome(b"a"), author=LIAR)),
            signed(Vote(1, 0, outcome(b"b"), author=LIAR)),
        ),
        (
            signed(Propose(1, 3, PLAN, None, (), author=LIAR)),
            signed(
                Propose(1, 3, replace(PLAN, members=tuple(PEERS[:3])), None, (), author=LIAR)
            ),
        ),
    ],
)
def test_two_statements_of_one_place_convict(one: Statement, other: Statement) -> None:
    """Whether a peer brings both, or each comes by itself."""
    assert convicts(Doubled(one, other))
    assert not convicts(Doubled(one, replace(other, signature=bytes(64))))
    made = core()
    made.handle(ev.Received(PEERS[0], one), 1.0)
    effects = made.handle(ev.Received(PEERS[2], other), 1.0)
    assert ev.Convict(Doubled(one, other)) in effects


def test_a_statement_that_its_author_did_not_sign_is_its_senders_fault() -> None:
    made = core()
    forged = replace(READYS[3], signature=bytes(64))
    with pytest.raises(BadMessage, match="not signed"):
        made.handle(ev.Received(PEERS[0], forged), 1.0)
    of_another_run = READYS[3].signed(bytes(32), FakeSigner(LIAR))
    with pytest.raises(BadMessage, match="not signed"):
        made.handle(ev.Received(LIAR, of_another_run), 1.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": 1001},
        {"tokens": 0},
        {"previous": NO_DIGEST},
        {"digests": READYS[3].digests[:-1], "norms": READYS[3].norms[:-1]},
        {"step": 2},
    ],
)
def test_a_contribution_of_too_many_tokens_of_another_step_or_shape_does_not_count(
    changes: dict[str, object],
) -> None:
    made = core()
    made.handle(ev.Received(LIAR, ready(LIAR, HONEST[LIAR], **changes)), 1.0)
    assert LIAR not in made.round.readys
    made = core()
    made.handle(ev.Received(LIAR, READYS[3]), 1.0)
    assert LIAR in made.round.readys


@pytest.mark.parametrize(
    "plan",
    [
        replace(PLAN, members=tuple(sorted((*PLAN.members[:3], peer_named(77))))),  # a stranger
        replace(PLAN, contributors=()),
        replace(PLAN, previous=NO_DIGEST),
    ],
)
def test_a_plan_with_strangers_or_of_another_history_is_not_computed(plan: Plan) -> None:
    for proposed, computed in ((plan, False), (PLAN, True)):
        made = core()
        for one in READYS:
            made.handle(ev.Received(one.author, one), 1.0)
        proposal = signed(Propose(1, 0, proposed, None, (), author=PEERS[0]))
        effects = made.handle(ev.Received(proposal.author, proposal), 1.0)
        assert any(isinstance(one, ev.Reduce) for one in effects) == computed
