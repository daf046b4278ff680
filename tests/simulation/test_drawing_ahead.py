"""Workers that draw several places at a time and are killed: they leave no place out, and hand
in nothing that is too old."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from p2p.identity import PeerId
from roles.engines.base import Group, GroupTask, Sampling
from roles.engines.fake import FakeEngine
from roles.inference.outbox import FullPlace
from roles.inference.session import InferenceSession
from roles.rl.recipes import NETWORK
from sim.node.swarm import Swarm
from tests.support.swarm import CAST, Lingering, finish, perform

WORKERS = ("inference-1", "inference-2")


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


class Deadly(Lingering):
    """Workers die at odd moments, with what they draw, and some writes torn."""

    async def disturb(self, swarm: Swarm) -> None:
        watcher, rng = swarm.nodes["relay-1"].world, Random(11)
        for number in range(16):
            await watcher.sleep(rng.uniform(0.1, 2.5))
            name = WORKERS[number % 2]
            swarm.kill(name, torn=True)
            await watcher.sleep(rng.uniform(0.0, 0.5))
            swarm.restart(name)


def test_workers_killed_while_they_draw_several_places_leave_none_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(monkeypatch, turn=0.1)
    finish(Deadly(CAST), steps=10)
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
