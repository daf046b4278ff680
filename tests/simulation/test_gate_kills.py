"""Kills on the path of work: whatever is killed where, no dice are thrown twice, nothing is
learnt from twice, no verdict is lost, no standing invented, and nobody is struck for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import trio

from p2p.identity import Signer
from proofs.checks import Verdict
from roles.engines.fake import FakeEngine
from roles.inference.life import LifeBook
from roles.inference.outbox import Outbox
from roles.inference.windows import SILENT, TOO_OLD, Windows
from roles.protocol.core.verdict import SignedVerdict
from roles.protocol.core.window import Window
from roles.protocol.scorer import NOT_HELD, Scorer
from roles.trainer.core import gate
from roles.trainer.core.buffer import BufferedGroup
from roles.trainer.core.records import Assignment
from roles.trainer.desk import WorkDesk
from roles.trainer.gate_files import GateFiles
from roles.trainer.inbox import Inbox
from roles.trainer.intake import Intake
from roles.trainer.session import TrainerSession
from roles.validator.session import ValidatorSession
from sim.node.swarm import Swarm
from tests.support.gates import FORGER, TRUST, given_up, with_one_listed
from tests.support.swarm import (
    CAST,
    Play,
    finish,
    trainer_of,
)
from tests.sweeps import swept

POINTS: list[tuple[str, Any, str, bool]] = [
    ("trainer-1", GateFiles, "write", False),
    ("trainer-1", GateFiles, "write", True),
    ("trainer-1", WorkDesk, "_answer_window", False),
    ("trainer-1", Scorer, "score", False),
    ("trainer-1", Scorer, "score", True),
    ("trainer-1", Intake, "take", False),
    ("trainer-1", Inbox, "keep", True),
    ("trainer-1", Intake, "take", True),
    ("trainer-1", WorkDesk, "_conclude", True),
    ("trainer-1", WorkDesk, "_audit", False),
    ("trainer-1", WorkDesk, "_audit", True),
    ("trainer-1", WorkDesk, "_keep_proof", False),
    ("trainer-1", WorkDesk, "_keep_proof", True),
    ("trainer-1", FakeEngine, "save", False),
    ("trainer-1", TrainerSession, "publish", False),
    ("trainer-1", Inbox, "forget_all_but", False),
    ("inference-2", Outbox, "add", False),
    ("inference-2", Outbox, "sign", False),
    ("inference-2", Outbox, "sign", True),
    ("inference-2", Windows, "_ask", True),
    ("inference-2", Windows, "send", True),
    ("inference-2", LifeBook, "settle", True),
    ("inference-2", Outbox, "settle", True),
    ("validator-1", ValidatorSession, "judge", True),
    ("validator-1", ValidatorSession, "_record", False),
    ("validator-1", ValidatorSession, "_enter", False),
    ("validator-1", ValidatorSession, "_enter", True),
    ("validator-1", ValidatorSession, "_deliver", False),
]
"""Who is killed, in which step, and whether after it."""
HARMLESS = {TOO_OLD, SILENT, NOT_HELD, "the run has all its steps"}
"""Why a place may be given up."""


class Killed(Play):
    """One node is killed each time that it comes to a point, and started again."""

    def __init__(self, cast: dict[str, str], victim: str, times: Sequence[int]) -> None:
        super().__init__(cast, with_one_listed(TRUST))
        self._victim = victim
        self._times = times
        self._calls = 0
        self._here = trio.Event()
        self.kills = 0

    def owns(self, thing: object) -> bool:
        """Return True if ``thing`` is the victim's."""
        node = getattr(thing, "node", None) or getattr(thing, "_node", None)
        world = getattr(thing, "_world", None) if node is None else node.world
        return bool(world.name == self._victim)

    def stop(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, after: bool) -> None:
        plain = getattr(owner, name)

        async def step(of: object, *args: Any, **kwargs: Any) -> Any:
            if not self.owns(of):
                return await plain(of, *args, **kwargs)
            self._calls += 1
            is_last = self._calls in self._times
            value = await plain(of, *args, **kwargs) if after or not is_last else None
            if is_last:
                self._here.set()
                await trio.sleep_forever()
            return value

        monkeypatch.setattr(owner, name, step)

    async def disturb(self, swarm: Swarm) -> None:
        for _ in self._times:
            with trio.move_on_after(60):
                await self._here.wait()
            if not self._here.is_set():
                return
            self._here = trio.Event()
            swarm.kill(self._victim, torn=True)
            self.kills += 1
            await swarm.sleep(0.5)
            swarm.restart(self._victim)


@pytest.mark.parametrize("times", swept([(2, 4), (1, 3), (5, 6)], 1))
@pytest.mark.parametrize(
    ("victim", "owner", "name", "after"),
    swept(POINTS, 2),
    ids=lambda one: one if isinstance(one, str) else getattr(one, "__name__", str(one)),
)
def test_a_kill_anywhere_on_the_path_of_work_changes_nothing_that_was_said(
    victim: str,
    owner: Any,
    name: str,
    after: bool,
    times: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gate, "AUDITS", 0.6)
    said: dict[bytes, set[tuple[tuple[int, ...], str]]] = {}
    accepted: dict[str, set[bytes]] = {}
    reasons = given_up(monkeypatch)
    used: dict[int, list[tuple[bytes, int]]] = {}
    answer, sign = WorkDesk._answer_window, SignedVerdict.signed
    wait = Intake.wait_groups

    async def answer_window(self: WorkDesk, window: Window, given: Assignment) -> Any:
        if window.contents:
            said.setdefault(window.digest, set()).add((given.wanted, str(given.scorer)))
        return await answer(self, window, given)

    def signed(self: SignedVerdict, signer: Signer) -> SignedVerdict:
        if self.verdict is Verdict.ACCEPTED:
            accepted.setdefault(str(self.commitment.node), set()).add(self.commitment.digest)
        return sign(self, signer)

    async def wait_groups(self: Intake, count: int) -> list[BufferedGroup]:
        taken = await wait(self, count)
        used[self._step] = [(group.source, group.number) for group in taken]
        return taken

    monkeypatch.setattr(WorkDesk, "_answer_window", answer_window)
    monkeypatch.setattr(SignedVerdict, "signed", signed)
    monkeypatch.setattr(Intake, "wait_groups", wait_groups)
    cast = {**CAST, "inference-3": "inference"}
    if name == "_keep_proof":
        cast["cheat-1"], times = FORGER, (1,)
    play = Killed(cast, victim, times)
    play.stop(monkeypatch, owner, name, after)
    health = finish(play, steps=12, seconds=150)
    assert play.kills
    trainer = trainer_of(health)
    assert (trainer["liars"], trainer["lies"]) == ({}, 0)
    assert {len(answers) for answers in said.values()} == {1}
    assert set(reasons) <= HARMLESS, reasons
    times_used = Counter(key for keys in used.values() for key in keys)
    assert set(times_used.values()) == {1}
    for number in (2, 3):
        worker = health[f"inference-{number}"]
        state = worker["roles"]["inference"]
        assert state["owed"] == 0
        assert state["stood"] <= len(accepted[worker["peer"]])
