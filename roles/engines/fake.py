"""An engine for simulations that only pretends to compute: no process, no torch, no numpy.

Theory of operation
-------------------
Every output is a function of the inputs. A policy is a real safetensors file: bf16 noise of
which each step moves one value in 64 by one ulp (so that deltas are as small as real ones), and
a few scalars, among them ``skill``, the probability of a right answer. A completion is a
function of (policy digest, prompt, seed), a proof one of (lineage, step, tokens): a fake scorer
therefore recomputes both exactly. Honest work gives clean evidence; each cheat gives the kind
of evidence that the real instruments give:

- greedy tokens sold as drawn: a good proof, but tokens that the seeds do not give;
- an older policy: mantissa errors that grow with its age, and wrong draws;
- other weights, or a proof over other tokens: exponent mismatches.

Skill rises with every step. Time is the modelled cost of `DeviceProfile`, spent through the
world as blocking work that does nothing but have a name (`ACTIVITIES`): who simulates may keep
time by it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from random import Random
from typing import Final

from p2p.errors import BadMessage
from p2p.world import World
from proofs.checks import LADDER, Evidence
from roles.engines.base import (
    Answers,
    Completion,
    EngineError,
    Group,
    GroupTask,
    Row,
    Sampling,
    Scored,
    StepReport,
    TrainingGroup,
    check_numbers,
    previous_generation,
)
from roles.engines.config import EngineConfig
from roles.envs.base import TeachingEnvironment, open_teaching
from roles.models import safetensors
from roles.models.safetensors import RawTensor

_CHANGED_ONE_IN: Final = 64
"""One bf16 value in this many moves at each step; real policies at lr 1e-6: 1.3 to 1.8 in
100."""
_PROOF: Final = struct.Struct(">4sI16s")
"""Fields of a proof: lineage, step, digest of the tokens."""
_FOREIGN_DRAW: Final = 0.5
"""Draw distance that is reported for a token that the seed does not give."""
_OTHER_WEIGHTS: Final = 60
"""Exponent mismatches, of 128, that other weights show: far beyond any limit, as in reality."""
_LINEAGE_RANGE: Final = 1 << 24
"""Number of lineages. Scalars are stored as F32, which holds integers exactly up to this."""


@dataclass(frozen=True, slots=True)
class FakePolicy:
    """Content of a weights file of this engine."""

    noise: bytes
    lineage: int
    """Number that stays the same along one training run."""
    step: int
    skill: float

    def encode(self) -> bytes:
        """Return the policy as a safetensors file."""
        scalars = struct.pack("<3f", self.lineage, self.step, self.skill)
        return safetensors.encode(
            {
                "fake.noise": RawTensor("BF16", (len(self.noise) // 2,), self.noise),
                "fake.scalars": RawTensor("F32", (3,), scalars),
            }
        )


def decode_policy(data: bytes) -> FakePolicy:
    """Decode the output of `FakePolicy.encode`. Raises `EngineError` on anything else."""
    try:
        tensors = safetensors.decode_untrusted(data)
    except BadMessage as error:
        raise EngineError(f"not a weights file: {error}") from error
    scalars, noise = tensors.get("fake.scalars"), tensors.get("fake.noise")
    if scalars is None or noise is None or len(scalars.data) != 12:
        raise EngineError("these weights are not the fake engine's")
    lineage, step, skill = struct.unpack("<3f", scalars.data)
    return FakePolicy(bytes(noise.data), int(lineage), int(step), skill)


def first_policy(config: EngineConfig) -> FakePolicy:
    """Return the policy that a learner with this configuration starts from."""
    rng = Random(f"fake policy {config.seed}")
    profile = config.profile
    return FakePolicy(
        rng.randbytes(profile.policy_bytes & ~1),
        rng.randrange(_LINEAGE_RANGE),
        0,
        _as_stored(profile.start_skill),
    )


def _as_stored(number: float) -> float:
    """Return ``number`` rounded as in a file, so that a resumed run equals an uninterrupted
    one."""
    value: float = struct.unpack("<f", struct.pack("<f", number))[0]
    return value


def next_policy(
    policy: FakePolicy, learning: float, groups: Sequence[TrainingGroup]
) -> FakePolicy:
    """Return the policy after one optimiser step. Other groups, or another order, give another
    policy."""
    rng = Random(f"{policy.lineage} {policy.step} {groups}")
    noise = bytearray(policy.noise)
    for _ in range(len(noise) // 2 // _CHANGED_ONE_IN):
        at = 2 * rng.randrange(len(noise) // 2)
        noise[at] = (noise[at] + rng.choice((1, 255))) % 256
    skill = _as_stored(policy.skill + learning * (1 - policy.skill))
    return replace(policy, noise=bytes(noise), step=policy.step + 1, skill=skill)


class FakeEngine:
    """Generator, scorer and learner of a simulated node."""

    def __init__(self, world: World, config: EngineConfig) -> None:
        self._world = world
        self._config = config
        self._environment = open_teaching(config.environment)
        self._loaded: tuple[bytes, FakePolicy] | None = None
        self._under_way: list[list[Group]] = []
        self._learning: FakePolicy | None = None

    @property
    def warning(self) -> str:
        """Empty: this learner waits for nobody."""
        return ""

    @property
    def writes_waiting(self) -> int:
        """Always 0: there is no process to write for."""
        return 0

    async def load(self, weights: str) -> None:
        if self._under_way:
            raise EngineError("groups are under way, and would be written by two policies")
        data = await self._world.disk.read(weights)
        policy = decode_policy(data)
        await self._spend(loading, self._config.profile.load_seconds)
        self._loaded = hashlib.sha256(data).digest(), policy

    @property
    def has_room(self) -> bool:
        """True if more groups may be submitted. The engine's speed is that of a full device, so
        there is seldom room beside what is under way."""
        if len(self._under_way) > 1:
            return False
        return not self._under_way or self._world.buggify("fake/has room")

    async def submit(self, tasks: Sequence[GroupTask], sampling: Sampling) -> None:
        digest, policy = self._policy()
        begun = (group.group for batch in self._under_way for group in batch)
        check_numbers(tasks, set(begun))
        groups = [_group(self._environment, digest, policy, task, sampling) for task in tasks]
        if groups:
            self._under_way.append(groups)

    async def advance(self) -> list[Group]:
        """Return all groups that were submitted together."""
        if not self._under_way:
            return []
        groups = self._under_way[0]
        await self._spend(generating, _tokens(groups) / self._config.profile.generate_rate)
        del self._under_way[0]
        if self._under_way and self._world.buggify("fake/long answer"):
            self._under_way[0] = [groups.pop(), *self._under_way[0]]
        return groups

    @property
    def waiting(self) -> Sequence[Row]:
        """Always empty, since the engine draws one turn only."""
        return ()

    async def hear(self, answers: Sequence[Row]) -> None:
        raise EngineError("the engine fake draws completions of one turn only")

    async def drop(self) -> None:
        self._under_way.clear()

    async def score(
        self, tasks: Sequence[GroupTask], groups: Sequence[Group], sampling: Sampling
    ) -> list[Scored]:
        digest, policy = self._policy()
        honest = [_group(self._environment, digest, policy, task, sampling) for task in tasks]
        await self._spend(scoring, _tokens(groups) / self._config.profile.score_rate)
        return [
            Scored(_evidence(policy, ours, theirs), _packed_logprobs(digest, theirs))
            for ours, theirs in zip(honest, groups, strict=True)
        ]

    async def open(self, checkpoint: str, base: str = "") -> int:
        disk, damage = self._world.disk, []
        for path in (checkpoint, previous_generation(checkpoint)):
            if await disk.size(path) is not None:
                await self._spend(loading, self._config.profile.load_seconds)
                try:
                    self._learning = decode_policy(_opened_seal(await disk.read(path)))
                except EngineError as error:
                    damage.append(f"the checkpoint {path} is damaged: {error}")
                else:
                    return self._learning.step
        if damage:
            raise EngineError(
                f"{'; '.join(damage)}; to begin again from the warm-up, remove what is damaged"
            )
        await self._spend(loading, self._config.profile.open_seconds)
        self._learning = first_policy(self._config)
        return self._learning.step

    async def adopt(self, weights: str, step: int, base: str = "") -> float:
        policy = decode_policy(await self._world.disk.read(weights))
        await self._spend(loading, self._config.profile.load_seconds)
        if policy.step != step:
            raise EngineError(f"the weights {weights} are of step {policy.step}, not {step}")
        self._learning = policy
        return 0.0

    async def step(self, groups: Sequence[TrainingGroup]) -> StepReport:
        policy = self._learner()
        tokens = sum(len(one.tokens) for group in groups for one in group.completions)
        await self._spend(training, self._config.profile.step_seconds)
        self._learning = next_policy(policy, self._config.profile.learning, groups)
        return StepReport(
            step=self._learning.step, loss=0.0, k3=0.0, ratio_max=1.0, clipped=0.0, capped=0.0,
            entropy=1 - policy.skill, gradient_norm=1.0, tokens=tokens,
            changed=1 / _CHANGED_ONE_IN,
        )  # fmt: skip

    async def save(self, checkpoint: str, weights: str) -> None:
        data, disk = self._learner().encode(), self._world.disk
        await self._spend(saving, self._config.profile.load_seconds)
        if weights:
            await disk.replace(weights, data)
        if checkpoint:
            if await disk.size(checkpoint) is not None:
                await disk.rename(checkpoint, previous_generation(checkpoint))
            await disk.replace(checkpoint, hashlib.sha256(data).digest() + data)

    async def answer(self, tasks: Sequence[GroupTask], sampling: Sampling) -> list[Answers]:
        policy = self._learner()
        digest = hashlib.sha256(policy.encode()).digest()
        groups = [_group(self._environment, digest, policy, task, sampling) for task in tasks]
        return [tuple(one.tokens for one in group.completions) for group in groups]

    async def _spend(self, activity: Callable[[], None], seconds: float) -> None:
        await self._world.run_blocking(activity, cost=seconds)

    def _policy(self) -> tuple[bytes, FakePolicy]:
        if self._loaded is None:
            raise EngineError("no weights were loaded")
        return self._loaded

    def _learner(self) -> FakePolicy:
        if self._learning is None:
            raise EngineError("the learner was not opened")
        return self._learning


def _opened_seal(sealed: bytes) -> bytes:
    """Return the content behind the SHA-256 in ``sealed``. Raises `EngineError` if a bit of it
    has changed."""
    if hashlib.sha256(sealed[32:]).digest() != sealed[:32]:
        raise EngineError("its content does not have the digest that it was written with")
    return sealed[32:]


def generating() -> None:
    """Name the time of decoding; does nothing."""


def scoring() -> None:
    """Name the time of replaying completions; does nothing."""


def training() -> None:
    """Name the time of an optimiser step; does nothing."""


def loading() -> None:
    """Name the time of loading weights from the disk into the devices; does nothing."""


def saving() -> None:
    """Name the time of saving weights from the devices to the disk; does nothing."""


ACTIVITIES: Final = (generating, scoring, training, loading, saving)
"""All functions that this engine passes to `World.run_blocking`."""


def _tokens(groups: Sequence[Group]) -> int:
    return sum(len(one.tokens) for group in groups for one in group.completions)


def _group(
    environment: TeachingEnvironment,
    digest: bytes,
    policy: FakePolicy,
    task: GroupTask,
    sampling: Sampling,
) -> Group:
    """Return the honest completions of a task under a policy."""
    solution = environment.solution(task.prompt)
    greedy = sampling.temperature == 0
    prompt = struct.pack(f">{len(task.prompt)}I", *task.prompt)
    completions = []
    for seed in task.seeds:
        coin = hashlib.sha256(digest + prompt + (b"greedy" if greedy else seed)).digest()
        tokens = _answer(solution, policy.skill, coin)[: sampling.max_new_tokens]
        proof = _proof(policy, tokens)
        completions.append(Completion(tokens, _logprobs(digest, tokens), proof))
    return Group(task.group, tuple(completions))


def _answer(solution: tuple[int, ...], skill: float, coin: bytes) -> tuple[int, ...]:
    """Return the solution with probability ``skill``, else an answer that lacks a token."""
    if int.from_bytes(coin[:8], "big") < skill * 2.0**64 or len(solution) < 2:
        return solution
    missing = int.from_bytes(coin[8:12], "big") % (len(solution) - 1)
    return solution[:missing] + solution[missing + 1 :]


def _logprobs(digest: bytes, tokens: tuple[int, ...]) -> tuple[float, ...]:
    """Return made-up log-probs, which any holder of the policy can recompute for any tokens."""
    stream = hashlib.shake_128(digest + repr(tokens).encode()).digest(len(tokens))
    return tuple(-byte / 256 for byte in stream)


def _proof(policy: FakePolicy, tokens: tuple[int, ...]) -> bytes:
    lineage = policy.lineage.to_bytes(4, "big")
    return _PROOF.pack(
        lineage, policy.step, hashlib.sha256(repr(tokens).encode()).digest()[:16]
    )


def _packed_logprobs(digest: bytes, group: Group) -> bytes:
    """Return the log-probs of a group in the form that `Scored` carries."""
    values = [value for one in group.completions for value in _logprobs(digest, one.tokens)]
    return struct.pack(f"<{len(values)}e", *values)


def _evidence(policy: FakePolicy, honest: Group, claimed: Group) -> Evidence:
    """Return the evidence that the real instruments would give about ``claimed``."""
    pairs = list(zip_longest(honest.completions, claimed.completions))
    mismatches = sum(
        ours != theirs
        for mine, other in pairs
        for ours, theirs in zip_longest(
            mine.tokens if mine else (), other.tokens if other else ()
        )
    )
    malformed, exponents, mantissa = _activations(policy, claimed)
    return Evidence(
        tokens=_tokens([claimed]),
        malformed=malformed,
        exponent_mismatches=exponents,
        mantissa_mean=mantissa,
        mantissa_median=round(mantissa),
        draw_distance=_FOREIGN_DRAW if mismatches else 0.0,
        off=(mismatches,) * len(LADDER),
        gap_mean=0.0,
        gap_max=0.0,
        end_probability=1.0,
        surprise=0.0,
        mantissa_worst=mantissa,
        chunks=1.0,
    )


def _activations(policy: FakePolicy, claimed: Group) -> tuple[str, int, float]:
    """Return (why malformed, exponent mismatches, mean mantissa error) of the worst proof in a
    group."""
    age = 0
    for one in claimed.completions:
        if len(one.proof) != _PROOF.size:
            return f"a proof is {_PROOF.size} bytes, not {len(one.proof)}", 0, 0.0
        lineage, step, tokens = _PROOF.unpack(one.proof)
        right = _PROOF.unpack(_proof(policy, one.tokens))
        if (lineage, tokens) != (right[0], right[2]):
            return "", _OTHER_WEIGHTS, 30.0
        age = max(age, abs(step - policy.step))
    return "", 0, float(age)
