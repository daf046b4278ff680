"""A validator that goes away while its delivery is looked at, or hands it over again."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import trio
import trio.testing

from proofs.checks import Limits
from roles.engines.base import Scored
from roles.protocol.core.lies import STRIKES, WINDOW
from roles.protocol.core.messages import AcceptedWork, Receipt
from roles.protocol.core.statements import LIE_KIND
from roles.trainer.audit import LIES, MOST_WAITING, SETTLING
from tests.trainer_bench import JUDGE, Bench, open_bench


class Gate:
    """The engine scores once it is open, and finds ``gap`` in all, if there is one."""

    def __init__(self, bench: Bench, gap: float | None = None) -> None:
        self.opened = trio.Event()
        self.asked = 0
        self._gap = gap
        self._score = bench.engine.score
        bench.engine.score = self.score

    async def score(self, *asked: Any) -> list[Scored]:
        self.asked += 1
        await self.opened.wait()
        said: list[Scored] = await self._score(*asked)
        if self._gap is None:
            return said
        gap = self._gap
        return [replace(one, evidence=replace(one.evidence, gap_max=gap)) for one in said]


async def withdraw(bench: Bench, work: AcceptedWork) -> None:
    """Hand it over, and break the connection while the trainer looks at it: the host ends what
    is done for a peer that broke a protocol."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.hand_over, work)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()


async def decided(bench: Bench) -> None:
    """Return when all that waits is looked at, and on disk."""
    for case in list(bench.auditor._waiting.values()):
        with trio.fail_after(60):
            await case.done.wait()


async def test_a_liar_that_goes_away_before_the_answer_is_convicted(tmp_path: Path) -> None:
    """A replay takes longer than no replay: who left after a second met no look, and no
    conviction, for as long as it lied."""
    async with open_bench(tmp_path) as bench:
        work = await bench.made_up(0)
        gate = Gate(bench)
        await withdraw(bench, work)
        gate.opened.set()
        await decided(bench)
        assert JUDGE.peer_id in bench.auditor.liars
        assert bench.ledger.count(LIE_KIND) == 1
        assert len(await bench.world.disk.list(LIES)) == 1


async def test_a_liar_that_goes_away_while_its_lie_is_written_is_refused_after_a_restart(
    tmp_path: Path,
) -> None:
    """It was refused by name only for as long as the trainer lived."""
    async with open_bench(tmp_path, is_drawn=False) as bench:
        work = await bench.honest(0, rewards=(0.0,) * 7 + (3e38,))
        replaced, opened = bench.world.disk.replace, trio.Event()

        async def slowly(path: str, data: Any) -> None:
            await opened.wait()
            await replaced(path, data)

        bench.world.disk.replace = slowly  # type: ignore[method-assign]
        await withdraw(bench, work)
        opened.set()
        await decided(bench)
        assert bench.ledger.count(LIE_KIND) == 1
        bench.open_trainer()
        await bench.intake.recall()
        assert JUDGE.peer_id in bench.auditor.liars


async def test_what_is_withdrawn_again_and_again_waits_once(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        works = [await bench.honest(index) for index in range(MOST_WAITING + 3)]
        gate = Gate(bench)
        for work in (works[0], *works):
            await withdraw(bench, work)
        assert len(bench.auditor._waiting) == MOST_WAITING
        gate.opened.set()
        await decided(bench)
        assert bench.auditor._waiting == {}
        assert bench.auditor.counts.replayed == MOST_WAITING
        assert await bench.hand_over(works[0]) == (Receipt.TAKEN, "")


async def test_one_finding_is_one_strike_however_often_it_is_handed_over(
    tmp_path: Path,
) -> None:
    """Where answers are lost a validator hands over again: one false strike was three."""
    async with open_bench(tmp_path, limits=Limits.bf16()) as bench:
        works = [await bench.honest(index) for index in range(STRIKES)]
        gate = Gate(bench, gap=3.0)
        gate.opened.set()
        for _ in range(2 * STRIKES):
            assert (await bench.hand_over(works[0]))[0] is Receipt.UNWANTED
        assert bench.auditor.liars == {}
        for work in works[1:]:
            await bench.hand_over(work)
        assert JUDGE.peer_id in bench.auditor.liars


async def test_no_delivery_that_comes_again_and_again_wipes_strikes_away(
    tmp_path: Path,
) -> None:
    """What is neither taken nor a strike could be handed over a hundred times between two
    lies."""
    async with open_bench(tmp_path, limits=Limits.bf16()) as bench:
        works = [await bench.honest(index) for index in range(STRIKES + 1)]
        gate = Gate(bench, gap=3.0)
        gate.opened.set()
        for work in works[1:STRIKES]:
            await bench.hand_over(work)
        gate._gap = 2.0  # borderline
        for _ in range(WINDOW):
            assert (await bench.hand_over(works[0]))[0] is Receipt.UNWANTED
        gate._gap = 3.0
        assert bench.auditor.liars == {}
        await bench.hand_over(works[STRIKES])
        assert JUDGE.peer_id in bench.auditor.liars


async def test_a_restart_under_the_same_limits_is_no_pardon(tmp_path: Path) -> None:
    """In later editions each start of the trainer gave its validators ten minutes to lie."""
    async with open_bench(tmp_path, epoch=2) as bench:
        wall = 1000.0
        bench.world.wall = lambda: wall  # type: ignore[method-assign]
        await bench.intake.recall()
        await bench.hand_over(await bench.made_up(0))
        assert bench.auditor.liars == {}  # of the limits before nothing is known
        for later, is_convicted in ((SETTLING / 2, False), (SETTLING, True)):
            wall += later
            bench.open_trainer()
            await bench.intake.recall()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(bench.auditor.work_forever)
                await bench.hand_over(await bench.made_up(1))
                nursery.cancel_scope.cancel()
            assert bool(bench.auditor.liars) is is_convicted


async def test_rewards_are_lies_under_any_limits(tmp_path: Path) -> None:
    """For ten minutes after each start of a trainer in a later edition all lies were free."""
    async with open_bench(tmp_path, is_drawn=False, epoch=2) as bench:
        await bench.intake.recall()
        await bench.hand_over(await bench.honest(0, rewards=(0.0,) * 7 + (3e38,)))
        assert JUDGE.peer_id in bench.auditor.liars
    async with open_bench(tmp_path / "drawn", epoch=2) as bench:
        await bench.intake.recall()
        await bench.hand_over(await bench.made_up(0))
        assert bench.auditor.liars == {}  # by the limits before it might have been honest
        count = len((await bench.honest(1)).logprobs) // 2
        await bench.hand_over(
            await bench.honest(1, logprobs=struct.pack(f"<{count}e", *[-18.0] * count))
        )
        assert JUDGE.peer_id in bench.auditor.liars
