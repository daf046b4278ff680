"""Workers that come from another validator's hands, or say so."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from p2p.identity import KeyPair, PeerId
from p2p.ledger import LedgerFork
from p2p.ledger.core.chain import Head, sign_head
from p2p.machine import open_world
from p2p.shardcast.manifest import PolicyVersion
from proofs.checks import Verdict
from roles.inference.outbox import SubmissionOutbox
from roles.inference.role import Inference
from roles.inference.session import InferenceSession
from roles.protocol.core.assignment import REORDER_WINDOW, validator_among, validator_of
from roles.protocol.core.messages import Commitment, SignedVerdict
from roles.rl.recipe import Recipe
from roles.run import Run, sign_run
from roles.shared.durable import Durable
from roles.validator import judge as judge_module
from roles.validator.core.sequence import LOT, DrawSequences, PlaceState
from roles.validator.judge import EDITION, GAP, SUCCEEDED, Judge
from roles.validator.limits import SUCCESSION
from roles.validator.stats import ValidatorStats
from sim.node.swarm import Swarm
from sim.workloads import spine
from tests.simulation.test_roles_faults import CAST, Play, perform, validators
from tests.unit.test_run_file import OWNER, TERMS

ME, OTHER, THIRD = (KeyPair(bytes([number]) * 32) for number in (21, 22, 23))
NODE = KeyPair(b"n" * 32).peer_id
V1 = PolicyVersion(1)
FAR = 1_000_003
FRESH, UNSEEN, REPLAYED = PlaceState.FRESH, PlaceState.UNSEEN, PlaceState.REPLAYED


def take(book: DrawSequences, index: int) -> PlaceState:
    state = book.judge(NODE, V1, index)
    book.fill(NODE, V1, index, b"")
    return state


@pytest.mark.parametrize("lot", [1, LOT])
def test_a_far_place_is_taken_for_where_a_node_stands_and_pays_nothing(lot: int) -> None:
    """Any first place was fresh: a worker that drew many could sell the best of them."""
    book = DrawSequences()
    book.succeed(NODE, V1, FAR, 1, lot)
    assert [take(book, FAR + number) for number in range(lot)] == [UNSEEN] * lot
    assert take(book, FAR + lot) is FRESH
    assert book.judge(NODE, V1, FAR + lot + 2 + REORDER_WINDOW) is PlaceState.GAP
    assert take(book, FAR - REORDER_WINDOW) is UNSEEN, "it was on its way"
    assert take(book, FAR - REORDER_WINDOW) is REPLAYED
    assert take(book, FAR - REORDER_WINDOW - 1) is REPLAYED
    book.succeed(NODE, V1, 2 * FAR, 1, lot)
    assert book.judge(NODE, V1, 2 * FAR) is PlaceState.GAP, "once"
    assert book.forget_below(PolicyVersion(2)) == 0


def test_a_node_that_is_a_window_ahead_loses_nothing() -> None:
    book = DrawSequences()
    book.succeed(NODE, V1, REORDER_WINDOW, 1, LOT)
    assert [take(book, index) for index in (8, 9, 3, 10)] == [FRESH] * 4
    book.succeed(NODE, V1, FAR, 1, LOT)
    assert book.judge(NODE, V1, FAR) is PlaceState.GAP


def test_a_node_that_comes_back_goes_on_where_the_other_validator_left_it() -> None:
    book = DrawSequences()
    for index in range(4):
        assert take(book, index) is FRESH
    book.succeed(NODE, V1, 5, 1, LOT)
    assert take(book, 5) is FRESH, "nothing to forgive"
    book.succeed(NODE, V1, 100, 1, 3)
    assert [take(book, index) for index in range(100, 104)] == [UNSEEN] * 3 + [FRESH]
    assert take(book, 5) is REPLAYED


def edition(epoch: int, *judges: KeyPair) -> Run:
    names = tuple(judge.peer_id for judge in judges)
    return sign_run(replace(TERMS, epoch=epoch, validators=names), OWNER)


class Life:
    """A validator's judge from a start to its end, on a disk that stays."""

    def __init__(self, world: Any, run: Run) -> None:
        def sign(commitment: Commitment, verdict: Verdict, reason: str) -> SignedVerdict:
            unsigned = SignedVerdict(ME.peer_id, commitment, verdict, reason, 0.0, 0.0, ())
            return unsigned.signed(ME)

        host = SimpleNamespace(peer_id=ME.peer_id)
        self.node = cast(Any, SimpleNamespace(world=world, run=run, host=host))
        replayer: Any = SimpleNamespace(sign=sign, max_submission=1000)
        self.judge = Judge(self.node, run, replayer, ValidatorStats())
        self._durable = Durable(world, "validator")

    async def begin(self) -> Life:
        await self.judge.take_up_edition(self._durable)
        return self

    def answer(self, index: int, version: int = 1) -> str:
        """The reason by which a head is refuted; empty if it is not."""
        commitment = Commitment(
            self.judge.run.id, NODE, PolicyVersion(version), bytes(32), index, bytes(32)
        )
        verdict = self.judge.refute(commitment, 500)
        return "" if verdict is None else verdict.reason


class Clock:
    """A world whose clocks are moved by hand."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self.passed = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)

    def now(self) -> float:
        return 100.0 + self.passed

    def wall(self) -> float:
        return 1_700_000_000.0 + self.passed


Edit = Callable[[Clock], Any]


async def test_a_restart_is_no_succession(tmp_path: Path) -> None:
    """After a restart in an epoch above 1 every node's first place was taken for granted."""
    async with open_world(tmp_path, key=ME) as real:
        world = Clock(real)
        await Life(world, edition(1, ME)).begin()
        life = await Life(world, edition(2, ME)).begin()
        assert life.answer(FAR) == GAP
        world.passed += 10
        life = await Life(world, edition(2, ME)).begin()
        assert life.answer(FAR) == GAP


