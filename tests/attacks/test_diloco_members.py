"""Members that abuse what a round lets them say, and what convicts them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import trio

from p2p.errors import BadMessage
from p2p.identity import PeerId
from p2p.machine import open_world
from p2p.wire import KI
from p2p.world import World
from roles.contract.core.diloco import Codec, DilocoTerms
from roles.diloco.config import DilocoConfig
from roles.diloco.core import events as ev, messages as msg
from roles.diloco.core.outer import Arithmetic
from roles.diloco.core.pieces import (
    PieceGrid,
    check_part,
    digest_of,
    norm_of,
    owners,
    sum_piece,
)
from roles.diloco.core.round import (
    MAX_STATEMENTS,
    MOST_UNPROVEN,
    RoundCore,
    genesis,
    owners_of,
    shares_of,
)
from roles.diloco.exchange import PieceClient, PieceFile, PieceServer, PiecesUnavailable
from roles.diloco.reduction import Reduction, ReductionFailed
from roles.diloco.session import DilocoSession
from roles.engines.config import EngineConfig
from sim.workloads.inner import FakeInner
from tests.support.pieces import encode_all, in_memory
from tests.sweeps import swept
from tests.unit import diloco_swarm
from tests.unit.core_swarm import FakeSigner, fake_verify, peer_named
from tests.unit.diloco_swarm import RUN, DilocoSwarm, Machine, digest

GRID = PieceGrid.of(4096, Codec.INT4)
PEERS = sorted(peer_named(n) for n in range(4))
ME, LIAR = PEERS[1], PEERS[3]
BEFORE = genesis(RUN, PEERS)
CONFIG = replace(diloco_swarm.CONFIG, max_tokens=1000)


def core(**changes: object) -> RoundCore:
    arguments: dict[str, object] = {
        "run": RUN, "records": [BEFORE], "held": 0, "kept": None, "verify": fake_verify,
        "may_join": lambda peer: True, "anchor": None, "now": 0.0,
    }  # fmt: skip
    return RoundCore(FakeSigner(ME), CONFIG, GRID, **(arguments | changes))  # type: ignore[arg-type]


def with_beats(**changes: object) -> RoundCore:
    made = core(**changes)
    for peer in (PEERS[0], *PEERS[2:]):
        made.handle(ev.Received(peer, msg.Beat(0, BEFORE.digest, 0, 0)), 0.0)
    return made


def pieces_of(seed: int) -> list[bytes]:
    return encode_all(
        GRID, np.random.default_rng(seed).standard_normal(4096).astype(np.float32)
    )


def ready(peer: PeerId, pieces: list[bytes], **changes: object) -> msg.Ready:
    norms = tuple(
        float(np.float32(norm_of(GRID.decode_untrusted(at, one))))
        for at, one in enumerate(pieces)
    )
    made = msg.Ready(
        1, 0, BEFORE.digest, 500, 0.0, norms, tuple(map(digest_of, pieces)), author=peer
    )
    return signed(replace(made, **changes))


def signed(said):  # type: ignore[no-untyped-def]
    return said.signed(RUN, FakeSigner(said.author))


def convicts(fault: msg.Fault, *, sender: PeerId = PEERS[0]) -> bool:
    made = with_beats()
    effects = made.handle(ev.Received(sender, fault), 1.0)
    named = any(isinstance(one, ev.Convict) for one in effects)
    assert named == (fault.culprit in made.convicted)
    if named:  # and all others hear of it
        told = {
            one.peer for one in effects if isinstance(one, ev.Send) and one.message == fault
        }
        assert told == {peer for peer in PEERS if peer not in (ME, fault.culprit)}
    return named


def outcome(name: bytes) -> msg.Outcome:
    return msg.Outcome(PLAN, digest(name), digest(name))


HONEST = {peer: pieces_of(place) for place, peer in enumerate(PEERS)}
READYS = tuple(ready(peer, HONEST[peer]) for peer in PEERS)
PLAN = msg.Plan(
    1, BEFORE.digest, tuple((one.author, one.digest) for one in READYS), tuple(PEERS)
)
OWNED = [at for at, peer in enumerate(owners_of(GRID, READYS)) if peer == LIAR]


def summed(pieces: list[bytes]) -> msg.Sum:
    return signed(msg.Sum(1, 0, PLAN.id, OWNED[0], tuple(map(digest_of, pieces)), author=LIAR))


def column(index: int) -> tuple[bytes, ...]:
    return tuple(HONEST[peer][index] for peer in PEERS)


SHARES = shares_of(READYS).values()
RIGHT = [
    sum_piece(GRID, at, [GRID.decode_untrusted(at, one) for one in column(at)], SHARES)
    for at in OWNED
]


def with_readys(**changes: object) -> RoundCore:
    made = with_beats(**changes)
    for one in READYS:
        made.handle(ev.Received(one.author, one), 0.1)
    return made


Spoil = Callable[[msg.Plan, Machine, DilocoSwarm], msg.Plan]


def without_one(plan: msg.Plan, liar: Machine, swarm: DilocoSwarm) -> msg.Plan:
    victim = swarm.machines[0].peer
    return replace(plan, members=tuple(one for one in plan.members if one != victim))


def those_who_are_not_there(plan: msg.Plan, liar: Machine, swarm: DilocoSwarm) -> msg.Plan:
    absent = [machine.peer for machine in swarm.machines[5:]]
    return replace(plan, members=tuple(sorted({*plan.members, *absent})))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda plan, liar, swarm: replace(plan, members=(liar.peer,)),
        # its own update alone
        lambda plan, liar, swarm: replace(
            plan, contributors=tuple(one for one in plan.contributors if one[0] == liar.peer)
        ),
        without_one,
        those_who_are_not_there,
    ],
)
def test_a_proposer_cannot_change_what_the_others_do_not_see(spoil: Spoil) -> None:
    """One member could put all others out, or sum its own update alone."""
    swarm = DilocoSwarm(11, 3, founders=5)
    liar = swarm.machines[2]

    def lie(machine: Machine, peer: PeerId, message: msg.RoundMessage) -> msg.RoundMessage:
        if machine is not liar or not isinstance(message, msg.Propose) or message.carried:
            return message
        plan = spoil(message.plan, liar, swarm)
        return replace(message, plan=plan).signed(RUN, FakeSigner(liar.peer))

    swarm.twist = lie
    swarm.start(0, 1, 2, 3, 4)
    swarm.run(160)
    swarm.check()
    honest = [swarm.machines[n] for n in (0, 1, 3, 4)]
    for record in honest[0].records[1:]:
        assert {machine.peer for machine in honest} <= {*record.members}
        assert {*record.members} <= {*swarm.founders}
        assert len(record.outcome.plan.contributors) >= 3
    assert min(machine.held for machine in honest) >= 8


def test_two_of_five_that_promise_the_last_view_there_is_stop_no_round() -> None:
    """The others followed a third of the members there; beyond it no view can be named."""
    swarm = DilocoSwarm(5, 1)
    liars = swarm.machines[3:]

    def lie(machine: Machine, peer: PeerId, message: msg.RoundMessage) -> msg.RoundMessage:
        if machine in liars and isinstance(message, msg.Beat) and machine.core:
            previous = machine.core.record.digest
            step = machine.core.record.step + 1
            far = msg.Promise(step, 2**40, previous, None, author=machine.peer)
            return far.signed(RUN, FakeSigner(machine.peer))
        return message

    swarm.twist = lie
    swarm.start()
    swarm.run(120)
    assert min(machine.held for machine in swarm.machines[:3]) >= 5


def test_beats_of_one_that_lacks_everything_are_answered_twice_a_second_at_most() -> None:
    """A beat of a hundred bytes drew up to 32 records and all evidence, as often as it came."""
    swarm = DilocoSwarm(4, 0)
    swarm.start()
    swarm.run(40)
    made = swarm.machines[0].core
    assert made is not None
    assert made.record.step >= 2
    for number in range(20):
        author = peer_named(90 + number)
        one, other = (msg.Vote(1, 0, outcome(b"%d" % n), author=author) for n in range(2))
        made.convicted[author] = msg.Doubled(one, other)
    sent = []
    for number in range(1000):
        beat = msg.Beat(0, made.records[0].digest, 0, 0)
        sent += made.handle(ev.Received(swarm.machines[1].peer, beat), 50 + number / 1000)
    answers = [
        one for one in sent
        if isinstance(one, ev.Send) and isinstance(one.message, msg.Chain | msg.Doubled)
    ]  # fmt: skip
    assert 2 <= len(answers) <= 4


def test_strangers_that_beat_first_keep_no_member_from_being_heard() -> None:
    """128 identities filled a new life's table before the members came."""
    made = core()
    for number in range(200):
        made.handle(
            ev.Received(peer_named(100 + number), msg.Beat(0, BEFORE.digest, 0, 0)), 0.1
        )
    for peer in PEERS:
        made.handle(ev.Received(peer, msg.Beat(0, BEFORE.digest, 0, 0)), 7.0)
    assert made.live(7.5) == PEERS
    assert not made.is_stalled


