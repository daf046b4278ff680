"""A trainer's intake with a real check, auditor, ledger and disk, and a swarm of nobody.

Workers' submissions are drawn by the engine that the trainer scores with, and judged by a
validator that says what it is told to.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import trio
from roles.trainer.audit import Auditor
from roles.trainer.check import DeliveryCheck
from roles.trainer.scoring import ScoringDesk

from p2p.host import Host
from p2p.identity import KeyPair, PeerId
from p2p.ledger import ExchangeConfig, Ledger, LedgerExchange, OwnLedger, open_ledger
from p2p.machine import RealWorld
from p2p.node.services import Shunned
from p2p.shardcast.manifest import PolicyVersion
from proofs.checks import Limits, Verdict
from roles.engines.base import Group, GroupTask, Sampling, Scored, draw_all
from roles.engines.config import MachineLimits, ModelShape
from roles.engines.fake import FakeEngine
from roles.engines.torch.engine import TorchEngine
from roles.engines.worker import draw_all as draw_all_now
from roles.envs.base import Task, environment_digest
from roles.envs.client import Answers, LocalEnvironment, setup_of
from roles.envs.mix import open_mix
from roles.protocol.core.assignment import draw_order, run_sampling
from roles.protocol.core.groups import (
    AcceptedWork,
    Commitment,
    Receipt,
    SignedVerdict,
    Submission,
    content_digest,
    encode_groups,
)
from roles.protocol.replay import answers_of
from roles.rl.recipe import Recipe, WarmUp
from roles.run.core.file import EnvironmentPin, Model, Run, Terms, sign_run
from roles.shared.durable import Durable
from roles.trainer.core.buffer import GroupBuffer
from roles.trainer.inbox import Inbox
from roles.trainer.intake import Intake

OWNER, TRAINER, JUDGE, WORKER = (KeyPair(bytes([number]) * 32) for number in range(20, 24))
VERSION: Final = PolicyVersion(0)
POLICY: Final = b"p" * 32
WEIGHTS: Final = "weights.safetensors"
RECIPE: Final = Recipe(
    steps=9, groups=4, group_size=4, submission=2, minibatches=1, warm_up=WarmUp(steps=0)
)
TINY: Final = ModelShape(width=32, layers=2, query_heads=2, key_heads=1, feed_forward=64)


def make_run(engine: str = "fake", **changes: Any) -> Run:
    """A run of sorting, judged by `JUDGE`."""
    terms = Terms(
        name="audited",
        expiry=2**32 - 1,
        environments=(EnvironmentPin(name="sort", digest=environment_digest("sort")),),
        trainers=(TRAINER.peer_id,),
        validators=(JUDGE.peer_id,),
        model=Model(engine=engine, shape=TINY, context=128),
        recipe=RECIPE,
        limits=Limits.fp32(),
    )
    return sign_run(replace(terms, **changes), OWNER)


class Recording(LocalEnvironment):
    """Remembers what it was asked."""

    def __init__(self, run: Run) -> None:
        super().__init__(open_mix(setup_of(run, MachineLimits())))
        self.calls: list[str] = []
        self.bonus = 0.0
        """Added to all that it pays: an environment that differs from another machine's."""

    async def tasks(self, seeds: Sequence[bytes]) -> list[Task]:
        self.calls.append("tasks")
        return await super().tasks(seeds)

    async def rewards(self, answers: Answers) -> list[float]:
        self.calls.append("rewards")
        return [min(1.0, paid + self.bonus) for paid in await super().rewards(answers)]


class InProcess:
    """The torch engine, without a process around it."""

    def __init__(self, world: RealWorld, run: Run) -> None:
        self._world = world
        self._engine = TorchEngine(run.engine_config())

    def make_weights(self) -> None:
        locate = self._world.disk.locate
        self._engine.open(locate("checkpoint"))
        self._engine.save("", locate(WEIGHTS))

    async def load(self, weights: str) -> None:
        await trio.lowlevel.checkpoint()
        self._engine.load(self._world.disk.locate(weights))

    async def draw(self, tasks: Sequence[GroupTask], sampling: Sampling) -> list[Group]:
        await trio.lowlevel.checkpoint()
        return draw_all_now(self._engine, tasks, sampling)

    async def score(
        self, tasks: Sequence[GroupTask], groups: Sequence[Group], sampling: Sampling
    ) -> list[Scored]:
        await trio.lowlevel.checkpoint()
        return self._engine.score(tasks, groups, sampling)


class Pretending(FakeEngine):
    """The fake engine, with weights of its own."""

    def __init__(self, world: RealWorld, run: Run) -> None:
        super().__init__(world, run.engine_config())

    async def draw(self, tasks: Sequence[GroupTask], sampling: Sampling) -> list[Group]:
        return await draw_all(self, tasks, sampling)


class Silent:
    """Gossip that nobody hears."""

    def subscribe(self, *_: object) -> None: ...

    def publish(self, *_: object) -> None: ...


