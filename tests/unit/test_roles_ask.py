"""Asking peers never ends a node, and a trainer's word that it has taken something is kept."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
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
    StorageError,
    WrongPeer,
)
from p2p.identity import KeyPair, verify
from p2p.machine import RealWorld
from p2p.offence import Offence
from p2p.shardcast.manifest import PolicyVersion
from proofs.checks import Verdict
from roles.engines.base import TrainingGroup
from roles.inference.outbox import SubmissionOutbox
from roles.protocol.core.groups import (
    LIED,
    ROLLOUT_PROTOCOL,
    AcceptedWork,
    Commitment,
    Receipt,
    SignedVerdict,
    Submission,
    content_digest,
    decode_delivery_untrusted,
    decode_receipt_untrusted,
    encode_receipt,
)
from roles.protocol.request import ask
from roles.rl.recipe import Recipe
from roles.trainer.core.buffer import BufferedGroup, GroupBuffer
from roles.trainer.intake import Intake
from roles.trainer.policies import PolicyFiles
from roles.trainer.session import TrainerSession
from roles.validator import delivery as delivery_module

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
    assert await ask(node, JUDGE.peer_id, ROLLOUT_PROTOCOL, b"?") is None
    assert host.penalties == penalties


def submission(index: int = 0, signer: KeyPair = WORKER) -> Submission:
    content = bytes([index])
    commitment = Commitment(
        RUN_ID, signer.peer_id, PolicyVersion(1), bytes(32), index, content_digest(content)
    )
    return Submission.sign(commitment, content, signer)


def delivery(index: int = 0) -> bytes:
    work = submission(index)
    verdict = SignedVerdict(
        JUDGE.peer_id, work.commitment, Verdict.ACCEPTED, "", 0.0, 0.0, (), content_digest(b"")
    ).signed(JUDGE)
    return AcceptedWork(verdict, work, b"").to_bytes()


class SlowDisk:
    """An intake and a ledger that take their time."""

    def __init__(self) -> None:
        self.durable = trio.Event()
        self.kept = 0

    async def keep(self, *_: object) -> None:
        await self.durable.wait()
        self.kept += 1

    async def append(self, *_: object) -> None:
        await trio.lowlevel.checkpoint()


async def _one_group(*_: object) -> list[BufferedGroup]:
    return [BufferedGroup(PolicyVersion(0), b"", 0, TrainingGroup((1,), (), (0.0, 1.0)))]


async def test_a_delivery_is_taken_only_when_it_is_durable_however_often_it_comes() -> None:
    disk = SlowDisk()
    node: Any = SimpleNamespace(
        world=sound_world(), shardcast=SimpleNamespace(holds=lambda _: True)
    )
    check: Any = SimpleNamespace(
        groups=_one_group,
        why_unwanted=lambda *_: "",
        why_refused=lambda _: "",
    )
    both: Any = disk
    intake = Intake(node, Recipe(), check, both, both, GroupBuffer(100, 2), cast(Any, None))
    answers: list[Receipt] = []

    async def hand_over() -> None:
        answers.append((await intake.take(JUDGE.peer_id, delivery()))[0])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(hand_over)
        nursery.start_soon(hand_over)
        await trio.testing.wait_all_tasks_blocked()
        assert not answers
        disk.durable.set()
    assert answers == [Receipt.TAKEN, Receipt.TAKEN]
    assert disk.kept == 1


async def test_a_full_trainer_says_later_before_the_validator_loses_patience(
    autojump_clock: trio.testing.MockClock,
) -> None:
    node: Any = SimpleNamespace(world=sound_world())
    check: Any = SimpleNamespace(why_unwanted=lambda *_: "", why_refused=lambda _: "")
    nothing: Any = None
    intake = Intake(node, Recipe(), check, nothing, nothing, GroupBuffer(0, 2), nothing)
    with trio.fail_after(119):
        receipt, _ = await intake.take(JUDGE.peer_id, delivery())
    assert receipt is Receipt.LATER


@pytest.mark.parametrize(("published", "step"), [(-1, 1), (3, 7)])
async def test_a_trainer_that_lost_its_policies_publishes_nothing_instead_of_a_contradiction(
    published: int, step: int
) -> None:
    """It published its newest version anew, with another predecessor, and was
    halted by all.
    """

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
            node, Recipe(), engine, intake, nothing, nothing, policies
        ).open_learner()


@pytest.mark.parametrize("receipt", Receipt)
def test_a_receipt_travels_whole(receipt: Receipt) -> None:
    assert decode_receipt_untrusted(encode_receipt(receipt, "because")) == (receipt, "because")
    with pytest.raises(BadMessage):
        decode_receipt_untrusted(encode_receipt(receipt, "because")[:-1])


async def test_an_outbox_does_not_send_what_was_made_under_another_key(tmp_path: Any) -> None:
    world = RealWorld(WORKER, tmp_path)
    outbox = await SubmissionOutbox.open(world, "outbox")
    await outbox.add(submission(3))
    assert [item.commitment.index for item in await SubmissionOutbox.open(world, "outbox")] == [
        3
    ]
    assert (await SubmissionOutbox.open(world, "outbox")).newest == 1
    assert not list(await SubmissionOutbox.open(RealWorld(JUDGE, tmp_path), "outbox"))


async def test_an_operator_hears_once_that_its_validator_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuses(*_: object, **__: object) -> bytes:
        await trio.lowlevel.checkpoint()
        return encode_receipt(Receipt.UNWANTED, f"{LIED}: a gap")

    monkeypatch.setattr(delivery_module, "ask", refuses)
    run = SimpleNamespace(terms=SimpleNamespace(trainers=[JUDGE.peer_id]))
    monkeypatch.setattr(delivery_module, "run_of", lambda _: run)
    hinted: list[object] = []
    node: Any = SimpleNamespace(
        world=RealWorld(JUDGE, tmp_path), book=SimpleNamespace(hint=hinted.append)
    )
    async with trio.open_nursery() as nursery:
        deliveries = delivery_module.Deliveries(node, "accepted", nursery, lambda: None)
        for index in range(3):
            work = decode_delivery_untrusted(delivery(index), node.world.verify)
            await deliveries.keep(work)
            deliveries.expect()
            deliveries.deliver(work)
    said = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert len(said) == 1
    assert "a gap" in said[0]
    assert hinted == []
    assert await node.world.disk.list("accepted") == []