def test_false_evidence_is_judged_sixteen_times_a_round_and_peer() -> None:
    """Each piece may cost 64 signatures, and brings no penalty: others believed it first."""
    calls = 0

    def verify(*arguments: object) -> bool:
        nonlocal calls
        calls += 1
        return False

    made = core(verify=verify)
    one, other = (msg.Vote(1, 0, outcome(name), author=LIAR) for name in (b"a", b"b"))
    for _ in range(100):
        made.handle(ev.Received(PEERS[0], msg.Doubled(one, other)), 1.0)
    assert calls == MOST_UNPROVEN
    made.handle(ev.Received(PEERS[2], msg.Doubled(one, other)), 1.0)
    assert calls == MOST_UNPROVEN + 1


def test_a_proposal_out_of_turn_displaces_none() -> None:
    """A member out of turn displaced a plan that could not be agreed to yet."""
    made = with_readys()
    stranger = peer_named(70)
    plan = replace(PLAN, members=tuple(sorted((*PEERS, stranger))))
    right = signed(msg.Propose(1, 0, plan, None, (), author=PEERS[0]))
    wrong = signed(msg.Propose(1, 0, PLAN, None, (), author=LIAR))
    for one in (right, wrong):
        made.handle(ev.Received(one.author, one), 1.0)
    assert made.round.proposal is None
    effects = made.handle(ev.Received(stranger, msg.Beat(0, BEFORE.digest, 0, 0)), 1.5)
    assert any(isinstance(one, ev.Reduce) and one.plan == plan for one in effects)


