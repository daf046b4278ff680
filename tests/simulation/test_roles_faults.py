"""Roles under crashes, refusals and bad work: nothing honest is rejected or used twice."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any, ClassVar

import pytest

from p2p.errors import BadMessage
from p2p.identity import PeerId, ProtocolId
from p2p.wire import pack, unpack_untrusted
from roles.contract.core.file import FORMAT, decode_run_untrusted
from roles.contract.core.sampling import SamplingTerms
from roles.engines.base import EngineError, Group, GroupTask, Sampling
from roles.engines.fake import FakeEngine
from roles.inference.outbox import FullPlace
from roles.inference.places import OpenPlace
from roles.inference.role import Inference
from roles.inference.session import InferenceSession
from roles.inference.windows import Windows
from roles.own.status import SwarmStatus
from roles.protocol.core.answer import WORK_PROTOCOL, WORK_SINCE
from roles.protocol.core.window import Claim, Submission
from roles.rl.recipes import NETWORK
from roles.trainer import role
from sim.node.swarm import NodeMain, SimNode, Swarm
from sim.run.scenario import Scenario
from tests.support.runs import RUN
from tests.support.swarm import (
    CAST,
    Health,
    Lingering,
    Play,
    finish,
    nobody_honest_is_rejected,
    perform,
    roles_of,
    scored,
    trainer_of,
)

TWO_VALIDATORS = {**CAST, "validator-2": "validator"}


def test_two_validators_share_newcomers_and_nobody_honest_is_rejected() -> None:
    cast = {**TWO_VALIDATORS, **{f"inference-{number}": "inference" for number in range(3, 7)}}
    health = finish(Play(cast), steps=10)
    assert all(judge["accepted"] > 0 for judge in roles_of(health, "validator"))


@pytest.mark.deep
def test_a_worker_killed_again_and_again_without_a_validator_stays_in_its_window() -> None:
    class Stubborn(Play):
        async def disturb(self, swarm: Swarm) -> None:
            watcher = swarm.nodes["relay-1"].world
            swarm.kill("validator-1")
            for _ in range(4):
                await watcher.sleep(5)
                swarm.restart("inference-1")
            await watcher.sleep(5)
            swarm.restart("validator-1")

    finish(Stubborn(CAST))


def test_nobody_works_under_the_last_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    late: list[int] = []
    plain = InferenceSession.produce

    async def produce(self: InferenceSession) -> Any:
        submission = await plain(self)
        late.append(submission.version)
        return submission

    monkeypatch.setattr(InferenceSession, "produce", produce)
    health = perform(Lingering(CAST), steps=3)
    assert health["done"] == 1
    assert late.count(3) <= 2  # what the two nodes were about to draw when it came


def test_a_lost_answer_is_given_again_whatever_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine fails now and then, and every worker's first answer is lost."""
    score, send = FakeEngine.score, Windows.send
    calls = itertools.count()
    lost: dict[bytes, None] = {}

    async def fail(self: FakeEngine, *args: Any) -> Any:
        if next(calls) % 5 == 0:
            raise EngineError("out of memory")
        return await score(self, *args)

    async def lose(self: Windows, scorer: PeerId, answer: Any, submission: Submission) -> Any:
        reply = await send(self, scorer, answer, submission)
        is_first = submission.commitment.digest not in lost
        lost[submission.commitment.digest] = None
        return None if is_first else reply

    monkeypatch.setattr(FakeEngine, "score", fail)
    monkeypatch.setattr(Windows, "send", lose)
    health = perform(Play(CAST), steps=6)
    assert health["done"] == 1
    undecided = [
        one["inconclusive"].get("the engine could not score it", 0)
        for kind in ("trainer", "validator")
        for one in roles_of(health, kind)
    ]
    assert sum(undecided) > 3
    assert nobody_honest_is_rejected(health)


def test_clocks_ten_minutes_off_change_nothing() -> None:
    class Unsynchronised(Play):
        def _life(self, role: str) -> NodeMain:
            plain = super()._life(role)

            async def live(machine: SimNode) -> None:
                machine.clock.change(
                    skew={"trainer-1": 600.0, "inference-1": -600.0}.get(machine.name, 0.0)
                )
                await plain(machine)

            return live

    health = finish(Unsynchronised(CAST))
    assert all(scored(health, name)["accepted"] for name in ("inference-1", "inference-2"))


def test_a_place_that_is_stuck_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Windows.send

    async def send(self: Windows, scorer: PeerId, answer: Any, submission: Submission) -> Any:
        if submission.index == 0 and not self._counts.retries:
            await self._node.world.sleep(20)
        return await plain(self, scorer, answer, submission)

    monkeypatch.setattr(Windows, "send", send)
    cast = {name: role for name, role in CAST.items() if name != "inference-2"}
    finish(Play(cast), steps=2, groups=64)


# Workers that sign forged content or wrong claims


