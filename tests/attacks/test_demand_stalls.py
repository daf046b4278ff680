"""A trainer that waits for work must not be the one whose word keeps its workers from it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from roles.protocol.core.demand import UNIT, Demand
from roles.protocol.demand import HOLDS, HeardDemand
from roles.trainer.demand import DemandTeller

from p2p.gossip import Validity
from p2p.identity import KeyPair, PeerId
from p2p.shardcast.manifest import PolicyVersion
from roles.inference.session import InferenceSession
from roles.protocol.core.groups import Submission
from roles.run import sign_run
from sim.workloads import spine
from tests.attacks.judged import play, trainer
from tests.unit.test_run_file import TERMS

WORKERS = {"inference-1": "inference", "inference-2": "inference"}
FIRST, SECOND = (KeyPair(bytes([one]) * 32).peer_id for one in (1, 2))


def nothing(version: int, number: int) -> bytes:
    return Demand(PolicyVersion(version), number, 0, 0).to_bytes()


class Listener:
    """One node that hears demands, on a clock that tests turn."""

    def __init__(self) -> None:
        judges: list[Any] = []
        self.now = 1000.0
        self.node = SimpleNamespace(
            gossip=SimpleNamespace(subscribe=lambda _, judge, __: judges.append(judge)),
            world=SimpleNamespace(now=lambda: self.now),
        )
        self.name_trainer(FIRST)
        self.heard = HeardDemand(cast(Any, self.node))
        [self.judge] = judges

    def name_trainer(self, peer: object) -> None:
        terms = replace(TERMS, trainers=(cast(Any, peer),))
        self.node.run = sign_run(terms, KeyPair(b"o" * 32))

    def is_asked(self, version: int) -> bool | None:
        return self.heard.shares.asks_for(SECOND, PolicyVersion(version), bytes(32), 0)


def test_a_run_without_lag_takes_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a step's groups were ordered at most, and the trainer waited for the others."""
    recipe = spine._recipe
    monkeypatch.setattr(spine, "_recipe", lambda scenario: replace(recipe(scenario), lag=0))
    assert trainer(play(WORKERS, 600, groups=48))["step"] == 12


def test_a_trainer_that_falls_silent_gets_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was started again as an older version, or with its clock set back: "nothing" stood."""
    send = DemandTeller._send

    def send_once(self: DemandTeller, version: PolicyVersion, share: int, groups: int) -> None:
        if self._told < 0:
            send(self, version, 0, 0)

    monkeypatch.setattr(DemandTeller, "_send", send_once)
    assert trainer(play(WORKERS, 2 * HOLDS + 600))["step"] == 12


def test_names_that_bring_nothing_do_not_end_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was ordered in place of theirs was taken back at once, as too much: three such names
    beside one worker, and no step was ever taken."""
    at_work: list[PeerId] = []
    produce = InferenceSession._produce_sometime

    async def produce_if_first(session: InferenceSession) -> Submission:
        if session.node.peer_id not in at_work[:1]:
            at_work.append(session.node.peer_id)
        if session.node.peer_id != at_work[0]:
            await trio.sleep_forever()
        return await produce(session)

    monkeypatch.setattr(InferenceSession, "_produce_sometime", produce_if_first)
    names = {f"inference-{number}": "inference" for number in range(1, 5)}
    assert trainer(play(names, 1800, groups=48))["step"] == 12


def test_what_was_said_lapses_with_silence_and_a_recording_does_not_renew_it() -> None:
    listener = Listener()
    assert listener.judge(FIRST, nothing(1, 5)) is Validity.ACCEPT
    listener.now += HOLDS / 2
    assert listener.is_asked(1) is False
    assert listener.judge(FIRST, nothing(1, 4)) is Validity.IGNORE  # a clock set back
    listener.now += HOLDS / 2
    assert listener.is_asked(1) is None
    assert listener.judge(FIRST, nothing(1, 5)) is Validity.IGNORE  # a recording
    assert listener.is_asked(1) is None


def test_a_trainer_that_was_replaced_has_no_say_over_what_comes() -> None:
    """Its last words named versions to come with the highest number: its successor's were no
    news under any of them."""
    listener = Listener()
    for version in range(1, 9):
        listener.judge(FIRST, nothing(version, 2**53))
    listener.name_trainer(SECOND)
    assert listener.is_asked(8) is None
    said = Demand(PolicyVersion(1), 7, 2 * UNIT, 9)
    assert listener.judge(SECOND, said.to_bytes()) is Validity.ACCEPT
    assert listener.heard.shares.newest == said