def test_a_restarted_member_sums_no_second_plan_of_one_view() -> None:
    """Two plans, before and after a restart, made a member sign two sums."""
    made = with_readys()
    first = signed(msg.Propose(1, 0, PLAN, None, (), author=PEERS[0]))
    effects = made.handle(ev.Received(PEERS[0], first), 1.0)
    assert any(isinstance(one, ev.Reduce) for one in effects)
    kept = next(one for one in effects if isinstance(one, ev.Keep))
    assert effects.index(kept) < [isinstance(one, ev.Reduce) for one in effects].index(True)
    other = replace(PLAN, contributors=PLAN.contributors[:3])
    for plan, computed in ((other, False), (PLAN, True)):
        again = with_readys(kept=kept)
        second = signed(msg.Propose(1, 0, plan, None, (), author=PEERS[0]))
        effects = again.handle(ev.Received(PEERS[0], second), 1.0)
        assert any(isinstance(one, ev.Reduce) for one in effects) == computed


class _Reader:
    """Tells whether somebody could still read."""

    async def __call__(self, index: int) -> bytes:
        return bytes(8)


def test_views_that_fail_leave_no_sums_behind() -> None:
    """Each left a share of the model, until a round was committed."""
    server = PieceServer(cast(Any, None), lambda _: True)
    held = weakref.WeakValueDictionary[int, _Reader]()
    for view in range(10):
        read = held[view] = _Reader()
        server.offer_pieces(1, view, read, range(1))
        if view % 2:
            total = msg.Sum(1, view, msg.NO_DIGEST, 0, (msg.NO_DIGEST,), author=ME)
            trio.run(server.offer_sum, total, read)
        del read
    assert sorted(held) == [8, 9]


STRANGER = peer_named(70)


def doubled(author: PeerId) -> msg.Doubled:
    one, other = (signed(msg.Vote(1, 0, outcome(name), author=author)) for name in (b"a", b"b"))
    return msg.Doubled(one, other)


@pytest.mark.parametrize(
    ("sender", "culprit", "counts"),
    [
        (PEERS[0], LIAR, True),
        (STRANGER, LIAR, False),
        (PEERS[0], STRANGER, False),
        (STRANGER, STRANGER, False),
    ],
)
def test_evidence_is_from_members_and_about_members(
    sender: PeerId, culprit: PeerId, counts: bool
) -> None:
    """A mebibyte for each key was kept for ever, and sent to all."""
    made = core()
    effects = made.handle(ev.Received(sender, doubled(culprit)), 1.0)
    assert (culprit in made.convicted) == counts
    assert any(isinstance(one, ev.Send) for one in effects) == counts