@dataclass
class Bench:
    """What is around an intake."""

    world: RealWorld
    run: Run
    engine: Any
    """What workers, validators and the trainer compute with."""
    environment: Recording
    ledger: Ledger
    held: list[PolicyVersion] = field(default_factory=lambda: [VERSION])
    admitted: list[PeerId] = field(default_factory=lambda: [WORKER.peer_id, JUDGE.peer_id])
    standing: Any = None
    auditor: Any = None
    intake: Any = None
    ledgers: Any = None
    node: Any = None

    def open_trainer(self) -> None:
        """A trainer's first or next life, on the same disk."""

        @contextmanager
        def pin(_: PolicyVersion) -> Iterator[str]:
            yield WEIGHTS

        async def check_weights(_: PolicyVersion) -> str:
            await trio.lowlevel.checkpoint()
            return WEIGHTS

        shardcast = SimpleNamespace(
            holds=lambda version: version in self.held,
            manifest=lambda _: SimpleNamespace(weights_digest=POLICY),
            pin=pin,
            check_weights=check_weights,
            newest=VERSION,
        )
        self.ledgers = LedgerExchange(
            self.world,
            cast(Host, None),
            cast(OwnLedger, None),
            ExchangeConfig(is_on=True),
            list,
        )
        self.ledgers.follow(self.run.officers)
        node: Any = SimpleNamespace(
            world=self.world,
            shardcast=shardcast,
            may=lambda peer, _: peer in self.admitted,
            book=SimpleNamespace(hint=lambda _: False),
            lacks_work=lambda _: False,
            host=SimpleNamespace(network_of=lambda _: ""),
            gossip=Silent(),
            run=self.run,
            peer_id=self.world.signer.peer_id,
            ledgers=self.ledgers,
            shunned=Shunned(),
        )
        self.node, self.standing = node, SimpleNamespace(run=self.run, why_not="")
        durable = Durable(self.world, "trainer")
        self.auditor = Auditor(
            node, ScoringDesk(node, self.engine), self.standing, self.ledger, durable
        )
        check = DeliveryCheck(node, self.run, self.environment, self.standing, self.auditor)
        recipe = self.run.terms.recipe
        inbox, buffer = Inbox(self.world, "trainer/intake"), GroupBuffer(10_000, recipe.lag)
        self.intake = Intake(node, recipe, check, self.ledger, inbox, buffer, durable)

    async def draw(self, index: int, worker: KeyPair = WORKER) -> tuple[Group, ...]:
        """What an honest worker draws at a place."""
        order = draw_order(self.run, worker.peer_id, VERSION, POLICY)
        made = await LocalEnvironment.tasks(self.environment, order.task_seeds(index))
        tasks = [task for _, task in order.with_draws(index, made)]
        return tuple(await self.engine.draw(tasks, run_sampling(self.run)))

    async def verdict_on(
        self, groups: tuple[Group, ...], index: int, worker: KeyPair = WORKER, **lies: Any
    ) -> AcceptedWork:
        """An acceptance of ``groups``, with the rewards and log-probs of an honest one but for
        ``lies``: ``logprobs``, and fields of commitment and verdict."""
        order = draw_order(self.run, worker.peer_id, VERSION, POLICY)
        made = await LocalEnvironment.tasks(self.environment, order.task_seeds(index))
        tasks = order.with_draws(index, made)
        content = encode_groups(groups)
        logprobs = lies.pop("logprobs", None)
        if logprobs is None:
            scored = await self.engine.score(
                [task for _, task in tasks], groups, run_sampling(self.run)
            )
            logprobs = b"".join(one.logprobs for one in scored)
        rewards = lies.pop("rewards", None)
        if rewards is None:
            answers = answers_of([task for task, _ in tasks], groups)
            rewards = tuple(await LocalEnvironment.rewards(self.environment, answers))
        commitment = Commitment(
            self.run.id, worker.peer_id, VERSION, POLICY, index, content_digest(content)
        )
        said = {name: lies.pop(name) for name in ("run", "policy") if name in lies}
        commitment = replace(commitment, index=lies.pop("place", index), **said)
        judge = lies.pop("judge", JUDGE)
        verdict = SignedVerdict(
            judge.peer_id, commitment, lies.pop("verdict", Verdict.ACCEPTED), "", 0.0, 0.0,
            rewards, content_digest(logprobs),
        )  # fmt: skip
        assert not lies
        submission = Submission.sign(commitment, content, worker)
        return AcceptedWork(verdict.signed(judge), submission, logprobs)

    async def honest(self, index: int, **lies: Any) -> AcceptedWork:
        """A delivery of honest work."""
        return await self.verdict_on(await self.draw(index), index, **lies)

    async def made_up(self, index: int, **lies: Any) -> AcceptedWork:
        """A delivery of tokens that nobody drew, in a place and shape that are right."""
        groups = await self.draw(index)
        changed = tuple(
            replace(
                group,
                completions=tuple(
                    replace(one, tokens=tuple(_other(t, n) for n, t in enumerate(one.tokens)))
                    for one in group.completions
                ),
            )
            for group in groups
        )
        return await self.verdict_on(changed, index, **lies)

    async def hand_over(self, work: AcceptedWork, peer: KeyPair = JUDGE) -> tuple[Receipt, str]:
        """As a validator does."""
        receipt: tuple[Receipt, str] = await self.intake.take(peer.peer_id, work.to_bytes())
        return receipt


def _other(token: int, place: int) -> int:
    """Another token, never one that ends."""
    return token if token == 0 else 1 + (token + place) % 40


@asynccontextmanager
async def open_bench(
    folder: Path, engine: str = "fake", **changes: Any
) -> AsyncIterator[Bench]:
    """A trainer on a disk of its own, whose auditor works while the block lasts."""
    run = make_run(engine, **changes)
    world = RealWorld(TRAINER, folder)
    kind = Pretending if engine == "fake" else InProcess
    runner: Any = kind(world, run)
    if engine == "fake":
        await runner.open("checkpoint")
        await runner.save("", WEIGHTS)
    else:
        runner.make_weights()
    await runner.load(WEIGHTS)
    async with open_ledger(world) as ledger, trio.open_nursery() as nursery:
        bench = Bench(world, run, runner, Recording(run), ledger)
        bench.open_trainer()
        nursery.start_soon(bench.auditor.work_forever)
        yield bench
        nursery.cancel_scope.cancel()
