"""The trainer's desk for lots: whose windows have room, what counts, and who tells it again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from p2p.identity import PeerId, Signer
from p2p.shardcast.manifest import PolicyVersion
from proofs.checks import Verdict
from roles.protocol.core.assignment import validator_of
from roles.protocol.core.beacon import Chain, Pledge, Reveal
from roles.protocol.core.lots import DELAY, SignedWindow, Window, WitnessedWindow
from roles.protocol.core.groups import Commitment, Receipt, SignedVerdict
from roles.protocol.core.settlement import Settlement, SettlementReply
from roles.run import Run
from roles.run.core.trust import TrustTerms
from roles.shared.durable import Durable
from roles.trainer.core import windows
from roles.trainer.lots import LotDesk
from roles.validator import witness as witnesses
from roles.validator.witness import REPORTS, Witness
from sim.kernel.simulation import Simulation
from sim.kernel.virtual_time import run_simulation
from sim.node.world import SimWorld
from tests.trainer_bench import POLICY, Silent, make_run

TRUST = TrustTerms(share=0.1, probation=32, beacon=4.0)
CHAIN = Chain(b"desk" * 8)
LINK = 5


class Court:
    """A trainer's desk among `count` validators, and a worker."""

    def __init__(self, simulation: Simulation, count: int = 2) -> None:
        keys = simulation.keys
        self.worker = keys.signer("worker")
        self.validators = [keys.signer(f"validator-{number}") for number in range(count)]
        self.world = SimWorld(simulation, "trainer")
        me = self.world.signer.peer_id
        names = tuple(one.peer_id for one in self.validators)
        self.run: Run = make_run(trainers=(me,), validators=names, trust=TRUST)
        self.here = list(names)
        self.newest = 0
        shardcast = SimpleNamespace(
            holds=lambda _: True, manifest=lambda _: SimpleNamespace(weights_digest=POLICY)
        )
        self.node: Any = SimpleNamespace(
            world=self.world,
            run=self.run,
            peer_id=me,
            gossip=Silent(),
            ledgers=SimpleNamespace(forks=(), on_news=lambda _: None, statements=lambda *_: []),
            shardcast=shardcast,
            membership=SimpleNamespace(
                find=lambda _: [SimpleNamespace(peer=one) for one in self.here]
            ),
        )
        shardcast.newest = 0
        self.dropped: list[PeerId] = []
        intake: Any = SimpleNamespace(
            drop_work_of=self.dropped.append, note_unsent=lambda *_: None
        )
        self.desk = LotDesk(
            self.node, intake, SimpleNamespace(), Durable(self.world, "trainer")
        )  # type: ignore[arg-type]
        pledge = Pledge(self.run.id, me, 1_000, CHAIN.end).signed(self.world.signer)
        self.reveal(Reveal(pledge, LINK + DELAY, CHAIN.link(LINK + DELAY)))

    def reveal(self, reveal: Reveal) -> None:
        self.desk._beacon.links.hear(reveal, self.world.now())

    def window(
        self, first: int = 0, *, share: float = 1.0, worker: Signer | None = None
    ) -> WitnessedWindow:
        worker = worker or self.worker
        contents = tuple(bytes([first % 251, place]) * 16 for place in range(TRUST.window))
        window = Window(
            *(self.run.id, worker.peer_id, PolicyVersion(0), POLICY, first, contents),
            *(2**TRUST.window - 1, b"e" * 32, 1_000, LINK, 1),
        )
        signed = SignedWindow.sign(window, worker)
        judge = validator_of(self.run, worker.peer_id, PolicyVersion(0))
        witness = next(one for one in self.validators if one.peer_id == judge)
        return WitnessedWindow.sign(signed, share, witness)

    def verdicts(self, witnessed: WitnessedWindow) -> tuple[SignedVerdict, ...]:
        """Of all judges, on each place that is drawn."""
        record = self.desk.book.find(witnessed.digest)
        window = witnessed.window
        assert record is not None
        return tuple(
            self.verdict(window, place, judge)
            for place in record.drawn
            for judge in self.validators
        )

    def verdict(
        self, window: Window, place: int, judge: Signer, kind: Verdict = Verdict.ACCEPTED
    ) -> SignedVerdict:
        """What ``judge`` says of one place."""
        content = window.contents[place - window.first]
        commitment = Commitment(
            window.run, window.node, window.version, window.policy, place, content
        )
        rewards = (0.0,) if kind is Verdict.ACCEPTED else ()
        said = SignedVerdict(judge.peer_id, commitment, kind, "", 0.0, 0.0, rewards, b"l" * 32)
        return said.signed(judge)

    async def tell(self, settlement: Settlement) -> SettlementReply:
        peer = settlement.witnessed.window.node
        return await self.desk.settle(peer, settlement.to_bytes())

    async def settle(self, witnessed: WitnessedWindow) -> SettlementReply:
        await self.tell(Settlement(witnessed))
        return await self.tell(Settlement(witnessed, self.verdicts(witnessed)))


