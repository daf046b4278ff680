"""Asking peers never ends a node, and a trainer's word that it has taken something is kept."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from p2p.errors import (
    BadMessage,
    LimitExceeded,
    PeerUnreachable,
    ProtocolNotSupported,
    StorageError,
    WrongPeer,
)
from p2p.identity import KeyPair, verify
from p2p.machine import RealWorld
from p2p.offence import Offence
from p2p.shardcast.manifest import PolicyVersion
from roles.inference.outbox import FullPlace, Outbox
from roles.protocol.core.answer import AccountRequest
from roles.protocol.core.window import content_digest
from roles.protocol.request import ask
from roles.rl.recipes import NETWORK
from roles.trainer.policies import PolicyFiles
from roles.trainer.session import TrainerSession

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


def sound_world() -> SimpleNamespace:
    """Nothing misbehaves on purpose, as in production."""
    return SimpleNamespace(
        verify=verify,
        buggify=lambda name: False,
        sometimes=lambda name, condition: None,
        now=lambda: 0.0,
    )


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
    node: Any = SimpleNamespace(host=host, locate=locate, world=sound_world())
    assert await ask(node, JUDGE.peer_id, AccountRequest(), lambda reply: reply) is None
    assert host.penalties == penalties


@pytest.mark.parametrize(("published", "step"), [(-1, 1), (3, 7)])
async def test_a_trainer_that_lost_its_policies_publishes_nothing_instead_of_a_contradiction(
    published: int, step: int
) -> None:
    """It published its newest version anew, with another predecessor, and was halted by all."""

    class Opens:
        async def open(self, _: str, base: str) -> int:
            await trio.lowlevel.checkpoint()
            return step

    engine: Any = Opens()

    class LearntNothing:
        async def learnt_again(self, _: int) -> AsyncIterator[Any]:
            for never in ():
                yield never

    node: Any = SimpleNamespace(
        shardcast=SimpleNamespace(newest=published, signed=published),
        world=SimpleNamespace(sometimes=lambda *_: None),
    )
    nothing: Any = None
    intake: Any = LearntNothing()
    policies = PolicyFiles(engine, nothing, nothing)
    with pytest.raises(StorageError, match="gone from store/: restore that folder"):
        await TrainerSession(
            node,
            60,
            NETWORK.learner,
            engine,
            intake,
            nothing,
            nothing,
            nothing,
            policies,
            nothing,
        ).open_learner()


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
