"""Completions of several turns, drawn and replayed in this process under one run."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from p2p.identity import KeyPair
from p2p.shardcast.manifest import PolicyVersion
from proofs.checks import Limits
from proofs.sampling import DrawRule
from roles.contract.core.file import EnvironmentPin, Model, Run, Terms, sign_run
from roles.contract.core.sampling import SamplingTerms
from roles.contract.core.shape import Dtype, ModelShape
from roles.engines.base import Completion, Group, GroupTask, Row, Scored
from roles.engines.torch import scorer
from roles.engines.torch.model import TransformerModel
from roles.engines.torch.sampler import Sampler
from roles.envs.base import Environment, Task, TurnLimits
from roles.envs.client import LocalEnvironment
from roles.envs.mix import MixedEnvironment
from roles.inference.places import OpenPlace
from roles.protocol.core.assignment import DrawOrder, draw_order, run_sampling
from roles.protocol.core.groups import heard_digest
from roles.protocol.core.window import Submission
from roles.protocol.replay import with_heard
from roles.protocol.scorer import Ruling, check_place, replay_all
from tests.support.drawn import submission_of

OWNER, TRAINER, WORKER = (KeyPair(bytes([number]) * 32) for number in range(30, 33))
VERSION = PolicyVersion(3)


class Talk:
    """Answers by what was said; ends a completion in one case of eight."""

    name = "talk"

    def __init__(self, vocabulary: int, salt: bytes = b"") -> None:
        self._vocabulary, self._salt = vocabulary, salt

    def task(self, seed: bytes, *, held_out: bool = False) -> Task:
        prompt = tuple(20 + one % (self._vocabulary - 20) for one in seed[: 5 + seed[0] % 9])
        return Task(prompt)

    def respond(self, task: Task, tokens: Sequence[int], room: int) -> Sequence[int] | None:
        digest = hashlib.sha256(repr((task.prompt, tokens, self._salt)).encode()).digest()
        if digest[0] < 32:
            return None
        words = 1 + digest[1] % 7
        return [20 + one % (self._vocabulary - 20) for one in digest[2 : 2 + words]]

    def reward(self, task: Task, tokens: Sequence[int]) -> float:
        return sum(tokens) % 5 / 4

    def evaluation(self) -> list[Task]:
        return [self.task(bytes([number]) * 32) for number in range(4)]


def make_turns_run(
    shape: ModelShape, *, ends: Sequence[int], draw: DrawRule = DrawRule.CDF,
    dtype: Dtype = Dtype.FLOAT32, limits: Limits | None = None, **sampling: Any,
) -> Run:  # fmt: skip
    """Return a run of several turns."""
    how = {"group_size": 4, "submission": 2, "max_new_tokens": 70, "turns": 5, "heard": 24}
    terms = Terms(
        name="talk",
        expiry=2**32 - 1,
        environments=(EnvironmentPin(name="talk", digest=bytes(32)),),
        trainers=(TRAINER.peer_id,),
        validators=(),
        model=Model(shape=shape, dtype=dtype, draw=draw, context=1024, end_tokens=tuple(ends)),
        sampling=SamplingTerms(steps=9, **{**how, **sampling}),
        limits=limits or Limits.fp32(),
    )
    return sign_run(terms, OWNER)


def turn_limits(run: Run) -> TurnLimits:
    sampling = run.terms.sampling
    return TurnLimits(
        most=sampling.turns, heard=sampling.heard, max_new_tokens=sampling.max_new_tokens,
        end_tokens=run.terms.model.end_tokens,
    )  # fmt: skip


@dataclass
class Talker:
    """A worker's machine, and a scorer with the same weights."""

    run: Run
    model: TransformerModel
    environment: Environment
    policy: bytes = b"p" * 32

    def __post_init__(self) -> None:
        self.local = self.with_environment(self.environment)

    def with_environment(self, environment: Environment) -> LocalEnvironment:
        return LocalEnvironment(
            MixedEnvironment({"talk": (1.0, environment)}, turn_limits(self.run))
        )

    @property
    def order(self) -> DrawOrder:
        return draw_order(self.run, WORKER.peer_id, VERSION, self.policy)

    async def draw(
        self,
        index: int,
        *,
        model: TransformerModel | None = None,
        local: LocalEnvironment | None = None,
        change: Callable[[Sampler, int], object] = lambda sampler, step: None,
    ) -> tuple[Group, ...]:
        """Draw a place as a worker does, which hears what ``local`` says."""
        terms, local = self.run.terms, local or self.local
        made = await local.tasks(self.order.task_seeds(index))
        asked = {task.group: (plain, task) for plain, task in
                 self.order.with_draws(index, made)}  # fmt: skip
        ends = frozenset(terms.model.end_tokens)
        sampler = Sampler(model or self.model, ends, terms.model.draw, proves=True)
        sampler.add([task for _, task in asked.values()], run_sampling(self.run))
        steps, void = 0, set[tuple[int, int]]()
        while sampler.has_work:
            while sampler.can_step:
                sampler.step()
                steps += 1
                change(sampler, steps)
            rows = sampler.paused()
            heard = await local.hear([(asked[row.group][0], [row.tokens]) for row in rows])
            told = list(zip(rows, heard, strict=True))
            void |= {(row.group, row.slot) for row, said in told if None in said}
            sampler.hear([Row(row.group, row.slot, said[-1] or ()) for row, said in told])
        drawn = {group.group: group for _, group in sampler.take_ended()}
        tasks = [task for _, task in asked.values()]
        place = OpenPlace(self.order, index, tasks, (), drawn, void)
        return tuple(with_heard(group, self.run) for group in place.groups())

    def submit(self, index: int, groups: tuple[Group, ...]) -> Submission:
        return submission_of((self.run, WORKER, VERSION, self.policy), index, groups)

    async def judge(self, index: int, groups: tuple[Group, ...]) -> Ruling:
        """Return what an honest scorer says of a place."""
        submission = self.submit(index, groups)
        return await check_place(self.run, self.local, self.score, submission, replay_all)

    async def score(self, tasks: Sequence[GroupTask], some: Sequence[Group]) -> list[Scored]:
        """Run the model over groups."""
        how, terms = run_sampling(self.run), self.run.terms.model
        ends = frozenset(terms.end_tokens)
        return scorer.score(self.model, tasks, some, how, ends, terms.draw)


