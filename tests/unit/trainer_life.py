"""One life of a trainer with a real engine in its process and a real disk, without a swarm.

``python -m tests.unit.trainer_life FOLDER STEPS POINT:STEP`` is one whose learner is another
process (tests/unit/external_trainer.py). It kills itself at that point; ``never`` is nowhere.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, Final

import trio

from p2p.identity import KeyPair
from p2p.machine import RealWorld
from p2p.policy import PolicyVersion
from proofs.checks import Verdict
from roles.contract.core.sampling import SamplingTerms
from roles.engines.base import Completion, Group, Learner, StepReport, TrainingGroup
from roles.engines.client import open_engine
from roles.engines.config import EngineConfig
from roles.engines.external import ExternalLearner
from roles.envs.base import Task
from roles.envs.contained import EnvironmentFailed
from roles.protocol.core.groups import encode_groups
from roles.protocol.core.statements import LEARNT_KIND
from roles.protocol.core.verdict import SignedVerdict
from roles.protocol.core.window import Claim, SignedWindow, Submission, Window, content_digest
from roles.protocol.replay import as_signed
from roles.rl.recipes import SORTER
from roles.shared import exchange
from roles.shared.durable import Durable
from roles.trainer.core.buffer import BufferedGroup, GroupBuffer
from roles.trainer.curve import LearningCurve
from roles.trainer.inbox import Inbox
from roles.trainer.intake import Intake
from roles.trainer.metrics import Metrics
from roles.trainer.policies import PolicyFiles
from roles.trainer.session import TrainerSession
from roles.trainer.taken import TakenPlace, learnable_groups
from tests.support.toys import sorting_learner

KEY: Final = KeyPair(b"t" * 32)
STEPS: Final = 400
LEARNER: Final = sorting_learner(groups=5, minibatches=2, evaluate_every=0)
CONFIG: Final = EngineConfig(
    shape=replace(SORTER, width=16, layers=1, query_heads=2, key_heads=1, feed_forward=32),
    sampling=SamplingTerms(steps=STEPS, group_size=4, lag=1000, max_new_tokens=12),
    learner=LEARNER,
)
CHECKPOINT_EVERY: Final = 4
GROUPS: Final = 3
"""Of a place: steps and places never end together."""
PUBLISHED: Final = "published.jsonl"
TOLD: Final = "told.jsonl"


def place(index: int) -> TakenPlace:
    """What the trainer takes as its place ``index``: random answers, prompts and rewards."""
    rng = Random(index)

    def tokens(most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(50) for _ in range(rng.randint(1, most)))

    groups = tuple(
        Group(number, tuple(Completion(tokens(6)) for _ in range(4)))
        for number in range(GROUPS)
    )
    count = sum(len(one.tokens) for group in groups for one in group.completions)
    logprobs = struct.pack(f"<{count}e", *(-4 * rng.random() for _ in range(count)))
    content = encode_groups(groups)
    digests, claims = (content_digest(content),), bytes([Claim.SPREAD] * GROUPS)
    window = Window(
        *(bytes(32), bytes(32), KEY.peer_id, PolicyVersion(0), bytes(32)),
        *(index, digests, claims),
    )
    submission = Submission(SignedWindow.sign(window, KEY), index, content)
    rewards = tuple(
        as_signed(reward)
        for _ in range(GROUPS)
        for reward in (0.0, 1.0, rng.random(), rng.random())
    )
    verdict = SignedVerdict(
        *(KEY.peer_id, submission.commitment, Verdict.ACCEPTED, "", 0.0, 0.0),
        *(rewards, content_digest(logprobs)),
    )
    prompts = tuple(tokens(8) for _ in range(GROUPS))
    return TakenPlace(verdict.signed(KEY), submission, tuple(range(GROUPS)), prompts, logprobs)


def lessons(index: int) -> list[BufferedGroup]:
    """What the groups of place ``index`` teach."""
    return learnable_groups(place(index), CONFIG.sampling.group_size)


class Ledger:
    """Remembers on disk what each step has learnt from, and nothing else."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "ledger"

    async def append(self, *_: object) -> None:
        await trio.lowlevel.checkpoint()

    async def append_all(self, entries: Sequence[tuple[str, bytes]]) -> None:
        await trio.lowlevel.checkpoint()
        with self._path.open("a") as file:
            file.write("".join(f"{body.hex()}\n" for _, body in entries))

    async def entries(self, kind: str) -> Any:
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        for line in lines if kind == LEARNT_KIND else ():
            yield SimpleNamespace(body=bytes.fromhex(line))


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