class Forger(Inference):
    """An inference node that changes what it sends, and signs the change."""

    name: ClassVar[str] = "forger"

    def session_type(self, *args: Any) -> InferenceSession:  # type: ignore[override]
        session = ForgingSession(*args)
        session.forger = self
        return session

    def forge_groups(self, groups: tuple[Group, ...]) -> tuple[Group, ...]:
        return groups

    def forge_claims(self, claims: bytes) -> bytes:
        return claims


class ForgingSession(InferenceSession):
    forger: Forger

    def groups_of(self, place: OpenPlace) -> tuple[Group, ...]:
        return self.forger.forge_groups(super().groups_of(place))

    async def claims(self, place: OpenPlace, groups: Sequence[Group]) -> bytes:
        return self.forger.forge_claims(await super().claims(place, place.groups()))


class Truncated(Forger):
    def forge_groups(self, groups: tuple[Group, ...]) -> tuple[Group, ...]:
        first, *others = groups[0].completions
        completions = (replace(first, proof=first.proof[:-1]), *others)
        return (replace(groups[0], completions=completions), *groups[1:])


class Reordered(Forger):
    def forge_groups(self, groups: tuple[Group, ...]) -> tuple[Group, ...]:
        return groups[::-1]


class Short(Forger):
    def forge_groups(self, groups: tuple[Group, ...]) -> tuple[Group, ...]:
        return (replace(groups[0], completions=groups[0].completions[:-1]), *groups[1:])


def played(attacker: type[Inference], **parameters: float) -> Health:
    """A swarm of which one worker is an ``attacker``."""
    cast = {name: role for name, role in CAST.items() if name != "inference-2"}
    stage = Play({**cast, "attacker-1": f"{__name__}:{attacker.__name__}"})
    return perform(stage, **{"steps": 3, **parameters})


@pytest.mark.parametrize(
    ("attacker", "reason"),
    [
        (Truncated, "malformed activation proof"),
        (Reordered, "content that is no answer to the tasks of its place"),
        (Short, "content that is no answer to the tasks of its place"),
    ],
)
def test_forged_content_is_rejected_for_what_it_is_and_its_worker_banned(
    attacker: type[Forger], reason: str
) -> None:
    health = played(attacker)
    assert health["done"] == 1
    forged = scored(health, "attacker-1")
    assert forged["accepted"] == 0
    assert set(forged["reasons"]) == {reason}
    assert health["attacker-1"]["peer"] in trainer_of(health)["bans"]
    assert scored(health, "inference-1")["accepted"] > 0
    assert nobody_honest_is_rejected(health)


class Boaster(Forger):
    """Claims spread where there is none, and none where there is, once it is in standing."""

    def forge_claims(self, claims: bytes) -> bytes:
        if self.counts.owed or not self.counts.stood:
            return claims
        turned = {Claim.SPREAD: Claim.ALIKE, Claim.ALIKE: Claim.SPREAD}
        return bytes(turned.get(Claim(claim), claim) for claim in claims)


def test_wrong_claims_end_a_standing_and_teach_nothing() -> None:
    health = played(Boaster, steps=8)
    assert health["done"] == 1
    reasons = scored(health, "attacker-1")["reasons"]
    assert set(reasons) == {"a claim about its rewards is wrong"}
    assert health["attacker-1"]["peer"] not in trainer_of(health)["bans"]
    assert nobody_honest_is_rejected(health)


# A trainer of another version of Shoal


SPEAKS = {"relay-1": "none", "trainer-1": "trainer", "inference-1": "inference"}


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ("0.1.0", f"it needs Shoal {WORK_SINCE} or newer (git pull in its checkout)"),
        ("9.1.2", "this node needs that version (git pull in its checkout)"),
    ],
)
def test_a_node_whose_trainer_speaks_another_protocol_names_the_version(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, runs: str, said: str
) -> None:
    """Nothing came of its work, and nothing was said."""
    monkeypatch.setattr(role, "WORK_PROTOCOL", ProtocolId("/shoal/rollout/1.0.0"))

    class Other(Play):
        async def _play(
            self, swarm: Swarm, scenario: Scenario, sampling: SamplingTerms
        ) -> SwarmStatus:
            await swarm.sleep(5)
            node, _ = self._open["trainer-1"]
            node.membership.me.update(version=runs)
            await swarm.sleep(60)
            return self._status(sampling)

    with caplog.at_level(logging.WARNING):
        health = perform(Other(SPEAKS | {"validator-1": "validator"}))
    sentences = [
        one["now"] for kind in ("inference", "validator") for one in roles_of(health, kind)
    ]
    assert len(sentences) == 2
    for sentence in sentences:
        assert said in sentence, sentence
        assert f"does not speak {WORK_PROTOCOL}" in sentence
        assert (f"the trainer runs Shoal {runs}," if runs else "another version") in sentence
    loud = [one for one in caplog.messages if one.startswith("other_version")]
    assert len(loud) == 2, "each says it once"