def play(main: Callable[[Court], Awaitable[None]]) -> None:
    async def run(simulation: Simulation) -> None:
        await main(Court(simulation))

    run_simulation(run, seed=3, horizon=100_000)


def test_a_witness_that_writes_a_small_share_earns_nobody_standing() -> None:
    """Four windows of which nothing was drawn were a probation."""

    async def main(court: Court) -> None:
        worker, standings, wall = court.worker.peer_id, court.desk.standings, court.world.wall
        for first in range(0, 64, 16):
            reply = await court.tell(Settlement(court.window(first, share=0.0)))
            assert (reply.receipt, reply.wanted) == (Receipt.UNWANTED, ())
        assert not court.desk.book.of(worker)
        for first in range(64, 96, 16):
            await court.settle(court.window(first))
        assert standings.is_proven(worker, wall())
        await court.settle(court.window(96, share=0.0))
        assert round(standings.earned(worker, wall())) == 32
        reply = await court.settle(court.window(112, share=TRUST.share))
        assert len(reply.wanted) == TRUST.window
        assert round(standings.earned(worker, wall())) == 48

    play(main)


def test_minted_names_do_not_crowd_out_who_is_in_standing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(windows, "MAX_WINDOWS", 8)
    monkeypatch.setattr(windows, "MAX_GUESTS", 4)
    monkeypatch.setattr(windows, "MAX_OF_WORKER", 3)

    async def main(court: Court) -> None:
        worker, keys = court.worker.peer_id, court.world.simulation.keys
        court.desk.standings.note_accepted(worker, TRUST.probation, court.world.wall())
        for number in range(12):
            minted = court.window(worker=keys.signer(f"minted-{number}"))
            assert (await court.tell(Settlement(minted))).receipt is Receipt.LATER
        assert len(court.desk.book) == 4
        for first in range(0, 48, 16):
            reply = await court.settle(court.window(first, share=TRUST.share))
            assert reply.receipt is Receipt.TAKEN
        reply = await court.tell(Settlement(court.window(48, share=TRUST.share)))
        assert (reply.receipt, reply.reason) == (Receipt.LATER, "too many windows are open")

    play(main)


def test_a_worker_whose_judges_are_away_keeps_its_standing() -> None:
    """It was a newcomer again whenever a validator was switched off."""

    async def main(court: Court) -> None:
        worker, world = court.worker.peer_id, court.world
        court.desk.standings.note_accepted(worker, TRUST.probation, world.wall())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(court.desk.watch_forever)
            await world.sleep(60)
            for here, is_proven in ((court.here[:0], True), (court.here, False)):
                court.here = here
                await court.tell(Settlement(court.window(share=1.0)))
                assert court.desk.book.of(worker)
                await world.sleep(windows.DUE + 2 * TRUST.beacon)
                assert not court.desk.book.of(worker)
                assert court.desk.standings.is_proven(worker, world.wall()) is is_proven
            nursery.cancel_scope.cancel()

    play(main)


@pytest.mark.parametrize("later", [3, 2 * REPORTS])
def test_a_witness_told_later_tells_again(monkeypatch: pytest.MonkeyPatch, later: int) -> None:
    """A trainer without room never heard of the window, and its worker kept quiet about it."""
    replies = [SettlementReply(Receipt.LATER, "too many windows are open")] * later
    replies.append(SettlementReply(Receipt.TAKEN, "noted"))
    asked = []

    async def ask(_: Any, peer: PeerId, __: Any, payload: bytes, **___: Any) -> bytes:
        await trio.lowlevel.checkpoint()
        asked.append((peer, payload))
        return replies[len(asked) - 1].to_bytes()

    monkeypatch.setattr(witnesses, "ask", ask)

    async def main(court: Court) -> None:
        nothing: Any = None
        witness = Witness(court.node, nothing, nothing, nothing)
        window = court.window(share=TRUST.share)
        async with trio.open_nursery() as nursery:
            witness.open(nursery)
            witness.report(window, court.verdict(window.window, 0, court.worker))
        told = (court.world.signer.peer_id, asked[0][1])
        assert asked == [told] * min(later + 1, REPORTS)

    play(main)