def test_evidence_about_a_member_that_has_left_still_counts() -> None:
    """Else it would join again."""
    swarm = DilocoSwarm(4, 0)
    swarm.start()
    swarm.run(15)
    swarm.kill(3)
    swarm.run(80)
    made = swarm.machines[0].core
    assert made is not None
    gone = swarm.machines[3].peer
    assert gone not in made.members
    made.handle(ev.Received(swarm.machines[1].peer, doubled(gone)), swarm.now)
    assert gone in made.convicted


EXTREMES: list[Callable[[], msg.RoundMessage]] = [
    lambda: signed(replace(READYS[0], rate=1.7e308)),
    lambda: signed(replace(READYS[0], norms=(3e38,) * GRID.pieces)),
    lambda: signed(replace(READYS[0], tokens=0)),
    lambda: signed(replace(READYS[0], norms=(), digests=())),
    lambda: signed(replace(READYS[0], step=0)),
    lambda: signed(msg.Sum(1, 0, PLAN.id, 0, (), author=LIAR)),
    lambda: signed(msg.Sum(1, 0, PLAN.id, 2**40, (msg.NO_DIGEST,), author=LIAR)),
    lambda: signed(msg.Vote(1, 0, replace(outcome(b"a"), plan=NOBODYS), author=LIAR)),
    lambda: msg.BadSum(
        signed(msg.Sum(1, 0, NOBODYS.id, 0, (msg.NO_DIGEST,), author=LIAR)), NOBODYS, (), 0, ()
    ),
    lambda: msg.Record(0, outcome(b"a"), tuple((peer, bytes(16_000)) for peer in PEERS)),
    lambda: replace(READYS[0], signature=bytes(2**19)),
]
NOBODYS = replace(PLAN, contributors=())


@pytest.mark.parametrize("make", EXTREMES)
def test_finite_numbers_that_overflow_are_no_messages(
    make: Callable[[], msg.RoundMessage],
) -> None:
    """Each was read, and ended whoever computed with it."""
    with pytest.raises(BadMessage):
        msg.decode_message_untrusted(msg.encode_message(make()))


@pytest.mark.parametrize("rate", [0.0, 5e-324, 1.0, 2.0**40])
@pytest.mark.parametrize("other", [0.0, 5e-324, 1.0, 2.0**40])
@pytest.mark.parametrize("pieces", [1, 64, 2**14])
def test_whatever_rates_are_claimed_all_pieces_have_owners(
    rate: float, other: float, pieces: int
) -> None:
    found = owners(pieces, {PEERS[0]: rate, PEERS[1]: other, PEERS[2]: 1e6})
    assert len(found) == pieces
    assert found == sorted(found)


def reduction(server: PieceServer, client: object) -> Reduction:
    request = ev.Reduce(0, PLAN, tuple(READYS), None, (LIAR,))
    return Reduction(
        cast(Any, None), FakeSigner(ME), fake_verify, RUN, cast(Any, None), server,
        cast(Any, client), request, PieceFile(cast(Any, None), "mean", GRID),
        lambda fault: None, lambda said: None,
    )  # fmt: skip


def test_a_vote_for_a_mean_that_is_something_else_fails_that_view_alone() -> None:
    """Whoever took the outer step with the root of the state ended."""
    server = PieceServer(cast(Any, None), lambda _: True)
    root = server.offer(in_memory([bytes(4096)] * 3))
    carried = msg.Outcome(PLAN, root, msg.NO_DIGEST)
    with pytest.raises(ReductionFailed) as failed:
        trio.run(reduction(server, None).carried, carried)
    assert failed.value.suspects == (LIAR,)


class Endless(PieceClient):
    """A source whose list names as many pieces as a list can."""

    async def _list(self, root: bytes, sources: Sequence[PeerId]) -> tuple[bytes, ...] | None:
        return (msg.NO_DIGEST,) * 2**14

    async def pieces(self, *arguments: object) -> None:
        raise AssertionError("a piece was asked for")


def test_no_more_pieces_are_fetched_than_a_vector_has() -> None:
    """The root that a liar votes for named eight gibibytes, which all kept in memory."""
    client = Endless(cast(Any, None), cast(Any, None))

    async def fetch(sources: Sequence[PeerId]) -> None:
        await client.blob(msg.NO_DIGEST, sources, GRID.pieces, cast(Any, None))

    with pytest.raises(PiecesUnavailable, match="16384 pieces"):
        trio.run(fetch, [LIAR])


