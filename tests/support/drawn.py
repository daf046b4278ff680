"""Places drawn by the fake engine under a run of sorting, honest or made up, and verdicts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from p2p.identity import KeyPair
from p2p.machine import RealWorld
from p2p.policy import PolicyVersion
from proofs.checks import Limits, Verdict
from roles.contract.core.file import EnvironmentPin, Model, Run, Terms, sign_run
from roles.contract.core.sampling import SamplingTerms
from roles.engines.base import Group, draw_all
from roles.engines.config import MachineLimits, engine_of
from roles.engines.fake import FakeEngine
from roles.envs.base import environment_digest
from roles.envs.client import LocalEnvironment, setup_of
from roles.envs.mix import open_mix
from roles.protocol.core.assignment import draw_order, run_sampling
from roles.protocol.core.groups import encode_groups
from roles.protocol.core.terms import terms_digest
from roles.protocol.core.verdict import SignedVerdict
from roles.protocol.core.window import Claim, SignedWindow, Submission, Window, content_digest
from roles.protocol.replay import answers_of, as_signed
from roles.rl.recipes import SORTER

OWNER, TRAINER, JUDGE, WORKER = (KeyPair(bytes([number]) * 32) for number in range(20, 24))
VERSION: Final = PolicyVersion(0)
WEIGHTS: Final = "weights.safetensors"
TINY: Final = replace(SORTER, width=32, layers=2, query_heads=2, key_heads=1, feed_forward=64)


def make_run() -> Run:
    """Return a run of sorting, judged by `JUDGE`."""
    terms = Terms(
        name="audited",
        expiry=2**32 - 1,
        environments=(EnvironmentPin(name="sort", digest=environment_digest("sort")),),
        trainers=(TRAINER.peer_id,),
        validators=(JUDGE.peer_id,),
        model=Model(engine="fake", shape=TINY, context=128),
        sampling=SamplingTerms(steps=9, group_size=4, submission=2, max_new_tokens=12),
        limits=Limits.fp32(),
    )
    return sign_run(terms, OWNER)


class Drawer:
    """A worker's machine, with the first weights on its disk."""

    def __init__(self, folder: Path) -> None:
        self.run = make_run()
        self.policy = b"p" * 32
        self._world = RealWorld(TRAINER, folder)
        self._engine = FakeEngine(self._world, engine_of(self.run))
        self._environment = LocalEnvironment(open_mix(setup_of(self.run, MachineLimits())))

    async def open(self) -> None:
        """Make the weights."""
        await self._engine.open("checkpoint")
        await self._engine.save("", WEIGHTS)
        await self._engine.load(WEIGHTS)

    async def draw(self, index: int) -> tuple[Group, ...]:
        """Return what an honest worker draws at place ``index``."""
        order = draw_order(self.run, WORKER.peer_id, VERSION, self.policy)
        made = await self._environment.tasks(order.task_seeds(index))
        tasks = [task for _, task in order.with_draws(index, made)]
        return tuple(await draw_all(self._engine, tasks, run_sampling(self.run)))

    async def make_up(self, index: int) -> tuple[Group, ...]:
        """Return tokens that nobody drew, in the shape of place ``index``."""
        return tuple(
            replace(
                group,
                completions=tuple(
                    replace(one, tokens=tuple(map(_other, range(99), one.tokens)))
                    for one in group.completions
                ),
            )
            for group in await self.draw(index)
        )

    def submit(self, index: int, groups: tuple[Group, ...], **changes: Any) -> Submission:
        """Return the groups behind a window of one place; ``changes`` are fields of it."""
        head = self.run, WORKER, VERSION, self.policy
        return submission_of(head, index, groups, **changes)

    async def accept(self, submission: Submission, groups: tuple[Group, ...]) -> SignedVerdict:
        """Return the acceptance by `JUDGE`, with the rewards that the environment pays."""
        order = draw_order(self.run, WORKER.peer_id, VERSION, self.policy)
        made = await self._environment.tasks(order.task_seeds(submission.index))
        paid = await self._environment.rewards(answers_of(made, groups))
        rewards = tuple(map(as_signed, paid))
        return judge(submission, JUDGE, Verdict.ACCEPTED, rewards=rewards)


def submission_of(
    head: tuple[Run, KeyPair, PolicyVersion, bytes],
    index: int,
    groups: tuple[Group, ...],
    **changes: Any,
) -> Submission:
    """Sign a window of one place; ``head`` is its run, worker, version and policy."""
    run, worker, version, policy = head
    content = encode_groups(groups)
    window = Window(
        *(run.id, terms_digest(run), worker.peer_id, version, policy, index),
        *((content_digest(content),), bytes([Claim.UNKNOWN] * len(groups))),
    )
    return Submission(SignedWindow.sign(replace(window, **changes), worker), index, content)


def judge(
    submission: Submission,
    scorer: KeyPair,
    word: Verdict,
    reason: str = "",
    numbers: tuple[float, float] = (0.0, 0.0),
    rewards: tuple[float, ...] = (),
) -> SignedVerdict:
    """Return a verdict on ``submission`` that says what it is told to."""
    made = SignedVerdict(
        *(scorer.peer_id, submission.commitment, word, reason, *numbers, rewards)
    )
    return made.signed(scorer)


def _other(place: int, token: int) -> int:
    """Return another token, never one that ends."""
    return token if token == 0 else 1 + (token + place) % 40