async def test_new_validators_forgive_what_others_may_have_judged_and_for_so_long(
    tmp_path: Path,
) -> None:
    async with open_world(tmp_path, key=ME) as real:
        world = Clock(real)
        await Life(world, edition(1, OTHER)).begin()
        life = await Life(world, edition(2, ME)).begin()
        answers = map(life.answer, itertools.count(FAR))
        unseen = list(itertools.takewhile(bool, answers))
        assert unseen == [SUCCEEDED] * len(unseen)
        assert 1 <= len(unseen) <= LOT
        assert life.answer(3 * FAR) == GAP
        world.passed += SUCCESSION - 1
        life = await Life(world, edition(2, ME)).begin()
        assert life.answer(FAR) == SUCCEEDED, "a restart does not shorten it"
        world.passed += 2
        assert life.answer(FAR, version=2) == GAP, "nor make it longer"
        life = await Life(world, edition(2, ME)).begin()
        assert life.answer(FAR) == GAP


async def test_who_judged_a_node_before_forgives_it_nothing(tmp_path: Path) -> None:
    """That other nodes' validator has changed is no reason."""
    async with open_world(tmp_path, key=ME) as real:
        before = (ME.peer_id, OTHER.peer_id)
        world = Clock(real)
        await Life(world, edition(1, ME, OTHER)).begin()
        life = await Life(world, edition(2, ME, THIRD)).begin()
        run_id = life.judge.run.id
        own, theirs = (
            next(
                version
                for version in itertools.count()
                if validator_among(before, run_id, NODE, PolicyVersion(version)) == judge
            )
            for judge in before
        )
        assert life.answer(FAR, own) == GAP
        assert life.answer(FAR, theirs) == SUCCEEDED


async def test_a_validator_goes_on_where_one_was_that_told_two_stories(tmp_path: Path) -> None:
    """Its work falls to others at once, in the middle of its workers' places."""
    first = sign_head(Head(3, b"1" * 32), OTHER)
    fork: Any = LedgerFork(first, sign_head(Head(3, b"2" * 32), OTHER))
    async with open_world(tmp_path, key=ME) as real:
        life = await Life(Clock(real), edition(1, ME, OTHER)).begin()
        versions = range(1, 20)
        answers = [life.answer(FAR, version) for version in versions]
        assert answers == [GAP] * len(versions)
        life.judge.hear_news(fork)
        for version in versions:
            judge = validator_of(life.node.run, NODE, PolicyVersion(version))
            after = GAP if judge == ME.peer_id else SUCCEEDED
            assert life.answer(2 * FAR, version) == after
            assert ME.peer_id == validator_of(
                life.node.run, NODE, PolicyVersion(version), {OTHER.peer_id: fork}
            )


@pytest.mark.parametrize("harm", ["missed an edition", "new", "damaged"])
async def test_who_cannot_know_is_lenient(harm: str, tmp_path: Path) -> None:
    """An honest worker is not stranded, whatever the validator has forgotten."""
    async with open_world(tmp_path, key=ME) as real:
        world = Clock(real)
        if harm != "new":
            await Life(world, edition(1 if harm == "missed an edition" else 3, ME)).begin()
        if harm == "damaged":
            await real.disk.replace(EDITION, b"{}")
        life = await Life(world, edition(3, ME)).begin()
        assert life.answer(FAR) == SUCCEEDED
        life = await Life(world, edition(3, ME)).begin()
        world.passed += SUCCESSION + 1
        assert life.answer(FAR) == GAP


class Leaper(Inference):
    """Honest work, of places that it has chosen, as soon as the validator is there again."""

    name: ClassVar[str] = "leaper"
    may_begin: ClassVar[bool] = False

    def make_session(self, *parts: Any) -> InferenceSession:
        session = super().make_session(*parts)
        outbox: SubmissionOutbox = session._outbox
        plain, work = outbox.next_index, session.work_forever
        outbox.next_index = lambda version: plain(version) or FAR  # type: ignore[method-assign]

        async def later() -> None:
            while not self.may_begin:
                await session.node.world.sleep(0.1)
            await work()

        session.work_forever = later  # type: ignore[method-assign]
        return session


class Restarting(Play):
    """The validator is killed and started again, in an epoch above 1."""

    async def disturb(self, swarm: Swarm) -> None:
        await swarm.sleep(8.0)
        swarm.restart("validator-1")
        Leaper.may_begin = True


def test_a_worker_that_chooses_its_places_is_paid_nothing_after_a_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Place 1,000,003 was accepted, and all behind it."""
    real = spine._write_run

    def write_run(swarm: Swarm, recipe: Recipe) -> Run:
        run = real(swarm, recipe)
        return sign_run(replace(run.terms, epoch=2), swarm.simulation.keys.signer("owner"))

    monkeypatch.setattr(spine, "_write_run", write_run)
    monkeypatch.setattr(judge_module, "SUCCESSION", 8.0)
    monkeypatch.setattr(Leaper, "may_begin", False)
    cast = {**CAST, "leaper-1": f"{__name__}:Leaper"}
    health: Mapping[str, Any] = perform(Restarting(cast), steps=24)
    records = validators(health)[0]["nodes"]
    leaper: PeerId = health["leaper-1"]["peer"]
    assert health["done"] == 1
    assert records[leaper]["accepted"] == 0
    assert set(records[leaper]["reasons"]) == {GAP}
    honest = [record for peer, record in records.items() if peer != leaper]
    assert sum(record["accepted"] for record in honest) > 20
    assert sum(record["rejected"] for record in honest) == 0