@functools.cache
def rounds_of(size: int, founders: int, way: str, told: int, seed: int = 1) -> int:
    """Rounds in five minutes; the last member lies its ``way`` to all but ``told`` others."""
    swarm = DilocoSwarm(size, seed, founders=founders)
    liar, rest = swarm.machines[-1], {one.peer for one in swarm.machines[told:]}

    def lie(
        machine: Machine, peer: PeerId, message: msg.RoundMessage
    ) -> msg.RoundMessage | None:
        if machine is not liar:
            return message
        match way, message:
            case "beats", msg.Beat() if peer in rest:
                return None
            case "leaves", msg.Beat() if peer in rest:
                return replace(message, is_leaving=True)
            case "reports", msg.Beat():
                return replace(message, heard=0 if peer in rest else 2**64 - 1)
            case "heads", msg.Ready() if peer in rest:
                return None
        return message

    swarm.twist = lie  # type: ignore[assignment]
    swarm.start()
    swarm.run(300)
    swarm.check()
    return min(machine.held for machine in swarm.machines[:-1])


HALVES = [
    (size, founders, way, told)
    for way in ("beats", "leaves", "reports", "heads")
    for size, founders in ((3, 3), (5, 5), (6, 5), (7, 7))
    for told in range(1, size - 1)
]


@pytest.mark.parametrize(("size", "founders", "way", "told"), swept(HALVES, 1))
def test_who_says_something_to_some_alone_slows_no_round(
    size: int, founders: int, way: str, told: int
) -> None:
    """One that beat to half of the others cost nearly every plan a view."""
    honest = rounds_of(size, founders, "", 0)
    least = 0.6 if way == "heads" else 0.9
    assert rounds_of(size, founders, way, told) >= least * honest


@pytest.mark.parametrize("size", swept([3, 4, 5], 1))
@pytest.mark.parametrize("spoil", [without_one, those_who_are_not_there])
def test_reports_of_one_liar_put_nobody_out_and_nobody_in(spoil: Spoil, size: int) -> None:
    """Of three and of four members one was a third, whose report counted."""
    swarm = DilocoSwarm(11, 3, founders=size)
    liar, victim = swarm.machines[size - 1], swarm.machines[0].peer
    absent = tuple(machine.peer for machine in swarm.machines[5:])

    def lie(machine: Machine, peer: PeerId, message: msg.RoundMessage) -> msg.RoundMessage:
        if machine is liar and isinstance(message, msg.Beat) and machine.core:
            place = 1 << machine.core.members.index(victim)
            return replace(message, heard=~place & 0xFF, leaving=place, joiners=absent)
        if machine is liar and isinstance(message, msg.Propose) and not message.carried:
            plan = spoil(message.plan, liar, swarm)
            return replace(message, plan=plan).signed(RUN, FakeSigner(liar.peer))
        return message

    swarm.twist = lie
    swarm.start(*range(size))
    swarm.run(200)
    swarm.check()
    honest = {machine.peer for machine in swarm.machines[: size - 1]}
    records = swarm.machines[0].records[1:]
    assert len(records) >= 8
    for record in records:
        assert honest <= {*record.members} <= {*swarm.founders}


@pytest.mark.parametrize("far", [1, 2**39])
def test_a_promise_costs_signatures_once(far: int) -> None:
    """4,000 copies a second of one member took the others' whole core."""
    calls = 0

    def verify(*arguments: Any) -> bool:
        nonlocal calls
        calls += 1
        return fake_verify(*arguments)

    made = core(verify=verify)
    promise = signed(msg.Promise(1, far, BEFORE.digest, None, author=LIAR))
    for _ in range(100):
        made.handle(ev.Received(LIAR, promise), 1.0)
    assert calls == (far == 1)
    vote = replace(signed(msg.Vote(1, 0, outcome(b"a"), author=LIAR)), signature=bytes(64))
    for view in range(2, 200):
        unsound = signed(msg.Promise(1, view, BEFORE.digest, vote, author=LIAR))
        made.handle(ev.Received(LIAR, unsound), 1.0)
    assert calls <= 2 * MAX_STATEMENTS + 1


