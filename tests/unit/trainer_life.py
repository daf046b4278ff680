"""One life of a trainer with a real engine in its process and a real disk, without a swarm.

``python -m tests.unit.trainer_life FOLDER STEPS`` prints each version that it publishes, and is
killed at any time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, Final

import trio
from roles.trainer.audit import AuditCounts

from p2p.identity import KeyPair
from p2p.machine import RealWorld
from p2p.policy import PolicyVersion
from proofs.checks import Verdict
from roles.engines.base import Completion, Engine, TrainingGroup
from roles.engines.client import open_engine
from roles.engines.config import EngineConfig, ModelShape
from roles.envs.base import Task
from roles.envs.contained import EnvironmentFailed
from roles.protocol.core.groups import (
    AcceptedWork,
    Commitment,
    SignedVerdict,
    Submission,
    content_digest,
)
from roles.rl.recipe import Recipe, WarmUp
from roles.shared.durable import Durable
from roles.trainer.core.buffer import BufferedGroup, GroupBuffer
from roles.trainer.curve import LearningCurve
from roles.trainer.inbox import Inbox
from roles.trainer.intake import Intake
from roles.trainer.policies import PolicyFiles
from roles.trainer.session import TrainerSession

KEY: Final = KeyPair(b"t" * 32)
STEPS: Final = 400
CONFIG: Final = EngineConfig(
    shape=ModelShape(width=16, layers=1, query_heads=2, key_heads=1, feed_forward=32),
    recipe=Recipe(
        steps=STEPS, groups=5, group_size=4, minibatches=2, lag=1000, warm_up=WarmUp(steps=0)
    ),
)
CHECKPOINT_EVERY: Final = 4
GROUPS: Final = 3
"""Of a delivery: steps and deliveries never end together."""
PUBLISHED: Final = "published.jsonl"
TOLD: Final = "told.jsonl"


def lesson(index: int, number: int) -> TrainingGroup:
    """What group ``number`` of delivery ``index`` teaches."""
    rng = Random(f"{index} {number}")

    def tokens(most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(50) for _ in range(rng.randint(1, most)))

    drawn = [tokens(6) for _ in range(4)]
    return TrainingGroup(
        tokens(8),
        tuple(Completion(one, tuple(-4 * rng.random() for _ in one)) for one in drawn),
        (0.0, 1.0, rng.random(), rng.random()),
    )


def delivery(index: int) -> AcceptedWork:
    content = index.to_bytes(2, "big")
    commitment = Commitment(
        bytes(32), KEY.peer_id, PolicyVersion(0), bytes(32), index, content_digest(content)
    )
    bound = content_digest(b"")
    verdict = SignedVerdict(KEY.peer_id, commitment, Verdict.ACCEPTED, "", 0.0, 0.0, (), bound)
    return AcceptedWork(verdict.signed(KEY), Submission.sign(commitment, content, KEY), b"")


class Check:
    """Takes every delivery at its word."""

    async def groups(self, work: AcceptedWork) -> list[BufferedGroup]:
        await trio.lowlevel.checkpoint()
        index = int.from_bytes(work.submission.content, "big")
        source = work.submission.commitment.content
        return [
            BufferedGroup(PolicyVersion(0), source, number, lesson(index, number))
            for number in range(GROUPS)
        ]

    groups_again = groups_kept = groups
    auditor = SimpleNamespace(counts=AuditCounts(), liars={})

    async def recall(self) -> None:
        await trio.lowlevel.checkpoint()

    def why_refused(self, _: object) -> str:
        return ""


class Ledger:
    async def append(self, *_: object) -> None:
        await trio.lowlevel.checkpoint()

    append_all = append

    async def entries(self, _: str) -> Any:
        for never in ():
            yield never


class ToldInbox(Inbox):
    """Says on a file of its own what went into each step: the log forgets what is covered."""

    def __init__(self, world: RealWorld, folder: str, told: Path) -> None:
        super().__init__(world, folder)
        self._told = told

    async def mark_used(self, groups: Sequence[BufferedGroup], step: int) -> None:
        await super().mark_used(groups, step)
        rows = [[one.source.hex(), one.number, step] for one in groups]
        with self._told.open("a") as file:
            file.write(f"\n{json.dumps(rows)}")  # behind what a kill has cut off


class Unasked:
    """An environment that is not asked for held-out tasks."""

    async def evaluation(self) -> list[Task]:
        raise EnvironmentFailed("nothing is evaluated here")

    async def tasks(self, _: Sequence[bytes]) -> list[Task]:
        raise NotImplementedError

    async def rewards(self, _: object) -> list[float]:
        raise NotImplementedError

    async def texts(self, _: object) -> list[tuple[str, str]]:
        raise NotImplementedError


class Shardcast:
    """Remembers on disk which versions are out, and says so."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / PUBLISHED
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        self.newest = PolicyVersion(json.loads(lines[-1]) if lines else -1)
        self.signed = self.newest

    async def publish(self, version: PolicyVersion, weights: str) -> None:
        await trio.lowlevel.checkpoint()
        assert version == self.newest + 1
        with self._path.open("a") as file:
            file.write(f"{int(version)}\n")
        self.newest = version
        sys.stdout.write(f"{int(version)}\n")
        sys.stdout.flush()

    def holds(self, _: PolicyVersion) -> bool:
        return True

    def manifest(self, _: PolicyVersion) -> Any:
        return SimpleNamespace(anchor=SimpleNamespace(wire=0))


class Standing:
    why_not = ""

    async def wait(self) -> None:
        await trio.lowlevel.checkpoint()

    wait_run = wait


async def live(folder: Path, steps: int) -> None:
    world = RealWorld(KEY, folder)
    async with open_engine(world, CONFIG, name="trainer") as engine:
        await learn(world, folder, engine, steps)


async def learn(world: RealWorld, folder: Path, engine: Engine, steps: int) -> None:
    node: Any = SimpleNamespace(world=world, shardcast=Shardcast(folder))
    check: Any = Check()
    ledger: Any = Ledger()
    standing: Any = Standing()
    durable, inbox, recipe = (
        Durable(world, "trainer"),
        ToldInbox(world, "intake", folder / TOLD),
        CONFIG.recipe,
    )
    intake = Intake(node, recipe, check, ledger, inbox, GroupBuffer(99, recipe.lag), durable)
    curve = LearningCurve(world.disk, recipe, Unasked(), 0)
    policies = PolicyFiles(engine, world.disk, durable, checkpoint_every=CHECKPOINT_EVERY)
    session = TrainerSession(node, recipe, engine, intake, curve, standing, policies)
    step = await session._resume()
    await intake.restore(step)
    names = {delivery(index).verdict.commitment.content: index for index in range(STEPS)}
    # The newest delivery is on disk always: nothing is delivered twice.
    coming = 1 + max((names[content] for content in inbox._files), default=-1)
    while step < steps:
        while len(intake.buffer) < recipe.groups:
            work = delivery(coming)
            coming += 1
            await inbox.keep(work)
            intake._put(work, await check.groups(work))
        step = await session._step(step)


if __name__ == "__main__":
    trio.run(live, Path(sys.argv[1]), int(sys.argv[2]))
