"""What roles do when another trainer's weights take the place of their version."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from p2p.shardcast.manifest import NO_POLICY
from proofs.checks import Verdict
from roles.engines.base import EngineError, GroupTask, Row
from roles.envs.base import Task
from roles.envs.contained import EnvironmentFailed
from roles.inference.places import OpenPlace, OpenPlaces
from roles.inference.session import InferenceSession
from roles.inference.status import InferenceCounts
from roles.protocol.core.findings import HEARS_OTHER, Weight
from roles.protocol.scorer import ENVIRONMENT_FAILED, HEARS_MORE, Scorer, inconclusive
from roles.rl.recipes import NETWORK
from roles.trainer.core.gate import Audited
from roles.trainer.desk import WorkDesk

VERSION: Any = 3
NO_WINDOWS = SimpleNamespace(close=lambda: None, note_version=lambda _: None)


class Shardcast:
    """Version 3, as whichever trainer's weights are chosen."""

    def __init__(self) -> None:
        self.chosen = b"one"

    def manifest(self, version: int) -> Any:
        return SimpleNamespace(weights_digest=self.chosen)

    async def wait_policy(self, at_least: int) -> int:
        return VERSION

    def holds(self, version: int) -> bool:
        return version == VERSION

    @contextmanager
    def pin(self, version: int) -> Any:
        yield

    async def check_weights(self, version: int) -> str:
        return self.chosen.decode()


async def test_an_engine_reloads_when_its_version_is_another_trainers() -> None:
    shardcast, loaded = Shardcast(), []

    async def load(path: str) -> None:
        loaded.append(path)

    session = InferenceSession.__new__(InferenceSession)
    session.windows = cast(
        Any, SimpleNamespace(close=lambda: None, note_version=lambda _: None)
    )
    world = SimpleNamespace(buggify=lambda _: False, sometimes=lambda *_: None)
    node: Any = SimpleNamespace(shardcast=shardcast, world=world)
    engine: Any = SimpleNamespace(load=load, drop=trio.lowlevel.checkpoint)
    session.node, session.engine = node, engine
    session.counts, session._policy = InferenceCounts(), b""
    shardcast.newest = VERSION
    session.run = cast(Any, SimpleNamespace(terms=SimpleNamespace(sampling=NETWORK.sampling)))
    for chosen in (b"one", b"one", b"other", b"other"):
        shardcast.chosen = chosen
        assert await session.load_newest() == VERSION
        assert session._policy == chosen, "what is drawn is told under what was loaded"
    assert loaded == ["one", "other"]


class FragileEngine:
    """Cannot load ``bad``, and then holds nothing."""

    def __init__(self) -> None:
        self.held = ""

    async def load(self, path: str) -> None:
        self.held = ""
        if path == "bad":
            raise EngineError("bad: model.norm.weight holds NaN")
        self.held = path

    async def drop(self) -> None:
        """Nothing is under way."""


async def test_an_engine_that_failed_to_load_is_asked_again_for_the_policy_before() -> None:
    """Two trainers, one version: the validator thought that it still had the first one's."""
    shardcast, engine, stub = Shardcast(), FragileEngine(), cast(Any, object())
    node: Any = SimpleNamespace(shardcast=shardcast, world=SimpleNamespace(now=lambda: 0.0))
    scorer = Scorer(node, cast(Any, engine), stub, survives_engine=True)
    await scorer._load(VERSION, b"one", "one")
    with pytest.raises(EngineError):
        await scorer._load(VERSION, b"bad", "bad")
    assert scorer.loaded == NO_POLICY
    await scorer._load(VERSION, b"one", "one")
    assert (engine.held, scorer.loaded) == ("one", VERSION)


async def test_a_policy_that_cannot_be_loaded_ends_no_worker() -> None:
    """Its node ended, and with it those of all workers at the same time."""

    class Versions(Shardcast):
        newest = 3

        async def wait_policy(self, at_least: int) -> int:
            if at_least > self.newest:
                self.newest, self.chosen = at_least, b"next"
            return self.newest

    session = InferenceSession.__new__(InferenceSession)
    session.windows = cast(
        Any, SimpleNamespace(close=lambda: None, note_version=lambda _: None)
    )
    shardcast, engine = Versions(), FragileEngine()
    shardcast.chosen = b"bad"
    world = SimpleNamespace(buggify=lambda _: False, sometimes=lambda *_: None)
    session.node = cast(Any, SimpleNamespace(shardcast=shardcast, world=world))
    session.engine, session.counts, session._policy = cast(Any, engine), InferenceCounts(), b""
    session.run = cast(Any, SimpleNamespace(terms=SimpleNamespace(sampling=NETWORK.sampling)))
    session._places = OpenPlaces()

    async def produce() -> Any:
        return await session.load_newest()

    session.produce = produce  # type: ignore[method-assign]
    produced: Any = await session._produce_sometime()
    assert (produced, engine.held, session._policy) == (4, "next", b"next")


async def test_a_completion_that_harms_the_environment_costs_no_other_place() -> None:
    """All that waited with it, of every place, was handed in as unheard."""

    class Harmed:
        async def hear(self, answers: Any) -> list[Any]:
            if any(tokens == (9,) for _, given in answers for tokens in given):
                raise EnvironmentFailed("its process ended")
            return [((5,),) for _ in answers]

    session = InferenceSession.__new__(InferenceSession)
    session._environment = cast(Any, Harmed())
    session._failures = cast(Any, SimpleNamespace(tell=lambda *_: None))
    session._places = OpenPlaces()
    places = [
        OpenPlace(cast(Any, None), index, (GroupTask(index, (1,), ()),), (Task((1,)),))
        for index in range(3)
    ]
    for place in places:
        session._places.add(place)
    waiting = [Row(0, 0, (2,)), Row(1, 0, (2,)), Row(1, 1, (9,)), Row(2, 0, (3,))]
    heard = {(row.group, row.slot): row.tokens for row in await session._hear(waiting)}
    assert heard == {(0, 0): (5,), (1, 0): (), (1, 1): (), (2, 0): (5,)}
    assert [place.unheard for place in places] == [set(), {(1, 0), (1, 1)}, set()]


@pytest.mark.parametrize(
    ("word", "reason", "lies"),
    [
        (Verdict.ACCEPTED, HEARS_OTHER, 1),
        (Verdict.ACCEPTED, HEARS_MORE, 0),
        (Verdict.REJECTED, HEARS_OTHER, 0),
        (Verdict.ACCEPTED, ENVIRONMENT_FAILED, 0),
    ],
)
async def test_a_repeated_place_that_was_heard_elsewhere_counts_against_its_acceptance(
    word: Verdict, reason: str, lies: int
) -> None:
    verdict: Any = SimpleNamespace(verdict=word, validator="one", rewards=())
    strike = Audited(validator=cast(Any, "one"), worker=None, weight=Weight.STRIKE)

    async def score(*_: object) -> Any:
        return inconclusive(reason)

    async def write(_: object) -> None: ...

    desk: Any = WorkDesk.__new__(WorkDesk)
    desk.scorer, desk._records = SimpleNamespace(score=score), SimpleNamespace(write=write)
    desk.repeated = desk.lies = 0
    desk.gate = SimpleNamespace(audited=lambda *_: strike, audit_inconclusive=lambda *_: None)
    desk.situation, desk._world = lambda: None, SimpleNamespace(verify=None)
    await desk._audit(verdict, cast(Any, SimpleNamespace(commitment=None)))
    assert (desk.repeated, desk.lies) == (1, lies)