def test_a_flood_of_late_statements_hides_no_second_story() -> None:
    """After 4,096 of them nothing late was held against its author."""
    made = core()
    votes = [signed(msg.Vote(1, 0, outcome(b"x"), author=peer)) for peer in PEERS]
    made.handle(ev.Received(LIAR, votes[-1]), 1.0)
    record = msg.Record(0, outcome(b"x"), tuple((one.author, one.signature) for one in votes))
    made.handle(ev.Received(PEERS[0], record), 1.0)
    for view in range(1, 5000):
        late = signed(msg.Vote(1, view, outcome(b"x"), author=LIAR))
        made.handle(ev.Received(LIAR, late), 1.0)
    assert LIAR not in made.convicted
    made.handle(ev.Received(LIAR, signed(msg.Vote(1, 0, outcome(b"y"), author=LIAR))), 1.0)
    assert LIAR in made.convicted


@pytest.mark.parametrize("lost", [1, 2])
def test_a_member_whose_records_are_damaged_contradicts_itself_in_no_step(lost: int) -> None:
    """It signed another contribution for the step that it was at."""
    swarm = DilocoSwarm(4, 0)
    swarm.start()
    swarm.run(40)
    machine, other = swarm.machines[0], swarm.machines[1].core
    assert machine.core is not None
    assert other is not None
    while machine.core.round.ready is None:
        swarm.run(swarm.now + 0.1)
    records = machine.records
    assert machine.kept is not None
    assert machine.kept.step == len(records)
    again = core(
        records=records[:-lost], held=len(records) - lost - 1, kept=machine.kept,
        now=swarm.now,
    )  # fmt: skip
    for step in range(len(records) - lost, len(records) + 1):
        ours = msg.Ready(
            step, 0, again.record.digest, 100, 0.0, READYS[0].norms, READYS[0].digests,
            author=ME,
        )  # fmt: skip
        told = again.handle(ev.Trained(ours), swarm.now + step)
        assert not any(isinstance(one, ev.Send | ev.Keep) for one in told)
        if step < len(records):
            again.handle(ev.Received(other.me, records[step]), swarm.now + step)
            again.handle(ev.Held(step), swarm.now + step)
    assert again.record == other.record


@pytest.mark.parametrize("size", [1e-45, 3e-45, 1e-44, 1e-40, 1e-30, 1.0])
@pytest.mark.parametrize("codec", Codec)
def test_an_honest_update_is_judged_so_however_small_it_is(size: float, codec: Codec) -> None:
    """A norm travels as float32, which has no digits left at 1e-45."""
    arithmetic = Arithmetic(DilocoTerms(codec=codec), 1024)
    update = np.zeros(1024, np.float32)
    update[:2] = size
    pieces, norms = arithmetic.encoded(update, 1)
    for index, piece in enumerate(pieces):
        check_part(arithmetic.grid, index, piece, norms[index])


def session_of(world: World, founders: Sequence[PeerId]) -> DilocoSession:
    terms = DilocoTerms(codec=Codec.INT8)
    engine = FakeInner(world, EngineConfig(kind="fake"), terms, 1024)
    return DilocoSession(
        world, cast(Any, None), RUN, terms, DilocoConfig(), engine, founders, lambda _: True
    )


async def test_what_was_signed_before_a_run_began_anew_convicts_nobody(tmp_path: Path) -> None:
    """Signatures named the run alone, and editions count steps anew."""
    async with open_world(tmp_path) as world:
        old, new = (session_of(world, PEERS[:count]) for count in (3, 4))
        assert old.history != new.history
        assert session_of(world, PEERS[::-1]).history == new.history