class Shardcast:
    """Remembers on disk which versions are out, and says so."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / PUBLISHED
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        self.newest = PolicyVersion(json.loads(lines[-1]) if lines else -1)
        self.signed = self.newest

    async def publish(
        self, version: PolicyVersion, weights: str, note: bytes, adapter: object
    ) -> None:
        await trio.lowlevel.checkpoint()
        assert version == self.newest + 1
        with self._path.open("a") as file:
            file.write(f"{int(version)}\n")
        self.newest = version

    def holds(self, _: PolicyVersion) -> bool:
        return True

    def manifest(self, _: PolicyVersion) -> Any:
        return SimpleNamespace(anchor=SimpleNamespace(wire=0))


class Standing:
    why_not = ""

    async def wait(self) -> None:
        await trio.lowlevel.checkpoint()

    wait_run = wait


class Deadly(ExternalLearner):
    """Dies at a point of a step: planned, given, come, written or saved."""

    point = ""

    def die(self, point: str, step: int) -> None:
        if self.point == f"{point}:{step}":
            os.kill(os.getpid(), signal.SIGKILL)

    async def step(self, groups: Sequence[TrainingGroup]) -> StepReport:
        self.die("planned", self._step + 1)
        report = await super().step(groups)
        self.die("come", report.step)
        return report

    async def _look(self) -> list[str]:
        names = await super()._look()
        if exchange.name_of(exchange.GROUPS, self._step + 1) in names:
            self.die("given", self._step + 1)
        return names

    async def _note_taken(self) -> None:
        self.die("written", self._step)
        await super()._note_taken()
        self.die("saved", self._step)


async def live(folder: Path, steps: int, point: str) -> None:
    world = RealWorld(KEY, folder)
    async with open_engine(world, CONFIG, name="trainer") as engine:
        run: Any = SimpleNamespace(id=bytes(32), name="a run")
        learner = Deadly(engine, world, CONFIG, run)
        learner.point = point
        await learn(world, folder, learner, steps)


async def learn(world: RealWorld, folder: Path, engine: Learner, steps: int) -> None:
    node: Any = SimpleNamespace(world=world, shardcast=Shardcast(folder))
    ledger: Any = Ledger(folder)
    standing: Any = Standing()
    durable, inbox, sampling = (
        Durable(world, "trainer"),
        ToldInbox(world, "intake", folder / TOLD),
        CONFIG.sampling,
    )
    intake = Intake(node, sampling, ledger, inbox, GroupBuffer(sampling.lag), durable)
    curve = LearningCurve(world.disk, sampling, LEARNER, Unasked())
    policies = PolicyFiles(engine, world.disk, durable, checkpoint_every=CHECKPOINT_EVERY)
    desk: Any = SimpleNamespace(note_policy=lambda: None, repeated=0, lies=0)
    session = TrainerSession(
        *(node, sampling.steps, LEARNER, engine),
        *(intake, desk, curve, standing, policies, Metrics({})),
    )
    step = await session._resume()
    await intake.restore(step)
    # The newest place is on disk always: none is taken twice.
    taken = [await inbox.read(key) for key in inbox._files]
    coming = 1 + max((one.submission.index for one in taken if one is not None), default=-1)
    while step < steps:
        while len(intake.buffer) < LEARNER.groups:
            await intake.take(place(coming))
            coming += 1
        step = await session._step(step)


if __name__ == "__main__":
    trio.run(live, Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