def test_a_run_file_of_another_format_names_the_remedy() -> None:
    head = unpack_untrusted(RUN.document)
    assert isinstance(head, list)
    for number, remedy in ((FORMAT + 1, "upgrade Shoal here"), (FORMAT - 1, "its owner signs")):
        with pytest.raises(BadMessage, match=remedy):
            decode_run_untrusted(pack([number, *head[1:]]))


# Workers that draw several places at a time


class Watched:
    """The fake engine, with room for all that may be under way; groups end in any order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, turn: float) -> None:
        self.rng = Random(3)
        self.most = 0
        """Submissions in one engine."""
        self.passed = 0
        """Groups that ended before one that was submitted earlier."""
        self.dropped = 0
        """Groups."""
        self.handed_in: list[tuple[PeerId, FullPlace]] = []
        self.behind: list[int] = []
        """Of what was handed in, how many policies were newer."""
        submit, drop, keep = FakeEngine.submit, FakeEngine.drop, InferenceSession._keep

        async def noted(
            engine: FakeEngine, tasks: Sequence[GroupTask], sampling: Sampling
        ) -> None:
            await submit(engine, tasks, sampling)
            self.most = max(self.most, len(engine._under_way))

        async def advance(engine: FakeEngine) -> list[Group]:
            await engine._world.sleep(turn)
            open_groups = [group for batch in engine._under_way for group in batch]
            ended = self.rng.sample(open_groups, min(3, len(open_groups)))
            for group in ended:
                self.passed += group is not open_groups[0]
            left = [[g for g in batch if g not in ended] for batch in engine._under_way]
            engine._under_way = [batch for batch in left if batch]
            return ended

        async def dropped(engine: FakeEngine) -> None:
            self.dropped += sum(map(len, engine._under_way))
            await drop(engine)

        async def kept(session: InferenceSession, place: Any) -> FullPlace:
            full = await keep(session, place)
            self.handed_in.append((session.node.peer_id, full))
            self.behind.append(session.node.shardcast.newest - full.version)
            return full

        monkeypatch.setattr(FakeEngine, "has_room", property(lambda _: True))
        monkeypatch.setattr(FakeEngine, "submit", noted)
        monkeypatch.setattr(FakeEngine, "advance", advance)
        monkeypatch.setattr(FakeEngine, "drop", dropped)
        monkeypatch.setattr(InferenceSession, "_keep", kept)

    def check_order(self) -> None:
        """Each worker's places under each policy: in order, none left out."""
        places: dict[tuple[Any, int], list[int]] = {}
        for node, one in self.handed_in:
            places.setdefault((node, one.version), []).append(one.index)
        for indices in places.values():
            assert indices == sorted(indices)
            assert set(indices) == set(range(len(set(indices))))


class DeadlyWorkers(Lingering):
    """Workers die at odd moments, with what they draw, and some writes torn."""

    async def disturb(self, swarm: Swarm) -> None:
        watcher, rng = swarm.nodes["relay-1"].world, Random(11)
        for number in range(16):
            await watcher.sleep(rng.uniform(0.1, 2.5))
            name = ("inference-1", "inference-2")[number % 2]
            swarm.kill(name, torn=True)
            await watcher.sleep(rng.uniform(0.0, 0.5))
            swarm.restart(name)


def test_workers_killed_while_they_draw_several_places_leave_none_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(monkeypatch, turn=0.1)
    finish(DeadlyWorkers(CAST), steps=10)
    assert watched.most > 2
    assert watched.passed > 100
    watched.check_order()


def test_what_becomes_too_old_in_the_middle_is_dropped_and_leaves_no_gap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Engines so slow that policies overtake what they draw."""
    watched = Watched(monkeypatch, turn=3.0)
    finish(Lingering(CAST), steps=5)
    assert watched.dropped > 0
    assert max(watched.behind) <= NETWORK.sampling.lag
    watched.check_order()


def test_a_paused_worker_draws_to_its_end_what_its_engine_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waited with the places half drawn in a batch that had room, until it was resumed."""
    watched = Watched(monkeypatch, turn=0.2)
    begun: list[int] = []
    left: list[int] = []

    class Pausing(Lingering):
        async def disturb(self, swarm: Swarm) -> None:
            node, (role,) = self._open["inference-1"]
            session = getattr(role, "_session", None)
            assert isinstance(session, InferenceSession)
            while len(session._places) < 3:
                await swarm.sleep(0.05)
            await node.rest.pause()
            begun.append(session._places.next_index)
            await swarm.sleep(10.0)
            left.append(len(session._places))
            handed_in = [
                one.index
                for peer, one in watched.handed_in
                if peer == node.peer_id and one.version == session.loaded
            ]
            begun.append(max(handed_in) + 1)
            await node.rest.resume()

    health = perform(Pausing(CAST), steps=5)
    assert health["done"] == 1
    assert left == [0]
    assert begun[0] == begun[1]  # nothing was begun, and nothing left out
    watched.check_order()