async def test_empty_messages_that_wait_count_as_objects_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three bytes on the wire were 141 in memory."""
    monkeypatch.setattr("roles.diloco.session.MOST_WAITING", 64 * KI)
    async with open_world(tmp_path) as world:
        session = session_of(world, PEERS)
        for _ in range(1000):
            session._on_message(LIAR, msg.encode_message(msg.Chain(())))
        assert len(session._events) < 64


# Evidence: what proves a lie, and what proves nothing.


def test_a_wrong_sum_convicts_its_owner_and_a_right_one_does_not() -> None:
    wrong = [RIGHT[0][:-1] + bytes((RIGHT[0][-1] ^ 0x11,)), *RIGHT[1:]]
    index = OWNED[0]
    assert convicts(msg.BadSum(summed(wrong), PLAN, READYS, index, column(index)))
    assert not convicts(msg.BadSum(summed(RIGHT), PLAN, READYS, index, column(index)))
    assert not convicts(msg.BadSum(summed(wrong), PLAN, READYS, OWNED[1], column(OWNED[1])))


def test_evidence_of_a_sum_with_other_parts_or_signatures_proves_nothing() -> None:
    wrong = summed([RIGHT[0][:-1] + bytes((RIGHT[0][-1] ^ 0x11,)), *RIGHT[1:]])
    index = OWNED[0]
    fault = msg.BadSum(wrong, PLAN, READYS, index, column(index))
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
    assert convicts(msg.BadPart(head, 0, piece))
    assert not convicts(msg.BadPart(head, 1, HONEST[LIAR][1]))
    assert not convicts(msg.BadPart(replace(head, signature=bytes(64)), 0, piece))
    assert not convicts(msg.BadPart(READYS[3], 0, piece))  # it did not sign this one


def test_a_sum_that_was_signed_and_cannot_be_read_convicts() -> None:
    piece = nan(RIGHT[0])
    assert convicts(msg.Unreadable(summed([piece, *RIGHT[1:]]), OWNED[0], piece))
    assert not convicts(msg.Unreadable(summed(RIGHT), OWNED[0], RIGHT[0]))
    assert not convicts(msg.Unreadable(summed(RIGHT), OWNED[0], piece))
    forged = replace(summed([piece, *RIGHT[1:]]), signature=bytes(64))
    assert not convicts(msg.Unreadable(forged, OWNED[0], piece))


def test_small_norms_signed_for_large_pieces_convict() -> None:
    head = ready(LIAR, HONEST[LIAR], norms=(0.01, *READYS[3].norms[1:]))
    assert convicts(msg.BadPart(head, 0, HONEST[LIAR][0]))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (READYS[3], ready(LIAR, pieces_of(9))),
        (summed(RIGHT), summed([*RIGHT[:-1], b"x"])),
        (
            signed(msg.Vote(1, 0, outcome(b"a"), author=LIAR)),
            signed(msg.Vote(1, 0, outcome(b"b"), author=LIAR)),
        ),
        (
            signed(msg.Propose(1, 3, PLAN, None, (), author=LIAR)),
            signed(
                msg.Propose(
                    1, 3, replace(PLAN, members=tuple(PEERS[:3])), None, (), author=LIAR
                )
            ),
        ),
    ],
)
def test_two_statements_of_one_place_convict(one: msg.Statement, other: msg.Statement) -> None:
    """Whether a peer brings both, or each comes by itself."""
    assert convicts(msg.Doubled(one, other))
    assert not convicts(msg.Doubled(one, replace(other, signature=bytes(64))))
    made = with_beats()
    made.handle(ev.Received(PEERS[0], one), 1.0)
    effects = made.handle(ev.Received(PEERS[2], other), 1.0)
    assert ev.Convict(msg.Doubled(one, other)) in effects


def test_a_statement_that_its_author_did_not_sign_is_its_senders_fault() -> None:
    made = with_beats()
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
        {"previous": msg.NO_DIGEST},
        {"digests": READYS[3].digests[:-1], "norms": READYS[3].norms[:-1]},
        {"step": 2},
    ],
)
def test_a_contribution_of_too_many_tokens_of_another_step_or_shape_does_not_count(
    changes: dict[str, object],
) -> None:
    made = with_beats()
    made.handle(ev.Received(LIAR, ready(LIAR, HONEST[LIAR], **changes)), 1.0)
    assert LIAR not in made.round.readys
    made = with_beats()
    made.handle(ev.Received(LIAR, READYS[3]), 1.0)
    assert LIAR in made.round.readys


@pytest.mark.parametrize(
    "plan",
    [
        replace(PLAN, members=tuple(sorted((*PLAN.members[:3], peer_named(77))))),  # a stranger
        replace(PLAN, contributors=()),
        replace(PLAN, previous=msg.NO_DIGEST),
    ],
)
def test_a_plan_with_strangers_or_of_another_history_is_not_computed(plan: msg.Plan) -> None:
    for proposed, computed in ((plan, False), (PLAN, True)):
        made = with_readys(may_join=PEERS.__contains__)
        proposal = signed(msg.Propose(1, 0, proposed, None, (), author=PEERS[0]))
        effects = made.handle(ev.Received(proposal.author, proposal), 1.0)
        assert any(isinstance(one, ev.Reduce) for one in effects) == computed
