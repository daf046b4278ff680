"""Dishonest inference nodes, to show that they are caught: ``--role roles.demo.cheats:Cheat``.

They follow the protocol in everything but the work itself: tasks, seeds, slots and signatures
are right, so only the proofs can tell. Ways: *greedy* answers with the most probable tokens
(better paid than honest sampling); *stale* runs older weights than it claims (saves every
download); *int8* runs rounded weights (half the memory); *warm* draws at a lower temperature
(better paid); *redrawn* draws with seeds of its own (what best of n comes to).

Late in a run the policy is so sure that such work is often just what honest work would have
been: a greedy submission then differs from the seeded draw in 1 token of 1,000, which is within
the tolerance of the run, and is rightly accepted. That is no cheat, and a show of cheats that
are caught must not hand it in. So each submission is replayed first as a validator would, and
held against the run's own limits; where it might pass, another way to cheat is tried.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import ClassVar, Final

from p2p.shardcast.manifest import NO_POLICY, PolicyVersion
from proofs.checks import MAX_LIMIT, Evidence, Limits, Verdict, judge, judge_pool
from roles.calibrate.weights import round_policy
from roles.engines.base import EngineError, Group, GroupTask, Sampling, draw_all
from roles.inference.places import OpenPlace
from roles.inference.role import Inference
from roles.inference.session import InferenceSession
from roles.protocol.core.assignment import run_sampling

WAYS: Final = ("greedy", "stale", "int8", "warm", "redrawn")
MARGIN: Final = 2
"""By how much the evidence must exceed each limit: the validator's own replay may differ from
ours by honest noise, which the limits leave room for once (`proofs.checks.Limits`), so that
twice them is past doubt."""
WARMTH: Final = 0.9
"""Temperature of the cheat ``warm``; a run's recipe has 1."""
ROUNDED: Final = "cheat/int8"
"""Path of the weights rounded to eight bits, of one policy at a time."""
HEATS: Final = (4.0, 16.0, 64.0)
"""Temperatures of the last resort. A token that a policy draws with probability 1 - 1e-6 at
temperature 1 it draws, among 50 tokens, with 0.63 at 4 and with 0.06 at 16: of the 1,000 tokens
of a submission hundreds are not those that the seeds give."""

Weights = tuple[PolicyVersion, bool]
"""Version of a policy, and True if its weights are rounded to eight bits."""
Attempt = tuple[Weights, Sequence[GroupTask], Sampling]


class CheatSession(InferenceSession):
    """Claims the newest policy, and draws otherwise than the run prescribes."""

    turn = WAYS[-1]
    """The way of this submission, if it works."""
    in_engine: Weights = NO_POLICY, False
    """The weights in the engine, which are not always those claimed."""

    async def load_newest(self) -> PolicyVersion:
        """Claim the newest version, and begin the next turn."""
        newest = await self.node.shardcast.wait_policy(self.loaded)
        self.turn = WAYS[(WAYS.index(self.turn) + 1) % len(WAYS)]
        policy = self.node.shardcast.manifest(newest).weights_digest
        await self._load((newest, False))
        self.claim(newest, policy)
        return newest

    async def begin(self, place: OpenPlace) -> None:
        """Fill the place at once with the first cheat whose work the run's limits must reject.

        Then rest half as long, since every cheat costs the validator a replay. Raises
        `EngineError` if no cheat would be rejected, so that no honest work is handed in.
        """
        world = self.node.world
        began = world.now()
        place.ended |= {group.group: group for group in await self.draw(place.tasks)}
        await world.sleep((world.now() - began) / 2)

    async def draw(self, tasks: Sequence[GroupTask]) -> list[Group]:
        """Return work that the run's limits must reject."""
        honest, claimed = run_sampling(self.run), (self.loaded, False)
        shardcast = self.node.shardcast
        with ExitStack() as pins:  # both policies are loaded by turns: neither may be dropped
            older = next((held for held in shardcast.held if held < self.loaded), None)
            if not shardcast.holds(self.loaded):
                older = None
            if older is not None:
                pins.enter_context(shardcast.pin(older))
                pins.enter_context(shardcast.pin(self.loaded))
            for weights, others, sampling in self._attempts(older, tasks, honest):
                await self._load(weights)
                groups = await draw_all(self.engine, others, sampling)
                await self._load(claimed)
                scored = await self.engine.score(tasks, groups, honest)
                if must_fail([one.evidence for one in scored], self.run.terms.limits):
                    return groups
        raise EngineError("no way to cheat was found that the run's limits must reject")

    def _attempts(
        self, older: PolicyVersion | None, tasks: Sequence[GroupTask], honest: Sampling
    ) -> Iterator[Attempt]:
        """Yield this turn's own way to cheat, then the others, then high temperatures, which
        cannot pass."""
        mine = self.loaded, False
        redrawn = [replace(task, seeds=tuple(map(_other_seed, task.seeds))) for task in tasks]
        made: dict[str, Attempt] = {
            "greedy": (mine, tasks, replace(honest, temperature=0.0)),
            "warm": (mine, tasks, replace(honest, temperature=WARMTH)),
            "redrawn": (mine, redrawn, honest),
        }
        if older is not None:
            made["stale"] = (older, False), tasks, honest
        if self.run.terms.model.engine != "fake":  # whose policies are no weights
            made["int8"] = (self.loaded, True), tasks, honest
        first = WAYS.index(self.turn)
        yield from (made[way] for way in WAYS[first:] + WAYS[:first] if way in made)
        for heat in HEATS:
            yield mine, redrawn, replace(honest, temperature=heat)

    def forget_policy(self) -> None:
        """Note that the engine holds no policy any more."""
        super().forget_policy()
        self.in_engine = NO_POLICY, False

    async def _load(self, weights: Weights) -> None:
        if weights == self.in_engine:
            return
        version, is_rounded = weights
        with self.node.shardcast.pin(version) as path:
            await self.engine.load(await self._rounded(path) if is_rounded else path)
        self.in_engine = weights

    async def _rounded(self, path: str) -> str:
        """Return the path of a copy of the weights, rounded to eight bits."""
        disk = self.node.world.disk
        await disk.remove(ROUNDED)
        source, target = disk.locate(path), disk.locate(ROUNDED)
        await self.node.world.run_blocking(round_policy, source, target, cost=0.0)
        return ROUNDED


def _other_seed(seed: bytes) -> bytes:
    """Return a seed other than ``seed``, which the run prescribes."""
    return hashlib.sha256(b"cheat" + seed).digest()[: len(seed)]


def must_fail(pool: Sequence[Evidence], limits: Limits) -> bool:
    """Return True if limits `MARGIN` times as wide would reject this submission, as a validator
    judges it."""
    names = set(limits.__slots__) - {"off", "end_probability"}
    wide = replace(
        limits,
        off=tuple((step, min(MARGIN * share, 1.0)) for step, share in limits.off),
        end_probability=limits.end_probability / MARGIN,
        **{name: min(MARGIN * getattr(limits, name), MAX_LIMIT) for name in names},
    )
    verdicts = [judge(evidence, wide).verdict for evidence in pool]
    return Verdict.REJECTED in (*verdicts, judge_pool(pool, wide).verdict)


class Cheat(Inference):
    """An inference node that does other work than it claims."""

    name: ClassVar[str] = "cheat"
    session_type = CheatSession