CHEATS = (
    "forged tool output", "skipped turn", "altered observation", "early stop", "other template",
    "stale policy in mid-episode",
)  # fmt: skip


class Misheard:
    """An environment of which a worker's engine is told something else."""

    def __init__(self, true: Any, change: Callable[[list[int]], list[int]]) -> None:
        self._true, self._change, self.name = true, change, true.name
        self.task, self.reward = true.task, true.reward
        self.evaluation = true.evaluation

    def respond(self, task: Task, tokens: Sequence[int], room: int) -> Sequence[int] | None:
        said = self._true.respond(task, tokens, room)
        return None if said is None else self._change(list(said))[:room]


async def cheat(talker: Talker, name: str, index: int) -> tuple[Group, ...]:
    """Draw a place with a lie, and claim to have heard what an honest worker hears."""

    async def misheard(change: Callable[[list[int]], list[int]]) -> tuple[Group, ...]:
        local = talker.with_environment(Misheard(talker.environment, change))
        return await talker.draw(index, local=local)

    match name:
        case "forged tool output":
            groups = await misheard(lambda said: said[::-1])
        case "skipped turn":
            groups = await misheard(lambda said: said[-1:])
        case "altered observation":  # in one token
            groups = await misheard(lambda said: [*said[:-1], said[-1] - 1])
        case "early stop":
            groups = tuple(
                replace(group, completions=tuple(map(_stopped, group.completions)))
                for group in await talker.draw(index)
            )
        case "other template":  # one token more
            groups = await misheard(lambda said: [*said, said[-1]])
        case "stale policy in mid-episode":
            groups = await talker.draw(index, change=_Swap(talker.model, 9))
        case _:
            raise ValueError(name)
    return await _claiming(talker, groups, index)


async def _claiming(talker: Talker, groups: tuple[Group, ...], index: int) -> tuple[Group, ...]:
    """Give each completion the digest of what the scorer will hear: the cheat's best claim."""
    made = await talker.local.tasks(talker.order.task_seeds(index))
    claimed = []
    for task, group in zip(made, groups, strict=True):
        heard = await talker.local.hear([(task, [one.tokens for one in group.completions])])
        completions = tuple(
            replace(one, heard=heard_digest(said))
            for one, said in zip(group.completions, heard, strict=True)
        )
        claimed.append(replace(group, completions=completions))
    return tuple(claimed)


def _stopped(one: Completion) -> Completion:
    """End a completion with its first turn."""
    if not one.turns:
        return one
    after = one.turns[0].after
    chunks = -(-after // 32)
    return replace(one, tokens=one.tokens[:after], proof=one.proof[: chunks * 126], turns=())


class _Swap:
    """Goes on with older weights after some steps."""

    def __init__(self, model: TransformerModel, after: int) -> None:
        self._stale = copy.deepcopy(model)
        rng = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weights in self._stale.parameters():
                noise = torch.randn(weights.shape, generator=rng).to(weights.dtype)
                weights.mul_(1 + 0.01 * noise)
        self._after = after

    def __call__(self, sampler: Any, step: int) -> None:
        if step == self._after:
            sampler._model = self._stale
