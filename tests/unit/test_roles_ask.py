"""Asking peers and loading policies end no node, and a trainer's word is kept."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

from p2p.errors import (
    BadMessage,
    LimitExceeded,
    PeerUnreachable,
    ProtocolNotSupported,
    WrongPeer,
)
from p2p.identity import KeyPair, verify
from p2p.machine import RealWorld
from p2p.offence import Offence
from p2p.shardcast.manifest import NO_POLICY, PolicyVersion
from proofs.checks import Verdict
from roles.engines.base import Completion, EngineError, Group, GroupTask, Row
from roles.envs import sort
from roles.envs.base import Task
from roles.envs.client import LocalEnvironment
from roles.envs.contained import EnvironmentFailed
from roles.envs.mix import EnvironmentPart, EnvironmentSetup, open_mix
from roles.inference.glance import EVERY, KEPT, Glance
from roles.inference.outbox import FullPlace, Outbox
from roles.inference.places import OpenPlace, OpenPlaces
from roles.inference.session import InferenceSession
from roles.inference.status import InferenceCounts
from roles.protocol.core.answer import AccountRequest
from roles.protocol.core.findings import HEARS_OTHER, Weight
from roles.protocol.core.window import content_digest
from roles.protocol.request import ask
from roles.protocol.scorer import ENVIRONMENT_FAILED, HEARS_MORE, Scorer, inconclusive
from roles.rl.recipes import NETWORK
from roles.trainer.core.gate import Audited
from roles.trainer.desk import WorkDesk

WORKER, JUDGE = KeyPair(b"w" * 32), KeyPair(b"j" * 32)
RUN_ID = b"r" * 32


class Unlucky:
    """A host on which every stream fails in one way."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.penalties: list[float] = []

    async def open_stream(self, *_: object) -> object:
        await trio.lowlevel.checkpoint()
        raise self.error

    def penalise(self, _: object, points: float, __: str) -> None:
        self.penalties.append(points)

    send = connected = None  # a host has them


@pytest.mark.parametrize(
    ("error", "penalties"),
    [
        (WrongPeer("somebody else has the port now"), []),
        (LimitExceeded("256 streams are open"), []),
        (PeerUnreachable("gone"), []),
        (ProtocolNotSupported("no such role"), []),
        (trio.BrokenResourceError("lost"), []),
        (trio.ClosedResourceError("closed"), []),
        (BadMessage("garbage"), [Offence.NONSENSE.points]),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_whatever_a_peer_does_the_question_is_asked_again(
    error: Exception, penalties: list[float]
) -> None:
    async def locate(_: object) -> bool:
        await trio.lowlevel.checkpoint()
        return False

    host = Unlucky(error)
    sound = SimpleNamespace(
        verify=verify, buggify=lambda _: False, sometimes=lambda *_: None, now=lambda: 0.0
    )
    node: Any = SimpleNamespace(host=host, locate=locate, world=sound)
    assert await ask(node, JUDGE.peer_id, AccountRequest(), lambda reply: reply) is None
    assert host.penalties == penalties


async def test_an_outbox_keeps_its_windows_and_none_of_another_key(tmp_path: Any) -> None:
    world = RealWorld(WORKER, tmp_path)
    outbox = await Outbox.open(world, "outbox")
    for index in range(3):
        content = bytes([index])
        digest = content_digest(content)
        place = FullPlace(RUN_ID, bytes(32), PolicyVersion(1), bytes(32), index, digest, b"\1")
        await outbox.add(place, content)
    signed = await outbox.sign(outbox.loose(16)[0][:2])
    again = await Outbox.open(world, "outbox")
    assert [one.to_bytes() for one in again.windows] == [signed.to_bytes()]
    assert [[one.index for one in run] for run in again.loose(16)] == [[2]]
    assert (again.newest, again.next_index(PolicyVersion(1))) == (1, 3)
    assert (await again.submission(signed, 1)).content == b"\1"
    for index in (0, 1):
        await again.settle(signed, index)
    assert not (await Outbox.open(world, "outbox")).windows
    await again.sign(again.loose(16)[0])
    assert not (await Outbox.open(RealWorld(JUDGE, tmp_path), "outbox")).windows


# When another trainer's weights take the place of a version


VERSION: Any = 3


class Shardcast:
    """Version 3, as whichever trainer's weights are chosen."""

    def __init__(self) -> None:
        self.chosen, self.newest = b"one", VERSION

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


def session_of(shardcast: Shardcast, engine: object) -> InferenceSession:
    """Return a worker's session that has a store and an engine, and no host."""
    session = InferenceSession.__new__(InferenceSession)
    windows: Any = SimpleNamespace(close=lambda: None, note_version=lambda _: None)
    world = SimpleNamespace(buggify=lambda _: False, sometimes=lambda *_: None)
    node: Any = SimpleNamespace(shardcast=shardcast, world=world)
    run: Any = SimpleNamespace(terms=SimpleNamespace(sampling=NETWORK.sampling))
    session.node, session.run, session.windows = node, run, windows
    session.engine, session.counts, session._policy = cast(Any, engine), InferenceCounts(), b""
    session._places = OpenPlaces()
    return session


async def test_an_engine_reloads_when_its_version_is_another_trainers() -> None:
    shardcast, loaded = Shardcast(), []

    async def load(path: str) -> None:
        loaded.append(path)

    session = session_of(shardcast, SimpleNamespace(load=load, drop=trio.lowlevel.checkpoint))
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
        async def wait_policy(self, at_least: int) -> int:
            if at_least > self.newest:
                self.newest, self.chosen = at_least, b"next"
            return self.newest

    shardcast, engine = Versions(), FragileEngine()
    shardcast.chosen = b"bad"
    session = session_of(shardcast, engine)

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


class Watch:
    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time


async def test_some_answers_are_read_along_with_what_they_earn() -> None:
    setup = EnvironmentSetup(parts=(EnvironmentPart(name="sort"),))
    environment, world, seed = LocalEnvironment(open_mix(setup)), Watch(), bytes(32)
    glance = Glance(world, environment)  # type: ignore[arg-type]
    seeds: list[Any] = [seed, seed]

    async def look(answer: str) -> None:
        world.time += EVERY
        group = Group(7, (Completion(sort.encode(answer), ()),))
        order = SimpleNamespace(task_seeds=lambda _: seeds)
        place: Any = SimpleNamespace(order=order, index=3, groups=lambda: (group,))
        await glance.look(place)
        await glance.look(place)  # too soon

    task = sort.SortEnvironment().task(seed)
    question, right = sort.decode(task.prompt), sort.decode(task.answer)
    await look(right)
    await look("12$")
    shown = [(question, "12$", 0.0), (question, right, 1.0)]
    assert glance.samples == shown
    for _ in range(2 * KEPT):
        await look("12$")
    assert len(glance.samples) == KEPT
    seeds[:] = [{}]  # no seed: the environment raises, and is looked at no more
    await look(right)
    seeds[:] = [seed, seed]
    await look(right)
    assert glance.samples == [shown[0]] * KEPT
